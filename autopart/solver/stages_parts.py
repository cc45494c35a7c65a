"""What stages are made of, as plain data: blocks with the ways to run them, what crosses between them, what they share.

Times are seconds per microbatch unless said otherwise, memory is bytes per device.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from autopart.solver.overlap import GradientSum
from autopart.solver.stages_passing import NOTHING_PASSES, Passing

AMOUNTS = ("forward_s", "backward_s", "state_bytes", "activation_bytes", "transient_bytes", "late_bytes")
"""What choices differ in."""
_amounts_of = attrgetter(*AMOUNTS)


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to run a block, such as with recomputation; see :class:`Block` for the fields. name: the caller's."""

    forward_s: float
    backward_s: float
    state_bytes: float = 0.0
    activation_bytes: float = 0.0
    transient_bytes: float = 0.0
    name: str = ""
    late_bytes: float = 0.0

    def __post_init__(self) -> None:
        _check_amounts("a choice", AMOUNTS, _amounts_of(self))

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s

    def kept_bytes(self, in_flight: int) -> float:
        return self.state_bytes + self.running_bytes(in_flight)

    def running_bytes(self, in_flight: int) -> float:
        """What microbatches keep, or what comes instead: the last one goes back alone, block by block."""
        return max(in_flight * self.activation_bytes, self.late_bytes)

    def undercuts(self, other: Choice) -> bool:
        """Whether this takes no more of anything."""
        amounts = ("seconds", *AMOUNTS[2:])
        return all(getattr(self, name) <= getattr(other, name) for name in amounts)


Family = tuple[Choice, ...]
"""The ways to run a block or a part of a layer."""


def hiding_seconds(family: Family) -> float:
    """What a backward may hide beside the fastest choice; what others may hide beyond that they take longer."""
    return min(choice.seconds for choice in family) - min(choice.forward_s for choice in family)


@dataclass(frozen=True, slots=True)
class Block:
    """What cannot be cut further.

    forward_s, backward_s: seconds for one microbatch. step_end_s: seconds per step after the last backward (gradient
    reduction, optimizer). state_bytes: weights, gradients, optimizer. activation_bytes: kept for the backward, per
    microbatch in flight. transient_bytes: peak beyond these while the block runs. late_bytes: held from the block's
    last backward to the end of the step, when what it kept is gone; while it goes back the smaller of the two is in
    transient_bytes. others: further ways to run it. choices: this way and the others.
    """

    name: str
    forward_s: float
    backward_s: float
    state_bytes: float = 0.0
    activation_bytes: float = 0.0
    transient_bytes: float = 0.0
    step_end_s: float = 0.0
    others: tuple[Choice, ...] = ()
    late_bytes: float = 0.0
    choices: tuple[Choice, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_amounts(f"block {self.name!r}", (*AMOUNTS, "step_end_s"), (*_amounts_of(self), self.step_end_s))
        # made once, as problems ask for them many times
        times, kept = (self.forward_s, self.backward_s), (self.state_bytes, self.activation_bytes, self.transient_bytes)
        own = Choice(*times, *kept, late_bytes=self.late_bytes)
        object.__setattr__(self, "choices", (own, *self.others))

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True)
class Cut:
    """What a rank next to a position does there: seconds of sending and receiving, forward and backward.

    before_bytes, behind_bytes: buffers of a stage that ends there, and of one that begins there. held_before_bytes,
    held_behind_bytes: what these hold of each microbatch in flight of what crosses, beside what their blocks keep; not
    of tensors that a :class:`CrossingGroup` counts. message_bytes: what is sent forward of a microbatch.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    before_bytes: float = 0.0
    behind_bytes: float = 0.0
    held_before_bytes: float = 0.0
    held_behind_bytes: float = 0.0
    message_bytes: float = 0.0

    def __post_init__(self) -> None:
        _check_amounts("a cut", self.__slots__, _crossed_of(self))

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s


_crossed_of = attrgetter(*Cut.__slots__)


@dataclass(frozen=True, slots=True)
class TiedGroup:
    """Parameters that several blocks share, counted in none of these blocks.

    bytes: weights, gradients and optimizer, held by every stage that has one of ``blocks``; step_end_s: what each of
    these stages spends on it per step, as Block.step_end_s. seconds: of summing the gradients over stages, once per
    step, if the blocks lie in more than one.
    """

    name: str
    blocks: tuple[int, ...]
    bytes: float
    seconds: float = 0.0
    step_end_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.blocks:
            raise ValueError(f"tied group {self.name!r} has no blocks")
        names = ("bytes", "seconds", "step_end_s")
        _check_amounts(f"tied group {self.name!r}", names, (self.bytes, self.seconds, self.step_end_s))


@dataclass(frozen=True, slots=True)
class KeptGroup:
    """A tensor that several blocks keep, counted in none of these.

    bytes: per microbatch in flight, once in every stage that has one of ``blocks``.
    """

    blocks: tuple[int, ...]
    bytes: float

    def __post_init__(self) -> None:
        if not self.blocks:
            raise ValueError("a kept tensor has no blocks")
        _check_amounts("a kept tensor", ("bytes",), (self.bytes,))


@dataclass(frozen=True, slots=True)
class CrossingGroup:
    """A tensor that may cross many positions, counted in no :class:`Cut`.

    bytes: per microbatch in flight, in every stage that has some of ``blocks``, which make and read it, but not all,
    and none of ``keepers``, which count it anyway.
    """

    blocks: tuple[int, ...]
    keepers: tuple[int, ...]
    bytes: float

    def __post_init__(self) -> None:
        if not self.blocks:
            raise ValueError("a tensor that crosses has no blocks")
        _check_amounts("a tensor that crosses", ("bytes",), (self.bytes,))

    def is_held(self, inside: Collection[int]) -> bool:
        """By a stage with these blocks."""
        own = sum(block in inside for block in self.blocks)
        return 0 < own < len(self.blocks) and not any(block in inside for block in self.keepers)


@dataclass(frozen=True, slots=True)
class Layer:
    """Blocks that are run in one way where they are in one stage, such as a layer that is computed again as a whole.

    blocks: their numbers, rising. parts: for each set of them that a stage can have, the ways to run it, instead of the
    blocks' own; the first with as many seconds as these, the others with at least as many.
    """

    blocks: tuple[int, ...]
    parts: Mapping[tuple[int, ...], Family] = field(hash=False)


@dataclass(frozen=True, slots=True)
class Shape:
    """What stages of one mesh on devices of one kind cost.

    blocks: all blocks in this shape. cuts: [link][position], the first and the last position's are empty.
    overhead_bytes: taken from each device. name: for people, such as "dp=2 tp=1 on A100". sums: those of gradients that
    are part of the blocks' and tied groups' step_end_s and start during the last backward, in the order of messages.
    passing: what parameters take for a while.
    """

    blocks: tuple[Block, ...]
    cuts: tuple[tuple[Cut, ...], ...]
    overhead_bytes: float = 0.0
    tied: tuple[TiedGroup, ...] = ()
    name: str = ""
    kept: tuple[KeptGroup, ...] = ()
    layers: tuple[Layer, ...] = ()
    sums: tuple[GradientSum, ...] = ()
    passing: Passing = NOTHING_PASSES
    crossing: tuple[CrossingGroup, ...] = ()

    def units(self, blocks: Sequence[int]) -> list[tuple[tuple[int, ...], Family]]:
        """What is chosen for each by itself in a stage with these blocks: parts of layers, and the other blocks."""
        inside, first, last = set(blocks), min(blocks, default=0), max(blocks, default=0)
        near = [layer for layer in self.layers if layer.blocks[0] <= last and layer.blocks[-1] >= first]
        parts = [tuple(block for block in layer.blocks if block in inside) for layer in near]
        found = [(part, layer.parts[part]) for part, layer in zip(parts, near, strict=True) if part]
        inside.difference_update(block for part in parts for block in part)
        return sorted([*found, *(((block,), self.blocks[block].choices) for block in inside)], key=lambda item: item[0])


def _check_amounts(owner: str, names: Iterable[str], values: tuple[float, ...]) -> None:
    if min(values) >= 0 and math.isfinite(sum(values)):  # blocks and choices are made by the thousands
        return
    for name, value in zip(names, values, strict=True):
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{owner}: {name} has to be finite and not negative, not {value}")
