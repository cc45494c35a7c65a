"""What a stage holds for a while because of its parameters: messages, and what the optimizer makes in its step.

Messages are there while microbatches run, beside what these need; the optimizer runs when all of this is gone. So a
stage's peak is, with its state (parameters, gradients, the optimizer's state) S,

    S + max(messages + activations + transients + buffers, temporaries of the optimizer)

Whole weights that arrive (levels 1 and 2 of ZeRO) do so in the first forward alone: they have the room that transients
of some block take and those of no block's forward do. Of the parameters a stage has those that one of its blocks reads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, Protocol, get_args

import numpy as np

from autopart.message_memory import Alike, arriving_bytes, message_bytes
from autopart.runtime.buckets import BUCKET_BYTES
from autopart.solver.stages_runs import Array, Bits, Runs


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Parameters that the same blocks read: bytes on a rank, all and the largest, where a stage has such a block.

    copied, read: as of :class:`autopart.message_memory.Alike`.
    """

    blocks: tuple[int, ...]
    bytes: float
    largest: float
    copied: float = 0.0
    read: float = 0.0


@dataclass(frozen=True, slots=True)
class Passing:
    """sent: by level of ZeRO, what shares messages over ``replicas``; see :mod:`autopart.message_memory` for summed.
    limit: bytes that fill a message.

    updated: what the optimizer makes; apart: of one parameter after the other, else of all together. waiting: whose
    gradients are there beside all this from the first to the last of their readers in a stage. lingering: by block what
    is on its way after a backward of a stage that begins with it, of these, and beside the next. transients: by block,
    of its forward and in all, with nothing computed again; none: these are alike.
    """

    sent: tuple[tuple[int, tuple[ParameterGroup, ...]], ...] = ()
    replicas: int = 1
    summed: float = 1.0
    updated: tuple[ParameterGroup, ...] = ()
    apart: bool = False
    limit: float = BUCKET_BYTES
    waiting: tuple[ParameterGroup, ...] = ()
    lingering: tuple[ParameterGroup, ...] = ()
    transients: tuple[tuple[float, float], ...] = ()

    @property
    def parameters(self) -> tuple[ParameterGroup, ...]:
        return (*self.updated, *self.waiting, *self.lingering, *(item for _, found in self.sent for item in found))

    def message_bytes(self, inside: Collection[int]) -> float:
        """Of a stage with these blocks."""
        return float(self._messages(*_of_one(inside)))

    def update_bytes(self, inside: Collection[int]) -> float:
        """Of a stage with these blocks."""
        return float(self._update(*_of_one(inside)))

    def messages_of(self, member: Bits, runs: Runs) -> Array:
        """By run."""
        return np.zeros(len(runs)) + self._messages(*_of_runs(member, runs))

    def updates_of(self, member: Bits, runs: Runs) -> Array:
        """By run."""
        return np.zeros(len(runs)) + self._update(*_of_runs(member, runs))

    def _messages(self, total: _Total, most: _Reduce, first: _Reduce) -> Array | float:
        found = []
        for level, some in self.sent:
            largest = {name: most(_largest(some, name)) for name in get_args(_Most)}
            found.append(Alike(level, total(_sums(some)), **largest))
        beside = total(_sums(self.waiting), 2) + first({item.blocks: item.bytes for item in self.lingering})
        sent = message_bytes(found, self.replicas, self.summed, self.limit)
        arriving: Array | float = 0.0
        if any(level in (1, 2) for level, _ in self.sent):
            arriving = arriving_bytes(found, self.replicas, self.limit)
            forward, whole = (
                most({(block,): sizes[at] for block, sizes in enumerate(self.transients)}) for at in (0, 1)
            )
            arriving = arriving - (whole - forward)
        return np.maximum(sent, arriving) + beside

    def _update(self, total: _Total, most: _Reduce, _: _Reduce) -> Array | float:
        return most(_largest(self.updated, "largest")) if self.apart else total(_sums(self.updated))


NOTHING_PASSES = Passing()

_Most = Literal["largest", "copied", "read"]

_Amounts = dict[tuple[int, ...], float]
"""By the blocks of which a stage has to have one."""

_Reduce = Callable[[_Amounts], "Array | float"]


class _Total(Protocol):
    def __call__(self, amounts: _Amounts, least: int = 1) -> Array | float:
        """Of what ``least`` blocks of a stage share."""


def _sums(some: Collection[ParameterGroup]) -> _Amounts:
    found: _Amounts = {}
    for item in some:
        found[item.blocks] = found.get(item.blocks, 0.0) + item.bytes
    return found


def _largest(some: Collection[ParameterGroup], name: _Most) -> _Amounts:
    found: _Amounts = {}
    for item in some:
        found[item.blocks] = max(found.get(item.blocks, 0.0), getattr(item, name))
    return found


def _of_one(inside: Collection[int]) -> tuple[_Total, _Reduce, _Reduce]:
    """The sum, the largest and that of the first block of what a stage has."""
    own = set(inside)

    def there(amounts: _Amounts, least: int = 1) -> list[float]:
        return [size for blocks, size in amounts.items() if len(own.intersection(blocks)) >= least]

    def first(amounts: _Amounts) -> float:
        return amounts[min(found)] if (found := [blocks for blocks in amounts if not own.isdisjoint(blocks)]) else 0.0

    return (
        lambda amounts, least=1: sum(there(amounts, least)),
        lambda amounts: max(there(amounts), default=0.0),
        first,
    )


def _of_runs(member: Bits, runs: Runs) -> tuple[_Total, _Reduce, _Reduce]:
    """The same by run. member: [position, block]."""

    def total(amounts: _Amounts, least: int = 1) -> Array:
        each, found = np.zeros(member.shape[1]), np.zeros(len(runs))
        for blocks, size in amounts.items():
            if len(blocks) > 1:
                found += size * (runs.between(member[:, list(set(blocks))].sum(axis=1)) >= least)
            elif least < 2:
                each[blocks[0]] = size
        return found + runs.between(member @ each)

    def most(amounts: _Amounts) -> Array:
        by_size: dict[float, set[int]] = {}
        for blocks, size in amounts.items():
            by_size.setdefault(size, set()).update(blocks)
        found = np.zeros(len(runs))
        for size in sorted(by_size):
            found[runs.between(member[:, list(by_size[size])].sum(axis=1)) > 0] = size
        return found

    def first(amounts: _Amounts) -> Array:
        found = np.zeros(len(runs))
        for blocks in sorted(amounts, reverse=True):
            found[runs.between(member[:, list(blocks)].sum(axis=1)) > 0] = amounts[blocks]
        return found

    return total, most, first


def passing(
    sent: Collection[tuple[tuple[int, ...], Hashable, int, float, bool]],
    updated: Collection[tuple[tuple[int, ...], float]],
    replicas: int,
    summed: float,
    apart: bool,
    limit: float,
    layers: Sequence[str] = (),
    waiting: Collection[tuple[tuple[int, ...], float]] = (),
    lingering: Mapping[int, float] = MappingProxyType({}),
) -> Passing:
    """sent: by parameter its blocks, what those of one message have in common, its level of ZeRO, bytes of its gradient
    on a rank, and whether replicas cut it in its first dim. updated: its blocks, and what the optimizer makes for it.
    limit: bytes that fill a message. layers: by block the layer that it lies in, "" for none; default, none. waiting:
    blocks of what several read, and bytes of a gradient that waits for the others'. lingering: bytes by block.
    """
    kinds: dict[tuple[Hashable, int], dict[tuple[int, ...], list[tuple[float, bool]]]] = {}
    for blocks, kind, level, size, first in sent:
        kinds.setdefault((kind, level), {}).setdefault(blocks, []).append((size, first))
    groups = tuple((level, _groups(found, limit, layers)) for (_, level), found in kinds.items())
    ahead = (
        tuple(ParameterGroup((block,), size, size) for block, size in lingering.items())
        if any(lingering.values())
        else ()
    )
    return Passing(groups, replicas, summed, _grouped(updated), apart, limit, _grouped(waiting), ahead)


def _grouped(found: Collection[tuple[tuple[int, ...], float]]) -> tuple[ParameterGroup, ...]:
    made: dict[tuple[int, ...], list[float]] = {}
    for blocks, size in found:
        if size:
            made.setdefault(blocks, []).append(size)
    return tuple(ParameterGroup(blocks, sum(sizes), max(sizes)) for blocks, sizes in made.items())


def _groups(
    found: dict[tuple[int, ...], list[tuple[float, bool]]], limit: float, layers: Sequence[str]
) -> tuple[ParameterGroup, ...]:
    """Of parameters that share messages."""
    inside = {blocks: {layers[block] for block in blocks} - {""} if layers else set[str]() for blocks in found}
    of_layer: dict[str, float] = {}
    for blocks, parameters in found.items():
        for layer in inside[blocks]:
            of_layer[layer] = of_layer.get(layer, 0.0) + sum(size for size, _ in parameters)
    groups = []
    for blocks, parameters in found.items():
        sizes = [size for size, _ in parameters]
        copied = (size for size, first in parameters if size > limit and not first)
        read = max([*sizes, *(of_layer[layer] for layer in inside[blocks])])
        groups.append(ParameterGroup(blocks, sum(sizes), max(sizes), max(copied, default=0.0), read))
    return tuple(groups)
