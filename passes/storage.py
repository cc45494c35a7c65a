"""Which values share memory: views, and ops that return their input unchanged.

:func:`is_view` tells whether eager PyTorch makes no new tensor for an op; :func:`storage_of` follows views back to the
value that owns the memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autopart.passes.graph import Value, input_nodes, is_getitem, value_of
from autopart.passes.program import Role
from autopart.passes.sizes import extent
from autopart.runtime.placement import Placements

_ALWAYS = {
    *("transpose", "t", "permute", "expand", "expand_as", "slice", "select", "unsqueeze", "squeeze", "narrow"),
    *("split", "split_with_sizes", "chunk", "tensor_split", "unbind", "detach", "alias", "unfold", "diagonal"),
    *("movedim", "swapaxes", "view", "view_as", "as_strided", "mT", "numpy_T", "adjoint", "mH", "conj", "_conj"),
    *("unflatten", "lift_fresh", "swapdims", "moveaxis", "hsplit", "vsplit", "dsplit", "real", "imag", "positive"),
    *("view_as_real", "view_as_complex"),
}
_PAIRWISE = {"broadcast_tensors", "meshgrid", "atleast_1d", "atleast_2d", "atleast_3d"}
"""Output number i is a view of tensor argument number i."""
_IF_STRIDES_ALLOW = {"reshape", "flatten", "_unsafe_view", "contiguous", "reshape_as", "ravel", "clone"}
_CASTS = {"to", "type_as", "_to_copy", "float", "_cast"}
_SHARING = ("sum_gradients", "keep_gradients_on_first")
"""Transitions that return their argument's own memory."""
Sizes = tuple[int, ...]
_SAMPLE_BATCH = 3
"""Strides are compared for this many samples; a batch of one would make dims look mergeable."""


def op_name(node: fx.Node) -> str:
    """The ATen name without overload (``linear``), or the function's name for other targets."""
    target: Any = node.target
    packet = getattr(target, "overloadpacket", None)
    if packet is not None:
        return str(packet.__name__)
    return str(getattr(target, "__name__", target))


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """An argument given by position or by name."""
    if position < len(node.args):
        return node.args[position]
    return node.kwargs.get(name, default)


def is_view(node: fx.Node) -> bool:
    """Whether the op's outputs are memory of its tensor arguments, reshaped or unchanged."""
    # transitions of a rank's graph, of which some are called like views, make tensors
    if node.op != "call_function" or "transition" in node.meta:
        return False
    name = op_name(node)
    if name in _ALWAYS or name in _PAIRWISE:
        return True
    if name in ("dropout", "feature_dropout", "alpha_dropout"):
        return not argument(node, 2, "train", True) or argument(node, 1, "p", 0.5) == 0
    if name in _CASTS:
        source, result = input_nodes(node)[0].meta["val"], node.meta["val"]
        forced = bool(node.kwargs.get("copy", False)) or name == "_to_copy"
        return not forced and source.dtype == result.dtype and source.device == result.device
    if name in _IF_STRIDES_ALLOW:
        return _keeps_memory(node, name)
    return False


def shares_memory(node: fx.Node) -> bool:
    """Whether a node is a collective that returns its argument's own memory."""
    return "transition" in node.meta and node.meta["transition"][1].name in _SHARING


def _keeps_memory(node: fx.Node, name: str) -> bool:
    if name == "clone":
        return False
    source = value_of(input_nodes(node)[0])
    there, wanted = _layout(source), _layout(Value(node))
    if there is None or wanted is None:
        return False
    return _is_contiguous(*there) if name == "contiguous" else _can_view(*there, wanted[0])


@functools.lru_cache(maxsize=4096)
def _can_view(sizes: Sizes, strides: Sizes, shape: Sizes) -> bool:
    """As :func:`can_view`, of which a graph has few kinds."""
    return can_view(torch.empty_strided(sizes, strides, device="meta"), shape)


@functools.lru_cache(maxsize=4096)
def _is_contiguous(sizes: Sizes, strides: Sizes) -> bool:
    return torch.empty_strided(sizes, strides, device="meta").is_contiguous()


def can_view(tensor: torch.Tensor, shape: Sequence[int]) -> bool:
    """Whether ``tensor.view(shape)`` needs no copy."""
    try:
        tensor.view(tuple(shape))
    except RuntimeError:
        return False
    return True


def merges_leading_dims(value: Value, last: int = 2) -> bool:
    """Whether all dims but the ``last`` can be seen as one without a copy, as batched matmul needs."""
    there = laid_out(value)
    return there is not None and can_view(there, (math.prod(there.shape[:-last]), *there.shape[-last:]))


def is_contiguous(value: Value) -> bool:
    """Whether a value's memory is in the order of its dims, as far as that is known."""
    there = laid_out(value)
    return there is None or there.is_contiguous()


def laid_out(value: Value) -> torch.Tensor | None:
    """A tensor on meta with the sizes and strides of a value, for some samples; None where these are not known."""
    there = _layout(value)
    return None if there is None else torch.empty_strided(*there, device="meta")


def _layout(value: Value) -> tuple[Sizes, Sizes] | None:
    """Sizes and strides of a value, for some samples; None where these are not known.

    In a rank's graph (:mod:`autopart.passes.shard`) it is the rank's part, whose dims lie in the order of the whole's,
    as dense; what a collective makes, and what a stage receives, is contiguous.
    """
    axes: Sequence[tuple[str, int]] = value.node.meta.get("axes", ())
    parts = [size for _, size in axes]
    samples = _SAMPLE_BATCH * math.prod(parts)
    sizes, strides = concrete(value.fake.shape, samples), concrete(value.fake.stride(), samples)
    if sizes is None or strides is None:
        return None
    if axes:
        placements = value.node.meta["placements"]
        own: Placements = placements[value.index] if isinstance(placements[0], tuple) else placements
        sizes, strides = _share(sizes, strides, own, parts)
    received = value.node.op == "placeholder" and value.node.meta.get("role") is Role.RECEIVED
    if received or ("transition" in value.node.meta and not shares_memory(value.node)):
        strides = list(torch.empty(sizes, device="meta").stride())
    return tuple(sizes), tuple(strides)


def _share(
    sizes: Sequence[int], strides: Sequence[int], placements: Placements, parts: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Sizes and strides of a rank's part of a tensor: every dim begins as far behind the one inside of it as before."""
    own, found = list(sizes), list(strides)
    for placement, count in zip(placements, parts, strict=True):
        if placement.divides:
            own[placement.dim] //= count
    whole_end, own_end = 1, 1
    for dim in sorted(range(len(sizes)), key=lambda dim: (strides[dim], sizes[dim])):
        if strides[dim]:
            found[dim] = -(-strides[dim] * own_end // whole_end)
            whole_end, own_end = strides[dim] * sizes[dim], found[dim] * own[dim]
    return own, found


def concrete(sizes: Sequence[int | torch.SymInt], samples: int) -> list[int] | None:
    """Sizes or strides for so many samples; None where one of them is not known."""
    found = [size_at(size, samples) for size in sizes]
    return None if None in found else [item for item in found if item is not None]


def size_at(size: int | torch.SymInt, samples: int) -> int | None:
    """A size or stride for so many samples; export writes some as ``Min(64, 64*b)``."""
    if isinstance(size, int):
        return size
    known = extent(size)
    if known is not None:
        return known.at(samples)
    value = size.node.expr.subs(dict.fromkeys(size.node.expr.free_symbols, samples))
    return int(value) if len(size.node.expr.free_symbols) == 1 and value.is_Integer else None


def viewed(value: Value) -> Value | None:
    """The value that a value is a view of, one op back; None for one with memory of its own."""
    node = value.node
    if not is_view(node):
        return None
    return value_of(input_nodes(node)[value.index if op_name(node) in _PAIRWISE else 0])


def storage_of(value: Value) -> Value:
    """The value whose memory a value is, seen through views and ``getitem``."""
    value = value_of(value.node) if is_getitem(value.node) else value
    while (source := viewed(value)) is not None:
        value = source
    return value
