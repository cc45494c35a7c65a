"""Plans and their timelines: the simulation gives the plan's own step time, and warm-ups go from plan to run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopart.cli import main
from autopart.cluster import Cluster
from autopart.plan import Plan, StagePlan
from autopart.planner import make_plan
from autopart.predict import predicted_trace, simulate_plan
from autopart.realize import emit
from autopart.runtime.dry_run import dry_run
from autopart.runtime.errors import PlanError
from autopart.runtime.manifest import Manifest
from autopart.runtime.schedule import deeper_warmup, in_flight, make_schedule
from autopart.tracing import capture


def by_hand(**more: Any) -> Plan:
    stages = tuple(StagePlan((s,), (("dp", 1),), (s, s + 1), forward_s=1.0, backward_s=2.0) for s in range(3))
    return Plan("x", "m", "cpu:3", 6, "float32", "1f1b", 6, stages, **more)


def test_a_plan_by_hand() -> None:
    found = simulate_plan(by_hand())
    assert found.makespan_s == 3.0 * (6 + 2) and found.in_flight == by_hand().in_flight == (3, 2, 1)
    slow = by_hand(transfers=((0, 1, 1.5, 1.0), (1, 2, 1.0, 1.0), (0, 2, 0.5, None)))
    assert Plan.from_json(slow.to_json()) == slow
    deeper = replace(slow, warmup=(4, 2, 0))
    assert simulate_plan(deeper).in_flight == deeper.in_flight == (5, 3, 1)
    assert found.makespan_s < simulate_plan(deeper).makespan_s < simulate_plan(slow).makespan_s
    assert Plan.from_json(deeper.to_json()) == deeper


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"warmup": (1, 0)}, "warmup: one number for each of 3 stages, such as [2, 1, 0]"),
        ({"warmup": (2, 1, -1)}, "warmup: a stage runs ahead"),
        ({"warmup": (1, 2, 0)}, "they would wait for each other"),
        ({"warmup": (2, 1, 0), "schedule": "gpipe"}, "only the schedule 1f1b has a warm-up"),
        ({"transfers": ((1, 0, 1.0, 1.0),)}, "transfers: [1, 0, ...]: expected source < target"),
        ({"transfers": ((0, 1, 1.0, -1.0),)}, "transfers"),
        ({"tied_s": -1.0}, "tied_s"),
    ],
)
def test_contradictions(more: dict[str, Any], words: str) -> None:
    text = json.dumps({**json.loads(by_hand().to_json()), **more})
    with pytest.raises(PlanError) as error:
        Plan.from_json(text)
    assert words in str(error.value)


@pytest.mark.parametrize("text", ['[[0, 1, "a", 1]]', "[[0, 1, 1.0]]", "[[0, true, 1.0, null]]", "{}"])
def test_transfers_in_a_file(text: str) -> None:
    raw = json.loads(by_hand().to_json())
    with pytest.raises(PlanError, match="transfers: expected a list of"):
        Plan.from_json(json.dumps({**raw, "transfers": json.loads(text)}))


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 16])
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_any_depth_of_warmup_runs_and_holds_what_the_formula_says(stages: int, depth: int) -> None:
    edges = [(stage, stage + 1) for stage in range(stages - 1)]
    for microbatches in (1, 2, 3, 8, 64):
        warmup = deeper_warmup(stages, depth)
        found = dry_run(make_schedule("1f1b", stages, microbatches, edges, warmup=warmup))
        assert found == in_flight("1f1b", stages, microbatches, warmup)
        assert found == tuple(min(microbatches, depth * (stages - s - 1) + 1) for s in range(stages))


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return x.square().mean()


def test_the_planners_own_plans(tmp_path: Path) -> None:
    program = capture(Chain(), (torch.randn(16, 16),), check_eval=False)
    cluster = Cluster.parse("cpu:3")
    forced: dict[str, Any] = {"pp": 3, "microbatches": 8, "recompute": "none"}
    least, deeper, listed = (make_plan(program, cluster, warmup=wanted, **forced) for wanted in (1, 2, (5, 5, 1)))
    for plan in (least, deeper, listed):
        assert simulate_plan(plan).makespan_s + plan.tied_s == plan.step_time_s
        assert simulate_plan(plan).in_flight == plan.in_flight
        assert plan.transfers and any(stage.step_end_s > 0 for stage in plan.stages)
    assert [plan.in_flight for plan in (least, deeper, listed)] == [(3, 2, 1), (5, 3, 1), (6, 6, 2)]
    assert least.warmup == () and deeper.warmup == (4, 2, 0) and listed.warmup == (5, 5, 1)
    # Blocks are cut as before, so that each stage pays for what it holds more.
    assert [s.blocks for s in least.stages] == [s.blocks for s in deeper.stages]
    assert deeper.stages[0].memory_bytes > least.stages[0].memory_bytes
    ahead = 2 * 2 * 16 * 4  # two tensors of two samples
    assert deeper.stages[2].memory_bytes == least.stages[2].memory_bytes + ahead
    emit(program, deeper, tmp_path / "program")
    assert Manifest.load(tmp_path / "program").warmup == (4, 2, 0)
    with pytest.raises(PlanError, match="only the schedule 1f1b"):
        make_plan(program, cluster, warmup=2, schedule="gpipe", **forced)
    with pytest.raises(PlanError, match="one number for each of 3"):
        make_plan(program, cluster, warmup=(2, 0), **forced)


def test_the_predicted_trace_has_the_format_of_the_executed() -> None:
    plan = by_hand(transfers=((0, 1, 1.5, 1.0), (1, 2, 1.0, 1.0)))
    found = simulate_plan(plan)
    events = predicted_trace(plan, found, 10)["traceEvents"]
    actions = [event for event in events if event["ph"] == "X"]
    assert len(actions) == len(found.events)
    assert {event["pid"] for event in actions} == {10, 11, 12}
    assert max(event["ts"] + event["dur"] for event in actions) == found.makespan_s * 1e6
    assert {"predicted stage 0", "predicted stage 2"} <= {
        event["args"].get("name") for event in events if "args" in event
    }
    begins = {event["id"]: event["ts"] for event in events if event["ph"] == "s"}
    ends = {event["id"]: event["ts"] for event in events if event["ph"] == "f"}
    assert begins.keys() == ends.keys() and len(begins) == 2 * 2 * 6
    assert all(begins[key] < ends[key] for key in begins)


def test_command_of_several_stages_on_a_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line per rank: (m v + p - 1) of the stages' times, of which each rank computes m v."""
    seconds: dict[str, Any] = {"forward_s": 1.0, "backward_s": 2.0, "capacity_bytes": 100}
    stages = tuple(StagePlan((s % 2,), (("dp", 1),), (s, s + 1), memory_bytes=10 + s, **seconds) for s in range(4))
    plan = Plan("x", "m", "cpu:2", 6, "float32", "interleaved", 6, stages)
    plan.save(tmp_path / "plan.json")
    assert main(["simulate", str(tmp_path / "plan.json"), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["makespan_s"] == 3.0 * (6 * 2 + 1)
    in_flight_of = plan.in_flight
    assert summary["ranks"] == [
        {
            "stages": [rank, rank + 2],
            "busy_s": 36.0,
            "idle_s": 3.0,
            "in_flight": [in_flight_of[rank], in_flight_of[rank + 2]],
            "memory_bytes": 22 + 2 * rank,
            "capacity_bytes": 200,
        }
        for rank in range(2)
    ]
    assert main(["simulate", str(tmp_path / "plan.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:4] for line in lines[-2:]] == ["0, 2", "1, 3"]


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, trace, both = tmp_path / "plan.json", tmp_path / "trace.json", tmp_path / "both.json"
    by_hand(tied_s=0.5).save(plan)
    assert main(["simulate", str(plan), "-o", str(trace)]) == 0
    out = capsys.readouterr().out
    assert "makespan 24 s and 500 ms" in out and "bubble 25.0%" in out and "no transfer times" in out
    assert main(["simulate", str(plan), "--json", "--beside", str(trace), "-o", str(both)]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["makespan_s"], summary["step_time_s"], summary["bubble"]) == (24.0, 24.5, 0.25)
    assert [rank["in_flight"] for rank in summary["ranks"]] == [[3], [2], [1]]
    events = json.loads(both.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == set(range(6))
    (tmp_path / "number").write_text('{"traceEvents": [{"pid": 1}, 4]}')
    (tmp_path / "text").write_text('{"traceEvents": [{"pid": "a"}]}')
    for wrong, words in (
        ([str(plan), "--pp", "2"], "has its own pp"),
        (["hf:gpt2"], "give a plan file, or a model with --cluster"),
        ([str(plan), "--beside", str(trace)], "with -o"),
        ([str(plan), "--beside", str(plan), "-o", str(both)], "no list traceEvents"),
        ([str(plan), "--beside", str(tmp_path / "number"), "-o", str(both)], "traceEvents[1] is no object"),
        ([str(plan), "--beside", str(tmp_path / "text"), "-o", str(both)], "traceEvents[0] is no object"),
        ([str(plan), "-o", str(tmp_path / "none" / "x")], "there is no folder"),
    ):
        assert main(["simulate", *wrong]) == 2
        assert words in capsys.readouterr().err
    assert main(["simulate", str(plan), "--warmup", "x"]) == 2
    assert "neither a whole number nor a list" in capsys.readouterr().err
