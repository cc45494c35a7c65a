"""Ways through the runs of blocks, and the least values by run, however many are compared at once."""

from __future__ import annotations

import numpy as np
import pytest
from test_solver_stages import small_problem

from autopart.solver import stages_ways
from autopart.solver.stages_graph import StageGraph
from autopart.solver.stages_runs import Runs
from autopart.solver.stages_ways import cheapest, smallest_maximum


def test_the_least_of_several_rows_is_that_of_each() -> None:
    """And the first run that has it, among ties and infinite values."""
    rng = np.random.default_rng(0)
    for size in (1, 2, 5, 12):
        runs = Runs.of(np.tril(np.ones((size + 1, size), dtype=np.bool_), -1))
        some = runs.where(rng.random(len(runs)) < 0.7)
        values = rng.integers(0, 3, (4, len(some))).astype(np.float64)
        values[rng.random(values.shape) < 0.3] = np.inf
        least, which = some.least_to(values)
        for row, (found, first) in zip(values, zip(least, which, strict=True), strict=True):
            for position in range(size + 1):
                ending = np.flatnonzero(some.last == position)
                assert found[position] == min(row[ending], default=np.inf)
                if len(ending):
                    assert first[position] == ending[np.argmin(row[ending])]
            alone, its = some.least_to(row)
            assert (alone == found).all() and (its == first).all()


def test_ways_do_not_depend_on_how_many_slots_are_compared_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    several = 0
    for seed in range(60):
        graph = StageGraph.build(small_problem(seed, True)[0])
        arcs = [np.where(graph.fits, own, np.inf) for own in (graph.once, graph.busy)]
        found = cheapest(graph, arcs[0]), smallest_maximum(graph, arcs[1])
        with monkeypatch.context() as one_by_one:
            one_by_one.setattr(stages_ways, "_AT_ONCE", 1)
            assert found == (cheapest(graph, arcs[0]), smallest_maximum(graph, arcs[1]))
        several += found[0] is not None and max(map(len, graph.slots)) > 1
    assert several > 20
