"""Deep copies of a parallelized model, made before it is planned: those that are still alike are planned with it.

Averages of weights, teachers and momentum encoders go over the parameters of both models in turn. So a copy becomes the
same program, divided alike, when the first of them is called, or parameters of other layers would meet.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopart.runtime.mesh import job_size
from autopart.watched_attributes import attributes

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
Model = TypeVar("Model", bound=nn.Module)


class Copies(list[ref[Model]]):
    """A model and its copies, in the order in which they were made, which is the same on all ranks."""

    def present(self, wanted: Iterable[Model]) -> list[Model]:
        """Of these the ones that all ranks want: garbage is collected when each likes. All ranks call it."""
        numbers = {id(model): at for at, held in enumerate(self) if (model := held()) is not None}
        mine = {numbers[id(model)]: model for model in wanted}
        found: list[list[int]] = [[*mine]] * job_size()
        if job_size() > 1:
            dist.all_gather_object(found, [*mine])
        return [mine[at] for at in sorted(set(mine).intersection(*found))]


def alike(one: nn.Module, other: nn.Module) -> bool:
    """Whether a program of one is right for the other. What cannot be compared is unlike."""
    pairs = [*zip(one.named_modules(remove_duplicate=False), other.named_modules(remove_duplicate=False), strict=False)]
    if len(pairs) != len([*other.named_modules(remove_duplicate=False)]) or not trained(other) <= trained(one):
        return False
    if [path for (path, _), _ in pairs] != [path for _, (path, _) in pairs]:
        return False
    return all(
        type(a) is type(b)
        and (a.training == one.training) == (b.training == other.training)
        and all([*vars(a)[name].values()] == [*vars(b)[name].values()] for name in _HOOKS)
        and _kinds(a) == _kinds(b)
        and _equal(dict(attributes(a)), dict(attributes(b)))
        for (_, a), (_, b) in pairs
    )


def _kinds(module: nn.Module) -> tuple[Any, ...]:
    named = [*module._parameters.items(), *module._buffers.items()]
    kinds = [
        (name,) if item is None else (name, type(item), tuple(item.shape), item.stride(), item.dtype, item.device)
        for name, item in named
    ]
    return kinds, module._non_persistent_buffers_set


def _equal(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    try:
        return ours.keys() == theirs.keys() and all(
            torch.equal(value, theirs[name]) if isinstance(value, Tensor) else bool(value == theirs[name])
            for name, value in ours.items()
        )
    except Exception:  # of any object's own comparison
        return False


def trained(model: nn.Module) -> set[str]:
    """The names of parameters that are."""
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}
