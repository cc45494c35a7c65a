"""Answers to whole ``autopart plan`` commands on disk, so that one that is asked again reads no program.

An entry's name is a hash of everything that the captured program follows from (:mod:`autopart.captured`), the cluster
with every number of its devices and links, and what is asked for. Kept is what :mod:`autopart.planned` would keep, with
the notes: nothing that a solver's time limit decided. Of what is found ``solve_s`` is 0, and ``total_s`` the time it
took to find it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from autopart import cache
from autopart.captured import key as program_key
from autopart.cluster import Cluster
from autopart.plan import Plan
from autopart.runtime.errors import PlanError
from autopart.solver import time_limits

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
    name = key(spec, dtype, cluster, limits)
    path = folder / name[:2] / f"{name}.json"
    known = _read(path)
    if known is not None:
        return replace(known, solve_s=0.0, total_s=time.perf_counter() - start)
    with time_limits.watched() as reached:
        plan = choose()
    if not reached():
        with contextlib.suppress(OSError):  # a full or read-only disk costs the next run its time, no more
            cache.write(path, json.dumps({"plan": plan.to_json()}))
    return plan


def key(spec: str, dtype: torch.dtype | None, cluster: Cluster, limits: dict[str, Any]) -> str:
    """The hash by which an answer is found."""
    digest = hashlib.sha256()
    given = sorted((name, repr(value)) for name, value in limits.items() if value is not None)
    for part in (VERSION, program_key(spec, dtype), cluster, given):
        digest.update(f"{part!r}\n".encode())
    return digest.hexdigest()


def _read(path: Path) -> Plan | None:
    data = cache.read_object(path)
    text = data.get("plan") if data is not None else None
    if not isinstance(text, str):
        return None
    try:
        return Plan.from_json(text, str(path))
    except (PlanError, TypeError):
        return None
