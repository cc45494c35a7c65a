"""What the outer search asks of its candidates (:class:`Space`), and how much of it (:class:`Effort`)."""

from __future__ import annotations

import abc
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from autopart.report.units import format_seconds
from autopart.runtime.errors import InfeasibleError
from autopart.solver.degrees import Config

Answer = TypeVar("Answer")
Candidate = TypeVar("Candidate", bound=Config)
AHEAD = 8
"""Candidates whose bounds are compared before one of them is evaluated."""


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
        super().__init__(f"takes at least {format_seconds(seconds)}")
        self.seconds, self.bound = seconds, bound


class Space(abc.ABC, Generic[Candidate, Answer]):
    """Candidates and their seconds. Two methods say what an answer is, the others save evaluations."""

    __slots__ = ()

    @abc.abstractmethod
    def evaluate(self, config: Candidate, below: float) -> Evaluation[Answer]:
        """Solves one candidate.

        Raises InfeasibleError when it has no solution, and may raise NotBetter where it takes ``below`` seconds.
        """

    @abc.abstractmethod
    def lower_bound(self, config: Candidate) -> float:
        """Cheap seconds that a candidate takes at least, infinite when it cannot run at all."""

    def expected(self, config: Candidate, floor: float) -> float:
        """Seconds that a candidate of this lower bound is expected to take; the fewest come first."""
        return floor

    def unfit(self, config: Candidate) -> InfeasibleError | None:
        """Why a candidate surely has no solution, where that is known sooner than by evaluating it."""
        return None

    def refine(self, config: Candidate, below: float) -> float:
        """A better bound, for those that it may rule out or put behind others; of no interest beyond ``below``."""
        return 0.0

    def rules_out(self, config: Candidate, below: float) -> bool:
        """Whether it surely takes ``below`` seconds; asked of each that comes next, once something fits."""
        return False

    def shared_bound(self, config: Candidate, below: float) -> float:
        """A better bound that many candidates share, so that it takes little of each; asked of those left untried."""
        return 0.0

    def tighten(self, config: Candidate, below: float) -> float:
        """A bound that takes longer, for those whose bound is the smallest in the end."""
        return 0.0

    def worth(self, config: Candidate) -> float:
        """The share of the best by which a candidate has to be able to undercut it to be looked at."""
        return 0.0

    def tries(self, config: Candidate) -> float:
        """As how many evaluations its own counts, by the time that it takes."""
        return 1.0

    def wider(self, best: Evaluation[Answer] | None) -> Iterable[Candidate]:
        """Candidates that seldom are the best, asked for with the best evaluation of the first."""
        return ()

    def more(self, best: Evaluation[Answer] | None) -> Iterable[Candidate]:
        """Further candidates, asked for with the best evaluation of those before."""
        return ()

    def slowest(self, best: Evaluation[Answer] | None) -> Iterable[Candidate]:
        """Those that take the longest to search for what they promise, asked for with the best of all others.

        Of those that are left untried bounds are not refined, which takes as long.
        """
        return ()

    def settle(self, evaluation: Evaluation[Answer]) -> Evaluation[Answer]:
        """The same answer, or a better one of its candidate, with seconds that were not known while evaluating it."""
        return evaluation

    def better(self, config: Candidate, best: Evaluation[Answer]) -> Iterable[tuple[Candidate, Evaluation[Answer]]]:
        """Settled answers of candidates that were seen, which bounds know nothing of, each better than those before.

        config, best: the best without these.
        """
        return ()


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is looked at. most: evaluations (:meth:`Space.tries`), after which the rest is left untried once
    something fits (None: all).

    tightened: candidates whose bounds are tightened in the end. last: further evaluations then, of those left untried
    whose bound is the smallest. ahead: candidates whose bounds are refined together.
    """

    most: int | None = None
    tightened: int = 0
    last: int = 0
    ahead: int = AHEAD

    def __post_init__(self) -> None:
        if min(self.tightened, self.last, self.most or 0) < 0 or self.ahead < 1:
            raise ValueError(f"not numbers of candidates: {self}")
