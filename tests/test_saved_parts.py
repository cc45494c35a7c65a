"""What scripts save themselves: an optimizer's state is of a rank's own part, and state_dict() is a call of all."""

from __future__ import annotations

import io
import time
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopart
from autopart.runtime import agreement
from autopart.runtime.checkpoint import load, save
from autopart.runtime.errors import InputError, PlanError
from clusters import ideal
from launch import launch
from two_layers import batch, build


def started(limits: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = autopart.parallelize(build(), cluster=ideal(2), verbose=False, **limits)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model: Any, optimizer: torch.optim.Optimizer) -> float:
    loss = model(**batch())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


def resumed(limits: dict[str, Any], writer: int | None) -> None:
    """Goes on after two steps from what a rank has saved: a given one, or each its own."""
    model, optimizer = started(limits)
    for _ in range(2):
        step(model, optimizer)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    files: list[Any] = [None, None]
    dist.all_gather_object(files, file.getvalue())
    expected = [step(model, optimizer) for _ in range(2)]
    model, optimizer = started(limits)
    found = torch.load(io.BytesIO(files[dist.get_rank() if writer is None else writer]))
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    losses = [step(model, optimizer) for _ in range(2)]
    assert losses == pytest.approx(expected, rel=1e-12)


def refused_on_one(limits: dict[str, Any]) -> str:
    """The first step after loading rank 0's state: no further one, which the ranks would not take together."""
    model, optimizer = started(limits)
    step(model, optimizer)
    files: list[Any] = [None, None]
    dist.all_gather_object(files, optimizer.state_dict())
    optimizer.load_state_dict(files[0])
    try:
        step(model, optimizer)
    except PlanError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("limits", [{"dp": 2, "zero": 1}, {"dp": 2, "zero": 3}, {"pp": 2, "microbatches": 2}], ids=str)
def test_state_of_other_parts_is_refused(limits: dict[str, Any]) -> None:
    first, second = launch(refused_on_one, 2, limits)
    assert first == "" and "rank 0 of 2 saved" in second and "runtime.checkpoint.save" in second
    launch(resumed, 2, limits, None)


def test_state_of_the_whole_model_fits_everywhere() -> None:
    launch(resumed, 2, {"dp": 2}, 0)


def told_nothing(folder: str) -> bool:
    """A checkpoint knows nothing of who saved, and replaces what was loaded before it."""
    model, optimizer = started({"dp": 2, "zero": 1})
    step(model, optimizer)
    save(folder, model, optimizer)
    files: list[Any] = [None, None]
    dist.all_gather_object(files, optimizer.state_dict())
    optimizer.load_state_dict(files[0])
    load(folder, model, optimizer)
    step(model, optimizer)
    return not any("part" in key for group in optimizer.param_groups for key in group if key != "params")


def test_checkpoints_go_on_anywhere(tmp_path: Any) -> None:
    assert all(launch(told_nothing, 2, str(tmp_path)))


def apart(limits: dict[str, Any], call: str, folder: str) -> str:
    model, optimizer = started(limits)
    step(model, optimizer)
    try:
        if dist.get_rank() == 1:
            step(model, optimizer)
        elif call == "state_dict()":
            model.state_dict()
        elif call == "checkpoint.save()":
            save(folder, model, optimizer)
        elif call == "checkpoint.load()":
            load(folder, model, optimizer)
        elif call == "the model in evaluation":
            model.eval()(**batch())
        else:
            with torch.no_grad():
                model(**batch())
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "call",
    [
        "state_dict()",
        "checkpoint.save()",
        "checkpoint.load()",
        "the model in evaluation",
        "the model in training without gradients",
    ],
)
@pytest.mark.parametrize("limits", [{"dp": 2, "zero": 1}, {"pp": 2, "microbatches": 2}], ids=str)
def test_a_call_that_one_rank_makes(limits: dict[str, Any], call: str, tmp_path: Any) -> None:
    """As where a script evaluates, or saves, on the first rank."""
    first, second = launch(apart, 2, limits, call, str(tmp_path))
    assert f"this rank calls {call} while rank 1 calls the model in training;" in first
    assert f"this rank calls the model in training while rank 0 calls {call};" in second


def late() -> list[str]:
    model, optimizer = started({"dp": 2, "zero": 1})
    step(model, optimizer)
    if dist.get_rank() == 1:
        time.sleep(1.0)
    with warnings.catch_warnings(record=True) as told, pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")
        patch.setattr(agreement, "PATIENCE", timedelta(seconds=0.2))
        model.state_dict()
    return [str(item.message) for item in told]


def test_a_rank_says_that_it_waits() -> None:
    first, _ = launch(late, 2)
    assert any("has waited for other ranks" in text and "on every rank" in text for text in first)
