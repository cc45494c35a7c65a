"""Which values share memory: views, and ops that return their input unchanged.

:func:`is_view` tells whether eager PyTorch makes no new tensor for an op; :func:`storage_of` follows views back to the
value that owns the memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autopart.passes.graph import Value, input_nodes, is_getitem, value_of
from autopart.passes.sizes import extent

_ALWAYS = {
    *("transpose", "t", "permute", "expand", "expand_as", "slice", "select", "unsqueeze", "squeeze", "narrow"),
    *("split", "split_with_sizes", "chunk", "tensor_split", "unbind", "detach", "alias", "unfold", "diagonal"),
    *("movedim", "swapaxes", "view", "view_as", "as_strided", "mT", "numpy_T", "adjoint", "unflatten", "lift_fresh"),
    *(
        "swapdims",
        "moveaxis",
        "hsplit",
        "vsplit",
        "dsplit",
        "real",
        "imag",
        "view_as_real",
        "view_as_complex",
        "positive",
    ),
}
_PAIRWISE = {"broadcast_tensors", "meshgrid", "atleast_1d", "atleast_2d", "atleast_3d"}
"""Output number i is a view of tensor argument number i."""
_IF_STRIDES_ALLOW = {"reshape", "flatten", "_unsafe_view", "contiguous", "reshape_as", "ravel", "clone"}
_CASTS = {"to", "type_as", "_to_copy", "float", "_cast"}
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


def _keeps_memory(node: fx.Node, name: str) -> bool:
    if name == "clone":
        return False
    source = input_nodes(node)[0]
    if name == "contiguous":
        owner = storage_of(value_of(source)).node
        if op_name(owner) == "scaled_dot_product_attention":
            # Fused kernels write their result in the query's layout, which the fake tensor does not show.
            query = _layout(input_nodes(owner)[0].meta["val"])
            return query is not None and not torch.empty_strided(*query, device="meta").is_contiguous()
    layout = _layout(source.meta["val"])
    shape = _concrete(node.meta["val"].shape)
    if layout is None or shape is None:
        return False
    sizes, strides = layout
    meta = torch.empty_strided(sizes, strides, device="meta")
    if name == "contiguous":
        return meta.is_contiguous()
    return can_view(meta, shape)


def can_view(tensor: torch.Tensor, shape: Sequence[int]) -> bool:
    """Whether ``tensor.view(shape)`` needs no copy."""
    try:
        tensor.view(tuple(shape))
    except RuntimeError:
        return False
    return True


def merges_leading_dims(tensor: torch.Tensor) -> bool:
    """Whether all dims but the last two can be seen as one without a copy, as batched matmul needs."""
    layout = _layout(tensor)
    if layout is None:
        return False
    sizes, strides = layout
    meta = torch.empty_strided(sizes, strides, device="meta")
    return can_view(meta, (math.prod(sizes[:-2]), *sizes[-2:]))


def _layout(tensor: torch.Tensor) -> tuple[list[int], list[int]] | None:
    sizes, strides = _concrete(tensor.shape), _concrete(tensor.stride())
    return None if sizes is None or strides is None else (sizes, strides)


def _concrete(sizes: Sequence[int | torch.SymInt]) -> list[int] | None:
    found = [extent(item) for item in sizes]
    return None if None in found else [item.at(_SAMPLE_BATCH) for item in found if item is not None]


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
