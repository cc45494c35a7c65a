"""The outer search: which degrees of parallelism, how many microbatches, which schedule.

:func:`search` evaluates candidates, promising ones first, and none whose lower bound exceeds the best found. With B the
bound that an evaluation returns, or the cheap lower bound of a candidate that was pruned or not tried, no candidate
takes less than the smallest B.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic

from autopart.runtime.errors import InfeasibleError, PlanError
from autopart.solver.degrees import Config
from autopart.solver.search_outcomes import WORTH, Considered, Seen, considered, none_feasible
from autopart.solver.search_space import Answer, Candidate, Effort, Evaluation, NotBetter, Space
from autopart.solver.tensor_problem import relative_gap

NEAR, MOST_SETTLED, MOST_MORE = 0.1, 4, 8
"""The share of the best within which answers may change places once they are settled, how many are, and how many more
where what was settled takes longer than these are known to.
"""
MOST_UNFIT = 3
"""Of the candidates that surely do not fit, how many are evaluated where nothing else is left."""
EVERYTHING = Effort()


@dataclass(frozen=True, slots=True)
class SearchResult(Generic[Answer]):
    """The best candidate. bound: seconds that every candidate takes at least. gap: (objective - bound) / objective.

    considered: every candidate in the order of the search.
    """

    config: Config
    answer: Answer
    objective: float
    bound: float
    gap: float
    considered: tuple[Considered, ...]


def search(
    candidates: Iterable[Candidate],
    space: Space[Candidate, Answer],
    *,
    effort: Effort = EVERYTHING,
    below: float = math.inf,
) -> SearchResult[Answer]:
    """Evaluates candidates until no other can be faster.

    Those that are expected to take the fewest seconds come first; of ``effort.ahead`` of them what is expected is asked
    again where bounds are refined. Of the MOST_SETTLED fastest within NEAR of the best the one is chosen that takes the
    fewest once it is settled, and up to MOST_MORE others are looked at that may take fewer still, by the share WORTH
    (all of them without ``effort.most``). Where nothing fits the MOST_UNFIT that are closest to it are evaluated, which
    says more than :meth:`Space.unfit`.
    below: seconds that an answer has to stay below to be of interest; raises NotBetter when none does.
    Raises InfeasibleError, with what the closest candidates lack, when none has a solution, and PlanError when there is
    none to search.
    """
    run = _Search(space, effort, below)
    run.go_over(candidates)
    for further in (space.wider, space.more):
        run.go_over(further(run.best_evaluation))
    run.go_over(space.slowest(run.best_evaluation), refine_all=False)
    if not run.seen:
        raise PlanError("no configuration to search; allow more degrees of parallelism or schedules")
    if run.best is None:
        raise run.failure()
    run.narrow()
    config, chosen = run.settled()
    for better in space.better(config, chosen):
        config, chosen = better
        next(item for item in run.seen if item.config == config).update(chosen)
    bound = min([*(item.bound for item in run.possible()), chosen.objective])
    return SearchResult(
        config=config,
        answer=chosen.answer,
        objective=chosen.objective,
        bound=bound,
        gap=relative_gap(chosen.objective, bound),
        considered=tuple(considered(item, chosen) for item in run.seen),
    )


@dataclass(slots=True, eq=False)
class _Ahead(Generic[Candidate]):
    """A candidate that may be next. key: what it is ordered by; known: seconds up to which its bound was refined."""

    config: Candidate
    key: float
    floor: float
    known: float = 0.0

    def wants(self, most_seconds: float) -> bool:
        """Whether its bound is to be refined, where seconds below these are of interest."""
        return self.known <= self.floor < most_seconds


@dataclass(slots=True, eq=False)
class _Search(Generic[Candidate, Answer]):
    """One search: its steps in the order in which :func:`search` takes them, and what they found."""

    space: Space[Candidate, Answer]
    effort: Effort
    below: float
    best: tuple[Candidate, Evaluation[Answer]] | None = None
    seen: list[Seen[Candidate, Answer]] = field(default_factory=list)

    @property
    def best_evaluation(self) -> Evaluation[Answer] | None:
        return None if self.best is None else self.best[1]

    def possible(self) -> list[Seen[Candidate, Answer]]:
        """Candidates that are not known to have no solution."""
        return [item for item in self.seen if not item.infeasible]

    def most_seconds(self) -> float:
        return self.below if self.best is None else self.best[1].objective

    def limit(self, config: Candidate) -> float:
        """Seconds that a candidate has to be able to stay below to be looked at."""
        return self.most_seconds() if self.best is None else (1 - self.space.worth(config)) * self.most_seconds()

    def outcome_of(self, config: Candidate) -> Evaluation[Answer] | InfeasibleError | NotBetter:
        try:
            evaluation = self.space.evaluate(config, self.most_seconds())
        except (InfeasibleError, NotBetter) as error:
            return error
        if evaluation.objective < self.most_seconds():
            self.best = config, evaluation
        return evaluation

    # -- the first pass -------------------------------------------------------------------------------------------

    def go_over(self, configs: Iterable[Candidate], refine_all: bool = True) -> None:
        """Evaluates those that may be faster than the best, the most promising first.

        refine_all: also bounds of those that ``effort.most`` leaves untried.
        """
        ranked = []
        for at, config in enumerate(configs):
            floor = self.space.lower_bound(config)
            ranked.append((self.space.expected(config, floor), floor, at, config))
        left = deque(sorted(ranked, key=lambda item: item[:3]))
        tried, ahead = 0.0, list[_Ahead[Candidate]]()
        while left or ahead:
            while left and len(ahead) < self.effort.ahead:
                first, floor, _, config = left.popleft()
                if floor < self.most_seconds() and (why := self.space.unfit(config)) is not None:
                    self.seen.append(Seen(config, floor, why, hopeless=True))
                else:
                    ahead.append(_Ahead(config, max(first, floor), floor))
            if not ahead:
                break
            next_ = min(ahead, key=lambda item: item.key)
            config, enough = next_.config, self.effort.most is not None and tried >= self.effort.most
            if (refine_all or not enough) and self._refined(next_, ahead):
                continue
            ahead.remove(next_)
            floor = next_.floor
            if (best_seconds := self.most_seconds()) < math.inf:  # something fits
                if floor >= self.limit(config) or enough:
                    self.seen.append(Seen(config, floor))
                    continue
                if self.space.rules_out(config, best_seconds):
                    self.seen.append(Seen(config, best_seconds))
                    continue
            tried += self.space.tries(config)
            self.seen.append(Seen(config, floor, self.outcome_of(config)))

    def _refined(self, next_: _Ahead[Candidate], ahead: list[_Ahead[Candidate]]) -> bool:
        """Whether the bound of the first of those ahead was refined, so that another may be the first now."""
        of_interest = self.limit(next_.config)
        if self.best is None:
            of_interest = min((item.key for item in ahead if item.known), default=of_interest)
        if not next_.wants(of_interest):
            return False
        next_.floor = max(next_.floor, self.space.refine(next_.config, of_interest))
        next_.known = of_interest
        next_.key = max(next_.floor, self.space.expected(next_.config, next_.floor))
        return True

    def failure(self) -> InfeasibleError | NotBetter:
        """Why nothing was found."""
        if possible := self.possible():
            return NotBetter(self.below, min(item.bound for item in possible))
        told = [item for item in self.seen if not item.hopeless]
        if not told:
            told = sorted(self.seen, key=_excess_bytes)[:MOST_UNFIT]
            for item in told:
                item.outcome = self._lacking(item)
            told = [item for item in self.seen if item in told]
        failures = [(item.config, item.outcome) for item in told if isinstance(item.outcome, InfeasibleError)]
        return none_feasible(failures, len(self.seen))

    def _lacking(self, item: Seen[Candidate, Answer]) -> InfeasibleError:
        """What the evaluation of a candidate says that surely does not fit."""
        try:
            self.space.evaluate(item.config, math.inf)
        except InfeasibleError as error:
            return error
        raise AssertionError(f"{item.config} fits, where {item.outcome}")

    # -- the bound ------------------------------------------------------------------------------------------------

    def narrow(self) -> None:
        """Tightens the smallest bounds, and evaluates what was left untried and still may be the fastest."""
        for item in self.possible():
            if item.outcome is None and item.bound < self.limit(item.config):
                item.know(self.space.shared_bound(item.config, self.most_seconds()))
        tightened, last = 0, 0.0
        while possible := self.possible():
            lowest = min(possible, key=lambda item: item.bound)
            if lowest.bound >= self.limit(lowest.config):
                break
            if not lowest.tightened and tightened < self.effort.tightened:
                tightened += 1
                lowest.tighten(self.space.tighten(lowest.config, self.most_seconds()))
                continue
            untried = [item for item in possible if item.outcome is None and item.bound < self.limit(item.config)]
            if not untried or last >= self.effort.last:
                break
            lowest = min(untried, key=lambda item: item.bound)
            last += self.space.tries(lowest.config)
            lowest.floor = max(lowest.floor, lowest.bound)
            lowest.update(self.outcome_of(lowest.config))

    # -- what is known late ---------------------------------------------------------------------------------------

    def settled(self) -> tuple[Candidate, Evaluation[Answer]]:
        """The best once the fastest are settled, and then what may be faster than these came out."""
        assert self.best is not None
        ruled_out = self.best[1].objective  # seconds from which candidates were left out, less what they are worth
        best: tuple[Candidate, Evaluation[Answer]] | None = None
        looked: set[int] = set()
        looks = len(self.seen) if self.effort.most is None else MOST_SETTLED + MOST_MORE
        while len(looked) < looks:
            least = math.inf if best is None else best[1].objective
            at = self._next_to_settle(looked, ruled_out, least)
            if at is None:
                break
            looked.add(at)
            item = self.seen[at]
            outcome = item.outcome
            near = math.inf  # from where an answer is not settled
            if not isinstance(outcome, Evaluation):
                near = (1 + NEAR) * least
                try:
                    outcome = self.space.evaluate(item.config, least)
                except (InfeasibleError, NotBetter) as error:
                    outcome = error
            if isinstance(outcome, Evaluation) and outcome.objective < near:
                outcome = self.space.settle(outcome)
                if outcome.objective < least:
                    best = item.config, outcome
            item.update(outcome)
        assert best is not None, "the best is settled first"
        return best

    def _next_to_settle(self, looked: set[int], ruled_out: float, least: float) -> int | None:
        """Number of the candidate that is looked at next; None: no other may be faster. least: the best's seconds."""
        most = max(least, (1 + NEAR) * ruled_out) if len(looked) < MOST_SETTLED else least
        known = [
            (item.outcome.objective, at)
            for at, item in enumerate(self.seen)
            if at not in looked and isinstance(item.outcome, Evaluation) and item.outcome.objective < most
        ]
        if least > ruled_out and (len(looked) >= MOST_SETTLED or not known):
            for at, item in enumerate(self.seen):
                if at in looked or isinstance(item.outcome, Evaluation | InfeasibleError):
                    continue
                seconds = item.floor if item.outcome is None else item.outcome.seconds
                if (1 - self.space.worth(item.config)) * ruled_out <= seconds < (1 - WORTH) * least:
                    known.append((max(seconds, self.space.expected(item.config, item.floor)), at))
        return min(known)[1] if known else None


def _excess_bytes(item: Seen[Candidate, Answer]) -> float:
    assert isinstance(item.outcome, InfeasibleError)
    return item.outcome.excess_bytes or 0.0
