"""Sums of a layer's strategies and modules that run again: the same however many are found at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from autopart.solver import layer_sums
from autopart.solver.layer_sums import LayerSums
from autopart.solver.tensor_problem import Choice, Edge, Op, TensorProblem
from autopart.solver.tensor_sums import Eliminator

SETS, PRICES = 40, 12


def of(seed: int) -> LayerSums:
    """Three ops of two choices each, and sets that run again and keep at random."""
    rng = np.random.default_rng(seed)
    ops = tuple(
        Op(f"op{at}", tuple(Choice(str(way), 0.0, (way,), (way,) if at else ()) for way in range(2))) for at in range(3)
    )
    edges = [
        Edge(at, 0, ((at + 1, 0),), {(made, read): rng.random() for made in range(2) for read in range(2)})
        for at in range(2)
    ]
    kept = rng.random((6, SETS + 1))
    kept[:, -1] = kept.min(axis=1) / 2  # frees what any does
    again = rng.random((6, SETS + 1)) / 10
    again[:, -1] = 0.0
    return LayerSums(
        eliminator=Eliminator(TensorProblem(ops, tuple(edges)), others=edges, more=[]),
        seconds=rng.random(6),
        twice=1 + rng.random(6),
        weights=rng.random(6),
        kept=kept,
        again=again,
        constant=np.zeros(SETS + 1),
        times=np.zeros((0, SETS + 1)),
        first=np.arange(0, 6, 2),
    )


@pytest.mark.parametrize("seed", range(5))
def test_they_are_found_a_few_at_a_time(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(seed)
    prices = rng.random(PRICES), rng.random(PRICES), rng.random(PRICES) < 0.5
    sums, asked = of(seed), list[int]()
    whole = sums.least(*prices)
    totals = Eliminator.totals

    def counted(self: Eliminator, costs: NDArray[np.float64], *others: Any) -> NDArray[np.float64]:
        asked.append(costs.size)
        return totals(self, costs, *others)

    monkeypatch.setattr(Eliminator, "totals", counted)
    monkeypatch.setattr(layer_sums, "_AT_ONCE", 60)
    assert (sums.least(*prices) == whole).all()
    # two that are asked for all prices at once come before
    assert len(asked) > 4 and max(asked[2:]) <= 60 < asked[0]
