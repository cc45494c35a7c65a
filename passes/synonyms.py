"""Ops that are another op under a second name, writes through a mask, squeezes: one spelling per meaning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

# Second name -> first; overloads have the same names and arguments.
_NAMES = {
    "absolute": "abs",
    "arccos": "acos",
    "arcsin": "asin",
    "arctan": "atan",
    "arctan2": "atan2",
    "clip": "clamp",
    "concat": "cat",
    "concatenate": "cat",
    "divide": "div",
    "fix": "trunc",
    "greater": "gt",
    "greater_equal": "ge",
    "less": "lt",
    "less_equal": "le",
    "linalg_matmul": "matmul",
    "multiply": "mul",
    "negative": "neg",
    "not_equal": "ne",
    "special_erf": "erf",
    "special_exp2": "exp2",
    "special_expit": "sigmoid",
    "special_expm1": "expm1",
    "special_log1p": "log1p",
    "subtract": "sub",
    "true_divide": "div",
}


def first_name(target: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The op of which this one is a second name; None if it is not."""
    namespace, name = target._schema.name.split("::")
    if namespace != "aten" or name not in _NAMES:
        return None
    return getattr(getattr(aten, _NAMES[name]), target._overloadname, None)


def masked_write(args: tuple[Any, ...], value: torch.Tensor) -> tuple[fx.Node, fx.Node, int] | None:
    """``x[mask] = number``, an ``index_put`` with one mask over the leading dims and one value for all elements.

    Returns the mask, the value and how many dims the mask lacks at the end; None if it is another write.
    """
    indices, values = args[1], args[2]
    accumulate = len(args) > 3 and args[3]
    if accumulate or len(indices) != 1 or not isinstance(indices[0], fx.Node) or not isinstance(values, fx.Node):
        return None
    mask, written = indices[0].meta["val"], values.meta["val"]
    # A size of one would broadcast in a comparison of shapes, where indexing refuses it.
    if mask.dtype != torch.bool or written.dim() or written.dtype != value.dtype:
        return None
    return indices[0], values, value.dim() - mask.dim()


def squeezed(shape: Sequence[Any], given: tuple[Any, ...]) -> list[int]:
    """The dims that a squeeze removes from a tensor of that shape; a size in the batch size is none, whatever it is."""
    dims = given[0] if given else range(len(shape))
    if isinstance(dims, int):
        dims = [dims]
    chosen = {dim % len(shape) for dim in dims} if shape else set()
    return [dim for dim in sorted(chosen) if isinstance(shape[dim], int) and shape[dim] == 1]
