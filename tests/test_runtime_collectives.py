"""Every transition between placements against its meaning: values, gradients and what is counted.

A tensor of each placement is made from a whole one, moved, and read back as a whole; the gradient likewise. Placement
and gradient form a pair, so the test knows from the letters alone what must come out.
"""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autopart.runtime import collectives
from autopart.runtime.mesh import Axis
from autopart.runtime.placement import Placement, join_shards, take_shard
from autopart.runtime.traffic import Count, Traffic
from autopart.runtime.transitions import Transition, transition
from launch import launch

PLACEMENTS = ["R", "P", "B", "S0", "S1", "S1/3", "S2"]
PAIRS = [(a, b) for a, b in itertools.product(PLACEMENTS, PLACEMENTS) if a != b]
SHAPE = (6, 18, 6)


def _axis() -> Axis:
    return Axis("tp", dist.get_world_size(), dist.get_rank(), dist.group.WORLD, Traffic())


def _noise(seed: int, rank: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(-9, 9, SHAPE, generator=generator).to(dtype)


def _local(text: str, whole: Tensor, axis: Axis, seed: int) -> Tensor:
    """This rank's part of a tensor so placed. P (and the gradient of B): random parts that sum to the whole."""
    placement = Placement.parse(text)
    if placement.is_shard:
        return take_shard(whole, placement, axis.index, axis.size).contiguous()
    if text == "P":
        others = [_noise(seed, rank, whole.dtype) for rank in range(1, axis.size)]
        return whole - sum(others) if axis.index == 0 else others[axis.index - 1]
    return whole.clone()


def _whole(text: str, parts: list[Tensor]) -> Tensor:
    """The whole from every rank's part; replicas have to agree."""
    placement = Placement.parse(text)
    if placement.is_shard:
        return join_shards(parts, placement)
    if text == "P":
        return torch.stack(parts).sum(0)
    for part in parts:
        assert torch.equal(part, parts[0]), f"replicas of {text} differ"
    return parts[0]


MIRROR = {"R": "R", "P": "B", "B": "P"}


def _parts(tensor: Tensor, axis: Axis) -> list[Tensor]:
    parts: list[Any] = [None] * axis.size
    dist.all_gather_object(parts, tensor)
    return parts


def _check_all(begun: bool) -> None:
    """begun: those that send something are begun and then waited for."""
    for source, target in PAIRS:
        move = transition(Placement.parse(source), Placement.parse(target))
        assert move is not None
        if begun and not (move.forward or move.backward):
            continue
        axis = _axis()
        whole = _noise(7, 0, torch.float64)
        x = _local(source, whole, axis, 8).requires_grad_()
        y = _begun(move, x, axis) if begun else move(x, axis)
        assert torch.equal(_whole(target, _parts(y.detach(), axis)), whole), (source, target)
        # The gradient has the mirror image of the placement.
        gradient = _noise(9, 0, torch.float64)
        back = {text: MIRROR.get(text, text) for text in (source, target)}
        y.backward(_local(back[target], gradient, axis, 10))
        assert x.grad is not None
        assert torch.equal(_whole(back[source], _parts(x.grad, axis)), gradient), (source, target)
        _check_counts(move, axis, x, y)
        integers = _local(source, whole.long(), axis, 8)
        moved = _begun(move, integers, axis) if begun else move(integers, axis)
        assert torch.equal(_whole(target, _parts(moved, axis)), whole.long())


def _begun(move: Transition, x: Tensor, axis: Axis) -> Tensor:
    options = {name: int(value) for name, value in move.arguments}
    return collectives.begin(getattr(collectives, move.name), x, axis, **options).wait()


def _check_counts(move: Transition, axis: Axis, x: Tensor, y: Tensor) -> None:
    """One call of what the table says, and nothing else."""
    whole = 8 * x.new_empty(SHAPE).numel()
    size = {"all_reduce": whole, "all_gather": whole, "reduce_scatter": whole, "all_to_all": whole // axis.size}
    expected = {}
    if move.forward:
        expected[move.forward, "tp", "forward"] = Count(1, size[move.forward])
    if move.backward:
        expected[move.backward, "tp", "backward"] = Count(1, size[move.backward])
    assert axis.traffic.counts() == expected, move


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_every_transition(processes: int, begun: bool) -> None:
    launch(_check_all, processes, begun)


def _check_fallback() -> None:
    def unsupported(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("ProcessGroupGloo does not support reduce_scatter")

    whole = torch.arange(8.0)
    kept, collectives._scatter_single = collectives._scatter_single, unsupported
    try:
        axis = _axis()
        share = collectives.reduce_scatter(whole * (axis.index + 1), axis, 0)
    finally:
        collectives._scatter_single = kept
    assert torch.equal(share, (3 * whole).chunk(2)[axis.index])
    assert axis.traffic.counts() == {("reduce_scatter", "tp", "forward"): Count(1, 32)}


def test_reduce_scatter_without_the_backend() -> None:
    launch(_check_fallback, 2)


def test_one_rank_returns_the_tensor_itself() -> None:
    x = torch.randn(SHAPE, requires_grad=True)
    for source, target in PAIRS:
        move = transition(Placement.parse(source), Placement.parse(target))
        assert move is not None and move(x, Axis("tp")) is x
        if move.forward or move.backward:
            assert _begun(move, x, Axis("tp")) is x


@pytest.mark.parametrize(
    ("source", "target", "call"),
    [
        ("S1", "R", "collectives.all_gather(x, tp, dim=1)"),
        ("S0/4b", "B", "collectives.all_gather_scatter_gradients(x, tp, dim=0, outer=4 * b)"),
        ("R", "S0/b", "collectives.split(x, tp, dim=0, outer=b)"),
        ("S2/3", "S0", "collectives.all_to_all(x, tp, dim=2, to_dim=0, outer=3)"),
        ("S2", "S0/2", "collectives.all_to_all(x, tp, dim=2, to_dim=0, to_outer=2)"),
        ("P", "R", "collectives.all_reduce(x, tp)"),
    ],
)
def test_calls_as_text(source: str, target: str, call: str) -> None:
    move = transition(Placement.parse(source), Placement.parse(target))
    assert move is not None and move.call("x", "tp") == call


def test_nothing_to_do() -> None:
    for text in PLACEMENTS:
        assert transition(Placement.parse(text), Placement.parse(text)) is None


def _gathered_by_no_old_name() -> list[float]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        axis = _axis()
        return axis.all_gather(torch.tensor([float(axis.index)])).flatten().tolist()


def test_gathers_by_a_name_that_is_not_deprecated() -> None:
    """torch 2.13 warns where the old one is called."""
    assert launch(_gathered_by_no_old_name, 2) == [[0.0, 1.0]] * 2
