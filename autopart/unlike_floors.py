"""Least seconds of steps on stages whose meshes are their own.

With R the least seconds of the ops' arithmetic and traffic for one microbatch on any one device, L those of their
launches, which devices cannot share, and v_d <= 1 the most of R that device d does per second, a stage with devices of
speed V takes at least L_k + R_k / V. Every stage has at least the slowest device's speed v, so that with S the sum of
all v_d, and r = (m - 1) / m, the argument of :mod:`autopart.candidates` gives

    F >= R / (v (1 - r^p) + (S - p v) / m)    and    F >= (L + R / (S - (p - 1) v)) / (1 - r^p)

A better bound is the stage solver's, whatever the strategies of meshes with tensor axes: each op, each gradient's sum
and update and what crosses are shared perfectly, but a layer, and a run of blocks beside layers, takes where it is
whole in a stage what its fastest strategies do with their collectives, and a block by itself likewise
(:func:`autopart.alike_work.least_seconds`); of one stage all counts that does where meshes are equal
(:meth:`Candidates.last_floor`). Of unlike replicas one counts. To that come sums of gradients of parameters that the
first stage shares with another. Before an evaluation it is of no level of ZeRO and no memory, with what each takes at
the level that takes the least; after it of the levels that were offered.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from autopart.candidates import Candidates
from autopart.cost.communication import bucketed_all_reduce_seconds
from autopart.crossing_memory import sent_ahead
from autopart.device_layout import slowest
from autopart.device_row import MOST_PARTED, DeviceRow, Run
from autopart.mesh_prices import ALONE, INSIDE, NETWORK, Mesh, MeshPrices
from autopart.passes.graph import Value
from autopart.recomputation import parts_of
from autopart.runtime.errors import InfeasibleError
from autopart.runtime.schedule import in_flight
from autopart.runtime.ties import Copies, copies_in, tied_copies
from autopart.solver import stages as stage_solver
from autopart.solver.degrees import UnlikeMeshes
from autopart.solver.stages_counts import possible_counts
from autopart.solver.stages_parts import Block, Choice, Cut, Layer, Shape, TiedGroup
from autopart.solver.stages_passing import Passing
from autopart.solver.stages_problem import Slot, StageProblem
from autopart.step_time import WHOLE_SCHEDULES
from autopart.tied_sums import tied_seconds
from autopart.unlike_ends import stages_of, ways_through, with_ends

_LEAST_SUMS = 0.003
"""Of a step's seconds: what sums of tied gradients are not looked at for."""
_MOST_STEPS = 3
"""How many of the seconds that sums may take are told apart."""
_NEAR = 0.01
"""Part of the seconds to which a bound of all numbers of stages is found, and beyond those of interest looked at."""
_MESHES, _MANY = 20, 2_000
"""Meshes of which a configuration takes as long as one of equal meshes; slots of all stages from which it has no other
bounds than those that are found for all numbers of stages at once.
"""
_MOST_READERS, _MOST_WAYS = 3, 5_000
"""Of a parameter the blocks that read it, and of their stages the slots, up to which sums are looked at."""


@dataclass(slots=True)
class UnlikeFloors:
    """Lower bounds of configurations with unlike meshes."""

    prices: MeshPrices
    _all_slots: dict[object, list[tuple[int, Slot, Mesh]]] = field(default_factory=dict)
    _slots: dict[object, tuple[tuple[Slot, ...], tuple[Mesh, ...]]] = field(default_factory=dict)
    _work: dict[tuple[int, str], tuple[float, float, tuple[float, ...]]] = field(default_factory=dict)
    _summed: dict[object, float] = field(default_factory=dict)
    _least: dict[object, tuple[float, float]] = field(default_factory=dict)  # and up to which it was sought
    _shapes: dict[object, Shape] = field(default_factory=dict)
    # of steps of so many seconds, which numbers of stages may take no more
    _counts: dict[object, dict[float, Collection[int]]] = field(default_factory=dict)

    @property
    def candidates(self) -> Candidates:
        return self.prices.candidates

    @property
    def row(self) -> DeviceRow:
        return self.prices.row

    def under(self, candidates: Candidates) -> Self:
        """The same for candidates that differ in the warm-up alone, of which no price knows."""
        found = copy.copy(self)
        found.prices = copy.copy(self.prices)
        found.prices.candidates = candidates
        found._least, found._counts = {}, {}
        return found

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

    def slots(
        self, stages: int, rows: int, levels: Sequence[int] = (0,), shorter: bool = False
    ) -> tuple[tuple[Slot, ...], tuple[Mesh, ...]]:
        """Those on a way from the first place to the end in so many stages, and the mesh of each shape.

        rows: samples of a microbatch. levels: of ZeRO that are offered. shorter: in any number of
        stages from two to these.
        """
        key = stages, rows, tuple(levels), shorter
        if key not in self._slots:
            self._slots[key] = self._found_slots(*key)
        return self._slots[key]

    def _found_slots(
        self, stages: int, rows: int, levels: tuple[int, ...], shorter: bool
    ) -> tuple[tuple[Slot, ...], tuple[Mesh, ...]]:
        row = self.row
        most = row.cluster.device_count - (2 if shorter else stages) + 1
        found = [(slot, mesh) for count, slot, mesh in self._slots_of_runs(rows, levels) if count <= most]
        after: list[set[int]] = [{0}]
        for _ in range(stages):
            after.append({slot.stop for slot, _ in found if slot.start in after[-1]} | ({0} if shorter else set()))
        before: list[set[int]] = [{row.end}]
        for _ in range(stages):
            before.append({slot.start for slot, _ in found if slot.stop in before[-1]})
        before.reverse()
        steps = [
            (here & onward, end) for (here, onward), (_, end) in itertools.pairwise(zip(after, before, strict=True))
        ]
        used = [(slot, mesh) for slot, mesh in found if any(slot.start in a and slot.stop in b for a, b in steps)]
        numbers: dict[Mesh, int] = {}
        slots = tuple(replace(slot, shape=numbers.setdefault(mesh, len(numbers))) for slot, mesh in used)
        return slots, tuple(numbers)

    def _slots_of_runs(self, rows: int, levels: tuple[int, ...]) -> list[tuple[int, Slot, Mesh]]:
        """On any way, with its number of devices."""
        if (rows, levels) not in self._all_slots:
            kinds = self.row.kinds
            self._all_slots[rows, levels] = [
                (run.count, Slot(run.start, run.stop, 0, room), mesh)
                for run in self.row.runs
                for room in [float(min(kinds[kind].device.memory_bytes for kind, _ in run.pieces))]
                for mesh in self.prices.meshes(run.pieces, rows, levels)
            ]
        return self._all_slots[rows, levels]

    def tries(self, config: UnlikeMeshes) -> float:
        """As how many evaluations one counts: many meshes, of which each meets each, and their ranks take longer."""
        meshes = len(self.slots(config.pp, self.candidates.batch // config.microbatches)[1])
        return max(1.0, (meshes / _MESHES) ** 2) * max(1.0, self.row.cluster.device_count / MOST_PARTED)

    def _meeting(self, config: UnlikeMeshes, slots: Sequence[Slot], meshes: Sequence[Mesh]) -> list[tuple[int, int]]:
        """Shapes of stages that may follow each other, where their ranks have unlike parts of values."""
        meets = {(first.shape, second.shape) for first in slots for second in slots if first.stop == second.start}
        return [
            (before, after)
            for before, after in sorted(meets if config.pp > 1 else ())
            if not meshes[before].is_alike(meshes[after])
        ]

    def _stage_problem(
        self,
        config: UnlikeMeshes,
        slots: Sequence[Slot],
        shapes: Sequence[Shape],
        pairs: Mapping[tuple[int, int], tuple[tuple[Cut, ...], ...]],
    ) -> StageProblem:
        """Of one stage on each rank."""
        flying = self._in_flight(config)
        return StageProblem(
            tuple(shapes),
            tuple(self.candidates.positions.sets[number] for number in self.prices.positions),
            tuple(slots),
            tuple(INSIDE if place.taken else NETWORK for place in self.row.places),
            (self.row.end,),
            config.microbatches,
            flying,
            self.candidates.pins.stages if self.candidates.pins else (),
            pairs,
            sent_ahead(flying) if self.candidates.warmup_of(config.equal) else (),
        )

    def _in_flight(self, config: UnlikeMeshes) -> tuple[int, ...]:
        """The most microbatches that each stage holds, of one on each rank."""
        warmup = self.candidates.warmup_of(config.equal)
        return tuple(in_flight(config.schedule, config.pp, config.microbatches, warmup))

    def least_seconds(self, config: UnlikeMeshes, levels: Sequence[int], below: float) -> float:
        """Seconds of a step at least, under any strategies. Raises InfeasibleError where none fits.

        levels: of ZeRO that are offered; none: whatever they are, in as much memory as they need, which is known the
        soonest. below: from which a higher bound is of no interest.
        """
        key = config, tuple(levels)
        found, sought = self._least.get(key, (0.0, -math.inf))
        if sought <= found and sought < below:
            found = self._least_seconds(config, levels, below)
            self._least[key] = found, below
        return found

    def counts_bound(self, config: UnlikeMeshes, below: float) -> float:
        """A lower bound that all numbers of stages share. below: seconds up to which it is sought."""
        if config.pp == 1 or not self._is_bounded(config):
            return 0.0
        faster = self.candidates.faster(config)
        return self._least_of_counts(config, below * faster, sought=True) / faster

    def _is_bounded(self, config: UnlikeMeshes) -> bool:
        """Whether the stage solver's bounds hold: of positions that are left out they say nothing."""
        every = self.candidates.positions
        whole = every.complete and len(self.prices.positions) == len(every.sets)
        return whole and config.schedule in WHOLE_SCHEDULES

    def _least_seconds(self, config: UnlikeMeshes, levels: Sequence[int], below: float) -> float:
        if not self._is_bounded(config):
            return 0.0
        faster = self.candidates.faster(config)
        if config.pp > 1 and below < math.inf:
            many = config.pp * len(self.slots(config.pp, self.candidates.batch // config.microbatches)[0]) > _MANY
            least = self._least_of_counts(config, below * faster, sought=many) / faster
            if least >= below or many:
                return least
        (relaxed, meshes), below = self._relaxed(config, levels), below * faster
        found = stage_solver.least_seconds(relaxed, below)
        if config.pp == 1 and levels:
            return self._one_stage(config, relaxed, meshes, below)
        return self._with_tied(relaxed, meshes, found, below) / faster

    def _least_of_counts(self, config: UnlikeMeshes, below: float, sought: bool) -> float:
        """A bound that is found for all numbers of stages at once, with everything else as in the configuration.

        sought: also where it is lower than ``below``.
        """
        most = min(self.row.cluster.device_count, len(self.candidates.analysis.blocks))
        longest, pins = replace(config, pp=most), self.candidates.pins
        if (pins and pins.stages) or self._in_flight(config) != self._in_flight(longest)[most - config.pp :]:
            return 0.0
        known = self._counts.setdefault(replace(config, pp=1), {})
        least = max((seconds for seconds, counts in known.items() if config.pp not in counts), default=0.0)
        if least >= below:
            return least
        slots, meshes = self.slots(most, self.candidates.batch // config.microbatches, shorter=True)
        shapes = [self._relaxed_shape(config, mesh, True) for mesh in meshes]
        problem = self._stage_problem(longest, slots, shapes, {})

        def is_possible(seconds: float) -> bool:
            if seconds not in known:
                known[seconds] = possible_counts(problem, seconds)
            return config.pp in known[seconds]

        # what is of interest may be a little less than the best takes, which the gap should not show
        for seconds in (below * (1 + _NEAR), below):
            if not is_possible(seconds):
                return seconds
        low, high = max(least, self.lower_bound(config) * self.candidates.faster(config)), below
        while sought and high > low * (1 + _NEAR):
            middle = max((seconds for seconds in known if low < seconds < high), default=(low + high) / 2)
            low, high = (low, middle) if is_possible(middle) else (middle, high)
        return low

    def _relaxed(self, config: UnlikeMeshes, levels: Sequence[int]) -> tuple[StageProblem, tuple[Mesh, ...]]:
        """The problem in which tensor ranks share each op perfectly and hold nothing, and of unlike replicas one
        counts: no strategies take fewer seconds. And the mesh of each shape.
        """
        slots, meshes = self.slots(config.pp, self.candidates.batch // config.microbatches, levels or (0,))
        # what strategies have to convert between unlike meshes may be less with others
        pairs = {
            (before, after): self.prices.pair(*(self.prices.priced(meshes[at], config) for at in (before, after)))
            for before, after in self._meeting(config, slots, meshes)
            if not meshes[before].axes and not meshes[after].axes
        }
        shapes = [self._relaxed_shape(config, mesh, not levels) for mesh in meshes]
        return self._stage_problem(config, slots, shapes, pairs), meshes

    def _relaxed_shape(self, config: UnlikeMeshes, mesh: Mesh, free: bool) -> Shape:
        """free: of the level that takes the least, in any memory."""
        key = mesh, config.microbatches, config.schedule, config.recompute, config.virtual, free
        if key not in self._shapes:
            self._shapes[key] = self._shared(config, mesh, free) if mesh.axes or free else self._alone(config, mesh)
        return self._shapes[key]

    def _alone(self, config: UnlikeMeshes, mesh: Mesh) -> Shape:
        """A mesh without tensor axes."""
        item = self.prices.priced(mesh, config)
        if len(item.parts) == 1:
            return replace(item.shape, tied=_free(item.shape.tied))
        part = item.parts[0]
        cuts = tuple(tuple(map(_free_of_memory, cuts)) for cuts in item.shape.cuts)
        return _of_one(part.candidates.problem(part.config, item.choice).shapes[0], cuts, item.shape.name)

    def _one_stage(self, config: UnlikeMeshes, problem: StageProblem, meshes: Sequence[Mesh], below: float) -> float:
        """The least on any mesh of all devices, each with the best bound there is of its slowest replicas alone."""
        found = math.inf
        for slot in problem.slots:
            part = self.prices.parts(meshes[slot.shape], config)[0]
            seconds = _least_or_infinite(replace(problem, slots=(slot,)), below)
            if seconds < min(below, found):
                seconds = max(seconds, part.candidates.last_floor(part.config, below))
            found = min(found, seconds)
        return found

    def summed_seconds(self, size: float, meshes: Sequence[Mesh], devices: Sequence[Sequence[int]]) -> float:
        """Of summing a gradient of so many bytes on each rank over stages, over the ranks that the runtime sums over.

        meshes, devices: of each stage that has it.
        """
        cluster, sizes = self.candidates.cluster, [(mesh.dp, *mesh.axes) for mesh in meshes]
        over = tied_copies(sizes)
        if over is Copies.NONE:
            ranks = [rank for own in devices for rank in own]
            return bucketed_all_reduce_seconds(size, len(ranks), cluster.group_link(ranks))
        groups = list(zip(*devices, strict=True))
        between = slowest(
            [
                cluster.link(*ranks, senders=len(groups)) if len(ranks) == 2 else cluster.group_link(ranks)
                for ranks in groups
            ]
        )
        apart = math.prod(meshes[0].axes) if over is Copies.REPLICAS else 1  # ranks of a copy lie so many apart
        among = slowest([cluster.group_link(own[first::apart]) for own in devices for first in range(apart)])
        return tied_seconds(size, len(meshes), between, copies_in(sizes), among)

    @property
    def _tied(self) -> tuple[tuple[int, ...], float]:
        """The blocks that read the same trained parameters, of those that most bytes are of, and the bytes of what
        stages sum of their gradients; none where all of them have one reader.
        """
        bytes_of: dict[tuple[int, ...], float] = {}
        for node, own in self.candidates.readers.items():
            if node.meta.get("trainable") and 2 <= len(own) <= _MOST_READERS:
                key = tuple(sorted(own))
                bytes_of[key] = bytes_of.get(key, 0.0) + self.candidates.whole_bytes(Value(node), 1)
        blocks = max(bytes_of, key=bytes_of.__getitem__, default=())
        return blocks, bytes_of.get(blocks, 0.0) * self.candidates.summed

    def _with_tied(self, problem: StageProblem, meshes: Sequence[Mesh], found: float, below: float) -> float:
        """With sums of gradients of parameters that several blocks read. found: seconds without these.

        Which stages these blocks may be in is gone over: each is a problem with them pinned, whose stages with such a
        block have slots that they sum the gradients in.
        """
        blocks, size = self._tied
        if not blocks or problem.stages == 1 or found >= below:
            return found
        sums: dict[tuple[int, ...], dict[tuple[int, ...], float]] = {}  # by the blocks' stages
        for stages in stages_of(problem, blocks):
            seconds = self._sums_of_homes(problem, meshes, size, tuple(sorted(set(stages))))
            if seconds:
                sums[stages] = seconds
        if max((max(seconds.values()) for seconds in sums.values()), default=0.0) < _LEAST_SUMS * found:
            return found
        least = below
        for stages, seconds in sorted(sums.items(), key=lambda item: min(item[1].values())):
            if least <= found or found + min(seconds.values()) >= least:
                break
            pinned = replace(problem, pins=(*problem.pins, *zip(blocks, stages, strict=True)))
            least = min(least, self._with_sums(pinned, stages, seconds, found, least))
        return max(found, least)

    def _with_sums(
        self,
        problem: StageProblem,
        homes: Collection[int],
        sums: Mapping[tuple[int, ...], float],
        found: float,
        below: float,
    ) -> float:
        """With the sums of these stages, by their slots. found: seconds without these at least."""
        steps = sorted(set(sums.values()))
        found = max(found, _least_or_infinite(problem, below))
        least = found + steps[0]
        for step in steps[1:_MOST_STEPS]:
            if least >= below:
                break
            # slots whose sums take less, at these sums' least; or others
            first, *_, last = zip(*(slots for slots, seconds in sums.items() if seconds < step), strict=True)
            fewer, _ = with_ends(
                problem,
                first if min(homes) == 0 else None,
                last if max(homes) == problem.stages - 1 else None,
            )
            less = _least_or_infinite(fewer, min(below, found + step)) + steps[0]
            least = max(least, min(less, found + step))
            if less <= found + step:
                break
        return least

    def _sums_of_homes(
        self, problem: StageProblem, meshes: Sequence[Mesh], size: float, homes: Sequence[int]
    ) -> dict[tuple[int, ...], float]:
        """Seconds in which these stages sum gradients of so many bytes, by their slots; empty where there are none."""
        ways = ways_through(problem, homes)
        if len(homes) == 1 or len(ways) > _MOST_WAYS:
            return dict.fromkeys(ways, 0.0)
        found = {}
        for way in ways:
            slots = [problem.slots[number] for number in way]
            whole = [replace(meshes[slot.shape], zero=0) for slot in slots]
            runs = [Run(slot.start, slot.stop, mesh.pieces) for slot, mesh in zip(slots, whole, strict=True)]
            key = size, *runs, *whole
            if key not in self._summed:
                self._summed[key] = self.summed_seconds(size, whole, [self.row.devices(run) for run in runs])
            found[way] = self._summed[key]
        return found

    def _shared(self, config: UnlikeMeshes, mesh: Mesh, free: bool) -> Shape:
        """A mesh under whatever strategies; its level, or whatever level."""
        part = self.prices.parts(mesh, config)[0]
        candidates = part.candidates
        parts = candidates.least_parts(part.config, 2 if free and mesh.dp > 1 else mesh.zero)
        links = (self.prices.between(mesh, mesh, level) for level in (INSIDE, NETWORK))
        every = [candidates.least_cuts(part.config, link) for link in links]
        cuts = tuple(tuple(_free_of_memory(own[at]) for at in self.prices.positions) for own in every)
        least = candidates.least_part_seconds(part.config) if mesh.axes else {}
        # what collectives add may as well be part of the backward, which hides the more
        blocks = [
            replace(block, backward_s=max(block.backward_s, least.get((at,), 0.0) - block.forward_s))
            for at, block in enumerate(parts.blocks)
        ]
        layers = (self._layer(own, blocks, parts.adding, found) for own, found in least.items() if len(own) > 1)
        backward = (block.backward_s + adding for block, adding in zip(blocks, parts.adding, strict=True))
        return Shape(
            tuple(replace(block, backward_s=back) for block, back in zip(blocks, backward, strict=True)),
            *(cuts, 0.0, parts.tied, self.prices.name(mesh)),
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
