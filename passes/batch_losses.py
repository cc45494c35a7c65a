"""Means over samples for one share of them: the sum over the share, divided by the count of the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from autopart.passes import graph as graphs
from autopart.passes.batch_state import SUMMED, BatchState, Mixes
from autopart.passes.rules.arguments import argument, dims_of, replaced
from autopart.passes.sizes import ONE, Extent, extent

if TYPE_CHECKING:
    from autopart.passes.batch import Splitter

aten = torch.ops.aten

_NONE, _MEAN, _SUM = 0, 1, 2
# Losses that average over all elements, and where their reduction argument stands.
_ELEMENT_LOSSES: dict[Callable[..., Any], int] = {
    aten.mse_loss.default: 2,
    aten.l1_loss.default: 2,
    aten.smooth_l1_loss.default: 2,
    aten.huber_loss.default: 2,
    aten.soft_margin_loss.default: 2,
    aten.kl_div.default: 2,
    aten.hinge_embedding_loss.default: 3,
    aten.margin_ranking_loss.default: 4,
    aten.poisson_nll_loss.default: 5,
    aten.binary_cross_entropy.default: 3,
    aten.binary_cross_entropy_with_logits.default: 4,
}
# The same of losses that average over rows [..., c].
_ROW_LOSSES: dict[Callable[..., Any], int] = {
    aten.cosine_embedding_loss.default: 4,
    aten.triplet_margin_loss.default: 7,
    aten.multi_margin_loss.default: 5,
    aten.multilabel_margin_loss.default: 2,
}
# Losses that average over valid labels.
_LABEL_LOSSES = {aten.cross_entropy_loss.default, aten.nll_loss.default, aten.nll_loss_nd.default}


def reduced_loss(splitter: Splitter, node: fx.Node) -> fx.Node | None:
    """A loss that is reduced over samples; None for other ops."""
    called = graphs.called(node)
    position = {**_ELEMENT_LOSSES, **_ROW_LOSSES}.get(called)
    if position is None and node.target not in _LABEL_LOSSES:
        return None
    reduction = argument(node, 3 if position is None else position, "reduction", _MEAN)
    states = [splitter.state(item) for item in graphs.input_nodes(node)]
    if reduction == _NONE or all(state.whole for state in states):
        return None
    args, kwargs = replaced(node, 3 if position is None else position, "reduction", _SUM)
    if position is not None:
        shapes = [item.meta["val"].shape for item in graphs.input_nodes(node)]
        if rows := called in _ROW_LOSSES:
            _same_leading_rows(len(shapes[0]), states)
        else:
            _same_rows(graphs.input_nodes(node), states)
        loss = _summed(splitter, node, args, kwargs)
        if reduction == _SUM:
            return loss
        if rows:
            shape = torch.broadcast_shapes(*(own for own in shapes if len(own) == len(shapes[0])))[:-1]
        else:
            shape = torch.broadcast_shapes(*shapes[:2])
        return _over(splitter, loss, splitter.samples(_product(shape)))
    _matching_labels(node, states)
    loss = _summed(splitter, node, args, kwargs)
    return loss if reduction == _SUM else _over(splitter, loss, _valid_labels(splitter, node))


def mean(splitter: Splitter, node: fx.Node) -> fx.Node | None:
    """A mean over dims that hold samples; None for other ops."""
    if node.target not in (aten.mean.dim, aten.mean.default):
        return None
    (source,) = graphs.input_nodes(node)
    state = splitter.state(source)
    if not state.placement.is_shard:
        return None
    value = source.meta["val"]
    dims = list(range(value.dim())) if node.target is aten.mean.default else dims_of(node, 1, "dim")
    if state.placement.dim not in dims:
        return None
    if state.points:
        raise Mixes("computes with the row numbers of a share")
    keep = node.target is aten.mean.dim and argument(node, 2, "keepdim", False)
    kwargs = {"dtype": node.kwargs["dtype"]} if node.kwargs.get("dtype") is not None else {}
    total = splitter.put(splitter.call(aten.sum.dim_IntList, splitter.env[source], dims, keep, **kwargs), SUMMED)
    return _over(splitter, total, splitter.samples(_product([value.shape[dim] for dim in dims])))


def _summed(splitter: Splitter, node: fx.Node, args: tuple[object, ...], kwargs: dict[str, object]) -> fx.Node:
    assert isinstance(node.target, torch._ops.OpOverload)
    return splitter.put(splitter.call(node.target, *splitter.mapped(args), **splitter.mapped(kwargs)), SUMMED)


def _over(splitter: Splitter, total: fx.Node, count: fx.Node | int) -> fx.Node:
    return splitter.put(splitter.call(aten.div.Tensor, total, count), SUMMED)


def _valid_labels(splitter: Splitter, node: fx.Node) -> fx.Node | int:
    """What a mean over labels divides by: their number or total weight in the whole batch, invalid ones left out."""
    scores, labels = graphs.input_nodes(node)[:2]
    if labels.meta["val"].is_floating_point():  # probabilities: every position counts
        shape = scores.meta["val"].shape
        return splitter.samples(_product([size for dim, size in enumerate(shape) if dim != min(1, len(shape) - 1)]))
    ignored, weight = argument(node, 4, "ignore_index", -100), argument(node, 2, "weight")
    valid = splitter.call(aten.ne.Scalar, splitter.env[labels], ignored)
    if weight is None:
        counted = valid
    else:
        inside = splitter.call(aten.where.ScalarOther, valid, splitter.env[labels], 0)
        chosen = splitter.call(aten.index.Tensor, splitter.env[weight], [inside])
        counted = splitter.call(aten.mul.Tensor, chosen, valid)
    return splitter.completed(splitter.put(splitter.call(aten.sum.default, counted), SUMMED))


def _same_rows(nodes: list[fx.Node], states: list[BatchState]) -> None:
    """Raises Mixes unless all operands that depend on the samples hold them in the same dim once broadcast."""
    rank = max(node.meta["val"].dim() for node in nodes)
    _rows_of_own(states)
    found = {
        (
            state.placement.dim + rank - node.meta["val"].dim(),
            state.placement.outer,
            state.placement.batched,
            state.order,
        )
        for node, state in zip(nodes, states, strict=True)
        if not state.whole
    }
    if len(found) > 1:
        raise Mixes("compares different samples with each other")


def _same_leading_rows(rank: int, states: list[BatchState]) -> None:
    """The same where dims are counted from the left, and each row of the last of ``rank`` dims is one sample's."""
    _rows_of_own(states)
    placements = [(state.placement, state.order) for state in states if not state.whole]
    if len(set(placements)) > 1:
        raise Mixes("compares different samples with each other")
    if placements[0][0].dim == rank - 1:
        raise Mixes("combines different samples")


def _matching_labels(node: fx.Node, states: list[BatchState]) -> None:
    """The same for scores ``(N, C, ...)`` and labels ``(N, ...)`` or, as probabilities, ``(N, C, ...)``."""
    _rows_of_own(states)
    scores, labels, *weight = states
    given = [item.meta["val"] for item in graphs.input_nodes(node)[:2]]
    if any(not state.whole for state in weight):
        raise Mixes("weighs classes by numbers that depend on the samples")
    if scores.whole or labels.whole:
        return
    dim = labels.placement.dim
    if given[1].dim() < given[0].dim() and dim >= 1:
        dim += 1
    expected = (dim, labels.placement.outer, labels.placement.batched, labels.order)
    if expected != (scores.placement.dim, scores.placement.outer, scores.placement.batched, scores.order):
        raise Mixes("compares different samples with each other")


def _rows_of_own(states: list[BatchState]) -> None:
    if any(not state.whole and (not state.placement.is_shard or state.points) for state in states):
        raise Mixes("averages what is already summed over samples")


def _product(sizes: object) -> Extent:
    total: Extent | None = ONE
    for size in sizes:  # type: ignore[attr-defined]
        found = extent(size)
        total = None if total is None or found is None else total.times(found)
    if total is None:
        raise Mixes("averages over a number of elements that is no multiple of the batch size")
    return total
