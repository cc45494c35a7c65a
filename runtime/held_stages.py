"""The stages that a rank holds, as a module whose parameters, buffers and state go by the original's names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from autopart.runtime.errors import PlanError
from autopart.runtime.given_state import GivenState
from autopart.runtime.loading import tensors_in
from autopart.runtime.manifest import Manifest, ParameterSpec
from autopart.runtime.mesh import Mesh
from autopart.runtime.state import gather_state, load_state
from autopart.runtime.traffic import Traffic


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
        # Empty ones of other ranks by their specs' names, in no module, so as not to be registered.
        self.elsewhere: Mapping[str, Tensor] = {}
        # Names of outputs that calls in training do not return.
        self.none_for: tuple[str, ...] = ()
        # Names of the original's state dict in its order; empty: unknown.
        self.state_order: Sequence[str] = ()

    @property
    def traffic(self) -> Traffic:
        """What this rank has exchanged so far."""
        return self.mesh.traffic

    @property
    def data_rank(self) -> int:
        """Which part of the data this rank is to be fed with ``batch="local"``: equal on ranks of one replica."""
        return self.mesh.data.index

    @property
    def data_world_size(self) -> int:
        """How many parts the data has: the replicas."""
        return self.mesh.data.size

    @property
    def data_shares(self) -> tuple[int, ...]:
        """How large the parts are beside each other: (1, 1), or (3, 1) where the first has three of four samples."""
        return self.manifest.stages[self.mesh.stages[0]].replica_shares

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Those of :meth:`named_parameters`."""
        return (parameter for _, parameter in self.named_parameters(recurse=recurse))

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """All of the model's under their original names, in its order: this rank's shares, others' without elements.

        So the list is the same on all ranks, where loops pair it with another one, and as long before the model is
        planned as after, where optimizers number what they have. Empty ones get no gradients.
        """
        specs = {spec.name: spec for spec in self.manifest.parameters}
        in_order = [specs[name] for name in self.manifest.parameter_order]
        for name, tensor in self._named(in_order, prefix, recurse, remove_duplicate):
            assert isinstance(tensor, nn.Parameter)
            yield name, tensor

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """All of the program's under their original names: this rank's shares, others' without elements."""
        buffers = [spec for spec in self.manifest.parameters if spec.buffer]
        return self._named(buffers, prefix, recurse, remove_duplicate)

    def _named(
        self, specs: Sequence[ParameterSpec], prefix: str, recurse: bool, remove_duplicate: bool
    ) -> Iterator[tuple[str, Tensor]]:
        found = {**self.elsewhere, **self.own_tensors()}
        for spec in specs:
            for name in (spec.name,) if remove_duplicate else (spec.name, *spec.aliases):
                if recurse or "." not in name:
                    yield f"{prefix}.{name}" if prefix else name, found[spec.name]

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
        state = gather_state(self.manifest, self.mesh, self.own_tensors(), rank0_only)
        # Averages of weights go over two models' states in turn, one of which need not be parallelized.
        return {**{name: state[name] for name in self.state_order if name in state}, **state}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads the original's state dict: each rank takes its share. Raises InputError where it does not fit."""
        if assign:
            raise PlanError("load_state_dict(assign=True) would undo the division of the weights; leave assign out")
        return _IncompatibleKeys(*load_state(self.manifest, self.mesh, self.own_tensors(), state_dict, strict))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> HeldStages:
        """What ``to``, ``half`` and their like call. Raises PlanError where the function would change a tensor."""
        for name, tensor in self.own_tensors().items():
            probe = fn(tensor.new_empty(0))
            if (probe.dtype, probe.device) != (tensor.dtype, tensor.device):
                raise PlanError(
                    f"{name} is {tensor.dtype} on {tensor.device}, which the model was planned for, and would become "
                    f"{probe.dtype} on {probe.device}; convert the model before it is planned"
                )
        return self

    def own_tensors(self) -> dict[str, Tensor]:
        """This rank's parameters and buffers by their spec's name."""
        self.take_writes()
        return tensors_in(self.stages, self.manifest)

    def own_buffers(self) -> dict[str, Tensor]:
        """This rank's buffers, as they are now: a stage may assign a new tensor to one that it updates."""
        return {name: tensor for name, tensor in self.own_tensors().items() if not isinstance(tensor, nn.Parameter)}

    def _parameters_elsewhere(self) -> list[nn.Parameter]:
        return [tensor for tensor in self.elsewhere.values() if isinstance(tensor, nn.Parameter)]
