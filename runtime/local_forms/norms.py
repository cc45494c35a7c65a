"""Normalisations of which every rank has a part of the normalised dims.

A rank sends two numbers per row forward and two backward (one for a root mean square). Means and sums of squared
deviations are joined as by Chan, Golub and LeVeque (1979), so that a large mean does not cancel the variance. Half
precision is computed in float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopart.runtime.collectives import gather_in_front, sum_in_place
from autopart.runtime.mesh import Axis


def sharded_layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
    *,
    axis: Axis,
) -> Tensor:
    """``F.layer_norm`` of ``[*b, n / ranks]``; weight and bias ``[n / ranks]``. The dims may be more than one.

    Forward one all-gather, backward one all-reduce, of two numbers per row.
    """
    dims = tuple(range(x.dim() - len(normalized_shape), x.dim()))
    result: Tensor = _Normalized.apply(x, weight, bias, dims, eps, True, axis)
    return result


def sharded_rms_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None, *, axis: Axis
) -> Tensor:
    """``F.rms_norm`` of ``[*b, n / ranks]``; weight ``[n / ranks]``. One all-reduce of a number per row each way."""
    dims = tuple(range(x.dim() - len(normalized_shape), x.dim()))
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    result: Tensor = _Normalized.apply(x, weight, None, dims, eps, False, axis)
    return result


def sharded_group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
    *,
    axis: Axis,
) -> Tensor:
    """``F.group_norm`` of ``[b, g c / ranks, *s]``, each of the g groups sharded; weight and bias alike.

    Forward one all-gather, backward one all-reduce, of two numbers per sample and group.
    """
    grouped = x.unflatten(1, (num_groups, -1))
    ones = [1] * (x.dim() - 2)
    scale, shift = (None if item is None else item.view(num_groups, -1, *ones) for item in (weight, bias))
    result: Tensor = _Normalized.apply(grouped, scale, shift, tuple(range(2, grouped.dim())), eps, True, axis)
    return result.flatten(1, 2)


def partial_mean(
    x: Tensor, dim: list[int] | None = None, keepdim: bool = False, dtype: torch.dtype | None = None, *, axis: Axis
) -> Tensor:
    """This rank's summand of ``x.mean(dim)`` of a tensor that is sharded on one of these dims."""
    return x.mean(dim, keepdim=keepdim, dtype=dtype) / axis.size


class _Normalized(torch.autograd.Function):
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` over ``dims`` and the axis; the mean 0 if not centered.

    weight, bias: broadcast to x.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        dims: tuple[int, ...],
        eps: float,
        centered: bool,
        axis: Axis,
    ) -> Tensor:
        wide = x.float() if x.dtype.itemsize < 4 else x
        own = math.prod(x.size(dim) for dim in dims)
        count = own * axis.size
        mean = None
        if centered:
            local = wide.mean(dims, keepdim=True)
            squares = (wide - local).square().sum(dims, keepdim=True)
            means, deviations = gather_in_front(torch.stack([local, squares]), axis, "forward").unbind(1)
            mean = means.mean(0)
            total = deviations.sum(0) + own * (means - mean).square().sum(0)
        else:
            total = wide.square().sum(dims, keepdim=True)
            sum_in_place(total, axis, "forward")
        scale = (total / count + eps).rsqrt()
        result = (wide if mean is None else wide - mean) * scale
        if weight is not None:
            result = result * weight
        if bias is not None:
            result = result + bias
        ctx.save_for_backward(x, mean, scale, weight)
        ctx.dims, ctx.count, ctx.axis = dims, count, axis
        ctx.bias = None if bias is None else (bias.shape, bias.dtype)
        return result.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, scale, weight = ctx.saved_tensors
        wide, given = x.to(scale.dtype), gradient.to(scale.dtype)
        normal = (wide if mean is None else wide - mean) * scale
        scaled = given if weight is None else given * weight
        along = (scaled * normal).sum(ctx.dims, keepdim=True)
        sums = torch.stack([along] if mean is None else [along, scaled.sum(ctx.dims, keepdim=True)])
        sum_in_place(sums, ctx.axis, "backward")
        sums /= ctx.count
        inner = scaled - normal * sums[0] if mean is None else scaled - normal * sums[0] - sums[1]
        for_weight = None if weight is None else (given * normal).sum_to_size(weight.shape).to(weight.dtype)
        for_bias = None if ctx.bias is None else given.sum_to_size(ctx.bias[0]).to(ctx.bias[1])
        return (inner * scale).to(x.dtype), for_weight, for_bias, None, None, None, None
