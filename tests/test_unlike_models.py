"""Ranks that build unlike models: told by each, where a collective of unlike sizes would end a process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopart
from autopart.runtime.errors import PlanError
from clusters import ideal
from launch import launch


def refusal(model: nn.Module) -> str:
    try:
        model(torch.ones(4, 4))
    except PlanError as error:
        return str(error)
    return ""


def told(change: str) -> str:
    layers = [nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)]
    if dist.get_rank() == 1:
        layers[2] = {
            "bias": nn.Linear(8, 4, bias=False),
            "shape": nn.Linear(8, 5),
            "dtype": nn.Linear(8, 4).double(),
        }[change]
    model = autopart.parallelize(nn.Sequential(*layers), cluster=ideal(2), verbose=False, dp=2)
    return refusal(model)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ("bias", "'2.bias' is torch.float32 [4] on rank 0 and missing on rank 1"),
        ("shape", "'2.weight' is torch.float32 [4, 8] on rank 0 and torch.float32 [5, 8] on rank 1"),
        ("dtype", "'2.weight' is torch.float32 [4, 8] on rank 0 and torch.float64 [4, 8] on rank 1"),
    ],
)
def test_unlike_models_are_told_on_every_rank(change: str, found: str) -> None:
    for text in launch(told, 2, change):
        assert found in text and "build the same model" in text


def told_of_options(change: str) -> str:
    own: dict[str, Any] = {"microbatches": 2, "pins": {"0": 0}}
    if dist.get_rank() == 1:
        own = {
            "microbatches": {**own, "microbatches": 4},
            "zero": {**own, "zero": 1},
            "batch": {**own, "batch": "local"},
        }[change]
    model = autopart.parallelize(nn.Sequential(nn.Linear(4, 4)), cluster=ideal(2), verbose=False, dp=2, **own)
    return refusal(model)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ("microbatches", "with microbatches 2 on rank 0 and 4 on rank 1"),
        ("zero", "with zero missing on rank 0 and 1 on rank 1"),
        ("batch", "with batch 'global' on rank 0 and 'local' on rank 1"),
    ],
)
def test_unlike_options_are_told_on_every_rank(change: str, found: str) -> None:
    for text in launch(told_of_options, 2, change):
        assert found in text and "the same options" in text
