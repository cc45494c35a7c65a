r"""One strategy per op on the tensor axes: a flow between produced and wanted placements, relaxed first, then integer.

With o an op, c one of its choices, e an edge, u one of its uses, p a placement that the source of e yields and t one
that a use of it wants (on several axes choices and placements are tuples, numbered like any others):

    minimise  sum_{o,c} cost[o,c] x[o,c]  +  sum_{e,p,t} weight[e] cost[e,p,t] z[e,p,t]

    x[o,c] in {0, 1}:  op o runs by its choice c;                     sum_c x[o,c] = 1              Flow._add_choices
    y[e,u,p,t] >= 0:   use u of e reads as t what was produced as p;
                       sum_t y[e,u,p,t] = sum_{c of source yields p} x[source,c]
                       sum_p y[e,u,p,t] = sum_{c of u wants t} x[u,c]                                  Flow._add_flow
    z[e,p,t] >= 0:     the value of e is converted from p to t, once for all its uses;
                       z[e,p,t] >= y[e,u,p,t]      (z is y where e has one use)                       Flow._add_shared
    memory:            sum_{o,c} memory[o,c] x[o,c] <= memory_limit                                   Flow._add_memory

An impossible conversion has no y. The flow is what makes the relaxation tight: it is exact where the graph is a tree,
and on the graphs of models it mostly comes out integral. On several axes there are hundreds of choices per op and
thousands of pairs (p, t) per use, of which few matter, so the relaxation is solved by column generation (Dantzig,
Wolfe, Operations Research 8(1), 1960):

1. Choices that are dominated or unreachable go (:mod:`autopart.solver.tensor_presolve`), local search finds a first
   assignment (:mod:`autopart.solver.tensor_descent`), and a first bound is climbed to without a linear solver
   (:mod:`autopart.solver.tensor_ascent`): choices whose excess over it is more than the distance between the two go.
2. GLOP solves the model over a part of the choices and pairs, which contains the best assignment known   _Search._relax
3. Its prices, completed to all choices, give a bound that holds for the whole problem
   (:mod:`autopart.solver.tensor_bound`). What prices below zero joins the part, and 2 repeats;              _grow
   when nothing does, or the bound is as high as the part's optimum, the relaxation of the whole problem is solved.
4. Where the best assignment does not meet the bound, choices and pairs whose excess over the bound is more than the
   distance between the two are left out, and SCIP solves the rest, that with little excess first       _Search._finish

Seconds are scaled by a known assignment's, so that tolerances are relative to the answer: objective and bound count as
equal when they differ by less than TOLERANCE of the objective.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autopart.runtime.errors import InfeasibleError, PlanError
from autopart.solver import time_limits
from autopart.solver.search import NotBetter
from autopart.solver.tensor_arrays import EdgeArrays, Mask, ProblemArrays, compiled
from autopart.solver.tensor_ascent import Ascent
from autopart.solver.tensor_bound import Bound, Prices, completed, free
from autopart.solver.tensor_descent import TOLERANCE, Incumbent
from autopart.solver.tensor_flow import Flow, Part, largest_seconds, whole
from autopart.solver.tensor_presolve import presolved
from autopart.solver.tensor_problem import IMPOSSIBLE, Edge, Op, TensorProblem, TensorSolution, relative_gap

__all__ = ["TOLERANCE", "solve"]

# Below this number of pairs the whole relaxation is solved at once, and the integer solver ends in seconds.
_FEW_PAIRS = 20_000
# Below this number of pairs the integer solver is given all at once.
_AT_ONCE = 2_000
# Choices of an op that join the part in one round at most.
_MOST_NEW = 12
# The relaxation is solved where a part's is above the bound by no more than this share of the gap that is asked for.
_RELAXED = 0.1
# Shares of the distance between the best known and the bound, for which the integer solver is given what is within.
_ROOMS = (0.0005, 0.0025, 0.0125, 0.0625, 0.25, 1.0)
# Passes of message passing before the first relaxation, and after each.
_PASSES = 30
_FEW_PASSES = 3
# Leaving choices out is worth starting over while no more than this share of them stays.
_WORTHWHILE = 0.8


def solve(
    problem: TensorProblem, time_limit_s: float = 60.0, gap: float = 0.0, below: float = math.inf
) -> TensorSolution:
    """The strategies that take the fewest seconds within the memory limit, or the best found in ``time_limit_s``.

    gap: a share of the objective by which it may exceed its bound; 0 for the optimum. below: of interest are only
    strategies that take fewer seconds; NotBetter is raised where surely none do. Raises InfeasibleError, naming
    what binds, when there are none; PlanError when none were found in time.
    """
    assert not (problem.transients and problem.memory_limit is not None), "tensor_transient solves these"
    start = time.perf_counter()
    arrays = presolved(compiled(problem))
    if arrays is None:
        raise _Unsolvable(problem, time_limit_s)
    search = _Search(arrays, start + time_limit_s, max(gap, TOLERANCE), below)
    method = search.run()
    time_limits.ended(search.until)
    if below <= search.bound < math.inf:
        raise NotBetter(search.bound, search.bound)
    best = search.best
    if best.choices is None:
        if search.bound == math.inf:
            raise _Unsolvable(problem, time_limit_s)
        raise PlanError(f"no assignment of strategies was found in {time_limit_s:g} s; raise the time limit")
    near = best.objective - search.bound <= TOLERANCE * best.objective
    bound = best.objective if near else search.bound
    return TensorSolution(
        choices=tuple(best.choices),
        objective=best.objective,
        bound=bound,
        gap=relative_gap(best.objective, bound),
        seconds=time.perf_counter() - start,
        method=method,
        conversions=problem.conversions(best.choices),
    )


@dataclass(slots=True)
class _Search:
    """Steps 2 to 4 on what presolve left. bound: seconds that every assignment takes; infinite: there is none."""

    arrays: ProblemArrays
    until: float
    gap: float
    below: float
    best: Incumbent = field(init=False)
    bound: float = 0.0
    _proof: Bound | None = None  # of the prices that gave the highest bound

    def __post_init__(self) -> None:
        self.best = Incumbent(self.arrays, self.gap)

    def run(self) -> str:
        """Improves ``best`` and ``bound`` until they meet; returns the method that finished it."""
        arrays, best = self.arrays, self.best
        best.offer([live[0] for live in arrays.live])
        best.offer([live[int(memory.argmin())] for live, memory in zip(arrays.live, arrays.memory, strict=True)])
        self.bound = math.fsum(float(cost.min()) for cost in arrays.cost)
        if best.meets(self.bound) or self._surpassed:
            return "presolve"
        while self.arrays.pairs > _FEW_PAIRS and self._climb():
            pass
        if self._surpassed:
            return "ascent"
        method = self._relax()
        if self._surpassed or self.best.meets(self.bound) or (self.best.choices is None and self.bound == math.inf):
            return method
        self._finish()
        return "mip"

    @property
    def _surpassed(self) -> bool:
        """Whether no assignment is of interest any more."""
        return self.bound >= self.below

    @property
    def _left(self) -> float:
        return max(0.1, self.until - time.perf_counter())

    def _climb(self) -> bool:
        """Raises the bound by message passing and leaves out what it excludes; False where that is little."""
        arrays, best = self.arrays, self.best
        prices = free(arrays)
        self._ascend(prices, _PASSES)
        assert self._proof is not None
        if best.choices is None:
            return False
        room = (best.objective - self._proof.seconds) * (1 + 1e-6)
        kept = [self._proof.excess(op) <= room for op in range(len(arrays.cost))]
        for mask, live, choice in zip(kept, arrays.live, best.choices, strict=True):
            mask[live.index(choice)] = True
        left = sum(int(mask.sum()) for mask in kept)
        if left > _WORTHWHILE * sum(map(len, kept)):
            return False
        reduced = arrays.of(kept)
        self.arrays, self._proof = reduced, None
        self.best = Incumbent(reduced, self.gap)
        self.best.offer(best.choices)
        return True

    def _ascend(self, prices: Prices, passes: int) -> None:
        ascent = Ascent(self.arrays, prices)
        self._prove(ascent.run(passes), prices.bound(self.arrays))
        for choices in ascent.assignments():
            self.best.offer(self.arrays.original(choices))

    def _prove(self, seconds: float, proof: Bound) -> None:
        if self._proof is None or proof.seconds > self._proof.seconds:
            self._proof = proof
        self.bound = max(self.bound, seconds)

    def _relax(self) -> str:
        """The relaxation over a growing part, until it is that of the whole or the bound meets the best assignment."""
        arrays, best = self.arrays, self.best
        unit = best.objective if 0 < best.objective < math.inf else largest_seconds(arrays)
        all_at_once = arrays.pairs <= _FEW_PAIRS or best.choices is None
        part = whole(arrays) if all_at_once else _around(arrays, best.choices or (), self._proof)
        while True:
            flow = Flow(arrays, part, unit)
            try:
                relaxed = flow.model.relax(self._left)
            except TimeoutError:
                return "lp"
            if relaxed is None:
                assert all_at_once, "the part has an assignment"
                self.bound = math.inf if best.choices is None else self.bound
                return "lp"
            integral = flow.is_integral(relaxed.values)
            if best.offer(flow.rounded(relaxed.values)):
                _join(arrays, part, best.choices or ())
            prices, violated = completed(arrays, flow.duals(relaxed))
            found = prices.bound(arrays)
            self._prove(found.seconds, found)
            seconds = relaxed.objective * flow.unit
            solved = all_at_once or not _grow(arrays, part, found, violated, TOLERANCE * unit)
            if solved:
                self.bound = max(self.bound, seconds)
            elif not best.meets(self.bound):
                self._ascend(prices, _FEW_PASSES)
            # the whole's relaxation lies between the bound and the part's
            near = seconds - self.bound <= max(TOLERANCE, _RELAXED * self.gap) * seconds
            if solved or near or best.meets(self.bound):
                return "lp" if integral else "lp rounded"

    def _finish(self) -> None:
        """The integer optimum of what may still be part of something better.

        Where that is much, what the proof has least against is tried first: the optimum of little is found soon, and
        all else takes at least what was allowed for. Where a gap is allowed that is all.
        """
        best, proof = self.best, self._proof
        if best.choices is None or proof is None:
            self._integer(whole(self.arrays), math.inf)
            return
        few = self._within(proof, best.objective - proof.seconds).size <= _AT_ONCE
        for share in _ROOMS[-1:] if few else _ROOMS:
            room = share * (best.objective - proof.seconds)
            part = self._within(proof, room)
            if self.gap > TOLERANCE and part.size > _FEW_PAIRS:
                return
            self._integer(part, proof.seconds + room)
            if best.meets(self.bound) or time.perf_counter() >= self.until:
                return

    def _within(self, proof: Bound, room: float) -> Part:
        """What takes no more than so many seconds beyond the proof's, and the best assignment."""
        room *= 1 + 1e-6
        part = Part(
            [proof.excess(op) <= room for op in range(len(self.arrays.cost))],
            [[slack <= room for slack in uses] for uses in proof.slack],
        )
        _join(self.arrays, part, self.best.choices or ())
        return part

    def _integer(self, part: Part, outside: float) -> None:
        """The integer optimum of a part. outside: seconds that all takes that is not in it."""
        arrays, best = self.arrays, self.best
        flow = Flow(arrays, part, best.objective if 0 < best.objective < math.inf else largest_seconds(arrays))
        if best.choices is not None:
            flow.hint(best.choices)
        while True:
            answer = flow.model.solve(self._left, self.gap if self.gap > TOLERANCE else 0.0)
            proved = answer.bound * flow.unit
            if answer.values is not None:
                found = flow.rounded(answer.values)
                best.offer(found)
                if not arrays.problem.fits(found) and time.perf_counter() < self.until:
                    flow.exclude(found)
                    continue
            self.bound = max(self.bound, min(proved, outside, best.objective))
            return


def _around(arrays: ProblemArrays, choices: Sequence[int], proof: Bound | None) -> Part:
    """A part with one assignment, and of each op what the proof has least against, or else what is cheapest."""
    part = Part(
        [np.zeros(len(cost), dtype=bool) for cost in arrays.cost],
        [[np.zeros(edge.seconds.shape, dtype=bool) for _ in edge.uses] for edge in arrays.edges],
    )
    for op, mask in enumerate(part.choices):
        mask[np.argsort(proof.values[op] if proof else arrays.cost[op], kind="stable")[:_MOST_NEW]] = True
    _join(arrays, part, choices)
    for index, (edge, pairs) in enumerate(zip(arrays.edges, part.pairs, strict=True)):
        _add_pairs(part, edge, pairs, proof.slack[index] if proof else [edge.seconds] * len(edge.uses), 0.0)
    return part


def _join(arrays: ProblemArrays, part: Part, choices: Sequence[int]) -> None:
    """Adds an assignment, in the problem's numbers, to a part."""
    chosen = [live.index(c) for live, c in zip(arrays.live, choices, strict=True)]
    for mask, choice in zip(part.choices, chosen, strict=True):
        mask[choice] = True
    for edge, pairs in zip(arrays.edges, part.pairs, strict=True):
        for use, mask in zip(edge.uses, pairs, strict=True):
            mask[edge.produced[chosen[edge.source]], use.wanted[chosen[use.op]]] = True


def _grow(
    arrays: ProblemArrays, part: Part, found: Bound, violated: Sequence[Sequence[Mask]], tolerance: float
) -> bool:
    """Adds to a part what prices below zero; False where nothing does."""
    grown = False
    share = tolerance / max(1, len(arrays.cost))
    for values, mask in zip(found.values, part.choices, strict=True):
        cheaper = np.flatnonzero(~mask & (values < values[mask].min() - share))
        if len(cheaper):
            mask[cheaper[np.argsort(values[cheaper])[:_MOST_NEW]]] = True
            grown = True
    for edge, pairs, slack, wrong in zip(arrays.edges, part.pairs, found.slack, violated, strict=True):
        for mask, broken in zip(pairs, wrong, strict=True):
            grown |= bool((broken & ~mask).any())
            mask |= broken
        _add_pairs(part, edge, pairs, slack, share)
    return grown


def _add_pairs(
    part: Part,
    edge: EdgeArrays,
    pairs: Sequence[Mask],
    slack: Sequence[np.ndarray],
    tolerance: float,
) -> None:
    """For every use the pairs that cost next to nothing more, and the cheapest of each placement in the part."""
    rows = np.unique(edge.produced[part.choices[edge.source]])
    for use, mask, left in zip(edge.uses, pairs, slack, strict=True):
        columns = np.unique(use.wanted[part.choices[use.op]])
        inside = left[np.ix_(rows, columns)]
        chosen = inside <= tolerance
        chosen[np.arange(len(rows)), inside.argmin(axis=1)] = True
        chosen[inside.argmin(axis=0), np.arange(len(columns))] = True
        mask[np.ix_(rows, columns)] |= chosen


class _Unsolvable(InfeasibleError):
    """There is no assignment. Why is found when it is asked for, which takes further solutions."""

    def __init__(self, problem: TensorProblem, time_limit_s: float) -> None:
        super().__init__("")
        self._problem, self._time_limit_s = problem, time_limit_s

    def __str__(self) -> str:
        if self.args == ("",):
            self.args = (_why_infeasible(self._problem, self._time_limit_s),)
        return str(self.args[0])

    def __reduce__(self) -> tuple[type[InfeasibleError], tuple[str]]:
        return InfeasibleError, (str(self),)  # for another process, which need not have the problem


def _why_infeasible(problem: TensorProblem, time_limit_s: float) -> str:
    """The conversions that nothing can avoid, or else by how many bytes it does not fit."""
    counted = TensorProblem(
        ops=tuple(_with_costs(op, [0.0] * len(op.choices)) for op in problem.ops),
        edges=tuple(_with_impossible_counted(problem, edge) for edge in problem.edges),
    )
    fewest = solve(counted, time_limit_s)
    if fewest.objective > 0.5:
        chosen = [op.choices[c] for op, c in zip(problem.ops, fewest.choices, strict=True)]
        blocked = [
            f"output {edge.output} of {problem.ops[edge.source].name!r} ({chosen[edge.source].name}) "
            f"to input {slot} of {problem.ops[op].name!r} ({chosen[op].name}): placement "
            f"{chosen[edge.source].outputs[edge.output]} to {chosen[op].inputs[slot]}"
            for edge in problem.edges
            for op, slot in edge.uses
            if edge.seconds(chosen[edge.source].outputs[edge.output], chosen[op].inputs[slot]) == IMPOSSIBLE
        ]
        return (
            "every choice of strategies needs a conversion that does not exist; the fewest are "
            + "; ".join(blocked)
            + ". Offer one of these conversions, or further strategies for these ops"
        )
    assert problem.memory_limit is not None, "every conversion can be had and memory is not limited"
    smallest = solve(
        replace(
            problem,
            ops=tuple(_with_costs(op, [choice.memory for choice in op.choices]) for op in problem.ops),
            edges=tuple(replace(edge, weight=0.0) for edge in problem.edges),
            memory_limit=None,
        ),
        time_limit_s,
    )
    chosen = [op.choices[c] for op, c in zip(problem.ops, smallest.choices, strict=True)]
    largest = max(range(len(chosen)), key=lambda o: chosen[o].memory)
    return (
        f"the strategies that need least memory hold {smallest.objective:.0f} bytes per device, "
        f"{smallest.objective - problem.memory_limit:.0f} bytes over the limit of {problem.memory_limit:.0f}; the "
        f"largest part is {problem.ops[largest].name!r} ({chosen[largest].name}), {chosen[largest].memory:.0f} bytes. "
        f"A limit of {math.ceil(smallest.objective)} bytes would do, or more devices per stage, or more stages"
    )


def _with_costs(op: Op, costs: Sequence[float]) -> Op:
    return Op(op.name, tuple(replace(choice, cost=cost) for choice, cost in zip(op.choices, costs, strict=True)))


def _with_impossible_counted(problem: TensorProblem, edge: Edge) -> Edge:
    produced = {choice.outputs[edge.output] for choice in problem.ops[edge.source].choices}
    wanted = {choice.inputs[slot] for op, slot in edge.uses for choice in problem.ops[op].choices}
    counted = {(p, t): float(edge.seconds(p, t) == IMPOSSIBLE) for p in produced for t in wanted}
    return replace(edge, cost=counted, weight=1.0)
