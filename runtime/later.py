"""Gradients of weights that are computed while the gradient of what the products read goes over a mesh axis.

Of a product with a weight, such as a column-split linear layer, the backward makes two gradients: the input's, which is
then exchanged with other ranks, and the weight's, which nothing waits for. torch makes both and then goes on; here the
input's is made first and its collective started, as in Megatron-LM's linear layer with asynchronous all-reduce::

    later = collectives.Later(query, key)                     forward: x -> x' -> products
    x = collectives.sum_gradients(x, tp, later=later)         backward: all products' input gradients, then of x'
    q, k = later.linear(x, query), later.linear(x, key)           start, the weights' gradients, wait

All weights enter the converting node, so that their gradients leave it together with that of x; products have no edge
to them. Nothing is put off under a split backward, without gradients, and where x wants none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopart.runtime.traffic import Phase

Begin = Callable[[Tensor, Phase], Callable[[], Tensor]]
"""Starts a collective; what it returns waits for the result."""


class Later:
    """The products that read one converted tensor, by their weights, which it keeps until that is converted."""

    def __init__(self, *weights: Tensor) -> None:
        self._weights = weights
        self._at = {id(weight): index for index, weight in enumerate(weights)}
        self._active = False
        self._put_off: list[tuple[int, Callable[[], Tensor]]] = []

    def is_of_use(self, x: Tensor) -> bool:
        return torch.is_grad_enabled() and x.requires_grad and any(weight.requires_grad for weight in self._weights)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """As torch's, of weights ``[n, k]``."""
        if not self._takes(x, weight):
            return F.linear(x, weight, bias)
        return _Product.apply(self, self._at[id(weight)], True, x, weight.detach(), bias)

    def addmm(self, bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """As torch's, of weights ``[k, n]``."""
        if not self._takes(x, weight):
            return torch.addmm(bias, x, weight)
        return _Product.apply(self, self._at[id(weight)], False, x, weight.detach(), bias)

    def mm(self, x: Tensor, weight: Tensor) -> Tensor:
        """As torch's, of weights ``[k, n]``."""
        if not self._takes(x, weight):
            return torch.mm(x, weight)
        return _Product.apply(self, self._at[id(weight)], False, x, weight.detach(), None)

    def _takes(self, x: Tensor, weight: Tensor) -> bool:
        return self._active and x.requires_grad and weight.requires_grad and torch.is_grad_enabled()

    def start(self) -> tuple[Tensor, ...]:
        """From now on products put their weights' gradients off; returns the weights, in the order of their numbers."""
        weights, self._weights, self._active = self._weights, (), True
        return weights

    def put_off(self, index: int, gradient: Callable[[], Tensor]) -> None:
        """The gradient of a weight, by its number, to be computed beside the collective."""
        self._put_off.append((index, gradient))

    def gradients(self) -> list[Tensor | None]:
        """Computes what was put off, by weight."""
        made: list[Tensor | None] = [None] * len(self._at)
        waiting, self._put_off = self._put_off, []
        for index, gradient in waiting:
            before = made[index]
            made[index] = gradient() if before is None else before + gradient()
        return made


def convert_beside(x: Tensor, forward: Callable[[Tensor, Phase], Tensor], begin: Begin, later: Later) -> Tensor:
    """Runs ``forward``, and backward ``begin`` and beside it what was put off."""
    return _Beside.apply(later, forward, begin, x, *later.start())


class _Beside(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, later: Later, forward: Callable[[Tensor, Phase], Tensor], begin: Begin, x: Tensor, *weights: Tensor
    ) -> Tensor:
        ctx.parts = later, begin
        return forward(x, "forward")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        later, begin = ctx.parts
        end = begin(gradient, "backward")
        made = later.gradients()
        return None, None, None, end(), *made


class _Product(torch.autograd.Function):
    """``x @ weight.T + bias`` (transposed) or ``x @ weight + bias``, whose weight's gradient is put off."""

    @staticmethod
    def forward(
        ctx: Any, later: Later, index: int, transposed: bool, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parts = later, index, transposed, None if bias is None else bias.shape
        if transposed:
            return F.linear(x, weight, bias)
        return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        later, index, transposed, bias = ctx.parts
        x, weight = ctx.saved_tensors

        def of_weight() -> Tensor:
            rows, sums = (torch.atleast_2d(item).flatten(0, -2) for item in (x, gradient))
            return sums.t() @ rows if transposed else rows.t() @ sums

        later.put_off(index, of_weight)
        of_bias = gradient.sum_to_size(bias) if ctx.needs_input_grad[5] else None
        return None, None, None, gradient @ (weight if transposed else weight.t()), None, of_bias
