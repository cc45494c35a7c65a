"""The state of an optimizer that a script saves itself says of which part of the model it is.

A rank has its own part of the model, and ``optimizer.state_dict()`` the state of that alone. Where one rank writes it
to a file and all read it, shapes often fit and the others would train on with averages of other weights. So a program's
optimizers put into each group of their state dicts what this rank had of the group's parameters, and a step with state
that is of other parts is refused. State of the whole model, as of replicas without ZeRO, fits everywhere.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from autopart.runtime.errors import PlanError
from autopart.runtime.loading import cuts_of
from autopart.runtime.manifest import ParameterSpec
from autopart.runtime.mesh import Mesh
from autopart.runtime.shares import Box, cut_boxes

PART = "autopart_part"
"""The option of a group in a state dict; in an optimizer's own groups from when it is loaded to the next step."""


class SavedParts:
    """What this rank has of the parameters of one program."""

    def __init__(self, specs: Mapping[str, ParameterSpec], mesh: Mesh, parameters: Mapping[str, nn.Parameter]) -> None:
        self._rank, self._ranks = mesh.rank, mesh.world_size
        self._parts = {id(parameter): _part(specs[name], mesh) for name, parameter in parameters.items()}
        self._watched: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Before a step: raises PlanError for loaded state of other parts. From then on state dicts say theirs."""
        for index, group in enumerate(optimizer.param_groups):
            saved, own = group.get(PART, "").split("; "), self._of(group)
            if saved != [""] and own is not None and _number(own) not in map(_number, saved):
                raise PlanError(
                    f"group {index} of {type(optimizer).__name__} was given state that {saved[0].partition(',')[0]} "
                    f"saved, which had other parts of the model than rank {self._rank} of {self._ranks}, this one: "
                    "optimizer.state_dict() is of a rank's own part. Save and load with "
                    "autopart.runtime.checkpoint.save(folder, model, optimizer) and load, which go on under any plan, "
                    "or have every rank write and read a file of its own, under the same plan"
                )
        if optimizer not in self._watched and any(map(self._of, optimizer.param_groups)):
            self._watched.add(optimizer)
            optimizer.register_state_dict_post_hook(_Teller(self))

    def tell(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Puts into a state dict what it is of, unless that was loaded and not used yet."""
        for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
            own = self._of(group)
            if own is not None and PART not in group:  # there from another program whose parameters the group has too
                saved[PART] = "; ".join([*filter(None, [saved.get(PART)]), own])

    def _of(self, group: Mapping[str, Any]) -> str | None:
        """In words who saves, and a number of what it has; None where no parameter is this program's."""
        parts = [self._parts.get(id(parameter), "") for parameter in group["params"]]
        if not any(parts):
            return None
        return f"rank {self._rank} of {self._ranks}, {hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}"


def forget(optimizer: torch.optim.Optimizer) -> None:
    """What was loaded has been checked, or is replaced."""
    for group in optimizer.param_groups:
        group.pop(PART, None)


def _number(part: str) -> str:
    return part.rpartition(" ")[2]


class _Teller:
    """A hook that holds a program weakly, as optimizers may outlive it."""

    def __init__(self, parts: SavedParts) -> None:
        self._parts = weakref.ref(parts)

    def __call__(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        parts = self._parts()
        if parts is not None:
            parts.tell(optimizer, state)


def _part(spec: ParameterSpec, mesh: Mesh) -> str:
    return f"{spec.name} {boxes_on(spec, mesh)}"


def boxes_on(spec: ParameterSpec, mesh: Mesh) -> tuple[Box, ...]:
    """What this rank has of a parameter that it holds."""
    return cut_boxes(spec.shape, [(cut, axis.index, axis.size) for cut, axis in cuts_of(spec, mesh)])
