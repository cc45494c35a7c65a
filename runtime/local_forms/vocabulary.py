"""The embedding and the loss of a vocabulary that is sharded.

Vocabulary parallelism of Megatron-LM (Shoeybi et al., arXiv 1909.08053, section 3): logits are never gathered, what is
exchanged is a few numbers per token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from autopart.runtime.collectives import max_in_place, sum_in_place
from autopart.runtime.mesh import Axis

_NONE, _MEAN = 0, 1


def vocab_embedding(weight: Tensor, indices: Tensor, padding_idx: int = -1, *, axis: Axis) -> Tensor:
    """The rows of tokens in this rank's shard, zeros for the others: a partial sum of ``F.embedding``.

    weight: ``[vocabulary / n, width]``. indices: whole, any shape ``[*t]``; outside of the whole vocabulary they raise
    IndexError (an assertion on a GPU), as in the embedding itself. Returns ``[*t, width]``. Nothing is exchanged.
    ``padding_idx``: the row, counted in the whole vocabulary, that gets no gradient; -1 for none.
    """
    rows = weight.size(0)
    local, elsewhere = _local(indices, rows, axis)
    first = axis.index * rows
    own_padding = padding_idx - first if first <= padding_idx < first + rows else None
    return F.embedding(local, weight, own_padding).masked_fill(elsewhere.unsqueeze(-1), 0.0)


def vocab_cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    *,
    axis: Axis,
) -> Tensor:
    """``F.cross_entropy`` of logits sharded over the classes; the same result on every rank.

    logits: ``[n, classes / n_ranks, *d]``. target: class numbers ``[n, *d]``, whole. reduction: 0 none, 1 mean over the
    targets that are not ``ignore_index``, 2 sum. Half precision is computed in float32, as the op does.

    Forward two all-reduces: the largest logit of each token, then the sum of exponentials and the target's logit (and,
    with label smoothing, the sum of the logits) of each token. Backward none. Kept for it: the logits' shard and two
    numbers per token. A target outside of the classes raises IndexError (an assertion on a GPU).
    """
    assert weight is None, "class weights have no vocabulary-sharded form"
    losses: Tensor = _TokenLosses.apply(logits, target, ignore_index, label_smoothing, axis)
    if reduction == _NONE:
        return losses.to(logits.dtype)
    total = losses.sum()
    if reduction == _MEAN:
        total = total / (target != ignore_index).sum()
    return total.to(logits.dtype)


def _local(indices: Tensor, rows: int, axis: Axis) -> tuple[Tensor, Tensor]:
    """Indices counted from this rank's first row, 0 for those of other ranks; and which those are.

    What lies in no rank's shard stays outside of this one's as well, so that picking by it raises.
    """
    first = axis.index * rows
    elsewhere = ((indices < first) | (indices >= first + rows)) & (indices >= 0) & (indices < rows * axis.size)
    return (indices - first).masked_fill(elsewhere, 0), elsewhere


class _TokenLosses(torch.autograd.Function):
    """The loss of each target, 0 for the ignored: ``log sum exp x - (1 - s) x[target] - s mean x``."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, ignore_index: int, smoothing: float, axis: Axis) -> Tensor:
        shard = logits.float() if logits.dtype.itemsize < 4 else logits
        ignored = target == ignore_index
        index, elsewhere = _local(target.masked_fill(ignored, 0), logits.size(1), axis)
        largest = shard.amax(1)
        max_in_place(largest, axis, "forward")
        own = shard.gather(1, index.unsqueeze(1)).squeeze(1).masked_fill(elsewhere, 0.0)
        parts = [(shard - largest.unsqueeze(1)).exp_().sum(1), own]
        if smoothing:
            parts.append(shard.sum(1))
        sums = torch.stack(parts)
        sum_in_place(sums, axis, "forward")
        normaliser = sums[0].log() + largest
        losses = normaliser - (1.0 - smoothing) * sums[1]
        classes = logits.size(1) * axis.size
        if smoothing:
            losses -= sums[2] * (smoothing / classes)
        ctx.save_for_backward(logits, normaliser, index, elsewhere, ignored)
        ctx.smoothing, ctx.classes = smoothing, classes
        return losses.masked_fill_(ignored, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, normaliser, index, elsewhere, ignored = ctx.saved_tensors
        result = (logits - normaliser.unsqueeze(1)).exp_()
        if ctx.smoothing:
            result -= ctx.smoothing / ctx.classes
        hit = torch.full_like(normaliser, ctx.smoothing - 1.0).masked_fill_(elsewhere, 0.0)
        result.scatter_add_(1, index.unsqueeze(1), hit.unsqueeze(1))
        result *= gradient.masked_fill(ignored, 0.0).unsqueeze(1)
        return result.to(logits.dtype), None, None, None, None
