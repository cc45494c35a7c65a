"""The stages that a rank holds, as a module whose parameters, buffers and state go by the original's names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from autopart.runtime.errors import PlanError
from autopart.runtime.given_state import GivenState
from autopart.runtime.loading import tensors_in
from autopart.runtime.manifest import Manifest
from autopart.runtime.mesh import Mesh
from autopart.runtime.state import gather_state, load_state


class HeldStages(nn.Module):
    """A rank's share of the model.

    stages: this rank's, several under a schedule with virtual stages.
    """

    def __init__(self, stages: Mapping[int, nn.Module], manifest: Manifest, mesh: Mesh) -> None:
        super().__init__()
        self.manifest = manifest
        self.mesh = mesh
        # Calls in training so far; the random numbers follow from it.
        self.steps = 0
        self._given = GivenState(self)
        self.taken_too: Callable[[], None] = lambda: None  # from the original's buffers
        self.stages = nn.ModuleList(stages.values())
        self._nothing = (nn.Parameter(torch.empty(0, device=mesh.device)),)  # in a tuple, so as not to be registered

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """This rank's parameters; where only other ranks train any, one of no elements besides, for an optimizer."""
        trains, own = False, set()
        for name, parameter in self.named_parameters(recurse=recurse):
            trains = trains or parameter.requires_grad
            own.add(name)
            yield parameter
        if recurse and not trains and self._others_train(own):
            yield from self._nothing

    def _others_train(self, own: Set[str]) -> bool:
        """Whether parameters of other ranks than this one's are trained, unless a script has frozen them."""
        specs = [s for s in self.manifest.parameters if s.trainable and own.isdisjoint((s.name, *s.aliases))]
        elsewhere = self.mesh.elsewhere
        return bool(specs) and (not elsewhere or any(parameter.requires_grad for parameter in elsewhere))

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters (its shares of its stages) under their original names."""
        self.take_writes()
        seen: set[Tensor] = set()
        for stage in self.stages:
            for name, parameter in stage.named_parameters(prefix, recurse, remove_duplicate):
                if not (remove_duplicate and parameter in seen):
                    seen.add(parameter)
                    yield name, parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """This rank's buffers under their original names."""
        self.take_writes()
        seen: set[Tensor] = set()
        for stage in self.stages:
            for name, buffer in stage.named_buffers(prefix, recurse, remove_duplicate):
                if not (remove_duplicate and buffer in seen):
                    seen.add(buffer)
                    yield name, buffer

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """The whole model's state on every rank; all ranks have to call it. See :meth:`full_state_dict`."""
        state = self.full_state_dict()
        self._given.add(state, self.steps)
        destination = {} if destination is None else destination
        destination.update({prefix + name: tensor for name, tensor in state.items()})
        return destination

    def take_writes(self) -> None:
        """Takes on what a script wrote into the original's buffers, or those of :meth:`state_dict` (given_state.py)."""
        self.taken_too()
        self._given.take()

    def full_state_dict(self, rank0_only: bool = False) -> dict[str, Tensor]:
        """The whole model's state as full tensors on the CPU, as the original's ``state_dict()``. All ranks call it.

        rank0_only: the other ranks return an empty dict.
        """
        return gather_state(self.manifest, self.mesh, self._own_tensors(), rank0_only)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads the original's state dict: each rank takes its share. Raises InputError where it does not fit."""
        if assign:
            raise PlanError("load_state_dict(assign=True) would undo the division of the weights; leave assign out")
        return _IncompatibleKeys(*load_state(self.manifest, self.mesh, self._own_tensors(), state_dict, strict))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> HeldStages:
        """What ``to``, ``half`` and their like call. Raises PlanError where the function would change a tensor."""
        for name, tensor in (*self.named_parameters(), *self.named_buffers()):
            probe = fn(tensor.new_empty(0))
            if (probe.dtype, probe.device) != (tensor.dtype, tensor.device):
                raise PlanError(
                    f"{name} is {tensor.dtype} on {tensor.device}, which the model was planned for, and would become "
                    f"{probe.dtype} on {probe.device}; convert the model before it is planned"
                )
        return self

    def _own_tensors(self) -> dict[str, Tensor]:
        """This rank's parameters and buffers by their spec's name."""
        self.take_writes()
        return tensors_in(self.stages, self.manifest)

    def _buffers_by_name(self) -> dict[str, Tensor]:
        # Read anew: a stage may assign a new tensor to a buffer that it updates.
        return dict(self.named_buffers())
