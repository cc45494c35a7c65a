"""The trace of a real run: what it shows, and that the simulator predicts it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Case:
    """places: the rank of each stage. seconds: (forward, backward, the weight's share of it) of each stage."""

    schedule: str
    microbatches: int
    seconds: tuple[tuple[float, float, float], ...]
    places: tuple[int, ...]
    warmup: tuple[int, ...] = ()

    @property
    def ranks(self) -> int:
        return 1 + max(self.places)

    @property
    def times(self) -> list[StageTimes]:
        return [StageTimes(*own) for own in self.seconds]


UNEQUAL = ((0.04, 0.06, 0.0), (0.06, 0.12, 0.0), (0.02, 0.06, 0.0), (0.05, 0.1, 0.0))
# The first stage of a split backward receives nothing, so its B does all and its W nothing.
SPLIT = ((0.05, 0.1, 0.0), (0.05, 0.1, 0.05), (0.06, 0.1, 0.04), (0.04, 0.12, 0.06))
CASES = {
    "1f1b": Case("1f1b", 6, ((0.04, 0.08, 0.0),) * 4, (0, 1, 2, 3)),
    "1f1b-deep": Case("1f1b", 6, UNEQUAL, (0, 1, 2, 3), (6, 4, 2, 0)),
    "gpipe": Case("gpipe", 6, UNEQUAL, (0, 1, 2, 3)),
    "interleaved-4on2": Case("interleaved", 4, UNEQUAL, (0, 1, 0, 1)),
    "zb-h1-3": Case("zb-h1", 5, SPLIT[:3], (0, 1, 2)),
    "zb-v-4on2": Case("zb-v", 4, SPLIT, (0, 1, 1, 0)),
    "1f1b-8": Case("1f1b", 5, ((0.06, 0.12, 0.0), (0.08, 0.1, 0.0)) * 4, tuple(range(8))),
}


def spans(path: Path, step: int | None = None) -> list[dict[str, Any]]:
    """The actions of a trace file, in the order of their starts."""
    events = json.loads(path.read_text())["traceEvents"]
    found = [event for event in events if event["ph"] == "X" and step in (None, event["args"]["step"])]
    return sorted(found, key=lambda event: float(event["ts"]))


def _sleep(directory: str, path: str, case: Case) -> None:
    names = [f"scale{stage}" for stage in range(len(case.places))]
    model = ParallelModule(directory, dict.fromkeys(names, torch.ones(1).double()))
    x = torch.ones(2 * case.microbatches, 1, dtype=torch.float64)
    assert model(x)["loss"].item() == pytest.approx(1.0)  # not timed: connections are made at the first exchange
    with model.trace(path):
        for _ in range(2):
            model(x)


@pytest.mark.slow  # timed: on a machine with other work to do it may fail
@pytest.mark.parametrize("name", CASES)
def test_the_simulator_predicts_the_run(name: str, tmp_path: Path) -> None:
    """Of a few steps the one with the least disturbance takes what is predicted, within 5 %; none takes less."""
    case, path = CASES[name], tmp_path / "trace.json"
    emit_sleeping(tmp_path, case.times, case.microbatches, case.schedule, case.warmup, case.places)
    count = len(case.places)
    chain = [(stage, stage + 1) for stage in range(count - 1)]
    schedule = make_schedule(case.schedule, count, case.microbatches, chain, warmup=case.warmup, places=case.places)
    predicted = simulate(schedule, case.times)
    executed: list[float] = []
    for _ in range(4):  # a machine that is busy with other things delays some steps
        launch(_sleep, case.ranks, str(tmp_path), str(path), case)
        executed += [_makespan(spans(path, step)) for step in (2, 3)]
        if min(executed) <= 1.05 * predicted.makespan_s:
            break
    assert predicted.makespan_s == pytest.approx(min(executed), rel=0.05)
    # Computations come in the predicted order on each rank, and everything is there under the predicted name.
    for rank, actions in enumerate(schedule.ranks):
        own = [event for event in spans(path, 2) if event["args"]["rank"] == rank]
        assert {event["pid"] for event in own} == {case.places.index(rank)}
        done = [event["name"] for event in own if event["cat"] in _COMPUTE]
        assert done == [str(action) for action in actions if action.work.is_compute]
        assert sorted(event["name"] for event in own) == sorted(
            str(event.action) for event in predicted.events if schedule.rank_of[event.action.stage] == rank
        )


_COMPUTE = ("forward", "backward", "weight")


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
    actions = [str(action) for action in model.variants.planned.schedules.own(model.schedule)]
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
        assert begin["ts"] <= end["ts"]


def _failing(directory: str, path: str) -> None:
    model = ParallelModule(directory, dict(plain().named_parameters()))
    with pytest.raises(RuntimeError, match="mine"), model.trace(path):
        raise RuntimeError("mine")
    assert model._recorder is None


def test_a_block_that_fails_writes_nothing(tmp_path: Path) -> None:
    emit(tmp_path, cuts=1, microbatches=2)
    _failing(str(tmp_path), str(tmp_path / "trace.json"))
    assert not (tmp_path / "trace.json").exists()
