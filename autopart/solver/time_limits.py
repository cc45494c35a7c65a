"""Whether a solver's time limit decided an answer, which need not come out again then."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar

from autopart.runtime.errors import PlanError

_REACHED: ContextVar[list[float] | None] = ContextVar("limits that were reached", default=None)
_EARLY = 0.05
"""Seconds by which solvers may stop before their limit."""


class OutOfTime(PlanError):
    """A solver found nothing in the time that it had, and did not prove that there is nothing."""


@contextlib.contextmanager
def watched() -> Iterator[Callable[[], bool]]:
    """Gives a function that says whether any limit was reached inside so far."""
    reached: list[float] = []
    around = _REACHED.get()
    token = _REACHED.set(reached)
    try:
        yield lambda: bool(reached)
    finally:
        _REACHED.reset(token)
        if around is not None:
            around.extend(reached)


def ended(until: float) -> None:
    """A search ended that was limited to this time, in seconds of ``time.perf_counter``."""
    reached = _REACHED.get()
    if reached is not None and time.perf_counter() > until - _EARLY:
        reached.append(until)
