"""Layers of one stage under several strategies: frontiers of a layer, mixtures of their points, plans, training."""

from __future__ import annotations

import functools
import itertools
import math
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from chains import subject_of
from test_solver_tensor import random_problem

import autopart.candidate_stages
import autopart.layer_strategies
import autopart.verify
from autopart.answers import Answer
from autopart.candidates import Candidates
from autopart.cluster import Cluster
from autopart.layer_strategies import LayerStrategies, Way, _few
from autopart.mixed_strategies import Samples, applied, most_layers
from autopart.passes.kept import kept_bytes
from autopart.plan import Plan
from autopart.planner import make_plan
from autopart.realize import build, realize
from autopart.recomputation import KEPT
from autopart.runtime.errors import PlanError
from autopart.solver import elimination, stages, tensor_hull, tensor_transient
from autopart.solver.degrees import Degrees
from autopart.solver.stages_choices import least_seconds
from autopart.solver.stages_parts import Choice
from autopart.solver.stages_problem import StageProblem, StageSolution
from autopart.solver.tensor_problem import TensorProblem, TensorSolution
from autopart.tensor_choice import TensorChoice
from autopart.verify import compare_emitted
from clusters import ideal
from launch import run_kept_job

CONFIG = Degrees(1, 1, (2,), 4, "1f1b", "auto")


@pytest.mark.parametrize("seed", range(40))
def test_blocks_of_one_frontier_against_all_assignments(seed: int) -> None:
    """Equal blocks with fixed surroundings under one limit: the fastest of all assignments of all their ops."""
    rng = random.Random(seed)
    block = replace(random_problem(rng, ops=3, choices=3, placements=2, inputs=2, memory=True), memory_limit=None)
    count = rng.randint(2, 3)
    family = tuple(Choice(point.seconds, 0.0, point.memory) for point in elimination.frontier(block))
    every = [
        (block.objective(choices), block.memory(choices))
        for choices in itertools.product(*(range(len(op.choices)) for op in block.ops))
    ]
    possible = [item for item in every if item[0] < math.inf]
    if not possible:
        assert not family
        return
    sizes = [memory for _, memory in possible]
    room = count * rng.uniform(min(sizes), max(sizes))
    best = math.inf
    for chosen in itertools.combinations_with_replacement(possible, count):
        if sum(memory for _, memory in chosen) <= room:
            best = min(best, sum(seconds for seconds, _ in chosen))
    found = least_seconds([family] * count, room, 1)
    assert found.seconds == pytest.approx(best) and found.bound == pytest.approx(best)


@functools.lru_cache(maxsize=1)
def around_the_fastest() -> tuple[Candidates, TensorChoice, LayerStrategies]:
    _, analysis = subject_of("gpt2")
    candidates = Candidates(analysis, slow_links(2**40), 8, "adamw")
    answer = candidates.choose(CONFIG)
    return candidates, answer, candidates.layer_strategies(CONFIG, answer)


def slow_links(memory_bytes: int) -> Cluster:
    return ideal(2, bandwidth=2e8, memory_bandwidth=1e15, memory_bytes=memory_bytes)


def test_points_of_layers_add_up() -> None:
    """Any layers under any of their ways: seconds and bytes are those of the answer and the ways' differences."""
    candidates, answer, strategies = around_the_fastest()
    parts, rng = candidates.layer_parts(), random.Random(0)
    units = replace(CONFIG, recompute=KEPT)

    def measured(choice: TensorChoice) -> tuple[float, float]:
        blocks = candidates.problem(units, choice).blocks
        seconds = math.fsum(block.seconds + block.step_end_s / CONFIG.microbatches for block in blocks)
        return seconds, math.fsum(block.state_bytes for block in blocks)

    def kept(ways: dict[str, Way]) -> float:
        (shape,) = candidates.problem(units, applied(answer, ways, parts)).shapes
        return math.fsum(item.activation_bytes for _, (item, *_) in shape.units(range(len(shape.blocks)))) + math.fsum(
            group.bytes for group in shape.kept
        )

    def graph_keeps(ways: dict[str, Way]) -> float:
        """What the graph keeps that is emitted for one microbatch."""
        choice, axes = applied(answer, ways, parts), candidates.setting(CONFIG).named_sizes
        blocks = (0, len(candidates.analysis.blocks))
        (graph,) = build(candidates.analysis, blocks, axes, choice.strategies, choice.storage).local
        return kept_bytes(graph, axes, candidates.samples(CONFIG))

    own = {layer: strategies.own(part) for layer, part in parts.items()}
    assert applied(answer, own, parts).strategies == answer.strategies
    first = measured(answer)
    for _ in range(5):
        ways: dict[str, Way] = {layer: rng.choice(strategies.ways(part)) for layer, part in parts.items()}
        assert len(set(ways.values())) > 1
        seconds, state = measured(applied(answer, ways, parts))
        assert seconds - first[0] == pytest.approx(math.fsum(ways[k].seconds - own[k].seconds for k in parts), abs=1e-9)
        more = math.fsum(ways[layer].state_bytes - own[layer].state_bytes for layer in parts)
        assert state - first[1] == pytest.approx(more, abs=64)
        fastest = math.fsum(strategies.slack(part).all for part in parts.values())
        assert seconds >= first[0] - fastest - 1e-12
        assert kept(ways) == pytest.approx(graph_keeps(ways), rel=1e-9)


def test_the_answers_own_way_is_among_the_ways() -> None:
    candidates, _, strategies = around_the_fastest()
    for part in candidates.layer_parts().values():
        own, ways = strategies.own(part), strategies.ways(part)
        assert any(way.undercuts(own) for way in ways)
        assert list(ways) == sorted(ways, key=lambda way: way.seconds)


def test_ways_of_wide_layers_are_corners_of_the_hull(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where elimination has no room for tables, problems without memory limits give the ways."""
    candidates, answer, strategies = around_the_fastest()
    (part, *_), limits = candidates.layer_parts().values(), []
    solve = tensor_transient.solve

    def seen(problem: TensorProblem, *limited: float) -> TensorSolution:
        limits.append(problem.memory_limit)
        return solve(problem, *limited)

    def too_wide(problem: TensorProblem) -> None:
        raise PlanError(f"{len(problem.ops)} ops are too many")

    monkeypatch.setattr(autopart.layer_strategies, "MOST_SETTINGS", 1)
    monkeypatch.setattr(tensor_hull, "eliminator", too_wide)
    monkeypatch.setattr(autopart.layer_strategies, "cache", SimpleNamespace(solve=seen))
    found = candidates.layer_strategies(CONFIG, answer).ways(part)
    assert limits and set(limits) == {None}
    exact = strategies.ways(part)
    for measure in (lambda way: way.seconds, lambda way: way.held(strategies.in_flight[0])):
        assert min(map(measure, found)) == pytest.approx(min(map(measure, exact)))


@pytest.mark.parametrize(("alike", "ways", "problems"), [(80, 8, 2), (10, 8, 4), (4, 3, 3), (1, 8, 8), (24, 1, 1)])
def test_few_problems_price_the_ways_of_layers_that_are_alike(alike: int, ways: int, problems: int) -> None:
    way = Way(1.0, 0.0, 0.0, ())
    names = ["first", *(f"h.{number}" for number in range(alike)), "last"]
    groups = [names[:1], names[1:-1], names[-1:]]
    samples = Samples.of(groups, {name: [way] * ways for name in names})
    assert len(samples.taken) == problems and (most_layers(groups) == set(names)) == (alike < 20)
    assert set(samples.taken[0].values()) == {0}
    for name in names:
        own = [number for number, _, _ in samples.read[name]]
        assert own == sorted(set(own)) and (ways == 1 or own[-1] == ways - 1)
        for number, problem, read in samples.read[name]:
            place = names.index(read)
            around = [names[at] for at in (place - 1, place, place + 1) if alike > 2 and 1 < at < alike]
            assert {samples.taken[problem][layer] for layer in (read, *around)} == {number}
    assert [number for number, _, _ in samples.read["h.0"]] == list(range(1, ways))


DIVIDED = Degrees(1, 2, (2,), 2, "1f1b", KEPT)


def with_levels() -> tuple[Candidates, TensorChoice, LayerStrategies]:
    """Parameters choose levels of ZeRO too, on two replicas."""
    _, analysis = subject_of("gpt2")
    cluster = ideal(4, bandwidth=2e8, memory_bandwidth=1e15, memory_bytes=2**40)
    candidates = Candidates(analysis, cluster, 8, "adamw", zero=None, all_levels=True)
    answer = candidates.choose(DIVIDED)
    return candidates, answer, candidates.layer_strategies(DIVIDED, answer)


def test_points_with_levels_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as nothing of what replicas exchange passes beside ops, of which each layer has its own."""
    monkeypatch.setattr(Candidates, "exposed", lambda *_: 1.0)
    candidates, answer, strategies = with_levels()
    parts, rng = candidates.layer_parts(), random.Random(0)

    def measured(ways: dict[str, Way]) -> tuple[float, float]:
        blocks = candidates.problem(DIVIDED, applied(answer, ways, parts)).blocks
        seconds = math.fsum(block.seconds + block.step_end_s / DIVIDED.microbatches for block in blocks)
        return seconds, math.fsum(block.state_bytes for block in blocks)

    own = {layer: strategies.own(part) for layer, part in parts.items()}
    first, taken = measured(own), set[int]()
    for _ in range(3):
        ways = {layer: rng.choice(strategies.ways(part)) for layer, part in parts.items()}
        taken.update(level for way in ways.values() for _, level in way.taken)
        seconds, state = measured(ways)
        assert seconds - first[0] == pytest.approx(math.fsum(ways[k].seconds - own[k].seconds for k in parts), abs=1e-9)
        more = math.fsum(ways[layer].state_bytes - own[layer].state_bytes for layer in parts)
        assert state - first[1] == pytest.approx(more, abs=64)
    assert len(taken) > 1


def test_ways_beyond_computing_again_are_left_out() -> None:
    """What is saved by computing the fastest way's layer again takes less than what ways save that keep little."""
    fast = [Way(100 + 0.04 * (7 - n) ** 2, 10.0, 50.0 + n, (), 30.0) for n in range(8)]  # each a corner
    slow = [Way(300 + 20.0 * n, 10.0, 40.0 - 5 * n, (), 30.0) for n in range(8)]
    smallest = Way(900.0, 1.0, 0.0, (), 30.0)
    ways = [*fast, *slow, smallest]
    kept, again = (_few(ways, (2, 1, 0), computed) for computed in (False, True))
    assert len(kept) == len(again) == 8
    assert smallest in again and fast[-1] in again
    assert set(kept) & set(slow) and not set(again) & set(slow)


@functools.lru_cache(maxsize=4)
def planned(memory_bytes: int, mixed: bool = True, recompute: str = "none") -> Plan:
    subject, analysis = subject_of("gpt2")
    limits: dict[str, Any] = {"batch": 8, "pp": 1, "dp": 1, "tp": 2, "microbatches": 4, "recompute": recompute}
    with pytest.MonkeyPatch.context() as patch:
        if not mixed:
            patch.setattr(Candidates, "_mixture", lambda *_: None)
        return make_plan(subject.program, slow_links(memory_bytes), analysis=analysis, **limits)


def test_a_mixture_is_faster_and_trains_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two limits of equal layers: some layers take other strategies, and training is equal."""
    monkeypatch.setattr(autopart.verify, "run_local_job", run_kept_job)
    subject, analysis = subject_of("gpt2")
    free = planned(2**40)
    limit = free.stages[0].memory_bytes - 40_000
    equal, plan = planned(limit, mixed=False), planned(limit)
    assert free.step_time_s < plan.step_time_s < equal.step_time_s
    assert plan.bound_s <= plan.step_time_s and plan.stages[0].memory_bytes <= limit
    layers = [{key: text for key, text in plan.storage.items() if f".{index}." in key} for index in range(4)]
    assert any(layers) and Plan.from_json(plan.to_json()) == plan
    emitted = realize(subject.program, plan, analysis)
    assert emitted.files["stage_0.py"].count("class TransformerH") > 1
    emitted.save(tmp_path / "program")
    result = compare_emitted(tmp_path / "program", subject, plan=plan)
    assert result.equal
    for stage in result.traffic:
        assert stage.counted == stage.planned


def test_mixtures_are_divided_by_the_seconds_of_their_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are again when they are priced: cut otherwise, layers would have ways that other stages asked for. And
    that begins with the division that was found before, than which what is found is no worse.
    """
    solved: list[bool] = []
    carried: list[tuple[float, float]] = []

    def solve(problem: StageProblem, *limits: Any, **more: Any) -> StageSolution:
        choices = (choice for layer in problem.shapes[0].layers for choice in layer.parts[layer.blocks])
        if any(":" in choice.name for choice in choices):
            solved.append(more["timed"] is not None)
        found = stages.solve(problem, *limits, **more)
        if more["known"]:
            assert problem.excess_bytes(more["known"]) <= 0
            carried.append((more["timed"](found.way), more["timed"](more["known"])))
        return found

    config, (_, analysis) = Degrees(2, 1, (2,), 8, "1f1b", "none"), subject_of("gpt2")

    def evaluated(memory_bytes: int) -> Answer:
        cluster = ideal(4, bandwidth=2e8, memory_bandwidth=1e15, memory_bytes=memory_bytes)
        return Candidates(analysis, cluster, 8, "adamw").evaluate(config).answer

    free = evaluated(2**40)
    most = max(free.problem.stage_bytes(stage, step) for stage, step in enumerate(free.cut.way))
    monkeypatch.setattr(autopart.candidate_stages, "stage_solver", SimpleNamespace(solve=solve))
    overhead = free.problem.shapes[0].overhead_bytes
    evaluated(round(overhead + 0.9 * (most - overhead)))
    assert solved and all(solved)
    assert carried and all(seconds <= before for seconds, before in carried)
