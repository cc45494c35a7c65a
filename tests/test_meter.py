"""The meter: figures of steps on a clock that counts its own readings, and where they are written."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopart
from autopart.runtime import ParallelModule
from autopart.runtime.errors import InputError, PlanError
from emitted import data, emit, plain
from launch import launch


class Ticks:
    """A clock that moves one second whenever it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


class Bar:
    def __init__(self) -> None:
        self.shown: list[dict[str, object]] = []

    def set_postfix(self, ordered_dict: Any) -> None:
        self.shown.append(dict(ordered_dict))


def measured(directory: str, every: int = 1) -> list[Any]:
    """Three steps of two microbatches, an evaluation between the second and the third."""
    model = ParallelModule(directory, dict(plain().named_parameters()))
    bar = Bar()
    meter = autopart.Meter(model, progress=bar, json_lines=Path(directory) / "steps.jsonl", every=every, clock=Ticks())
    x, target = data()
    readings = []
    for step in range(3):
        if step == 2:
            model.eval()
            model(x, target=target)
            model.train()
        loss = model(x, target=target)["loss"]
        loss.backward()
        readings.append(meter.step(loss=loss))
    meter.close()
    model(x, target=target)
    assert model.tally is None
    return [readings, bar.shown]


def test_one_rank_by_counts(tmp_path: Path) -> None:
    emit(tmp_path, cuts=1, microbatches=2)
    readings, shown = measured(str(tmp_path))
    # F0 B0 F1 B1 R: five actions read the clock twice each, and the meter once; the evaluation does not read it.
    assert [reading.seconds for reading in readings] == [11.0, 11.0, 11.0]
    assert [reading.bubble for reading in readings] == [pytest.approx(1 - 5 / 9)] * 3
    assert [(reading.step, reading.samples, reading.tokens) for reading in readings] == [(n, 8, 8) for n in (1, 2, 3)]
    assert readings[0].samples_per_s == 8 / 11
    assert readings[0].utilisation is None  # written by hand: nobody counted its FLOPs
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[2]["loss"] == readings[2].values["loss"] and lines[0]["samples_per_s"] == 8 / 11
    assert list(shown[0]) == ["loss", "samples/s", "bubble", "memory"]


def test_all_ranks_by_counts(tmp_path: Path) -> None:
    """Rank 1 waits once, rank 0 sends and receives too; each action is two readings apart from the next."""
    emit(tmp_path, cuts=2, microbatches=2)
    results = launch(measured, 2, str(tmp_path), 2)
    for (first, second, third), _ in results:
        assert first is None and third is None
        assert (second.step, second.steps, second.samples) == (2, 2, 16)
        # per step of rank 0: F0 S F1 S R? B0 R? B1 R, of rank 1: R? F0 B0 S R? F1 B1 S R; nine actions, five busy
        assert second.bubble == pytest.approx(1 - 5 / 17)
    assert results[0][0][1] == results[1][0][1]
    assert results[0][1] and not results[1][1]  # the bar moves on rank 0 alone
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) == 1


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.out(self.embed(ids)).flatten(0, 1), ids.flatten())


def test_utilisation_is_of_the_plan_and_its_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Any] = []

    class SummaryWriter:
        def __init__(self, folder: str) -> None:
            self.folder = folder

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((self.folder, name, value, step))

        def close(self) -> None:
            written.append("closed")

    fake = types.ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    model: Any = autopart.parallelize(Words(), verbose=False, cluster="cpu:1", directory=tmp_path / "program")
    clock = Ticks()
    meter = autopart.Meter(model, tensorboard=tmp_path, clock=clock)
    with pytest.raises(PlanError, match="call it before"):
        meter.step()
    ids = torch.randint(16, (4, 6))
    model(ids).backward()
    reading = meter.step()
    assert reading is not None
    plan = autopart.Plan.load(tmp_path / "program" / "plan.json")
    # Forward a product of [24, 8] and [8, 16], backward two of that size.
    assert reading.flops == plan.flops == 3 * 2 * 24 * 8 * 16
    assert reading.tokens == 24
    device = autopart.Cluster.parse("cpu:1").devices[0]
    assert plan.peak_flops == device.peak("float32")
    assert reading.utilisation == pytest.approx(reading.flops / reading.seconds / device.peak("float32"))
    assert (str(tmp_path), "utilisation", reading.utilisation, 1) in written
    meter.close()
    assert written[-1] == "closed"


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    model = autopart.parallelize(Words(), verbose=False)
    with pytest.raises(InputError, match="pip install tensorboard"):
        autopart.Meter(model, tensorboard="runs")
    with pytest.raises(InputError, match="every: at least one"):
        autopart.Meter(model, every=0)
    with pytest.raises(InputError, match="not a Words"):
        autopart.Meter(Words())
