"""What ranks of two stages with unlike meshes send each other: the overlapping pieces of their shares, and no more.

A value of one microbatch is cut by samples over the replicas of a stage and by its placements over the tensor axes of a
replica. So each rank has boxes of the whole; a rank of the other stage needs boxes of the same whole. Every overlap is
one message. Where several ranks of the sending stage have equal copies, one of them sends to each receiver, in turn.

Gradients go back by the same rule with the stages exchanged, as the gradient of what is replicated is replicated and of
what is sharded sharded (other placements do not cross between unlike meshes). Only values that do not depend on samples
differ: every replica has a copy, and a part of the gradient, so each receiving replica sends its gradient to one copy,
where these are added; a copy without receivers has the gradient zero, and the sum over replicas is right.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autopart.runtime.manifest import Size, size_of
from autopart.runtime.placement import Placement
from autopart.runtime.shares import Box, boxes_of

Slices = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Side:
    """A stage as an exchange sees it.

    ranks: row-major over (replicas, *tensor axes). samples: of one microbatch on each replica. sizes: of the tensor
    axes; placements: of the value on them, R or S.
    """

    ranks: tuple[int, ...]
    samples: tuple[int, ...]
    sizes: tuple[int, ...]
    placements: tuple[Placement, ...]

    def __post_init__(self) -> None:
        assert len(self.ranks) == len(self.samples) * math.prod(self.sizes), "ranks do not fill the mesh"
        assert all(p.is_shard or str(p) == "R" for p in self.placements), f"{self.placements} cannot be sent in pieces"

    def replica(self, index: int) -> tuple[int, ...]:
        width = math.prod(self.sizes)
        return self.ranks[index * width : (index + 1) * width]


@dataclass(frozen=True, slots=True)
class Message:
    """A piece: ``take`` of the source rank's share becomes ``put`` of the target rank's, or is added to it."""

    source: int
    target: int
    take: Slices
    put: Slices

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(part.stop - part.start for part in self.take)


def rows_of(samples: int, shares: Sequence[int]) -> tuple[int, ...]:
    """Whole samples for replicas with these parts of a microbatch: exactly the parts where these divide it.

    Else what is left over goes to those that miss the most, and each has one at least, where there are as many.
    """
    total = sum(shares)
    rows = [samples * share // total for share in shares]
    missing = sorted(range(len(shares)), key=lambda index: (-(samples * shares[index] % total), index))
    for index in missing[: samples - sum(rows)]:
        rows[index] += 1
    while 0 in rows and max(rows) > 1:
        rows[rows.index(max(rows))] -= 1
        rows[rows.index(0)] += 1
    return tuple(rows)


def local_shape(shape: Sequence[Size], side: Side, rank: int) -> tuple[int, ...]:
    """The shape of one rank's share. shape: of a replica's value with ``b`` samples."""
    boxes = _boxes(shape, side, None)[rank]
    return tuple(max(box.local[dim] + box.size[dim] for box in boxes) for dim in range(len(shape)))


def forward_messages(shape: Sequence[Size], batch_dim: int | None, source: Side, target: Side) -> tuple[Message, ...]:
    """What carries a value from one stage to another, in an order that all ranks agree on.

    shape: of a replica's value, with multiples of ``b`` for its samples; batch_dim: the dim that these lie in, None for
    a value that does not depend on samples.
    """
    return tuple(_overlaps(_boxes(shape, source, batch_dim), _boxes(shape, target, batch_dim)))


def backward_messages(shape: Sequence[Size], batch_dim: int | None, source: Side, target: Side) -> tuple[Message, ...]:
    """What carries the value's gradient back from ``target`` to ``source``. Pieces for one place are added up."""
    if batch_dim is not None:
        return forward_messages(shape, batch_dim, target, source)
    back, there = _boxes(shape, target, None), _boxes(shape, source, None)
    found: list[Message] = []
    for index in range(len(target.samples)):
        copy = source.replica(index % len(source.samples))
        mine = {rank: back[rank] for rank in target.replica(index)}
        found += _overlaps(mine, {rank: there[rank] for rank in copy})
    return tuple(found)


def _boxes(shape: Sequence[Size], side: Side, batch_dim: int | None) -> dict[int, tuple[Box, ...]]:
    """The boxes of each rank, with offsets in the value of the whole microbatch."""
    found: dict[int, tuple[Box, ...]] = {}
    before = 0
    for index, samples in enumerate(side.samples):
        local = tuple(size_of(size, samples) for size in shape)
        cuts = [replace(p, outer=p.blocks(samples), batched=False) if p.is_shard else p for p in side.placements]
        for position, rank in enumerate(side.replica(index)):
            coordinates = _coordinates(position, side.sizes)
            boxes = boxes_of(local, list(zip(cuts, coordinates, side.sizes, strict=True)))
            if batch_dim is not None:
                start = size_of(shape[batch_dim], 1) * before if isinstance(shape[batch_dim], str) else 0
                boxes = tuple(replace(box, offset=_moved(box.offset, batch_dim, start)) for box in boxes)
            found[rank] = boxes
        before += samples
    return found


def _coordinates(position: int, sizes: Sequence[int]) -> list[int]:
    found = []
    for size in reversed(sizes):
        found.append(position % size)
        position //= size
    return found[::-1]


def _moved(offset: tuple[int, ...], dim: int, by: int) -> tuple[int, ...]:
    return (*offset[:dim], offset[dim] + by, *offset[dim + 1 :])


def _overlaps(have: dict[int, tuple[Box, ...]], want: dict[int, tuple[Box, ...]]) -> Iterator[Message]:
    copies: dict[tuple[Box, ...], list[int]] = {}
    for rank, boxes in have.items():
        copies.setdefault(boxes, []).append(rank)
    for position, (target, wanted) in enumerate(want.items()):
        for boxes, ranks in copies.items():
            source = ranks[position % len(ranks)]
            for mine in boxes:
                for theirs in wanted:
                    common = _common(mine, theirs)
                    if common is not None:
                        yield Message(source, target, *common)


def _common(mine: Box, theirs: Box) -> tuple[Slices, Slices] | None:
    take: list[slice] = []
    put: list[slice] = []
    for dim in range(len(mine.size)):
        low = max(mine.offset[dim], theirs.offset[dim])
        high = min(mine.offset[dim] + mine.size[dim], theirs.offset[dim] + theirs.size[dim])
        if low >= high:
            return None
        for box, found in ((mine, take), (theirs, put)):
            start = low - box.offset[dim] + box.local[dim]
            found.append(slice(start, start + high - low))
    return tuple(take), tuple(put)
