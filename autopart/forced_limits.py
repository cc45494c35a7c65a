"""Where nothing fits in memory: which of the limits that a user forced would do to leave out.

The configuration that is closest to fitting is evaluated again without one of them, then without two, then without
all, and the first that fits is told. Degrees are left as they are: without them there is a whole search to do, which
the user can ask for.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from autopart.candidates import Candidates
from autopart.report.units import format_seconds
from autopart.runtime.errors import PlanError
from autopart.solver.degrees import Degrees, microbatch_counts


def what_would_fit(candidates: Candidates, config: Degrees, limits: Mapping[str, Any]) -> str:
    """A sentence that names the forced limits without which a configuration that does not fit would, and its seconds.

    Empty where nothing that could be left out was forced, or that does not help. candidates: under these limits.
    limits: as ``make_plan`` takes them.
    """
    tries, others = list(_left_out(candidates, config, limits)), candidates
    if any("zero" in left_out for left_out in tries):
        others = Candidates(
            *(candidates.analysis, candidates.cluster, candidates.batch, candidates.optimizer, candidates.time_limit_s),
            *(candidates.warmup, candidates.pins, None, candidates.scheme),
        )
    for left_out in tries:
        tried = config
        for name in left_out:
            tried = replace(tried, **_instead(candidates, config, name))
        if not tried.runs or (candidates.pins and tried.stages < candidates.pins.least_stages):
            continue
        try:
            found = (others if "zero" in left_out else candidates).evaluate(tried)
        except PlanError:
            continue
        forced = " and ".join(f"{name}={limits[name]}" for name in left_out)
        return f"Without {forced} it would fit, as {tried}, in about {format_seconds(found.objective)} a step"
    return ""


def _left_out(candidates: Candidates, config: Degrees, limits: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Limits that may be what keeps a configuration from fitting, the fewest first."""
    names = []
    if limits.get("recompute") == "none":
        names.append("recompute")
    if limits.get("zero") in (0, 1, 2) and config.dp > 1:
        names.append("zero")
    if limits.get("microbatches") is not None and _instead(candidates, config, "microbatches"):
        names.append("microbatches")
    if limits.get("schedule") not in (None, "auto", "1f1b") and candidates.analysis.program.loss is not None:
        names.append("schedule")
    for count in sorted({min(count, len(names)) for count in (1, 2, len(names))} - {0}):
        yield from itertools.combinations(names, count)


def _instead(candidates: Candidates, config: Degrees, name: str) -> dict[str, Any]:
    """What a configuration has where the limit is left out; nothing where it cannot have less than it has."""
    if name == "recompute":
        return {"recompute": "auto"}
    if name == "schedule":
        return {"schedule": "1f1b", "virtual": 1}
    if name == "microbatches" and not candidates.analysis.split.flaw:
        samples = candidates.batch // config.dp
        counts = (count for count in reversed(microbatch_counts(samples)) if count > config.microbatches)
        most = next((count for count in counts if samples // count >= candidates.least_samples), None)
        return {} if most is None else {"microbatches": most}
    return {}
