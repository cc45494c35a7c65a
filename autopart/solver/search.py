"""The outer search: which degrees of parallelism, how many microbatches, which schedule.

:func:`search` evaluates candidates, promising ones first, and none whose lower bound exceeds the best found. With B the
bound that an evaluation returns, or the cheap lower bound of a candidate that was pruned or not tried, no candidate
takes less than the smallest B.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from autopart.runtime.errors import InfeasibleError, PlanError
from autopart.solver.degrees import Config
from autopart.solver.tensor_problem import relative_gap

Answer = TypeVar("Answer")
Candidate = TypeVar("Candidate", bound=Config)
AHEAD = 8
"""Candidates whose bounds are compared before one of them is evaluated."""
NEAR, MOST_SETTLED, MOST_MORE, WORTH = 0.1, 4, 8, 0.005
"""The share of the best within which answers may change places once they are settled, how many are, how many more where
what was settled takes longer than these are known to, and by which share it has to.
"""
MOST_UNFIT = 3
"""Of the candidates that surely do not fit, how many are evaluated where nothing else is left."""


class Status(enum.Enum):
    CHOSEN = "chosen"
    SLOWER = "slower"
    PRUNED = "pruned"
    UNTRIED = "untried"
    INFEASIBLE = "infeasible"


@dataclass(frozen=True, slots=True)
class Evaluation(Generic[Answer]):
    """What evaluating a candidate gives. objective: seconds of its answer; bound: seconds that it takes at least."""

    answer: Answer
    objective: float
    bound: float

    def __post_init__(self) -> None:
        if not 0 <= self.objective < math.inf or math.isnan(self.bound):
            raise ValueError(f"not seconds: objective {self.objective}, bound {self.bound}")


class NotBetter(Exception):
    """An evaluation or a search that was stopped, as it would have taken no less than what was asked for.

    seconds: that it would have taken at least. bound: as Evaluation.bound.
    """

    def __init__(self, seconds: float, bound: float) -> None:
        super().__init__(f"takes at least {seconds:.6g} s")
        self.seconds, self.bound = seconds, bound


@dataclass(frozen=True, slots=True)
class Considered:
    """What became of a candidate.

    seconds: its objective, for one that was not tried its lower bound, for an infeasible one None. reason: for people.
    """

    config: Config
    status: Status
    seconds: float | None
    reason: str


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


_Outcome = Evaluation[Answer] | InfeasibleError | NotBetter | None


def search(
    candidates: Iterable[Candidate],
    evaluate: Callable[[Candidate, float], Evaluation[Answer]],
    lower_bound: Callable[[Candidate], float],
    *,
    refine: Callable[[Candidate, float], float] | None = None,
    rules_out: Callable[[Candidate, float], bool] | None = None,
    unfit: Callable[[Candidate], InfeasibleError | None] | None = None,
    order: Callable[[Candidate, float], float] | None = None,
    most: int | None = None,
    more: Callable[[Evaluation[Answer] | None], Iterable[Candidate]] | None = None,
    tighten: Callable[[Candidate, float], float] | None = None,
    most_tightened: int = 0,
    most_last: int = 0,
    settle: Callable[[Answer], tuple[Answer, float]] | None = None,
    worth: Callable[[Candidate], float] = lambda config: 0.0,
    below: float = math.inf,
) -> SearchResult[Answer]:
    """Evaluates candidates until no other can be faster.

    evaluate: solves one candidate; raises InfeasibleError when it has no solution, and may raise NotBetter where it
    takes as long as the seconds that are given. lower_bound: cheap seconds that a candidate takes at least, infinite
    when it cannot run at all. refine: a better bound, for those that it may rule out or put behind others; of no
    interest beyond the seconds that are given. rules_out: whether a candidate surely takes as long as the seconds that
    are given, asked of each that would be evaluated next, once something fits. unfit: why a candidate surely has no
    solution, sooner known than by evaluating it; where nothing fits the MOST_UNFIT closest to it are evaluated, which
    says more. order: seconds that a candidate of such a bound is expected to take, the bound by default; who is
    expected to take the fewest comes first, and of the AHEAD first what is expected is asked again where bounds are
    refined. most: evaluations, after which the rest is left untried once something fits. more: further candidates,
    asked for with the best evaluation of the first. tighten: a bound that takes longer, for up to ``most_tightened`` of
    those whose bound is the smallest in the end. most_last: further evaluations then, of those left untried whose bound
    is the smallest. settle: an answer, or a better one of its candidate, with seconds that were not known while it was
    evaluated; of the MOST_SETTLED fastest within NEAR of the best the one is chosen that takes the fewest, and up to
    MOST_MORE others are looked at that may take fewer still, by the share WORTH (all of them without ``most``). worth:
    the share of the best by which a candidate has to be able to undercut it to be refined, evaluated or tightened.
    below: seconds that an answer has to stay below to be of interest; raises NotBetter when none does.
    Raises InfeasibleError, with what the closest candidates lack, when none has a solution.
    """
    best: tuple[Candidate, Evaluation[Answer]] | None = None
    found: list[tuple[Candidate, float, _Outcome[Answer]]] = []
    hopeless: set[int] = set()  # of what was found, those that surely do not fit

    def most_seconds() -> float:
        return below if best is None else best[1].objective

    def limit(config: Candidate) -> float:
        return most_seconds() if best is None else (1 - worth(config)) * most_seconds()

    def expected(config: Candidate, floor: float) -> float:
        return floor if order is None else order(config, floor)

    def outcome_of(config: Candidate) -> _Outcome[Answer]:
        nonlocal best
        try:
            evaluation = evaluate(config, most_seconds())
        except (InfeasibleError, NotBetter) as error:
            return error
        if evaluation.objective < most_seconds():
            best = config, evaluation
        return evaluation

    def go_over(configs: Iterable[Candidate]) -> None:
        ranked = []
        for at, config in enumerate(configs):
            floor = lower_bound(config)
            ranked.append((expected(config, floor), floor, at, config))
        left = deque(sorted(ranked, key=lambda item: item[:3]))
        tried, ahead = 0, list[_Ahead[Candidate]]()
        while left or ahead:
            while left and len(ahead) < (1 if refine is None else AHEAD):
                first, floor, _, config = left.popleft()
                if unfit is not None and floor < most_seconds() and (why := unfit(config)) is not None:
                    hopeless.add(len(found))
                    found.append((config, floor, why))
                else:
                    ahead.append(_Ahead(config, max(first, floor), floor))
            if not ahead:
                break
            next_ = min(ahead, key=lambda item: item.key)
            of_interest = limit(next_.config)
            if best is None:
                of_interest = min((item.key for item in ahead if item.known), default=of_interest)
            if refine is not None and next_.wants(of_interest):
                next_.floor = max(next_.floor, refine(next_.config, of_interest))
                next_.known = of_interest
                next_.key = max(next_.floor, expected(next_.config, next_.floor))
                continue
            ahead.remove(next_)
            config, floor = next_.config, next_.floor
            if (best_seconds := most_seconds()) < math.inf:  # something fits
                if floor >= limit(config) or (most is not None and tried >= most):
                    found.append((config, floor, None))
                    continue
                if rules_out is not None and rules_out(config, best_seconds):
                    found.append((config, best_seconds, None))
                    continue
            tried += 1
            found.append((config, floor, outcome_of(config)))

    go_over(candidates)
    if more is not None:
        go_over(more(best[1] if best is not None else None))
    if not found:
        raise PlanError("no configuration to search; allow more degrees of parallelism or schedules")
    bounds = {
        at: floor if outcome is None else max(floor, outcome.bound)
        for at, (_, floor, outcome) in enumerate(found)
        if not isinstance(outcome, InfeasibleError)
    }
    if best is None and bounds:
        raise NotBetter(below, min(bounds.values()))
    if best is None:
        failures = {at: outcome for at, (_, _, outcome) in enumerate(found) if isinstance(outcome, InfeasibleError)}
        known = [at for at in failures if at not in hopeless]
        closest = sorted(hopeless, key=lambda at: (failures[at].excess_bytes or 0.0, at))
        for at in () if known else closest[:MOST_UNFIT]:
            try:
                evaluate(found[at][0], math.inf)
            except InfeasibleError as error:
                failures[at] = error
                known.append(at)
            else:
                raise AssertionError(f"{found[at][0]} fits, where {failures[at]}")
        raise _none_feasible([(found[at][0], failures[at]) for at in sorted(known)], len(failures))
    tightened: set[int] = set()
    last: set[int] = set()
    while bounds:
        lowest = min(bounds, key=lambda at: bounds[at])
        config, floor, outcome = found[lowest]
        if bounds[lowest] >= limit(config):
            break
        if tighten is not None and lowest not in tightened and len(tightened) < most_tightened:
            tightened.add(lowest)
            bounds[lowest] = max(bounds[lowest], tighten(config, best[1].objective))
            if outcome is None:
                found[lowest] = config, bounds[lowest], None
            continue
        untried = [at for at in bounds if found[at][2] is None and bounds[at] < limit(found[at][0])]
        if not untried or len(last) == most_last:
            break
        lowest = min(untried, key=lambda at: bounds[at])
        last.add(lowest)
        config, floor, _ = found[lowest]
        outcome = outcome_of(config)
        found[lowest] = config, max(floor, bounds[lowest]), outcome
        if isinstance(outcome, InfeasibleError):
            del bounds[lowest]
        else:
            assert outcome is not None
            bounds[lowest] = max(bounds[lowest], outcome.bound)
    if settle is not None:
        looks = len(found) if most is None else MOST_SETTLED + MOST_MORE
        best = _settled(found, bounds, best[1].objective, evaluate, settle, expected, worth, looks)
    config, chosen = best
    bound = min([*bounds.values(), chosen.objective])
    return SearchResult(
        config=config,
        answer=chosen.answer,
        objective=chosen.objective,
        bound=bound,
        gap=relative_gap(chosen.objective, bound),
        considered=tuple(_considered(*item, chosen) for item in found),
    )


def _settled(
    found: list[tuple[Candidate, float, _Outcome[Answer]]],
    bounds: dict[int, float],
    ruled_out: float,
    evaluate: Callable[[Candidate, float], Evaluation[Answer]],
    settle: Callable[[Answer], tuple[Answer, float]],
    expected: Callable[[Candidate, float], float],
    worth: Callable[[Candidate], float],
    looks: int,
) -> tuple[Candidate, Evaluation[Answer]]:
    """The best once the fastest are settled, and then what may be faster than these came out.

    found, bounds: of :func:`search`, brought up to date. ruled_out: seconds from which candidates were left out, less
    what they have to be ``worth``. looks: at most, at as many candidates.
    """
    best: tuple[Candidate, Evaluation[Answer]] | None = None
    looked: set[int] = set()
    while len(looked) < looks:
        least = math.inf if best is None else best[1].objective
        most = max(least, (1 + NEAR) * ruled_out) if len(looked) < MOST_SETTLED else least
        known = [
            (outcome.objective, at)
            for at, (_, _, outcome) in enumerate(found)
            if at not in looked and isinstance(outcome, Evaluation) and outcome.objective < most
        ]
        if len(looked) >= MOST_SETTLED or not known:
            for at, (config, floor, outcome) in enumerate(found):
                seconds = outcome.seconds if isinstance(outcome, NotBetter) else floor if outcome is None else math.inf
                if at not in looked and (1 - worth(config)) * ruled_out <= seconds < (1 - WORTH) * least:
                    known.append((max(seconds, expected(config, floor)), at))
        if not known:
            break
        _, at = min(known)
        looked.add(at)
        config, floor, outcome = found[at]
        near = math.inf  # from where an answer is not settled
        if not isinstance(outcome, Evaluation):
            near = (1 + NEAR) * least
            try:
                outcome = evaluate(config, least)
            except (InfeasibleError, NotBetter) as error:
                outcome = error
        if isinstance(outcome, Evaluation) and outcome.objective < near:
            answer, seconds = settle(outcome.answer)
            outcome = replace(outcome, answer=answer, objective=seconds)
            if outcome.objective < least:
                best = config, outcome
        found[at] = config, floor, outcome
        if isinstance(outcome, InfeasibleError):
            del bounds[at]
        else:
            assert outcome is not None
            bounds[at] = max(bounds[at], outcome.bound)
    assert best is not None, "the best is settled first"
    return best


def _considered(config: Candidate, floor: float, outcome: _Outcome[Answer], chosen: Evaluation[Answer]) -> Considered:
    if outcome is None and floor < chosen.objective:
        why = "it cannot take much less" if floor >= (1 - WORTH) * chosen.objective else "enough others were"
        reason = f"not tried, as {why}; takes at least {floor:.6g} s, the chosen one {chosen.objective:.6g} s"
        return Considered(config, Status.UNTRIED, floor, reason)
    if outcome is None or isinstance(outcome, NotBetter):
        seconds = floor if outcome is None else outcome.seconds
        return Considered(config, Status.PRUNED, seconds, _why_pruned(seconds, chosen.objective))
    if isinstance(outcome, InfeasibleError):
        return Considered(config, Status.INFEASIBLE, None, str(outcome))
    if outcome is chosen:
        return Considered(config, Status.CHOSEN, outcome.objective, "the fastest")
    share = outcome.objective / chosen.objective - 1 if chosen.objective else 0.0
    if share < 0:
        reason = f"an estimate not made sure of, as enough others were; the chosen one {chosen.objective:.6g} s"
        return Considered(config, Status.SLOWER, outcome.objective, reason)
    return Considered(config, Status.SLOWER, outcome.objective, f"{share:.1%} slower than the chosen one")


def _why_pruned(seconds: float, chosen: float) -> str:
    """Of a candidate that takes at least ``seconds``: by how much at most it may beat the chosen one, which was settled
    after it was left.
    """
    if math.isclose(seconds, chosen):
        return "takes no less than the chosen one"
    if seconds < chosen:
        return f"not made sure of; takes at most {100 * (1 - seconds / chosen):.2g}% less than the chosen one"
    return f"takes at least {seconds:.6g} s, the chosen one {chosen:.6g} s"


def _none_feasible(failures: Sequence[tuple[Config, InfeasibleError]], count: int) -> InfeasibleError:
    """The failure that is closest to fitting speaks for all; failures are in the order of the search, fastest first.
    count: of all that do not fit.
    """
    config, closest = min(failures, key=lambda item: math.inf if item[1].excess_bytes is None else item[1].excess_bytes)
    which = "the only configuration" if count == 1 else f"none of {count} configurations fits; the closest"
    return InfeasibleError(f"{which}, {config}: {closest}", closest.excess_bytes)
