"""The whole model's weights as full tensors under their original names: gathered and given out again."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from autopart.runtime.collectives import broadcast_in_place, gather_shards
from autopart.runtime.errors import InputError
from autopart.runtime.links import dtype_of
from autopart.runtime.loading import cuts_of, local_share
from autopart.runtime.manifest import Manifest, ParameterSpec
from autopart.runtime.mesh import Mesh


def gather_state(
    manifest: Manifest, mesh: Mesh, tensors: Mapping[str, Tensor], rank0_only: bool = False
) -> dict[str, Tensor]:
    """All persistent parameters and buffers, whole and on the CPU, by every name they have. All ranks take part.

    tensors: this rank's shares by their spec's name. rank0_only: other ranks return an empty dict, and never hold more
    than one whole tensor.
    """
    state: dict[str, Tensor] = {}
    for spec in manifest.parameters:
        if not spec.persistent:
            continue
        owner = mesh.place_of[spec.stages[0]]
        if mesh.pipeline.index == owner:
            whole = gather_parameter(spec, mesh, tensors[spec.name].detach())
        else:
            whole = torch.empty(spec.shape, dtype=dtype_of(spec.dtype), device=mesh.device)
        broadcast_in_place(whole, *mesh.route_from(spec.stages[0]), "step")
        if not rank0_only or mesh.rank == 0:
            # A copy even where nothing was gathered: the next step must not change a state that was taken.
            kept = whole.to("cpu", copy=True)
            state.update(dict.fromkeys((spec.name, *spec.aliases), kept))
    return state


def gather_parameter(spec: ParameterSpec, mesh: Mesh, tensor: Tensor) -> Tensor:
    """The whole of a parameter or buffer from the shares of the stage's ranks; all of them take part."""
    tensor = tensor.contiguous()
    for cut, axis in reversed(cuts_of(spec, mesh)):
        tensor = gather_shards(tensor, axis, cut.dim, cut.outer, "step")
    return tensor.contiguous()


def load_state(
    manifest: Manifest, mesh: Mesh, tensors: Mapping[str, Tensor], state: Mapping[str, Tensor], strict: bool = True
) -> tuple[list[str], list[str]]:
    """Copies each rank's share of the full tensors into its own. Returns the missing and the unexpected names.

    One name of a tied parameter is enough. Raises InputError when ``strict`` and names are missing or unexpected.
    """
    known = {name for spec in manifest.parameters for name in (spec.name, *spec.aliases)}
    unexpected = [name for name in state if name not in known]
    missing: list[str] = []
    for spec in manifest.parameters:
        names = [name for name in (spec.name, *spec.aliases) if name in state]
        if not names:
            if spec.persistent:
                missing.append(spec.name)
            continue
        if spec.name in tensors:
            with torch.no_grad():
                tensors[spec.name].copy_(local_share(state[names[0]], spec, mesh))
    if strict and (missing or unexpected):
        raise InputError(f"the state does not fit the model: missing {missing}, unexpected {unexpected}")
    return missing, unexpected
