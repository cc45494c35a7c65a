"""Names that emitted functions let go of: those that nothing reads any more, of memory that no backward keeps."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chains import subject_of

from autopart.passes.emit.releases import Lifetimes
from autopart.passes.emit.source import StageSource
from autopart.passes.peak import peak
from autopart.planner import make_plan
from autopart.realize import realize, realized
from clusters import ideal

LIMITS: dict[str, Any] = {"pp": 1, "dp": 1, "microbatches": 2, "recompute": "none"}


def functions(path: Path) -> Iterator[ast.FunctionDef]:
    tree = ast.parse(path.read_text())
    return (item for item in ast.walk(tree) if isinstance(item, ast.FunctionDef) and item.name != "__init__")


def names(statement: ast.AST) -> set[str]:
    return {item.id for item in ast.walk(statement) if isinstance(item, ast.Name)}


def read(statements: list[ast.stmt]) -> set[str]:
    return set().union(*map(names, statements))


def gone(statement: ast.stmt) -> set[str]:
    return names(statement) if isinstance(statement, ast.Delete) else set()


@pytest.mark.parametrize(("name", "tp"), [("resnet", "2x2"), ("gpt2", "2"), ("unet", "2")])
def test_names_that_go_were_made_and_are_not_read_again(name: str, tp: str, tmp_path: Path) -> None:
    subject, analysis = subject_of(name)
    ranks = math.prod(map(int, tp.split("x")))
    plan = make_plan(subject.program, ideal(ranks), batch=8, tp=tp, analysis=analysis, **LIMITS)
    realize(subject.program, plan, analysis).save(tmp_path / "program")
    deleted, begins = 0, 0
    for function in functions(tmp_path / "program" / "stage_0.py"):
        given = {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}
        for index, statement in enumerate(function.body):
            own = gone(statement)
            deleted += len(own)
            assert own <= read(function.body[:index]) - given and not own & read(function.body[index + 1 :])
            assert not own or not isinstance(function.body[index + 1], ast.Return)
        for index, statement in enumerate(function.body):
            if "collectives.begin(" in ast.unparse(statement):
                assert isinstance(statement, ast.Assign)
                (begun,) = names(statement.targets[0])
                (wait,) = (at for at, other in enumerate(function.body) if at > index and begun in names(other))
                held = names(statement)  # until it is waited for
                assert not any(gone(other) & held for other in function.body[index:wait])
                begins += 1
    assert deleted > 5 and (begins or name != "resnet")


def test_memory_that_goes_is_kept_by_no_backward() -> None:
    """Less is there than with names until functions return."""
    subject, analysis = subject_of("resnet")
    plan = make_plan(subject.program, ideal(2), batch=8, tp=2, analysis=analysis, **LIMITS)
    found = realized(analysis, plan)
    (stage,), (graph,) = found.stages, found.local
    source = StageSource(graph, found.axes, subject.program.tensors, ("",), len(stage.outputs), stage.updates)
    source.write()
    freed = {owner for owners in source.lifetimes.freed.values() for owner in owners}
    assert freed and not freed & source.lasting
    named = peak(graph, found.axes, 4, [], lifetimes=Lifetimes(source.inlined), kind="cpu")
    least = peak(graph, found.axes, 4, [], lifetimes=source.lifetimes, kind="cpu")
    assert least.forward < named.forward and least.retained == named.retained
