"""The division into stages against all divisions, and its bounds."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Sequence

import pytest

from autopart.runtime.errors import InfeasibleError
from autopart.solver import brute, stages, stages_model
from autopart.solver.overlap import GradientSum
from autopart.solver.stages_graph import StageGraph
from autopart.solver.stages_order import positions
from autopart.solver.stages_parts import Block, Choice, CrossingGroup, Cut, KeptGroup, Layer, Shape, TiedGroup
from autopart.solver.stages_passing import ParameterGroup, Passing
from autopart.solver.stages_problem import Slot, StageProblem, Step

Edges = tuple[tuple[int, int], ...]


class Random(random.Random):
    """whole: few distinct values, so that many divisions tie."""

    whole = False

    def seconds(self, scale: float) -> float:
        return self.randint(0, 3) * scale if self.whole else self.random() * scale

    def size(self, most: int) -> float:
        return float(self.randint(1, most))

    def block(self, index: int, choices: int = 1) -> Block:
        block = Block(
            f"block{index}",
            self.seconds(1e-3),
            self.seconds(2e-3),
            self.size(100),
            self.size(100),
            self.size(100),
            self.seconds(4e-3),
        )
        others = [
            Choice(
                block.forward_s,
                block.backward_s + self.seconds(1e-3),
                block.state_bytes,
                float(self.randint(0, int(block.activation_bytes))),
                self.size(150),
            )
            for _ in range(choices - 1)
        ]
        return dataclasses.replace(block, others=tuple(others))

    def cuts(self, count: int) -> tuple[Cut, ...]:
        return tuple(
            Cut(self.seconds(5e-4), self.seconds(5e-4), *(self.size(most) for most in (30, 30, 6, 6)))
            for _ in range(count)
        )

    def tied(self, blocks: int) -> tuple[TiedGroup, ...]:
        return tuple(
            TiedGroup(
                f"tied{i}",
                tuple(self.sample(range(blocks), min(blocks, self.randint(1, 3)))),
                self.size(200),
                self.seconds(2e-3),
                self.seconds(1e-3),
            )
            for i in range(self.randint(0, 2))
        )

    def kept(self, blocks: int) -> tuple[KeptGroup, ...]:
        count = self.randint(0, 2)
        return tuple(
            KeptGroup(tuple(self.sample(range(blocks), min(blocks, self.randint(1, 3)))), self.size(50))
            for _ in range(count)
        )

    def crossing(self, blocks: int) -> tuple[CrossingGroup, ...]:
        found = []
        for _ in range(self.randint(0, 2)):
            ends = self.sample(range(blocks), min(blocks, self.randint(2, 4)))
            found.append(CrossingGroup(tuple(ends), tuple(self.sample(ends, self.randint(0, 1))), self.size(30)))
        return tuple(found)

    def passing(self, blocks: int) -> Passing:
        """Messages of up to two kinds; the optimizer makes up to as much as a stage otherwise holds."""

        def some(scale: int) -> tuple[ParameterGroup, ...]:
            found = []
            for _ in range(self.randint(0, 4)):
                largest = self.size(scale)
                inside = tuple(self.sample(range(blocks), min(blocks, self.choice([1, 1, 2]))))
                total, read = largest + self.size(scale), largest * self.choice([1, 2])
                found.append(ParameterGroup(inside, total, largest, self.choice([0.0, largest]), read))
            return tuple(found)

        sent = tuple((self.randint(0, 3), some(20)) for _ in range(self.randint(0, 2)))
        updated = some(100) if self.random() < 0.4 else ()
        waiting = some(20) if self.random() < 0.4 else ()
        summed, apart = self.choice([0.5, 1.0]), self.random() < 0.5
        return Passing(sent, self.randint(1, 4), summed, updated, apart, waiting=waiting)

    def layers(self, blocks: Sequence[Block]) -> tuple[Layer, ...]:
        """Up to two layers of up to three blocks: every part of one can be run as its blocks are, and slower."""
        numbers = self.sample(range(len(blocks)), len(blocks))
        found = []
        for _ in range(self.randint(0, 2)):
            own, numbers = tuple(sorted(numbers[:3])), numbers[3:]
            parts = {}
            for part in (c for n in range(1, len(own) + 1) for c in itertools.combinations(own, n)):
                inside = [blocks[number] for number in part]
                fastest = Choice(
                    math.fsum(block.forward_s for block in inside),
                    math.fsum(block.backward_s for block in inside),
                    sum(block.state_bytes for block in inside),
                    sum(block.activation_bytes for block in inside),
                    max(block.transient_bytes for block in inside),
                )
                again = dataclasses.replace(
                    fastest,
                    backward_s=fastest.backward_s + self.seconds(1e-3),
                    activation_bytes=float(self.randint(0, int(fastest.activation_bytes))),
                    transient_bytes=self.size(200),
                )
                parts[part] = (fastest, again)
            found += [Layer(own, parts)] if own else []
        return tuple(found)

    def with_sums(self, problem: StageProblem) -> StageProblem:
        """Some of the seconds at the end of a step are in sums that start during the last backward."""
        shapes = []
        for shape in problem.shapes:
            owners: list[tuple[tuple[int, ...], float]] = [
                ((index,), block.step_end_s) for index, block in enumerate(shape.blocks)
            ]
            owners += [(group.blocks, group.step_end_s) for group in shape.tied]
            sums = [
                GradientSum(blocks, self.size(9) * 2**22, part * seconds)
                for blocks, seconds in owners
                if (part := self.choice([0.0, 0.5, 1.0]))
            ]
            self.shuffle(sums)
            shapes.append(dataclasses.replace(shape, sums=tuple(sums)))
        return dataclasses.replace(problem, shapes=tuple(shapes))


def chain_edges(count: int) -> Edges:
    return tuple(itertools.pairwise(range(count)))


def random_chain(rng: Random, n: int, p: int, microbatches: int) -> StageProblem:
    """A chain on a row of equal meshes, without limits on memory."""
    flight = [min(microbatches, p - stage) for stage in range(p)]
    blocks = [rng.block(i) for i in range(n)]
    layers = rng.layers(blocks) if n < 10 else ()
    capacity, overhead = (math.inf,) * p, rng.size(9)
    found = StageProblem.chain(
        blocks, rng.cuts(n - 1), microbatches, flight, capacity, overhead, rng.tied(n), kept=rng.kept(n), layers=layers
    )
    shape = dataclasses.replace(found.shapes[0], passing=rng.passing(n), crossing=rng.crossing(n))
    return dataclasses.replace(found, shapes=(shape,))


def random_edges(rng: Random, n: int) -> Edges:
    """A graph in which every block but the first depends on one or two before it."""
    found: set[tuple[int, int]] = set()
    for block in range(1, n):
        found.update((rng.randint(max(0, block - 3), block - 1), block) for _ in range(rng.randint(1, 2)))
    return tuple(sorted(found))


def random_dag(rng: Random, n: int, p: int) -> tuple[StageProblem, Edges]:
    """A graph on four uneven devices: runs of one to three of them, of two speeds, with two kinds of links."""
    edges = random_edges(rng, n)
    places, complete = positions(n, edges)
    assert complete
    blocks = [rng.block(i, rng.choice([1, 1, 2, 3] if n < 10 else [1, 1, 2])) for i in range(n)]
    tied = rng.tied(n)
    shapes = []
    for number in range(rng.randint(1, 3)):
        factor = rng.choice([0.5, 1.0, 1.5]) if number else 1.0
        slower = tuple(
            dataclasses.replace(
                block,
                forward_s=block.forward_s * factor,
                others=tuple(dataclasses.replace(c, forward_s=c.forward_s * factor) for c in block.others),
            )
            for block in blocks
        )
        cuts = tuple((Cut(), *rng.cuts(len(places) - 2), Cut()) for _ in range(2))
        layers = rng.layers(slower) if n < 10 else ()
        shape = Shape(slower, cuts, rng.size(9), tied, f"shape{number}", rng.kept(n), layers)
        shapes.append(dataclasses.replace(shape, passing=rng.passing(n), crossing=rng.crossing(n)))
    microbatches = rng.choice([1, 2, 4, 16])
    flight = tuple(min(microbatches, p - stage) for stage in range(p))
    slots = [
        Slot(start, start + width, rng.randrange(len(shapes)), math.inf)
        for start in range(4)
        for width in (1, 2, 3)
        if start + width <= 4 and rng.random() < 0.8
    ]
    ends = (4,) if rng.random() < 0.7 else (3, 4)
    links = tuple(rng.randint(0, 1) for _ in range(5))
    pairs = {
        (before, after): tuple((Cut(), *rng.cuts(len(places) - 2), Cut()) for _ in range(2))
        for before in range(len(shapes))
        for after in range(len(shapes))
        if before != after and rng.random() < 0.5
    }
    return StageProblem(tuple(shapes), places, tuple(slots), links, ends, microbatches, flight, (), pairs), edges


def limited(rng: Random, problem: StageProblem, edges: Edges) -> StageProblem:
    """The same with capacities, mostly unequal, under which some or all divisions do not fit; at times pinned."""
    bounds = next(brute.divisions(problem, edges))
    some = next(brute.ways(problem, bounds, {}), None)
    if some is None:
        return problem
    base = problem.stage_bytes(0, some[0])
    factors = [0.6, 1.0, 1.4, 2.0] if rng.random() < 0.7 else [rng.choice([0.6, 1.0, 1.4])]
    slots = tuple(
        dataclasses.replace(slot, capacity_bytes=float(round(base * rng.choice(factors)))) for slot in problem.slots
    )
    pins: list[tuple[int, int]] = []
    if rng.random() < 0.3:
        pins = [(rng.randrange(len(problem.blocks)), rng.randrange(problem.stages))]
    return dataclasses.replace(problem, slots=slots, pins=tuple(pins))


def small_problem(seed: int, dag: bool) -> tuple[StageProblem, Edges]:
    rng = Random(seed)
    rng.whole = rng.random() < 0.4
    if dag:
        # mostly small, as trying everything takes long
        n = rng.choice([3, 4, 5, 5, 6, 6, 7]) if seed % 60 else 10
        p = rng.randint(1, 3) if n < 10 else 2
        problem, edges = random_dag(rng, n, p)
    else:
        n = rng.randint(1, 9)
        problem, edges = random_chain(rng, n, rng.randint(1, min(n, 5)), rng.choice([1, 2, 4, 16])), chain_edges(n)
    problem = rng.with_sums(problem)
    return (limited(rng, problem, edges) if rng.random() < 0.7 else problem), edges


def check_against_all(problem: StageProblem, edges: Edges, max_programs: int) -> None:
    best = brute.best_way(problem, edges)
    if best is None:
        with pytest.raises(InfeasibleError):
            stages.solve(problem, max_programs=max_programs)
        return
    solution = stages.solve(problem, max_programs=max_programs)
    assert solution.objective == pytest.approx(best[1], rel=1e-9, abs=1e-15)
    assert solution.objective == problem.objective(solution.way)
    assert solution.gap == 0
    least = brute.lower_bound_seconds(problem, edges)
    assert solution.lower_bound_s <= least * (1 + 1e-9)
    assert stages.least_seconds(problem) <= least * (1 + 1e-9)
    assert solution.lower_bound_s <= solution.objective * (1 + 1e-9)
    assert problem.excess_bytes(solution.way) <= 0 and problem.respects_pins(solution.way)


SEEDS = [*range(120), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(120, 300))]


@pytest.mark.parametrize("seed", SEEDS)
def test_equals_brute_force_on_chains(seed: int) -> None:
    check_against_all(*small_problem(seed, dag=False), stages.MAX_PROGRAMS)


@pytest.mark.parametrize("seed", SEEDS)
def test_equals_brute_force_on_graphs(seed: int) -> None:
    """Up to 10 blocks of up to three choices, on four uneven devices."""
    check_against_all(*small_problem(seed, dag=True), stages.MAX_PROGRAMS)


@pytest.mark.parametrize("seed", range(60))
def test_integer_model_equals_brute_force(seed: int) -> None:
    """With a single box, CP-SAT has to find and prove nearly everything."""
    check_against_all(*small_problem(seed, dag=seed % 2 == 0), 1)


@pytest.mark.parametrize("seed", range(30))
def test_the_most_that_a_stage_with_all_blocks_lacks(seed: int) -> None:
    problem, _ = small_problem(seed, dag=True)
    ways = ([Step(slot, 0, len(problem.positions) - 1)] * problem.stages for slot in range(len(problem.slots)))
    assert problem.most_excess_bytes() == max(map(problem.excess_bytes, ways))


def test_graph_cases_are_of_all_kinds() -> None:
    """Of the cases above some are infeasible, some use several shapes, and some other choices than the first."""
    kinds = {"infeasible": 0, "shapes": 0, "choices": 0}
    for seed in range(90):
        problem, _ = small_problem(seed, dag=True)
        try:
            way = stages.solve(problem).way
        except InfeasibleError:
            kinds["infeasible"] += 1
            continue
        kinds["shapes"] += len({problem.slots[step.slot].shape for step in way}) > 1
        kinds["choices"] += any(step.choices for step in way)
    assert min(kinds.values()) >= 5, kinds


def test_both_methods_are_reached() -> None:
    problem = random_chain(Random(1), 12, 4, 2)
    by_boxes, by_model = stages.solve(problem), stages.solve(problem, max_programs=1)
    assert (by_boxes.method, by_model.method) == ("dynamic program", "cp-sat")
    assert by_boxes.objective == pytest.approx(by_model.objective, rel=1e-9)
    assert by_model.programs == 1


def test_no_model_is_written_of_too_many_arcs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The boxes' own bound stands then."""
    problem = random_chain(Random(1), 12, 4, 2)
    best = stages.solve(problem)
    monkeypatch.setattr(stages_model, "MOST_ARCS", 0)
    monkeypatch.setattr(stages_model, "_WayModel", None)
    found = stages.solve(problem, max_programs=1)
    assert found.bound <= best.objective * (1 + 1e-9) <= found.objective * (1 + 2e-9)


@pytest.mark.parametrize("stage_count", [4, 16])
def test_repeated_layers_take_few_programs(stage_count: int) -> None:
    layer = (Block("attention", 4e-4, 8e-4, 40, 50, 20, 5e-4), Block("mlp", 6e-4, 12e-4, 80, 70, 20, 8e-4))
    ends = Block("embedding", 1e-4, 2e-4, 900, 10, 0, 3e-3), Block("head", 8e-4, 16e-4, 900, 100, 100, 3e-3)
    blocks = (ends[0], *(layer * 48), ends[1])
    cuts = tuple(Cut(1e-4, 1e-4, 5) for _ in blocks[1:])
    in_flight = tuple(stage_count - stage for stage in range(stage_count))
    tied = (TiedGroup("embedding", (0, len(blocks) - 1), 900, 1e-3),)
    problem = StageProblem.chain(blocks, cuts, 32, in_flight, (math.inf,) * stage_count, 0.0, tied)
    solution = stages.solve(problem)
    assert solution.gap == 0 and solution.method == "dynamic program" and solution.programs <= 20


def test_layers_are_recomputed_where_memory_binds() -> None:
    """The first stage holds most in flight and recomputes some of its layers, the last one none."""
    layer = Block("layer", 1.0, 2.0, 10.0, 10.0, 0.0, others=(Choice(1.0, 3.0, 10.0, 1.0, 9.0),))
    problem = StageProblem.chain([layer] * 12, [Cut()] * 11, 8, (4, 3, 2, 1), (100.0,) * 4)
    solution = stages.solve(problem)
    again = [len(step.choices) for step in solution.way]
    # 3 layers: 30 + 4 (3 - k) 10 + 4 k + 9 <= 100 needs k = 2
    assert problem.boundaries(solution.way) == (0, 3, 6, 9, 12) and again == [2, 2, 0, 0]
    assert solution.objective == 36 + 4 + 7 * 11 and solution.gap == 0


def test_runs_that_are_alike_are_made_exact_at_once() -> None:
    """Each has the seconds that it has by itself."""
    attention = Block("attention", 1.0, 2.0, 10.0, 10.0, 3.0, others=(Choice(1.0, 2.7, 10.0, 4.0, 7.0),))
    mlp = Block("mlp", 2.0, 4.0, 12.0, 9.0, 3.0, others=(Choice(2.0, 5.0, 12.0, 1.0, 8.0),))
    problem = StageProblem.chain([attention, mlp] * 8, [Cut()] * 15, 8, (4, 3, 2, 1), (140.0,) * 4)
    graph = StageGraph.build(problem)
    bounds, table = graph.seconds.copy(), 1
    steps = [Step(1, int(a), int(b)) for a, b in zip(graph.runs.first, graph.runs.last, strict=True)]
    open_ = [run for run in range(len(steps)) if graph.fits[table, run] and not graph.exact[table, run]]
    for run in open_:
        graph.refine(1, steps[run])
    assert all(graph.exact[table, run] for run in open_) and (graph.seconds >= bounds - 1e-12).all()
    for run in open_:
        made = graph.with_choices(1, steps[run])
        assert made is not None
        assert graph.seconds[table, run] == pytest.approx(math.fsum(item.seconds for item in problem.chosen(made)))
    alike = [run for run in open_ if (steps[run].first % 2, steps[run].last - steps[run].first) == (0, 4)]
    fresh = StageGraph.build(problem)
    fresh.refine(1, steps[alike[0]])
    assert len(alike) > 2 and all(fresh.exact[table, run] for run in alike)


@pytest.mark.parametrize("seed", range(3))
def test_chains_too_long_to_enumerate_are_proved(seed: int) -> None:
    solution = stages.solve(random_chain(Random(seed), 60, 6, 4))
    assert solution.gap == 0
    least = random_chain(Random(seed), 60, 6, 4)
    total = sum(block.seconds for block in least.blocks)
    assert solution.lower_bound_s >= 4 * max(total / 6, max(block.seconds for block in least.blocks)) * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(100))
def test_smallest_excess_equals_brute_force(seed: int) -> None:
    rng = Random(seed)
    if seed % 2:
        problem, edges = random_dag(rng, rng.randint(2, 6), 2)
    else:
        n = rng.randint(2, 8)
        problem, edges = random_chain(rng, n, 2, 4), chain_edges(n)
    problem = limited(rng, problem, edges)
    scaled = [
        dataclasses.replace(slot, capacity_bytes=float(min(slot.capacity_bytes, 1e9) // 4)) for slot in problem.slots
    ]
    tight = dataclasses.replace(problem, slots=tuple(scaled))
    least = brute.least_excess_bytes(tight, edges)
    if least <= 0:
        assert tight.excess_bytes(stages.solve(tight).way) <= 0
        return
    wanted = rf"\({least:.0f} bytes\) over its capacity" if math.isfinite(least) else "no "
    with pytest.raises(InfeasibleError, match=wanted):
        stages.solve(tight)
    if not math.isfinite(least):
        return
    grown = [dataclasses.replace(slot, capacity_bytes=slot.capacity_bytes + least) for slot in tight.slots]
    stages.solve(dataclasses.replace(tight, slots=tuple(grown)))
    nearly = [dataclasses.replace(slot, capacity_bytes=slot.capacity_bytes - 1) for slot in grown]
    with pytest.raises(InfeasibleError):
        stages.solve(dataclasses.replace(tight, slots=tuple(nearly)))
