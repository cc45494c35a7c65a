"""The choice of strategies against brute force, and how it fails."""

from __future__ import annotations

import math
import pickle
import random

import pytest

from autopart.runtime.errors import InfeasibleError
from autopart.solver import brute, tensor, tensor_presolve
from autopart.solver.linear import LinearModel
from autopart.solver.tensor_arrays import EdgeArrays, Floats
from autopart.solver.tensor_presolve import live_choices
from autopart.solver.tensor_problem import Choice, Edge, Op, TensorProblem


def random_problem(
    rng: random.Random,
    ops: int,
    choices: int,
    placements: int,
    inputs: int = 3,
    whole: bool = False,
    impossible: float = 0.0,
    memory: bool = False,
) -> TensorProblem:
    """whole: integer costs, so that many assignments tie. impossible: share of conversions that do not exist."""

    def seconds() -> float:
        return rng.randint(0, 20) * 1e-4 if whole else rng.random() * 2e-3

    def cost() -> dict[tuple[int, int], float]:
        pairs = [(p, t) for p in range(placements) for t in range(placements) if p != t]
        return {pair: math.inf if rng.random() < impossible else seconds() for pair in pairs}

    built: list[Op] = []
    uses: dict[int, list[tuple[int, int]]] = {}
    for number in range(ops):
        sources = [rng.randrange(max(0, number - 4), number) for _ in range(rng.randint(1, inputs) if number else 0)]
        for slot, source in enumerate(sources):
            uses.setdefault(source, []).append((number, slot))
        options = [
            Choice(
                f"c{index}",
                seconds(),
                (rng.randrange(placements),),
                tuple(rng.randrange(placements) for _ in sources),
                float(rng.randint(0, 100)) if memory else 0.0,
            )
            for index in range(choices)
        ]
        built.append(Op(f"op{number}", tuple(options)))
    edges: list[Edge] = []
    for source, users in uses.items():
        shared = cost()
        edges.append(Edge(source, 0, tuple(users), shared))
        if len(users) > 1 and rng.random() < 0.3:
            edges.append(Edge(source, 0, tuple(users[:1]), shared, weight=2.0))
    limit = None
    if memory:
        least = sum(min(choice.memory for choice in op.choices) for op in built)
        most = sum(max(choice.memory for choice in op.choices) for op in built)
        limit = float(round(least + (most - least) * rng.choice([0.0, 0.1, 0.3, 0.6])))
    return TensorProblem(tuple(built), tuple(edges), limit)


@pytest.mark.parametrize("seed", range(400))
def test_equals_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    problem = random_problem(
        rng,
        ops=rng.randint(1, 6),
        choices=rng.randint(1, 4),
        placements=rng.randint(1, 4),
        whole=rng.random() < 0.5,
        impossible=rng.choice([0.0, 0.2, 0.6]),
        memory=rng.random() < 0.5,
    )
    best = brute.best_choices(problem)
    if best is None:
        with pytest.raises(InfeasibleError):
            tensor.solve(problem)
        return
    solution = tensor.solve(problem)
    assert solution.objective == pytest.approx(best[1], rel=1e-7, abs=1e-15)
    assert solution.objective == problem.objective(solution.choices)
    assert solution.gap == 0 and solution.bound == solution.objective
    assert problem.fits(solution.choices)


def test_every_method_is_reached() -> None:
    problems = [random_problem(random.Random(seed), ops, 4, 3) for seed in range(40) for ops in (1, 8)]
    methods = {tensor.solve(problem).method for problem in problems}
    assert {"presolve", "lp", "mip"} <= methods


@pytest.mark.parametrize("seed", range(10))
def test_trees_need_no_integer_solver(seed: int) -> None:
    """Each value has one use and each op one input: the relaxation is exact."""
    problem = random_problem(random.Random(seed), 60, 6, 5, inputs=1)
    single = tuple(Edge(edge.source, 0, (use,), edge.cost) for edge in problem.edges for use in edge.uses)
    solution = tensor.solve(TensorProblem(problem.ops, single))
    assert solution.method in ("lp", "presolve") and solution.gap == 0


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("memory", [False, True])
def test_graphs_too_large_to_enumerate_are_proved(seed: int, memory: bool) -> None:
    solution = tensor.solve(random_problem(random.Random(seed), 25, 5, 4, inputs=2, memory=memory))
    assert solution.gap == 0


def fork(cost: dict[tuple[int, int], float]) -> TensorProblem:
    """One value, yielded as 0, that three ops read: two as 1, one as 0."""
    source = Op("source", (Choice("only", 1.0, (0,)),))
    readers = tuple(Op(f"reader{want}{n}", (Choice("only", 0.0, (), (want,)),)) for n, want in enumerate((1, 1, 0)))
    return TensorProblem((source, *readers), (Edge(0, 0, ((1, 0), (2, 0), (3, 0)), cost, weight=3.0),))


def test_a_conversion_is_paid_once_per_target() -> None:
    solution = tensor.solve(fork({(0, 1): 5.0}))
    assert solution.objective == 1.0 + 3 * 5.0
    assert solution.conversions == (((0, 1),),)


def test_a_conversion_between_equal_placements_can_cost() -> None:
    problem = fork({(0, 1): 5.0, (0, 0): 2.0})
    assert tensor.solve(problem).objective == 1.0 + 3 * (5.0 + 2.0)


def test_missing_conversion_is_named() -> None:
    with pytest.raises(InfeasibleError, match=r"'source' \(only\) to input 0 of 'reader10' \(only\): placement 0 to 1"):
        tensor.solve(fork({}))


def test_memory_says_what_would_fit() -> None:
    small, large = Choice("small", 2.0, (), (), 30.0), Choice("large", 1.0, (), (), 50.0)
    ops = tuple(Op(name, (small, large)) for name in ("one", "two"))
    assert tensor.solve(TensorProblem(ops, (), 80.0)).objective == 3.0
    assert tensor.solve(TensorProblem(ops, (), 60.0)).objective == 4.0
    with pytest.raises(
        InfeasibleError, match=r"hold 60 bytes .* 1 bytes over the limit of 59.*limit of 60 bytes"
    ) as found:
        tensor.solve(TensorProblem(ops, (), 59.0))
    copy = pickle.loads(pickle.dumps(found.value))  # as another process gets it
    assert type(copy) is InfeasibleError and str(copy) == str(found.value)


def test_memory_is_exact_to_the_byte() -> None:
    """One byte in a hundred gigabytes is below the integer solver's tolerance."""
    gigabytes = 50_000_000_000
    ops = tuple(
        Op(name, (Choice("fast", 1.0, (0,), (), gigabytes + extra), Choice("slow", 2.0, (1,), (), gigabytes)))
        for name, extra in (("one", 1.0), ("two", 1.0))
    )
    sink = Op("sink", (Choice("a", 0.0, (), (0, 0)), Choice("b", 0.0, (), (1, 1)), Choice("c", 0.0, (), (0, 1))))
    edges = tuple(Edge(o, 0, ((2, o),), {(0, 1): 10.0, (1, 0): 10.0}) for o in (0, 1))
    problem = TensorProblem((*ops, sink), edges, 2.0 * gigabytes + 1)
    best = brute.best_choices(problem)
    assert best is not None
    solution = tensor.solve(problem)
    assert (solution.objective, solution.gap) == (best[1], 0.0) == (3.0, 0.0)


def test_seconds_may_have_any_size() -> None:
    problem = random_problem(random.Random(3), 12, 4, 3)
    reference = tensor.solve(problem)
    for factor in (1e-9, 1e6):
        scaled = TensorProblem(
            tuple(
                Op(op.name, tuple(Choice(c.name, c.cost * factor, c.outputs, c.inputs) for c in op.choices))
                for op in problem.ops
            ),
            tuple(Edge(e.source, e.output, e.uses, e.cost, e.weight * factor) for e in problem.edges),
        )
        solution = tensor.solve(scaled)
        assert solution.objective == pytest.approx(reference.objective * factor, rel=1e-7) and solution.gap == 0


def test_presolve_drops_dominated_and_unreachable() -> None:
    source = Op("source", (Choice("a", 2.0, (0,)), Choice("b", 1.0, (0,)), Choice("c", 0.0, (7,))))
    sink = Op("sink", (Choice("x", 1.0, (), (0,)), Choice("y", 1.0, (), (8,))))
    assert live_choices(TensorProblem((source, sink), (Edge(0, 0, ((1, 0),), {}),))) == [[1], [0]]


def test_presolve_drops_what_exceeds_memory_with_the_least_of_all_others() -> None:
    ops = tuple(
        Op(f"op{n}", (Choice("whole", 1.0, (0,), memory=8.0), Choice("half", 2.0, (0,), memory=4.0))) for n in range(3)
    )
    for limit, live in ((11.0, None), (12.0, [[1]] * 3), (16.0, [[0, 1]] * 3)):
        assert live_choices(TensorProblem(ops, (), limit)) == live
        if live is None:
            with pytest.raises(InfeasibleError, match="hold 12 bytes per device, 1 bytes over the limit of 11"):
                tensor.solve(TensorProblem(ops, (), limit))


def test_presolve_looks_again_at_what_changed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a long chain of ops one of which has a choice that goes: what is far from it is compared once."""
    looked: list[int] = []
    rise = tensor_presolve._rise_of_source

    def counted(edge: EdgeArrays) -> Floats:
        looked.append(edge.source)
        return rise(edge)

    monkeypatch.setattr(tensor_presolve, "_rise_of_source", counted)
    count = 20
    ops = [Op(f"op{n}", tuple(Choice(f"c{p}", 1.0, (p,), (p,) if n else ()) for p in range(2))) for n in range(count)]
    ops[3] = Op("op3", (*ops[3].choices, Choice("dear", 9.0, (0,), (1,))))
    pairs = {(0, 1): 1.0, (1, 0): 1.0}
    edges = [Edge(n, 0, ((n + 1, 0),), pairs) for n in range(count - 1)]
    live = live_choices(TensorProblem(tuple(ops), tuple(edges)))
    assert live is not None and all(len(choices) == 2 for choices in live)
    assert all(looked.count(n) == (2 if n in (2, 3) else 1) for n in range(count - 1)), looked


def test_presolve_keeps_what_needs_less_memory() -> None:
    op = Op("op", (Choice("fast", 1.0, (0,), (), 9.0), Choice("lean", 2.0, (0,), (), 1.0)))
    assert live_choices(TensorProblem((op,))) == [[0, 1]]


def test_problems_check_themselves() -> None:
    op = Op("op", (Choice("only", 0.0, (0,)),))
    with pytest.raises(ValueError, match="not negative"):
        Choice("c", -1.0, ())
    with pytest.raises(ValueError, match="differ in their number"):
        Op("op", (Choice("a", 0.0, (0,)), Choice("b", 0.0, ())))
    with pytest.raises(ValueError, match="no input 0"):
        TensorProblem((op, op), (Edge(0, 0, ((1, 0),), {}),))
    with pytest.raises(ValueError, match="names op 3"):
        TensorProblem((op,), (Edge(3, 0, ((0, 0),), {}),))


def test_linear_model_relaxes_and_solves() -> None:
    """Odd cycle: two of three variables have to be one, the relaxation takes a half of each."""
    model = LinearModel()
    x = [model.add_variable(1.0, integer=True) for _ in range(3)]
    for first, second in ((0, 1), (1, 2), (2, 0)):
        model.add_row([x[first], x[second]], [1.0, 1.0], lower=1.0)
    relaxed = model.relax()
    assert relaxed is not None and relaxed.objective == pytest.approx(1.5)
    answer = model.solve()
    assert answer.values is not None and sum(answer.values) == pytest.approx(2.0) == answer.bound
    model.add_row(x, [1.0] * 3, upper=1.0)
    assert model.solve().infeasible and model.relax() is None
