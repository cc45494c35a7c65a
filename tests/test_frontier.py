"""Frontiers of plans: every plan that can be forced is covered by a point, and the picture shows the points."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from test_calibrate import made_up
from test_shared_hosts import host

from autopart import cache
from autopart.analysis import Analysis, analyze
from autopart.candidates import Candidates
from autopart.cli import main
from autopart.cli.trading import notes, table
from autopart.cluster import Cluster
from autopart.cost import calibrated
from autopart.cost.devices import device
from autopart.frontier import (
    PlanPoint,
    capped,
    count_frontier,
    ended_early,
    first_devices,
    memory_frontier,
    undominated,
)
from autopart.models import load_model
from autopart.plan import Plan, StagePlan
from autopart.planned import planned_frontier
from autopart.planner import make_plan
from autopart.runtime.errors import ClusterError, InfeasibleError, PlanError
from autopart.solver import tensor as tensor_solver
from autopart.solver.degrees import Degrees
from autopart.tracing import capture
from clusters import ideal

MODEL = """
import torch
from torch import nn


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x):
        return self.down(torch.relu(self.up(x))).square().mean()


def small():
    return Small(), (torch.randn(256, 32),), {}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("models") / "models.py"
    path.write_text(MODEL)
    return f"{path}:small"


@pytest.fixture(scope="module")
def program(model: str) -> Any:
    loaded = load_model(model, meta=True)
    return capture(loaded.model, loaded.args, loaded.kwargs, name=loaded.name, check_eval=False)


@pytest.fixture(scope="module")
def analysis(program: Any) -> Analysis:
    return analyze(program)


def overhead_free() -> Cluster:
    """CPUs, whose processes take nothing besides tensors, so that a small model's tensors are what memory is about."""
    (node,) = ideal(2).nodes
    return Cluster((replace(node, device=replace(node.device, kind="cpu")),))


def test_every_forced_plan_is_covered(program: Any, analysis: Analysis) -> None:
    cluster = overhead_free()
    seen: list[PlanPoint] = []
    found = memory_frontier(program, cluster, step=0.0, analysis=analysis, report=seen.append)
    assert len(found) > 1 and set(map(id, found)) <= set(map(id, seen))
    for before, after in itertools.pairwise(found):
        assert before.seconds < after.seconds and before.memory_bytes > after.memory_bytes
    for pp, dp, tp in ((1, 2, 1), (1, 1, 2), (2, 1, 1)):
        for count in (1, 2):
            plan = make_plan(program, cluster, analysis=analysis, pp=pp, dp=dp, tp=tp, microbatches=count)
            held = max(stage.memory_bytes for stage in plan.stages)
            assert any(
                point.seconds * (1 - point.gap) <= plan.step_time_s * (1 + 1e-9) and point.memory_bytes <= held
                for point in found
            ), (pp, dp, tp, count)
    assert ended_early(found) is None
    (only,) = memory_frontier(program, cluster, step=0.0, most=1, analysis=analysis)
    # with less memory parameters are divided, which may be faster too, as far as the gap allows
    assert only.seconds * (1 - only.gap) <= found[0].seconds <= only.seconds and ended_early([only])
    coarse = memory_frontier(program, cluster, step=0.3, analysis=analysis)
    assert len(coarse) <= len(found)
    for point in found:
        assert any(
            other.seconds * (1 - other.gap) <= point.seconds and other.memory_bytes <= point.memory_bytes / 0.7 + 1
            for other in coarse
        )


def _alone(program: Any, cluster: Cluster, analysis: Analysis) -> Plan:
    """The plan of a frontier's point by itself: at the best level of ZeRO where memory asks for nothing again."""
    plan = make_plan(program, cluster, analysis=analysis)
    for level in () if any(stage.recompute for stage in plan.stages) else (1, 2, 3):
        with contextlib.suppress(InfeasibleError):
            other = make_plan(program, cluster, analysis=analysis, zero=level)
            plan = min(plan, other, key=lambda item: item.step_time_s)
    return plan


def test_no_level_of_zero_undercuts_the_first_point(program: Any, analysis: Analysis) -> None:
    cluster = Cluster.parse("4xA100-40GB")
    first, *_ = memory_frontier(program, cluster, step=0.5, most=2, analysis=analysis, batch=64)
    levels = [make_plan(program, cluster, analysis=analysis, batch=64, zero=level) for level in (0, 1, 2, 3)]
    assert first.seconds == min(plan.step_time_s for plan in levels) < levels[0].step_time_s
    assert first.bound_s <= first.seconds and first.gap < 0.05


@pytest.mark.usefixtures("no_messages")
def test_later_plans_repeat_no_work(program: Any, analysis: Analysis, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate, solve = Candidates.evaluate, tensor_solver.solve
    evaluated: list[Degrees] = []
    solved: list[object] = []

    def counted_evaluate(self: Candidates, config: Degrees, below: float = math.inf) -> Any:
        evaluated.append(config)
        return evaluate(self, config, below)

    def counted_solve(*arguments: Any) -> Any:
        solved.append(arguments)
        return solve(*arguments)

    monkeypatch.setattr(Candidates, "evaluate", counted_evaluate)
    monkeypatch.setattr(tensor_solver, "solve", counted_solve)
    plans: list[PlanPoint] = []
    together = once = 0

    def report(point: PlanPoint) -> None:
        nonlocal together, once
        plans.append(point)
        together, once = len(evaluated), len(solved)

    with cache.used(False):
        memory_frontier(program, overhead_free(), step=0.1, analysis=analysis, report=report)
        evaluated.clear()
        solved.clear()
        for before, point in itertools.pairwise([None, *plans]):
            cluster = overhead_free() if before is None else capped(overhead_free(), int(before.memory_bytes * 0.9))
            assert point is not None
            alone = _alone(program, cluster, analysis)
            assert alone.step_time_s == pytest.approx(point.seconds) and alone.bound_s <= point.seconds * (1 + 1e-9)
            assert max(stage.memory_bytes for stage in alone.stages) == point.memory_bytes
    assert len(plans) > 2 and together <= len(evaluated) and once < len(solved)


def test_nothing_fits(program: Any, analysis: Analysis) -> None:
    with pytest.raises(InfeasibleError):
        memory_frontier(program, capped(overhead_free(), 1000), analysis=analysis)
    with pytest.raises(InfeasibleError):
        count_frontier(program, capped(overhead_free(), 1000), [1, 2], analysis=analysis)
    with pytest.raises(PlanError, match="share"):
        memory_frontier(program, overhead_free(), step=1.0, analysis=analysis)


def test_device_counts(program: Any, analysis: Analysis) -> None:
    cluster = overhead_free()
    one, two = count_frontier(program, cluster, [2, 1, 2], analysis=analysis)
    assert (one.devices, two.devices) == (1, 2) and two.seconds < one.seconds
    assert two.device_seconds == 2 * two.seconds
    tight = capped(cluster, one.memory_bytes - 1)
    memory = [point.devices for point in count_frontier(program, tight, [1, 2], analysis=analysis)]
    assert memory[-1] == 2  # one device may fit with recomputation, or not at all
    without: list[tuple[int, str]] = []
    (two,) = count_frontier(
        *(program, cluster, [1, 2]),
        tp=2,
        analysis=analysis,
        left_out=lambda *told: without.append((told[0], str(told[1]))),
    )
    assert two.devices == 2
    ((count, reason),) = without
    assert count == 1 and "does not divide 1 device;" in reason
    with pytest.raises(PlanError, match="does not divide 1 device;"):
        count_frontier(program, cluster, [1], tp=2, analysis=analysis)


def test_first_devices() -> None:
    cluster = Cluster.parse("2x8xA100-80GB+4xV100-32GB")
    assert first_devices(cluster, 20) == cluster
    assert str(first_devices(cluster, 8)) == "8xA100-80GB"
    part = first_devices(cluster, 12)
    assert [node.count for node in part.nodes] == [8, 4] and part.nodes[1].ports == cluster.nodes[1].ports // 2
    for count in (0, 21):
        with pytest.raises(ClusterError, match="20 devices"):
            first_devices(cluster, count)
    small = capped(cluster, 40 * 2**30)
    assert [node.device.memory_bytes >> 30 for node in small.nodes] == [40, 40, 32]


@pytest.mark.parametrize("measured", [(), (4,), (1, 4)])
def test_fewer_cpus_have_their_host_to_themselves(
    measured: tuple[int, ...], program: Any, analysis: Analysis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path))
    for processes in measured:
        calibrated.store(made_up(processes, launch_s=1e-5 * processes))
    whole = Cluster.parse("cpu:4")
    for count in (1, 2, 3):
        assert first_devices(whole, count) == Cluster.parse(f"cpu:{count}")
    assert first_devices(Cluster.parse("cpu:2+cpu:4"), 3) == Cluster.parse("cpu:2+cpu:1")
    points = count_frontier(program, whole, [1, 2], analysis=analysis)
    alone = [make_plan(program, Cluster.parse(f"cpu:{count}"), analysis=analysis) for count in (1, 2)]
    assert [found.seconds for found in points] == [plan.step_time_s for plan in alone]


def test_fewer_cpus_of_another_host() -> None:
    core = device("CPU")
    (node,) = host(2.0).nodes  # four on two cores
    two, one = (first_devices(host(2.0), count).nodes[0] for count in (2, 1))
    assert (two.count, two.device.alone, two.device.launch_s) == (2, 1.0, core.launch_s / 2)
    assert two.device.peak_flops == {name: 2 * rate for name, rate in core.peak_flops.items()}
    assert (one.device.memory_bandwidth, one.device.memory_bytes) == (4 * core.memory_bandwidth, 4 * core.memory_bytes)
    assert first_devices(Cluster.parse("4xCPU"), 1) == Cluster.parse("1xCPU"), "cores of their own"
    assert node.first(4) == node


def test_kept_frontiers_know_of_later_calibrations(
    program: Any, analysis: Analysis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path))
    calibrated.store(made_up(4))
    whole = Cluster.parse("cpu:4")
    (before,) = planned_frontier(program, whole, analysis=analysis, counts=[1])
    calibrated.store(made_up(1, launch_s=1e-2))
    (after,) = planned_frontier(program, whole, analysis=analysis, counts=[1])
    assert whole == Cluster.parse("cpu:4") and after.seconds > 2 * before.seconds


def point(seconds: float, memory: int, devices: int = 1) -> PlanPoint:
    stage = StagePlan(tuple(range(devices)), (("dp", devices),), (0, 1), memory_bytes=memory)
    plan = Plan("x", "m", "c", devices, "float32", "1f1b", 1, (stage,), step_time_s=seconds)
    return PlanPoint(plan, devices, memory, seconds / 2)


def test_undominated() -> None:
    points = [point(3.0, 1), point(1.0, 5), point(2.0, 5), point(2.0, 3), point(2.5, 3)]
    assert undominated(points, lambda item: item.memory_bytes) == [points[1], points[3], points[0]]
    assert points[0].gap == 0.5


def test_what_is_dominated_says_by_what() -> None:
    points = [point(3.0, 1), point(1.5, 1, 2), point(1.5, 1, 4), point(2.0, 1, 6), point(1.0, 1, 8)]
    lines = table(points, True, None).splitlines()
    at = lines[0].index("dominated"), lines[0].index("plan", 1)
    told = ["slower than 2 devices", "", "dearer than 2 devices", "slower and dearer than 2 devices", ""]
    assert [line[slice(*at)].strip() for line in lines[2:]] == told


def test_notes_name_the_plans_that_they_are_of() -> None:
    def noted(devices: int, *notes: str) -> PlanPoint:
        found = point(3.0, 1, devices)
        return replace(found, plan=replace(found.plan, notes=notes))

    points = [noted(1, "all"), noted(2, "all", "takes 12.5 ms, at 2x2, 4x1"), noted(4, "all", "takes 1 s, at 2x2")]
    assert notes(points, by_count=True) == [
        "on 1, 2 and 4 devices: all",
        "on 2 devices (with other numbers also on 4 devices): takes 12.5 ms, at 2x2, 4x1",
    ]
    assert notes(points[:1], by_count=True) == ["on 1 device: all"]
    assert notes(points, by_count=False)[0] == "plans 1, 2 and 3: all"
    early = noted(1, "own", "plans that hold less were not looked for, as 1 were made")
    assert ended_early([early]) and notes([early], by_count=False) == ["plan 1: own"]


def test_command(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, picture = tmp_path / "cluster.toml", tmp_path / "frontier.svg"
    overhead_free().save(file)
    command = ["frontier", model, "--cluster", str(file), "--microbatches", "1"]
    assert main([*command, "--step", "0.05", "--json", "-o", str(picture)]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert points == sorted(points, key=lambda item: item["step_time_s"])
    circles = [item for item in ElementTree.parse(picture).iter() if item.tag.endswith("circle")]
    assert len(circles) == len(points) > 1
    texts = [item.text or "" for item in ElementTree.parse(picture).iter() if item.tag.endswith("text")]
    assert all(texts.count(str(number)) >= 2 for number in range(1, len(points) + 1)), "beside a point, and listed"
    assert main([*command, "--step", "0.05", "--most", "1", "-o", str(picture.with_suffix(".png"))]) == 0
    assert picture.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "note: plans that hold less were not looked for, as 1 were made" in capsys.readouterr().out
    assert main([*command, "--devices", "1,2", "--price", "3.6", "-o", str(picture)]) == 0
    printed, drawn = capsys.readouterr().out, picture.read_text()
    assert "cost of a step" in printed and "cost of a step" in drawn
    assert drawn.count(">1 device<") == drawn.count(">2 devices<") == 2
    assert main([*command, "--devices", "1,2", "--price", "3.6", "--json"]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert len(points) == 2
    for item, other in (points, points[::-1]):
        assert item["cost"] == pytest.approx(item["device_seconds"] * 3.6 / 3600)
        numbers = [(point["step_time_s"], point["device_seconds"]) for point in (item, other)]
        worse = numbers[0] != numbers[1] and all(own >= its for own, its in zip(*numbers, strict=True))
        assert bool(item["dominated"]) == worse
    assert main([*command, "--devices", "1,2", "--tp", "2"]) == 0
    assert "no plan for 1 device: tp=2" in capsys.readouterr().err
    for unused, words in (
        (["--price", "1"], "--price is for costs"),
        (["--devices", "1,2", "--most", "1"], "--most cannot apply"),
        (["--devices", "1,2", "--step", "0.1"], "--step cannot apply"),
    ):
        assert main([*command, *unused]) == 2
        assert words in capsys.readouterr().err
    assert main([*command, "--most", "0"]) == 2
    for wrong in (["--devices", "4"], ["--devices", "0"], ["--step", "2"], ["--price", "-1"], ["-o", "no/where.svg"]):
        assert main([*command, *wrong]) == 2


def test_the_first_plan_is_the_fastest() -> None:
    """Bounds hold with less memory, where replicas divide parameters; plans that keep them whole stay as fast."""
    loaded = load_model("hf:gpt2?n_layer=2&seq=128", meta=True)
    analysis = analyze(capture(loaded.model, loaded.args, loaded.kwargs, check_eval=False))
    cluster = Cluster.parse("4xRTX-3090")
    limits: dict[str, Any] = {"batch": 32, "pp": 1, "dp": 2, "tp": 2, "microbatches": 1, "analysis": analysis}
    (point,) = memory_frontier(analysis.program, cluster, most=1, **limits)
    assert point.seconds <= make_plan(analysis.program, cluster, **limits).step_time_s
