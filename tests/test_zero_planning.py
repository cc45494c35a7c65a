"""The planner divides parameters over replicas as far as memory asks for it, and prices what that exchanges."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest

from autopart.analysis import Analysis, analyze
from autopart.candidates import Candidates
from autopart.cli.arguments import zero_level
from autopart.cost.communication import collective_seconds
from autopart.cost.compute import copy_seconds
from autopart.models import load_model
from autopart.plan import Plan
from autopart.planner import make_plan
from autopart.realize import realize
from autopart.runtime.errors import InfeasibleError, PlanError
from autopart.solver.degrees import Degrees
from autopart.tracing import capture
from clusters import ideal
from families import family

pytestmark = pytest.mark.usefixtures("no_messages")
OVERHEAD = 2 * 2**30
DEVICE = ideal(4).nodes[0].device
LIMITS: dict[str, Any] = {"pp": 1, "dp": 4, "tp": 1, "microbatches": 2, "recompute": "none", "batch": 8}


@functools.lru_cache(maxsize=1)
def analysis() -> Analysis:
    item = family("gpt2")
    return analyze(capture(item.build(), (), item.inputs(8), check_eval=False))


def plan(memory: float = 2**40, of: Analysis | None = None, **limits: Any) -> Plan:
    """On four devices with so many bytes besides the fixed overhead."""
    cluster, of = ideal(4, bandwidth=1e8, memory_bytes=OVERHEAD + int(memory)), of or analysis()
    return make_plan(of.program, cluster, analysis=of, **{**LIMITS, **limits})


def needed(found: Plan) -> int:
    return found.stages[0].memory_bytes - OVERHEAD


def test_levels_hold_less_and_exchange_more() -> None:
    found = [plan(zero=level) for level in range(4)]
    names = {info.name for info in analysis().program.parameters}
    for level, one in enumerate(found):
        assert set(one.zero.values()) == ({level} if level else set())
        assert set(realize(analysis().program, one, analysis()).manifest.parameter_order) == names
    memory = list(map(needed, found))
    assert memory[0] > memory[1] > memory[2]
    assert memory[2] > memory[3] or memory[1] > memory[3]  # whole layers for a while weigh much in a tiny model
    state = 8 * analysis().program.parameter_count
    assert memory[0] - memory[1] == pytest.approx(2 * state * 3 / 4, rel=1e-3)
    assert memory[1] - memory[2] == pytest.approx(state * 3 / 4, rel=1e-3)
    assert found[3].step_time_s > found[2].step_time_s > found[0].step_time_s
    assert found[3].stages[0].parameters * 4 == found[0].stages[0].parameters
    assert found[3].stages[0].step_collectives == {}


@pytest.mark.parametrize("level", [2, 3])
def test_exchanges_are_priced_as_often_as_they_are_counted(level: int) -> None:
    """Also of the table that embeds tokens and makes logits, which level 3 gathers at both ends."""
    (whole,), (divided,) = (plan(zero=zero, microbatches=1).stages for zero in (0, level))
    link = ideal(4, bandwidth=1e8).group_link(range(4))
    exchanged = sum(
        count["calls"] * collective_seconds(kind, count["bytes"] / count["calls"], 4, link)
        for kind, count in divided.collectives.items()
    )
    longer = divided.forward_s + divided.backward_s - whole.forward_s - whole.backward_s
    # of one microbatch sums are left aside; what is gathered is written and read
    longer -= copy_seconds(DEVICE, 2 * divided.collectives.get("all_gather", {"bytes": 0})["bytes"] * 3 / 4)
    hidden = divided.hidden_s.get("dp", 0.0)
    assert longer + hidden == pytest.approx(exchanged)
    assert 0 <= hidden < exchanged and (hidden > 0) == (level == 3)  # level 2's one message is full at the end


def test_nothing_is_divided_where_it_fits_whole() -> None:
    assert not plan().zero
    assert not plan(needed(plan()) + 1).zero


def test_a_plan_says_what_divided_state_would_gain() -> None:
    """Updates take long here and messages do not, so that each replica had better update a part."""
    cluster = ideal(4, bandwidth=1e12, memory_bandwidth=1e9, memory_bytes=2**40)
    whole, divided = (
        make_plan(analysis().program, cluster, analysis=analysis(), zero=level, **LIMITS) for level in (None, 1)
    )
    (told,) = (note for note in whole.notes if "zero=1" in note)
    assert not whole.zero and divided.step_time_s < 0.9 * whole.step_time_s
    found = re.search(r"would take ([0-9.]+) ms instead of ([0-9.]+) ms", told)
    assert found and float(found[1]) == pytest.approx(1e3 * divided.step_time_s, rel=0.01)
    assert float(found[2]) == pytest.approx(1e3 * whole.step_time_s, rel=0.01)
    forced = make_plan(analysis().program, cluster, analysis=analysis(), zero=0, **LIMITS)
    assert not any("zero=1" in note for note in (*forced.notes, *divided.notes))


def test_a_plan_says_what_exchange_beside_ops_would_gain() -> None:
    """An all-reduce passes beside the backward alone; gathers of level 3 pass beside the forward too."""
    cluster = ideal(4, bandwidth=1e9, memory_bandwidth=1e11, memory_bytes=2**40)
    limits = {**LIMITS, "microbatches": 1}
    plans = [make_plan(analysis().program, cluster, analysis=analysis(), zero=level, **limits) for level in range(4)]
    whole = make_plan(analysis().program, cluster, analysis=analysis(), **limits)
    seconds = [found.step_time_s for found in plans]
    (told,) = (note for note in whole.notes if "(zero=3)" in note)
    assert seconds[3] < 0.91 * min(seconds[:3]) and not whole.zero
    found = re.search(r"would take ([0-9.]+) ms instead of ([0-9.]+) ms", told)
    assert found and float(found[1]) == pytest.approx(1e3 * seconds[3], rel=0.01)
    assert float(found[2]) == pytest.approx(1e3 * whole.step_time_s, rel=0.01)


def test_as_little_is_divided_as_memory_asks_for() -> None:
    forced = [plan(zero=level) for level in range(4)]
    for share in (0.99, 0.8, 0.6):
        memory = share * needed(forced[0])
        found = plan(memory)
        assert found.zero and needed(found) <= memory
        assert found.bound_s <= found.step_time_s
        fitting = [one for one in forced if needed(one) <= memory]
        # mixed levels are no slower than any one level for all
        assert all(found.step_time_s <= one.step_time_s * (1 + 1e-9) for one in fitting)
    with pytest.raises(InfeasibleError):
        plan(0.6 * needed(forced[0]), zero=0)


def test_weights_are_divided_where_they_do_not_fit_whole() -> None:
    """Memory for less than weights, gradients and optimizer state of level 2, of layers that are small beside all."""
    loaded = load_model("hf:gpt2?n_layer=16&n_embd=32&n_head=2&vocab_size=96&n_positions=32&seq=32", meta=True)
    deep = analyze(capture(loaded.model, loaded.args, loaded.kwargs, check_eval=False))
    forced = [plan(of=deep, zero=level) for level in (2, 3)]
    memory = (needed(forced[0]) + needed(forced[1])) / 2
    found = plan(memory, of=deep)
    assert 3 in found.zero.values() and needed(forced[1]) <= needed(found) <= memory


@pytest.mark.slow
def test_tensor_axes_and_levels_are_chosen_together() -> None:
    roomy = plan(dp=2, tp=2)
    tight = plan(0.75 * needed(roomy), dp=2, tp=2)
    assert not roomy.zero and tight.zero
    assert needed(tight) <= 0.75 * needed(roomy)


def test_levels_that_do_not_exist_are_refused() -> None:
    with pytest.raises(PlanError, match="zero is one of 0, 1, 2, 3 or None"):
        plan(zero=4)
    assert [zero_level(text) for text in ("0", "3", "auto")] == [0, 3, None]


def test_what_runs_again_hides_what_replicas_exchange() -> None:
    """Candidates are compared by about what their plans take: an exchange passes beside the forward that runs again."""
    model = load_model("hf:gpt2?n_layer=24&n_embd=64&n_head=4&vocab_size=96&n_positions=64&seq=64", meta=True)
    deep = analyze(capture(model.model, model.args, model.kwargs, check_eval=False))
    limits: dict[str, Any] = {"pp": 1, "dp": 4, "tp": 1, "microbatches": 1, "recompute": "full", "zero": 3}
    for bandwidth in (6e6, 1e7, 1.5e7):  # what is exchanged takes longer than the backward, about as long, less
        cluster = ideal(4, bandwidth=bandwidth)
        found = Candidates(deep, cluster, 32, "adamw", zero=3).evaluate(Degrees(1, 4, (), 1, "1f1b", "full"))
        timed = make_plan(deep.program, cluster, analysis=deep, batch=32, **limits).step_time_s
        assert found.objective == pytest.approx(timed, rel=0.05)
