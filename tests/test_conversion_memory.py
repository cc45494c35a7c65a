"""What conversions hold while they run, in plans as in the exact peak."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopart.analysis import analyze
from autopart.block_costs import BlockCosts
from autopart.conversion_prices import ConversionPrices, TensorAxis
from autopart.cost.devices import Link
from autopart.passes.peak_conversion import converting_shares
from autopart.passes.rules.strategies import strategy_named
from autopart.prices import Prices
from autopart.runtime.placement import Placement
from autopart.tracing import capture
from clusters import ideal


@pytest.mark.parametrize(
    ("source", "target", "there", "back"),
    [
        ("P", "S0", 1 + 1 / 4 + 1, 1 / 4 + 1),  # the message; gathered rank by rank, as it lies
        ("P", "S1", 1 + 1 / 4 + 1, 1 / 4 + 1 + 1),  # gathered in another dim it is put together from copies
        ("P", "S0/b", 1 + 1 / 4 + 2, 1 / 4 + 1 + 1),  # each rank's blocks are put together for the message first
        ("S1", "R", 1 / 4 + 1 + 1, 1 + 1 / 4),
        ("R", "B", 1, 1 + 1),  # nothing there, and a sum back
        ("R", "R", 0, 0),
    ],
)
def test_what_a_conversion_holds(source: str, target: str, there: float, back: float) -> None:
    placements = (Placement.parse(source),), (Placement.parse(target),)
    assert converting_shares(*placements, (("tp", 4),), copies=False) == pytest.approx((there, back))


def test_several_steps_hold_what_the_largest_does() -> None:
    partial, shard, replicated = map(Placement.parse, ("P", "S1", "R"))
    axes = (("x", 2), ("y", 2))
    there, back = converting_shares((partial, shard), (replicated, replicated), axes, copies=False)
    assert there == pytest.approx(1 / 2 + 1 + 1)  # the gather of halves, which comes after the sum of these
    assert back == pytest.approx(1 + 1 / 2)


def test_gloo_copies_what_it_scatters() -> None:
    placements = (Placement.parse("P"),), (Placement.parse("S0"),)
    assert converting_shares(*placements, (("tp", 4),), copies=True)[0] == pytest.approx(1 + 1 / 4 + 2)


class _Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(16, 4096, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wide(x).square().mean()


def test_a_block_counts_the_conversions_that_it_reads() -> None:
    """Of a product summed in parts the scatter takes more than any op."""
    analysis = analyze(capture(_Wide(), (torch.randn(8, 16),), check_eval=False))
    (product,) = (node for node in analysis.block_of if "linear" in str(node.target))
    squared = next(node for node in analysis.block_of if "square" in str(node.target))
    axis = TensorAxis("tp", 4, Link("ideal", 1e12, 0.0))
    device = ideal(4).device(0)
    costs, prices = BlockCosts(analysis, "cuda"), Prices(device, analysis.costs("cuda"), 8, analysis.first)
    rows = (strategy_named(squared, "d1", 4, analysis.rules),)
    inner = (strategy_named(product, "k", 4, analysis.rules),)
    assert rows[0] is not None and inner[0] is not None
    chosen = {product: inner, squared: rows}
    storage = {"wide.weight": (Placement.parse("S1"),)}
    found = costs.costs(prices, chosen, storage, ConversionPrices((axis,), device))  # type: ignore[arg-type]
    whole = 8 * 4096 * 4
    assert max(block.transient_bytes for block in found) == pytest.approx((1 + 1 / 4 + 1) * whole)
