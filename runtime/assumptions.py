"""What a program was captured for: branches that the model takes by the values of its inputs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from autopart.runtime.errors import InputError
from autopart.runtime.inputs import Division
from autopart.runtime.loading import import_file
from autopart.runtime.manifest import Manifest
from autopart.runtime.mesh import Mesh
from autopart.runtime.totals import whole_inputs


class Assumptions:
    """Runs ``assumptions.py`` of an emitted program, on every rank before each step."""

    def __init__(self, directory: Path, manifest: Manifest, mesh: Mesh) -> None:
        self._manifest = manifest
        self._mesh = mesh
        file = directory / "assumptions.py"
        self._function = import_file(file, manifest.imports).conditions if manifest.assumptions else None

    def check(self, leaves: Mapping[str, Any], division: Division) -> None:
        """Raises InputError, on all ranks, when the whole batch would take another branch.

        leaves: the call's inputs by path; with local batches those that matter are gathered from all replicas.
        """
        if self._function is None:
            return
        manifest = self._manifest
        whole = whole_inputs(manifest, manifest.assumption_inputs, leaves, division, self._mesh)
        with torch.no_grad():
            found = [bool(value) for value in self._function(b=division.batch, B=division.batch, **whole)]
        for value, spec in zip(found, manifest.assumptions, strict=True):
            if value != spec.value:
                raise InputError(
                    f"the model was captured for inputs with which a condition is {spec.value}, and for this batch it "
                    f"is {value}: {spec.text}. The program would compute something else than the model; pass batches "
                    "that take the same branch, or write the branch with torch.where"
                )
