"""A model that is dropped leaves nothing behind: its weights are freed, whatever was done with it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from autopart.runtime.errors import InputError
from launch import launch
from two_layers import NAMES, PLANS, PP, TP, batch, parallel


def left_behind(limits: dict[str, Any]) -> tuple[int, list[str]]:
    """How many weights a model had that was trained and dropped, and which of its objects are still there."""
    gc.collect()
    model: Any = parallel(limits)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(**batch()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    if limits.get("schedule") == "2bw":
        model.finish()
    there = {"the model": weakref.ref(model)} | {name: weakref.ref(p) for name, p in model.named_parameters()}
    del model, optimizer
    gc.collect()
    return len(there) - 1, [name for name, reference in there.items() if reference() is not None]


OTHERS: dict[str, dict[str, Any]] = {
    "zero 2": {"dp": 2, "zero": 2},
    "zero 3": {"dp": 2, "zero": 3},
    "2bw": PP | {"schedule": "2bw"},
    "split": PP | {"schedule": "zb-h1", "recompute": "full"},
}


@pytest.mark.parametrize("limits", [*PLANS, *OTHERS.values()], ids=[*NAMES, *OTHERS])
def test_a_trained_model_is_freed(limits: dict[str, Any]) -> None:
    for weights, left in launch(left_behind, 2, limits):
        assert weights and not left


def norm_without_its_model() -> str:
    model = parallel(TP)
    model(**batch()).backward()
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    del model
    gc.collect()
    with pytest.raises(InputError) as caught:
        nn.utils.clip_grad_norm_(parameters, 1.0)
    return str(caught.value)


def test_gradients_that_are_kept_longer_have_no_norm_of_one_rank() -> None:
    for message in launch(norm_without_its_model, 2):
        assert "whose model is gone; keep the model" in message
