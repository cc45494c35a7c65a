"""The whole model's weights as full tensors under their original names: gathered and given out again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from autopart.runtime.agreement import unlike
from autopart.runtime.collectives import broadcast_in_place, gather_shards
from autopart.runtime.errors import InputError
from autopart.runtime.links import dtype_of
from autopart.runtime.loading import cuts_of, local_share
from autopart.runtime.manifest import Manifest, ParameterSpec
from autopart.runtime.mesh import Mesh
from autopart.runtime.norms import divided


def gather_state(
    manifest: Manifest, mesh: Mesh, tensors: Mapping[str, Tensor], rank0_only: bool = False
) -> dict[str, Tensor]:
    """All persistent parameters and buffers, whole and on the CPU, by every name they have. All ranks take part.

    tensors: this rank's shares by their spec's name. rank0_only: other ranks return an empty dict, and never hold more
    than one whole tensor.
    """
    state: dict[str, Tensor] = {}
    for spec, whole in whole_tensors(manifest, mesh, tensors):
        if not rank0_only or mesh.rank == 0:
            # A copy even where nothing was gathered: the next step must not change a state that was taken.
            kept = whole.to("cpu", copy=True)
            state.update(dict.fromkeys((spec.name, *spec.aliases), kept))
    return state


def whole_tensors(
    manifest: Manifest, mesh: Mesh, tensors: Mapping[str, Tensor], call: str = "state_dict()"
) -> Iterator[tuple[ParameterSpec, Tensor]]:
    """Every persistent parameter and buffer, whole on every rank, one after the other. All ranks take part.

    tensors: this rank's shares by their spec's name. What is whole already is not copied. call: what asks for them.
    Raises InputError where another rank is in another call.
    """
    if len(manifest.stages) > 1 or any(divided(spec, mesh) for spec in manifest.parameters):
        unlike("", "", call)
    for spec in manifest.parameters:
        if not spec.persistent:
            continue
        if spec.stages[0] in mesh.stages:
            whole = gather_parameter(spec, mesh, tensors[spec.name].detach())
        else:
            whole = torch.empty(spec.shape, dtype=dtype_of(spec.dtype), device=mesh.device)
        broadcast_in_place(whole, *mesh.route_from(spec.stages[0]), "step")
        yield spec, whole


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

    One name of a tied parameter is enough. Raises InputError for another shape, and when ``strict`` for missing or
    unexpected names, on every rank and before anything is copied.
    """
    specs = {name: spec for spec in manifest.parameters for name in (spec.name, *spec.aliases)}
    found = {spec.name: name for name, spec in reversed(specs.items()) if name in state}
    unexpected = [name for name in state if name not in specs]
    missing = [spec.name for spec in manifest.parameters if spec.persistent and spec.name not in found]
    for name in found.values():
        if tuple(state[name].shape) != specs[name].shape:
            raise InputError(
                f"the state does not fit the model: {name} has the shape {list(state[name].shape)}, expected is "
                f"{list(specs[name].shape)}"
            )
    if strict and (missing or unexpected):
        raise InputError(f"the state does not fit the model: missing {missing}, unexpected {unexpected}")
    with torch.no_grad():
        for own, name in found.items():
            if own in tensors:
                tensors[own].copy_(local_share(state[name], specs[name], mesh))
    return missing, unexpected
