"""What runs on every rank; needs torch alone."""

from autopart.runtime import collectives, invariant, local_forms
from autopart.runtime.mesh import Axis, Mesh
from autopart.runtime.module import ParallelModule
from autopart.runtime.namespace import Namespace, buffer, parameter
from autopart.runtime.traffic import Traffic

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
