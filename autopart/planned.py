"""Plans on disk, so that what was planned once is found again: when a job starts anew, or a plan is looked into.

An entry's name is a hash of everything that plans follow from: the program's whole content, the cluster with every
number of its devices and links and what a plan says of it, what is asked for, autopart's sources, torch, and what is
installed. Plans that a solver's time limit decided are not kept, as they need not come out again, nor those by a user's
own rules, nor of programs that no JSON object says (:mod:`autopart.passes.program_json`). What cannot be read, or is of
another program, is planned again and written over. So a cache gives plans that planning gives, or none; of these
``solve_s`` is 0, and ``total_s`` the time it took to find them.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from autopart import cache
from autopart.analysis import Analysis
from autopart.cache_key import installed, sources
from autopart.cluster import Cluster
from autopart.cluster_notes import identity
from autopart.earlier_plans import EarlierPlans
from autopart.frontier import PlanPoint, count_frontier, first_devices, memory_frontier
from autopart.kept_plans import found_or_made
from autopart.passes import program_json
from autopart.passes.program import Program
from autopart.passes.rules import RULES
from autopart.plan import Plan
from autopart.planner import make_plan
from autopart.runtime.errors import PlanError

FOLDER = "plans"
VERSION = 1


def planned(
    program: Program, cluster: Cluster, *, analysis: Analysis, earlier: EarlierPlans | None = None, **limits: Any
) -> Plan:
    """As :func:`autopart.planner.make_plan`, from the cache where the plan is there. Raises what it does.

    earlier: filled where a plan is made.
    """
    start = time.perf_counter()

    def make() -> list[Plan]:
        return [make_plan(program, cluster, analysis=analysis, earlier=earlier, **limits)]

    plans, found = _kept("plan", program, cluster, limits, analysis, make)
    (plan,) = plans
    return replace(plan, solve_s=0.0, total_s=time.perf_counter() - start) if found else plan


def planned_frontier(
    program: Program,
    cluster: Cluster,
    *,
    analysis: Analysis,
    counts: Sequence[int] | None = None,
    step: float = 0.1,
    report: Callable[[PlanPoint], None] = lambda _: None,
    left_out: Callable[[int, PlanError], None] = lambda *_: None,
    **limits: Any,
) -> list[PlanPoint]:
    """As :func:`autopart.frontier.memory_frontier`, or with counts as :func:`autopart.frontier.count_frontier`.

    From the cache where the whole frontier is there. Raises what these do.
    """

    def make() -> list[Plan]:
        if counts is None:
            points = memory_frontier(program, cluster, step=step, analysis=analysis, report=report, **limits)
        else:
            points = count_frontier(
                *(program, cluster, counts), analysis=analysis, report=report, left_out=left_out, **limits
            )
        return [point.plan for point in points]

    if counts is None:
        asked = {**limits, "step": step}
    else:  # of a host's CPUs fewer may have a calibration of their own
        asked = {**limits, "parts": [identity(first_devices(cluster, count)) for count in sorted(set(counts))]}
    return [PlanPoint.of(plan) for plan in _kept("frontier", program, cluster, asked, analysis, make)[0]]


def _kept(
    kind: str,
    program: Program,
    cluster: Cluster,
    limits: dict[str, Any],
    analysis: Analysis,
    make: Callable[[], list[Plan]],
) -> tuple[list[Plan], bool]:
    """Plans, and whether they were there."""
    folder = cache.answers(FOLDER)
    try:
        name = key(kind, program, cluster, limits) if folder is not None and analysis.rules is RULES else None
    except program_json.NotWritten:
        name = None
    if folder is None or name is None:
        return make(), False
    return found_or_made(folder, name, make, program.fingerprint, 1 if kind == "plan" else None)


def key(kind: str, program: Program, cluster: Cluster, limits: dict[str, Any]) -> str:
    """The hash by which plans are found. Raises NotWritten of :mod:`autopart.passes.program_json`."""
    digest = hashlib.sha256()
    asked = sorted((name, repr(value)) for name, value in limits.items() if value is not None)
    versions = (VERSION, sys.version, torch.__version__, torch.version.git_version)
    for part in (kind, program_json.content(program), identity(cluster), asked, *versions, *sources(), *installed()):
        digest.update(f"{part!r}\n".encode())
    return digest.hexdigest()
