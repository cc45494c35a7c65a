"""What became of the candidates of the outer search, in numbers and in words."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

from autopart.report.units import format_apart
from autopart.runtime.errors import InfeasibleError
from autopart.solver.degrees import Config
from autopart.solver.search_space import Answer, Candidate, Evaluation, NotBetter

WORTH = 0.005
"""The share of the best that is little: of what may be faster by less not much is said, and not much is done for it."""


class Status(enum.Enum):
    CHOSEN = "chosen"
    SLOWER = "slower"
    PRUNED = "pruned"
    UNTRIED = "untried"
    INFEASIBLE = "infeasible"


@dataclass(frozen=True, slots=True)
class Considered:
    """What became of a candidate.

    seconds: its objective, for one that was not tried its lower bound, for an infeasible one None. reason: for people.
    """

    config: Config
    status: Status
    seconds: float | None
    reason: str


@dataclass(slots=True, eq=False)
class Seen(Generic[Candidate, Answer]):
    """A candidate that was looked at. floor: its lower bound then. outcome: of its evaluation; None: there was none.

    bound: seconds that it takes at least, as far as is known. hopeless: it surely does not fit, and was not evaluated.
    """

    config: Candidate
    floor: float
    outcome: Evaluation[Answer] | NotBetter | InfeasibleError | None = None
    hopeless: bool = False
    tightened: bool = False
    bound: float = -math.inf

    def __post_init__(self) -> None:
        self.update(self.outcome)

    @property
    def infeasible(self) -> bool:
        return isinstance(self.outcome, InfeasibleError)

    def update(self, outcome: Evaluation[Answer] | NotBetter | InfeasibleError | None) -> None:
        """Takes what an evaluation gave; what was known of the bound stays."""
        self.outcome = outcome
        if isinstance(outcome, Evaluation | NotBetter):
            self.bound = max(self.bound, outcome.bound)
        self.bound = max(self.bound, self.floor)

    def tighten(self, seconds: float) -> None:
        """Takes the best bound that there is."""
        self.tightened = True
        self.know(seconds)

    def know(self, seconds: float) -> None:
        """Takes a better bound."""
        self.bound = max(self.bound, seconds)
        if self.outcome is None:
            self.floor = self.bound


def considered(seen: Seen[Candidate, Answer], chosen: Evaluation[Answer]) -> Considered:
    """What became of a candidate, beside the one that was chosen."""
    config, floor, outcome = seen.config, seen.floor, seen.outcome
    if outcome is None and floor < chosen.objective:
        why = "it cannot take much less" if floor >= (1 - WORTH) * chosen.objective else "enough others were"
        reason = f"not tried, as {why}; {_beside(floor, chosen.objective)}"
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
        own, best = format_apart(outcome.objective, chosen.objective)
        reason = f"an estimate not made sure of, as enough others were; takes {own}, the chosen one {best}"
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
    return _beside(seconds, chosen)


def _beside(seconds: float, chosen: float) -> str:
    least, best = format_apart(seconds, chosen)
    return f"takes at least {least}, the chosen one {best}"


def none_feasible(failures: Sequence[tuple[Config, InfeasibleError]], count: int) -> InfeasibleError:
    """The failure that is closest to fitting speaks for all; failures are in the order of the search, fastest first.
    count: of all that do not fit.
    """
    config, closest = min(failures, key=lambda item: math.inf if item[1].excess_bytes is None else item[1].excess_bytes)
    which = "the only configuration" if count == 1 else f"none of {count} configurations fits; the closest"
    return InfeasibleError(f"{which}, {config}: {closest}", closest.excess_bytes)
