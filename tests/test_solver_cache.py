"""The cache of solved problems: the same answers with and without it, whatever lies on disk."""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from autopart import cache
from autopart.analysis import analyze
from autopart.cluster import Cluster
from autopart.planner import make_plan
from autopart.runtime.errors import InfeasibleError
from autopart.solver import cache as solved
from autopart.solver import tensor, tensor_transient
from autopart.solver.search_space import NotBetter
from autopart.solver.tensor_problem import Choice, Edge, Op, TensorProblem, TensorSolution
from autopart.solver.tensor_sums import Eliminator
from autopart.tracing import capture

Array = NDArray[np.float64]


def problem(seed: int, ops: int = 4) -> TensorProblem:
    draw = random.Random(seed)
    made = [
        Op(
            f"op{index}",
            tuple(
                Choice(f"c{c}", draw.uniform(0, 2), (c % 3,), (draw.randrange(3),), draw.uniform(0, 5))
                for c in range(3)
            ),
        )
        for index in range(ops)
    ]
    edges = [
        Edge(
            index, 0, ((index + 1, 0),), {(p, t): draw.uniform(0, 1) for p in range(3) for t in range(3) if p != t}, 2.0
        )
        for index in range(ops - 1)
    ]
    return TensorProblem(tuple(made), tuple(edges), draw.choice((None, 12.0)))


class Counting:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, given: TensorProblem, *limits: float) -> TensorSolution:
        self.calls += 1
        return tensor.solve(given, limits[0])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path))
    return tmp_path / solved.FOLDER


def entries(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_a_cache_never_changes_an_answer(folder: Path) -> None:
    for seed in range(30):
        given = problem(seed)
        plain, solver = tensor.solve(given), Counting()
        answers = [solved.solve(given, solver=solver) for _ in range(3)]
        assert solver.calls == 1
        for answer in answers:
            assert replace(answer, seconds=0.0) == replace(plain, seconds=0.0)
    assert len(entries(folder)) == 30


def test_a_bound_that_a_solver_stopped_at_is_the_same_with_what_was_solved_further(folder: Path) -> None:
    stopped = 0
    for seed in range(30):
        given = problem(seed)
        best = tensor_transient.solve(given).objective
        for below in (0.5 * best, 0.9 * best, best, 1.1 * best):
            found = list[object]()
            for used in (False, True, True):
                with cache.used(used):
                    try:
                        found.append(replace(solved.solve(given, below=below), seconds=0.0))
                    except NotBetter as error:
                        found.append(error.bound)
                        stopped += 1
                with cache.used(True):
                    solved.solve(given)
            assert found[0] == found[1] == found[2]
    assert stopped


def test_planning_keeps_what_it_solves_and_finds_it_again(folder: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    program = capture(model, (torch.randn(4, 8),), {}, check_eval=False)
    cluster = Cluster.parse("4xA100-40GB")
    analysis = analyze(program)

    def plan() -> dict[str, object]:
        made = make_plan(program, cluster, tp=2, pp=1, analysis=analysis).to_json_object()
        return {name: value for name, value in made.items() if not name.endswith("solve_s") and name != "total_s"}

    with cache.used(False):
        plain = plan()
    assert not entries(folder)
    first = plan()
    kept = {path: path.stat().st_mtime_ns for path in entries(folder)}
    assert kept and plan() == first == plain
    assert {path: path.stat().st_mtime_ns for path in entries(folder)} == kept


def test_the_key_changes_with_every_field() -> None:
    base = TensorProblem(
        (Op("a", (Choice("x", 1.0, (0,), (), 2.0),)), Op("b", (Choice("y", 1.0, (), (1,), 0.0),))),
        (Edge(0, 0, ((1, 0),), {(0, 1): 0.5}, 3.0),),
        9.0,
    )
    a, b = base.ops
    (edge,) = base.edges
    (choice,) = a.choices

    def with_choice(**more: object) -> TensorProblem:
        return replace(base, ops=(replace(a, choices=(replace(choice, **more),)), b))  # type: ignore[arg-type]

    others = [
        with_choice(name="z"),
        with_choice(cost=1.0000000000000002),
        with_choice(outputs=(1,)),
        with_choice(outputs=(0, 0)),
        with_choice(memory=2.5),
        replace(base, ops=(replace(a, name="c"), b)),
        replace(base, ops=(a, b, b)),
        replace(base, edges=()),
        replace(base, edges=(replace(edge, weight=4.0),)),
        replace(base, edges=(replace(edge, cost={(0, 1): 0.25}),)),
        replace(base, edges=(replace(edge, cost={(0, 0): 0.5}),)),
        replace(base, edges=(replace(edge, uses=((1, 0), (1, 0))),)),
        replace(base, memory_limit=None),
        replace(base, memory_limit=8.0),
    ]
    keys = [solved.key(item, 60.0) for item in (base, *others)] + [solved.key(base, 61.0)]
    assert len(set(keys)) == len(keys)
    again = replace(base, edges=(replace(edge, cost=dict(edge.cost)),))
    assert solved.key(again, 60.0) == keys[0]


def test_versions_are_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    given = problem(0)
    before = solved.key(given, 60.0)
    monkeypatch.setattr(solved, "_versions", lambda: ("autopart 9", "ortools 1"))
    assert solved.key(given, 60.0) != before


def spoilt(good: dict[str, object], given: TensorProblem) -> list[str]:
    """Entries that are no answer to the problem: no JSON, no fields, other ops, worse choices, lies."""
    choices = good["choices"]
    assert isinstance(choices, list)
    best = tuple(choices)
    worse = next(c for c in itertools.product(range(3), repeat=len(choices)) if c != best and given.fits(c))
    changed = (
        *({"choices": choices[:-1]}, {"choices": [*choices[:-1], 7]}, {"choices": ["x"] * len(choices)}),
        *({"choices": list(worse)}, {"objective": 0.0}, {"bound": 1e9}, {"bound": 0.0}, {"objective": None}),
    )
    texts = [cache.signed({**good, **change}) for change in changed]
    texts += [cache.signed({name: value for name, value in good.items() if name != missing}) for missing in good]
    return [*texts, json.dumps(good), "", "{", "[]", cache.signed(good)[:-9]]


def test_spoilt_entries_are_written_anew(folder: Path) -> None:
    given = problem(1)
    right = solved.solve(given)
    (path,) = entries(folder)
    text = path.read_text()
    good = cache.kept(path)
    assert good is not None
    for bad in spoilt(good, given):
        path.write_text(bad)
        solver = Counting()
        answer = solved.solve(given, solver=solver)
        assert answer.choices == right.choices and solver.calls == 1, bad
        assert path.read_text() == text and entries(folder) == [path]


def test_what_is_not_proved_is_not_kept(folder: Path) -> None:
    given = problem(2)

    def cut_short(given: TensorProblem, time_limit_s: float) -> TensorSolution:
        found = tensor.solve(given, time_limit_s)
        return replace(found, bound=found.objective / 2, gap=0.5)

    solved.solve(given, solver=cut_short)
    assert not entries(folder)


def test_answers_within_a_gap_are_another_entry(folder: Path) -> None:
    given = problem(2)

    def near(given: TensorProblem, time_limit_s: float, gap: float) -> TensorSolution:
        found = tensor.solve(given, time_limit_s)
        return replace(found, bound=found.objective * (1 - gap), gap=gap)

    for _ in range(2):
        assert solved.solve(given, gap=0.25, solver=near).gap == pytest.approx(0.25)
    assert solved.solve(given).gap == 0.0
    assert len(entries(folder)) == 2


def test_infeasible_problems_and_broken_folders(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(InfeasibleError):
            solved.solve(replace(problem(3), memory_limit=0.0))
    assert not entries(folder)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "file"))
    assert solved.solve(problem(1)).choices == tensor.solve(problem(1)).choices


def test_numbers_are_found_again(folder: Path) -> None:
    """A number that follows from an array and a table is made once; what is read is one list of as many numbers."""
    made = list[float]()

    def numbers(content: object, count: int = 3) -> list[float]:
        def make() -> list[float]:
            made.append(len(made))
            return [1 / 3, 0.1 + 0.2, math.inf][:count]

        return solved.numbers(content, count, make)

    content = (np.array([[1.0, 2.0]]), {"a": 1}, [True])
    assert [numbers(content) for _ in range(3)] == 3 * [[1 / 3, 0.1 + 0.2, math.inf]] and len(made) == 1
    others: list[object] = [
        (np.array([[1.0, np.nextafter(2.0, 3.0)]]), {"a": 1}, [True]),
        (np.array([[1.0], [2.0]]), {"a": 1}, [True]),
        (np.array([[1, 2]]), {"a": 1}, [True]),
        (np.array([[1.0, 2.0]]), {"a": 2}, [True]),
    ]
    for count, other in enumerate(others, 2):
        numbers(other)
        assert len(made) == count
    wrong = [cache.signed({"numbers": found}) for found in (3, [1.0, 2.0], [1.0, 2.0, "3"])]
    for spoilt in ("", "[]", *wrong):
        for path in entries(folder.parent / solved.NUMBERS):
            path.write_text(spoilt)
        count = len(made)
        assert numbers(content) == numbers(content) == [1 / 3, 0.1 + 0.2, math.inf] and len(made) == count + 1


def test_prices_of_layers_are_found_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With twice the batch in twice the microbatches no layer is weighed again."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(8)))
    totals, weighed = Eliminator.totals, list[int]()

    def counted(self: Eliminator, costs: Array, other: NDArray[np.bool_], times: Array) -> Array:
        weighed.append(costs.shape[1])
        return totals(self, costs, other, times)

    monkeypatch.setattr(Eliminator, "totals", counted)
    cluster, counts, bounds = Cluster.parse("4xA100-40GB"), list[int](), list[float]()
    for batch, used in ((16, True), (32, True), (32, False)):
        analysis = analyze(capture(model, (torch.randn(batch, 64),), {}, check_eval=False))
        weighed.clear()
        with cache.used(used):
            plan = make_plan(analysis.program, cluster, tp=2, pp=2, microbatches=batch // 4, analysis=analysis)
        counts.append(len(weighed))
        bounds.append(plan.bound_s)
    assert 0 == counts[1] < counts[0] <= counts[2] and bounds[1] == bounds[2]


def test_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    solver = Counting()
    with cache.used(False):
        for _ in range(2):
            solved.solve(problem(1), solver=solver)
    assert solver.calls == 2 and not entries(folder)
    monkeypatch.setenv(cache.VARIABLE, "off")
    for _ in range(2):
        solved.solve(problem(1), solver=solver)
    assert solver.calls == 4 and not entries(folder)
