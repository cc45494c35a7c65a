"""The configurations of one plan as the outer search asks for them: equal meshes, unlike ones, several tensor axes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

from autopart.answers import Answer
from autopart.candidates import Candidates
from autopart.cluster import Cluster
from autopart.deeper_warmups import DEPTHS, DeeperWarmups
from autopart.describe import describe
from autopart.describe_unlike import describe_unlike, most_held
from autopart.earlier_plans import EarlierPlans
from autopart.equal_meshes import equal_meshes
from autopart.estimates import Estimates
from autopart.given_limits import Limits
from autopart.mesh_prices import MeshPrices
from autopart.plan import Plan
from autopart.plan_finish import LEAST_GAIN, with_deeper_warmup, with_other_messages
from autopart.runtime.errors import InfeasibleError, PlanError, UndividedBatchError
from autopart.several_axes import several_axes
from autopart.solver.degrees import Config, Degrees, UnlikeMeshes
from autopart.solver.search_outcomes import WORTH
from autopart.solver.search_space import Evaluation, NotBetter, Space
from autopart.solver.stages_problem import StageProblem
from autopart.tensor_scheme import TensorScheme
from autopart.unlike import UnlikeCandidates
from autopart.unlike_answer import UnlikeAnswer
from autopart.wide_ranks import most_ranks, promising, repeated

MOST_UNLIKE = 16
"""Alike devices up to which unlike meshes are searched, where equal ones can be."""
UNBALANCED = 1.2
"""Seconds of the slowest stage over the mean of all, from which unlike meshes are searched where they promise less."""
ALIKE_TRIES = 8.0
"""As how many evaluations one of unlike meshes counts where devices are alike, and equal meshes seldom much slower."""

AnyAnswer = Answer | UnlikeAnswer


@dataclass(slots=True, eq=False)
class PlanSpace(Space[Config, AnyAnswer]):
    """What is searched for one plan. Made of limits and candidates alone; raises PlanError where nothing is left.

    earlier: of plans on other clusters, whose answers are taken where they hold. thorough: what takes long to search is
    looked at for any gain. first: configurations that the search begins with.
    """

    candidates: Candidates
    limits: Limits
    earlier: EarlierPlans
    thorough: bool
    first: tuple[Config, ...] = field(init=False)
    _among: frozenset[Config] = field(init=False)  # the first
    _equal: list[Degrees] = field(init=False)  # those with equal meshes that were searched
    _estimates: Estimates = field(init=False)
    _deeper: DeeperWarmups = field(init=False)
    _promised: tuple[Degrees, ...] = ()  # that repeat what a node does by itself
    _unlike: UnlikeCandidates | None = None  # made when they are asked for: the runs of many devices are many
    _others: tuple[UnlikeMeshes, ...] | None = None
    # seconds of what was evaluated; as expected of what was stopped
    _taken: dict[Degrees, float] = field(default_factory=dict)
    _evened: float = math.inf  # seconds of the fastest unbalanced pipeline, had all of its stages the mean to do
    _plans: dict[int, Plan] = field(default_factory=dict)  # by identity of the answer

    def __post_init__(self) -> None:
        self._estimates, self._deeper = Estimates(self.candidates), DeeperWarmups(self.candidates)
        self.first = self._first()
        self._among = frozenset(self.first)
        self._equal = [config for config in self.first if isinstance(config, Degrees)]

    def plan_of(self, answer: AnyAnswer) -> Plan:
        """The plan of an answer that was settled."""
        return self._plans[id(answer)]

    @property
    def unlike(self) -> UnlikeCandidates:
        if self._unlike is None:
            tp = self.limits.tp
            assert not isinstance(tp, tuple), "unlike meshes have one tensor axis"
            self._unlike = UnlikeCandidates(MeshPrices(self.candidates, self.limits.dp, tp))
        return self._unlike

    # -- configurations -------------------------------------------------------------------------------------------

    def _first(self) -> tuple[Config, ...]:
        cluster, meshes = self.candidates.cluster, self.limits.meshes
        if meshes == "unlike":
            if self._unlike_configs():
                return ()
            raise PlanError(
                "meshes=unlike: no stages of unlike meshes are left under these limits; they need several devices, one "
                "tensor axis at most, and degrees and microbatches that leave them a choice: leave out what is forced, "
                "or meshes"
            )
        most = most_ranks(cluster, self.limits)
        try:
            return equal_meshes(self.candidates, self.limits, most)
        except PlanError as error:
            if most is not None and (wide := self._any_ranks()):
                return wide
            few = cluster.device_count <= MOST_UNLIKE
            uneven = len(set(cluster.nodes)) > 1 or cluster.device_count & (cluster.device_count - 1)
            # Replicas of unlike parts are what a batch asks for that does not divide by those that were given.
            needed = uneven or isinstance(error, UndividedBatchError)
            if not (needed or few) or not self._unlike_configs():
                raise
            if not needed:
                raise PlanError(
                    f"{error}; or meshes=unlike (--meshes unlike), where devices need not divide evenly"
                ) from None
            return ()

    def _any_ranks(self) -> tuple[Degrees, ...]:
        """Configurations with equal meshes and any number of tensor ranks, also none."""
        try:
            return equal_meshes(self.candidates, self.limits)
        except PlanError:
            return ()

    def _unlike_configs(self) -> tuple[UnlikeMeshes, ...]:
        limits, most = self.limits, self.candidates.analysis.program.most_samples
        if limits.meshes == "equal" or isinstance(limits.tp, tuple) or limits.scheme is not TensorScheme.AUTO:
            return ()
        if self._others is None:
            found = self.unlike.configs(limits.pp, limits.microbatches, limits.schedules, limits.recompute)
            self._others = tuple(
                config
                for config in found
                if config.stages >= limits.pins.least_stages
                and (not most or limits.batch <= config.microbatches * most)
            )
        return self._others

    def wider(self, best: Evaluation[AnyAnswer] | None) -> tuple[Degrees, ...]:
        if self.limits.meshes == "unlike" or most_ranks(self.candidates.cluster, self.limits) is None:
            return ()
        found = tuple(config for config in self._any_ranks() if config not in self._among)
        if best is not None and not self.thorough:
            found = promising(self._estimates, found, best.objective)
        self._equal += found
        return found

    def more(self, best: Evaluation[AnyAnswer] | None) -> list[Config]:
        found: list[Config] = []
        if self.limits.free_axes:
            found += several_axes(self.candidates, self._equal, cast(Any, best), self._taken)
            known = {replace(config, recompute="auto") for config in found}
            found += (config for config in self._repeated(best) if replace(config, recompute="auto") not in known)
        return found + ([] if self._alike_devices else self._unlike_if_they_can_win(best))

    def slowest(self, best: Evaluation[AnyAnswer] | None) -> list[Config]:
        return self._unlike_if_they_can_win(best) if self._alike_devices else []

    @property
    def _alike_devices(self) -> bool:
        return len(set(self.candidates.cluster.nodes)) == 1

    def _unlike_if_they_can_win(self, best: Evaluation[AnyAnswer] | None) -> list[Config]:
        can_win = not self.first or unlike_can_win(self.candidates.cluster, best, self._evened)
        return [*self._unlike_configs()] if can_win else []

    def _repeated(self, best: Evaluation[AnyAnswer] | None) -> tuple[Degrees, ...]:
        if best is None or self.limits.meshes == "unlike" or most_ranks(self.candidates.cluster, self.limits) is None:
            return ()
        self._promised = repeated(self._estimates, self._any_ranks(), self.candidates.cluster, best.objective)
        return self._promised

    # -- bounds ---------------------------------------------------------------------------------------------------

    def lower_bound(self, config: Config) -> float:
        if isinstance(config, Degrees):
            return self.candidates.lower_bound(config)
        return self.unlike.lower_bound(config)

    def expected(self, config: Config, floor: float) -> float:
        if config == self.earlier.best:
            return 0.0
        return self._estimates.expected(config, floor) if isinstance(config, Degrees) else floor

    def unfit(self, config: Config) -> InfeasibleError | None:
        return self.candidates.unfit(config) if isinstance(config, Degrees) else None

    def refine(self, config: Config, below: float) -> float:
        if not isinstance(config, Degrees):
            return self.unlike.refined(config, below)
        # a bound on two axes takes the solver much longer than strategies, of which these are known to be good
        return 0.0 if config in self._promised else self.candidates.work_floor(config, below)

    def rules_out(self, config: Config, below: float) -> bool:
        return isinstance(config, Degrees) and self.candidates.surely_takes(config, below)

    def shared_bound(self, config: Config, below: float) -> float:
        # where devices are unlike, bounds of all that are left were refined
        return (
            0.0 if isinstance(config, Degrees) or not self._alike_devices else self.unlike.counts_bound(config, below)
        )

    def tighten(self, config: Config, below: float) -> float:
        if isinstance(config, Degrees):
            return self.candidates.last_floor(config, below)
        return self.unlike.refined(config, below)

    def worth(self, config: Config) -> float:
        """Of what takes long, beside the first; and of hosts' seconds, which are known less well than that."""
        if self.thorough or not self.first:
            return 0.0
        cheap = isinstance(config, Degrees) and config in self._among and not self.candidates.starts_bind(config)
        return 0.0 if cheap else WORTH

    def tries(self, config: Config) -> float:
        if isinstance(config, Degrees):
            return 1.0
        return self.unlike.tries(config) * (ALIKE_TRIES if self._alike_devices and self.first else 1.0)

    # -- answers --------------------------------------------------------------------------------------------------

    def evaluate(self, config: Config, below: float) -> Evaluation[AnyAnswer]:
        if not isinstance(config, Degrees):
            found = self.unlike.evaluate(config, below)
            self._deeper.was_solved(config, found.objective, found.answer.problem, found.answer.way)
            return cast(Any, found)
        try:
            evaluation = self.earlier.evaluate(config, below)
        except NotBetter as error:
            self._taken[config] = max(error.seconds, self._estimates.expected(config, error.seconds))
            self._deeper.was_stopped(config, self._taken[config], self._estimates)
            raise
        self._taken[config] = evaluation.objective
        unbalanced = _unbalanced(evaluation.answer)
        if unbalanced > UNBALANCED:
            self._evened = min(self._evened, evaluation.objective / unbalanced)
        self._deeper.was_solved(config, evaluation.objective, evaluation.answer.problem, evaluation.answer.way)
        return cast(Any, evaluation)

    def settle(self, evaluation: Evaluation[AnyAnswer]) -> Evaluation[AnyAnswer]:
        """Times an answer on the graphs that will be emitted, and those that may be faster then."""
        return self._settled(evaluation, 0)

    def better(self, config: Config, best: Evaluation[AnyAnswer]) -> Iterator[tuple[Config, Evaluation[AnyAnswer]]]:
        """Answers under deeper warm-ups, with stages and strategies that are found under these."""
        least, searched = best.objective, list[Config](self._equal) + list(self._others or ())
        promising = self._deeper.promising(config, least, searched)
        promising += self._deeper.left_out(least, promising, self._bounds_when_deeper(least))
        for other, depth in itertools.product(promising, DEPTHS):
            most = (1 - LEAST_GAIN) * least
            try:
                if isinstance(other, Degrees):
                    candidates = self._deeper.under(depth)
                    if candidates.work_floor(other) >= most:
                        continue
                    found: Evaluation[Any] = candidates.evaluate(other, most)
                else:
                    found = self._unlike_under(depth).evaluate(other, most)
            except (InfeasibleError, NotBetter):
                continue
            settled = self._settled(found, depth)
            if settled.objective < most:
                least = settled.objective
                yield other, settled

    def _bounds_when_deeper(self, below: float) -> dict[Config, float]:
        """Of a few unlike devices' meshes under the deepest warm-up, where that may take less than the least one."""
        if self.candidates.cluster.device_count > MOST_UNLIKE or self._alike_devices:
            return {}
        found: dict[Config, float] = {}
        for config in self._others or ():
            if self._deeper.has_others(config):
                seconds = self._unlike_under(DEPTHS[-1]).refined(config, below)
                if seconds < below and seconds < self.unlike.refined(config, below):
                    found[config] = seconds
        return found

    def _settled(self, evaluation: Evaluation[AnyAnswer], depth: int) -> Evaluation[AnyAnswer]:
        """depth: of the warm-up under which it was found; 0: as candidates have it."""
        candidates, best = self._deeper.under(depth), evaluation.answer
        if isinstance(best, UnlikeAnswer):
            plan = self._with_deeper_warmup(describe_unlike(self._unlike_under(depth), best), best)
        else:
            plan = describe(candidates, best)
            for other in best.others:
                # what divided parameters exchange makes most answers slower than they were taken to be
                if not other.choice.levels or candidates.seconds_of(other) < plan.step_time_s:
                    timed = describe(candidates, other)
                    if timed.step_time_s < plan.step_time_s:
                        best, plan = other, timed
            plan = self._with_deeper_warmup(with_other_messages(candidates, best, plan), best)
        self._plans[id(best)] = plan
        return replace(evaluation, answer=best, objective=plan.step_time_s)

    def _unlike_under(self, depth: int) -> UnlikeCandidates:
        """Those with unlike meshes with a warm-up of so many forwards ahead; 0: as they are."""
        return self.unlike.under(self._deeper.under(depth)) if depth else self.unlike

    def _with_deeper_warmup(self, plan: Plan, answer: AnyAnswer) -> Plan:
        if self.candidates.warmup is not None:
            return plan

        def held(problem: StageProblem, stage: int) -> float:
            if isinstance(answer, UnlikeAnswer):
                return most_held(replace(answer, problem=problem), stage)[0]
            return problem.stage_bytes(stage, answer.way[stage])

        return with_deeper_warmup(plan, answer.problem, answer.way, held)


def unlike_can_win(cluster: Cluster, best: Evaluation[AnyAnswer] | None, evened: float = math.inf) -> bool:
    """Whether stages of unlike meshes are worth a search, after the best plan with equal ones.

    They are where devices are unlike; and of a few alike ones where their number is no power of two, which leaves equal
    meshes few choices, or where the slowest stage has much more to do than the mean: the chosen plan's, or that of one
    which would take less than the chosen, ``evened`` seconds, were all its stages like the mean.
    """
    count = cluster.device_count
    if count == 1:
        return False
    if len(set(cluster.nodes)) > 1:
        return True
    if count > MOST_UNLIKE:
        return False
    if count & (count - 1):
        return True
    return best is not None and (evened < best.objective or _unbalanced(best.answer) > UNBALANCED)


def _unbalanced(answer: AnyAnswer) -> float:
    """Seconds of the slowest stage over the mean of all."""
    busy = [answer.problem.busy_seconds(step) for step in answer.way]
    return max(busy) * len(busy) / sum(busy)
