"""Candidates whose stages have meshes of their own: any number of devices, nodes of unlike speed, memory and links.

One configuration (stages, microbatches, schedule, recomputation) is one problem of :mod:`autopart.solver.stages`: its
shapes are the meshes of replicas x tensor ranks on the devices of a run, its slots the runs of
:mod:`autopart.device_row`, and the solver chooses cut, meshes and order of devices together. A microbatch is a run of
samples, the same on all stages; where replicas do not share it evenly, as devices are unlike or it does not divide,
each has whole rows, as many as its speed is worth.

Each shape has the strategies that are fastest for the whole model on it, and the prices of its slowest replica. A
tensor group lies within a node. Tied parameters are whole on every rank, and values that are sums over samples are not
cut off. The replicas of a shape divide all other parameters at one level of ZeRO, so that each level is a shape of its
own: level 0 alone at first, and where that does not fit, or layers run again for it to fit, all of them.

Where a schedule runs several stages on a rank (interleaved, ZB-V), :mod:`autopart.unlike_virtual` goes over the ways to
lay meshes on the row, and the stage solver cuts for each.

Lower bound of a configuration. With R the least seconds of the ops' arithmetic and traffic for one microbatch on any
one device, L those of their launches, which devices cannot share, and v_d <= 1 the most of R that device d does per
second, a stage with devices of speed V takes at least L_k + R_k / V. Every stage has at least the slowest device's
speed v, so that with S the sum of all v_d, and r = (m - 1) / m, the argument of :mod:`autopart.candidates` gives

    F >= R / (v (1 - r^p) + (S - p v) / m)    and    F >= (L + R / (S - (p - 1) v)) / (1 - r^p)

After an evaluation the bound is the stage solver's, with tensor-parallel shapes at a perfect share of each op, of each
gradient's sum and of what crosses, whatever the strategies; a block of layers that are alike takes what its fastest
strategies do with their collectives. To that come sums of gradients that the first and the last stage share.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autopart.candidates import TIGHTENINGS, Candidates
from autopart.cost.communication import bucketed_all_reduce_seconds
from autopart.device_row import DeviceRow, Run
from autopart.mesh_prices import (
    ALONE,
    INSIDE,
    NETWORK,
    Mesh,
    MeshPrices,
    Part,
    Priced,
    have_same_strategies,
)
from autopart.passes.data_axis import LEVELS
from autopart.passes.graph import Value
from autopart.runtime.errors import InfeasibleError
from autopart.runtime.schedule import in_flight
from autopart.solver import stages as stage_solver
from autopart.solver.degrees import UnlikeMeshes
from autopart.solver.search import Evaluation, NotBetter
from autopart.solver.stages_parts import Block, Cut, Shape, TiedGroup
from autopart.solver.stages_passing import Passing
from autopart.solver.stages_problem import Slot, StageProblem
from autopart.step_time import WHOLE_SCHEDULES, simulated_seconds
from autopart.unlike_answer import UnlikeAnswer
from autopart.unlike_virtual import VirtualMeshes


@dataclass(slots=True)
class UnlikeCandidates:
    """Solves configurations with unlike meshes."""

    prices: MeshPrices
    _work: dict[tuple[int, str], tuple[float, float, tuple[float, ...]]] = field(default_factory=dict)

    @property
    def candidates(self) -> Candidates:
        return self.prices.candidates

    @property
    def row(self) -> DeviceRow:
        return self.prices.row

    # -- configurations -------------------------------------------------------------------------------------------

    def configs(
        self, pp: int | None, microbatches: int | None, schedules: Sequence[tuple[str, int]], recompute: str
    ) -> list[UnlikeMeshes]:
        """Those that can be better than equal meshes, which are searched on their own.

        schedules: names with the stages on each rank.
        """
        devices, batch = self.row.cluster.device_count, self.candidates.batch
        pins = self.candidates.pins
        most = min(len(self.prices.positions) - 1, pins.most_stages if pins else len(self.candidates.analysis.blocks))
        alike = len(self.row.kinds) == 1
        found = []
        for stages in range(1, min(devices, most) + 1):
            if pp not in (None, stages) or (alike and stages == devices):
                continue
            for pieces in range(1, batch + 1):
                if batch % pieces or microbatches not in (None, pieces):
                    continue
                rows = batch // pieces
                if alike and stages == 1 and (rows % devices == 0 or rows < devices):
                    continue
                if not self.slots(stages, rows)[0]:
                    continue
                for schedule, virtual in schedules:
                    config = UnlikeMeshes(stages, pieces, schedule, recompute, virtual)
                    alone = stages == 1 and len(schedules) > 1 and schedule != "1f1b"  # on one rank all are one
                    if config.equal.runs and config.stages <= most and not alone:
                        found.append(config)
        return found

    def levels(self, config: UnlikeMeshes) -> tuple[tuple[int, ...], ...]:
        """Of ZeRO: those that are offered first, and where memory binds. 2BW keeps versions of whole parameters."""
        zero = self.candidates.zero
        return ((0,), LEVELS) if zero is None and config.schedule != "2bw" else ((zero or 0,),)

    # -- one configuration ----------------------------------------------------------------------------------------

    def problem(
        self, config: UnlikeMeshes, levels: Sequence[int] = (0,), limit_bytes: float = 0.0
    ) -> tuple[StageProblem, tuple[Priced, ...]]:
        """Of one stage on each rank.

        limit_bytes: by how much less the strategies of each shape shall hold over all stages than the fastest do.
        Where no strategies hold so little, these stay.
        """
        slots, meshes = self.slots(config.pp, self.candidates.batch // config.microbatches, levels)
        priced = tuple(self.prices.limited(mesh, config, limit_bytes) for mesh in meshes)
        warmup = self.candidates.warmup_of(config.equal)
        held = in_flight(config.schedule, config.pp, config.microbatches, warmup)
        meets = {(first.shape, second.shape) for first in slots for second in slots if first.stop == second.start}
        pairs = {
            pair: self.prices.pair(priced[pair[0]], priced[pair[1]])
            for pair in sorted(meets if config.pp > 1 else ())
            if not priced[pair[0]].mesh.is_alike(priced[pair[1]].mesh)
        }
        return StageProblem(
            tuple(item.shape for item in priced),
            tuple(self.candidates.positions.sets[number] for number in self.prices.positions),
            tuple(slots),
            tuple(INSIDE if place.taken else NETWORK for place in self.row.places),
            (self.row.end,),
            config.microbatches,
            tuple(held),
            self.candidates.pins.stages if self.candidates.pins else (),
            pairs,
        ), priced

    def slots(self, stages: int, rows: int, levels: Sequence[int] = (0,)) -> tuple[list[Slot], list[Mesh]]:
        """Those on a way from the first place to the end in so many stages, and the mesh of each shape.

        rows: samples of a microbatch. levels: of ZeRO that are offered.
        """
        row = self.row
        most = row.cluster.device_count - stages + 1
        found = [
            (
                Slot(run.start, run.stop, 0, float(min(row.kinds[kind].device.memory_bytes for kind, _ in run.pieces))),
                mesh,
            )
            for run in row.runs
            if run.count <= most
            for mesh in self.prices.meshes(run.pieces, rows, levels)
        ]
        after: list[set[int]] = [{0}]
        for _ in range(stages):
            after.append({slot.stop for slot, _ in found if slot.start in after[-1]})
        before: list[set[int]] = [{row.end}]
        for _ in range(stages):
            before.append({slot.start for slot, _ in found if slot.stop in before[-1]})
        before.reverse()
        steps = [
            (here & onward, end) for (here, onward), (_, end) in itertools.pairwise(zip(after, before, strict=True))
        ]
        used = [(slot, mesh) for slot, mesh in found if any(slot.start in a and slot.stop in b for a, b in steps)]
        numbers: dict[Mesh, int] = {}
        slots = [replace(slot, shape=numbers.setdefault(mesh, len(numbers))) for slot, mesh in used]
        return slots, list(numbers)

    def evaluate(self, config: UnlikeMeshes, below: float = math.inf) -> Evaluation[UnlikeAnswer]:
        """Meshes, order and cut of a configuration.

        below: seconds of a step that are of interest; NotBetter may be raised where it takes no fewer. Raises
        InfeasibleError when nothing fits in memory.
        """
        found: list[Evaluation[UnlikeAnswer]] = []
        failure: InfeasibleError | NotBetter | None = None
        rows, meshes = self.candidates.batch // config.microbatches, 0
        for levels in self.levels(config):
            known, meshes = meshes, len(self.slots(config.pp, rows, levels)[1])
            if known == meshes:
                break  # no stage has replicas
            try:
                found.append(self._evaluate(config, levels, below))
            except (InfeasibleError, NotBetter) as error:
                failure = error
            else:
                if not found[-1].answer.is_tight:
                    break
        if not found:
            assert failure is not None
            raise failure
        best = min(found, key=lambda item: item.objective)
        # with all levels offered no more than before are ruled out
        return replace(best, bound=min(found[-1].bound, best.objective))

    def _evaluate(self, config: UnlikeMeshes, levels: Sequence[int], below: float) -> Evaluation[UnlikeAnswer]:
        several = config.virtual > 1
        answer = VirtualMeshes(self, config, levels, below).solve() if several else self._solve(config, levels, below)
        seconds, floor = self.step_seconds(answer), self.lower_bound(config)
        floor = max(floor, self._least_seconds(config, answer.problem, answer.priced))
        return Evaluation(answer, seconds, min(floor, seconds))

    def _least_seconds(self, config: UnlikeMeshes, problem: StageProblem, priced: Sequence[Priced]) -> float:
        """Seconds of a step on these meshes at least, under any strategies. Raises InfeasibleError where none fits."""
        # of positions that are left out the solver's bound says nothing
        every = self.candidates.positions
        whole = every.complete and len(self.prices.positions) == len(every.sets)
        if config.schedule not in WHOLE_SCHEDULES or not whole:
            return 0.0
        divided = stage_solver.least_seconds(self._relaxed(problem, priced)) + self._least_tied_seconds(config)
        return divided / self.candidates.faster(config)

    def _solve(self, config: UnlikeMeshes, levels: Sequence[int], below: float) -> UnlikeAnswer:
        missing = 0.0
        problem, priced = self.problem(config, levels)
        for attempt in range(TIGHTENINGS + 1):
            try:
                cut = stage_solver.solve(problem, self.candidates.time_limit_s)
                break
            except InfeasibleError as error:
                sharded = any(item.choice.solution is not None for item in priced)
                if error.excess_bytes is None or not sharded or attempt == TIGHTENINGS:
                    raise
                if not attempt and (least := self._least_seconds(config, problem, priced)) >= below:
                    raise NotBetter(least, least) from None
                missing += config.pp * error.excess_bytes
                problem, less = self.problem(config, levels, missing)
                if have_same_strategies(priced, less):
                    raise
                priced = less
        slots = [problem.slots[step.slot] for step in cut.way]
        runs = [Run(slot.start, slot.stop, priced[slot.shape].mesh.pieces) for slot in slots]
        return UnlikeAnswer(config, priced, problem, cut, tuple(self.row.devices(runs)))

    def step_seconds(self, answer: UnlikeAnswer) -> float:
        """The simulated step."""
        config, problem, way = answer.config, answer.problem, answer.cut.way
        shares = [
            item.parts[0].candidates.weight_share(item.parts[0].config, step, problem)
            for item, step in zip(answer.stages, way, strict=True)
        ]
        warmup, shared = self.candidates.warmup_of(config.equal), self.candidates.shared
        durations = shared.durations(tuple(dict.fromkeys(answer.devices))) if shared is not None else None
        starts = self.candidates.host_starts(config.equal)
        seconds = simulated_seconds(problem, way, config.schedule, shares, warmup, answer.places, durations, starts)
        return seconds - problem.tied_seconds(way) + self.tied_seconds(answer)

    def tied_seconds(self, answer: UnlikeAnswer) -> float:
        """Of summing the gradients of parameters of several stages, over the ranks that the runtime sums them over."""
        inside = [set(answer.problem.blocks_between(step.first, step.last)) for step in answer.cut.way]
        cluster, total = self.candidates.cluster, 0.0
        for node, blocks in self.candidates.readers.items():
            homes = list(
                {answer.places[index]: index for index, own in enumerate(inside) if own & set(blocks)}.values()
            )
            if len(homes) < 2 or not node.meta.get("trainable"):
                continue
            stages = [answer.stages[index] for index in homes]
            devices = [answer.devices[index] for index in homes]
            groups = [tuple(rank for ranks in devices for rank in ranks)]
            if len({(item.mesh.dp, item.mesh.axes) for item in stages}) == 1:
                groups = list(zip(*devices, strict=True))
            links = [
                cluster.link(*ranks, senders=len(groups)) if len(ranks) == 2 else cluster.group_link(ranks)
                for ranks in groups
            ]
            size = stages[0].parts[0].gradient_bytes(node.meta["name"], stages[0].choice)
            total += max(
                bucketed_all_reduce_seconds(size, len(ranks), link) for ranks, link in zip(groups, links, strict=True)
            )
        return total

    # -- bounds ---------------------------------------------------------------------------------------------------

    def lower_bound(self, config: UnlikeMeshes) -> float:
        """Seconds that a step takes at least; see the module."""
        return self._priced_bound(config) / self.candidates.faster(config)

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
                cuts = tuple(tuple(replace(cut, buffer_bytes=0.0) for cut in cuts) for cuts in shape.cuts)
                shapes.append(_of_one(part.candidates.problem(part.config, item.choice).shapes[0], cuts, shape.name))
        # what other strategies have to convert between unlike meshes may be less
        alike = {pair: cuts for pair, cuts in problem.pairs.items() if not any(priced[at].mesh.axes for at in pair)}
        return replace(problem, shapes=tuple(shapes), pairs=alike)

    def _least_tied_seconds(self, config: UnlikeMeshes) -> float:
        """Of summing gradients of parameters that the first and the last block read, at least: that crosses a network,
        as the first and the last of several stages lie at the ends of a row of all devices. 0 where other blocks may be
        in these stages.
        """
        cluster, last = self.candidates.cluster, len(self.candidates.analysis.blocks) - 1
        if len(cluster.nodes) < 2 or config.pp == 1 or not self.candidates.positions.in_row:
            return 0.0
        ends = itertools.accumulate(own.count for own in cluster.nodes)
        links = [cluster.link(*pair, senders=1) for pair in itertools.combinations((end - 1 for end in ends), 2)]
        found = 0.0
        for node, blocks in self.candidates.readers.items():
            if node.meta.get("trainable") and {0, last} <= set(blocks):
                size = self.candidates.whole_bytes(Value(node), 1) * self.candidates.summed
                found += min(bucketed_all_reduce_seconds(size, 2, link) for link in links)
        return found

    def _shared(self, item: Priced, part: Part) -> Shape:
        """A mesh with tensor axes under whatever strategies, and at whatever level of ZeRO."""
        candidates, mesh = part.candidates, item.mesh
        parts = candidates.least_parts(part.config)
        links = (self.prices.between(mesh, mesh, level) for level in (INSIDE, NETWORK))
        every = [candidates.least_cuts(part.config, link) for link in links]
        cuts = tuple(tuple(replace(own[at], buffer_bytes=0.0) for at in self.prices.positions) for own in every)
        # what collectives add may as well be part of the backward, which hides the more
        least = candidates.least_block_seconds(part.config)
        blocks = tuple(
            replace(block, backward_s=max(block.backward_s, least.get(at, 0.0) - block.forward_s))
            for at, block in enumerate(parts.blocks)
        )
        return Shape(blocks, cuts, 0.0, parts.tied, item.shape.name, sums=parts.sums)


def _of_one(shape: Shape, cuts: tuple[tuple[Cut, ...], ...], name: str) -> Shape:
    """What one of unlike replicas does, and sums with the others, without any memory."""
    blocks = (Block(own.name, own.forward_s, own.backward_s, step_end_s=own.step_end_s) for own in shape.blocks)
    tied = tuple(replace(group, bytes=0.0) for group in _free(shape.tied))
    passing = Passing(limit=shape.passing.limit)
    return Shape(tuple(blocks), cuts, 0.0, tied, name, sums=shape.sums, passing=passing)


def _free(tied: Sequence[TiedGroup]) -> tuple[TiedGroup, ...]:
    """Groups that may as well lie in stages whose links take no time."""
    return tuple(replace(group, seconds=0.0) for group in tied)
