"""What kernels move and how many there are, of ops as PyTorch runs them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from autopart.analysis import Analysis, analyze
from autopart.cost.small_layer import SmallLayer
from autopart.passes.annotate import OpCost
from autopart.passes.storage import op_name
from autopart.tracing import capture

ROWS, WIDTH = 4, 64
SIZE = ROWS * WIDTH * 4
"""Bytes of an activation."""


class Applied(nn.Module):
    """A product, a function of its result, and a product."""

    def __init__(self, function: Callable[[Tensor], Tensor], width: int = WIDTH) -> None:
        super().__init__()
        self.function = function
        self.before, self.after = nn.Linear(8, width, bias=False), nn.Linear(width, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.function(self.before(x))).sum()


def costs_of(model: nn.Module, inner: int = 8) -> tuple[Analysis, dict[str, list[OpCost]]]:
    """By op the costs on CUDA."""
    analysis = analyze(capture(model, (torch.randn(ROWS, inner),)))
    found: dict[str, list[OpCost]] = {}
    for node in analysis.block_of:
        found.setdefault(op_name(node), []).append(_cost(analysis, node))
    return analysis, found


def _cost(analysis: Analysis, node: fx.Node) -> OpCost:
    return analysis.costs("cuda")[analysis.first.get(node, node)]


@pytest.mark.parametrize(
    ("function", "name", "forward", "backward", "kernels"),
    [
        (torch.tanh, "tanh", 2, 3, (1, 1)),
        (lambda x: x**3.0, "pow", 2, 7, (1, 3)),
        (lambda x: x * 2.0, "mul", 2, 2, (1, 1)),
        (lambda x: x + 1.0, "add", 2, 0, (1, 0)),
        (lambda x: F.layer_norm(x, (WIDTH,)), "layer_norm", 4, 3, (1, 1)),
        (lambda x: F.softmax(x, -1), "softmax", 2, 3, (1, 1)),
    ],
)
def test_passes_over_activations(
    function: Callable[[Tensor], Tensor], name: str, forward: float, backward: float, kernels: tuple[int, int]
) -> None:
    """In sizes of an activation; statistics of rows are small beside them."""
    (cost,) = costs_of(Applied(function))[1][name]
    assert cost.bytes_forward.at(ROWS) == pytest.approx(forward * SIZE, abs=0.05 * SIZE)
    assert cost.bytes_backward.at(ROWS) == pytest.approx(backward * SIZE, abs=0.05 * SIZE)
    assert (cost.kernels_forward, cost.kernels_backward) == kernels
    assert not cost.after_bytes


class Scaled(nn.Module):
    """A product with a weight for each column, between two others."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(8, WIDTH, bias=False), nn.Linear(WIDTH, 1, bias=False)
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.before(x) * self.weight).sum()


def test_what_is_repeated_gets_a_gradient_for_each_repetition() -> None:
    (cost,) = costs_of(Scaled())[1]["mul"]
    small = WIDTH * 4
    assert cost.bytes_backward.at(ROWS) == 2 * SIZE + small + 3 * SIZE
    assert (cost.after_bytes.at(ROWS), cost.kernels_backward) == (3 * SIZE, 3)
    (cost,) = costs_of(Applied(lambda x: x * x.mean(-1, keepdim=True)))[1]["mul"]
    assert (cost.bytes_backward.at(ROWS), cost.kernels_backward) == (2 * SIZE + ROWS * 4 + 3 * SIZE + SIZE, 3)


def test_long_rows_are_read_several_times() -> None:
    width = 2048
    (cost,) = costs_of(Applied(lambda x: F.softmax(x, -1), width))[1]["softmax"]
    assert cost.bytes_forward.at(ROWS) == 4 * ROWS * width * 4
    assert cost.bytes_backward.at(ROWS) == 4 * ROWS * width * 4


def test_gradients_of_a_value_with_several_readers_are_added_up() -> None:
    costs = costs_of(Applied(lambda x: torch.sin(x) * torch.cos(x) * torch.tanh(x)))[1]
    first = costs["linear"][0]
    assert first.after_bytes.at(ROWS) == 2 * 3 * SIZE
    assert first.kernels_backward == 1 + 2  # the input wants no gradient


def test_an_op_that_reads_a_value_twice_gives_it_two_gradients() -> None:
    costs = costs_of(Applied(lambda x: torch.mul(x, x)))[1]
    assert costs["linear"][0].after_bytes.at(ROWS) == 3 * SIZE


def test_a_bias_takes_a_sum_over_rows() -> None:
    model = nn.Sequential(nn.Linear(8, WIDTH), nn.Linear(WIDTH, 1))
    costs = costs_of(model)[1]["linear"]
    assert [cost.after_bytes.at(ROWS) for cost in costs] == [3 * SIZE, 3 * SIZE // WIDTH]
    assert [cost.kernels_backward for cost in costs] == [2, 3]


def test_views_cost_what_their_backward_makes() -> None:
    costs = costs_of(Applied(lambda x: torch.cat([part.sin() for part in x.split(WIDTH // 2, -1)], -1)))[1]
    (split,) = costs["split_with_sizes"]
    assert not split.bytes_forward and split.bytes_backward.at(ROWS) == 2 * SIZE
    costs = costs_of(Applied(lambda x: torch.cat([x[:, :16].sin(), x[:, 16:]], -1)))[1]
    parts = [cost.bytes_backward.at(ROWS) for cost in costs["slice"] if cost.bytes_backward]
    assert sum(parts) == 2 * SIZE + 2 * SIZE
    costs = costs_of(Applied(lambda x: (x.unsqueeze(1).expand(-1, 3, -1).sin()).sum(1)))[1]
    assert costs["expand"][0].bytes_backward.at(ROWS) == 3 * SIZE + SIZE


def test_the_batch_size_stays_open_where_it_is_a_width_too() -> None:
    """Sizes are symbols; asking whether one equals a number would fix it at the example's."""
    analysis = analyze(capture(Scaled(), (torch.randn(WIDTH, 8),)))
    sizes = [node.meta["val"].shape[0] for node in analysis.block_of if node.meta["val"].dim()]
    assert sizes and all(isinstance(size, torch.SymInt) and size.node.expr.free_symbols for size in sizes)


def test_the_small_layer_has_as_many_kernels_as_are_counted() -> None:
    """By which a calibration divides what the host takes for a step of such layers."""

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, SmallLayer.WIDTH)
            self.layers = nn.Sequential(*(SmallLayer() for _ in range(3)))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(self.first(x)).sum()

    analysis = analyze(capture(Stack(), (torch.randn(2, 16, 8),)))
    inside = [node for node in analysis.block_of if "layers.1" in node.meta["path"]]
    found = [_cost(analysis, node) for node in inside]
    assert sum(cost.kernels_forward + cost.kernels_backward for cost in found) == SmallLayer.KERNELS
