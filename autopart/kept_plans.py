"""Files of plans that were made once, by the hash of their question: see :mod:`autopart.planned` and
:mod:`autopart.asked`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from autopart import cache
from autopart.plan import Plan
from autopart.runtime.errors import PlanError
from autopart.solver import time_limits


def found_or_made(
    folder: Path, name: str, make: Callable[[], list[Plan]], fingerprint: str = "", count: int | None = None
) -> tuple[list[Plan], bool]:
    """Plans, and whether they were in the folder under this name; those of ``make`` otherwise, which are kept there.

    fingerprint: of the program that they are for, where it is known. count: how many they are, where it is known.
    What cannot be read, or is for another, is made and written over. Not kept is what a solver's time limit decided,
    as it need not come out again. Raises what ``make`` does.
    """
    path = folder / name[:2] / f"{name}.json"
    known = _read(path)
    if known and count in (None, len(known)) and all(fingerprint in ("", plan.fingerprint) for plan in known):
        return known, True
    with time_limits.watched() as reached:
        plans = make()
    if not reached():
        with contextlib.suppress(OSError):  # a full or read-only disk costs the next run its time, no more
            cache.keep(path, {"plans": [plan.to_json() for plan in plans]})
    return plans, False


def _read(path: Path) -> list[Plan]:
    """What was kept; nothing where that cannot be read."""
    data = cache.kept(path)
    texts = data.get("plans") if data is not None else None
    if not isinstance(texts, list):
        return []
    try:
        return [Plan.from_json(text, str(path)) for text in texts]
    except (PlanError, TypeError):
        return []
