"""Row numbers and permutations of a share's rows.

``arange(b)`` numbers a share's rows from zero, so it may only pick rows of that share. Mixtures of experts sort rows by
expert, work on groups of them and put them back: a permutation and its inverse, which every share may do by itself.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import fx

from autopart.passes import graph as graphs
from autopart.passes.batch_state import WHOLE, BatchState, Mixes
from autopart.passes.rules.arguments import argument
from autopart.passes.rules.book import shape_of
from autopart.passes.sizes import Extent, extent
from autopart.runtime.placement import PARTIAL, shard

if TYPE_CHECKING:
    from autopart.passes.batch import Splitter

aten = torch.ops.aten

_SORTS = (aten.sort.default, aten.sort.stable, aten.argsort.default, aten.argsort.stable)
_GROUPED = ("grouped_mm",)
# Ops after which a row number is still a row number.
_KEEP_POINTS = {
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.expand.default,
    aten.slice.Tensor,
    aten.to.dtype,
    aten.clone.default,
    aten.contiguous.default,
    aten.detach.default,
}


def counter(splitter: Splitter, node: fx.Node) -> fx.Node | None:
    """``arange`` over as many rows as a share has: the share's row numbers, from zero."""
    if not str(node.target).startswith("aten.arange"):
        return None
    found = extent(node.meta["val"].shape[0])
    if found is not None and not found.batched:
        return None
    if found is not None and node.target is aten.arange.start_step:
        start, end, step = node.args[:3]
        ended = extent(end.meta["val"]) if isinstance(end, fx.Node) else None
        if start == 0 and isinstance(step, int) and ended == found.times(Extent(step)):
            return splitter.put(splitter.copy(node), BatchState(shard(0), points="bags", rows=ended))
    if found is None or node.target is not aten.arange.default:
        raise Mixes("numbers rows across the batch")
    return splitter.put(splitter.copy(node), BatchState(shard(0), points="rows", rows=found, counter=True))


def keeps_row_numbers(node: fx.Node) -> bool:
    """Whether the op's result holds the row numbers that its one operand holds."""
    if node.target is aten.add.Tensor and node.args[1] == 0:
        return True
    dtype = node.meta["val"].dtype if isinstance(node.meta["val"], torch.Tensor) else torch.bool
    return node.target in _KEEP_POINTS and not dtype.is_floating_point and dtype != torch.bool


def routed(splitter: Splitter, node: fx.Node) -> fx.Node | None:
    """Ops that permute a share's rows, work on permuted rows, or undo the permutation; None for others."""
    if node.target in _SORTS:
        return _sorted(splitter, node)
    if node.target is aten.index.Tensor:
        return _picked(splitter, node)
    if node.target in (aten.index_put.default, aten.scatter.src):
        return _placed(splitter, node)
    if node.target in (aten.histc.default, aten.bincount.default):
        state = splitter.state(graphs.input_nodes(node)[0])
        if state.placement.is_shard and not state.points:
            return splitter.put(splitter.copy(node), BatchState(PARTIAL, grouped=state.order))
        return None
    if node.target in (aten.embedding_bag.default, aten.embedding_bag.padding_idx):
        return _bags(splitter, node)
    if any(part in str(node.target) for part in _GROUPED):
        rows, weight, offsets = [splitter.state(item) for item in graphs.input_nodes(node)[:3]]
        if rows.placement.is_shard and rows.order is not None and offsets.grouped is rows.order and weight.whole:
            return splitter.put(splitter.copy(node), BatchState(shard(0), order=rows.order))
        raise Mixes("multiplies groups of rows that are not a share's own groups")
    if node.target is aten.floor_divide.default or node.target is aten.div.Tensor_mode:
        state = splitter.state(graphs.input_nodes(node)[0])
        divisor = node.args[1]
        rounds = node.target is aten.floor_divide.default or node.kwargs.get("rounding_mode") in ("floor", "trunc")
        if state.points == "rows" and state.rows is not None and isinstance(divisor, int) and rounds:
            rows_of = state.rows.over(Extent(divisor))
            if rows_of is None:
                raise Mixes("computes with the row numbers of a share")
            return splitter.put(splitter.copy(node), replace(state, rows=rows_of, counter=False))
    return None


def _bags(splitter: Splitter, node: fx.Node) -> fx.Node:
    """Bags of as many entries each, a share's own: they begin where a count of the share's entries says."""
    if argument(node, 3, "scale_grad_by_freq", False):
        raise Mixes("divides each entry's gradient by how often the whole batch has it")
    weight, entries, starts, *scales = graphs.input_nodes(node)
    own, number = splitter.state(starts), extent(entries.meta["val"].shape[0])
    rows = [splitter.state(item) for item in (entries, *scales)]
    plain = all(state.placement == shard(0) and state.order is None and not state.points for state in rows)
    if own.points != "bags" or own.rows != number or not plain or not splitter.state(weight).whole:
        raise Mixes("puts entries of different samples into bags")
    sizes = [shape_of(value.fake)[:1] for value in graphs.outputs(node)]
    batched = [bool(size) and size[0] is not None and size[0].batched for size in sizes]
    return splitter.put(splitter.copy(node), *(BatchState(shard(0)) if own else WHOLE for own in batched))


def _sorted(splitter: Splitter, node: fx.Node) -> fx.Node | None:
    (source,) = graphs.input_nodes(node)
    state, value = splitter.state(source), source.meta["val"]
    dim = argument(node, 1, "dim", -1)
    if not (state.placement.is_shard and state.placement.dim == dim % max(value.dim(), 1)):
        return None
    rows = extent(value.shape[0])
    values: BatchState
    again = state.order is not None and graphs.value_of(splitter.env[source]).node is state.order
    if again and state.order is not None and state.points == "rows" and not argument(node, 2, "descending", False):
        # the numbers that a sort gave, sorted again: its inverse
        values = BatchState(shard(0), points="rows", rows=rows, counter=True)
        indices = BatchState(shard(0), points=state.order, rows=rows)
        new = splitter.copy(node)
    elif value.dim() != 1 or state.order is not None or state.points:
        raise Mixes("sorts rows of the batch")
    else:
        new = splitter.copy(node)
        values = BatchState(shard(0), order=new)
        indices = BatchState(shard(0), order=new, points="rows", rows=rows)
    return splitter.put(new, *((indices,) if "argsort" in str(node.target) else (values, indices)))


def _picked(splitter: Splitter, node: fx.Node) -> fx.Node | None:
    """Indexing a share's rows by row numbers: the result's rows follow the index."""
    operand = graphs.input_nodes(node)[0]
    source, indices = splitter.state(operand), list(argument(node, 1, "indices"))
    pointers = [
        (position, splitter.state(item))
        for position, item in enumerate(indices)
        if item is not None and splitter.state(item).points
    ]
    if not pointers:
        return None
    if len(pointers) > 1:
        raise Mixes("picks rows by several row numbers")
    position, pointer = pointers[0]
    others = [item for at, item in enumerate(indices) if item is not None and at != position]
    expected = "rows" if source.order is None else source.order
    rows = extent(operand.meta["val"].shape[position])
    if source.placement != shard(position) or pointer.points != expected or pointer.rows != rows:
        raise Mixes("picks rows by numbers that count other rows")
    for other in others:
        # a further index may go along with the rows that are picked
        state, shift = splitter.state(other), indices[position].meta["val"].dim() - other.meta["val"].dim()
        aligned = state.placement.is_shard and state.placement.outer == pointer.placement.outer
        aligned = aligned and state.placement.dim + shift == pointer.placement.dim and state.order is pointer.order
        if not state.whole and not aligned:
            raise Mixes("picks rows and columns of different samples")
    used = [item for item in indices if item is not None]
    shape = torch.broadcast_shapes(*[item.meta["val"].shape for item in used])
    first = next(at for at, item in enumerate(indices) if item is not None)
    offset = first if indices[first : first + len(used)] == used else 0
    dim = pointer.placement.dim + len(shape) - indices[position].meta["val"].dim() + offset
    result = replace(pointer, placement=shard(dim), points=source.points, rows=source.rows, counter=False)
    return splitter.put(splitter.copy(node), result)


def _placed(splitter: Splitter, node: fx.Node) -> fx.Node | None:
    """Writing rows to the positions they came from: the inverse of a sort."""
    if node.target is aten.index_put.default:
        base, listed, values = argument(node, 0, "self"), argument(node, 1, "indices"), argument(node, 2, "values")
        if len(listed) > 1:
            return _written(splitter, node, base, listed, values)
        if argument(node, 3, "accumulate", False):
            return None
        index = listed[0]
    else:
        base, index, values = argument(node, 0, "self"), argument(node, 2, "index"), argument(node, 3, "src")
        if argument(node, 1, "dim") != 0 or base.meta["val"].dim() != 1:
            return None
    state, rows, own = splitter.state(index), splitter.state(values), splitter.state(base)
    if not state.points:
        return None
    fits = own.placement == shard(0) and extent(base.meta["val"].shape[0]) == state.rows and own.order is None
    # every row is written: what the numbers of one sort name are all rows of its operand
    permutation = graphs.value_of(splitter.env[index]).node is state.order
    if state.points != "rows" or not permutation or not fits:
        raise Mixes("writes rows by numbers that count other rows")
    if rows.counter and rows.rows == state.rows:
        return splitter.put(splitter.copy(node), BatchState(shard(0), points=state.order or "", rows=state.rows))
    if rows.order is state.order and rows.placement == shard(0) and not rows.points:
        return splitter.put(splitter.copy(node), BatchState(shard(0)))
    raise Mixes("writes rows that stand in another order")


def _written(
    splitter: Splitter, node: fx.Node, base: fx.Node, indices: list[fx.Node | None], values: fx.Node
) -> fx.Node | None:
    """``x[row numbers, columns] = values``: each share writes into rows of its own."""
    pointer = None if indices[0] is None else splitter.state(indices[0])
    if pointer is None or not pointer.points:
        return None
    own = splitter.state(base)
    plain = own.placement == shard(0) and own.order is None and not own.points
    if (
        not plain
        or pointer.points != "rows"
        or pointer.order is not None
        or pointer.rows != extent(base.meta["val"].shape[0])
    ):
        raise Mixes("writes rows by numbers that count other rows")
    used = [item for item in indices if item is not None]
    broadcast = max(item.meta["val"].dim() for item in used)
    dims = broadcast + base.meta["val"].dim() - len(used)  # what indices broadcast to comes first, as the rows' does
    row = pointer.placement.dim + broadcast - used[0].meta["val"].dim()
    for item, full in (*((item, broadcast) for item in used), (values, dims)):
        state = splitter.state(item)
        along = state.placement.is_shard and state.placement.outer == 1 and state.order is None
        along = along and state.placement.dim == row - full + item.meta["val"].dim()
        if not (along and (item is used[0] or not state.points)) and not state.whole:
            raise Mixes("writes what belongs to different samples")
    return splitter.put(splitter.copy(node), BatchState(shard(0)))
