"""Values of the whole batch that a rank's stages need, such as the number of its valid labels."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autopart.runtime.collectives import gather_parts
from autopart.runtime.inputs import Division
from autopart.runtime.loading import import_file
from autopart.runtime.manifest import Manifest, argument_name
from autopart.runtime.mesh import Mesh
from autopart.runtime.state import gather_parameter


class Totals:
    """Runs ``totals.py`` of an emitted program once per step, where a stage of this rank needs it."""

    def __init__(self, directory: Path, manifest: Manifest, mesh: Mesh) -> None:
        self._manifest = manifest
        self._mesh = mesh
        self._function = import_file(directory / "totals.py").totals if manifest.totals else None
        self._needed = any(manifest.stages[stage].totals for stage in mesh.stages)

    def compute(
        self,
        leaves: Mapping[str, Any],
        division: Division,
        tensors: Callable[[], Mapping[str, Tensor]],
    ) -> dict[str, Tensor]:
        """The totals by name. With local batches the inputs that they need are gathered from all replicas.

        leaves: the call's inputs by path. tensors: this rank's parameters and buffers by name.
        """
        manifest, mesh = self._manifest, self._mesh
        if self._function is None or not self._needed:
            return {}
        whole = whole_inputs(manifest, manifest.totals_inputs, leaves, division, mesh)
        buffers = tensors() if manifest.totals_buffers else {}
        for parameter in manifest.parameters:
            if parameter.name in manifest.totals_buffers:
                whole[argument_name(parameter.name)] = gather_parameter(parameter, mesh, buffers[parameter.name])
        with torch.no_grad():
            results = self._function(b=division.batch, B=division.batch, **whole)
        return dict(zip(manifest.totals, results, strict=True))


def whole_inputs(
    manifest: Manifest, names: Collection[str], leaves: Mapping[str, Any], division: Division, mesh: Mesh
) -> dict[str, Tensor]:
    """These inputs of the whole batch, by argument; with local batches they are gathered from all replicas."""
    whole: dict[str, Tensor] = {}
    for spec in manifest.inputs:
        if spec.name in names:
            tensor = leaves[spec.name].to(mesh.device)
            if division.is_local and spec.batch_dim is not None and mesh.data.size > 1:
                tensor = gather_parts(tensor, mesh.data, spec.batch_dim, division.given, "step")
            whole[argument_name(spec.name)] = tensor
    return whole
