"""Prices of conversions: one by one and as tables, on like and unlike links."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from autopart.cluster import Cluster
from autopart.conversion_prices import ConversionPrices, TensorAxis
from autopart.cost.communication import transition
from autopart.cost.devices import Link
from autopart.runtime.placement import BROADCAST, PARTIAL, REPLICATE, Placements, nested, shard

DEVICE = Cluster.parse("1xA100-80GB").devices[0]
SINGLE = (REPLICATE, BROADCAST, PARTIAL, shard(0), shard(0, 2), shard(0, 4), shard(1), shard(0, 1, True))


def prices_of(sizes: tuple[int, ...], bandwidths: tuple[float, ...]) -> ConversionPrices:
    axes = [
        TensorAxis(name, parts, Link(name, bandwidth, 1e-6))
        for name, parts, bandwidth in zip("xyz", sizes, bandwidths, strict=False)
    ]
    return ConversionPrices(tuple(axes), DEVICE)


def tuples(sizes: tuple[int, ...]) -> list[Placements]:
    return [item for item in itertools.product(SINGLE, repeat=len(sizes)) if nested(item, sizes)]


@pytest.mark.parametrize("differentiable", [True, False])
def test_one_axis_costs_what_its_transition_does(differentiable: bool) -> None:
    prices = prices_of((4,), (1e11,))
    for source, target in itertools.product(SINGLE, repeat=2):
        found = prices.seconds((source,), (target,), 3 * 2**20, differentiable)
        step = transition(source, target, 3 * 2**20, 4, prices.axes[0].link, DEVICE, differentiable)
        assert found == pytest.approx((step.forward_s, step.backward_s), rel=1e-6, abs=1e-12)


@pytest.mark.parametrize(
    ("sizes", "bandwidths"), [((2, 4), (1e10, 1e11)), ((2, 2), (1e11, 1e11)), ((4, 2), (1e11, 1e9))]
)
def test_tables_hold_what_pairs_cost(sizes: tuple[int, ...], bandwidths: tuple[float, ...]) -> None:
    prices = prices_of(sizes, bandwidths)
    offered = random.Random(0).sample(tuples(sizes), 24)
    table = prices.table(offered, offered, 2**20, True)
    pairs = [[sum(prices.seconds(have, want, 2**20, True)) for want in offered] for have in offered]
    assert np.allclose(table, np.array(pairs), rtol=1e-9, atol=1e-15)
    assert (np.diag(table) == 0).all() and (table >= 0).all()
    hiding = [random.Random(index).choice((0.0, 1e-5, 1.0)) for index in range(len(offered))]
    table = prices.table(offered, offered, 2**20, True, hiding)
    for row, have in enumerate(offered):
        for column, (want, most) in enumerate(zip(offered, hiding, strict=True)):
            pairs[row][column] -= min(prices.beside(have, want, 2**20), most)
    assert np.allclose(table, np.array(pairs), rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize(("sizes", "differentiable"), [((2, 2, 2), True), ((2, 3, 2), False)])
def test_tables_of_three_axes(sizes: tuple[int, ...], differentiable: bool) -> None:
    prices = prices_of(sizes, (1e10, 1e11, 3e11))
    offered = random.Random(1).sample(tuples(sizes), 24)
    table = prices.table(offered, offered, 2**24, differentiable)
    pairs = [[sum(prices.seconds(have, want, 2**24, differentiable)) for want in offered] for have in offered]
    assert np.allclose(table, np.array(pairs), rtol=1e-9, atol=1e-15)
    if differentiable:
        table = prices.table(offered, offered, 2**24, True, [1.0] * len(offered))
        hidden = [[prices.beside(have, want, 2**24) for want in offered] for have in offered]
        assert np.allclose(table, np.array(pairs) - np.array(hidden), rtol=1e-9, atol=1e-15)


def test_a_sharded_axis_leaves_less_to_convert() -> None:
    prices = prices_of((2, 4), (1e10, 1e10))
    whole = sum(prices.seconds((REPLICATE, shard(0)), (REPLICATE, REPLICATE), 2**30, False))
    half = sum(prices.seconds((shard(1), shard(0)), (shard(1), REPLICATE), 2**30, False))
    assert half == pytest.approx(whole / 2, rel=1e-3)
