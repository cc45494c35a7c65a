"""All undominated (seconds, bytes) choices of strategies, by eliminating one op after another from the graph.

After Cai et al., TensorOpt (arXiv 2004.10856). The objective is a sum of tables: one over each op's choices (its
seconds and bytes), and one for each value over the choices of its source and of all that read it (its conversions).
Eliminating an op joins the tables that mention it and keeps, for each setting of the others, the undominated sums
over its choices::

    F(rest) = pareto( union over c of  sum of the tables at (c, rest) )

It is exact, since sums of dominated points are dominated. Choices that cannot be part of an undominated point are left
out first (:mod:`autopart.solver.tensor_presolve`); the order, and how wide a graph is, are those of
:mod:`autopart.solver.elimination_steps`.

Sets of points can grow without limit. With ``epsilon`` each set keeps one point per step of (1 + epsilon)^(1/n) in
seconds, the one with the fewest bytes, n being the number of ops. A point passes through at most n sets, and seconds
only add up, so for every undominated point (s, b) the answer has one with at most ((1 + epsilon) s, b).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopart.solver.elimination_steps import MOST_SETTINGS, EliminationSteps, Floats, Step
from autopart.solver.tensor_presolve import live_choices
from autopart.solver.tensor_problem import Op, TensorProblem

Ints = NDArray[np.int64]

_MOST_SUMS = 1 << 20
"""Sums that are made at a time, where those of one setting are no more."""


@dataclass(frozen=True, slots=True)
class Point:
    """An assignment with its seconds and bytes."""

    seconds: float
    memory: float
    choices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Sets:
    """Undominated points by setting, those of setting i from ``starts[i]`` to ``starts[i + 1]``; none: impossible.

    sizes: groups of each op that settings are of. op, picked: of a table over one op, it and its choice by point. sums:
    of other tables, those that were joined and which of their points was added, by point.
    """

    sizes: tuple[int, ...]
    starts: Ints
    seconds: Floats
    memory: Floats
    op: int = -1
    picked: Ints | None = None
    sums: tuple[tuple[_Sets, Ints], ...] = ()


@dataclass(frozen=True, slots=True)
class _Thin:
    """What is left out of sets beside what is dominated. step: of the logarithm of seconds; 0: nothing."""

    limit: float | None = None
    step: float = 0.0


_NONE = _Thin()


def frontier(problem: TensorProblem, epsilon: float = 0.0, most_settings: int = MOST_SETTINGS) -> tuple[Point, ...]:
    """All undominated assignments within the memory limit, the fastest first; of equal ones one.

    Raises PlanError where the graph is too wide: where a table would have more than ``most_settings`` settings;
    ValueError for a negative epsilon, and for transients, whose largest is no sum.
    """
    if epsilon < 0:
        raise ValueError(f"epsilon is not negative: {epsilon}")
    if problem.transients:
        raise ValueError("elimination adds bytes up, and takes no largest transient; use the frontier by memory limits")
    live = live_choices(problem)
    if live is None:
        return ()
    ops = (Op(op.name, tuple(op.choices[choice] for choice in own)) for op, own in zip(problem.ops, live, strict=True))
    smaller = replace(problem, ops=tuple(ops))
    elimination = EliminationSteps(smaller, most_settings)
    thin = _Thin(problem.memory_limit, math.log1p(epsilon) / len(problem.ops))
    tables: list[_Sets | Floats] = [_of_op(smaller, op, groups) for op, groups in enumerate(elimination.groups)]
    tables += [elimination.edge(edge) for edge in problem.edges]
    for step in elimination.steps:
        tables.append(_eliminated(step, tables, tuple(elimination.size[op] for op in step.rest), thin))
    left = [table for number in elimination.left if isinstance(table := tables[number], _Sets)]
    whole = _joined(np.zeros(1), [(table, np.zeros(1, dtype=np.int64)) for table in left], 1, (), replace(thin, step=0))
    return tuple(_point(problem, live, whole, point) for point in range(len(whole.seconds)))


def _of_op(problem: TensorProblem, op: int, groups: Sequence[Sequence[int]]) -> _Sets:
    choices = problem.ops[op].choices
    picked = np.concatenate([np.array(group) for group in groups])
    group = np.repeat(np.arange(len(groups)), [len(own) for own in groups])
    seconds = np.array([choices[choice].cost for choice in picked])
    memory = np.array([float(choices[choice].memory) for choice in picked])
    kept = _undominated(group, seconds, memory, _NONE)
    return _Sets((len(groups),), _starts(group[kept], len(groups)), seconds[kept], memory[kept], op, picked[kept])


def _eliminated(step: Step, tables: Sequence[_Sets | Floats], sizes: tuple[int, ...], thin: _Thin) -> _Sets:
    """The table over the other ops, of which there are so many groups each."""
    conversions, sets = np.zeros(()), list[tuple[_Sets, Ints]]()
    shape = step.joined[0].shape
    for item in step.joined:
        shape = tuple(map(max, shape, item.shape))
    for item in step.joined:
        table = tables[item.table]
        if isinstance(table, _Sets):
            settings = np.arange(math.prod(table.sizes)).reshape(*table.sizes, 1)
            sets.append((table, np.broadcast_to(item.spread(settings)[..., 0], shape).ravel()))
        else:
            conversions = conversions + item.spread(table[..., None])[..., 0]
    return _joined(np.broadcast_to(conversions, shape).ravel(), sets, shape[-1], sizes, thin)


def _joined(
    seconds: Floats, tables: Sequence[tuple[_Sets, Ints]], together: int, sizes: tuple[int, ...], thin: _Thin
) -> _Sets:
    """Sums of a point of each table, for settings that take so many ``seconds`` besides; infinite: impossible.

    tables: each with its own setting by setting. together: how many settings that follow each other share a set.
    sizes: what the settings of these sets are of.
    """
    found = [
        _sums(chunk, seconds[chunk], [(table, settings[chunk]) for table, settings in tables], together, thin)
        for chunk in _chunks(seconds, tables, together)
    ]
    shared, total, memory = (np.concatenate([part[at] for part in found]) for at in range(3))
    points = [np.concatenate([part[3][at] for part in found]) for at in range(len(tables))]
    sums = tuple((table, own) for (table, _), own in zip(tables, points, strict=True))
    return _Sets(sizes, _starts(shared, math.prod(sizes)), total, memory, sums=sums)


def _chunks(seconds: Floats, tables: Sequence[tuple[_Sets, Ints]], together: int) -> Iterator[Ints]:
    """Settings that are possible, a part at a time, none parted from those that share its set."""
    count = np.where(np.isinf(seconds), 0.0, 1.0)
    for table, settings in tables:
        count *= np.diff(table.starts)[settings]
    possible = np.flatnonzero(count)
    shared = possible // together
    first = np.flatnonzero(np.diff(shared, prepend=-1))
    before = np.cumsum(count[possible]) - count[possible]
    part = before[first] // _MOST_SUMS
    yield from np.split(possible, first[np.flatnonzero(np.diff(part)) + 1])


def _sums(
    settings: Ints, seconds: Floats, tables: Sequence[tuple[_Sets, Ints]], together: int, thin: _Thin
) -> tuple[Ints, Floats, Floats, list[Ints]]:
    """By undominated point its set, seconds, bytes, and the points of tables that it is the sum of."""
    row, memory, points = np.arange(len(settings)), np.zeros(len(settings)), list[Ints]()
    for table, own in tables:
        many, start = np.diff(table.starts)[own][row], table.starts[own][row]
        several = bool((many > 1).any())
        grown = several and len(row) > len(settings)
        if several:
            each = np.repeat(np.arange(len(row)), many)
            within = np.arange(len(each)) - np.repeat(np.cumsum(many) - many, many)
            row, seconds, memory = row[each], seconds[each], memory[each]
            points, start = [known[each] for known in points], start[each] + within
        seconds, memory = seconds + table.seconds[start], memory + table.memory[start]
        points.append(start)
        if grown:  # sums of one set with one point each are undominated
            kept = _undominated(row, seconds, memory, _NONE)
            row, seconds, memory, points = row[kept], seconds[kept], memory[kept], [known[kept] for known in points]
    shared = settings[row] // together
    kept = _undominated(shared, seconds, memory, thin)
    return shared[kept], seconds[kept], memory[kept], [known[kept] for known in points]


def _undominated(shared: Ints, seconds: Floats, memory: Floats, thin: _Thin) -> Ints:
    """Which points stay of each set, in the order of sets and seconds. shared: the set of each, in order."""
    kept = np.arange(len(shared)) if thin.limit is None else np.flatnonzero(memory <= thin.limit)
    if not (shared[kept][1:] == shared[kept][:-1]).any():
        return kept
    kept = kept[np.lexsort((memory[kept], seconds[kept], shared[kept]))]
    # the fewest bytes so far: ranks, those of a later set below all before it
    ranks = np.unique(memory[kept], return_inverse=True)[1].reshape(-1)
    number = np.cumsum(np.diff(shared[kept], prepend=-1) != 0)
    ranks = ranks - number * (len(kept) + 1)
    fewest = np.minimum.accumulate(ranks)
    kept = kept[np.flatnonzero(np.concatenate([[True], ranks[1:] < fewest[:-1]]))]
    if not thin.step:
        return kept
    with np.errstate(divide="ignore"):
        interval = np.floor(np.log(seconds[kept]) / thin.step)
    alike = (interval[1:] == interval[:-1]) & (shared[kept][1:] == shared[kept][:-1]) & np.isfinite(interval[1:])
    return kept[np.flatnonzero(np.concatenate([~alike, [True]]))]


def _starts(shared: Ints, count: int) -> Ints:
    return np.concatenate([[0], np.cumsum(np.bincount(shared, minlength=count))])


def _point(problem: TensorProblem, live: Sequence[Sequence[int]], whole: _Sets, point: int) -> Point:
    picked, stack = dict[int, int](), [(whole, point)]
    while stack:
        table, at = stack.pop()
        if table.picked is not None:
            picked[table.op] = live[table.op][int(table.picked[at])]
        stack += [(other, int(points[at])) for other, points in table.sums]
    choices = tuple(picked[op] for op in range(len(problem.ops)))
    return Point(problem.objective(choices), problem.memory(choices), choices)
