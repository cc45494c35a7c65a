"""What a rank holds of a model and its optimizers, as checkpoints see it: by original names, whatever the plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopart.runtime.errors import CheckpointError
from autopart.runtime.loading import cuts_of
from autopart.runtime.manifest import ParameterSpec
from autopart.runtime.mesh import Axis, Mesh
from autopart.runtime.module import ParallelModule
from autopart.runtime.rng import derive_seed
from autopart.runtime.saved_parts import PART, forget
from autopart.runtime.schedule import NAMES
from autopart.runtime.shares import Box, Piece, cut_boxes, whole

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


@runtime_checkable
class Starting(Protocol):
    """A model that becomes a program at its first call, as ``autopart.parallelize`` returns it."""

    original: nn.Module
    parallel: ParallelModule | None

    def when_started(self, callback: Callable[[], None]) -> None: ...


@dataclass(frozen=True, slots=True)
class Entry:
    """A parameter or buffer of the whole model.

    tensor: this rank's share, made of ``boxes``; None when other stages hold it. writes: this rank is the one of those
    with the same share that saves it.
    """

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[Box, ...]
    writes: bool
    tensor: Tensor | None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    @property
    def divided(self) -> bool:
        return self.boxes != whole(self.shape)

    def piece(self, tensor: Tensor) -> Piece:
        return Piece(self.shape, self.boxes, tensor)


@dataclass(frozen=True, slots=True)
class Holding:
    """All entries by name, and the names of the parameter objects that an optimizer may know."""

    entries: dict[str, Entry]
    names: dict[int, str]
    program: ParallelModule | None

    @property
    def fingerprint(self) -> str:
        return "" if self.program is None else self.program.manifest.fingerprint

    @property
    def outline(self) -> str:
        """Equal for programs that differ in the sizes of their inputs only."""
        return "" if self.program is None else self.program.manifest.outline

    @property
    def plan(self) -> dict[str, Any]:
        """How the model is divided, for people to read."""
        if self.program is None:
            return {"world_size": 1, "stages": 1, "mesh": {}, "microbatches": 1, "schedule": ""}
        manifest = self.program.manifest
        return {
            "world_size": manifest.world_size,
            "stages": len(manifest.stages),
            "mesh": dict(manifest.stages[0].mesh),
            "microbatches": manifest.microbatches,
            "schedule": manifest.schedule if manifest.schedule in NAMES else "own",
        }


def holding_of(model: nn.Module) -> Holding:
    """What this rank holds of a program, of what ``parallelize`` returned, or of a plain model."""
    if isinstance(model, ParallelModule):
        return _of_program(model, model)
    if isinstance(model, Starting):
        return _of_plain(model.original) if model.parallel is None else _of_program(model.parallel, model.original)
    return _of_plain(model)


def _of_program(model: ParallelModule, original: nn.Module) -> Holding:
    manifest, mesh = model.manifest, model.mesh
    main = {name: spec.name for spec in manifest.parameters for name in (spec.name, *spec.aliases)}
    own = model.own_tensors()
    entries = {
        spec.name: Entry(
            spec.name,
            spec.aliases,
            spec.shape,
            getattr(torch, spec.dtype),
            cut_boxes(spec.shape, [(cut, axis.index, axis.size) for cut, axis in cuts_of(spec, mesh)]),
            _writes(spec, mesh),
            own.get(spec.name),
        )
        for spec in manifest.parameters
        if spec.persistent
    }
    # The original's parameter objects are the program's own, and empty ones of other stages.
    names = {id(tensor): main.get(name, name) for name, tensor in original.named_parameters(remove_duplicate=False)}
    names.update({id(tensor): name for name, tensor in (*own.items(), *model.elsewhere.items())})
    return Holding(entries, names, model)


def _writes(spec: ParameterSpec, mesh: Mesh) -> bool:
    """Of equal copies one is written; which one is drawn by name, so that the ranks share the work."""

    def drawn(size: int, axis: str) -> int:
        return derive_seed(axis, spec.name) % size

    def chosen(axis: Axis) -> bool:
        return axis.index == drawn(axis.size, axis.name)

    sharded = {axis.name for _, axis in cuts_of(spec, mesh)}
    copies = (axis for axis in (mesh.data, *mesh.tensor_axes) if axis.name not in sharded)
    return spec.stages[drawn(len(spec.stages), "stage")] in mesh.stages and all(map(chosen, copies))


def _of_plain(model: nn.Module) -> Holding:
    first = not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
    persistent = set(model.state_dict(keep_vars=True))
    groups: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for members in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, tensor in members:
            if name in persistent:
                groups.setdefault(id(tensor), []).append(name)
                tensors[id(tensor)] = tensor
    entries = {
        names[0]: Entry(
            names[0],
            tuple(names[1:]),
            tuple(tensors[key].shape),
            tensors[key].dtype,
            whole(tensors[key].shape),
            first,
            tensors[key],
        )
        for key, names in groups.items()
    }
    return Holding(entries, {key: names[0] for key, names in groups.items()}, None)


# --- Optimizers ---

Slot = tuple[torch.optim.Optimizer, nn.Parameter]


def optimizers_in(optimizer: Optimizers) -> list[torch.optim.Optimizer]:
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)


def slots_of(holding: Holding, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Slot]:
    """The parameters that optimizers update on this rank, by name.

    Raises CheckpointError for a parameter that the model does not have, or that two optimizers have.
    """
    slots: dict[str, Slot] = {}
    for optimizer in optimizers:
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                name = holding.names.get(id(parameter))
                if name is None and parameter.numel():
                    raise CheckpointError(
                        f"group {index} of {type(optimizer).__name__} has a parameter of the shape "
                        f"{list(parameter.shape)} that the model does not have; make the optimizer from its parameters"
                    )
                if name is None or name not in holding.entries:
                    continue
                if name in slots:
                    raise CheckpointError(f"{name} is in two optimizers, so its state has no single name")
                slots[name] = (optimizer, parameter)
    return slots


def options_of(holding: Holding, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, dict[str, Any]]:
    """The options (learning rate, …) of each parameter's group, by the parameter's name."""
    options: dict[str, dict[str, Any]] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            found = {key: value for key, value in group.items() if key not in ("params", "param_names", PART)}
            known = (holding.names.get(id(parameter)) for parameter in group["params"])
            options.update({name: found for name in known if name is not None})
    return options


def set_options(
    holding: Holding, optimizers: Sequence[torch.optim.Optimizer], options: Mapping[str, dict[str, Any]]
) -> None:
    """Gives each group the options that its parameters were saved with.

    Raises CheckpointError when a group's parameters were in groups with other options.
    """
    for optimizer in optimizers:
        forget(optimizer)
        for index, group in enumerate(optimizer.param_groups):
            known = [holding.names.get(id(parameter)) for parameter in group["params"]]
            saved = [options[name] for name in known if name is not None and name in options]
            for found in saved[1:]:
                differing = [k for k in saved[0] if found is not saved[0] and repr(found.get(k)) != repr(saved[0][k])]
                if differing:
                    raise CheckpointError(
                        f"group {index} of {type(optimizer).__name__} joins parameters that were saved with different "
                        f"{', '.join(differing)}; make the optimizer with the groups that it was saved with"
                    )
            if saved:
                group.update(saved[0])
