"""The trace of a real run: what it shows, and that the simulator predicts it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from autopart.runtime import ParallelModule
from autopart.runtime.schedule import make_schedule
from autopart.simulate import StageTimes, simulate
from emitted import data, emit, plain
from launch import launch
from sleeping import emit_sleeping

MICROBATCHES = 6
SECONDS = {
    "equal": ((0.04, 0.08),) * 4,
    "unequal": ((0.04, 0.06), (0.06, 0.12), (0.02, 0.06), (0.05, 0.1)),
}


def spans(path: Path, step: int | None = None) -> list[dict[str, Any]]:
    """The actions of a trace file, in the order of their starts."""
    events = json.loads(path.read_text())["traceEvents"]
    found = [event for event in events if event["ph"] == "X" and step in (None, event["args"]["step"])]
    return sorted(found, key=lambda event: float(event["ts"]))


def _sleep(directory: str, path: str, steps: int) -> str:
    model = ParallelModule(directory, dict.fromkeys(("scale0", "scale1", "scale2", "scale3"), torch.ones(1).double()))
    x = torch.ones(2 * MICROBATCHES, 1, dtype=torch.float64)
    assert model(x)["loss"].item() == pytest.approx(1.0)  # not timed: connections are made at the first exchange
    with model.trace(path):
        for _ in range(steps):
            model(x)
    return str(model.schedule)


@pytest.mark.parametrize(
    ("name", "warmup", "kind"), [("1f1b", (), "equal"), ("1f1b", (6, 4, 2, 0), "unequal"), ("gpipe", (), "unequal")]
)
def test_the_simulator_predicts_the_run(name: str, warmup: tuple[int, ...], kind: str, tmp_path: Path) -> None:
    """Of three steps the one with the least disturbance takes what is predicted, within 5 %."""
    emit_sleeping(tmp_path, SECONDS[kind], MICROBATCHES, name, warmup)
    path = tmp_path / "trace.json"
    launch(_sleep, 4, str(tmp_path), str(path), 3)
    times = [StageTimes(*pair) for pair in SECONDS[kind]]
    schedule = make_schedule(name, 4, MICROBATCHES, [(0, 1), (1, 2), (2, 3)], warmup=warmup)
    predicted = simulate(schedule, times).makespan_s
    executed = min(_makespan(spans(path, step)) for step in (2, 3, 4))
    assert predicted == pytest.approx(executed, rel=0.05)
    # Computations come in the predicted order on each stage.
    for stage in range(4):
        done = [event["name"] for event in spans(path, 2) if event["pid"] == stage and event["cat"] in _COMPUTE]
        assert done == [str(action) for action in schedule.ranks[stage] if action.work.is_compute]


_COMPUTE = ("forward", "backward")


def _makespan(found: Sequence[dict[str, Any]]) -> float:
    """Seconds from the first computation's start to the last one's end."""
    computed = [event for event in found if event["cat"] in _COMPUTE]
    return float(max(e["ts"] + e["dur"] for e in computed) - min(e["ts"] for e in computed)) / 1e6


def _train(directory: str, path: str) -> dict[str, Any]:
    model = ParallelModule(directory, dict(plain().named_parameters()))
    x, target = data()
    before = model(x, target=target)["loss"].item()
    with model.trace(path):
        during = model(x, target=target)["loss"].item()
    after = model(x, target=target)["loss"].item()
    actions = [str(action) for action in model._schedules.own(model.schedule)]
    return {"losses": (before, during, after), "actions": actions}


@pytest.mark.parametrize(("cuts", "dp"), [(2, 1), (2, 2), (1, 1)])
def test_every_action_of_every_rank_is_there(cuts: int, dp: int, tmp_path: Path) -> None:
    emit(tmp_path, cuts=cuts, dp=dp, microbatches=2)
    path = tmp_path / "trace.json"
    results = launch(_train, cuts * dp, str(tmp_path), str(path))
    assert len({loss for result in results for loss in result["losses"]}) == 1
    found = spans(path)
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in found)
    for rank, result in enumerate(results):
        own = [event for event in found if event["args"]["rank"] == rank]
        assert sorted(event["name"] for event in own) == sorted(result["actions"])
        assert {event["pid"] for event in own} == {rank // dp}
        assert {event["args"]["step"] for event in own} == {2}
    # A thread of the trace does one thing at a time.
    for thread in {(event["pid"], event["tid"]) for event in found}:
        own = [event for event in found if (event["pid"], event["tid"]) == thread]
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-3 for a, b in itertools.pairwise(own))
    # A receive ends after the call that sends began, on one clock.
    arrows = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] in "sf"]
    if dp > 1:
        assert not arrows
    for end in (event for event in arrows if event["ph"] == "f"):
        (begin,) = (event for event in arrows if event["ph"] == "s" and event["id"] == end["id"])
        assert begin["ts"] <= end["ts"] + 1e3


def _failing(directory: str, path: str) -> None:
    model = ParallelModule(directory, dict(plain().named_parameters()))
    with pytest.raises(RuntimeError, match="mine"), model.trace(path):
        raise RuntimeError("mine")
    assert model._recorder is None


def test_a_block_that_fails_writes_nothing(tmp_path: Path) -> None:
    emit(tmp_path, cuts=1, microbatches=2)
    _failing(str(tmp_path), str(tmp_path / "trace.json"))
    assert not (tmp_path / "trace.json").exists()
