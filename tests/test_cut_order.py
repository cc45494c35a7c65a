"""Cuts on several axes: which are tight, and that on three axes those are enough."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, fx, nn

from autopart import offers
from autopart.analysis import Analysis, analyze
from autopart.candidates import Candidates
from autopart.cut_order import CutOrder
from autopart.offers import Offers
from autopart.passes.rules import compatible
from autopart.solver.degrees import Degrees
from autopart.tracing import capture
from clusters import ideal

CUBE = (2, 2, 2)


class Products(nn.Module):
    """Two products of very unlike operands."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(64, 512, bias=False), nn.Linear(512, 64, bias=False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.narrow(torch.nn.functional.gelu(self.wide(x))).square().mean()}


@functools.cache
def analysis() -> Analysis:
    return analyze(capture(Products(), (), {"x": torch.randn(1, 128, 64)}, check_eval=False))


def op(key: str) -> fx.Node:
    return next(node for node in analysis().keys if analysis().keys[node] == key)


def test_a_dim_is_cut_into_what_the_coarser_cut_leaves() -> None:
    """Of a factor cut on both axes, either first: the second cuts halves, not quarters or the whole again."""
    order, node = CutOrder(analysis(), (2, 2)), op("wide:linear")
    named = {tuple(item.name for item in chosen): chosen for chosen in Offers(analysis(), (2, 2)).of(node)}
    assert order.outer_first(node, named["n", "n/2"])
    assert not order.outer_first(node, named["n/2", "n"])
    assert order.tight(node, named["n/2", "n"])
    assert order.tight(node, named["n", "k"])
    assert order.tight(node, named["R", "k"])
    lone = named.get(("n/2", "R"))
    assert lone is None or not order.tight(node, lone), "halves of which nothing leaves the halves"


def test_three_axes_are_offered_tight_cuts_that_share_the_work() -> None:
    found, everything = Offers(analysis(), CUBE), 0
    order, rules = CutOrder(analysis(), CUBE), analysis().rules
    for node in analysis().block_of:
        offered = found.of(node)
        everything += len(offered)
        assert offered
        assert all(compatible(node, item, CUBE, rules, analysis().bound.get(node)) for item in offered)
        assert all(order.tight(node, item) for item in offered if not any(each.is_joint for each in item))
    roles = {tuple(sorted(item.name.split("/")[0] for item in chosen)) for chosen in found.of(op("wide:linear"))}
    assert ("b1", "k", "n") in roles, "the 3-D scheme's"
    assert everything < 1000


@pytest.mark.slow
def test_tight_cuts_cost_next_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best of them against the best of all tuples that nest, whose bound is proved."""
    found = []
    for most in (2, 3):
        monkeypatch.setattr(offers, "_ALL_TUPLES", most)
        candidates = Candidates(analysis(), ideal(8, bandwidth=1e10), 1, "adamw")
        solution = candidates.choose(Degrees(1, 1, CUBE, 1, "1f1b", "none")).solution
        assert solution is not None
        found.append(solution)
    tight, everything = found
    assert tight.objective <= 1.02 * everything.bound
