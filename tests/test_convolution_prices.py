"""Convolutions in narrow groups: how wide they are, and that they are slower than products with as many FLOPs."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from autopart.analysis import analyze
from autopart.cost.compute import narrow_rate
from autopart.cost.devices import device
from autopart.cost.products import channels_of_group
from autopart.passes.rules import strategies
from autopart.passes.storage import op_name
from autopart.prices import Prices
from autopart.tracing import capture


@pytest.mark.parametrize("name", ["V100-16GB", "A100-80GB", "H100", "CPU"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_narrower_groups_are_slower(name: str, dtype: str) -> None:
    one = device(name)
    rates = [narrow_rate(one, dtype, channels) for channels in (1, 2, 4, 8, 16, 31, 32, 64)]
    assert all(narrower <= wider for narrower, wider in itertools.pairwise(rates))
    assert rates[0] < 0.1 * rates[-1]
    assert rates[-2] == rates[-1] == one.product_rate(dtype)


def test_narrow_groups_compute_on_float32_units() -> None:
    # Tiles of 128 rows and one column: (1 + 24 * 3 / 256) / (1 + 24 * (1 / 128 + 1)) of 19.5 TFLOP/s.
    assert narrow_rate(device("A100-80GB"), "float16", 1) == pytest.approx(19.5e12 * 1.28125 / 25.1875)


class Convolutions(nn.Module):
    """Of eight channels: in one group, depthwise, in two groups to four channels, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Conv2d(8, 8, 3, padding=1)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.halves = nn.Conv2d(8, 4, 1, groups=2)
        self.back = nn.ConvTranspose2d(4, 8, 1, groups=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.back(self.halves(self.depthwise(self.whole(x)))).square().mean()


def test_channels_of_a_group_and_bounds() -> None:
    with torch.device("meta"):
        analysis = analyze(capture(Convolutions(), (torch.zeros(2, 8, 64, 64),), {}, check_eval=False))
    found = strategies(analysis.graph, 2)
    nodes = [node for node in analysis.graph.nodes if node.op == "call_function" and "conv" in op_name(node)]
    assert [channels_of_group(node) for node in nodes] == [None, 1, 2, 2]
    for name in ("A100-80GB", "CPU"):
        one = device(name)
        prices = Prices(one, analysis.costs(one.kind), 64)
        for node in nodes:
            for strategy in found[node]:
                shares = prices.shares(node, (strategy,), (2,))
                assert prices.shared_seconds(node, *shares) == prices.op_seconds(node, (strategy,), (2,))
        cost = analysis.costs(one.kind)[nodes[1]]
        forward, backward = prices.op_seconds(nodes[1])
        assert forward >= cost.flops_forward.at(64) / narrow_rate(one, "float32", 1)
        assert backward >= cost.flops_backward.at(64) / narrow_rate(one, "float32", 1)
