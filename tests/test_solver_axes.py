"""Strategies on two tensor axes: column generation, its bounds, and a gap, against brute force."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autopart.cluster import Cluster
from autopart.conversion_prices import ConversionPrices, TensorAxis
from autopart.cost.devices import Link
from autopart.runtime.errors import InfeasibleError
from autopart.runtime.placement import BROADCAST, PARTIAL, REPLICATE, nested, shard
from autopart.solver import brute, tensor
from autopart.solver.linear import LinearModel
from autopart.solver.tensor_arrays import ProblemArrays, compiled
from autopart.solver.tensor_ascent import Ascent
from autopart.solver.tensor_bound import completed, free
from autopart.solver.tensor_flow import Duals, Flow, Part, largest_seconds, whole
from autopart.solver.tensor_problem import IMPOSSIBLE, Choice, CostTable, Edge, Op, TensorProblem

SIZES = (2, 4)
PRICES = ConversionPrices(
    (TensorAxis("x", 2, Link("slow", 1e10, 1e-5)), TensorAxis("y", 4, Link("fast", 1e11, 1e-6))),
    Cluster.parse("1xA100-80GB").devices[0],
)
SINGLE = (REPLICATE, BROADCAST, PARTIAL, shard(0), shard(0, 2), shard(0, 4), shard(1))
TUPLES = [item for item in itertools.product(SINGLE, repeat=2) if nested(item, SIZES)]


def two_axes(rng: random.Random, ops: int, choices: int, memory: bool) -> TensorProblem:
    """Ops with tuples of placements, whose values have random sizes; conversions cost what they do on 2x4 devices."""
    built: list[Op] = []
    uses: dict[int, list[tuple[int, int]]] = {}
    for number in range(ops):
        sources = [rng.randrange(max(0, number - 3), number) for _ in range(rng.randint(1, 3) if number else 0)]
        for slot, source in enumerate(sources):
            uses.setdefault(source, []).append((number, slot))
        options = [
            Choice(
                f"c{index}",
                rng.random() * 5e-3,
                (rng.randrange(len(TUPLES)),),
                tuple(rng.randrange(len(TUPLES)) for _ in sources),
                float(rng.randint(0, 100)) if memory else 0.0,
            )
            for index in range(choices)
        ]
        built.append(Op(f"op{number}", tuple(options)))
    edges = []
    for source, users in uses.items():
        have = sorted({choice.outputs[0] for choice in built[source].choices})
        want = sorted({choice.inputs[slot] for op, slot in users for choice in built[op].choices})
        size = 2.0 ** rng.randint(20, 26)
        seconds = PRICES.table([TUPLES[p] for p in have], [TUPLES[t] for t in want], size, rng.random() < 0.8)
        edges.append(Edge(source, 0, tuple(users), CostTable(have, want, seconds), rng.choice([1.0, 3.0])))
    limit = None
    if memory:
        least = sum(min(choice.memory for choice in op.choices) for op in built)
        most = sum(max(choice.memory for choice in op.choices) for op in built)
        limit = float(round(least + (most - least) * rng.choice([0.0, 0.1, 0.3, 0.6])))
    return TensorProblem(tuple(built), tuple(edges), limit)


@pytest.mark.parametrize("seed", range(200))
def test_equals_brute_force(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if seed % 2:
        monkeypatch.setattr(tensor, "_FEW_PAIRS", 0)  # however small: in parts
        monkeypatch.setattr(tensor, "_AT_ONCE", 0)  # and what the proof has little against first
        monkeypatch.setattr(tensor, "_ROOMY", 1.0)
    rng = random.Random(seed)
    problem = two_axes(rng, rng.randint(2, 6), rng.randint(2, 4), memory=rng.random() < 0.6)
    best = brute.best_choices(problem)
    if best is None:
        with pytest.raises(InfeasibleError):
            tensor.solve(problem)
        return
    solution = tensor.solve(problem)
    assert solution.objective == pytest.approx(best[1], rel=1e-6)
    assert solution.gap == 0 and problem.fits(solution.choices)


def test_bytes_are_priced_until_something_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where most conversions are impossible, what local search finds does not fit, and parts need an assignment."""
    rng = random.Random(0)
    problem = two_axes(rng, 12, 20, memory=True)
    edges = []
    for edge in problem.edges:
        have = sorted({choice.outputs[0] for choice in problem.ops[edge.source].choices})
        want = sorted({choice.inputs[slot] for op, slot in edge.uses for choice in problem.ops[op].choices})
        seconds = edge.table(have, want)
        seconds[np.array([[p != t and rng.random() < 0.6 for t in want] for p in have])] = IMPOSSIBLE
        edges.append(replace(edge, cost=CostTable(have, want, seconds)))
    problem = replace(problem, edges=tuple(edges), memory_limit=300.0)
    sizes, priced = list[int](), list[float]()
    price = tensor._Search._price_bytes

    def counting(arrays: ProblemArrays) -> Part:
        sizes.append(arrays.pairs)
        return whole(arrays)

    def pricing(search: tensor._Search, unit: float) -> None:
        assert search.best.choices is None
        price(search, unit)
        priced.append(search.best.objective)

    monkeypatch.setattr(tensor, "whole", counting)
    found = tensor.solve(problem)
    assert sizes and not priced
    sizes.clear()
    monkeypatch.setattr(tensor._Search, "_price_bytes", pricing)
    monkeypatch.setattr(tensor, "_FEW_PAIRS", 0)
    parts = tensor.solve(problem)
    assert priced and priced[0] < np.inf and not sizes
    assert parts.objective == pytest.approx(found.objective, rel=1e-6) and parts.gap == found.gap == 0


@pytest.mark.parametrize("seed", range(4))
def test_parts_find_what_the_whole_model_does(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = two_axes(random.Random(seed), 14, 8, memory=seed % 2 == 1)
    monkeypatch.setattr(tensor, "_FEW_PAIRS", 10**9)
    whole = tensor.solve(problem)
    monkeypatch.setattr(tensor, "_FEW_PAIRS", 0)
    parts = tensor.solve(problem)
    assert parts.objective == pytest.approx(whole.objective, rel=1e-6) and parts.gap == whole.gap == 0


@pytest.mark.parametrize("seed", [0, 9])
def test_no_rounds_and_no_integers_that_lower_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The relaxation, of two small models a round, ends when the bound is as high as a part's optimum and prices
    hardly rise; the integer solver begins with little.
    """
    relaxed, solved = list[int](), list[int]()
    for name, sizes in (("relax", relaxed), ("solve", solved)):
        found = getattr(LinearModel, name)

        def counting(model: LinearModel, *args: Any, found: Any = found, sizes: Any = sizes, **more: Any) -> Any:
            sizes.append(model.variables)
            return found(model, *args, **more)

        monkeypatch.setattr(LinearModel, name, counting)
    solution = tensor.solve(two_axes(random.Random(seed), 30, 50, memory=True), gap=0.005)
    assert solution.gap <= 0.005 and solution.method == "mip"
    assert len(relaxed) <= 20 and len(solved) > 3
    assert solved == sorted(solved) and solved[0] < solved[-1] / 8 and max(relaxed) < solved[-1]


@pytest.mark.parametrize("seed", range(8))
def test_prices_stay_in_their_box(seed: int) -> None:
    """The optimum rises with the box, from the bound that its middle gives to that of the relaxation."""
    arrays = compiled(two_axes(random.Random(seed), 8, 6, memory=False))
    middle = free(arrays)

    def optimum(side: float | None) -> float:
        flow = Flow(arrays, whole(arrays), largest_seconds(arrays))
        if side is not None:
            flow.keep_near(middle.yielded, middle.wanted, side)
        found = flow.model.relax()
        assert found is not None
        duals = flow.duals(found)
        moved = [
            float(np.nanmax(np.abs(other - one)))
            for known, own in ((middle.yielded, duals.yielded), (middle.wanted, duals.wanted))
            for uses, others in zip(known, own, strict=True)
            for one, other in zip(uses, others, strict=True)
        ]
        assert side is None or max(moved) <= side * (1 + 1e-6)
        return found.objective * flow.unit

    relaxed, least = optimum(None), middle.bound(arrays).seconds
    for side in (1e-6, 1e-5, 1.0):
        before, least = least, optimum(side)
        assert before < least <= relaxed * (1 + 1e-9)
    assert least == pytest.approx(relaxed)


@pytest.mark.parametrize("seed", range(16))
def test_any_prices_give_a_bound_and_passes_only_raise_it(seed: int) -> None:
    rng = random.Random(seed)
    problem = two_axes(rng, 5, 4, memory=True)
    best = brute.best_choices(problem)
    optimum = np.inf if best is None else best[1]
    arrays = compiled(problem)
    noise = np.random.default_rng(seed)

    def known(count: int) -> np.ndarray:
        """Prices of about half of the placements."""
        return np.where(noise.random(count) < 0.5, np.nan, noise.normal(0, 2e-3, count))

    yielded, wanted = [], []
    for edge in arrays.edges:
        rows = noise.random(len(edge.seconds)) < 0.5  # a row is known to all uses or to none
        yielded.append([np.where(rows, np.nan, known(len(rows))) for _ in edge.uses])
        for row in yielded[-1]:
            row[~rows & np.isnan(row)] = 0.0
        wanted.append([np.full(edge.seconds.shape[1], np.nan) for _ in edge.uses])
        for use, column in zip(edge.uses, wanted[-1], strict=True):
            column[use.columns] = known(len(use.columns))
    prices = completed(arrays, Duals(yielded, wanted, abs(noise.normal(0, 1e-5))))
    for start in (prices, free(arrays)):
        bound = start.bound(arrays)
        assert bound.seconds <= optimum * (1 + 1e-9)
        assert all(
            (slack[:, use.columns] >= -1e-12).all()
            for edge, uses in zip(arrays.edges, bound.slack, strict=True)
            for use, slack in zip(edge.uses, uses, strict=True)
        )
        raised = Ascent(arrays, start).run(20)
        assert bound.seconds - 1e-12 <= raised <= optimum * (1 + 1e-9)


def test_a_gap_is_kept_and_told() -> None:
    gaps = []
    for seed in range(5):
        problem = two_axes(random.Random(seed), 16, 8, memory=True)
        exact, near = tensor.solve(problem), tensor.solve(problem, gap=0.05)
        assert near.gap <= 0.05 and near.bound <= exact.objective * (1 + 1e-9)
        assert exact.objective * (1 - 1e-9) <= near.objective <= exact.objective / (1 - 0.05)
        gaps.append(near.gap)
    assert any(gaps)
