"""Programs on several processes equal the plain model on one: loss, gradients, parameters after optimizer steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from autopart.runtime import ParallelModule
from autopart.runtime.manifest import Manifest
from emitted import WIDTH, data, emit, plain
from launch import ChildFailure, launch

STEPS = 3


def _loss_of(out: Any, target: Tensor, user_loss: bool) -> Tensor:
    return F.cross_entropy(out["logits"], target) if user_loss else out["loss"]


def _train(model: Any, parameters: Any, classes: int, user_loss: bool, accumulate: int = 1) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1)
    losses = []
    gradients: dict[str, Tensor] = {}
    for step in range(STEPS):
        for part in range(accumulate):
            x, target = data(8, classes, seed=10 * step + part)
            loss = _loss_of(model(x, target=target), target, user_loss)
            (loss / accumulate).backward()
            losses.append(loss.item())
        if step == 0:
            gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "gradients": gradients}


def _run(directory: str, variant: dict[str, bool], accumulate: int, adopt: bool) -> dict[str, Any]:
    """On every rank: trains the emitted program; returns what this rank holds and the gathered state."""
    original = plain(**variant)
    classes = WIDTH if variant.get("tied") else 4
    before = list(original.parameters())
    originals: dict[str, Tensor] = dict(original.named_parameters())
    model = ParallelModule(directory, originals)
    result = _train(
        model, before if adopt else model.parameters(), classes, variant.get("user_loss", False), accumulate
    )
    if adopt:
        own = {id(p) for p in model.parameters()}
        assert own <= {id(p) for p in before}
        assert all(p.numel() == 0 and p.grad is None for p in before if id(p) not in own)
    result["state"] = model.state_dict()
    model.eval()
    result["eval"] = model(*data(8, classes, seed=99))
    return result


CASES = [
    # stages, replicas, microbatches, schedule, variant
    (1, 1, 1, "1f1b", {}),
    (1, 1, 4, "gpipe", {}),
    (1, 2, 2, "1f1b", {}),
    (2, 1, 1, "1f1b", {}),  # the gradient is awaited before the forward is done
    (2, 1, 4, "1f1b", {}),
    (2, 1, 4, "gpipe", {}),
    pytest.param(2, 2, 2, "1f1b", {}, marks=pytest.mark.slow),
    pytest.param(3, 1, 4, "1f1b", {"skip": True}, marks=pytest.mark.slow),
    pytest.param(3, 1, 2, "gpipe", {"skip": True}, marks=pytest.mark.slow),
    (3, 1, 4, "1f1b", {"tied": True, "skip": True}),
    pytest.param(2, 2, 2, "1f1b", {"tied": True}, marks=pytest.mark.slow),
    (1, 1, 2, "1f1b", {"tied": True}),
    (1, 1, 1, "1f1b", {"user_loss": True}),
    pytest.param(2, 2, 2, "1f1b", {"user_loss": True}, marks=pytest.mark.slow),
    (3, 1, 2, "1f1b", {"user_loss": True, "skip": True, "tied": True}),
]


@pytest.mark.filterwarnings("ignore:the loss is computed outside")
@pytest.mark.parametrize(("stages", "replicas", "microbatches", "schedule", "variant"), CASES)
def test_equals_the_plain_model(
    tmp_path: Path, stages: int, replicas: int, microbatches: int, schedule: str, variant: dict[str, bool]
) -> None:
    emit(tmp_path, stages, replicas, microbatches, schedule, **variant)
    adopt = microbatches == 4
    ranks = launch(_run, stages * replicas, str(tmp_path), variant, 1, adopt)
    _compare(ranks, variant, 1)


def test_a_deeper_warmup_equals_the_plain_model(tmp_path: Path) -> None:
    emit(tmp_path, 3, 1, 4, skip=True)
    replace(Manifest.load(tmp_path), warmup=(4, 2, 1)).save(tmp_path)
    _compare(launch(_run, 3, str(tmp_path), {"skip": True}, 1, True), {"skip": True}, 1)


def test_a_warmup_with_which_stages_wait_for_each_other_is_refused(tmp_path: Path) -> None:
    emit(tmp_path, 2, 1, 4)
    replace(Manifest.load(tmp_path), warmup=(0, 1)).save(tmp_path)
    with pytest.raises(ChildFailure, match="the schedule deadlocks"):
        launch(_run, 2, str(tmp_path), {}, 1, True)


def test_gradient_accumulation(tmp_path: Path) -> None:
    emit(tmp_path, 2, 1, 2)
    _compare(launch(_run, 2, str(tmp_path), {}, 3, False), {}, 3)


def _compare(ranks: list[dict[str, Any]], variant: dict[str, bool], accumulate: int) -> None:
    model = plain(**variant)
    classes = WIDTH if variant.get("tied") else 4
    expected = _train(model, model.parameters(), classes, variant.get("user_loss", False), accumulate)
    seen: set[str] = set()
    for result in ranks:
        torch.testing.assert_close(result["losses"], expected["losses"], rtol=1e-9, atol=1e-12)
        for name, gradient in result["gradients"].items():
            torch.testing.assert_close(gradient, expected["gradients"][name], rtol=1e-9, atol=1e-12)
            seen.add(name)
        state = model.state_dict()
        assert result["state"].keys() == state.keys()
        for name, tensor in state.items():
            torch.testing.assert_close(result["state"][name], tensor, rtol=1e-9, atol=1e-12)
        with torch.no_grad():
            outputs = model(*data(8, classes, seed=99))
        for name, tensor in outputs.items():
            torch.testing.assert_close(result["eval"][name], tensor, rtol=1e-9, atol=1e-12)
    assert seen == expected["gradients"].keys()
