r"""Which choices of a tensor problem can be part of a best assignment at all.

A choice goes when one of its inputs or outputs can be converted from or to nothing that the other end still offers
(unreachable), when it exceeds the memory limit with the least that every other op can hold (unaffordable), or when
another of its op does as well whatever the others choose (dominated): c by c' where

    cost[c'] - cost[c] + sum_e max_{what others choose} (conversions of e with c' - with c) <= 0
    memory[c'] <= memory[c]

(dead-end elimination; Goldstein, Biophysical Journal 66(5), 1994, equation 6). A conversion is paid once per target,
so that a target which another use may want as well saves nothing when it is given up. Removing one choice can make
others unreachable or dominated, so this repeats until nothing changes.
"""

from __future__ import annotations

import math
import operator

import numpy as np

from autopart.solver.tensor_arrays import (
    EdgeArrays,
    Floats,
    Ints,
    Live,
    Mask,
    ProblemArrays,
    compiled,
    incoming,
    outgoing,
)
from autopart.solver.tensor_problem import TensorProblem

# Largest array that comparing all placements of a use for all of the other end may take; above, equal ones alone are.
_MOST_CELLS = 4_000_000
# By what share of a limit sums of bytes in another order may differ.
_ROUNDING = 1e-12


def live_choices(problem: TensorProblem) -> Live | None:
    """The choices that remain, or None when an op has none left: no assignment exists."""
    found = presolved(compiled(problem))
    return None if found is None else found.live


def presolved(arrays: ProblemArrays) -> ProblemArrays | None:
    """The problem over the choices that remain; None when an op has none left."""
    arrays = arrays.of([_cheapest_of_equals(arrays, op) for op in range(len(arrays.cost))])
    rises: dict[tuple[int, int], tuple[EdgeArrays, Floats]] = {}
    looked: list[tuple[EdgeArrays, ...]] = [()] * len(arrays.cost)  # at which edges an op's choices were last compared
    while True:
        reached = _reachable(arrays)
        reached = None if reached is None else _affordable(reached)
        if reached is None:
            return None
        arrays, before = reached, reached
        arrays = arrays.of(_undominated(arrays, rises, looked))
        if sum(map(len, arrays.live)) == sum(map(len, before.live)):
            return arrays


def _cheapest_of_equals(arrays: ProblemArrays, op: int) -> Mask:
    """Of choices with equal placements those that are no slower with less memory; choices are cheapest first."""
    kept: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = {}
    mask = np.ones(len(arrays.cost[op]), dtype=bool)
    for index, choice in enumerate(arrays.live[op]):
        item = arrays.problem.ops[op].choices[choice]
        key = (item.outputs, item.inputs)
        if kept.get(key, np.inf) <= item.memory:
            mask[index] = False
        else:
            kept[key] = item.memory
    return mask


def _reachable(arrays: ProblemArrays) -> ProblemArrays | None:
    """Without choices that nothing at the other end of a use can be converted with."""
    while True:
        kept = [np.ones(len(cost), dtype=bool) for cost in arrays.cost]
        for edge in arrays.edges:
            possible: Mask = np.isfinite(edge.seconds)
            for use in edge.uses:
                if not possible[:, use.columns].all():
                    kept[use.op] &= np.any(possible, axis=0)[use.wanted]
                    kept[edge.source] &= np.any(possible[:, use.columns], axis=1)[edge.produced]
        if not all(mask.any() for mask in kept):
            return None
        if all(mask.all() for mask in kept):
            return arrays
        arrays = arrays.of(kept)


def _affordable(arrays: ProblemArrays) -> ProblemArrays | None:
    """Without choices that do not fit even where all other ops hold the least they can."""
    limit = arrays.problem.memory_limit
    if limit is None:
        return arrays
    least = [float(memory.min()) for memory in arrays.memory]
    room = limit - math.fsum(least)
    room += _ROUNDING * max(abs(limit), math.fsum(least))
    kept = [memory - own <= room for memory, own in zip(arrays.memory, least, strict=True)]
    if not all(mask.any() for mask in kept):
        return None
    return arrays if all(mask.all() for mask in kept) else arrays.of(kept)


def _undominated(
    arrays: ProblemArrays,
    rises: dict[tuple[int, int], tuple[EdgeArrays, Floats]],
    looked: list[tuple[EdgeArrays, ...]],
) -> list[Mask]:
    """Per op which of its choices stay. rises, looked: kept from round to round; what they say of edges that are no
    longer there is not read, and ops whose edges are all as they were are left as they are.
    """
    sources, readers = outgoing(arrays), incoming(arrays)
    found = []

    def rise_of(edge: EdgeArrays, number: int) -> Floats:
        known = rises.get((id(edge), number))
        if known is None or known[0] is not edge:
            made = _rise_of_source(edge) if number < 0 else _rise_of_use(edge, number)
            known = rises[id(edge), number] = edge, made
        return known[1]

    for op, (cost, memory) in enumerate(zip(arrays.cost, arrays.memory, strict=True)):
        around = (*sources[op], *(edge for edge, _ in readers[op]))
        same = len(around) == len(looked[op]) and all(map(operator.is_, around, looked[op]))
        if len(cost) == 1 or (around and same):
            found.append(np.ones(len(cost), dtype=bool))
            continue
        looked[op] = around
        rise = cost[:, None] - cost[None, :]  # [instead, now]
        with np.errstate(invalid="ignore"):  # impossible before and after an intermediate change: not comparable
            for edge in sources[op]:
                rise = rise + rise_of(edge, -1)[np.ix_(edge.produced, edge.produced)]
            for edge, number in readers[op]:
                wanted = edge.uses[number].wanted
                rise = rise + rise_of(edge, number)[np.ix_(wanted, wanted)]
        better = (rise <= 0) & (memory[:, None] <= memory[None, :])
        np.fill_diagonal(better, False)
        mask = np.ones(len(cost), dtype=bool)
        if better.any():
            for choice in range(len(cost) - 1, -1, -1):  # the dearest first, so that the cheaper of two equals stays
                mask[choice] = not (better[:, choice] & mask).any()
        found.append(mask)
    return found


def _rise_of_source(edge: EdgeArrays) -> Floats:
    """By how much conversions cost more at most where a value is produced as [instead] in place of [now]."""
    seconds, rows = edge.seconds, len(edge.seconds)
    if rows * seconds.size > _MOST_CELLS:
        return np.where(np.eye(rows, dtype=bool), 0.0, np.inf)
    with np.errstate(invalid="ignore"):
        difference = seconds[:, None, :] - seconds[None, :, :]
    difference[:, np.isinf(seconds)] = -np.inf  # no assignment needs what cannot be done
    most: Floats = difference.max(axis=2)
    if len(edge.uses) == 1:
        return most
    single = sum(np.maximum(0.0, difference[:, :, use.columns].max(axis=2)) for use in edge.uses)
    return np.where(most <= 0, most, single)


def _rise_of_use(edge: EdgeArrays, number: int) -> Floats:
    """The same where a use wants its value as [instead] in place of [now]."""
    seconds, columns = edge.seconds, edge.seconds.shape[1]
    if columns * seconds.size > _MOST_CELLS:
        return np.where(np.eye(columns, dtype=bool), 0.0, np.inf)
    shared = np.zeros(columns, dtype=bool)
    for other, use in enumerate(edge.uses):
        if other != number:
            shared[use.columns] = True
    saved = np.where(np.isinf(seconds), np.inf, np.where(shared[None, :], 0.0, seconds))
    with np.errstate(invalid="ignore"):
        difference = seconds[:, :, None] - saved[:, None, :]  # [produced, instead, now]
    difference[np.broadcast_to(np.isinf(seconds)[:, None, :], difference.shape)] = -np.inf
    most: Floats = difference.max(axis=0)
    _zero_diagonal(most, edge.uses[number].columns)
    return most


def _zero_diagonal(values: Floats, columns: Ints) -> None:
    values[columns, columns] = 0.0
