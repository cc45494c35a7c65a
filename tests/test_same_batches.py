"""Ranks that are given unlike batches of equal sizes: refused where they compute a sample together, else told."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

import autopart
from autopart.runtime.errors import BatchError
from clusters import ideal
from launch import launch
from two_layers import batch, build


def given(of_rank: bool, scale: float = 0.0) -> dict[str, Tensor]:
    found = batch()
    if of_rank:  # as a sampler that goes by the process's rank
        found["x"] = found["x"].roll(dist.get_rank(), 0)
    return {name: value * (1 + scale * dist.get_rank()) for name, value in found.items()}


def told(limits: dict[str, Any], later: bool) -> list[str]:
    model: Any = autopart.parallelize(build(), cluster=ideal(2), verbose=False, **limits)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model(**given(not later, 1e-9)).backward()
        try:
            model(**given(True)).backward()
        except BatchError as error:
            return [str(error)]
    return [str(item.message) for item in found]


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("limits", [{"pp": 2, "microbatches": 2}, {"tp": 2}], ids=str)
def test_unlike_batches_within_a_replica_are_refused(limits: dict[str, Any], later: bool) -> None:
    for texts in launch(told_or_refused, 2, limits, later):
        assert len(texts) == 1 and "ranks 0 and 1 were given unlike values of 'x'" in texts[0]


def told_or_refused(limits: dict[str, Any], later: bool) -> list[str]:
    try:
        return told(limits, later)
    except BatchError as error:
        return [str(error)]


def test_replicas_with_unlike_batches_are_told_once() -> None:
    for texts in launch(told, 2, {"dp": 2}, False):
        assert len(texts) == 1 and "DistributedSampler" in texts[0]
    assert launch(told, 2, {"dp": 2, "batch": "local"}, False) == [[], []]
