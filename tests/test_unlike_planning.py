"""Plans whose stages have unlike meshes: what is chosen, what it is said to cost, and that it trains as one process."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import autopart.verify
import explained
from autopart.analysis import Analysis, analyze
from autopart.candidates import Candidates
from autopart.cli import main as run
from autopart.cluster import Cluster, Node
from autopart.describe_unlike import describe_unlike
from autopart.frontier import capped
from autopart.mesh_prices import MeshPrices
from autopart.models import load_model
from autopart.plan import Plan
from autopart.planner import make_plan
from autopart.predict import simulate_plan
from autopart.realize import realize
from autopart.report.table import plan_text
from autopart.runtime.errors import InfeasibleError, PlanError, UndividedBatchError
from autopart.solver import stages
from autopart.solver.stages_problem import StageProblem, StageSolution
from autopart.tracing import capture
from autopart.unlike import UnlikeCandidates
from autopart.verify import Subject, compare_emitted, prepare
from clusters import ideal
from families import family
from launch import run_kept_job


@functools.lru_cache(maxsize=2)
def subject_of(name: str) -> tuple[Subject, Analysis]:
    item = family(name)
    subject = prepare(item.build(), (), item.inputs(item.batch))
    return subject, analyze(subject.program)


def plan_of(name: str, cluster: Cluster, **limits: object) -> Plan:
    subject, analysis = subject_of(name)
    return make_plan(subject.program, cluster, analysis=analysis, **{"batch": 8, **limits})  # type: ignore[arg-type]


def unlike(*nodes: tuple[int, float, int]) -> Cluster:
    """Nodes of some devices of a speed (1: that of ``ideal``) and memory; network ports a tenth of the inner links."""
    made = []
    for count, speed, memory in nodes:
        node = ideal(count, bandwidth=1e9, memory_bytes=memory).nodes[0]
        peaks = {name: rate * speed for name, rate in node.device.peak_flops.items()}
        device = replace(
            node.device,
            name=f"ideal-{speed:g}",
            peak_flops=peaks,
            memory_bandwidth=node.device.memory_bandwidth * speed,
        )
        made.append(
            Node(device, count, node.inside, replace(node.port, name=f"port-{count}", bandwidth=1e8 * count), 1)
        )
    return Cluster(tuple(made))


def check_equal(name: str, plan: Plan, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autopart.verify, "run_local_job", run_kept_job)
    subject, analysis = subject_of(name)
    realize(subject.program, plan, analysis).save(folder / "program")
    result = compare_emitted(folder / "program", subject, plan=plan)
    worst = sorted(result.groups, key=lambda group: -max(group.gradient or 0.0, group.parameter))[:3]
    assert result.equal, f"{result.loss_difference=} {worst}"
    assert all(stage.as_planned for stage in result.traffic), result.traffic


@pytest.mark.slow
def test_three_devices_train_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of("gpt2", ideal(3, bandwidth=1e9), pp=2)
    assert sorted(len(stage.devices) for stage in plan.stages) == [1, 2]
    check_equal("gpt2", plan, tmp_path, monkeypatch)


ROOMY = 2**40


def test_a_batch_that_does_not_divide_is_shared_in_whole_rows() -> None:
    plan = plan_of("gpt2", ideal(3, bandwidth=1e9), pp=1, tp=1, microbatches=1)
    assert plan.stages[0].shares == (3, 3, 2) and not plan.is_uniform
    assert "dp 3 (3:3:2)" in plan_text(plan)


@pytest.mark.parametrize(
    ("devices", "limits", "meshes"),
    [
        (4, {"dp": 2, "batch": 5}, [(2, 2, (3, 2))]),
        (4, {"dp": 2, "tp": 2, "batch": 3}, [(2, 2, (2, 1))]),  # fewer samples than devices
        (4, {"pp": 1, "tp": 1, "batch": 6}, [(4, 1, (2, 2, 1, 1))]),
        (4, {"pp": 2, "dp": 2, "batch": 12, "microbatches": 4}, [(2, 1, (2, 1))] * 2),
        (32, {"pp": 1, "dp": 32, "batch": 40}, [(32, 1, (2,) * 8 + (1,) * 24)]),
    ],
)
def test_alike_devices_share_a_batch_that_does_not_divide_by_what_is_forced(
    devices: int, limits: dict[str, object], meshes: list[tuple[int, int, tuple[int, ...]]]
) -> None:
    """As under meshes=unlike, which need not be said; equal meshes have no such plan."""
    plan, same = (plan_of("gpt2", ideal(devices), **limits, meshes=word) for word in ("auto", "unlike"))
    assert [(stage.dp, stage.tp, stage.shares) for stage in plan.stages] == meshes
    assert plan.bound_s <= plan.step_time_s == same.step_time_s
    with pytest.raises(UndividedBatchError, match=f"a batch of {limits['batch']} does not divide by dp="):
        plan_of("gpt2", ideal(devices), **limits, meshes="equal")


def test_replicas_without_a_sample_are_refused() -> None:
    with pytest.raises(UndividedBatchError, match="a batch of 3 does not divide by dp=4"):
        plan_of("gpt2", ideal(4), dp=4, batch=3)


@pytest.mark.parametrize("limits", [{"dp": 2}, pytest.param({"pp": 2, "dp": 2}, marks=pytest.mark.slow)])
def test_a_batch_that_does_not_divide_trains_as_one(
    limits: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of("gpt2", ideal(2 * len(limits)), microbatches=1, **limits, batch=7)
    assert all(stage.shares == (4, 3) for stage in plan.stages)
    check_equal("gpt2", plan, tmp_path, monkeypatch)


def test_microbatches_have_no_more_samples_than_the_graph_holds_for() -> None:
    subject, analysis = subject_of("gpt2")
    fewer = replace(subject.program, most_samples=2)
    analysis = replace(analysis, program=fewer)
    plan = make_plan(fewer, ideal(3, bandwidth=1e9), batch=8, analysis=analysis, meshes="unlike")
    assert plan.microbatches >= 4
    with pytest.raises(PlanError):
        make_plan(fewer, ideal(3, bandwidth=1e9), batch=8, analysis=analysis, meshes="unlike", microbatches=2)


def test_unlike_devices_train_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slow pair's replicas have fewer rows than the fast device, and the fast device comes first."""
    cluster = unlike((2, 1.0, ROOMY), (1, 3.0, ROOMY))
    plan = plan_of("gpt2", cluster, pp=2)
    assert plan.stages[0].devices == (2,), "more work lies before the cut"
    first, second = (len(range(*stage.blocks)) for stage in plan.stages)
    assert first > second
    assert plan.step_time_s < plan_of("gpt2", cluster, meshes="equal").step_time_s
    text = plan_text(plan)
    assert "2 (ideal-3)" in text and "0-1 (ideal-1)" in text
    replicas = plan_of("gpt2", cluster, pp=1, dp=3)
    assert replicas.stages[0].shares[2] > max(replicas.stages[0].shares[:2])
    check_equal("gpt2", replicas, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    "text", [pytest.param("2xA100-40GB+3xRTX-3090@Ethernet-25", marks=pytest.mark.slow), "3xRTX-3090"]
)
def test_configurations_are_compared_by_what_their_plans_take(text: str) -> None:
    """Sums of tied gradients over a slow network among it, which only some devices of a node may use at a time."""
    spec = "hf:gpt2?n_layer=4&n_embd=256&n_head=4&vocab_size=4096&n_positions=128&seq=128"
    loaded = load_model(spec, meta=True)
    analysis = analyze(capture(loaded.model, loaded.args, loaded.kwargs, check_eval=False))
    candidates = Candidates(analysis, Cluster.parse(text), 32, "adamw")
    unlike = UnlikeCandidates(MeshPrices(candidates, None, None))
    configs = unlike.configs(None, None, (("1f1b", 1),), "auto")
    ratios, bounds = [], []
    for config in configs:
        found = unlike.evaluate(config)
        seconds = describe_unlike(unlike, found.answer).step_time_s
        assert found.bound <= seconds * (1 + 1e-9), config
        ratios.append(seconds / found.objective)
        bounds.append(found.bound / seconds)
    assert len(ratios) > 5 and min(ratios) > 0.9 and max(ratios) < 1.1, sorted(ratios)
    assert max(bounds) > 0.8, "the parts of a step that nothing hides count"


def test_memory_limits_each_device_by_its_own() -> None:
    """With less memory on the fast device, blocks move to the slow one; then more on every device would do."""
    roomy = plan_of("gpt2", unlike((1, 3.0, ROOMY), (1, 1.0, ROOMY)), pp=2)
    fast = next(stage for stage in roomy.stages if 0 in stage.devices)
    held = fast.memory_bytes - 2 * 2**30
    tight = plan_of("gpt2", unlike((1, 3.0, 2 * 2**30 + held // 3), (1, 1.0, ROOMY)), pp=2)
    assert all(stage.memory_bytes <= stage.capacity_bytes for stage in tight.stages)
    assert {stage.capacity_bytes for stage in tight.stages} == {2 * 2**30 + held // 3, ROOMY}
    assert tight.step_time_s > roomy.step_time_s
    small = 2 * 2**30 + held // 8, 2 * 2**30 + held // 4
    with pytest.raises(InfeasibleError, match="more on every device would do") as caught:
        plan_of("gpt2", unlike((1, 3.0, small[0]), (1, 1.0, small[1])), pp=2)
    missing = math.ceil(caught.value.excess_bytes or 0)
    enough = plan_of("gpt2", unlike((1, 3.0, small[0] + missing), (1, 1.0, small[1] + missing)), pp=2)
    assert all(stage.memory_bytes <= stage.capacity_bytes for stage in enough.stages)


def test_what_does_not_fit_is_not_tried_again_with_the_same_strategies(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[StageProblem] = []
    solve = stages.solve

    def counted(problem: StageProblem, *limits: float, **others: Any) -> StageSolution:
        tried.append(problem)
        return solve(problem, *limits, **others)

    monkeypatch.setattr(stages, "solve", counted)
    with pytest.raises(InfeasibleError):
        plan_of("gpt2", ideal(3, memory_bytes=2 * 2**30 + 2**16), pp=2, microbatches=2, recompute="none")
    assert 1 < len(tried) < 5
    assert all(any(one.shapes != other.shapes for other in tried[:at]) for at, one in enumerate(tried) if at)


@pytest.mark.slow
def test_a_cluster_file_of_unlike_nodes_is_planned_and_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unlike((2, 1.0, ROOMY), (1, 3.0, ROOMY)).save(tmp_path / "cluster.toml")
    model = "hf:gpt2?n_layer=2&n_embd=64&n_head=4&vocab_size=128&n_positions=32&seq=32&batch=2"
    file, plan = str(tmp_path / "cluster.toml"), str(tmp_path / "plan.json")
    assert run(["plan", model, "--cluster", file, "--batch", "8", "--pp", "2", "-o", plan]) == 0
    assert run(["show", plan]) == 0
    assert run(["explain", plan, "--cluster", file, "--model", model]) == 0
    text = capsys.readouterr().out
    assert "2 (ideal-3)" in text and "dp x tp by stage" in text
    assert "on ideal-" in text.split("pace:")[1].splitlines()[0]


@pytest.mark.parametrize(
    ("devices", "limits"),
    [
        (3, {"pp": 2}),
        (3, {"pp": 2, "schedule": "zb-h1"}),
        (5, {"pp": 3}),
        (6, {"pp": 4}),
        (7, {"pp": 2}),
        (11, {"pp": 3, "microbatches": 1}),
        (4, {"pp": 3, "meshes": "unlike"}),
    ],
)
def test_every_device_is_used(devices: int, limits: dict[str, object]) -> None:
    plan = plan_of("gpt2", ideal(devices, bandwidth=1e9), **{"tp": 1, "recompute": "none", **limits})
    assert sorted(rank for stage in plan.stages for rank in stage.devices) == list(range(devices))
    assert plan.bound_s <= plan.step_time_s and simulate_plan(plan).makespan_s <= plan.step_time_s


def test_meshes_are_equal_where_that_is_asked() -> None:
    with pytest.raises(PlanError, match=r"pp=2.* does not divide 3 devices"):
        plan_of("gpt2", ideal(3), pp=2, meshes="equal")
    with pytest.raises(PlanError, match="meshes=unlike"):
        plan_of("gpt2", ideal(3), tp=(2, 2), meshes="unlike")
    with pytest.raises(PlanError, match="meshes is one of"):
        plan_of("gpt2", ideal(3), meshes="some")


def test_equal_meshes_are_priced_with_the_least_rates_of_any_device() -> None:
    """An A100 has the fewer float32 FLOP/s and the more bandwidth: priced as one, RTX-3090s were said to be as fast."""
    loaded = load_model("hf:gpt2?n_layer=2&n_embd=64&n_head=4&vocab_size=128&seq=32", meta=True, dtype=torch.bfloat16)
    program = capture(loaded.model, loaded.args, loaded.kwargs, check_eval=False)
    cluster, analysis = Cluster.parse("2xA100-40GB+2xRTX-3090"), analyze(program)
    device = Candidates(analysis, cluster, 8, "adamw").device
    fast, slow = (node.device for node in cluster.nodes)
    assert device.peak("bfloat16") == slow.peak("bfloat16") < fast.peak("bfloat16")
    assert device.peak("float32") == fast.peak("float32") < slow.peak("float32")
    assert device.memory_bandwidth == slow.memory_bandwidth < fast.memory_bandwidth
    assert all(device.attention_rate("bfloat16") <= other.attention_rate("bfloat16") for other in (fast, slow))
    for name in ("bfloat16", "float32"):  # shares of the peaks differ, too
        assert device.product_rate(name) == pytest.approx(min(fast.product_rate(name), slow.product_rate(name)))
    plan = make_plan(program, cluster, analysis=analysis, batch=8, meshes="equal")
    assert any("least of each rate" in note for note in plan.notes)
    alike = Candidates(analysis, Cluster.parse("2xA100-40GB+2xA100-40GB"), 8, "adamw")
    assert alike.device == fast


@pytest.mark.filterwarnings("error")
def test_where_no_division_fits_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: dict[str, Any] = {"meshes": "unlike", "pp": 2, "microbatches": 2}
    cluster = capped(Cluster.parse("3xV100-16GB"), 2_147_650_000)  # little more than a process takes
    with pytest.raises(InfeasibleError, match="no cut into 2 stages fits"):
        make_plan(explained.program(), cluster, **limits)
    monkeypatch.setattr(UnlikeCandidates, "least_seconds", lambda *_: math.inf)
    with pytest.raises(InfeasibleError, match="no cut into 2 stages fits"):
        make_plan(explained.program(), cluster, **limits)


@pytest.mark.filterwarnings("error")
def test_runs_that_do_not_fit_have_no_seconds() -> None:
    plan = make_plan(explained.program(), capped(Cluster.parse("3xV100-16GB"), 2_147_800_000), meshes="unlike")
    assert math.isfinite(plan.step_time_s) and all(item.memory_bytes <= item.capacity_bytes for item in plan.stages)


class Narrowing(torch.nn.Module):
    """Convolutions whose images shrink as their weights grow, as those of a ResNet do."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [*[64] * 5, 128, 128, 256, 256, 512, 512, 512]
        self.body = torch.nn.Sequential(
            *(
                torch.nn.Sequential(
                    torch.nn.Conv2d(one, other, 3, 2 if one != other else 1, 1),
                    torch.nn.BatchNorm2d(other),
                    torch.nn.ReLU(),
                )
                for one, other in itertools.pairwise(sizes)
            )
        )
        self.head = torch.nn.Linear(512, 1000)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.head(self.body(images).mean((2, 3))), labels)


def test_a_pipeline_that_equal_meshes_keep_behind_is_tried_with_unlike_ones() -> None:
    """The best of equal meshes has one stage, which has no slowest; two of unlike ones take less."""
    inputs = (torch.randn(32, 64, 32, 32), torch.zeros(32, dtype=torch.long))
    program = capture(Narrowing(), inputs, {}, check_eval=False)
    analysis = analyze(program)
    free, equal, unlike_ = (
        make_plan(program, Cluster.parse("4xRTX-3090"), analysis=analysis, meshes=meshes)
        for meshes in ("auto", "equal", "unlike")
    )
    assert equal.pp == 1 and unlike_.step_time_s < 0.97 * equal.step_time_s
    assert free.step_time_s == unlike_.step_time_s
