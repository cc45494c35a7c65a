"""Blocks to be divided into pipeline stages on a row of devices, as plain data, and what a given division costs.

Times are seconds per microbatch unless said otherwise, memory is bytes per device. A *position* is a set of blocks that
holds every block it depends on; a stage has the blocks between two positions, so every stage is convex. In a chain the
positions are its beginnings: position i holds the blocks 0 .. i - 1. :mod:`autopart.solver.stages_order` lists the
positions of any graph.

A *place* is a point in the row of devices between two stages, a *slot* the devices of one stage: a run of the row from
one place to another, with one of the offered *shapes* (a mesh on devices of one kind). Where the order of unlike nodes
is free, a place says which nodes come before it, so that a way through the slots is an order of the nodes as well.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopart.solver.overlap import hidden_seconds
from autopart.solver.stages_order import chain_positions
from autopart.solver.stages_parts import Block, Choice, Cut, Family, KeptGroup, Layer, Shape, TiedGroup


@dataclass(frozen=True, slots=True)
class Slot:
    """Devices that one stage may have. capacity_bytes: its part of the smallest of them, which ``sharing`` stages share
    evenly.
    """

    start: int
    stop: int
    shape: int
    capacity_bytes: float
    sharing: int = 1


@dataclass(frozen=True, slots=True)
class Step:
    """One stage of a division: its slot, the positions between which its blocks lie, and the choice of each block.

    choices: by block number, of the blocks of this stage; alike for those of one layer.
    """

    slot: int
    first: int
    last: int
    choices: tuple[tuple[int, int], ...] = ()


Way = tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class _Has:
    """What a stage has: its blocks, and how they and parts of layers are run."""

    blocks: frozenset[int]
    chosen: tuple[Choice, ...]


@dataclass(frozen=True, slots=True)
class StageProblem:
    """How to divide blocks into ``len(in_flight)`` stages.

    positions: sets of blocks as bits, the empty one first and the full one last, in an order that subsets precede.
    slots: from place 0 on; ends: the places where the last stage may stop. links: per place, which of a shape's lists
    of cuts crosses there. in_flight: microbatches whose activations a stage holds at most, per stage. pins: (block,
    stage) that are forced. pairs: (shape before, shape after) -> [link][position] what a crossing between these two
    takes at least, where neither side alone says it. ahead: per stage, microbatches that arrive while another waits
    there; (): none.
    """

    shapes: tuple[Shape, ...]
    positions: tuple[int, ...]
    slots: tuple[Slot, ...]
    links: tuple[int, ...]
    ends: tuple[int, ...]
    microbatches: int
    in_flight: tuple[int, ...]
    pins: tuple[tuple[int, int], ...] = ()
    pairs: Mapping[tuple[int, int], tuple[tuple[Cut, ...], ...]] = field(default_factory=dict, hash=False)
    ahead: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        count = len(self.shapes[0].blocks) if self.shapes else 0
        if not count or any(len(shape.blocks) != count for shape in self.shapes):
            raise ValueError("a problem has at least one block, and every shape has all blocks")
        if self.positions[0] != 0 or self.positions[-1] != (1 << count) - 1 or len(self.positions) < 2:
            raise ValueError("positions begin with no block and end with all")
        for shape in self.shapes:
            if any(len(cuts) != len(self.positions) for cuts in shape.cuts) or any(
                len(cuts) != len(self.positions) for links in self.pairs.values() for cuts in links
            ):
                raise ValueError(f"{len(self.positions)} cut positions need as many cuts")
            memory = (shape.tied, shape.kept, shape.crossing, shape.passing.parameters)
            named = [group.blocks for groups in (*memory, shape.layers, shape.sums) for group in groups]
            if any(not 0 <= block < count for blocks in named for block in blocks):
                raise ValueError(f"a group of blocks names one beyond the {count} there are")
            grouped = [block for layer in shape.layers for block in layer.blocks]
            if len(set(grouped)) != len(grouped):
                raise ValueError("a block is in two layers")
            if [group.blocks for group in shape.tied] != [group.blocks for group in self.shapes[0].tied]:
                raise ValueError("all shapes have the same tied groups")
            if math.isnan(shape.overhead_bytes):
                raise ValueError("an overhead is not a number")
        if self.microbatches < 1:
            raise ValueError(f"a step has at least one microbatch, not {self.microbatches}")
        if not self.in_flight or min(self.in_flight) < 0:
            raise ValueError(f"microbatches in flight are not negative, of at least one stage: {self.in_flight}")
        if len(self.ahead) not in (0, self.stages) or min(self.ahead, default=0) < 0:
            raise ValueError(f"microbatches that arrive ahead are not negative, of {self.stages} stages: {self.ahead}")
        if any(math.isnan(slot.capacity_bytes) for slot in self.slots):
            raise ValueError("a capacity is not a number")
        places = range(len(self.links))
        if any(slot.start not in places or slot.stop not in places for slot in self.slots):
            raise ValueError("a slot has a place that is none")
        if any(not (0 <= block < count and 0 <= stage < self.stages) for block, stage in self.pins):
            raise ValueError(f"pins are (block, stage) below {count} and {self.stages}: {self.pins}")

    @staticmethod
    def chain(
        blocks: Sequence[Block],
        cuts: Sequence[Cut],
        microbatches: int,
        in_flight: Sequence[int],
        capacity_bytes: Sequence[float],
        overhead_bytes: float = 0.0,
        tied: Sequence[TiedGroup] = (),
        pins: Sequence[tuple[int, int]] = (),
        together: Sequence[Sequence[int]] = (),
        kept: Sequence[KeptGroup] = (),
        layers: Sequence[Layer] = (),
    ) -> StageProblem:
        """Stages of one shape one after the other.

        cuts: one per position 1 .. len(blocks) - 1. together: groups of blocks that no position parts.
        """
        if len(cuts) != len(blocks) - 1:
            raise ValueError(f"{len(blocks)} blocks with {len(cuts)} cut positions between them")
        ends, all_cuts = chain_positions(len(blocks), together), (Cut(), *cuts, Cut())
        sets, found = tuple((1 << end) - 1 for end in ends), tuple(all_cuts[end] for end in ends)
        return StageProblem.row(
            *(blocks, sets, found, microbatches, in_flight, capacity_bytes, overhead_bytes, tied, pins, kept, layers)
        )

    @staticmethod
    def row(
        blocks: Sequence[Block],
        positions: Sequence[int],
        cuts: Sequence[Cut],
        microbatches: int,
        in_flight: Sequence[int],
        capacity_bytes: Sequence[float],
        overhead_bytes: float = 0.0,
        tied: Sequence[TiedGroup] = (),
        pins: Sequence[tuple[int, int]] = (),
        kept: Sequence[KeptGroup] = (),
        layers: Sequence[Layer] = (),
    ) -> StageProblem:
        """Stages of one shape one after the other, of a graph of blocks. cuts: one per position."""
        if len(capacity_bytes) != len(in_flight):
            raise ValueError(f"{len(in_flight)} stages with {len(capacity_bytes)} capacities")
        count = len(in_flight)
        shape = Shape(
            tuple(blocks), (tuple(cuts),), overhead_bytes, tuple(tied), kept=tuple(kept), layers=tuple(layers)
        )
        return StageProblem(
            (shape,),
            tuple(positions),
            tuple(Slot(stage, stage + 1, 0, size) for stage, size in enumerate(capacity_bytes)),
            (0,) * (count + 1),
            (count,),
            microbatches,
            tuple(in_flight),
            tuple(pins),
        )

    def at(self, kept: Sequence[int]) -> StageProblem:
        """The same with some of the positions, the first and the last among them."""

        def of(lists: tuple[tuple[Cut, ...], ...]) -> tuple[tuple[Cut, ...], ...]:
            return tuple(tuple(cuts[index] for index in kept) for cuts in lists)

        return replace(
            self,
            positions=tuple(self.positions[index] for index in kept),
            shapes=tuple(replace(shape, cuts=of(shape.cuts)) for shape in self.shapes),
            pairs={pair: of(lists) for pair, lists in self.pairs.items()},
        )

    def with_shape(self, number: int, shape: Shape) -> StageProblem:
        """The same with one of its shapes in place of another."""
        return replace(self, shapes=(*self.shapes[:number], shape, *self.shapes[number + 1 :]))

    @property
    def stages(self) -> int:
        return len(self.in_flight)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks as the first shape has them."""
        return self.shapes[0].blocks

    def blocks_between(self, first: int, last: int) -> tuple[int, ...]:
        """Numbers of the blocks between two positions."""
        mask, found = self.positions[last] & ~self.positions[first], list[int]()
        while mask:
            lowest = mask & -mask
            found.append(lowest.bit_length() - 1)
            mask ^= lowest
        return tuple(found)

    def boundaries(self, way: Way) -> tuple[int, ...]:
        """How many blocks lie before each cut of a way, its two ends included."""
        return (0, *(self.positions[step.last].bit_count() for step in way))

    def order(self, way: Way) -> tuple[int, ...]:
        """The blocks stage after stage, by number in each."""
        return tuple(block for step in way for block in self.blocks_between(step.first, step.last))

    def cut_at(self, position: int, shape: int = 0, link: int = 0) -> Cut:
        return self.shapes[shape].cuts[link][position]

    def ends_of(self, step: Step) -> tuple[Cut, Cut]:
        """What the ranks of a stage do at its two ends."""
        slot = self.slots[step.slot]
        return (
            self.cut_at(step.first, slot.shape, self.links[slot.start]),
            self.cut_at(step.last, slot.shape, self.links[slot.stop]),
        )

    def chosen(self, step: Step) -> tuple[Choice, ...]:
        """How a stage's blocks and parts of layers are run; what has no choice takes its first."""
        made = dict(step.choices)
        return tuple(family[made.get(part[0], 0)] for part, family in self.units(step))

    def units(self, step: Step) -> list[tuple[tuple[int, ...], Family]]:
        """What is chosen for each by itself in a stage, with the ways to run it."""
        return self.shapes[self.slots[step.slot].shape].units(self.blocks_between(step.first, step.last))

    def stage_bytes(self, stage: int, step: Step) -> float:
        """Bytes that a rank of stage number ``stage`` holds at its peak; see :mod:`autopart.solver.stages_passing`."""
        shape, has = self.shapes[self.slots[step.slot].shape], self._has(step)
        update = shape.passing.update_bytes(has.blocks)
        return shape.overhead_bytes + self._state_bytes(step, has) + max(self._running_bytes(stage, step, has), update)

    def state_bytes(self, step: Step) -> float:
        """Of these weights, gradients and what the optimizer keeps."""
        return self._state_bytes(step, self._has(step))

    def running_bytes(self, stage: int, step: Step) -> float:
        """Of these what is there while microbatches run, and gone when the optimizer does."""
        return self._running_bytes(stage, step, self._has(step))

    def flying_bytes(self, stage: int, step: Step) -> float:
        """Of these what microbatches in flight keep."""
        return self._flying_bytes(stage, step, self._has(step))

    def _has(self, step: Step) -> _Has:
        return _Has(frozenset(self.blocks_between(step.first, step.last)), self.chosen(step))

    def _state_bytes(self, step: Step, has: _Has) -> float:
        state = math.fsum(choice.state_bytes for choice in has.chosen)
        tied = self.shapes[self.slots[step.slot].shape].tied
        return state + math.fsum(group.bytes for group in tied if not has.blocks.isdisjoint(group.blocks))

    def _running_bytes(self, stage: int, step: Step, has: _Has) -> float:
        return (
            self._flying_bytes(stage, step, has)
            + max(choice.transient_bytes for choice in has.chosen)
            + self.buffer_bytes(stage, step)
            + self.shapes[self.slots[step.slot].shape].passing.message_bytes(has.blocks)
        )

    def _flying_bytes(self, stage: int, step: Step, has: _Has) -> float:
        shape, flying = self.shapes[self.slots[step.slot].shape], self.in_flight[stage]
        return (
            math.fsum(choice.running_bytes(flying) for choice in has.chosen)
            + math.fsum(flying * group.bytes for group in shape.kept if not has.blocks.isdisjoint(group.blocks))
            + flying * self.crossing_bytes(step)
        )

    def buffer_bytes(self, stage: int, step: Step) -> float:
        """Of a stage, what is on its way at its two ends."""
        start, stop = self.ends_of(step)
        return start.behind_bytes + self.arriving(stage) * start.message_bytes + stop.before_bytes

    def arriving(self, stage: int) -> int:
        """Microbatches that arrive at a stage while another waits there."""
        return self.ahead[stage] if self.ahead else 0

    def crossing_bytes(self, step: Step) -> float:
        """Of a microbatch in flight what a stage holds since it received or sent it, beside what its blocks keep."""
        start, stop = self.ends_of(step)
        shape, inside = self.shapes[self.slots[step.slot].shape], set(self.blocks_between(step.first, step.last))
        groups = math.fsum(group.bytes for group in shape.crossing if group.is_held(inside))
        return start.held_behind_bytes + stop.held_before_bytes + groups

    def most_crossing_bytes(self) -> float:
        """Of what crosses, buffers included, no less than any stage holds."""
        flying, most = max(self.in_flight), 0.0
        for shape in self.shapes:
            cuts = [cut for cuts in shape.cuts for cut in cuts]
            before = max(cut.before_bytes + flying * cut.held_before_bytes for cut in cuts)
            ahead = max(self.ahead, default=0)
            behind = max(cut.behind_bytes + ahead * cut.message_bytes + flying * cut.held_behind_bytes for cut in cuts)
            groups = flying * sum(group.bytes for group in shape.crossing) if self.stages > 1 else 0.0
            most = max(most, before + behind + groups)
        return most

    def busy_seconds(self, step: Step) -> float:
        """Seconds per microbatch of a stage: forward and backward, and its own sends and receives, not overlapped."""
        compute = math.fsum(choice.seconds for choice in self.chosen(step))
        return compute + math.fsum(cut.seconds for cut in self.ends_of(step))

    def step_end_seconds(self, step: Step) -> float:
        shape = self.shapes[self.slots[step.slot].shape]
        inside = set(self.blocks_between(step.first, step.last))
        own = math.fsum(shape.blocks[block].step_end_s for block in inside)
        return own + math.fsum(group.step_end_s for group in shape.tied if inside & set(group.blocks))

    def exposed_step_end_seconds(self, step: Step, share: float = 1.0) -> float:
        """The same without what the stage's last backward hides of sums of gradients. share: of a backward, the pass
        that makes the weights' gradients.
        """
        made = dict(step.choices)
        units = [(part, share * family[made.get(part[0], 0)].backward_s) for part, family in self.units(step)]
        shape = self.shapes[self.slots[step.slot].shape]
        return max(0.0, self.step_end_seconds(step) - hidden_seconds(shape.sums, units, shape.passing.limit))

    def crossings(self, before: Step, after: Step) -> tuple[Cut, ...]:
        """What either side does between two stages, and what the two do together."""
        first, second = self.slots[before.slot], self.slots[after.slot]
        together = self.pairs.get((first.shape, second.shape))
        sides = self.ends_of(before)[1], self.ends_of(after)[0]
        return sides if together is None else (*sides, together[self.links[second.start]][after.first])

    def crossing_seconds(self, before: Step, after: Step) -> float:
        """Seconds of one microbatch between two stages, both ways: of those who have the most to do."""
        return max(cut.seconds for cut in self.crossings(before, after))

    def tied_seconds(self, way: Sequence[Step]) -> float:
        """Seconds per step of the tied groups that lie in more than one stage, as the first of these prices them."""
        total = []
        for step in way:
            inside, before = self.positions[step.last] & ~self.positions[step.first], self.positions[step.first]
            for group in self.shapes[self.slots[step.slot].shape].tied:
                bits = sum(1 << block for block in set(group.blocks))
                if bits & inside and not bits & before and bits & ~inside:
                    total.append(group.seconds)
        return math.fsum(total)

    def objective(self, way: Sequence[Step]) -> float:
        """Seconds of a step; see the formula of :mod:`autopart.solver.stages`."""
        return (
            math.fsum(choice.seconds for step in way for choice in self.chosen(step))
            + math.fsum(self.crossing_seconds(*pair) for pair in itertools.pairwise(way))
            + (self.microbatches - 1) * max(map(self.busy_seconds, way))
            + max(map(self.step_end_seconds, way))
            + self.tied_seconds(way)
        )

    def excess_bytes(self, way: Sequence[Step]) -> float:
        """By how many bytes the fullest stage exceeds its capacity; not positive when all fit."""
        return max(
            self.stage_bytes(stage, step) - self.slots[step.slot].capacity_bytes for stage, step in enumerate(way)
        )

    def most_excess_bytes(self) -> float:
        """The most that a stage with all blocks, as fast as they run, exceeds its capacity by, in any slot."""
        last = len(self.positions) - 1
        excess: dict[object, float] = {}
        for slot, own in enumerate(self.slots):
            for stage, flying in enumerate(self.in_flight):
                ends = self.links[own.start], self.links[own.stop]
                alike = own.shape, own.capacity_bytes, ends, flying, self.arriving(stage)
                if alike not in excess:
                    excess[alike] = self.stage_bytes(stage, Step(slot, 0, last)) - own.capacity_bytes
        return max(excess.values())

    def respects_pins(self, way: Sequence[Step]) -> bool:
        return all(block in self.blocks_between(way[stage].first, way[stage].last) for block, stage in self.pins)

    def least_step_end(self, block: int) -> float:
        """Of a block by itself, with all of its sums hidden."""
        return min(
            shape.blocks[block].step_end_s - math.fsum(item.seconds for item in shape.sums if item.blocks == (block,))
            for shape in self.shapes
        )

    def least(self, block: int, name: str) -> float:
        """The smallest of this amount of a block over all shapes and choices."""
        return min(getattr(choice, name) for shape in self.shapes for choice in shape.blocks[block].choices)


@dataclass(frozen=True, slots=True)
class StageSolution:
    """Where to cut, and how good that is at least.

    way: the stages. objective, bound: seconds of a step by the formula. gap: (objective - bound) / objective.
    lower_bound_s: no division that fits takes fewer seconds under 1F1B or GPipe, whichever has as many microbatches in
    flight (:mod:`autopart.solver.stages_floor`), formula or not. seconds: spent solving. programs: dynamic programs
    run. method: "dynamic program" when these alone proved the optimum, else "cp-sat".
    """

    way: Way
    objective: float
    bound: float
    gap: float
    lower_bound_s: float
    seconds: float
    programs: int
    method: str
