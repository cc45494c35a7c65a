"""Matrix products on a mesh of q x q ranks, panel by panel: SUMMA, with both operands and the result held by shares.

Van de Geijn and Watts: SUMMA: scalable universal matrix multiplication algorithm (Concurrency 9(4), 1997), as Optimus
uses it for transformers (Xu et al., arXiv 2104.05343, section 2.4, algorithms 1 to 3). Rank (i, j) has block (i, j) of
everything; i counts along the axis ``rows``, on which the result's rows are sharded, and j along ``columns``::

    forward      C_ij  = sum over l of  A_il B_lj          A_il is sent along columns, B_lj along rows
    gradients    dA_il = sum over j of  dC_ij (B_lj)^T     B_lj is sent along rows, the sum is made along columns
                 dB_lj = sum over i of  (A_il)^T dC_ij     A_il is sent along columns, the sum is made along rows

So nothing larger than a rank's own share is ever held: the panel that is multiplied and the next one, already on its
way. Forward q broadcasts of A's share and q of B's, backward as many again and as many sums of the same sizes. A
result in half precision is rounded once per panel.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopart.runtime.collectives import start_broadcast, start_sum
from autopart.runtime.mesh import Axis, Pending
from autopart.runtime.traffic import Phase


def summa_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, rows: Axis, columns: Axis) -> Tensor:
    """``F.linear`` by shares: x ``[*b, k]``, weight ``[n, k]``, bias ``[n]`` by columns; the result ``[*b, n]``.

    One dim of ``*b`` is sharded on rows and k of x on columns, k of the weight on rows and n on columns.
    """
    product: Tensor = _Summa.apply(x.reshape(-1, x.size(-1)), weight, bias, True, rows, columns)
    return product.view(*x.shape[:-1], weight.size(0))


def summa_addmm(bias: Tensor, x: Tensor, weight: Tensor, *, rows: Axis, columns: Axis) -> Tensor:
    """``torch.addmm`` by shares: x ``[m, k]``, weight ``[k, n]``, bias as it broadcasts to ``[m, n]``."""
    product: Tensor = _Summa.apply(x, weight, bias, False, rows, columns)
    return product


def summa_matmul(x: Tensor, weight: Tensor, *, rows: Axis, columns: Axis) -> Tensor:
    """``torch.matmul`` by shares: x ``[*b, k]``, weight ``[k, n]``."""
    product: Tensor = _Summa.apply(x.reshape(-1, x.size(-1)), weight, None, False, rows, columns)
    return product.view(*x.shape[:-1], weight.size(1))


class _Summa(torch.autograd.Function):
    """The product of x ``[m, k]`` and weight, ``[n, k]`` if transposed, else ``[k, n]``, plus a bias."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, rows: Axis, columns: Axis
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.transposed, ctx.rows, ctx.columns = transposed, rows, columns
        ctx.bias_shape = None if bias is None else bias.shape
        result = x.new_zeros((x.size(0), weight.size(0 if transposed else 1)))
        lefts, rights = _panels(x, columns, "forward"), _panels(weight, rows, "forward")
        for left, right in zip(lefts, rights, strict=True):
            result.addmm_(left, right.t() if transposed else right)
        return result if bias is None else result.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows, columns, transposed = ctx.rows, ctx.columns, ctx.transposed
        to_x = to_weight = to_bias = None
        if ctx.needs_input_grad[0]:
            rights = _panels(weight, rows, "backward")
            to_x = _sums((gradient @ (right if transposed else right.t()) for right in rights), columns)
        if ctx.needs_input_grad[1]:
            lefts = _panels(x, columns, "backward")
            to_weight = _sums((gradient.t() @ left if transposed else left.t() @ gradient for left in lefts), rows)
        if ctx.needs_input_grad[2]:
            to_bias = gradient.sum_to_size(ctx.bias_shape)
        return to_x, to_weight, to_bias, None, None, None


def _panels(own: Tensor, axis: Axis, phase: Phase) -> Iterator[Tensor]:
    """The share of each rank on the axis in turn; the next one is on its way while one is used."""
    own = own.detach().contiguous()

    def start(source: int) -> tuple[Tensor, Pending | None]:
        panel = own if source == axis.index else torch.empty_like(own)
        return panel, start_broadcast(panel, axis, source, phase)

    ahead = start(0)
    for source in range(axis.size):
        panel, pending = ahead
        if source + 1 < axis.size:
            ahead = start(source + 1)
        if pending is not None:
            pending.wait()
        yield panel


def _sums(parts: Iterator[Tensor], axis: Axis) -> Tensor:
    """Part ``l`` summed over the axis for its rank ``l``, in turn; a sum is made while the next part is computed."""
    own: Tensor | None = None
    pending: Pending | None = None
    for target, part in enumerate(parts):
        part = part.contiguous()
        if pending is not None:
            pending.wait()
        pending = start_sum(part, axis, target, "backward")
        if target == axis.index:
            own = part
    if pending is not None:
        pending.wait()
    assert own is not None
    return own
