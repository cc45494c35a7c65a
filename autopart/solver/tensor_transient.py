r"""The fastest strategies within a memory limit of which the largest transient is a part.

With what ops hold while they run, r[o,c], counted k times (once for every stage, as a limit is for all together):

    minimise seconds(x)    with    sum_{o,c} memory[o,c] x[o,c] + k max_{o,c} r[o,c] x[o,c] <= memory_limit

The maximum makes the relaxation of one model loose, so it is branched on outside of it. Where it lies between two
values, low <= max <= high, choices above ``high`` go and ``k low`` is taken off the limit; what remains is a problem
without transients (:mod:`autopart.solver.tensor`), whose bound holds for all assignments of that range. An assignment
found in it that does not fit, with maximum r, parts the range into [low, r) and [r, high], neither of which has it.
Ranges go by their bound, the lowest first, until none lies below the best assignment.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from dataclasses import replace

from autopart.runtime.errors import InfeasibleError
from autopart.solver import tensor, time_limits
from autopart.solver.search_space import NotBetter
from autopart.solver.tensor_problem import Op, TensorProblem, TensorSolution, relative_gap


def solve(
    problem: TensorProblem, time_limit_s: float = 60.0, gap: float = 0.0, below: float = math.inf
) -> TensorSolution:
    """As :func:`autopart.solver.tensor.solve`, transients included. Raises what that raises."""
    if not problem.transients or problem.memory_limit is None:
        return tensor.solve(replace(problem, transients=0), time_limit_s, gap, below)
    start = time.perf_counter()
    least = max(min(choice.transient for choice in op.choices) for op in problem.ops)
    most = max(choice.transient for op in problem.ops for choice in op.choices)
    count = itertools.count()
    ranges = [(0.0, next(count), least, most)]
    best: TensorSolution | None = None
    first: InfeasibleError | None = None
    floor = math.inf
    while ranges and (best is None or ranges[0][0] < best.objective * (1 - max(gap, tensor.TOLERANCE))):
        left = time_limit_s - (time.perf_counter() - start)
        if left <= 0 and best is not None:
            time_limits.ended(start + time_limit_s)
            break
        _, _, low, high = heapq.heappop(ranges)
        part, numbers = _between(problem, low, high)
        try:
            found = tensor.solve(part, max(left, 0.1), gap, below)
        except InfeasibleError as error:
            first = first or error
            continue
        except NotBetter as error:
            floor = min(floor, error.bound)
            continue
        choices = tuple(own[index] for own, index in zip(numbers, found.choices, strict=True))
        if problem.fits(choices):
            floor = min(floor, found.bound)
            if best is None or found.objective < best.objective:
                best = replace(found, choices=choices, conversions=problem.conversions(choices))
            continue
        largest = problem.transient(choices)
        smaller = [choice.transient for op in part.ops for choice in op.choices if low <= choice.transient < largest]
        if smaller:
            heapq.heappush(ranges, (found.bound, next(count), low, max(smaller)))
        heapq.heappush(ranges, (found.bound, next(count), largest, high))
    if best is None and floor < math.inf:
        raise NotBetter(floor, floor)
    if best is None:
        assert first is not None, "a range is left while nothing was found"
        raise first
    bound = min(best.objective, floor, *(item[0] for item in ranges))
    near = best.objective - bound <= tensor.TOLERANCE * best.objective
    bound = best.objective if near else bound
    seconds = time.perf_counter() - start
    return replace(best, bound=bound, gap=relative_gap(best.objective, bound), seconds=seconds)


def _between(problem: TensorProblem, low: float, high: float) -> tuple[TensorProblem, list[list[int]]]:
    """The problem where the largest transient lies between two values, and the numbers of each op's choices left."""
    numbers = [[c for c, choice in enumerate(op.choices) if choice.transient <= high] for op in problem.ops]
    ops = tuple(Op(op.name, tuple(op.choices[c] for c in own)) for op, own in zip(problem.ops, numbers, strict=True))
    assert problem.memory_limit is not None
    return replace(
        problem, ops=ops, memory_limit=problem.memory_limit - problem.transients * low, transients=0
    ), numbers
