"""PipeDream-2BW against a single process that applies each gradient one step late, and its versions' log."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from autopart.runtime import ParallelModule
from autopart.runtime.dry_run import dry_run
from autopart.runtime.errors import InputError, ScheduleError
from autopart.runtime.schedule import Schedule, in_flight, make_schedule
from autopart.runtime.schedule.double_buffered import unrolled, version
from emitted import data, emit, plain
from launch import launch

BATCHES = 5


def chain(stages: int) -> list[tuple[int, int]]:
    return [(s, s + 1) for s in range(stages - 1)]


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8, 16])
def test_batches_follow_without_a_gap(stages: int) -> None:
    for microbatches in (stages, stages + 1, 2 * stages, 64):
        schedule = make_schedule("2bw", stages, microbatches, chain(stages))
        assert Schedule.parse(str(schedule)) == schedule
        held = dry_run(unrolled(schedule, 3, microbatches))
        assert held == in_flight("2bw", stages, microbatches) == tuple(stages - s for s in range(stages))
    with pytest.raises(ScheduleError, match="as many microbatches as stages"):
        make_schedule("2bw", stages + 1, stages, chain(stages + 1))


def test_its_text() -> None:
    assert str(make_schedule("2bw", 2, 2, chain(2))) == (
        "F0.0 SA0.0>1 RG0.1<1 B0.1 R0 F0.1 SA0.1>1 RG0.0<1 B0.0\nRA1.0<0 F1.0 B1.0 SG1.0>0 R1 RA1.1<0 F1.1 B1.1 SG1.1>0"
    )


def optimizer_of(kind: str, parameters: list[Any]) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=0.05)


def late(kind: str, tied: bool) -> tuple[list[float], dict[str, Tensor]]:
    """W(t+1) = W(t) - lr * grad(W(t-1)) in one process: losses at each W, and the weights at the end."""
    model = plain(tied=tied)
    optimizer = optimizer_of(kind, list(model.parameters()))
    losses: list[float] = []
    waiting: list[Tensor] | None = None
    for batch in range(BATCHES):
        x, target = data(seed=batch)
        loss = model(x, target)["loss"]
        made = list(torch.autograd.grad(loss, list(model.parameters())))
        losses.append(loss.item())
        if waiting is not None:
            _apply(optimizer, list(model.parameters()), waiting)
        waiting = made
    assert waiting is not None
    _apply(optimizer, list(model.parameters()), waiting)
    return losses, {name: tensor.detach() for name, tensor in model.named_parameters()}


def _apply(optimizer: torch.optim.Optimizer, parameters: list[Any], gradients: list[Tensor]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()


def train(directory: str, kind: str, tied: bool) -> dict[str, Any]:
    model = ParallelModule(directory, dict(plain(tied=tied).named_parameters()))
    optimizer = optimizer_of(kind, list(model.parameters()))
    losses = []
    for batch in range(BATCHES):
        x, target = data(seed=batch)
        loss = model(x, target)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if batch == 2:  # between two batches the model is evaluated as it is
            model.eval()
            with torch.no_grad():
                assert math.isfinite(model(x, target)["loss"].item())
            model.train()
    loss = model.finish()["loss"]
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    buffer = model._buffer
    assert buffer is not None
    with pytest.raises(InputError, match="no batch is in flight"):
        model.finish()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return {"losses": losses, "state": state, "log": buffer.log, "versions": buffer.most_versions}


@pytest.mark.parametrize(
    ("cuts", "dp", "kind", "tied"),
    [
        *((1, 1, "sgd", False), (2, 1, "sgd", True), (2, 1, "adamw", False), (2, 2, "adamw", True)),
        pytest.param(3, 1, "adamw", False, marks=pytest.mark.slow),
        pytest.param(3, 1, "sgd", True, marks=pytest.mark.slow),
    ],
)
def test_equal_to_gradients_applied_one_step_late(cuts: int, dp: int, kind: str, tied: bool, tmp_path: Path) -> None:
    emit(tmp_path, cuts=cuts, dp=dp, microbatches=4, schedule="2bw", tied=tied)
    losses, weights = late(kind, tied)
    for rank, found in enumerate(launch(train, cuts * dp, str(tmp_path), kind, tied)):
        assert math.isnan(found["losses"][0])
        assert found["losses"][1:] == pytest.approx(losses, rel=1e-12)
        for name, tensor in weights.items():
            torch.testing.assert_close(found["state"][name], tensor, rtol=1e-11, atol=1e-12)
        # The paper's formula for the k-th microbatch, counted from one.
        for batch, microbatch, used in found["log"]:
            k = batch * 4 + microbatch + 1
            assert used == version(batch) == max((k - 1) // 4 - 1, 0)
        assert len(found["log"]) == 4 * BATCHES
        assert found["versions"] == (2 if rank // dp < cuts - 1 else 1)


def train_two(*directories: str) -> list[str]:
    """What each of two models in one job says to each call, while the first has a batch on its way and after."""
    models = [ParallelModule(each, dict(plain().named_parameters())) for each in directories]
    x, target = data(seed=0)
    said = []
    begun, other = (partial(model, x, target) for model in models)
    calls: list[Callable[[], Any]] = [begun, other, models[0].finish, other]
    for call in calls:
        try:
            loss = call()["loss"]
        except InputError as error:
            said.append(str(error))
        else:
            said.append("" if math.isfinite(loss.item()) else "no loss")
    return said


def test_no_other_model_runs_while_a_batch_is_on_its_way(tmp_path: Path) -> None:
    for name, schedule in (("first", "2bw"), ("second", "1f1b")):
        (tmp_path / name).mkdir()
        emit(tmp_path / name, cuts=2, dp=1, microbatches=4, schedule=schedule)
    for said in launch(train_two, 2, str(tmp_path / "first"), str(tmp_path / "second")):
        begun, refused, ended, after = said
        assert (begun, ended, after) == ("no loss", "", "")
        assert "call that model's finish() on all ranks" in refused
