"""Shares of tensors as boxes inside the whole tensor.

A rank's share is cut into boxes, of which a share inside several outer blocks has several. Boxes are what a checkpoint
stores (:mod:`autopart.runtime.stored_shares`), and what is exchanged where shares are divided anew.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from autopart.runtime.placement import Placement, local_cuts, local_size

# One mesh axis: the placement on it, this rank's index, the number of ranks.
Cut = tuple[Placement, int, int]
# What a rank has of one dim: (start in the whole, length, start in the share) of each run.
Runs = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a share: where it lies in the whole tensor and where in the share."""

    offset: tuple[int, ...]
    size: tuple[int, ...]
    local: tuple[int, ...]

    def of(self, share: Tensor) -> Tensor:
        """The box as a view of the share."""
        for dim, (start, length) in enumerate(zip(self.local, self.size, strict=True)):
            share = share.narrow(dim, start, length)
        return share


@dataclass(frozen=True, slots=True)
class Piece:
    """A rank's share of a tensor with the shape ``shape``: made of ``boxes``, which lie in ``tensor``."""

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    tensor: Tensor


def boxes_of(shape: Sequence[int], cuts: Sequence[Cut]) -> tuple[Box, ...]:
    """The boxes of the share that :func:`autopart.runtime.placement.take_share` takes."""
    local = local_cuts([cut for cut, _, _ in cuts], [parts for _, _, parts in cuts])
    return cut_boxes(shape, [(cut, *cuts[position][1:]) for position, cut in local])


def cut_boxes(shape: Sequence[int], cuts: Sequence[Cut]) -> tuple[Box, ...]:
    """The boxes of the share that sharded placements leave, each of what the ones before left."""
    return tuple(
        Box(tuple(r[0] for r in choice), tuple(r[1] for r in choice), tuple(r[2] for r in choice))
        for choice in itertools.product(*cut_runs(shape, cuts))
    )


def cut_runs(shape: Sequence[int], cuts: Sequence[Cut]) -> tuple[Runs, ...]:
    """By dim the runs of that share, whose products are its boxes."""
    return tuple(
        _runs(size, [(cut.outer, index, parts) for cut, index, parts in cuts if cut.dim == dim])
        for dim, size in enumerate(shape)
    )


def whole(shape: Sequence[int]) -> tuple[Box, ...]:
    """The one box of a tensor that is not divided."""
    return boxes_of(shape, ())


def _runs(size: int, cuts: Iterable[tuple[int, int, int]]) -> Runs:
    runs = [(0, size)]
    for outer, index, parts in cuts:
        inner = sum(length for _, length in runs) // outer
        share = local_size(inner, parts)
        taken = (run for block in range(outer) for run in _slice(runs, block * inner + index * share, share))
        runs = _joined(taken)
    starts = itertools.accumulate((length for _, length in runs), initial=0)
    return tuple((start, length, local) for (start, length), local in zip(runs, starts, strict=False))


def _slice(runs: Sequence[tuple[int, int]], start: int, length: int) -> list[tuple[int, int]]:
    taken, position = [], 0
    for begin, size in runs:
        low, high = max(start, position), min(start + length, position + size)
        if low < high:
            taken.append((begin + low - position, high - low))
        position += size
    return taken


def _joined(runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, length in runs:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((start, length))
    return joined or [(0, 0)]
