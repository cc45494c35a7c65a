"""All undominated (seconds, bytes) choices of strategies, by eliminating one op after another from the graph.

After Cai et al., TensorOpt (arXiv 2004.10856). The objective is a sum of tables: one over each op's choices (its
seconds and bytes), and one for each value over the choices of its source and of all that read it (its conversions).
Eliminating an op joins the tables that mention it and keeps, for each setting of the others, the undominated sums
over its choices::

    F(rest) = pareto( union over c of  sum of the tables at (c, rest) )

An op with two neighbours is TensorOpt's node elimination, tables over the same ops that are added its edge elimination,
an op with more neighbours its branch elimination: one rule does all three. It is exact, since sums of dominated points
are dominated. Time grows with the number of ops that a joined table spans, the width of the graph, and ops are taken in
the order that keeps the next table smallest.

Sets of points can grow without limit. With ``epsilon`` each set keeps one point per step of (1 + epsilon)^(1/n) in
seconds, the one with the fewest bytes, n being the number of ops. A point passes through at most n sets, and seconds
only add up, so for every undominated point (s, b) the answer has one with at most ((1 + epsilon) s, b).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopart.runtime.errors import PlanError
from autopart.solver.tensor_presolve import live_choices
from autopart.solver.tensor_problem import IMPOSSIBLE, TensorProblem

MOST_SETTINGS = 300_000


@dataclass(frozen=True, slots=True)
class Point:
    """An assignment with its seconds and bytes."""

    seconds: float
    memory: float
    choices: tuple[int, ...]


# Seconds, bytes, and what was picked: (op, choice) pairs of eliminated ops as a tree, so that joining copies nothing.
_Picks = tuple["_Picks", "_Picks"] | tuple[int, int] | None
_Partial = tuple[float, float, _Picks]
_Set = tuple[_Partial, ...]


@dataclass(frozen=True, slots=True)
class _Table:
    """Undominated sums by the choices of ``ops``; a setting that is missing is impossible."""

    ops: tuple[int, ...]
    sums: dict[tuple[int, ...], _Set]


def frontier(problem: TensorProblem, epsilon: float = 0.0, most_settings: int = MOST_SETTINGS) -> tuple[Point, ...]:
    """All undominated assignments within the memory limit, the fastest first; of equal ones one.

    Raises PlanError where the graph is too wide: where a table would have more than ``most_settings`` settings.
    """
    if epsilon < 0:
        raise ValueError(f"epsilon is not negative: {epsilon}")
    if problem.transients:
        raise ValueError("elimination adds bytes up, and takes no largest transient; use the frontier by memory limits")
    domains = _domains(problem)
    if domains is None:
        return ()
    step = math.log1p(epsilon) / len(problem.ops) if epsilon else 0.0
    tables = [*_op_tables(problem, domains), *_edge_tables(problem, domains, most_settings)]
    left = set(range(len(problem.ops)))
    while left:
        op = min(left, key=lambda item: _settings(_neighbours(tables, item), domains))
        left.remove(op)
        joined = [table for table in tables if op in table.ops]
        tables = [table for table in tables if op not in table.ops]
        _check_size(_settings(_neighbours(joined, op), domains) * len(domains[op]), most_settings)
        tables.append(_eliminated(op, joined, domains, step, problem.memory_limit))
    sums: _Set = ((0.0, 0.0, None),)
    for table in tables:
        sums = _thinned(_added(sums, table.sums.get((), ())), 0.0, problem.memory_limit)
    return tuple(_point(problem, partial) for partial in sums)


def _domains(problem: TensorProblem) -> list[tuple[int, ...]] | None:
    """The choices that can take part in some assignment at all; None where there is none."""
    if problem.memory_limit is None and not any(c.memory for op in problem.ops for c in op.choices):
        live = live_choices(problem)  # it drops what is dominated in seconds alone, which is all that counts here
        return None if live is None else [tuple(choices) for choices in live]
    return [tuple(range(len(op.choices))) for op in problem.ops]


def _op_tables(problem: TensorProblem, domains: Sequence[Sequence[int]]) -> Iterator[_Table]:
    for index, (op, domain) in enumerate(zip(problem.ops, domains, strict=True)):
        yield _Table((index,), {(c,): ((op.choices[c].cost, op.choices[c].memory, None),) for c in domain})


def _edge_tables(problem: TensorProblem, domains: Sequence[Sequence[int]], most_settings: int) -> Iterator[_Table]:
    """A value is converted once per placement that is wanted: its table spans all that read it."""
    for edge in problem.edges:
        ops = tuple(dict.fromkeys((edge.source, *(op for op, _ in edge.uses))))
        _check_size(math.prod(len(domains[op]) for op in ops), most_settings)
        sums: dict[tuple[int, ...], _Set] = {}
        for setting in itertools.product(*(domains[op] for op in ops)):
            chosen = {op: problem.ops[op].choices[c] for op, c in zip(ops, setting, strict=True)}
            have = chosen[edge.source].outputs[edge.output]
            seconds = sum(edge.seconds(have, want) for want in {chosen[op].inputs[slot] for op, slot in edge.uses})
            if seconds != IMPOSSIBLE:
                sums[setting] = ((seconds, 0.0, None),)
        yield _Table(ops, sums)


def _neighbours(tables: Sequence[_Table], op: int) -> tuple[int, ...]:
    found = dict.fromkeys(other for table in tables if op in table.ops for other in table.ops)
    return tuple(other for other in found if other != op)


def _settings(ops: Sequence[int], domains: Sequence[Sequence[int]]) -> int:
    return math.prod(len(domains[op]) for op in ops)


def _check_size(settings: int, most: int) -> None:
    if settings > most:
        raise PlanError(
            f"the graph is too wide for elimination: a table of {settings} settings; use the frontier by memory limits"
        )


def _eliminated(
    op: int, tables: Sequence[_Table], domains: Sequence[Sequence[int]], step: float, limit: float | None
) -> _Table:
    rest = _neighbours(tables, op)
    sums: dict[tuple[int, ...], _Set] = {}
    for setting in itertools.product(*(domains[other] for other in rest)):
        at = dict(zip(rest, setting, strict=True))
        found: list[_Partial] = []
        for choice in domains[op]:
            at[op] = choice
            total: _Set | None = ((0.0, 0.0, (op, choice)),)
            for table in tables:
                part = table.sums.get(tuple(at[other] for other in table.ops))
                if part is None:
                    total = None
                    break
                assert total is not None
                total = _added(total, part)
            if total is not None:
                found += total
        if found:
            kept = _thinned(tuple(found), step, limit)
            if kept:
                sums[setting] = kept
    return _Table(rest, sums)


def _added(first: _Set, second: _Set) -> _Set:
    """Every point of one with every point of the other."""
    if len(second) == 1 and second[0][2] is None:
        seconds, memory, _ = second[0]
        return tuple((s + seconds, m + memory, picks) for s, m, picks in first)
    return _thinned(
        tuple((s + t, m + n, (picks, more) if more else picks) for s, m, picks in first for t, n, more in second),
        0.0,
        None,
    )


def _thinned(points: _Set, step: float, limit: float | None) -> _Set:
    """The undominated ones, in the order of seconds; with a step one for each interval of the logarithm of seconds."""
    kept: list[_Partial] = []
    for point in sorted(points, key=lambda item: item[:2]):
        if limit is not None and point[1] > limit:
            continue
        if kept and point[1] >= kept[-1][1]:
            continue
        if step and kept and point[0] and kept[-1][0] and _interval(point[0], step) == _interval(kept[-1][0], step):
            kept[-1] = point
        else:
            kept.append(point)
    return tuple(kept)


def _interval(seconds: float, step: float) -> int:
    return math.floor(math.log(seconds) / step)


def _point(problem: TensorProblem, partial: _Partial) -> Point:
    picked: dict[int, int] = {}
    stack: list[_Picks] = [partial[2]]
    while stack:
        item = stack.pop()
        if item is None:
            continue
        first, second = item
        if isinstance(first, int):
            assert isinstance(second, int)
            picked[first] = second
        else:
            assert not isinstance(second, int)
            stack += [first, second]
    choices = tuple(picked[op] for op in range(len(problem.ops)))
    return Point(problem.objective(choices), problem.memory(choices), choices)
