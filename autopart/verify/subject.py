"""A model made ready to be compared: in float64, without dropout, captured."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from autopart.example_inputs import bind
from autopart.flat_model import TARGETS, LossOutput
from autopart.models import LoadedModel
from autopart.other_draws import DRAWS
from autopart.passes.blocks import is_random
from autopart.passes.program import Program
from autopart.precision import float64_throughout, in_float64
from autopart.runtime.structure import flatten, rebuild
from autopart.tracing import capture
from autopart.verify.errors import VerifyError


@dataclass(slots=True)
class Subject:
    """A model made ready for the comparison: a float64 copy without dropout, its inputs, and its capture.

    leaves: the inputs by path. structure: how they form the keyword arguments of ``call``.
    """

    model: nn.Module
    call: Callable[..., Any]
    leaves: dict[str, Any]
    structure: Any
    program: Program
    notes: list[str]
    model_file: str = ""

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {path: leaf for path, leaf in self.leaves.items() if isinstance(leaf, Tensor)}


def prepare(
    model: LoadedModel | nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[..., Tensor] | None = None,
    batch_dims: Mapping[str, int | None] | None = None,
) -> Subject:
    """A float64 copy of the model without dropout, captured. Raises VerifyError when it draws random numbers still."""
    module, args, kwargs, name, model_file = _parts(model, args, kwargs)
    notes: list[str] = []
    module = _copied(module).double().train()
    module._apply(lambda tensor: in_float64(tensor) if tensor.is_complex() else tensor)
    if disable_dropout(module):
        notes.append("dropout is set to 0, since two programs draw different masks")
    args, kwargs = _in_float64((tuple(args), dict(kwargs)))
    with float64_throughout():
        program = capture(module, args, kwargs, loss_fn=loss_fn, batch_dims=batch_dims, name=name, check_eval=False)
    for node in program.graph.nodes:
        if node.op == "call_function" and is_random(node):
            where = node.meta.get("path") or "the model"
            raise VerifyError(f"{where} draws random numbers ({node.target}), so two programs cannot be compared")
    for note in program.notes:
        if note.startswith(DRAWS):
            raise VerifyError(f"{note}; what is drawn differs from call to call, so two programs cannot be compared")
    kwargs = dict(kwargs)
    targets = {TARGETS: kwargs.pop(TARGETS)} if loss_fn is not None else {}
    leaves, structure = flatten({**bind(module.forward, args, kwargs), **targets})

    def call(**inputs: Any) -> Any:
        if loss_fn is None:
            return module(**inputs)
        expected = inputs.pop(TARGETS)
        output = module(**inputs)
        return LossOutput(loss_fn(output, expected), output)

    if program.loss is None:
        notes.append("the model has no loss inside; compared is the sum of its outputs' mean squares")
    return Subject(module, call, leaves, structure, program, notes, model_file)


def _copied(model: nn.Module) -> nn.Module:
    """A deep copy, which torch refuses of what hooks such as ``weight_norm``'s compute and leave behind until the next
    call: of that the values.
    """
    attributes = (value for module in model.modules() for value in vars(module).values())
    computed = {
        id(value): value.detach().clone() for value in attributes if isinstance(value, Tensor) and value.grad_fn
    }
    return copy.deepcopy(model, computed)


def disable_dropout(model: nn.Module) -> int:
    """Sets every dropout probability of a model to 0, in modules and in the configuration that they read.

    Returns how many numbers were changed.
    """
    owners: dict[int, Any] = {}
    for module in model.modules():
        owners[id(module)] = module
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "__dict__"):
            owners[id(config)] = config
    changed = 0
    for owner in owners.values():
        dropout = isinstance(owner, nn.modules.dropout._DropoutNd)
        for name, value in list(vars(owner).items()):
            named = "drop" in name.lower() or (dropout and name == "p")
            if named and isinstance(value, float) and value:
                setattr(owner, name, 0.0)
                changed += 1
    return changed


def capture_as_given(
    model: LoadedModel | nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    loss_fn: Callable[..., Tensor] | None,
    batch_dims: Mapping[str, int | None] | None,
) -> Program:
    """The model's capture in its own precision, dropout included: what a plan's fingerprint is taken from."""
    module, args, kwargs, name, _ = _parts(model, args, kwargs)
    return capture(module, args, kwargs, loss_fn=loss_fn, batch_dims=batch_dims, name=name, check_eval=False)


def _parts(
    model: LoadedModel | nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> tuple[nn.Module, Sequence[Any], dict[str, Any], str, str]:
    """Module, args, kwargs, name, and the user's file that defines it, if it was loaded from one."""
    if isinstance(model, nn.Module):
        return model, args, dict(kwargs or {}), type(model).__name__, ""
    path = "" if model.name.startswith("hf:") else str(Path(model.name.rpartition(":")[0]).expanduser().resolve())
    return model.model, model.args, dict(model.kwargs), model.name, path


def _in_float64(value: Any) -> Any:
    leaves, structure = flatten(value)
    floating = {
        path: in_float64(leaf) if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()) else leaf
        for path, leaf in leaves.items()
    }
    return rebuild(structure, floating)
