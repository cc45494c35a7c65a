"""GPUs that wait for their host: a stage takes no less than the host takes to start its kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autopart.analysis import Analysis, analyze
from autopart.cluster import Cluster, Node
from autopart.cost.devices import device
from autopart.host_starts import HostStarts
from autopart.models import load_model
from autopart.plan import Plan
from autopart.planner import make_plan
from autopart.prices import Prices
from autopart.solver.search_outcomes import WORTH
from autopart.tracing import capture

MODEL = "hf:gpt2?n_layer=4&n_embd=64&n_head=4&vocab_size=512&n_positions=64&seq=64&batch=16"


@pytest.fixture(scope="module")
def analysis() -> Analysis:
    loaded = load_model(MODEL, meta=True)
    return analyze(capture(loaded.model, loaded.args, loaded.kwargs))


def plan_of(analysis: Analysis, host_s: float, count: int = 1, **limits: Any) -> Plan:
    node = Node.of(replace(device("A100-80GB"), host_s=host_s), count)
    return make_plan(analysis.program, Cluster((node,)), analysis=analysis, **limits)


def kernels(analysis: Analysis) -> tuple[int, int]:
    costs = analysis.costs("cuda")
    found = [costs[analysis.first.get(node, node)] for node in (*analysis.free_block, *analysis.block_of)]
    return sum(cost.kernels_forward for cost in found), sum(cost.kernels_backward for cost in found)


def test_a_stage_takes_as_long_as_its_host(analysis: Analysis) -> None:
    forward, backward = kernels(analysis)
    assert 60 < forward < backward < 300
    fast, slow = (plan_of(analysis, host_s, microbatches=2) for host_s in (0.0, 1e-3))
    assert fast.stages[0].forward_s < 0.1 * forward * 1e-3
    assert slow.stages[0].forward_s == pytest.approx(forward * 1e-3)
    assert slow.stages[0].backward_s == pytest.approx(backward * 1e-3, rel=0.1)  # of ops that are differentiated
    assert slow.step_time_s == pytest.approx(2 * (slow.stages[0].forward_s + slow.stages[0].backward_s), rel=0.01)
    assert slow.gap < 0.05
    assert not any("wait for their hosts" in note for note in fast.notes)
    (told,) = (note for note in slow.notes if "wait for their hosts" in note)
    assert "GPUs of the stage" in told and "the 1 ms of one" in told


@pytest.mark.parametrize("pp", [2, 3, 4])
def test_what_every_stage_computes_for_itself_is_started_on_each(pp: int, analysis: Analysis) -> None:
    """What is priced by blocks is what the stages' graphs have, such as a mask of padding for each."""
    prices = Prices(device("A100-80GB"), analysis.costs("cuda"), 16, analysis.first)
    starts = HostStarts.made(analysis, prices.kernels, 1e-3)
    plan = plan_of(analysis, 1e-3, pp, pp=pp, dp=1, tp=1, microbatches=4)  # of one no stage needs to have much
    found = [starts.of(range(*stage.blocks)) for stage in plan.stages]
    for stage, seconds in zip(plan.stages, found, strict=True):
        assert (stage.forward_s, stage.backward_s) == pytest.approx(seconds)
    whole = starts.of(range(len(analysis.blocks)))
    assert sum(forward for forward, _ in found) > whole[0] + 1e-3 * (pp - 1)
    assert sum(backward for _, backward in found) == pytest.approx(whole[1])


def test_what_runs_again_is_started_again(analysis: Analysis) -> None:
    kept, again = (plan_of(analysis, 1e-3, microbatches=1, recompute=how) for how in ("none", "full"))
    assert again.stages[0].backward_s > kept.stages[0].backward_s + 0.6 * kept.stages[0].forward_s


def test_fewer_microbatches_are_chosen_where_the_host_is_slow(analysis: Analysis) -> None:
    """On several GPUs a pipeline's pieces cost the host as much as the whole."""
    fast, slow = (plan_of(analysis, host_s, 2, dp=1, tp=1, pp=2) for host_s in (0.0, 1e-3))
    assert slow.microbatches <= fast.microbatches
    one = plan_of(analysis, 1e-3, 2, dp=1, tp=1, pp=2, microbatches=1)
    assert slow.step_time_s <= one.step_time_s * (1 + 1e-9)
    half = sum(kernels(analysis)) * 1e-3 / 2
    assert (1 - slow.gap) * slow.step_time_s >= slow.microbatches * half * 0.9


def test_where_hosts_bind_little_is_searched(analysis: Analysis) -> None:
    """All configurations of one microbatch are bounded by the same seconds, and the plan is near these."""
    plan = plan_of(analysis, 1e-3, 8)
    assert plan.gap < WORTH
    evaluated = [row for row in plan.considered if row["status"] != "untried" and row["status"] != "pruned"]
    assert len(evaluated) <= 2 < sum(row["status"] == "untried" for row in plan.considered)
    assert any("not tried, as it cannot take much less" in row["reason"] for row in plan.considered)
    thorough = plan_of(analysis, 1e-3, 8, thorough=True)
    assert thorough.step_time_s <= plan.step_time_s <= (1 + WORTH) * thorough.step_time_s
    assert not any(row["status"] == "untried" for row in thorough.considered)


@pytest.mark.slow
def test_ranks_on_an_axis_do_not_shorten_the_end_at_any_price() -> None:
    """A node's ranks share what the other node repeats, not all that a step ends with over the slow network."""
    loaded = load_model(
        "hf:llama?num_hidden_layers=2&hidden_size=256&intermediate_size=704&num_attention_heads=4&vocab_size=2000&seq=128"
    )
    llama = analyze(capture(loaded.model, loaded.args, loaded.kwargs, check_eval=False))
    limits: dict[str, Any] = {"batch": 16, "pp": 1, "dp": 1, "microbatches": 1, "analysis": llama}
    one = make_plan(llama.program, Cluster.parse("2xRTX-3090"), tp=2, **limits)
    two = make_plan(llama.program, Cluster.parse("2x2xRTX-3090"), tp=(2, 2), **limits)
    assert two.step_time_s <= one.step_time_s
