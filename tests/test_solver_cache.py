"""The cache of solved problems: the same answers with and without it, whatever lies on disk."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from autopart import cache
from autopart.analysis import analyze
from autopart.cluster import Cluster
from autopart.planner import make_plan
from autopart.runtime.errors import InfeasibleError
from autopart.solver import cache as solved
from autopart.solver import tensor
from autopart.solver.tensor_problem import Choice, Edge, Op, TensorProblem, TensorSolution
from autopart.tracing import capture


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
    texts = [json.dumps({**good, **change}) for change in changed]
    texts += [json.dumps({name: value for name, value in good.items() if name != missing}) for missing in good]
    return [*texts, "", "{", "[]", json.dumps(good)[:-9]]


def test_spoilt_entries_are_written_anew(folder: Path) -> None:
    given = problem(1)
    right = solved.solve(given)
    (path,) = entries(folder)
    text = path.read_text()
    for bad in spoilt(json.loads(text), given):
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
