"""All runs of blocks that stages can have, as arrays; :mod:`autopart.solver.stages_ways` has the ways through them.

A *table* holds what a stage of one shape costs at one number in the pipeline, with one capacity and the links of its
two ends, by run (:class:`~autopart.solver.stages_runs.Runs`); slots that agree in these share it.

Seconds of stages whose blocks have several choices are those of :mod:`autopart.solver.stages_choices`: bounds at first,
exact once :meth:`StageGraph.refine` has been asked for the run.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from autopart.solver.overlap import late_between, sums_between
from autopart.solver.stages_choices import Fastest, Held, least_excess, least_seconds, relaxed_seconds
from autopart.solver.stages_floor import arc_floors, source_ends
from autopart.solver.stages_parts import Choice, Family, Shape, hiding_seconds
from autopart.solver.stages_problem import StageProblem, Step, Way
from autopart.solver.stages_runs import Array, Bits, Runs

# stage, shape, capacity, link at the start, link at the end
_Key = tuple[int, int, float, int, int]
_Item = TypeVar("_Item")
_ROUNDING = 1e-9
_ODD = np.int64(0x1E3779B97F4A7C15)  # mixes bits


@dataclass(slots=True)
class StageGraph:
    """The arcs of a problem.

    slots: per stage the (slot, table) that ways can use. All arrays are [table, run]: seconds: of the blocks
    in their fastest choices that fit, or a bound. busy: with sends and receives; step_end. once: what is added up over
    stages: ``seconds`` and the tied groups that begin in it and end behind it. floor: see :func:`arc_floors`. ends:
    what is left of the step end by choices that take s seconds is at least ``ends`` - s. forward: [position] seconds of
    the blocks before; least: [shape, position] the same, forward_s and backward_s; source: [position], see
    :func:`source_ends`. there, back: [table, position] of transfers.
    excess: bytes over the capacity; infinite for runs that no division has. room: bytes for what choices hold.
    exact: where ``seconds`` is no mere bound. held: [shape] what runs have.
    most_seconds: of a run's blocks at their fastest; those with more are left out. crossing: [shape, link,
    position] seconds of what a rank sends and receives; pairs: (shape before, shape after) -> [link, position] what
    the two take together at least.
    """

    problem: StageProblem
    runs: Runs
    slots: list[list[tuple[int, int]]]
    tables: list[_Key]
    seconds: Array
    busy: Array
    step_end: Array
    once: Array
    floor: Array
    ends: Array
    forward: Array
    least: dict[str, Array]
    source: Array
    there: Array
    back: Array
    excess: Array
    room: Array
    exact: Bits
    crossing: Array
    held: list[Held]
    most_seconds: float = math.inf
    pairs: dict[tuple[int, int], Array] = field(default_factory=dict)
    version: int = 0
    _made: dict[tuple[int, int], tuple[tuple[int, int], ...] | None] = field(default_factory=dict)
    _fastest: dict[object, tuple[list[Family], Fastest]] = field(default_factory=dict)
    _units: dict[tuple[int, int], list[tuple[tuple[int, ...], Family]]] = field(default_factory=dict)

    @staticmethod
    def build(problem: StageProblem, most_seconds: float = math.inf, late: bool = False) -> StageGraph:
        """most_seconds: runs whose blocks take more at their fastest are left out. late: sums of gradients that pass
        the last backward count in floors, as :func:`autopart.solver.overlap.late_between` says.
        """
        used = _slots_in_use(problem)
        keys: dict[_Key, int] = {}
        slots: list[list[tuple[int, int]]] = []
        for stage, found in enumerate(used):
            slots.append([])
            for number in found:
                slot = problem.slots[number]
                links = problem.links[slot.start], problem.links[slot.stop]
                key = stage, slot.shape, slot.capacity_bytes, *links
                slots[-1].append((number, keys.setdefault(key, len(keys))))
        crossing = np.array([[[cut.seconds for cut in cuts] for cuts in s.cuts] for s in problem.shapes])
        member, runs = all_runs(problem.positions, len(problem.blocks))
        runs = fast_enough(problem, member, runs, most_seconds)
        cost = _known_costs if most_seconds == math.inf else _costs
        shapes = [cost(_Same(shape), _Same(member), _Same(runs), late) for shape in problem.shapes]
        allowed = [_allowed(problem, stage, member, runs) for stage in range(problem.stages)]
        shape_ = (len(keys), len(runs))
        made = {name: np.empty(shape_) for name in ("seconds", "busy", "step_end", "once", "excess", "room")}
        exact = np.zeros(shape_, dtype=bool)
        for key, table in keys.items():
            stage, number, capacity, start, stop = key
            costs, shape = shapes[number], problem.shapes[number]
            flying = problem.in_flight[stage]
            ahead, cuts = problem.arriving(stage), shape.cuts[start]
            behind = np.array(
                [cut.behind_bytes + ahead * cut.message_bytes + flying * cut.held_behind_bytes for cut in cuts]
            )
            before = np.array([cut.before_bytes + flying * cut.held_before_bytes for cut in shape.cuts[stop]])
            room = capacity - shape.overhead_bytes - costs.tied_bytes - flying * costs.kept_bytes
            room = _rounded(room - behind[runs.first] - before[runs.last] - costs.messages)
            made["room"][table] = room
            wanted = allowed[stage] & (costs.fastest <= most_seconds)
            seconds, excess, sure = costs.fit(room, flying, wanted)
            excess = np.maximum(excess, costs.updating + shape.overhead_bytes - capacity)
            made["excess"][table] = np.where(wanted, excess, np.inf)
            made["seconds"][table], exact[table] = seconds, sure
            ends = crossing[number, start][runs.first] + crossing[number, stop][runs.last]
            made["busy"][table] = seconds + ends
            made["step_end"][table] = costs.step_end
            made["once"][table] = seconds + costs.tied_once
        there, back = (_cut_seconds(problem, keys, name) for name in ("forward_s", "backward_s"))
        floor = arc_floors(
            *(problem, member, runs, [key[0] for key in keys], made["seconds"], made["excess"] <= 0),
            [shapes[key[1]].fastest for key in keys],
            [shapes[key[1]].exposed for key in keys],
            *(there, back),
        )
        pairs = {
            pair: np.array([[cut.seconds for cut in cuts] for cuts in links]) for pair, links in problem.pairs.items()
        }
        return StageGraph(
            problem,
            runs,
            slots,
            list(keys),
            floor=floor,
            ends=np.array([shapes[key[1]].fastest + shapes[key[1]].exposed for key in keys]),
            forward=member @ np.array([problem.least(block, "forward_s") for block in range(member.shape[1])]),
            least={name: least_amounts(problem, member, name) for name in ("forward_s", "backward_s")},
            source=source_ends(problem, member),
            there=there,
            back=back,
            exact=exact,
            crossing=crossing,
            held=[costs.held for costs in shapes],
            most_seconds=most_seconds,
            pairs=pairs,
            **made,  # type: ignore[arg-type]
        )

    @property
    def fits(self) -> Bits:
        """Whether a run can be used, [table, run]."""
        return self.excess <= 0

    def joint(self, before: int, after: int, place: int) -> Array:
        """Seconds of crossing at each position between stages of two shapes."""
        link = self.problem.links[place]
        sides = np.maximum(self.crossing[before, link], self.crossing[after, link])
        together = self.pairs.get((before, after))
        return sides if together is None else np.maximum(sides, together[link])

    def refine(self, stage: int, step: Step) -> bool:
        """Makes the seconds of a stage's run, and of all alike, exact; whether they were other than supposed."""
        table, run = self._at(stage, step)
        if self.exact[table, run]:
            return False
        found = self._solve(table, run)
        alike = self._alike(table, run)
        more = found - self.seconds[table, alike]
        self.exact[table, alike] = True
        if not self.seconds[table, run] < found * (1 - 1e-12):
            return False
        self.version += 1
        for array in (self.seconds, self.busy, self.once):
            array[table, alike] += more
        return True

    def _alike(self, table: int, run: int) -> NDArray[np.intp]:
        """The runs of as many blocks of each family in as much room, of which the same is true."""
        shape, room = self.tables[table][1], self.room[table]
        marks = self.held[shape].marks
        alike = (room == room[run]) & ~self.exact[table]
        for row in marks:
            alike &= row == row[run]
        return np.flatnonzero(alike)

    def with_choices(self, stage: int, step: Step) -> Step | None:
        """The step with the fastest choices that fit; None where none does, which bounds may not have shown."""
        key = self._at(stage, step)
        if key not in self._made:
            self._solve(*key)
        made = self._made[key]
        return None if made is None else Step(step.slot, step.first, step.last, made)

    def refine_all(self, way: Way) -> bool:
        """:meth:`refine` of every stage; whether any was other than supposed."""
        changed = [self.refine(stage, step) for stage, step in enumerate(way)]  # all, before the next look
        return any(changed)

    def made(self, way: Way) -> Way | None:
        """:meth:`with_choices` of every stage; None where one has none."""
        found = [self.with_choices(stage, step) for stage, step in enumerate(way)]
        whole = tuple(step for step in found if step is not None)
        return whole if len(whole) == len(found) else None

    def _at(self, stage: int, step: Step) -> tuple[int, int]:
        table = next(table for slot, table in self.slots[stage] if slot == step.slot)
        return table, self.runs.number(step.first, step.last)

    def _solve(self, table: int, run: int) -> float:
        problem = self.problem
        stage, number, *_ = self.tables[table]
        if (number, run) not in self._units:
            between = int(self.runs.first[run]), int(self.runs.last[run])
            self._units[number, run] = problem.shapes[number].units(problem.blocks_between(*between))
        units = self._units[number, run]
        families = [family for _, family in units]
        if all(len(family) == 1 for family in families):
            self._made[table, run] = ()
            return float(self.seconds[table, run])
        room, flying = float(self.room[table, run]), problem.in_flight[stage]
        # runs of layers that are alike have the same answer; by identity, as hashing takes long
        key = room, flying, *(id(family) if len(family) > 1 else family for family in families)
        if key not in self._fastest:
            self._fastest[key] = families, least_seconds(families, room, flying)
        _, found = self._fastest[key]
        if found.choices is None:
            self._made[table, run] = None
            return float("inf")
        self._made[table, run] = tuple(
            (block, choice) for (part, _), choice in zip(units, found.choices, strict=True) for block in part if choice
        )
        return found.bound


def least_amounts(problem: StageProblem, member: Bits, name: str) -> Array:
    """[shape, position]: the smallest amount of that name."""
    found = [
        [min(getattr(choice, name) for choice in block.choices) for block in shape.blocks] for shape in problem.shapes
    ]
    least: Array = np.array(found) @ member.T
    return least


def _cut_seconds(problem: StageProblem, keys: Iterable[_Key], name: str) -> Array:
    """[table, position]: what a stage sends, or receives of gradients, where it ends."""
    found = [getattr(cut, name) for key in keys for cut in problem.shapes[key[1]].cuts[key[4]]]
    return np.array(found).reshape(-1, len(problem.positions))


@functools.lru_cache(maxsize=4)
def all_runs(positions: tuple[int, ...], blocks: int) -> tuple[Bits, Runs]:
    """[position, block] whether a position has a block, and all runs; problems of one program have the same."""
    member = np.array([[mask >> block & 1 for block in range(blocks)] for mask in positions], dtype=bool)
    return member, Runs.of(member)


def fast_enough(problem: StageProblem, member: Bits, runs: Runs, most_seconds: float) -> Runs:
    """The runs whose blocks take no more than that at their fastest."""
    if most_seconds == math.inf:
        return runs
    fastest = [
        member @ np.array([min(choice.seconds for choice in block.choices) for block in shape.blocks])
        for shape in problem.shapes
    ]
    least = np.minimum.reduce([runs.between(values) for values in fastest])
    return runs.where(least <= most_seconds * (1 + _ROUNDING))


@dataclass(frozen=True, slots=True)
class RunCosts:
    """What runs of blocks cost in one shape, by run, without capacities. See :meth:`StageGraph.build` for ``late``."""

    families: list[Family]
    held: Held
    fastest: Array
    tied_bytes: Array
    kept_bytes: Array  # of tensors that several blocks keep, or that cross, per microbatch in flight
    messages: Array  # of gradients and weights, while microbatches run
    updating: Array  # state at least, and what the optimizer makes
    tied_once: Array
    step_end: Array
    exposed: Array  # of the step end, with as much hidden as the fastest choices may hide
    peak: Array  # the largest transient of the fastest choices

    @staticmethod
    def of(shape: Shape, member: Bits, runs: Runs, late: bool) -> RunCosts:
        families, held = Held.of(shape, member, runs)
        quickest = [_fastest(family) for family in families]
        fastest = held.summed([choice.seconds for choice in quickest])
        step_end = runs.between(member @ np.array([block.step_end_s for block in shape.blocks]))
        tied_bytes, tied_once = np.zeros(len(runs)), np.zeros(len(runs))
        for group in shape.tied:
            blocks = list(set(group.blocks))
            present = member[:, blocks].sum(axis=1)
            inside = runs.between(present) > 0
            tied_bytes += group.bytes * inside
            step_end += group.step_end_s * inside
            begins = (present[runs.first] == 0) & (present[runs.last] < len(blocks))
            tied_once += group.seconds * (inside & begins)
        kept_bytes = np.zeros(len(runs))
        for kept in shape.kept:
            kept_bytes += kept.bytes * (runs.between(member[:, list(set(kept.blocks))].sum(axis=1)) > 0)
        for item in shape.crossing:
            some, keepers = (
                runs.between(member[:, list(set(blocks))].sum(axis=1)) for blocks in (item.blocks, item.keepers)
            )
            kept_bytes += item.bytes * ((some > 0) & (some < len(set(item.blocks))) & (keepers == 0))
        hiding = held.summed([hiding_seconds(family) for family in families])
        sums = sums_between(shape.sums, member, runs)
        exposed = step_end - np.minimum(sums, hiding)
        if late and (alone := _hiding_alone(shape)):
            exposed = np.maximum(exposed, step_end - sums + late_between(shape.sums, member, runs, alone))
        peak = held.largest([choice.transient_bytes for choice in quickest])
        messages = shape.passing.messages_of(member, runs)
        updating = held.summed([min(choice.state_bytes for choice in family) for family in families]) + tied_bytes
        updating += shape.passing.updates_of(member, runs)
        return RunCosts(
            *(families, held, fastest, tied_bytes, kept_bytes, messages, updating),
            *(tied_once, step_end, exposed, peak),
        )

    def fit(self, room: Array, in_flight: int, wanted: Bits) -> tuple[Array, Array, Bits]:
        """Of the wanted runs: seconds at least, bytes over the room, and where the seconds are exact.

        Only where the fastest choices do not fit others are weighed.
        """
        kept = self.held.summed([_fastest(family).kept_bytes(in_flight) for family in self.families])
        excess = kept + self.peak - room
        weighed = wanted & (excess > 0)
        seconds = self.fastest.copy()
        if all(len(family) == 1 for family in self.families) or not weighed.any():
            return seconds, excess, np.ones(room.shape, dtype=bool)
        firsts, kind = _alike_runs(self.held.marks, room, weighed)
        counts, rooms = self.held.counts(firsts), room[firsts]
        lacking = least_excess(self.families, counts, rooms, in_flight)
        relaxed, fit = np.full(rooms.shape, np.inf), lacking <= 0
        relaxed[fit] = relaxed_seconds(self.families, counts[:, fit], rooms[fit], in_flight)
        excess[weighed], least = lacking[kind], self.fastest[weighed]
        # where a bound says that nothing fits it was too strict by rounding
        seconds[weighed] = np.where(np.isfinite(relaxed)[kind], np.maximum(relaxed[kind], least), least)
        return seconds, excess, np.isclose(seconds, self.fastest, rtol=1e-12, atol=0.0)


class _Same(Generic[_Item]):
    """Equal to what holds the very same object, however large that is."""

    __slots__ = ("item",)

    def __init__(self, item: _Item) -> None:
        self.item = item

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.item is other.item

    def __hash__(self) -> int:
        return id(self.item)


def _costs(shape: _Same[Shape], member: _Same[Bits], runs: _Same[Runs], late: bool) -> RunCosts:
    return RunCosts.of(shape.item, member.item, runs.item, late)


# bounds of unlike meshes solve a problem of the same shapes once for each stages that blocks are pinned to
_known_costs = functools.lru_cache(maxsize=32)(_costs)


def _alike_runs(marks: NDArray[np.int64], room: Array, wanted: Bits) -> tuple[Bits, NDArray[np.intp]]:
    """The first run of each that have equal marks and as much room, marked; and by wanted run its place among these."""
    marks, room = marks[:, wanted], room[wanted]
    _, first, kind = np.unique(marks[0] + room.view(np.int64) * _ODD, return_index=True, return_inverse=True)
    if not (np.array_equal(marks, marks[:, first[kind]]) and np.array_equal(room, room[first[kind]])):
        first = kind = np.arange(len(room))
    order = np.argsort(first)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    found: Bits = np.zeros(len(wanted), dtype=bool)
    found[np.flatnonzero(wanted)[first]] = True
    return found, place[kind]


def _rounded(room: Array) -> Array:
    """Without what sums of equal bytes in another order differ in, so that alike runs have equal room.

    Whole numbers stay as they are.
    """
    most = float(np.abs(room).max(initial=0.0))
    unit = 2.0 ** (math.frexp(most)[1] - 44)
    rounded: Array = np.round(room / unit) * unit
    return rounded


def _hiding_alone(shape: Shape) -> list[float]:
    """Of each block; none where layers' blocks do not follow each other. What a part of a layer hides beyond its blocks
    its first block does, which hides the sums of all others.
    """
    if any(layer.blocks[-1] - layer.blocks[0] >= len(layer.blocks) for layer in shape.layers):
        return []
    found = [hiding_seconds(block.choices) for block in shape.blocks]
    more = [0.0] * len(found)
    for part, family in (item for layer in shape.layers for item in layer.parts.items()):
        more[part[0]] = max(more[part[0]], hiding_seconds(family) - math.fsum(found[block] for block in part))
    return [own + beyond for own, beyond in zip(found, more, strict=True)]


def _fastest(family: Family) -> Choice:
    return min(family, key=lambda choice: choice.seconds)


def _slots_in_use(problem: StageProblem) -> list[list[int]]:
    """Per stage the slots on a way from place 0 to one of the ends."""
    forward: list[set[int]] = [{0}]
    for _ in range(problem.stages):
        forward.append({slot.stop for slot in problem.slots if slot.start in forward[-1]})
    back: list[set[int]] = [set(problem.ends)]
    for _ in range(problem.stages):
        back.append({slot.start for slot in problem.slots if slot.stop in back[-1]})
    back.reverse()
    return [
        [
            number
            for number, slot in enumerate(problem.slots)
            if slot.start in forward[stage] and slot.stop in back[stage + 1]
        ]
        for stage in range(problem.stages)
    ]


def _allowed(problem: StageProblem, stage: int, member: Bits, runs: Runs) -> Bits:
    """Runs that leave a block for each other stage and hold this stage's pinned blocks and no other stage's."""
    size, stages = member.sum(axis=1), problem.stages
    first = (size == 0) if stage == 0 else (size >= stage)
    last = (size == size[-1]) if stage == stages - 1 else (size <= size[-1] - (stages - stage - 1))
    allowed: Bits = first[runs.first] & last[runs.last]
    for block, pinned in problem.pins:
        inside = member[runs.last, block] & ~member[runs.first, block]
        allowed &= inside if pinned == stage else ~inside
    return allowed
