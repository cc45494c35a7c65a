"""Imports emitted files and puts this rank's share of the weights into a stage."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

from autopart.runtime.errors import PlanError
from autopart.runtime.links import dtype_of
from autopart.runtime.manifest import Manifest, ParameterSpec
from autopart.runtime.mesh import Axis, Mesh
from autopart.runtime.placement import Placement, local_cuts, local_size, shard, take_shard
from autopart.runtime.rng import derive_seed

Originals = Mapping[str, "Tensor | None"]
# Tensors that no state dict of the model holds, beside the stages' sources.
CONSTANTS_FILE = "constants.pt"


def import_file(path: Path, imports: tuple[str, ...] = ()) -> ModuleType:
    """Imports one emitted file. imports: modules to import before, such as those that register custom operators.

    Raises PlanError when the file is missing or one of the modules cannot be imported.
    """
    for module in imports:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise PlanError(f"{path.name} needs the module {module!r}, which fails to import: {error}") from error
    if not path.is_file():
        raise PlanError(f"the emitted file {path} is missing; emit the program again")
    # Under its own name in sys.modules, so that two programs may be loaded side by side.
    name = f"autopart_emitted_{derive_seed(path.resolve()):x}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module_ = importlib.util.module_from_spec(spec)
    sys.modules[name] = module_
    spec.loader.exec_module(module_)
    return module_


def build_stage(directory: Path, manifest: Manifest, mesh: Mesh, stage_index: int) -> nn.Module:
    """A stage of this rank with empty parameters (on the meta device)."""
    path = directory / manifest.stages[stage_index].file
    module = import_file(path, manifest.imports)
    if not hasattr(module, "Stage"):
        raise PlanError(f"{path} defines no class Stage; emit the program again")
    with torch.device("meta"):
        stage: nn.Module = module.Stage(mesh)
    return stage


def cuts_of(spec: ParameterSpec, mesh: Mesh) -> list[tuple[Placement, Axis]]:
    """The cuts that make this rank's share, one of what the other left, and their axes: the data axis last."""
    placements = [Placement.parse(text) for text in spec.placements]
    found = local_cuts(placements, mesh.tensor_sizes) if placements else ()  # none: a tensor of other stages
    cuts = [(cut, mesh.tensor_axes[position]) for position, cut in found]
    return [*cuts, (shard(spec.data_dim), mesh.data)] if spec.zero else cuts


def local_shape(spec: ParameterSpec, mesh: Mesh) -> tuple[int, ...]:
    """The shape of this rank's share."""
    shape = list(spec.shape)
    for cut, axis in cuts_of(spec, mesh):
        shape[cut.dim] = local_size(shape[cut.dim], axis.size)
    return tuple(shape)


def local_share(tensor: Tensor, spec: ParameterSpec, mesh: Mesh) -> Tensor:
    """This rank's share of the whole tensor; a view where possible. Raises PlanError for another shape."""
    if tuple(tensor.shape) != spec.shape:
        raise PlanError(f"{spec.name} has the shape {list(tensor.shape)}, the plan was made for {list(spec.shape)}")
    for cut, axis in cuts_of(spec, mesh):
        tensor = take_shard(tensor, cut, axis.index, axis.size)
    return tensor


def constants_of(directory: Path) -> dict[str, Tensor]:
    """The tensors that belong to an emitted program and that no state dict of the model holds."""
    file = directory / CONSTANTS_FILE
    return dict(torch.load(file, "cpu", weights_only=True)) if file.exists() else {}


def starting_tensors(directory: Path, manifest: Manifest, originals: Originals | None) -> Originals:
    """What parameters and buffers start with: the originals by name, and the program's own constants.

    originals: None: what a state dict holds is left out, to be loaded later. Raises PlanError where the originals are
    of another model, or lack a buffer that no state dict holds.
    """
    found: dict[str, Tensor | None] = {**constants_of(directory), **(originals or {})}
    for spec in manifest.parameters:
        original = original_of(spec, found)
        if original is None and (originals is not None or not spec.persistent):
            raise PlanError(
                f"{spec.name!r} is a {'buffer' if spec.buffer else 'parameter'} of the program that was not given; "
                "load the program with the model that it was made of"
            )
        if original is not None and original.dtype != dtype_of(spec.dtype):
            raise PlanError(
                f"{spec.name} is {original.dtype}, the plan was made for {spec.dtype}; convert the model, or plan again"
            )
    known = {name for spec in manifest.parameters for name in (spec.name, *spec.aliases)}
    for name, tensor in (originals or {}).items():
        if isinstance(tensor, nn.Parameter) and name not in known:  # would silently be trained no more
            raise PlanError(
                f"{name!r} is a parameter of the model that was given, which the program does not have; load it "
                "with the model that it was made of"
            )
    return found


def tensors_in(stages: Iterable[nn.Module], manifest: Manifest) -> dict[str, Tensor]:
    """The parameters and buffers of a rank's stages by their specs' names."""
    main = {name: spec.name for spec in manifest.parameters for name in (spec.name, *spec.aliases)}
    return {
        main[name]: tensor
        for stage in stages
        for members in (stage.named_parameters, stage.named_buffers)
        for name, tensor in members(remove_duplicate=False)
    }


def place(
    stages: Mapping[int, nn.Module],
    manifest: Manifest,
    mesh: Mesh,
    originals: Originals,
    held: Mapping[str, Tensor] | None = None,
) -> None:
    """Replaces the empty parameters and buffers of this rank's stages (by number) by its shares of the originals.

    An original ``nn.Parameter`` is kept: the very same object, with its data replaced by the share, goes into the
    stage, so that an optimizer made before goes on working. What several stages share is one object in all of them.
    Without an original (None, missing, or on the meta device) a tensor starts as zeros, to be loaded later. held:
    shares that this rank has already, by their spec's name, which become the stages' instead.

    Raises PlanError when a stage's names or shapes are not those of the manifest.
    """
    specs = {name: spec for spec in manifest.parameters for name in (spec.name, *spec.aliases)}
    placed: dict[str, Tensor] = dict(held or {})
    for index, stage in stages.items():
        members = [*stage.named_parameters(remove_duplicate=False), *stage.named_buffers(remove_duplicate=False)]
        for name, empty in members:
            spec = specs.get(name)
            file = manifest.stages[index].file
            if spec is None:
                raise PlanError(f"{file} has a parameter {name!r} that the manifest lacks")
            if tuple(empty.shape) != local_shape(spec, mesh):
                raise PlanError(
                    f"{file} declares {name!r} as {list(empty.shape)}, but the share of a rank is "
                    f"{list(local_shape(spec, mesh))}"
                )
            if spec.name not in placed:
                placed[spec.name] = _place_one(spec, mesh, original_of(spec, originals))
            _replace(stage, name, placed[spec.name])


def original_of(spec: ParameterSpec, originals: Originals) -> Tensor | None:
    """The tensor among these that is given under one of its names; None: none is."""
    for name in (spec.name, *spec.aliases):
        if originals.get(name) is not None:
            return originals[name]
    return None


def give_data(parameter: Tensor, data: Tensor) -> None:
    """The parameter's new memory, of another shape, say.

    autograd's node for a parameter demands gradients of the shape that it had when the node was made, and lives as
    long as any result of an earlier forward that somebody keeps, as a module that is pruned keeps its weight. torch
    makes another node where the type has changed.
    """
    if data.shape != parameter.shape:
        other = torch.float32 if parameter.dtype == torch.float16 else torch.float16
        parameter.data = torch.empty(0, dtype=other, device=parameter.device)
    parameter.data = data


def _place_one(spec: ParameterSpec, mesh: Mesh, original: Tensor | None) -> Tensor:
    if original is None or original.is_meta:
        data = torch.zeros(local_shape(spec, mesh), dtype=dtype_of(spec.dtype), device=mesh.device)
    else:
        share = local_share(original.detach(), spec, mesh).to(mesh.device)
        # A share that is a view would keep the whole alive.
        data = share if share.untyped_storage().nbytes() == share.nbytes else share.clone().contiguous()
    if spec.buffer:
        # The model that was captured keeps its own; running statistics here go their own way.
        return data.clone() if original is not None else data
    if not isinstance(original, nn.Parameter):
        return nn.Parameter(data, requires_grad=spec.trainable)
    if original.is_meta:
        return nn.Parameter(data, requires_grad=original.requires_grad)
    gradient, original.grad = original.grad, None
    give_data(original, data)
    if gradient is not None:  # of a module that is part of another model as well, which went back before
        original.grad = local_share(gradient, spec, mesh).to(mesh.device).clone()
    return original


def _replace(stage: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, last = name.rpartition(".")
    owner = stage
    for part in path.split(".") if path else ():
        child = owner._modules[part]
        assert child is not None
        owner = child
    if isinstance(tensor, nn.Parameter):
        owner._parameters[last] = tensor
    else:
        owner._buffers[last] = tensor
