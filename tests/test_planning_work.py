"""How much work planning does, counted: deeper models have more layers, not more that is unlike."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

import autopart.axes_volume
import autopart.layer_frontier
import autopart.recomputation
from autopart import cache
from autopart.analysis import Analysis, analyze
from autopart.axes_volume import least_exchange_seconds
from autopart.candidates import Candidates
from autopart.models import load_model
from autopart.passes import annotate
from autopart.solver import tensor
from autopart.solver.degrees import Degrees
from autopart.solver.search_space import NotBetter
from autopart.tracing import capture
from clusters import ideal

SHALLOW, DEEP = 14, 20


@functools.lru_cache
def analysis_of(layers: int) -> Analysis:
    spec = f"hf:gpt2?n_layer={layers}&n_embd=64&n_head=4&vocab_size=128&n_positions=32&seq=32&batch=2"
    loaded = load_model(spec, meta=True)
    program = capture(loaded.model, loaded.args, loaded.kwargs, check_eval=False)
    return analyze(program)


def calls_of(name: str, owner: object, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The first arguments of calls of a function from now on."""
    found, calls = getattr(owner, name), list[object]()

    def counted(first: object, *others: object) -> object:
        calls.append(first)
        return found(first, *others)

    monkeypatch.setattr(owner, name, counted)
    return calls


def test_ways_to_run_a_layer_are_found_once_for_layers_that_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = calls_of("_ways", autopart.recomputation, monkeypatch)
    counts = []
    for layers in (SHALLOW, DEEP):
        candidates = Candidates(analysis_of(layers), ideal(4), 4, "adamw", zero=None)
        config = Degrees(2, 1, (2,), 2, "1f1b")
        problem = candidates.problem(config, candidates.choose(config))
        assert len(problem.shapes[0].layers) == layers
        counts.append(len(calls))
        calls.clear()
    assert counts[0] == counts[1] and counts[0] < len(problem.blocks) ** 2


def test_modules_to_run_again_are_found_once_whatever_replicas_divide(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = calls_of("frontier", autopart.layer_frontier, monkeypatch)
    config = Degrees(2, 2, (2,), 2, "1f1b", "auto")
    candidates, alone = (Candidates(analysis_of(SHALLOW), ideal(8), 16, "adamw", zero=None) for _ in range(2))
    divided = candidates.choose(config, level=1)
    candidates.problem(config, replace(divided, levels={}))
    assert divided.levels and calls
    calls.clear()
    problem = candidates.problem(config, divided)
    assert not calls
    assert problem == alone.problem(config, divided)
    assert calls


@pytest.mark.parametrize(
    "config", [Degrees(2, 2, (2,), 2, "1f1b"), Degrees(2, 1, (4,), 4, "gpipe"), Degrees(2, 2, (2,), 4, "1f1b", "full")]
)
def test_strategies_of_stages_are_ruled_out_where_they_take_longer_alone(config: Degrees) -> None:
    candidates = Candidates(analysis_of(SHALLOW), ideal(8), 16, "adamw", zero=None)
    fastest, seconds = candidates.choose(config), candidates.evaluate(config).objective
    limit = 0.95 * fastest.memory_bytes
    assert candidates.choose(config, below=seconds * (1 + 1e-9)).strategies == fastest.strategies
    assert candidates.choose(config, limit, seconds * 2).memory_bytes <= limit
    assert candidates.choose(config, below=seconds / 2) == fastest, "they are known"
    anew = Candidates(analysis_of(SHALLOW), ideal(8), 16, "adamw", zero=None)
    for given in (None, limit):
        with pytest.raises(NotBetter):
            anew.choose(config, given, seconds / 2)


@pytest.mark.parametrize("zero", [None, 0, 1])
def test_strategies_of_one_stage_are_sought_as_far_as_they_are_of_interest(zero: int | None) -> None:
    """Their solver is told what is; not where others may take less, as those that divide parameters over replicas."""
    config = Degrees(1, 4, (2,), 1, "1f1b")
    candidates = Candidates(analysis_of(SHALLOW), ideal(8), 16, "adamw", zero=zero)
    least = candidates.lower_bound(config)
    with pytest.raises(NotBetter) as caught:
        candidates.evaluate(config, least)
    assert bool(candidates._chosen) == bool(zero)
    seconds = candidates.evaluate(config).objective
    assert least <= caught.value.bound <= seconds
    assert candidates.evaluate(config, 2 * seconds).objective == seconds


def test_mixtures_are_looked_for_once_around_answers_that_leave_layers_the_same_ways() -> None:
    config = Degrees(2, 2, (2,), 2, "1f1b", "auto")
    candidates = Candidates(analysis_of(SHALLOW), ideal(8), 32, "adamw", zero=None, all_levels=True)
    whole, divided = (candidates.layer_strategies(config, candidates.choose(config, level=level)) for level in (0, 1))
    for part in candidates.layer_parts().values():
        assert whole.around(part) == divided.around(part)
        assert whole.alike(part) != divided.alike(part)
        amounts = [
            {(way.seconds, way.state_bytes, way.kept_bytes) for way in found.ways(part)} for found in (whole, divided)
        ]
        assert amounts[0] == amounts[1]


def test_costs_of_copied_layers_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = [analysis_of(layers).graph for layers in (SHALLOW, DEEP)]
    found, calls = annotate.op_cost, calls_of("op_cost", annotate, monkeypatch)
    counts = []
    for graph in graphs:
        costs = annotate.annotate(graph.nodes)
        assert costs == {node: found(node) for node in costs}
        counts.append(len(calls))
        calls.clear()
    assert counts[0] == counts[1] < len(costs) / 2


def test_a_bound_is_raised_no_further_than_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    relaxed = calls_of("_relax", tensor._Search, monkeypatch)
    config = Degrees(1, 1, (4,), 2, "1f1b")
    with cache.used(False):
        candidates, other = (Candidates(analysis_of(SHALLOW), ideal(4), 4, "adamw", zero=None) for _ in range(2))
        floor = candidates.work_floor(config, below=0.0)
        assert not relaxed
        full = other.work_floor(config)
        assert relaxed and floor <= full
        count = len(relaxed)
        assert candidates.work_floor(config) == pytest.approx(full) and len(relaxed) == 2 * count
        assert candidates.work_floor(config, below=0.0) <= full and len(relaxed) == 2 * count


def test_strategies_without_a_limit_are_chosen_once_whatever_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Degrees(2, 2, (2,), 2, "1f1b")
    candidates, alone = (Candidates(analysis_of(SHALLOW), ideal(8), 16, "adamw", zero=None) for _ in range(2))
    chosen = {level: candidates.choose(config, level=level) for level in (None, 1, 3)}
    calls = calls_of("solve", tensor, monkeypatch)
    warmed = candidates.warmed(2)
    assert all(warmed.choose(config, level=level) is choice for level, choice in chosen.items())
    assert not calls
    for level, choice in chosen.items():
        other = alone.warmed(2).choose(config, level=level)
        assert (other.strategies, other.storage, other.levels) == (choice.strategies, choice.storage, choice.levels)
    assert calls


def test_what_parameters_hold_at_least_takes_no_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Degrees(1, 4, (2,), 2, "1f1b", "auto")
    candidates = Candidates(analysis_of(SHALLOW), ideal(8), 16, "adamw", zero=None, all_levels=True)
    calls = calls_of("solve", tensor, monkeypatch)
    assert candidates.unfit(config) is None
    held = candidates.least_state_bytes(config)
    assert not calls
    # as much as the least of the ways that strategies are chosen from, whose prices ask what passes beside ops
    assert held == candidates._builder(config).least_state_bytes()


def test_products_are_looked_at_once_for_configurations_of_as_many_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    candidates = Candidates(analysis_of(SHALLOW), ideal(8), 16, "adamw", zero=None)
    calls = calls_of("weight_of", autopart.axes_volume, monkeypatch)
    several, one = Degrees(1, 4, (2,), 2, "1f1b"), Degrees(1, 2, (4,), 4, "1f1b")
    found = least_exchange_seconds(candidates, several)
    assert found > 0 and calls
    calls.clear()
    assert least_exchange_seconds(candidates, one) != found
    assert not calls
