"""A chain of blocks to be cut into pipeline stages, as plain data, and what a given cut costs.

Times are seconds per microbatch unless said otherwise, memory is bytes per device. Blocks are in a topological order,
so that every run of them is convex. Cut position i lies between block i - 1 and block i.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Block:
    """What cannot be cut further.

    forward_s, backward_s: seconds for one microbatch. step_end_s: seconds per step after the last backward (gradient
    reduction, optimizer). state_bytes: weights, gradients, optimizer. activation_bytes: kept for the backward, per
    microbatch in flight. transient_bytes: peak beyond these while the block runs.
    """

    name: str
    forward_s: float
    backward_s: float
    state_bytes: float = 0.0
    activation_bytes: float = 0.0
    transient_bytes: float = 0.0
    step_end_s: float = 0.0

    def __post_init__(self) -> None:
        _check_amounts(f"block {self.name!r}", self, self.__slots__[1:])

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True)
class Cut:
    """What crosses a cut position: seconds of sending forward and backward, bytes of buffers on either side."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    buffer_bytes: float = 0.0

    def __post_init__(self) -> None:
        _check_amounts("a cut", self, self.__slots__)

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s


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
        _check_amounts(f"tied group {self.name!r}", self, ("bytes", "seconds", "step_end_s"))


@dataclass(frozen=True, slots=True)
class StageProblem:
    """How to cut ``blocks`` into ``len(in_flight)`` stages.

    cuts: one per cut position 1 .. len(blocks) - 1. in_flight: microbatches whose activations a stage holds at most,
    per stage. capacity_bytes: per stage; overhead_bytes: taken from each. pins: per cut between two stages its forced
    position or None; None: all free.
    """

    blocks: tuple[Block, ...]
    cuts: tuple[Cut, ...]
    microbatches: int
    in_flight: tuple[int, ...]
    capacity_bytes: tuple[float, ...]
    overhead_bytes: float = 0.0
    tied: tuple[TiedGroup, ...] = ()
    pins: tuple[int | None, ...] | None = None

    def __post_init__(self) -> None:
        if not self.blocks or len(self.cuts) != len(self.blocks) - 1:
            raise ValueError(f"{len(self.blocks)} blocks with {len(self.cuts)} cut positions between them")
        if self.microbatches < 1:
            raise ValueError(f"a step has at least one microbatch, not {self.microbatches}")
        if not self.in_flight or len(self.capacity_bytes) != len(self.in_flight):
            raise ValueError(f"{len(self.in_flight)} stages with {len(self.capacity_bytes)} capacities")
        if min(self.in_flight) < 0:
            raise ValueError(f"microbatches in flight are not negative: {self.in_flight}")
        if any(math.isnan(size) for size in (*self.capacity_bytes, self.overhead_bytes)):
            raise ValueError("a capacity is not a number")
        if any(not 0 <= block < len(self.blocks) for group in self.tied for block in group.blocks):
            raise ValueError(f"a tied group names a block beyond the {len(self.blocks)} there are")
        if self.pins is not None:
            if len(self.pins) != self.stages - 1:
                raise ValueError(f"{self.stages} stages have {self.stages - 1} cuts, but {len(self.pins)} are pinned")
            fixed = [pin for pin in self.pins if pin is not None]
            if any(not 0 < pin < len(self.blocks) for pin in fixed) or fixed != sorted(set(fixed)):
                raise ValueError(f"pins are rising cut positions from 1 to {len(self.blocks) - 1}: {self.pins}")

    @property
    def stages(self) -> int:
        return len(self.in_flight)

    def cut_at(self, position: int) -> Cut:
        """What crosses ``position``: nothing at both ends of the chain."""
        return self.cuts[position - 1] if 0 < position < len(self.blocks) else Cut()

    def stage_bytes(self, stage: int, first: int, last: int) -> float:
        """Bytes that stage number ``stage`` holds at its peak when it has the blocks first .. last - 1."""
        blocks = self.blocks[first:last]
        return (
            self.overhead_bytes
            + math.fsum(block.state_bytes for block in blocks)
            + math.fsum(g.bytes for g in self.tied if any(first <= block < last for block in g.blocks))
            + self.in_flight[stage] * math.fsum(block.activation_bytes for block in blocks)
            + max(block.transient_bytes for block in blocks)
            + self.cut_at(first).buffer_bytes
            + self.cut_at(last).buffer_bytes
        )

    def busy_seconds(self, first: int, last: int) -> float:
        """Seconds per microbatch of a stage: forward and backward, and its own sends and receives, not overlapped."""
        compute = math.fsum(block.seconds for block in self.blocks[first:last])
        return compute + self.cut_at(first).seconds + self.cut_at(last).seconds

    def step_end_seconds(self, first: int, last: int) -> float:
        own = math.fsum(block.step_end_s for block in self.blocks[first:last])
        return own + math.fsum(g.step_end_s for g in self.tied if any(first <= block < last for block in g.blocks))

    def tied_seconds(self, boundaries: Sequence[int]) -> float:
        """Seconds per step of the tied groups that lie in more than one stage."""
        inner = boundaries[1:-1]
        return math.fsum(
            group.seconds for group in self.tied if any(min(group.blocks) < cut <= max(group.blocks) for cut in inner)
        )

    def objective(self, boundaries: Sequence[int]) -> float:
        """Seconds of a step; see the formula of :mod:`autopart.solver.stages`.

        boundaries: 0, the cut positions, and the number of blocks.
        """
        spans = list(itertools.pairwise(boundaries))
        return (
            math.fsum(block.seconds for block in self.blocks)
            + math.fsum(self.cut_at(cut).seconds for cut in boundaries[1:-1])
            + (self.microbatches - 1) * max(self.busy_seconds(*span) for span in spans)
            + max(self.step_end_seconds(*span) for span in spans)
            + self.tied_seconds(boundaries)
        )

    def excess_bytes(self, boundaries: Sequence[int]) -> float:
        """By how many bytes the fullest stage exceeds its capacity; not positive when all fit."""
        return max(
            self.stage_bytes(stage, *span) - self.capacity_bytes[stage]
            for stage, span in enumerate(itertools.pairwise(boundaries))
        )

    def respects_pins(self, boundaries: Sequence[int]) -> bool:
        pins = self.pins or (None,) * (self.stages - 1)
        return all(pin in (None, cut) for pin, cut in zip(pins, boundaries[1:-1], strict=True))

    def span_floor(self, first: int, last: int) -> float:
        """Seconds that a step takes at least under any 1F1B or GPipe order, as blocks first .. last - 1 are one stage.

        Its first forward waits for one through all earlier blocks; then it has every microbatch to do, forward and
        backward; then come its own step end, or the last backward through all earlier blocks and block 0's step end.
        Sends are not counted: they may overlap with work, and a value that only passes a stage by is not sent to it.
        """
        before = self.blocks[:first]
        ready = math.fsum(block.forward_s for block in before)
        done = ready + self.microbatches * math.fsum(block.seconds for block in self.blocks[first:last])
        way_back = math.fsum(block.backward_s for block in before)
        first_step_end = self.blocks[0].step_end_s if first else 0.0
        return max(done + self.step_end_seconds(first, last), done + way_back + first_step_end)


@dataclass(frozen=True, slots=True)
class StageSolution:
    """Where to cut, and how good that is at least.

    boundaries: 0, the cut positions, the number of blocks. objective, bound: seconds of a step by the formula.
    gap: (objective - bound) / objective. lower_bound_s: no cut into stages that fit takes fewer seconds under any 1F1B
    or GPipe order, formula or not. seconds: spent solving. programs: dynamic programs run. method: "dynamic program"
    when these alone proved the optimum, else "cp-sat".
    """

    boundaries: tuple[int, ...]
    objective: float
    bound: float
    gap: float
    lower_bound_s: float
    seconds: float
    programs: int
    method: str


def _check_amounts(owner: str, item: object, names: Iterable[str]) -> None:
    for name in names:
        value = getattr(item, name)
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{owner}: {name} has to be finite and not negative, not {value}")
