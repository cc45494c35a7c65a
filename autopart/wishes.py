"""What a plan's user forced, as the plan records it: so that what is planned from it later keeps to that too.

Recorded under ``Plan.asked`` are the limits that :func:`autopart.planner.make_plan` was given, by their names there;
pins, groups of modules, the tensor scheme, the optimizer and dropout are fields of their own. So is the warm-up that a
plan has, which may have been chosen: one that was forced is recorded besides.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from autopart.report.units import counted, format_bytes
from autopart.runtime.errors import PlanError
from autopart.runtime.schedule import NAMES

if TYPE_CHECKING:
    from autopart.plan import Plan

_PIPELINE = ("pp", "microbatches", "schedule", "warmup", "virtual", "meshes", "together", "pins")
_STAGE = ("dp", "tp", "tensor_scheme", "zero", "bucket_bytes", "recompute")
LIMITS = (*_PIPELINE, *_STAGE, "optimizer", "dropout", "time_limit_s", "thorough")
"""Arguments of :func:`autopart.planner.make_plan` that a training script may give (which need not import it)."""
_COUNTS = ("pp", "dp", "microbatches", "virtual", "bucket_bytes")
_WORDS: Mapping[str, tuple[str, ...]] = {
    "schedule": (*NAMES, "auto"),
    "recompute": ("none", "full"),
    "meshes": ("equal", "unlike"),
}
_SAID: Mapping[str, Callable[[Any], str]] = {
    "microbatches": lambda count: counted(count, "microbatch"),
    "virtual": lambda count: f"{counted(count, 'stage')} on each rank",
    "warmup": lambda count: f"warm-up {count}",
    "meshes": lambda word: f"{word} meshes",
    "bucket_bytes": lambda size: f"messages of {format_bytes(size)}",
}


def check_named(limits: Iterable[str]) -> None:
    """Raises PlanError for a name that is no limit of a plan, with the nearest ones."""
    for name in limits:
        if name not in LIMITS:
            near = difflib.get_close_matches(name, LIMITS)
            hint = f"did you mean {' or '.join(near)}?" if near else f"a plan takes {', '.join(LIMITS)}"
            raise PlanError(f"there is no option {name!r}: {hint}")


def recorded(limits: Mapping[str, Any]) -> dict[str, int | str]:
    """What of limits was given, as a plan records it: sizes of several tensor axes as ``2x4``, a warm-up of stages as
    ``2,0``.

    limits: as make_plan takes them. "auto" is nothing given, but of schedules, of which it tries more than without.
    """
    found: dict[str, int | str] = {}
    for name, value in limits.items():
        if value is None or (value == "auto" and name != "schedule"):
            continue
        if name == "tp" and isinstance(value, tuple | list):
            value = "x".join(map(str, value))
        if name == "tp" and isinstance(value, str) and value.isdecimal():
            value = int(value)
        if name == "warmup" and isinstance(value, tuple | list):
            value = ",".join(map(str, value))
        if isinstance(value, int | str):
            found[name] = value
    return found


def check_recorded(asked: Mapping[str, int | str]) -> None:
    """Raises PlanError for what :func:`recorded` does not give."""
    for name, value in asked.items():
        if name in _WORDS:
            fits, expected = value in _WORDS[name], f"one of {', '.join(_WORDS[name])}"
        elif name in _COUNTS:
            fits, expected = isinstance(value, int) and value >= 1, "a whole number of at least 1"
        elif name == "tp":
            sizes = str(value).split("x")
            fits = all(size.isdecimal() and int(size) >= 1 for size in sizes)
            expected = 'a number of devices, or sizes of axes such as "2x4"'
        elif name == "zero":
            fits, expected = value in (0, 1, 2, 3), "a level of ZeRO, 0 to 3"
        elif name == "warmup":
            fits = all(count.isdecimal() for count in str(value).split(","))
            expected = 'a whole number of at least 0, or one for each stage such as "2,0"'
        else:
            known = ", ".join(("tp", "zero", "warmup", *_COUNTS, *_WORDS))
            raise PlanError(f"asked: {name!r} is no limit of planning; remove it (known: {known})")
        if not fits:
            raise PlanError(f"asked[{name!r}]: expected {expected}, found {value!r}")


def forced_in(plan: Plan) -> dict[str, Any]:
    """What a plan's user forced, as make_plan takes it; of plans whose files recorded less only that.

    Besides pins, groups, the optimizer and dropout (:func:`autopart.same_degrees.asked_of`).
    """
    found: dict[str, Any] = dict(plan.asked)
    if isinstance(found.get("warmup"), str):
        found["warmup"] = tuple(map(int, found["warmup"].split(",")))
    if plan.tensor_scheme != "auto":
        found["tensor_scheme"] = plan.tensor_scheme
    return found


def forced_text(plan: Plan) -> str:
    """``pp 2, 8 microbatches, zero 1``; empty where nothing was forced."""
    found = forced_in(plan)
    if isinstance(found.get("warmup"), tuple):
        found["warmup"] = ",".join(map(str, found["warmup"]))  # as it is given
    texts = [
        _SAID[name](value) if name in _SAID else f"{name.replace('_', ' ')} {value}" for name, value in found.items()
    ]
    return ", ".join(texts)
