"""Softmax and its like, of which every rank has a part of the normalised dim.

A rank sends its largest number and its sum of exponentials per row, as in the joining of blocks by online softmax
(Milakov and Gimelshein, arXiv 1805.02867), and one number per row backward. Half precision is computed in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopart.runtime.collectives import gather_in_front, sum_in_place
from autopart.runtime.mesh import Axis


def sharded_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None, *, axis: Axis) -> Tensor:
    """``F.softmax`` over a dim of which the rank has a part. Forward one all-gather, backward one all-reduce."""
    result: Tensor = _Softmax.apply(x if dtype is None else x.to(dtype), dim, False, axis)
    return result


def sharded_log_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None, *, axis: Axis) -> Tensor:
    """``F.log_softmax`` over a dim of which the rank has a part. Forward one all-gather, backward one all-reduce."""
    result: Tensor = _Softmax.apply(x if dtype is None else x.to(dtype), dim, True, axis)
    return result


def sharded_logsumexp(x: Tensor, dim: int | Sequence[int], keepdim: bool = False, *, axis: Axis) -> Tensor:
    """``x.logsumexp(dim)`` of a tensor sharded on one of these dims, the same on every rank. One all-gather."""
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    found: Tensor = _LogSum.apply(x, dims, axis)
    return found if keepdim else found.squeeze(dims)


def _log_sum(x: Tensor, dims: tuple[int, ...], axis: Axis) -> Tensor:
    """``log sum exp x`` over the dims and the axis, the dims kept."""
    largest = x.amax(dims, keepdim=True)
    # a shard of nothing but -inf adds nothing; a row of them is what torch makes of it
    base = largest.masked_fill(largest == -torch.inf, 0.0)
    sums = (x - base).exp_().sum(dims, keepdim=True)
    largests, parts = gather_in_front(torch.stack([largest, sums]), axis, "forward").unbind(1)
    overall = largests.amax(0)
    shift = overall.masked_fill(overall == -torch.inf, 0.0)
    return (parts * (largests - shift).exp_()).sum(0).log_() + shift


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, log: bool, axis: Axis) -> Tensor:
        wide = x.float() if x.dtype.itemsize < 4 else x
        result = wide - _log_sum(wide, (dim,), axis)
        result = (result if log else result.exp_()).to(x.dtype)
        ctx.save_for_backward(result)
        ctx.dim, ctx.log, ctx.axis = dim, log, axis
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (result,) = ctx.saved_tensors
        half = result.dtype.itemsize < 4
        wide, given = (item.float() if half else item for item in (result, gradient))
        total = (given if ctx.log else given * wide).sum(ctx.dim, keepdim=True)
        sum_in_place(total, ctx.axis, "backward")
        found = given - wide.exp() * total if ctx.log else wide * (given - total)
        return found.to(result.dtype), None, None, None


class _LogSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: tuple[int, ...], axis: Axis) -> Tensor:
        total = _log_sum(x.float() if x.dtype.itemsize < 4 else x, dims, axis).to(x.dtype)
        ctx.save_for_backward(x, total)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        x, total = ctx.saved_tensors
        return (x - total).exp_() * gradient, None, None
