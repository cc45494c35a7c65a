"""The model as it is traced: a flat list of tensors in and out, with what it took and returned beside them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from autopart import ctc_capture
from autopart.assumed_branches import Decisions
from autopart.batch_pieces import BatchPieces
from autopart.kept_buffers import replaced_buffers_written
from autopart.meta_capture import NumbersOnMeta, is_on_meta
from autopart.own_numbers import Changed, Numbers
from autopart.runtime.structure import flatten, rebuild
from autopart.set_by_forward import SetTensor, SetTensors
from autopart.taken_along import TakenAlong

TARGETS = "targets"


class LossOutput(NamedTuple):
    """What a model with a separate ``loss_fn`` returns: the loss, and the model's own output."""

    loss: torch.Tensor
    output: Any


class Returned:
    """What the traced forward returned: named leaves and the structure around them. changed: numbers of the model's.
    attributes: those that it set to tensors.
    """

    def __init__(self) -> None:
        self.leaves: dict[str, Any] = {}
        self.structure: Any = None
        self.changed: list[Changed] = []
        self.attributes: tuple[SetTensor, ...] = ()


class FlatModel(nn.Module):
    """The model with a flat list of tensors in and out."""

    def __init__(
        self, model: nn.Module, loss_fn: Callable[..., torch.Tensor] | None, structure: Any, leaves: dict[str, Any]
    ):
        super().__init__()
        self.model = model
        self.loss_function = loss_fn
        self._structure = structure
        self._leaves = leaves
        # export restores attributes that a forward assigns, so the outputs are kept in an object
        self.returned = Returned()
        self.decisions: Decisions | None = None
        self._on_meta = is_on_meta(self)
        # tuples, which are no submodules; found here, as layers may be away while the forward runs
        self._with_buffers = tuple((path, module) for path, module in self.named_modules() if module._buffers)
        self.replaced: set[str] = set()  # names of buffers, filled in place like what is returned

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        remaining = iter(tensors)
        leaves = {
            path: next(remaining) if isinstance(leaf, torch.Tensor) else leaf for path, leaf in self._leaves.items()
        }
        kwargs = rebuild(self._structure, leaves)
        decisions = self.decisions
        if decisions is not None:
            decisions.begin()
        modules = [(module_path(path), module) for path, module in self.named_modules() if module is not self]
        numbers, attributes = Numbers(modules), SetTensors(modules)
        with (
            NumbersOnMeta() if self._on_meta else nullcontext(),
            ctc_capture.RowsOfTargets(),
            BatchPieces(),
            TakenAlong(),
            nullcontext() if decisions is None else decisions,
            replaced_buffers_written(self._with_buffers, self.replaced),
        ):
            if self.loss_function is None:
                result = self.model(**kwargs)
            else:
                targets = kwargs.pop(TARGETS)
                result = self.model(**kwargs)
                result = LossOutput(self.loss_function(result, targets), result)
            self.returned.changed, self.returned.attributes = numbers.changed(), attributes.found()
        self.returned.leaves, self.returned.structure = flatten(result)
        found = [leaf for leaf in self.returned.leaves.values() if isinstance(leaf, torch.Tensor)]
        return found if decisions is None else [*found, *decisions.conditions]


def stripped(qualified: str) -> str:
    """A qualified name of the user's model."""
    return qualified.removeprefix("model.")


def module_path(path: str) -> str:
    """A module's path in the user's model."""
    return "" if path == "model" else stripped(path)
