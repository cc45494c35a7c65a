"""Answers to whole ``autopart plan`` commands on disk, so that one that is asked again reads no program.

An entry's name is a hash of everything that the captured program follows from (:mod:`autopart.captured`), the cluster
with every number of its devices and links and what a plan says of it, and what is asked for. Kept is what
:mod:`autopart.planned` would keep, with the notes: nothing that a solver's time limit decided. Of what is found
``solve_s`` is 0, and ``total_s`` the time it took to find it.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from autopart import cache
from autopart.captured import key as program_key
from autopart.cluster import Cluster
from autopart.cluster_notes import identity
from autopart.kept_plans import found_or_made
from autopart.plan import Plan

FOLDER = "asked"
VERSION = 1


def asked(
    spec: str, dtype: torch.dtype | None, cluster: Cluster, limits: dict[str, Any], choose: Callable[[], Plan]
) -> Plan:
    """The plan that ``choose`` gives for the model of that name, from the cache where it is there. Raises what it does.

    limits: as of :func:`autopart.planner.make_plan`.
    """
    start = time.perf_counter()
    folder = cache.answers(FOLDER) if spec.startswith("hf:") else None
    if folder is None:
        return choose()
    (plan,), found = found_or_made(folder, key(spec, dtype, cluster, limits), lambda: [choose()], count=1)
    return replace(plan, solve_s=0.0, total_s=time.perf_counter() - start) if found else plan


def key(spec: str, dtype: torch.dtype | None, cluster: Cluster, limits: dict[str, Any]) -> str:
    """The hash by which an answer is found."""
    digest = hashlib.sha256()
    given = sorted((name, repr(value)) for name, value in limits.items() if value is not None)
    for part in (VERSION, program_key(spec, dtype), identity(cluster), given):
        digest.update(f"{part!r}\n".encode())
    return digest.hexdigest()
