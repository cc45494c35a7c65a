"""Placements on several axes: which hold together, and the transitions from one tuple to another."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autopart.passes.conversion import Axes, conversion
from autopart.runtime.mesh import Axis
from autopart.runtime.placement import Kind, Placement, Placements, local_cuts, nested, take_share
from autopart.runtime.traffic import Traffic
from launch import launch

SHAPE = (16, 24)
TEXTS = ("R", "P", "B", "S0", "S0/2", "S0/4", "S1", "S1/2", "S1/3", "S1/6", "S1/12")


def placements(text: str) -> Placements:
    return tuple(Placement.parse(item) for item in text.split())


@pytest.mark.parametrize(
    ("text", "sizes", "holds"),
    [
        ("S0 S0/2", (2, 2), True),
        ("S0/2 S0", (2, 2), True),
        ("S0 S0", (2, 2), False),
        ("S0 S0/2", (4, 2), False),
        ("S0 S0/6", (2, 2), True),
        ("S0 S1", (2, 2), True),
        ("S0 P", (2, 2), True),
        ("S0 S0/b", (2, 2), False),
        ("S0/b S0/2b", (2, 2), True),
        ("S0/2b S0/2", (2, 2), False),
        ("S0 S0/4 S0/2", (2, 2, 2), True),
        ("S0 S0/2 S0/2", (2, 2, 2), False),
        ("S0 S0 S0/2", (2, 1, 2), True),  # an axis of one rank cuts nothing
    ],
)
def test_nested(text: str, sizes: tuple[int, ...], holds: bool) -> None:
    assert nested(placements(text), sizes) is holds


def test_every_cut_counts_in_the_whole() -> None:
    """``S0, S0/2`` are four quarters in rank order, ``S0/2, S0`` the same quarters with the axes exchanged."""
    whole = torch.arange(8)
    for text, quarter in (("S0 S0/2", lambda x, y: 2 * x + y), ("S0/2 S0", lambda x, y: 2 * y + x)):
        for x, y in itertools.product(range(2), repeat=2):
            start = 2 * quarter(x, y)
            assert take_share(whole, placements(text), (2, 2), (x, y)).tolist() == [start, start + 1]
    assert [(index, str(cut)) for index, cut in local_cuts(placements("S1/12 S0 S1/3"), (2, 2, 4))] == [
        (1, "S0"),
        (2, "S1/3"),
        (0, "S1/3"),
    ]


def steps(source: str, target: str, axes: Axes = (("x", 2), ("y", 2))) -> list[tuple[str, str]] | None:
    found = conversion(placements(source), placements(target), axes)
    return None if found is None else [(axes[step.axis][0], step.transition.call("v", "a")) for step in found]


def test_order() -> None:
    """Shards are taken before others are gathered, and sums of shards before the whole."""
    assert steps("S0 R", "R S1") == [
        ("y", "collectives.split(v, a, dim=1)"),
        ("x", "collectives.all_gather(v, a, dim=0)"),
    ]
    assert steps("P P", "R S0") == [
        ("y", "collectives.reduce_scatter(v, a, dim=0)"),
        ("x", "collectives.all_reduce(v, a)"),
    ]
    # Exchanged cuts of one dim have no direct order: one of them is gathered on the way.
    assert steps("S0 S0/2", "S0/2 S0") == [
        ("x", "collectives.all_gather(v, a, dim=0)"),
        ("y", "collectives.all_to_all(v, a, dim=0, to_dim=0, outer=2)"),
        ("x", "collectives.split(v, a, dim=0)"),
    ]
    assert steps("S0/b S0/2b", "S0/b R") == [("y", "collectives.all_gather(v, a, dim=0, outer=b)")]
    assert steps("S0 S0", "R R") is None and steps("R R", "S0 S0") is None
    assert steps("S0 P", "S0 P") == []
    assert steps("S0 P", "R P", (("x", 1), ("y", 2))) == []


def cases(sizes: Sequence[int], count: int) -> list[tuple[Placements, Placements]]:
    """Random pairs of tuples that nest and divide."""
    dice = random.Random(5)
    offered = [Placement.parse(text) for text in TEXTS]
    found: list[tuple[Placements, Placements]] = []

    def fits(tuple_: Placements) -> bool:
        cuts = [(p, parts) for p, parts in zip(tuple_, sizes, strict=True) if p.is_shard]
        return nested(tuple_, sizes) and all(SHAPE[p.dim] % (p.outer * parts) == 0 for p, parts in cuts)

    while len(found) < count:
        source, target = (tuple(dice.choice(offered) for _ in sizes) for _ in range(2))
        if fits(source) and fits(target):
            found.append((source, target))
    return found


def held(whole: Tensor, spec: Placements, sizes: Sequence[int], place: Sequence[int], summands: Kind) -> Tensor:
    """What a rank holds; where it holds a summand, 3 times the value, and -2 times spread over the others."""
    share = take_share(whole, spec, sizes, place)
    for p, parts, index in zip(spec, sizes, place, strict=True):
        if p.kind is summands:
            share = share * (3.0 if index == 0 else -2.0 / (parts - 1))
    return share.clone()


def convert_all(sizes: tuple[int, ...], count: int) -> list[tuple[Tensor, Tensor]]:
    """Every case forward and backward on this rank."""
    names = "xyz"[: len(sizes)]
    layout = torch.arange(math.prod(sizes)).reshape(sizes)
    mesh = dist.device_mesh.DeviceMesh("cpu", layout, mesh_dim_names=tuple(names))
    place = (layout == dist.get_rank()).nonzero()[0].tolist()
    traffic = Traffic()
    ranks = [
        Axis(name, parts, index, mesh.get_group(name), traffic)
        for name, parts, index in zip(names, sizes, place, strict=True)
    ]
    axes: Axes = tuple(zip(names, sizes, strict=True))
    whole = torch.arange(math.prod(SHAPE), dtype=torch.float64).reshape(SHAPE)
    results = []
    for source, target in cases(sizes, count):
        x = held(whole, source, sizes, place, Kind.PARTIAL).requires_grad_()
        y = x
        found = conversion(source, target, axes)
        assert found is not None
        for step in found:
            y = step.transition(y, ranks[step.axis])
        (gradient,) = torch.autograd.grad(y, x, held(whole + 1, target, sizes, place, Kind.BROADCAST))
        results.append((y.detach(), gradient))
    return results


def check(found: Sequence[Tensor], whole: Tensor, spec: Placements, sizes: Sequence[int], summands: Kind) -> None:
    """The ranks' tensors are what the placements promise: shares, which add up on the axes that hold summands."""
    layout = torch.stack(list(found)).reshape(*sizes, *found[0].shape)
    summed = [index for index, p in enumerate(spec) if p.kind is summands]
    layout = layout.sum(summed, keepdim=True).expand_as(layout) if summed else layout
    for place in itertools.product(*map(range, sizes)):
        torch.testing.assert_close(layout[place], take_share(whole, spec, sizes, place))


@pytest.mark.parametrize(
    ("sizes", "count"),
    [
        ((2, 2), 60),
        pytest.param((2, 2), 300, marks=pytest.mark.slow),
        pytest.param((2, 2, 2), 200, marks=pytest.mark.slow),
    ],
)
def test_conversions_on_real_ranks(sizes: tuple[int, ...], count: int) -> None:
    ranks: list[Any] = launch(convert_all, math.prod(sizes), sizes, count)
    whole = torch.arange(math.prod(SHAPE), dtype=torch.float64).reshape(SHAPE)
    for index, (source, target) in enumerate(cases(sizes, count)):
        check([rank[index][0] for rank in ranks], whole, target, sizes, Kind.PARTIAL)
        check([rank[index][1] for rank in ranks], whole + 1, source, sizes, Kind.BROADCAST)
