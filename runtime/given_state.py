"""What a script writes into the tensors of ``state_dict()``, as averages of weights are kept, reaches the model.

In one process they are the model's own. Here they are copies, so the model takes on what was written when one is let
go, or at its next call. What is written after the model has trained further would undo that, and is told of instead.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING
from weakref import finalize, ref

from torch import Tensor

from autopart.runtime.loading import tensors_in
from autopart.runtime.state import load_state

if TYPE_CHECKING:
    from autopart.runtime.held_stages import HeldStages


class GivenState:
    """The copies of one model's state that a script may write into still."""

    def __init__(self, model: HeldStages) -> None:
        self._model = ref(model)
        self._ends: list[finalize[..., Tensor]] = []
        self._told = False

    def add(self, state: Mapping[str, Tensor], step: int) -> None:
        """state: by every name. step: of training, in which it was taken."""
        for name, tensor in {id(tensor): (name, tensor) for name, tensor in state.items()}.values():
            if not tensor.is_inference():
                # An alias counts the same writes, and lives for no longer.
                given = _Given(name, tensor.detach(), tensor._version, step)
                end = finalize(tensor, self._take, given)
                end.atexit = False
                self._ends.append(end)

    def take(self) -> None:
        """Takes on what was written since the last time."""
        if self._ends:
            self._ends = [end for end in self._ends if end.alive]
            for end in self._ends:
                if (found := end.peek()) is not None:
                    self._take(*found[2])

    def _take(self, given: _Given) -> None:
        model = self._model()
        if model is None or given.alias._version == given.version:
            return
        given.version = given.alias._version
        if model.steps == given.step:
            state = {given.name: given.alias}
            load_state(model.manifest, model.mesh, tensors_in(model.stages, model.manifest), state, strict=False)
        elif not self._told:
            self._told = True
            warnings.warn(
                f"what was written into {given.name!r} of state_dict() is lost, since the model has trained meanwhile, "
                "and a parallel program gives copies; take a new one, or use load_state_dict",
                stacklevel=2,
            )


class _Given:
    """A tensor of a state, by an alias. version: of the values that the model has."""

    __slots__ = ("alias", "name", "step", "version")

    def __init__(self, name: str, alias: Tensor, version: int, step: int) -> None:
        self.name, self.alias, self.version, self.step = name, alias, version, step
