"""Gradients that are known before the script's backward are given away by it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopart.runtime.attach import hand_out


@pytest.mark.parametrize("factor", [1.0, 0.25])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_losss_gradient_scales_them(factor: float, dtype: torch.dtype) -> None:
    parameters = [nn.Parameter(torch.zeros(3, dtype=dtype)) for _ in range(3)]
    known = [torch.arange(3).to(dtype), torch.ones(3, dtype=dtype), None]
    expected = [None if gradient is None else factor * gradient for gradient in known]
    (hand_out(torch.tensor(2.0), known, parameters) * factor).backward()
    torch.testing.assert_close([p.grad for p in parameters[:2]], expected[:2])
    assert parameters[2].grad is None


def test_a_plain_backward_computes_nothing() -> None:
    parameter, known = nn.Parameter(torch.zeros(3)), torch.ones(3)
    hand_out(torch.tensor(2.0), [known], [parameter]).backward()
    assert parameter.grad is not None and known._version == 0


def test_they_are_given_once() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    loss = hand_out(torch.tensor(2.0), [torch.ones(3)], [parameter])
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="handed out already"):
        loss.backward()
