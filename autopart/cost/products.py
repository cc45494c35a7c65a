"""The matrix products that an op of a graph consists of, with the shapes that one rank has.

Shapes decide how well a product fills a device's tiles (:mod:`autopart.cost.compute`), so that half of a product may
take more than half of its time. A dim that a strategy shards is divided here, and sizes follow from operands::

    linear, matmul, mm, addmm      *b k, k n -> *b n          one product, m = all of *b where the right one is a matrix
    bmm, baddbmm, matmul           *g m k, *g k n -> *g m n   groups products
    scaled_dot_product_attention   scores and weighted values, batch and heads as groups

Convolutions and einsums have no entry: their FLOPs are priced without shapes, but for how wide the groups of a
convolution are (:func:`channels_of_group`), which no strategy changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from torch import fx

from autopart.cost.compute import Product, slower_attention
from autopart.passes import graph as graphs
from autopart.passes.amounts import size
from autopart.passes.graph import Value
from autopart.passes.rules import Strategy
from autopart.passes.saved import needs_gradient
from autopart.passes.sizes import extent
from autopart.passes.storage import argument, op_name
from autopart.runtime.placement import Placement

_TWO_OPERANDS = {"linear": 0, "matmul": 0, "mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}
_ATTENTION = "scaled_dot_product_attention"
_CONVOLUTIONS = {
    **dict.fromkeys((f"conv{way}{dims}d" for way in ("", "_transpose") for dims in (1, 2, 3)), 6),
    **dict.fromkeys(("convolution", "_convolution"), 8),
}
"""Where in an op's arguments its number of groups is."""


def is_attention(node: fx.Node) -> bool:
    """Whether the op is a kernel of fused attention."""
    return op_name(node) == _ATTENTION


def channels_of_group(node: fx.Node) -> int | None:
    """Of a convolution in several groups the channels that one reads or makes, whichever are fewer; else None.

    With a kernel of each sample's own the groups are as many as samples, and as wide as a whole convolution's.
    """
    position = _CONVOLUTIONS.get(op_name(node))
    groups = 1 if position is None else argument(node, position, "groups", 1)
    if not isinstance(groups, int) or groups == 1:
        return None
    # all channels of one side, those of a group of the other
    first, second = map(extent, graphs.inputs(node)[1].fake.shape[:2])
    if first is None or first.batched or second is None or second.batched:
        return None
    return max(1, min(first.coefficient // groups, second.coefficient))


def forward_products(
    node: fx.Node, batch: int, chosen: Sequence[Strategy] = (), sizes: Sequence[int] = ()
) -> tuple[Product, ...]:
    """The op's products for ``batch`` samples on one rank; none where shapes are not what counts.

    chosen: one strategy per tensor axis, of ``sizes`` ranks.
    """
    name = op_name(node)
    if name not in _TWO_OPERANDS and name != _ATTENTION:
        return ()
    values = graphs.inputs(node)
    shapes = [
        _local(value, [strategy.inputs[index] for strategy in chosen], batch, sizes)
        for index, value in enumerate(values)
    ]
    if name == _ATTENTION:
        if len(shapes) < 3:  # one tensor in two roles
            return ()
        query, key, value = shapes[:3]
        groups, rows, columns = prod(query[:-2]), query[-2], key[-2]
        slower = slower_attention(
            max(query[-1], value[-1]),
            columns,
            queries=rows,
            causal=bool(argument(node, 5, "is_causal", False)),
            masked=argument(node, 3, "attn_mask") is not None,
            dropout=bool(argument(node, 4, "dropout_p", 0.0)),
        )
        return (
            Product(rows, columns, query[-1], groups, fused=True, slower=slower),
            Product(rows, value[-1], columns, groups, fused=True, slower=slower),
        )
    operands = shapes[_TWO_OPERANDS[name] :]
    if len(operands) < 2 or min(map(len, operands[:2])) < 2:
        return ()
    left, right = operands[:2]
    if len(right) == 2:
        columns = right[0] if name == "linear" else right[1]
        # Panel by panel, one product for each rank along an axis.
        panels = next((parts for item, parts in zip(chosen, sizes, strict=True) if item.is_joint), 1)
        return (Product.contiguous(prod(left[:-1]), columns, left[-1]),) * panels
    groups = max(prod(left[:-2]), prod(right[:-2]))
    return (Product.contiguous(left[-2], right[-1], left[-1], groups),)


def backward_products(node: fx.Node, forward: tuple[Product, ...]) -> tuple[Product, ...]:
    """The products of the op's gradients, for the operands that want one; fused attention repeats its scores."""
    if is_attention(node):
        scores = (replace(product, back=True) for product in forward[:1])
        return (*scores, *(gradient for product in forward for gradient in product.backward))
    wanted = [needs_gradient(value) for value in graphs.inputs(node)[_TWO_OPERANDS[op_name(node)] :][:2]]
    pairs = [pair for product in forward for pair in zip(product.backward, wanted, strict=True)]
    return tuple(gradient for gradient, needed in pairs if needed)


def _local(value: Value, placements: Sequence[Placement], batch: int, sizes: Sequence[int]) -> tuple[int, ...]:
    shape = [max(1, size(dim).at(batch)) for dim in value.fake.shape]
    for placement, parts in zip(placements, sizes, strict=True):
        if placement.divides:
            shape[placement.dim] = max(1, shape[placement.dim] // parts)
    return tuple(shape)
