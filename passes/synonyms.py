"""Ops that are another op under a second name, the kinds that capture spells alike, writes through a mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

# Ops by what normalize writes for them.
RESHAPES = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.view_as.default,
    aten.reshape_as.default,
    aten.ravel.default,
}
CASTS = {
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.device,
    aten.to.other,
    aten._to_copy.default,
    aten.type_as.default,
}
COPIES = {aten.alias.default, aten.lift_fresh_copy.default, aten.lift_fresh.default, aten.lift.default}
# Reshapings that make a copy where a view is not possible.
MAY_COPY = {
    aten.reshape.default,
    aten.flatten.using_ints,
    aten.reshape_as.default,
    aten.ravel.default,
    aten.contiguous.default,
}
SPLITS = {aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.split.sizes}
BITWISE = {
    aten.__and__.Tensor: aten.bitwise_and.Tensor,
    aten.__and__.Scalar: aten.bitwise_and.Scalar,
    aten.__or__.Tensor: aten.bitwise_or.Tensor,
    aten.__or__.Scalar: aten.bitwise_or.Scalar,
    aten.__xor__.Tensor: aten.bitwise_xor.Tensor,
    aten.__xor__.Scalar: aten.bitwise_xor.Scalar,
}
TRANSPOSES = {
    aten.t.default: (0, 1),
    aten.mT.default: (-2, -1),
    aten.numpy_T.default: (0, 1),
    aten.adjoint.default: (-2, -1),
    aten.mH.default: (-2, -1),
    aten.matrix_H.default: (-2, -1),
}
# Of complex numbers they are conjugated too.
ADJOINTS = {aten.adjoint.default, aten.mH.default, aten.matrix_H.default}
SQUEEZES = {aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims}
SWAPS = {aten.swapaxes.default, aten.swapdims.default}

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
    """``x[mask] = y``, an ``index_put`` with one mask over the leading dims, where the places know what they get: one
    value for all elements, one for each of the dims behind the mask's (a mask token), or ``y[mask]`` of the same mask.

    Returns the mask, a value that broadcasts to ``x``, and how many dims the mask lacks at the end; None for other
    writes.
    """
    indices, values = args[1], args[2]
    accumulate = len(args) > 3 and args[3]
    if accumulate or len(indices) != 1 or not isinstance(indices[0], fx.Node) or not isinstance(values, fx.Node):
        return None
    mask, written = indices[0].meta["val"], values.meta["val"]
    # A size of one would broadcast in a comparison of shapes, where indexing refuses it.
    if mask.dtype != torch.bool or written.dtype != value.dtype:
        return None
    behind = value.dim() - mask.dim()
    if values.target is aten.index.Tensor and not values.kwargs:
        source, picked = values.args
        assert isinstance(source, fx.Node) and isinstance(picked, list | tuple)
        fits = len(picked) == 1 and _same(picked[0], indices[0]) and source.meta["val"].shape == value.shape
        return (indices[0], source, behind) if fits else None
    # of more dims the first are the picked places'
    return (indices[0], values, behind) if written.dim() <= behind else None


def _same(one: Any, other: Any) -> bool:
    """Whether two nodes have the same value: one op of the same operands, written twice."""
    if one is other:
        return True
    if not (isinstance(one, fx.Node) and isinstance(other, fx.Node)) or one.op != "call_function":
        return False
    drawn = isinstance(one.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in one.target.tags
    return not drawn and (one.target, one.args, one.kwargs) == (other.target, other.args, other.kwargs)


def tiles(dims: Sequence[Any], of: int) -> list[Any]:
    """The arguments of ``repeat`` for ``tile``, which takes fewer than the tensor has dims: the last ones."""
    return [*[1] * (of - len(dims)), *dims]


def squeezed(shape: Sequence[Any], given: tuple[Any, ...]) -> list[int]:
    """The dims that a squeeze removes from a tensor of that shape; a size in the batch size is none, whatever it is."""
    dims = given[0] if given else range(len(shape))
    if isinstance(dims, int):
        dims = [dims]
    chosen = {dim % len(shape) for dim in dims} if shape else set()
    return [dim for dim in sorted(chosen) if isinstance(shape[dim], int) and shape[dim] == 1]
