"""Checks of arguments' values that torch makes by default: no trace has the values that they look at.

They compute nothing, so that a model is captured without them; a program does not make them. What a loss would compute
of an argument that its check refuses, as if it had been another, is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.nn.functional import gaussian_nll_loss
from torch.overrides import TorchFunctionMode


@contextmanager
def unchecked_arguments() -> Iterator[None]:
    """Inside, distributions check their arguments only where they are asked to (``validate_args=True``), and
    ``gaussian_nll_loss`` does not look for negative variances.
    """
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        with _Unchecked():
            yield
    finally:
        Distribution.set_default_validate_args(before)


class _Unchecked(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return (_gaussian_nll if function is gaussian_nll_loss else function)(*args, **(kwargs or {}))


def _gaussian_nll(
    input: Tensor, target: Tensor, var: Tensor | float, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    """As torch documents ``gaussian_nll_loss``: variances are eps at least, which no gradient sees."""
    if not isinstance(var, Tensor):
        if var < 0:
            raise ValueError("gaussian_nll_loss: var is negative")
        var = var * torch.ones_like(input)
    elif var.shape != input.shape:
        if var.shape == input.shape[:-1]:
            var = var.unsqueeze(-1)
        elif not (
            var.dim() == input.dim() and [v for v, i in zip(var.shape, input.shape, strict=True) if v != i] == [1]
        ):
            raise ValueError(f"gaussian_nll_loss: var of {tuple(var.shape)} for an input of {tuple(input.shape)}")
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"gaussian_nll_loss: reduction is none, mean or sum, not {reduction!r}")
    variance = torch.where(var < 0, float("nan"), var)  # torch raises
    variance = variance + (variance.clamp(min=eps) - variance).detach()
    loss = 0.5 * (torch.log(variance) + (input - target) ** 2 / variance)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()
