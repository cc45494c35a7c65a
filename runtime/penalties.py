"""Gradients that reach a program's parameters beside the model's own, as of a penalty on weights that a script adds.

``sum(p.square().sum() for p in model.parameters())`` is of a rank's own part of the model alone. The loss that it is
added to then differs from rank to rank, and a norm is of a share. Parameters are torch's own, whose ops nobody sees;
but what arrives at one in a backward is then another tensor than the one that was handed out.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from autopart.runtime.hooks import weakly


@dataclass(slots=True)
class _Handed:
    """The gradient that a backward was given for a parameter: which one, and in how many pieces."""

    backward: int
    place: tuple[int, int]
    pieces: int = 1


_handed: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""By parameter, which several programs may share."""


class Penalties:
    """Warns once, where a script's backward reaches one of these in another way than through the model."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.resting = False  # the program's own backwards are running
        self._told = False
        self._parameters = dict(parameters)
        for name, parameter in self._parameters.items():
            if parameter.requires_grad:
                parameter.register_hook(weakly(self._arrived, name))

    def hand_out(self, gradients: Sequence[Tensor | None], parameters: Sequence[nn.Parameter]) -> None:
        """The running backward is given these."""
        if self._told:
            return
        backward = torch._C._current_graph_task_id()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                known = _handed.get(parameter)
                if known is not None and known.backward == backward:
                    known.pieces += 1
                else:
                    _handed[parameter] = _Handed(backward, _place(gradient))

    def _arrived(self, name: str, gradient: Tensor) -> None:
        parameter = self._parameters[name]
        hooks = parameter._backward_hooks
        if self._told or self.resting or (hooks is not None and len(hooks) > 1):  # others may have changed it
            return
        known = _handed.get(parameter)
        given = known is not None and known.backward == torch._C._current_graph_task_id()
        if known is not None and given and (known.pieces > 1 or known.place == _place(gradient)):
            return
        self._told = True
        warnings.warn(
            f"a loss reaches the parameter {name!r} beside the model, as a penalty on weights does: this rank has its "
            "own part of the model alone, so that what is added up from parameters is not of the whole model, and "
            "other ranks get another loss; gradients are right where each element has its own term, as in a sum of "
            "squares, and a norm's are those of shares. Use the optimizer's weight_decay, or add such a term to the "
            "loss inside the model",
            stacklevel=6,
        )


def _place(tensor: Tensor) -> tuple[int, int]:
    """Another one where something was added."""
    return tensor.data_ptr(), tensor._version
