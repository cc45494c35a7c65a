"""What products have to exchange on tensor axes, at least: whether more axes could make a plan faster.

A product of a ``[m, k]`` operand with a ``[k, n]`` weight shares its work on an axis by rows (m), columns (n) or what
is summed over (k). The tensor that lacks this size goes over the axis forward, and its gradient back: gathered and
scattered, or copied and summed, the same bytes::

    rows       the weight, and its gradient; once a step where the weight is whole
    columns    the operand, and its gradient
    inner      the result, and its gradient

each as large as the other axes' sizes leave it. So on one axis of p ranks the smallest of three tensors is moved, on
q x q the two smallest at 1 / q, and on q x q x q all three at 1 / q^2, which is what the 2-D and the 3-D scheme are
for (arXiv 2104.05343, 2105.14450). Products are taken each at its best, as if what lies between them converted nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from torch import fx

from autopart.candidate_sums import Product
from autopart.candidates import Candidates
from autopart.conversion_prices import TensorAxis
from autopart.cost.communication import (
    all_gather_seconds,
    all_reduce_seconds,
    bucketed_all_reduce_seconds,
    reduce_scatter_seconds,
)
from autopart.passes import graph as graphs
from autopart.passes.graph import Value
from autopart.scheme_choices import weight_of
from autopart.solver.degrees import Degrees

# The tensor that goes over an axis, by how a product is shared on it: of (operand, weight, result).
_ROWS, _COLUMNS, _INNER = 1, 0, 2


def least_exchange_seconds(candidates: Candidates, config: Degrees, by_rows: bool = True) -> float:
    """Seconds of one microbatch's exchanges over the tensor axes of a configuration, products with weights alone.

    by_rows: whether products may be shared by rows.
    """
    axes, kinds = candidates.layout.tensor_axes(config), (_COLUMNS, _INNER, *((_ROWS,) if by_rows else ()))
    total = 0.0
    for _, _, sizes, count in _products(candidates, candidates.samples(config)):
        ways = []
        for moved in itertools.product(kinds, repeat=len(axes)):
            seconds = 0.0
            for index, axis in enumerate(axes):
                what = moved[index]
                # another axis cuts each tensor but the one that goes over it
                cut = math.prod(other.parts for at, other in enumerate(axes) if at != index and moved[at] != what)
                local = sizes[what] / cut
                if what == _ROWS:
                    summed = local * candidates.summed
                    seconds += bucketed_all_reduce_seconds(summed, axis.parts, axis.link) / config.microbatches
                else:
                    seconds += _moved_seconds(local, axis)
            ways.append(seconds)
        total += count * min(ways)
    return total


def least_shared_seconds(candidates: Candidates, config: Degrees, by_rows: bool) -> float:
    """The same on one tensor axis, where products that read one operand gather it, and sum its gradient, once.

    They are shared by columns all, or each as it is best otherwise, where all ranks may also repeat it whole.
    """
    (axis,) = candidates.layout.tensor_axes(config)
    prices, samples = candidates.prices(config), candidates.samples(config)
    apart = dict[tuple[Value, int], float]()  # by operand, of all products that read it
    for node, operand, (_, held, result), count in _products(candidates, samples):
        repeated = (1 - 1 / axis.parts) * sum(prices.op_seconds(node))
        alone = min(_moved_seconds(result, axis), repeated)
        if by_rows:
            summed = bucketed_all_reduce_seconds(held * candidates.summed, axis.parts, axis.link)
            alone = min(alone, summed / config.microbatches)
        apart[operand, count] = apart.get((operand, count), 0.0) + alone
    return math.fsum(
        count * min(_moved_seconds(candidates.whole_bytes(operand, samples), axis), seconds)
        for (operand, count), seconds in apart.items()
    )


def gathered_bytes(candidates: Candidates) -> float:
    """Bytes of a sample's operands that are smaller than the results of all products with weights that read them.

    On a tensor axis such an operand is what goes over it, so that each rank has and keeps all of it.
    """
    results = dict[Value, float]()
    for node in candidates.analysis.block_of:
        if (product := _product(candidates, node, 1)) is not None:
            operand, _, result = product
            results[operand] = results.get(operand, 0.0) + result
    sizes = ((candidates.whole_bytes(operand, 1), result) for operand, result in results.items())
    return sum(operand for operand, result in sizes if operand < result)


def _moved_seconds(size: float, axis: TensorAxis) -> float:
    """Of gathering a tensor of so many bytes over an axis and of scattering its summed gradient, or of a sum alone."""
    moved = size, axis.parts, axis.link
    return min(all_gather_seconds(*moved) + reduce_scatter_seconds(*moved), all_reduce_seconds(*moved))


def _products(candidates: Candidates, samples: int) -> Sequence[Product]:
    """Products with a weight, their operands, bytes of operand, weight and result, and how many are alike."""
    known, key = candidates.products, (candidates.device.kind, samples)
    if key not in known:
        known[key] = [
            (node, operand, (candidates.whole_bytes(operand, samples), held, result), count)
            for (node, _), count in candidates.alike
            if (product := _product(candidates, node, samples)) is not None
            for operand, held, result in (product,)
        ]
    return known[key]


def _product(candidates: Candidates, node: fx.Node, samples: int) -> tuple[Value, float, float] | None:
    """Of a product of two with a weight the operand, and the bytes of weight and result."""
    cost = candidates.analysis.costs(candidates.device.kind).get(node)
    weight = weight_of(node) if cost is not None and cost.contraction else None
    if weight is None:
        return None
    values = graphs.inputs(node)
    others = (value for index, value in enumerate(values) if index != weight)
    result = sum(candidates.whole_bytes(value, samples) for value in graphs.outputs(node))
    operand = max(others, key=lambda value: candidates.whole_bytes(value, samples))
    return operand, candidates.whole_bytes(values[weight], samples), result
