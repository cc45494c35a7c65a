"""Unlike meshes under schedules that run several stages on each rank of the pipeline (interleaved, ZB-V).

Stages of one rank have its devices, so a stage's mesh is not free where an earlier one of its rank has been laid. The
ways to lay meshes on the row of devices, one for each rank, are gone over one by one; for each the stage solver cuts
the blocks into all stages, which share their rank's memory evenly, and the step is simulated. The shortest is taken.

Ways come in the order of their pace. With r_b the least seconds of block b in any shape, and t_bk those in shape k, a
rank with shape k does the model's work at the pace of at most v_k = max_b r_b / t_bk, so that m microbatches take at
least

    m sum_b r_b / sum_k v_k

A way for which that is no less than the best step found is not cut. :data:`MOST_WAYS` are cut at most, and where the
best of the first :data:`FEW_WAYS` takes :data:`FAR` times as long as what another configuration does, no more; where
ways are left, what they may gain is seen in the configuration's bound, which holds for all ways.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from autopart.candidates import TIGHTENINGS
from autopart.device_row import Run
from autopart.mesh_prices import INSIDE, NETWORK, Priced, have_same_strategies
from autopart.runtime.errors import InfeasibleError
from autopart.runtime.schedule import in_flight, places_of
from autopart.solver import stages as stage_solver
from autopart.solver import time_limits
from autopart.solver.degrees import UnlikeMeshes
from autopart.solver.stages_parts import Cut, Shape
from autopart.solver.stages_problem import Slot, StageProblem
from autopart.unlike_answer import UnlikeAnswer

if TYPE_CHECKING:
    from autopart.unlike import UnlikeCandidates

FEW_WAYS, MOST_WAYS = 8, 64
FAR = 2.0
"""Ways that are cut, and how many times as long as of interest the best of the first few may take; see the module."""
_SAME_RANK = 2
"""The list of cuts between two stages of one rank, behind those of INSIDE and NETWORK."""


@dataclass(frozen=True, slots=True)
class VirtualMeshes:
    """The ways to lay meshes for one configuration.

    levels: of ZeRO that are offered. below: seconds of a step that are of interest.
    """

    unlike: UnlikeCandidates
    config: UnlikeMeshes
    levels: Sequence[int]
    below: float = math.inf

    def solve(self) -> UnlikeAnswer:
        """Raises InfeasibleError when nothing fits: that of the way that is closest to fitting."""
        unlike, config, missing = self.unlike, self.config, 0.0
        slots, meshes = unlike.slots(config.pp, unlike.candidates.batch // config.microbatches, self.levels)
        priced = tuple(unlike.prices.limited(mesh, config, missing) for mesh in meshes)
        for attempt in range(TIGHTENINGS + 1):
            try:
                return self._best(slots, priced)
            except InfeasibleError as error:
                sharded = any(item.choice.solution is not None for item in priced)
                if error.excess_bytes is None or not sharded or attempt == TIGHTENINGS:
                    raise
                missing += config.stages * error.excess_bytes
                less = tuple(unlike.prices.limited(mesh, config, missing) for mesh in meshes)
                if have_same_strategies(priced, less):
                    raise
                priced = less
        raise AssertionError("the last attempt returns or raises")

    def _best(self, slots: Sequence[Slot], priced: tuple[Priced, ...]) -> UnlikeAnswer:
        unlike, config = self.unlike, self.config
        work, paces, estimates = _paces([item.shape for item in priced])
        until = time.perf_counter() + unlike.candidates.time_limit_s
        best: tuple[float, UnlikeAnswer] | None = None
        closest: InfeasibleError | None = None
        known: set[object] = set()
        for way in ways(slots, [estimates[slot.shape] for slot in slots], unlike.row.end, config.pp):
            if best is not None and (len(known) >= self._most_ways(best[0]) or time.perf_counter() > until):
                break
            row = [slots[number] for number in way]
            least = config.microbatches * work / sum(paces[slot.shape] for slot in row)
            if best is not None and least / unlike.candidates.faster(config) >= best[0]:
                continue
            try:
                answer = self.cut(row, priced, known)
            except InfeasibleError as error:
                if closest is None or _excess(error) < _excess(closest):
                    closest = error
                continue
            if answer is None:
                continue
            seconds = unlike.step_seconds(answer)
            if best is None or seconds < best[0]:
                best = seconds, answer
        time_limits.ended(until)
        if best is None:
            raise closest or InfeasibleError("no meshes can be laid on the devices; use another number of stages")
        return best[1]

    def _most_ways(self, seconds: float) -> int:
        """How many are cut, where the best of some takes so many seconds a step."""
        return FEW_WAYS if seconds >= FAR * self.below else MOST_WAYS

    def cut(self, row: Sequence[Slot], priced: tuple[Priced, ...], known: set[object]) -> UnlikeAnswer | None:
        """The division where the ranks of the pipeline have these slots; None for a problem that is known.

        Raises InfeasibleError when nothing fits.
        """
        unlike, config, priced = self.unlike, self.config, tuple(map(_with_turns, priced))
        runs = [Run(slot.start, slot.stop, priced[slot.shape].mesh.pieces) for slot in row]
        devices = [unlike.row.devices(run) for run in runs]
        problem = self._problem(row, priced, devices)
        alike = problem.slots, problem.links
        if alike in known:
            return None
        known.add(alike)
        found = stage_solver.solve(problem, unlike.candidates.time_limit_s)
        of_stage = tuple(devices[place] for place in self._places)
        return UnlikeAnswer(config, priced, problem, found.way, of_stage)

    @property
    def _places(self) -> tuple[int, ...]:
        return places_of(self.config.schedule, self.config.stages, self.config.virtual)

    def _problem(
        self, row: Sequence[Slot], priced: Sequence[Priced], devices: Sequence[tuple[int, ...]]
    ) -> StageProblem:
        """How to cut the blocks. devices: of each rank of the pipeline."""
        unlike, config, places = self.unlike, self.config, self._places
        candidates = unlike.candidates
        positions = tuple(candidates.positions.sets[number] for number in unlike.prices.positions)
        free = (Cut(),) * len(positions)
        of_stage = [row[place] for place in places]
        pairs = {}
        for first, second in itertools.pairwise(of_stage):
            before, after = priced[first.shape], priced[second.shape]
            if not before.mesh.is_alike(after.mesh):
                pairs[first.shape, second.shape] = (*unlike.prices.pair(before, after), free)
        links = (self._link(*ends, devices) for ends in itertools.pairwise(places))
        flying = in_flight(config.schedule, config.stages, config.microbatches, (), places)
        return StageProblem(
            tuple(item.shape for item in priced),
            positions,
            tuple(
                Slot(stage, stage + 1, slot.shape, slot.capacity_bytes / config.virtual, config.virtual)
                for stage, slot in enumerate(of_stage)
            ),
            (INSIDE, *links, INSIDE),
            (config.stages,),
            config.microbatches,
            tuple(flying),
            candidates.pins.stages if candidates.pins else (),
            pairs,
        )

    def _link(self, first: int, second: int, devices: Sequence[tuple[int, ...]]) -> int:
        if first == second:
            return _SAME_RANK
        cluster = self.unlike.candidates.cluster
        return INSIDE if len({cluster.node_of(rank) for rank in (*devices[first], *devices[second])}) == 1 else NETWORK


def _with_turns(item: Priced) -> Priced:
    """With what crosses between two stages of one rank."""
    shape, *alone = (
        replace(one, cuts=(*one.cuts, _on_one_rank(one.cuts[INSIDE]))) for one in (item.shape, *item.alone)
    )
    return replace(item, shape=shape, alone=tuple(alone))


def _on_one_rank(cuts: Sequence[Cut]) -> tuple[Cut, ...]:
    """Nothing is sent; what a stage makes for the next is held once."""
    return tuple(Cut(held_before_bytes=cut.held_before_bytes) for cut in cuts)


def ways(slots: Sequence[Slot], worth: Sequence[float], end: int, ranks: int) -> Iterator[tuple[int, ...]]:
    """Numbers of slots that follow each other from place 0 to the end, so many; those worth the most together first."""
    leaving: dict[int, list[int]] = {}
    for number, slot in enumerate(slots):
        leaving.setdefault(slot.start, []).append(number)
    most: list[dict[int, float]] = [{end: 0.0}]  # by place: the most worth of so many slots from there to the end
    for _ in range(ranks):
        found: dict[int, float] = {}
        for number, slot in enumerate(slots):
            if slot.stop in most[-1]:
                found[slot.start] = max(found.get(slot.start, 0.0), worth[number] + most[-1][slot.stop])
        most.append(found)
    waiting: list[tuple[float, tuple[int, ...], float]] = [(-most[ranks][0], (), 0.0)] if 0 in most[ranks] else []
    while waiting:
        _, way, had = heapq.heappop(waiting)
        left = ranks - len(way)
        if not left:
            yield way
            continue
        place = slots[way[-1]].stop if way else 0
        for number in leaving.get(place, ()):
            rest = most[left - 1].get(slots[number].stop)
            if rest is not None:
                more = had + worth[number]
                heapq.heappush(waiting, (-(more + rest), (*way, number), more))


def _paces(shapes: Sequence[Shape]) -> tuple[float, list[float], list[float]]:
    """Seconds of all blocks at their least, and by shape the pace at most and about; see the module."""
    seconds = [[min(choice.seconds for choice in block.choices) for block in shape.blocks] for shape in shapes]
    least = [min(every) for every in zip(*seconds, strict=True)]
    work = sum(least)
    paces = [max((some / own for some, own in zip(least, every, strict=True) if own), default=1.0) for every in seconds]
    return work, paces, [work / (sum(every) or 1.0) for every in seconds]


def _excess(error: InfeasibleError) -> float:
    return math.inf if error.excess_bytes is None else error.excess_bytes
