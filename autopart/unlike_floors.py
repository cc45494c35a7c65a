"""Least seconds of steps on stages whose meshes are their own.

With R the least seconds of the ops' arithmetic and traffic for one microbatch on any one device, L those of their
launches, which devices cannot share, and v_d <= 1 the most of R that device d does per second, a stage with devices of
speed V takes at least L_k + R_k / V. Every stage has at least the slowest device's speed v, so that with S the sum of
all v_d, and r = (m - 1) / m, the argument of :mod:`autopart.candidates` gives

    F >= R / (v (1 - r^p) + (S - p v) / m)    and    F >= (L + R / (S - (p - 1) v)) / (1 - r^p)

After an evaluation the bound is the stage solver's, whatever the strategies of meshes with tensor axes: each op, each
gradient's sum and update and what crosses are shared perfectly, but a layer, and a run of blocks beside layers, takes
where it is whole in a stage what its fastest strategies do with their collectives, and a block by itself likewise
(:func:`autopart.alike_work.least_seconds`); of one stage all counts that does where meshes are equal
(:meth:`Candidates.last_floor`). Of unlike replicas one counts. To that come sums of gradients of parameters that the
first stage shares with another.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from autopart.candidates import Candidates
from autopart.cost.communication import bucketed_all_reduce_seconds
from autopart.device_row import DeviceRow, Run
from autopart.mesh_prices import ALONE, INSIDE, NETWORK, Mesh, MeshPrices, Part, Priced
from autopart.passes.graph import Value
from autopart.recomputation import parts_of
from autopart.runtime.errors import InfeasibleError
from autopart.solver import stages as stage_solver
from autopart.solver.degrees import UnlikeMeshes
from autopart.solver.stages_parts import Block, Choice, Cut, Layer, Shape, TiedGroup
from autopart.solver.stages_passing import Passing
from autopart.solver.stages_problem import StageProblem
from autopart.step_time import WHOLE_SCHEDULES

_LEAST_SUMS = 0.003
"""Of a step's seconds: what sums of tied gradients are not looked at for."""
_MOST_STEPS = 3
"""How many of the seconds that sums may take are told apart."""


@dataclass(slots=True)
class UnlikeFloors:
    """Lower bounds of configurations with unlike meshes."""

    prices: MeshPrices
    _work: dict[tuple[int, str], tuple[float, float, tuple[float, ...]]] = field(default_factory=dict)
    _summed: dict[object, float] = field(default_factory=dict)

    @property
    def candidates(self) -> Candidates:
        return self.prices.candidates

    @property
    def row(self) -> DeviceRow:
        return self.prices.row

    def lower_bound(self, config: UnlikeMeshes) -> float:
        """Seconds that a step takes at least; see the module. The fastest host starts all kernels of a microbatch."""
        candidates, equal, floor = self.candidates, config.equal, self._priced_bound(config)
        floor /= candidates.faster(config)
        if not (slowest := candidates.device.host_s):
            return floor
        fastest = min(node.device.host_s for node in self.row.kinds)
        return max(floor, fastest / slowest * candidates.step_floor(candidates.starting_seconds(equal), equal))

    def _priced_bound(self, config: UnlikeMeshes) -> float:
        """The same where no device is faster than priced."""
        launches, work, speeds = self._least_work(self.candidates.batch // config.microbatches, config.recompute)
        counts = [node.count * number for node, number in zip(self.row.kinds, self.row.counts, strict=True)]
        total = sum(speed * count for speed, count in zip(speeds, counts, strict=True))
        slowest, stages, pieces = min(speeds), config.pp, config.microbatches
        if config.schedule not in WHOLE_SCHEDULES:
            return pieces * max(work / total, launches / stages)
        filled = 1 - ((pieces - 1) / pieces) ** stages
        shared = work / (slowest * filled + (total - stages * slowest) / pieces)
        return max(shared, (launches + work / (total - (stages - 1) * slowest)) / filled)

    def _least_work(self, rows: int, recompute: str) -> tuple[float, float, tuple[float, ...]]:
        """Seconds of launches and of the rest of the ops for so many samples, and each kind's speed at the rest."""
        key = rows, recompute
        if key not in self._work:
            views = [self.prices.view(kind, rows) for kind in range(len(self.row.kinds))]
            prices = [view.prices(ALONE) for view in views]
            launches = work = 0.0
            speeds = [0.0] * len(views)
            for (node, again), count in self.candidates.alike:
                seconds = []
                for own in prices:
                    fixed, whole = own.shared_seconds(node, 0.0, 0.0), own.shared_seconds(node, 1.0, 1.0)
                    times = 1.0 if again and recompute == "full" else 0.0
                    start = sum(fixed) + times * fixed[0]
                    seconds.append((start, max(0.0, sum(whole) + times * whole[0] - start)))
                least = min(rest for _, rest in seconds)
                launches += count * min(start for start, _ in seconds)
                work += count * least
                speeds = [
                    max(speed, least / rest if rest else 0.0) for speed, (_, rest) in zip(speeds, seconds, strict=True)
                ]
            self._work[key] = launches, work, tuple(speed or 1.0 for speed in speeds)
        return self._work[key]

    def least_seconds(
        self, config: UnlikeMeshes, problem: StageProblem, priced: Sequence[Priced], below: float
    ) -> float:
        """Seconds of a step on these meshes at least, under any strategies. Raises InfeasibleError where none fits.

        below: from which a higher bound is of no interest.
        """
        # of positions that are left out the solver's bound says nothing
        every = self.candidates.positions
        whole = every.complete and len(self.prices.positions) == len(every.sets)
        if config.schedule not in WHOLE_SCHEDULES or not whole:
            return 0.0
        faster = self.candidates.faster(config)
        relaxed, below = self._relaxed(problem, priced), below * faster
        found = stage_solver.least_seconds(relaxed, below)
        if config.pp == 1:
            return self._one_stage(relaxed, priced, below)
        return self._with_tied(relaxed, priced, found, below) / faster

    def _relaxed(self, problem: StageProblem, priced: Sequence[Priced]) -> StageProblem:
        """The problem in which tensor ranks share each op perfectly and hold nothing, and of unlike replicas one
        counts: no strategies take fewer seconds.
        """
        shapes = []
        for item, shape in zip(priced, problem.shapes, strict=True):
            part = item.parts[0]
            if item.mesh.axes:
                shapes.append(self._shared(item, part))
            elif len(item.parts) == 1:
                shapes.append(replace(shape, tied=_free(shape.tied)))
            else:
                cuts = tuple(tuple(map(_free_of_memory, cuts)) for cuts in shape.cuts)
                shapes.append(_of_one(part.candidates.problem(part.config, item.choice).shapes[0], cuts, shape.name))
        # what other strategies have to convert between unlike meshes may be less
        alike = {pair: cuts for pair, cuts in problem.pairs.items() if not any(priced[at].mesh.axes for at in pair)}
        return replace(problem, shapes=tuple(shapes), pairs=alike)

    def _one_stage(self, problem: StageProblem, priced: Sequence[Priced], below: float) -> float:
        """The least on any mesh of all devices, each with the best bound there is of its slowest replicas alone."""
        found = math.inf
        for slot in problem.slots:
            part = priced[slot.shape].parts[0]
            seconds = _least_or_infinite(replace(problem, slots=(slot,)), below)
            if seconds < min(below, found):
                seconds = max(seconds, part.candidates.last_floor(part.config, below))
            found = min(found, seconds)
        return found

    def summed_seconds(self, size: float, meshes: Sequence[Mesh], devices: Sequence[Sequence[int]]) -> float:
        """Of summing a gradient of so many bytes on each rank over stages, over the ranks that the runtime sums over.

        meshes, devices: of each stage that has it.
        """
        cluster = self.candidates.cluster
        groups = [tuple(rank for ranks in devices for rank in ranks)]
        if len({(mesh.dp, mesh.axes) for mesh in meshes}) == 1:
            groups = list(zip(*devices, strict=True))
        links = [
            cluster.link(*ranks, senders=len(groups)) if len(ranks) == 2 else cluster.group_link(ranks)
            for ranks in groups
        ]
        return max(
            bucketed_all_reduce_seconds(size, len(ranks), link) for ranks, link in zip(groups, links, strict=True)
        )

    @property
    def _tied(self) -> list[tuple[fx.Node, int]]:
        """Trained parameters that the first block and one other read, with the number of the other: of a row of blocks,
        those where this is the first.
        """
        if not self.candidates.positions.in_row:
            return []
        readers = self.candidates.readers.items()
        found = [(node, max(own)) for node, own in readers if node.meta.get("trainable") and len(own) == 2 and 0 in own]
        first = min((other for _, other in found), default=0)
        return [(node, other) for node, other in found if other == first]

    def _tied_bytes(self) -> float:
        """What of their gradients stages sum."""
        return math.fsum(self.candidates.whole_bytes(Value(node), 1) for node, _ in self._tied) * self.candidates.summed

    def _with_tied(self, problem: StageProblem, priced: Sequence[Priced], found: float, below: float) -> float:
        """With sums of gradients of parameters that the first block and another read. found: seconds without these."""
        tied = self._tied
        if not tied:
            return found
        return self._with_sums(problem, priced, found, below, self._tied_bytes(), tied[0][1] + 1)

    def _with_sums(
        self,
        problem: StageProblem,
        priced: Sequence[Priced],
        found: float,
        below: float,
        size: float,
        behind: int,
    ) -> float:
        """With sums of gradients of so many bytes, of what the first block and the last before ``behind`` read.

        Either the last stage has that block, and what its mesh and the first one's take for the sums is known. Or it
        lies in a stage before, and the last one has some of the blocks behind: the others are done by one stage less.
        """
        if problem.stages == 1 or found >= below:
            return found
        ends = self._sums_of_ends(problem, priced, size)
        steps = sorted(set(ends.values()))
        if steps and steps[-1] < _LEAST_SUMS * found:
            return found
        last = found + steps[0] if steps else math.inf
        for step in steps[1:_MOST_STEPS]:
            # slots whose sums take less, at these sums' least; or others
            pairs = {pair for pair, seconds in ends.items() if seconds < step}
            less = _least_or_infinite(with_ends(problem, pairs)[0], min(below, found + step)) + steps[0]
            last = max(last, min(less, found + step))
            if less <= found + step:
                break
        for fewer in _without_last(problem, behind):
            most, sent = min(below, last), _sent_behind(problem, behind, *fewer.ends)
            least = max(sent, _least_or_infinite(fewer, most)) if sent < last else sent
            if least < last:
                last = min(last, max(found, sent, self._with_sums(fewer, priced, least, most, size, behind)))
        return last

    def _sums_of_ends(
        self, problem: StageProblem, priced: Sequence[Priced], size: float
    ) -> dict[tuple[int, int], float]:
        """By slots of the first and the last stage, seconds in which they sum gradients of so many bytes."""
        found, slots = {}, problem.slots
        firsts = [number for number, slot in enumerate(slots) if slot.start == 0]
        lasts = [number for number, slot in enumerate(slots) if slot.stop in problem.ends]
        between = {
            stop: _reached(problem, stop, problem.stages - 2) for stop in {slots[first].stop for first in firsts}
        }
        for pair in itertools.product(firsts, lasts):
            begin, end = (slots[number] for number in pair)
            if end.start not in between[begin.stop]:
                continue
            meshes = [replace(priced[slot.shape].mesh, zero=0) for slot in (begin, end)]
            runs = [Run(slot.start, slot.stop, mesh.pieces) for slot, mesh in zip((begin, end), meshes, strict=True)]
            key = size, *runs, *meshes
            if key not in self._summed:
                self._summed[key] = self.summed_seconds(size, meshes, [self.row.devices(run) for run in runs])
            found[pair] = self._summed[key]
        return found

    def _shared(self, item: Priced, part: Part) -> Shape:
        """A mesh with tensor axes under whatever strategies."""
        candidates, mesh = part.candidates, item.mesh
        parts = candidates.least_parts(part.config, mesh.zero)
        links = (self.prices.between(mesh, mesh, level) for level in (INSIDE, NETWORK))
        every = [candidates.least_cuts(part.config, link) for link in links]
        cuts = tuple(tuple(_free_of_memory(own[at]) for at in self.prices.positions) for own in every)
        least = candidates.least_part_seconds(part.config)
        # what collectives add may as well be part of the backward, which hides the more
        blocks = [
            replace(block, backward_s=max(block.backward_s, least.get((at,), 0.0) - block.forward_s))
            for at, block in enumerate(parts.blocks)
        ]
        layers = (self._layer(own, blocks, parts.adding, found) for own, found in least.items() if len(own) > 1)
        backward = (block.backward_s + adding for block, adding in zip(blocks, parts.adding, strict=True))
        return Shape(
            tuple(replace(block, backward_s=back) for block, back in zip(blocks, backward, strict=True)),
            *(cuts, 0.0, parts.tied, item.shape.name),
            layers=tuple(layers),
            sums=parts.sums,
        )

    def _layer(self, own: tuple[int, ...], blocks: Sequence[Block], adding: Sequence[float], seconds: float) -> Layer:
        """One whose ops take so many seconds where it is whole in a stage, and less in parts, as its blocks do."""
        found = {}
        for between in parts_of(own, self.candidates.positions.sets):
            there = math.fsum(blocks[at].forward_s for at in between)
            back = math.fsum(blocks[at].backward_s for at in between)
            back = max(back, seconds - there) if between == own else back
            found[between] = (Choice(there, back + math.fsum(adding[at] for at in between)),)
        return Layer(own, found)


def _least_or_infinite(problem: StageProblem, below: float) -> float:
    """Infinite where nothing fits."""
    try:
        return stage_solver.least_seconds(problem, below)
    except InfeasibleError:
        return math.inf


def _reached(problem: StageProblem, place: int, stages: int) -> set[int]:
    """The places where so many stages that begin at a place may end."""
    found = {place}
    for _ in range(stages):
        found = {slot.stop for slot in problem.slots if slot.start in found}
    return found


def with_ends(problem: StageProblem, pairs: Collection[tuple[int, int]]) -> tuple[StageProblem, list[int]]:
    """The problem without the slots of the first and the last stage that none of these pairs has, and the numbers of
    those it keeps. pairs: slots of the first and the last stage.
    """
    first, last = ({pair[at] for pair in pairs} for at in range(2))
    kept = [
        number
        for number, slot in enumerate(problem.slots)
        if (slot.start or number in first) and (slot.stop not in problem.ends or number in last)
    ]
    return replace(problem, slots=tuple(problem.slots[number] for number in kept)), kept


def _sent_behind(problem: StageProblem, behind: int, end: int) -> float:
    """Seconds of a step at least in which all microbatches' values pass to a stage that begins at a place with some of
    the blocks from ``behind`` on, and their gradients back.
    """
    link, last, least = problem.links[end], len(problem.positions) - 1, math.inf
    for position, inside in enumerate(problem.positions):
        if inside.bit_count() >= behind and position < last:
            cuts = [shape.cuts[link][position] for shape in problem.shapes]
            there, back = (min(getattr(cut, way) for cut in cuts) for way in ("forward_s", "backward_s"))
            least = min(least, there + back + (problem.microbatches - 1) * max(there, back))
    return least


def _without_last(problem: StageProblem, behind: int) -> list[StageProblem]:
    """The problem without memory and without its last stage, which has some of the blocks from ``behind`` on: one for
    each place where that may begin. None where it has other blocks, as they are pinned.
    """

    def free(shape: Shape) -> Shape:
        blocks = (block if at < behind else Block(block.name, 0.0, 0.0) for at, block in enumerate(shape.blocks))
        layers = tuple(layer for layer in shape.layers if layer.blocks[-1] < behind)
        sums = tuple(item for item in shape.sums if min(item.blocks) < behind)
        return replace(shape, blocks=tuple(blocks), layers=layers, sums=sums)

    last = problem.stages - 1
    if any(block < behind and stage == last for block, stage in problem.pins):
        return []
    fewer = replace(
        problem,
        shapes=tuple(map(free, problem.shapes)),
        slots=tuple(replace(slot, capacity_bytes=math.inf) for slot in problem.slots),
        in_flight=problem.in_flight[:-1],
        pins=tuple((block, stage) for block, stage in problem.pins if stage < last),
    )
    places = dict.fromkeys(slot.start for slot in problem.slots if slot.stop in problem.ends)
    return [replace(fewer, ends=(place,)) for place in places]


def _of_one(shape: Shape, cuts: tuple[tuple[Cut, ...], ...], name: str) -> Shape:
    """What one of unlike replicas does, and sums with the others, without any memory."""
    blocks = (Block(own.name, own.forward_s, own.backward_s, step_end_s=own.step_end_s) for own in shape.blocks)
    tied = tuple(replace(group, bytes=0.0) for group in _free(shape.tied))
    passing = Passing(limit=shape.passing.limit)
    return Shape(tuple(blocks), cuts, 0.0, tied, name, sums=shape.sums, passing=passing)


def _free_of_memory(cut: Cut) -> Cut:
    return Cut(cut.forward_s, cut.backward_s)


def _free(tied: Sequence[TiedGroup]) -> tuple[TiedGroup, ...]:
    """Groups that may as well lie in stages whose links take no time."""
    return tuple(replace(group, seconds=0.0) for group in tied)
