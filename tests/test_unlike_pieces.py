"""What crosses between stages with unlike meshes is cut into overlapping pieces; rows of a batch into unlike parts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from autopart.runtime.placement import REPLICATE, Placement, shard, take_share
from autopart.runtime.resharding import (
    Message,
    Side,
    backward_messages,
    elements_sent,
    forward_messages,
    local_shape,
    rows_of,
)

SHAPE = ("b", 4, 6)


def side(first: int, samples: tuple[int, ...], *axes: tuple[Placement, int]) -> Side:
    sizes = tuple(size for _, size in axes)
    count = len(samples) * math.prod(sizes)
    return Side(tuple(range(first, first + count)), samples, sizes, tuple(placement for placement, _ in axes))


SIDES = {
    "one": side(0, (8,)),
    "dp2": side(0, (4, 4)),
    "dp3:1": side(0, (6, 2)),
    "dp4": side(0, (2,) * 4),
    "tp2": side(0, (8,), (REPLICATE, 2)),
    "tp2 split": side(0, (8,), (shard(1), 2)),
    "tp2 blocks": side(0, (8,), (shard(2, 3), 2)),
    "tp3 split": side(0, (8,), (shard(2), 3)),
    "dp2 tp2": side(0, (4, 4), (shard(2), 2)),
    "dp2 2x2": side(0, (4, 4), (shard(1), 2), (REPLICATE, 2)),
}


def moved(found: Side, by: int) -> Side:
    return replace(found, ranks=tuple(rank + by for rank in found.ranks))


def share_of(value: Tensor, found: Side, rank: int) -> Tensor:
    width = math.prod(found.sizes)
    replica, position = divmod(found.ranks.index(rank), width)
    start = sum(found.samples[:replica])
    coordinates = list(itertools.product(*map(range, found.sizes)))[position]
    return take_share(value[start : start + found.samples[replica]], found.placements, found.sizes, coordinates)


def carry(messages: tuple[Message, ...], have: dict[int, Tensor], target: Side) -> dict[int, Tensor]:
    made = {rank: torch.zeros(local_shape(SHAPE, target, rank), dtype=torch.float64) for rank in target.ranks}
    for message in messages:
        made[message.target][message.put] += have[message.source][message.take]
    return made


def counted(messages: Iterable[Message]) -> dict[tuple[int, int], int]:
    found: dict[tuple[int, int], int] = {}
    for message in messages:
        pair = message.source, message.target
        found[pair] = found.get(pair, 0) + math.prod(message.shape)
    return found


@pytest.mark.parametrize("target", SIDES)
@pytest.mark.parametrize("source", SIDES)
def test_pieces_make_every_share(source: str, target: str) -> None:
    """Forward and back, and no element is sent twice to one rank."""
    here, there = SIDES[source], moved(SIDES[target], 100)
    value = torch.arange(8 * 4 * 6, dtype=torch.float64).reshape(8, 4, 6) + 1
    messages = forward_messages(SHAPE, 0, here, there)
    made = carry(messages, {rank: share_of(value, here, rank) for rank in here.ranks}, there)
    for rank in there.ranks:
        assert torch.equal(made[rank], share_of(value, there, rank))
        assert sum(math.prod(m.shape) for m in messages if m.target == rank) == made[rank].numel()
    returned = backward_messages(SHAPE, 0, here, there)
    back = carry(returned, made, here)
    assert all(torch.equal(back[rank], share_of(value, here, rank)) for rank in here.ranks)
    assert elements_sent(SHAPE, 0, here, there) == counted(messages)
    assert elements_sent(SHAPE, 0, here, there, back=True) == counted(returned)


@pytest.mark.parametrize("target", ["one", "dp2", "dp4", "dp2 tp2"])
@pytest.mark.parametrize("source", ["one", "dp2", "tp2 split", "dp4"])
def test_gradients_of_what_has_no_samples_add_up(source: str, target: str) -> None:
    """Each replica has a part of the gradient; the copies' gradients add up to the sum of all parts."""
    here, there = SIDES[source], moved(SIDES[target], 100)
    shape = (4, 6)
    parts = torch.arange(len(there.samples) * 24, dtype=torch.float64).reshape(len(there.samples), 4, 6) + 1
    width = math.prod(there.sizes)
    inner = replace(there, placements=tuple(_lower(p) for p in there.placements))
    outer = replace(here, placements=tuple(_lower(p) for p in here.placements))

    def cut(value: Tensor, found: Side, position: int) -> Tensor:
        coordinates = list(itertools.product(*map(range, found.sizes)))[position % math.prod(found.sizes)]
        return take_share(value, found.placements, found.sizes, coordinates)

    have = {rank: cut(parts[index // width], inner, index) for index, rank in enumerate(inner.ranks)}
    made = {rank: torch.zeros(local_shape(shape, outer, rank), dtype=torch.float64) for rank in outer.ranks}
    messages = backward_messages(shape, None, outer, inner)
    assert elements_sent(shape, None, outer, inner, back=True) == counted(messages)
    for message in messages:
        made[message.target][message.put] += have[message.source][message.take]
    own = math.prod(outer.sizes)
    for position in range(own):
        total = torch.stack([made[rank] for index, rank in enumerate(outer.ranks) if index % own == position]).sum(0)
        assert torch.equal(total, cut(parts.sum(0), outer, position))


def _lower(placement: Placement) -> Placement:
    return shard(placement.dim - 1, placement.outer) if placement.is_shard else placement


@pytest.mark.parametrize("shares", [(1,), (3, 1), (3, 3, 2), (1, 1, 1, 1), (5, 1), (22, 21, 21)])
def test_whole_rows(shares: tuple[int, ...]) -> None:
    """The parts where they divide, else near them, none without a row."""
    for samples in range(len(shares), 3 * sum(shares)):
        rows = rows_of(samples, shares)
        assert sum(rows) == samples and min(rows) >= 1
        exact = [samples * share / sum(shares) for share in shares]
        if all(part.is_integer() for part in exact):
            assert list(rows) == exact
        if min(exact) >= 1:
            assert all(abs(row - part) < 1 for row, part in zip(rows, exact, strict=True))
