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

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from autopart.runtime.manifest import Size, size_of
from autopart.runtime.placement import Placement, local_cuts
from autopart.runtime.shares import Runs, cut_runs

Slices = tuple[slice, ...]
_Share = tuple[Runs, ...]
_Common = list[tuple[slice, slice]]
"""Of two shares in one dim the parts of both that are the same."""


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
    return tuple(sum(length for _, length, _ in runs) for runs in _shares(shape, side, None)[rank])


def forward_messages(shape: Sequence[Size], batch_dim: int | None, source: Side, target: Side) -> tuple[Message, ...]:
    """What carries a value from one stage to another, in an order that all ranks agree on.

    shape: of a replica's value, with multiples of ``b`` for its samples; batch_dim: the dim that these lie in, None for
    a value that does not depend on samples.
    """
    return tuple(_overlaps(_shares(shape, source, batch_dim), _shares(shape, target, batch_dim)))


def backward_messages(shape: Sequence[Size], batch_dim: int | None, source: Side, target: Side) -> tuple[Message, ...]:
    """What carries the value's gradient back from ``target`` to ``source``. Pieces for one place are added up."""
    sides = _sides_back(shape, batch_dim, source, target)
    return tuple(message for have, want in sides for message in _overlaps(have, want))


def elements_sent(
    shape: Sequence[Size], batch_dim: int | None, source: Side, target: Side, back: bool = False
) -> dict[tuple[int, int], int]:
    """Of these messages, or back of a gradient's, how many elements each rank sends to which."""
    sides: Iterable[tuple[dict[int, _Share], dict[int, _Share]]]
    if back:
        sides = _sides_back(shape, batch_dim, source, target)
    else:
        sides = [(_shares(shape, source, batch_dim), _shares(shape, target, batch_dim))]
    found: dict[tuple[int, int], int] = {}
    for have, want in sides:
        for sender, receiver, dims in _overlapping(have, want):
            count = math.prod(sum(take.stop - take.start for take, _ in common) for common in dims)
            found[sender, receiver] = found.get((sender, receiver), 0) + count
    return found


def _sides_back(
    shape: Sequence[Size], batch_dim: int | None, source: Side, target: Side
) -> Iterator[tuple[dict[int, _Share], dict[int, _Share]]]:
    """The shares of ranks that send a gradient, with those of ranks that get it."""
    back, there = _shares(shape, target, batch_dim), _shares(shape, source, batch_dim)
    if batch_dim is not None:
        yield back, there
        return
    for index in range(len(target.samples)):
        copy = source.replica(index % len(source.samples))
        yield {rank: back[rank] for rank in target.replica(index)}, {rank: there[rank] for rank in copy}


def _shares(shape: Sequence[Size], side: Side, batch_dim: int | None) -> dict[int, _Share]:
    """The share of each rank, with offsets in the value of the whole microbatch."""
    found: dict[int, _Share] = {}
    alike: dict[int, list[_Share]] = {}  # by a replica's samples
    before = 0
    for index, samples in enumerate(side.samples):
        if samples not in alike:
            alike[samples] = _replica_shares(shape, side, samples)
        for rank, share in zip(side.replica(index), alike[samples], strict=True):
            if batch_dim is None:
                found[rank] = share
                continue
            start = size_of(shape[batch_dim], 1) * before if isinstance(shape[batch_dim], str) else 0
            moved = tuple((offset + start, length, local) for offset, length, local in share[batch_dim])
            found[rank] = (*share[:batch_dim], moved, *share[batch_dim + 1 :])
        before += samples
    return found


def _replica_shares(shape: Sequence[Size], side: Side, samples: int) -> list[_Share]:
    """The shares of the ranks of a replica with so many samples, in order, with offsets in its own value."""
    local = tuple(size_of(size, samples) for size in shape)
    placements = [replace(p, outer=p.blocks(samples), batched=False) if p.is_shard else p for p in side.placements]
    cuts = local_cuts(placements, side.sizes)
    return [
        cut_runs(local, [(cut, coordinates[axis], side.sizes[axis]) for axis, cut in cuts])
        for coordinates in itertools.product(*map(range, side.sizes))
    ]


def _overlaps(have: dict[int, _Share], want: dict[int, _Share]) -> Iterator[Message]:
    for source, target, dims in _overlapping(have, want):
        for slices in itertools.product(*dims):
            yield Message(source, target, tuple(take for take, _ in slices), tuple(put for _, put in slices))


def _overlapping(have: dict[int, _Share], want: dict[int, _Share]) -> Iterator[tuple[int, int, list[_Common]]]:
    """Who sends to whom, and by dim what their shares have in common."""
    copies: dict[_Share, list[int]] = {}
    for rank, share in have.items():
        copies.setdefault(share, []).append(rank)
    sources, near = list(copies.items()), _near(list(copies))
    common: dict[tuple[Runs, Runs], _Common] = {}
    for position, (target, wanted) in enumerate(want.items()):
        for number in near(wanted):
            share, ranks = sources[number]
            dims = []
            for pair in zip(share, wanted, strict=True):
                if pair not in common:
                    common[pair] = _common(*pair)
                if not common[pair]:
                    break
                dims.append(common[pair])
            else:
                yield ranks[position % len(ranks)], target, dims


def _near(shares: Sequence[_Share]) -> Callable[[_Share], Iterable[int]]:
    """Which of these shares may overlap another, in order: those that begin before it ends and end behind its start.

    Looked up in the dim that they are cut the most in, as of a hundred ranks a share overlaps few.
    """
    cut = max(range(len(shares[0])), key=lambda dim: len({share[dim] for share in shares}), default=None)
    if cut is None:  # scalars
        return lambda wanted: range(len(shares))
    spans = sorted((share[cut][0][0], _end(share[cut]), number) for number, share in enumerate(shares) if share[cut])
    starts = [start for start, _, _ in spans]
    ends = list(itertools.accumulate((end for _, end, _ in spans), max))  # of all up to each

    def found(wanted: _Share) -> Iterable[int]:
        if not wanted[cut]:
            return ()
        start, end = wanted[cut][0][0], _end(wanted[cut])
        reach = spans[bisect.bisect_right(ends, start) : bisect.bisect_left(starts, end)]
        return sorted(number for _, last, number in reach if last > start)

    return found


def _end(runs: Runs) -> int:
    offset, length, _ = runs[-1]
    return offset + length


def _common(mine: Runs, theirs: Runs) -> _Common:
    """Of what two shares have in common in one dim, where it lies in each. Runs are in order."""
    found = []
    own, other = iter(mine), iter(theirs)
    here, there = next(own, None), next(other, None)
    while here is not None and there is not None:
        ends = here[0] + here[1], there[0] + there[1]
        low, high = max(here[0], there[0]), min(ends)
        if low < high:
            take, put = low - here[0] + here[2], low - there[0] + there[2]
            found.append((slice(take, take + high - low), slice(put, put + high - low)))
        if ends[0] <= ends[1]:
            here = next(own, None)
        else:
            there = next(other, None)
    return found
