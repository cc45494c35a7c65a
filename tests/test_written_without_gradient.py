"""What regions without gradient write into one storage, one after the other, in values and in gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopart.tracing import capture
from programs import gradients, run_graph


class Writing(nn.Module):
    def __init__(self, function: Callable[[Writing, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.function = nn.Linear(4, 4), function
        self.register_buffer("row", torch.ones(4))
        self.register_buffer("rows", torch.ones(2, 4))
        self.row: Tensor
        self.rows: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def one_after_the_other(model: Writing, x: Tensor) -> Tensor:
    with torch.no_grad():
        model.row.add_(model.linear(x).mean(0))
    y = model.linear(x) * model.row.clone()
    with torch.no_grad():
        model.row.mul_(y.mean(0))
    z = y * model.row.clone()
    with torch.no_grad():
        model.row += 1
    return z.mean() + model.row.mean()


def through_a_view(model: Writing, x: Tensor) -> Tensor:
    with torch.no_grad():
        first = model.rows[0]
        first.add_(model.linear(x).mean(0))
    y = model.linear(x) * first.clone()
    with torch.no_grad():
        first.mul_(y.mean(0))
    return (y * model.rows[0]).mean() + model.rows.mean()


def made_in_a_region(model: Writing, x: Tensor) -> Tensor:
    with torch.no_grad():
        made = model.linear(x) * 2
        flat = made.view(-1)
    y = model.linear(x) * made.clone()
    with torch.no_grad():
        made.mul_(3)
    return (y * flat.view(4, 4)).mean()


def with_gradient_then(model: Writing, x: Tensor) -> Tensor:
    with torch.no_grad():
        made = model.linear(x) * 2
    made += model.linear(x)
    return made.square().mean()


@pytest.mark.parametrize(
    "function", [one_after_the_other, through_a_view, made_in_a_region, with_gradient_then], ids=lambda f: f.__name__
)
def test_equals_eager(function: Callable[[Writing, Tensor], Tensor]) -> None:
    model, x = Writing(function).double(), torch.randn(4, 4, dtype=torch.float64)
    reference = copy.deepcopy(model)
    program = capture(model, (x,), check_eval=False)
    loss, *written = run_graph(program, program.graph, model, {"x": x}, 4)
    expected = reference(x)
    for found in (loss, expected):
        found.backward()
    assert torch.equal(loss, expected)
    for name, value in zip(program.updated_buffers, written, strict=True):
        assert torch.equal(value, reference.get_buffer(name))
    torch.testing.assert_close(gradients(model), gradients(reference), rtol=1e-14, atol=1e-15)
