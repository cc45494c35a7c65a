"""Least sums by column, against all assignments."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from test_solver_tensor import random_problem

from autopart.solver import tensor_sums
from autopart.solver.tensor_problem import Edge, TensorProblem
from autopart.solver.tensor_sums import Eliminator

COLUMNS = 5


def scaled(edge: Edge, rng: random.Random) -> Edge:
    """Other seconds, of the same conversions."""
    return replace(edge, cost={pair: seconds * rng.random() for pair, seconds in edge.cost.items()})


def converted(edge: Edge, problem: TensorProblem, choices: Sequence[int]) -> float:
    chosen = [op.choices[index] for op, index in zip(problem.ops, choices, strict=True)]
    wanted = {chosen[op].inputs[slot] for op, slot in edge.uses}
    return math.fsum(edge.seconds(chosen[edge.source].outputs[edge.output], want) for want in wanted)


@pytest.mark.parametrize("large", [0, 1 << 15])
@pytest.mark.parametrize("seed", range(20))
def test_sums_are_the_least_of_all_assignments(seed: int, large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With other costs of conversions in some columns, and further ones that count there more or less often."""
    monkeypatch.setattr(tensor_sums, "_LARGE", large)
    rng = random.Random(seed)
    problem = random_problem(rng, rng.randint(1, 5), 3, 3, impossible=0.2 * (seed % 2))
    others = [scaled(edge, rng) for edge in problem.edges] if seed % 3 else []
    more = [(number, scaled(edge, rng)) for number, edge in enumerate(problem.edges) if rng.random() < 0.5]
    counts = [len(op.choices) for op in problem.ops]
    costs = np.array([[rng.random() for _ in range(COLUMNS)] for _ in range(sum(counts))])
    other = np.array([bool(others) and rng.random() < 0.5 for _ in range(COLUMNS)])
    times = np.array([[float(rng.randint(0, 2)) for _ in range(COLUMNS)] for _ in more]).reshape(-1, COLUMNS)
    found = Eliminator(problem, others=others, more=more).totals(costs, other, times)
    first = [sum(counts[:op]) for op in range(len(counts))]
    for column in range(COLUMNS):
        edges = others if other[column] else problem.edges
        sums = [
            math.fsum(costs[at + index, column] for at, index in zip(first, choices, strict=True))
            + math.fsum(converted(edge, problem, choices) for edge in edges)
            + math.fsum(
                count * converted(edge, problem, choices)
                for (_, edge), count in zip(more, times[:, column], strict=True)
                if count
            )
            for choices in itertools.product(*map(range, counts))
        ]
        assert found[column] == pytest.approx(min(sums))
