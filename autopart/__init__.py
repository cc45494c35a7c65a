"""autopart: from an unmodified PyTorch model to the distributed program that trains it.

``parallelize(model)`` is the whole change to a script. The steps alone: ``capture``, ``make_plan``, ``emit``, ``load``.
Names are imported when first used, so that what a cluster node imports (autopart.runtime) stays small.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopart.api import load as load
    from autopart.api import parallelize as parallelize
    from autopart.cluster import Cluster as Cluster
    from autopart.plan import Plan as Plan
    from autopart.planner import make_plan as make_plan
    from autopart.realize import emit as emit
    from autopart.recording import parameters_on_meta as parameters_on_meta
    from autopart.runtime.meter import Meter as Meter
    from autopart.tracing import capture as capture

_HOMES = {
    "Cluster": "autopart.cluster",
    "Meter": "autopart.runtime.meter",
    "Plan": "autopart.plan",
    "capture": "autopart.tracing",
    "emit": "autopart.realize",
    "load": "autopart.api",
    "make_plan": "autopart.planner",
    "parallelize": "autopart.api",
    "parameters_on_meta": "autopart.recording",
}
__all__ = ["Cluster", "Meter", "Plan", "capture", "emit", "load", "make_plan", "parallelize", "parameters_on_meta"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'autopart' has no attribute {name!r}")
