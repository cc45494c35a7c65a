"""All runs of blocks that stages can have, as arrays, and dynamic programs over them.

A *table* holds what a stage of one shape costs at one number in the pipeline, with one capacity and the links of its
two ends, [first, last] for the blocks between two positions; slots that agree in these share it. A way goes from place
0 to one of the ends with one slot and one run per stage. n <= 200 positions and 64 stages of a row of equal meshes make
2.6 million arcs, one pass over which takes some milliseconds.

Seconds of stages whose blocks have several choices are those of :mod:`autopart.solver.stages_choices`: bounds at first,
exact once :meth:`StageGraph.refine` has been asked for the run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopart.solver.overlap import sums_between
from autopart.solver.stages_choices import Held, between, least_excess, least_seconds, relaxed_seconds
from autopart.solver.stages_floor import arc_floors
from autopart.solver.stages_parts import Choice, Family, Shape, hiding_seconds
from autopart.solver.stages_problem import StageProblem, Step

Array = NDArray[np.float64]
Bits = NDArray[np.bool_]
# stage, shape, capacity, link at the start, link at the end
_Key = tuple[int, int, float, int, int]
# place and the shape of the stage before it, -1 where there is none
_Node = tuple[int, int]


@dataclass(slots=True)
class StageGraph:
    """The arcs of a problem.

    slots: per stage the (slot, table) that ways can use. All arrays are [table, first, last]: seconds: of the blocks
    in their fastest choices that fit, or a bound. busy: with sends and receives; step_end. once: what is added up over
    stages: ``seconds`` and the tied groups that begin in it and end behind it. floor: see :func:`arc_floors`.
    excess: bytes over the capacity; infinite for runs that no division has. exact: where ``seconds`` is no mere bound.
    most_seconds: of a run's blocks at their fastest; those with more are left out. crossing: [shape, link,
    position] seconds of what a rank sends and receives; pairs: (shape before, shape after) -> [link, position] what
    the two take together at least.
    """

    problem: StageProblem
    slots: list[list[tuple[int, int]]]
    tables: list[_Key]
    seconds: Array
    busy: Array
    step_end: Array
    once: Array
    floor: Array
    excess: Array
    exact: Bits
    crossing: Array
    most_seconds: float = math.inf
    pairs: dict[tuple[int, int], Array] = field(default_factory=dict)
    version: int = 0
    _made: dict[tuple[int, int, int], tuple[tuple[int, int], ...] | None] = field(default_factory=dict)

    @staticmethod
    def build(problem: StageProblem, most_seconds: float = math.inf) -> StageGraph:
        """most_seconds: runs whose blocks take more at their fastest are left out."""
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
        size = len(problem.positions)
        crossing = np.array([[[cut.seconds for cut in cuts] for cuts in s.cuts] for s in problem.shapes])
        member = np.array(
            [[mask >> b & 1 for b in range(len(problem.blocks))] for mask in problem.positions], dtype=bool
        )
        shapes = [_Runs.of(problem, shape, member) for shape in problem.shapes]
        allowed = [_allowed(problem, stage, member, shapes[0].is_run) for stage in range(problem.stages)]
        shape_ = (len(keys), size, size)
        made = {name: np.empty(shape_) for name in ("seconds", "busy", "step_end", "once", "excess")}
        exact = np.zeros(shape_, dtype=bool)
        for key, table in keys.items():
            stage, number, capacity, start, stop = key
            runs, shape = shapes[number], problem.shapes[number]
            buffers = [np.array([cut.buffer_bytes for cut in shape.cuts[link]]) for link in (start, stop)]
            room = capacity - shape.overhead_bytes - runs.tied_bytes - problem.in_flight[stage] * runs.kept_bytes
            room = room - buffers[0][:, None] - buffers[1][None, :]
            wanted = allowed[stage] & (runs.fastest <= most_seconds)
            seconds, excess, sure = runs.fit(room, problem.in_flight[stage], wanted)
            made["excess"][table] = np.where(wanted, excess, np.inf)
            made["seconds"][table], exact[table] = seconds, sure
            ends = crossing[number, start][:, None] + crossing[number, stop][None, :]
            made["busy"][table] = seconds + ends
            made["step_end"][table] = runs.step_end
            made["once"][table] = seconds + runs.tied_once
        floor = arc_floors(
            *(problem, member, [key[0] for key in keys], made["seconds"], made["excess"] <= 0),
            [shapes[key[1]].fastest for key in keys],
            [shapes[key[1]].exposed for key in keys],
        )
        pairs = {
            pair: np.array([[cut.seconds for cut in cuts] for cuts in links]) for pair, links in problem.pairs.items()
        }
        return StageGraph(
            problem,
            slots,
            list(keys),
            floor=floor,
            exact=exact,
            crossing=crossing,
            most_seconds=most_seconds,
            pairs=pairs,
            **made,  # type: ignore[arg-type]
        )

    @property
    def fits(self) -> Bits:
        """Whether a run can be used, [table, first, last]."""
        return self.excess <= 0

    def joint(self, before: int, after: int, place: int) -> Array:
        """Seconds of crossing at each position between stages of two shapes."""
        link = self.problem.links[place]
        sides = np.maximum(self.crossing[before, link], self.crossing[after, link])
        together = self.pairs.get((before, after))
        return sides if together is None else np.maximum(sides, together[link])

    def refine(self, stage: int, step: Step) -> bool:
        """Makes the seconds of a stage's run exact; whether they were other than supposed."""
        table = next(table for slot, table in self.slots[stage] if slot == step.slot)
        first, last = step.first, step.last
        if self.exact[table, first, last]:
            return False
        found = self._solve(table, first, last)
        more = found - self.seconds[table, first, last]
        self.exact[table, first, last] = True
        if not more > 1e-12 * found:
            return False
        self.version += 1
        for array in (self.seconds, self.busy, self.once):
            array[table, first, last] += more
        return True

    def with_choices(self, stage: int, step: Step) -> Step | None:
        """The step with the fastest choices that fit; None where none does, which bounds may not have shown."""
        table = next(table for slot, table in self.slots[stage] if slot == step.slot)
        key = table, step.first, step.last
        if key not in self._made:
            self._solve(*key)
        made = self._made[key]
        return None if made is None else Step(step.slot, step.first, step.last, made)

    def _solve(self, table: int, first: int, last: int) -> float:
        problem = self.problem
        stage, number, capacity, start, stop = self.tables[table]
        shape, inside = problem.shapes[number], problem.blocks_between(first, last)
        units = shape.units(inside)
        families = [family for _, family in units]
        if all(len(family) == 1 for family in families):
            self._made[table, first, last] = ()
            return float(self.seconds[table, first, last])
        room = capacity - shape.overhead_bytes - shape.cuts[start][first].buffer_bytes
        room -= shape.cuts[stop][last].buffer_bytes + sum(g.bytes for g in shape.tied if set(g.blocks) & set(inside))
        kept = sum(group.bytes for group in shape.kept if set(group.blocks) & set(inside))
        found = least_seconds(families, room - problem.in_flight[stage] * kept, problem.in_flight[stage])
        if found.choices is None:
            self._made[table, first, last] = None
            return float("inf")
        self._made[table, first, last] = tuple(
            (block, choice) for (part, _), choice in zip(units, found.choices, strict=True) for block in part if choice
        )
        return found.bound


@dataclass(frozen=True, slots=True)
class _Runs:
    """What runs of blocks cost in one shape, [first, last], without capacities."""

    families: list[Family]
    held: Held
    is_run: Bits
    fastest: Array
    tied_bytes: Array
    kept_bytes: Array  # of tensors that several blocks keep, per microbatch in flight
    tied_once: Array
    step_end: Array
    exposed: Array  # of the step end, with as much hidden as the fastest choices may hide
    peak: Array  # the largest transient of the fastest choices

    @staticmethod
    def of(problem: StageProblem, shape: Shape, member: Bits) -> _Runs:
        families, held = _held(shape, member)
        size = member.sum(axis=1)
        # a run: the first position is a part of the last
        is_run = (member.astype(np.int64) @ member.T.astype(np.int64) == size[:, None]) & (
            size[:, None] < size[None, :]
        )
        quickest = [_fastest(family) for family in families]
        fastest = held.summed([choice.seconds for choice in quickest])
        step_end = between(member @ np.array([block.step_end_s for block in shape.blocks]))
        tied_bytes, tied_once = np.zeros(step_end.shape), np.zeros(step_end.shape)
        for group in shape.tied:
            present = member[:, list(set(group.blocks))].sum(axis=1)
            inside = between(present.astype(float)) > 0
            tied_bytes += group.bytes * inside
            step_end += group.step_end_s * inside
            begins = (present == 0)[:, None] & (present < len(set(group.blocks)))[None, :]
            tied_once += group.seconds * (inside & begins)
        kept_bytes = np.zeros(step_end.shape)
        for kept in shape.kept:
            kept_bytes += kept.bytes * (between(member[:, list(set(kept.blocks))].sum(axis=1).astype(float)) > 0)
        hiding = held.summed([hiding_seconds(family) for family in families])
        exposed = step_end - np.minimum(sums_between(shape.sums, member), hiding)
        peak = np.zeros(step_end.shape)
        for number, choice in enumerate(quickest):
            np.maximum(peak, choice.transient_bytes, out=peak, where=held.of(number) > 0)
        return _Runs(families, held, is_run, fastest, tied_bytes, kept_bytes, tied_once, step_end, exposed, peak)

    def fit(self, room: Array, in_flight: int, wanted: Bits) -> tuple[Array, Array, Bits]:
        """Of the wanted runs: seconds at least, bytes over the room, and where the seconds are exact.

        Only where the fastest choices do not fit others are weighed.
        """
        kept = self.held.summed([_fastest(family).kept_bytes(in_flight) for family in self.families])
        excess = np.where(self.is_run, kept + self.peak - room, np.inf)
        weighed = wanted & self.is_run & (excess > 0)
        seconds = self.fastest.copy()
        if all(len(family) == 1 for family in self.families) or not weighed.any():
            return seconds, excess, np.ones(room.shape, dtype=bool)
        excess[weighed] = least_excess(self.families, self.held.counts(weighed), room[weighed], in_flight)
        weighed &= excess <= 0
        counts, rooms, least = self.held.counts(weighed), room[weighed], self.fastest[weighed]
        relaxed = relaxed_seconds(self.families, counts, rooms, in_flight)
        # where a bound says that nothing fits it was too strict by rounding
        seconds[weighed] = np.where(np.isfinite(relaxed), np.maximum(relaxed, least), least)
        return seconds, excess, np.isclose(seconds, self.fastest, rtol=1e-12, atol=0.0)


def _fastest(family: Family) -> Choice:
    return min(family, key=lambda choice: choice.seconds)


def _held(shape: Shape, member: Bits) -> tuple[list[Family], Held]:
    """The families of blocks and of parts of layers, and how many of each a run has."""
    in_layers = {block for layer in shape.layers for block in layer.blocks}
    alone = {number: block.choices for number, block in enumerate(shape.blocks) if number not in in_layers}
    families = list(dict.fromkeys(alone.values()))
    of_block = np.array([families.index(alone[n]) if n in alone else -1 for n in range(len(shape.blocks))])
    blocks = [member[:, of_block == number].sum(axis=1) for number in range(len(families))]
    parts = list(dict.fromkeys(family for layer in shape.layers for family in layer.parts.values()))
    runs = np.zeros((len(parts), len(member), len(member)))
    for layer in shape.layers:
        code = member[:, list(layer.blocks)] @ (1 << np.arange(len(layer.blocks)))
        places = {int(value): np.flatnonzero(code == value) for value in np.unique(code)}
        for part, family in layer.parts.items():
            bits = sum(1 << layer.blocks.index(block) for block in part)
            number = parts.index(family)
            for value, first in places.items():
                if value + bits in places:
                    runs[number][np.ix_(first, places[value + bits])] += 1
    return [*families, *parts], Held(np.array(blocks, dtype=float).reshape(len(families), len(member)), runs)


@dataclass(slots=True)
class _Layer:
    """Best values of ways up to some stage, by node, and where they come from: slot, run's first position, node."""

    best: dict[_Node, Array] = field(default_factory=dict)
    slot: dict[_Node, NDArray[np.intp]] = field(default_factory=dict)
    first: dict[_Node, NDArray[np.intp]] = field(default_factory=dict)
    shape: dict[_Node, NDArray[np.intp]] = field(default_factory=dict)


Found = tuple[float, tuple[Step, ...]]


def cheapest(graph: StageGraph, arcs: Array) -> Found | None:
    """The way with the smallest sum of ``arcs`` [table, first, last] and of what crosses; None without a way."""
    return _best_way(graph, arcs, np.add)


def smallest_maximum(graph: StageGraph, arcs: Array) -> Found | None:
    """The way whose largest arc is smallest; None without a way."""
    return _best_way(graph, arcs, np.maximum)


def _best_way(graph: StageGraph, arcs: Array, combine: np.ufunc) -> Found | None:
    """best[s + 1, stop, last] = min over slots, first of combine(best[s, start, first], arcs[table, first, last])."""
    problem, adds = graph.problem, combine is np.add
    size = len(problem.positions)
    start = np.full(size, np.inf)
    start[0] = 0.0 if adds else -np.inf
    layers = [_Layer({(0, -1): start})]
    for found in graph.slots:
        before, layer = layers[-1], _Layer()
        for number, table in found:
            slot = problem.slots[number]
            entry, came = _entry(graph, before.best, slot.start, slot.shape, adds)
            if entry is None:
                continue
            ways = combine(entry[:, None], arcs[table])
            first = ways.argmin(axis=0)
            value = np.take_along_axis(ways, first[None, :], axis=0)[0]
            node = slot.stop, slot.shape
            if node not in layer.best:
                layer.best[node], layer.first[node], layer.shape[node] = value, first, came[first]
                layer.slot[node] = np.full(size, number)
                continue
            better = value < layer.best[node]
            layer.best[node] = np.where(better, value, layer.best[node])
            layer.first[node] = np.where(better, first, layer.first[node])
            layer.shape[node] = np.where(better, came[first], layer.shape[node])
            layer.slot[node] = np.where(better, number, layer.slot[node])
        layers.append(layer)
    final = [(float(value[-1]), node) for node, value in layers[-1].best.items() if node[0] in problem.ends]
    value, node = min(final, default=(np.inf, (0, -1)))
    if not np.isfinite(value):
        return None
    steps, last = [], size - 1
    for layer in reversed(layers[1:]):
        number, first = int(layer.slot[node][last]), int(layer.first[node][last])
        steps.append(Step(number, first, last))
        node = problem.slots[number].start, int(layer.shape[node][last])
        last = first
    return value, tuple(reversed(steps))


def _entry(
    graph: StageGraph, best: dict[_Node, Array], place: int, shape: int, adds: bool
) -> tuple[Array | None, NDArray[np.intp]]:
    """By position the best that leads to a stage of this shape, and the shape of the stage before."""
    value: Array | None = None
    came = np.full(len(graph.problem.positions), -1, dtype=np.intp)
    for (at, other), found in best.items():
        if at != place:
            continue
        through = found + graph.joint(other, shape, place) if adds and other >= 0 else found
        better = np.ones(len(came), dtype=bool) if value is None else through < value
        value = through if value is None else np.where(better, through, value)
        came = np.where(better, other, came)
    return value, came


def sums_through(graph: StageGraph, arcs: Array) -> Iterator[tuple[int, int, int, Array]]:
    """(stage, slot, shape before, [first, last]): for each arc the smallest sum of a way that uses it."""
    problem, size = graph.problem, len(graph.problem.positions)
    start = np.full(size, np.inf)
    start[0] = 0.0
    to: list[dict[_Node, Array]] = [{(0, -1): start}]
    for found in graph.slots:
        reached: dict[_Node, Array] = {}
        for number, table in found:
            slot = problem.slots[number]
            entry, _ = _entry(graph, to[-1], slot.start, slot.shape, adds=True)
            if entry is not None:
                value = (entry[:, None] + arcs[table]).min(axis=0)
                node = slot.stop, slot.shape
                reached[node] = np.minimum(reached[node], value) if node in reached else value
        to.append(reached)
    end = np.full(size, np.inf)
    end[-1] = 0.0
    after: dict[_Node, Array] = {node: end for node in to[-1] if node[0] in problem.ends}
    found_all: list[tuple[int, int, int, Array]] = []
    for stage in reversed(range(problem.stages)):
        back: dict[_Node, Array] = {}
        for number, table in graph.slots[stage]:
            slot = problem.slots[number]
            rest = after.get((slot.stop, slot.shape))
            if rest is None:
                continue
            onward = arcs[table] + rest[None, :]
            for (place, other), before in to[stage].items():
                if place != slot.start:
                    continue
                joint = graph.joint(other, slot.shape, place) if other >= 0 else np.zeros(size)
                found_all.append((stage, number, other, (before + joint)[:, None] + onward))
                value = joint + onward.min(axis=1)
                node = place, other
                back[node] = np.minimum(back[node], value) if node in back else value
        after = back
    return iter(found_all)


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


def _allowed(problem: StageProblem, stage: int, member: Bits, is_run: Bits) -> Bits:
    """Runs that leave a block for each other stage and hold this stage's pinned blocks and no other stage's."""
    size, stages = member.sum(axis=1), problem.stages
    first = (size == 0) if stage == 0 else (size >= stage)
    last = (size == size[-1]) if stage == stages - 1 else (size <= size[-1] - (stages - stage - 1))
    allowed = is_run & first[:, None] & last[None, :]
    for block, pinned in problem.pins:
        inside = member[:, block][None, :] & ~member[:, block][:, None]
        allowed &= inside if pinned == stage else ~inside
    return allowed
