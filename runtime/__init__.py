"""What runs on every rank; needs torch alone.

Names are imported when first used: planning needs few of these modules, and all of them together take a second.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopart.runtime import collectives as collectives
    from autopart.runtime import invariant as invariant
    from autopart.runtime import local_forms as local_forms
    from autopart.runtime.mesh import Axis as Axis
    from autopart.runtime.mesh import Mesh as Mesh
    from autopart.runtime.module import ParallelModule as ParallelModule
    from autopart.runtime.namespace import Namespace as Namespace
    from autopart.runtime.namespace import buffer as buffer
    from autopart.runtime.namespace import parameter as parameter
    from autopart.runtime.traffic import Traffic as Traffic

_HOMES = {
    "Axis": "autopart.runtime.mesh",
    "Mesh": "autopart.runtime.mesh",
    "Namespace": "autopart.runtime.namespace",
    "ParallelModule": "autopart.runtime.module",
    "Traffic": "autopart.runtime.traffic",
    "buffer": "autopart.runtime.namespace",
    "parameter": "autopart.runtime.namespace",
}
_MODULES = ("collectives", "invariant", "local_forms")
__all__ = [
    "Axis",
    "Mesh",
    "Namespace",
    "ParallelModule",
    "Traffic",
    "buffer",
    "collectives",
    "invariant",
    "local_forms",
    "parameter",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return importlib.import_module(f"autopart.runtime.{name}")
    raise AttributeError(f"module 'autopart.runtime' has no attribute {name!r}")
