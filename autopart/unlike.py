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
lay meshes on the row, and the stage solver cuts for each. Lower bounds are in :mod:`autopart.unlike_floors`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from autopart.candidates import TIGHTENINGS
from autopart.device_row import Run
from autopart.mesh_prices import Priced, have_same_strategies
from autopart.passes.data_axis import LEVELS
from autopart.runtime.errors import InfeasibleError
from autopart.solver import stages as stage_solver
from autopart.solver.degrees import UnlikeMeshes, microbatch_counts
from autopart.solver.search_space import Evaluation, NotBetter
from autopart.solver.stages_problem import StageProblem, Way
from autopart.step_time import WHOLE_SCHEDULES, simulated_seconds
from autopart.unlike_answer import UnlikeAnswer
from autopart.unlike_ends import stages_of, with_ends
from autopart.unlike_floors import UnlikeFloors
from autopart.unlike_virtual import VirtualMeshes

_MUCH_LESS = 0.02
"""Of a step's seconds: by how much less tied gradients have to take for other divisions to be tried."""
_MOST_FIRST = 8
"""Slots of the first stage with which they are."""


@dataclass(slots=True)
class UnlikeCandidates(UnlikeFloors):
    """Solves configurations with unlike meshes."""

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
        replicas = self.prices.dp or devices
        counts = [pieces for pieces in microbatch_counts(batch) if microbatches in (None, pieces)]
        found = []
        for stages in range(1, min(devices, most) + 1):
            if pp not in (None, stages) or (alike and stages == devices):
                continue
            for pieces in counts:
                rows = batch // pieces
                if alike and stages == 1 and (rows % replicas == 0 or rows < replicas):
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
        pairs = {
            (before, after): self.prices.pair(priced[before], priced[after])
            for before, after in self._meeting(config, slots, meshes)
        }
        return self._stage_problem(config, slots, [item.shape for item in priced], pairs), priced

    def evaluate(self, config: UnlikeMeshes, below: float = math.inf) -> Evaluation[UnlikeAnswer]:
        """Meshes, order and cut of a configuration.

        below: seconds of a step that are of interest; NotBetter may be raised where it takes no fewer. Raises
        InfeasibleError when nothing fits in memory.
        """
        if (least := self.refined(config, below)) >= below:
            raise NotBetter(least, least)
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

    def refined(self, config: UnlikeMeshes, below: float) -> float:
        """A better bound than :meth:`lower_bound`, whatever levels of ZeRO are chosen, known before an evaluation.

        below: from which a higher bound is of no interest.
        """
        floor, first, *more = self.lower_bound(config), *self.levels(config)
        if floor >= below or math.isinf(below):
            return floor
        try:
            return max(floor, self.least_seconds(config, () if more and not self._is_roomy(config) else first, below))
        except InfeasibleError:
            return floor

    def _is_roomy(self, config: UnlikeMeshes) -> bool:
        """Whether whole parameters surely fit: each rank could hold them all, and all that is kept, on one stage."""
        meshes = self.slots(config.pp, self.candidates.batch // config.microbatches)[1]
        parts = [part for mesh in meshes for part in self.prices.parts(mesh, config)]
        return all(part.candidates.holds_all(part.config, max(self._in_flight(config))) for part in parts)

    def _evaluate(self, config: UnlikeMeshes, levels: Sequence[int], below: float) -> Evaluation[UnlikeAnswer]:
        several = config.virtual > 1
        answer = VirtualMeshes(self, config, levels, below).solve() if several else self._solve(config, levels, below)
        seconds, floor = self.step_seconds(answer), self.lower_bound(config)
        floor = max(floor, self.least_seconds(config, levels, min(seconds, below)))
        return Evaluation(answer, seconds, min(floor, seconds))

    def _solve(self, config: UnlikeMeshes, levels: Sequence[int], below: float) -> UnlikeAnswer:
        missing = 0.0
        problem, priced = self.problem(config, levels)

        def timed(way: Way) -> float:
            return self.step_seconds(self._answer(config, problem, priced, way))

        for attempt in range(TIGHTENINGS + 1):
            try:
                ordered = config.schedule in WHOLE_SCHEDULES
                cut = stage_solver.solve(problem, self.candidates.time_limit_s, timed=timed if ordered else None)
                break
            except InfeasibleError as error:
                sharded = any(item.choice.solution is not None for item in priced)
                if error.excess_bytes is None or not sharded or attempt == TIGHTENINGS:
                    raise
                if not attempt and (least := self.least_seconds(config, levels, below)) >= below:
                    if math.isinf(least):
                        raise  # no division fits, which says more than that none is faster
                    raise NotBetter(least, least) from None
                missing += config.pp * error.excess_bytes
                problem, less = self.problem(config, levels, missing)
                if have_same_strategies(priced, less):
                    raise
                priced = less
        answer = self._answer(config, problem, priced, cut.way)
        return self._with_less_to_sum(answer, below) if config.schedule in WHOLE_SCHEDULES else answer

    def _with_less_to_sum(self, answer: UnlikeAnswer, below: float) -> UnlikeAnswer:
        """The best of this and of divisions whose first and last stage sum tied gradients in less, where that is much
        and may take less than ``below``: the stage solver prices these sums as if all meshes took as long.
        """
        config, problem, priced, (blocks, size) = answer.config, answer.problem, answer.priced, self._tied
        if config.pp == 1 or not size:
            return answer
        homes = 0, config.pp - 1
        ends = self._sums_of_homes(problem, [item.mesh for item in priced], size, homes)
        # where several blocks read a parameter, no stage between the two has one
        readers = [stages for stages in stages_of(problem, blocks) if set(stages) == set(homes)]
        seconds, taken = self.step_seconds(answer), self.tied_seconds(answer)
        firsts = dict.fromkeys(first for first, _ in sorted(ends, key=ends.__getitem__))
        for first in itertools.islice(firsts, _MOST_FIRST):
            for stages in readers:
                most = taken - _MUCH_LESS * seconds
                pairs = {pair: sums for pair, sums in ends.items() if pair[0] == first and sums < most}
                if not pairs or seconds - (taken - min(pairs.values())) >= min(below, seconds):
                    continue
                other = self._with_ends(answer, pairs, tuple(zip(blocks, stages, strict=True)))
                if other is not None and self.step_seconds(other) < seconds:
                    answer, seconds, taken = other, self.step_seconds(other), self.tied_seconds(other)
        return answer

    def _with_ends(
        self, answer: UnlikeAnswer, pairs: Collection[tuple[int, ...]], readers: tuple[tuple[int, int], ...]
    ) -> UnlikeAnswer | None:
        """The best with slots for the first and the last stage that some of these pairs have; None where none fits.

        readers: blocks and the stages that these are in.
        """
        problem, (firsts, lasts) = answer.problem, zip(*pairs, strict=True)
        fewer, kept = with_ends(problem, firsts, lasts)
        fewer = replace(fewer, pins=tuple({*fewer.pins, *readers}))

        def whole(way: Way) -> UnlikeAnswer:
            steps = (replace(step, slot=kept[step.slot]) for step in way)
            return self._answer(answer.config, problem, answer.priced, tuple(steps))

        try:
            cut = stage_solver.solve(
                fewer, self.candidates.time_limit_s, timed=lambda way: self.step_seconds(whole(way))
            )
        except InfeasibleError:
            return None
        return whole(cut.way)

    def _answer(
        self, config: UnlikeMeshes, problem: StageProblem, priced: tuple[Priced, ...], way: Way
    ) -> UnlikeAnswer:
        slots = [problem.slots[step.slot] for step in way]
        runs = [Run(slot.start, slot.stop, priced[slot.shape].mesh.pieces) for slot in slots]
        return UnlikeAnswer(config, priced, problem, way, tuple(map(self.row.devices, runs)))

    def step_seconds(self, answer: UnlikeAnswer) -> float:
        """The simulated step."""
        config, problem, way = answer.config, answer.problem, answer.way
        shares = [
            item.parts[0].candidates.weight_share(item.parts[0].config, item.choice, problem, step)
            for item, step in zip(answer.stages, way, strict=True)
        ]
        warmup, shared = self.candidates.warmup_of(config.equal), self.candidates.shared
        durations = shared.durations(tuple(dict.fromkeys(answer.devices))) if shared is not None else None
        starts = self.candidates.host_starts(config.equal)
        seconds = simulated_seconds(problem, way, config.schedule, shares, warmup, answer.places, durations, starts)
        return seconds - problem.tied_seconds(way) + self.tied_seconds(answer)

    def tied_seconds(self, answer: UnlikeAnswer) -> float:
        """Of summing the gradients of parameters of several stages, over the ranks that the runtime sums them over."""
        inside = [set(answer.problem.blocks_between(step.first, step.last)) for step in answer.way]
        total = 0.0
        for node, blocks in self.candidates.readers.items():
            homes = list(
                {answer.places[index]: index for index, own in enumerate(inside) if own & set(blocks)}.values()
            )
            if len(homes) < 2 or not node.meta.get("trainable"):
                continue
            stages = [answer.stages[index] for index in homes]
            size = stages[0].parts[0].gradient_bytes(node.meta["name"], stages[0].choice)
            devices = [answer.devices[index] for index in homes]
            total += self.summed_seconds(size, [item.mesh for item in stages], devices)
        return total
