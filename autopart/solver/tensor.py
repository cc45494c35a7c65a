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
thousands of pairs (p, t) per use, of which few matter, so the relaxation is solved in parts, with prices that are
moved within a box (boxstep; Marsten, Hogan, Blankenship, Operations Research 23(3), 1975):

1. Choices that are dominated or unreachable go (:mod:`autopart.solver.tensor_presolve`), local search finds a first
   assignment (:mod:`autopart.solver.tensor_descent`), and a first bound is climbed to without a linear solver
   (:mod:`autopart.solver.tensor_ascent`): choices whose excess over it is more than the distance between the two go.
   Where nothing found that way fits in memory, bytes are priced ever higher until something does (Everett,
   Operations Research 11(3), 1963), and the price that gave the highest bound stays           _Search._price_bytes
2. GLOP solves the model over what the bound's prices have least against, which contains the best assignment
   known; assignments outside take longer than the part reaches                                       _Search._approach
3. Again with prices that may leave the known ones by so many seconds only, as pairs outside allow little more. They
   are completed to all choices (:mod:`autopart.solver.tensor_bound`) and climb on, which gives a higher bound for the
   whole problem, and 2 repeats; where the rise is lost to pairs outside, the box is halved, or the part grows.
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

from autopart.runtime.errors import InfeasibleError
from autopart.solver import time_limits
from autopart.solver.search_space import NotBetter
from autopart.solver.tensor_arrays import ProblemArrays, compiled
from autopart.solver.tensor_ascent import Ascent
from autopart.solver.tensor_bound import Bound, Prices, completed, free
from autopart.solver.tensor_descent import TOLERANCE, Incumbent
from autopart.solver.tensor_flow import Flow, Part, largest_seconds, whole
from autopart.solver.tensor_presolve import presolved
from autopart.solver.tensor_problem import IMPOSSIBLE, Edge, Op, TensorProblem, TensorSolution, relative_gap
from autopart.solver.time_limits import OutOfTime

__all__ = ["TOLERANCE", "solve"]

# Below this number of pairs the whole relaxation is solved at once, and the integer solver ends in seconds.
_FEW_PAIRS = 20_000
# Below this number of pairs the integer solver is given all at once.
_AT_ONCE = 2_000
# A part has at first so many times the pairs that nothing speaks against, and where it brings little more by this.
_ROOMY, _GROWTH = 1.8, 1.5
# How far prices may move at first, of what a part reaches; half as far where less than a share of the rise is kept.
_WIDTH, _KEPT, _LITTLE = 2.0, 0.5, 0.1
# The relaxation is solved where a part's is above the bound by no more than this share of the gap that is asked for.
_RELAXED = 0.1
# Shares of the distance between the best known and the bound, for which the integer solver is given what is within.
_ROOMS = (0.0005, 0.0025, 0.0125, 0.0625, 0.25, 1.0)
# Passes of message passing before the first relaxation and after each, at most.
_PASSES = 100
# Prices of bytes that are tried, in the bound's seconds over the limit's bytes: the first, the next, the last.
_CHEAP, _DEARER, _DEAREST = 2.0**-4, 4.0, 2.0**10
_NEARER = 2.0, 2.0**0.5, 2.0**0.25
# Leaving choices out is worth starting over while no more than this share of them stays.
_WORTHWHILE = 0.8


def solve(
    problem: TensorProblem, time_limit_s: float = 60.0, gap: float = 0.0, below: float = math.inf
) -> TensorSolution:
    """The strategies that take the fewest seconds within the memory limit, or the best found in ``time_limit_s``.

    gap: a share of the objective by which it may exceed its bound; 0 for the optimum. below: of interest are only
    strategies that take fewer seconds; NotBetter is raised where surely none do. Raises InfeasibleError, naming
    what binds, when there are none; OutOfTime when none were found in time.
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
        raise OutOfTime(f"no assignment of strategies was found in {time_limit_s:g} s; raise the time limit")
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
    _byte_s: float = 0.0  # what a byte is priced at before there is a relaxation

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
    def _wanted(self) -> float:
        """The bound that the best assignment meets."""
        return self.best.objective * (1 - self.gap)

    @property
    def _unit(self) -> float:
        """Seconds that costs are scaled by."""
        known = self.best.objective
        return known if 0 < known < math.inf else largest_seconds(self.arrays)

    @property
    def _left(self) -> float:
        return max(0.1, self.until - time.perf_counter())

    def _climb(self) -> bool:
        """Raises the bound by message passing and leaves out what it excludes; False where that is little."""
        arrays, best = self.arrays, self.best
        self._ascend(free(arrays, self._byte_s))
        assert self._proof is not None
        if best.choices is None and arrays.limit:
            self._price_bytes(self._proof.seconds / arrays.limit)
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

    def _price_bytes(self, unit: float) -> None:
        """Raises the price of a byte until an assignment fits and the bound falls, then goes to where it is highest.

        unit: seconds of a byte.
        """
        bounds: dict[float, float] = {}

        def tried(byte_s: float) -> bool:
            """Whether to go on."""
            prices = free(self.arrays, byte_s)
            self._ascend(prices)
            bounds[byte_s] = prices.bound(self.arrays).seconds
            self._byte_s = max(bounds, key=bounds.__getitem__)
            return not self._surpassed and time.perf_counter() < self.until

        byte_s = _CHEAP * unit
        while tried(byte_s) and byte_s < _DEAREST * unit:
            if self.best.choices is not None and byte_s != self._byte_s:
                break
            byte_s *= _DEARER
        for step in _NEARER:
            highest = self._byte_s
            if not (tried(highest / step) and tried(highest * step)):
                break

    def _ascend(self, prices: Prices) -> None:
        ascent = Ascent(self.arrays, prices)
        seconds = ascent.run(_PASSES, self._wanted)
        for choices in ascent.assignments():
            self.best.offer(self.arrays.original(choices))
        self._prove(seconds, prices.bound(self.arrays))

    def _prove(self, seconds: float, proof: Bound) -> None:
        if self._proof is None or proof.seconds > self._proof.seconds:
            self._proof = proof
        self.bound = max(self.bound, seconds)

    def _relax(self) -> str:
        """The relaxation, of the whole at once where that is little."""
        if self.arrays.pairs > _FEW_PAIRS and self.best.choices is not None:
            return self._approach()
        best = self.best
        flow = Flow(self.arrays, whole(self.arrays), self._unit)
        try:
            relaxed = flow.model.relax(self._left)
        except TimeoutError:
            return "lp"
        if relaxed is None:
            self.bound = math.inf if best.choices is None else self.bound
            return "lp"
        best.offer(flow.rounded(relaxed.values))
        proof = completed(self.arrays, flow.duals(relaxed)).bound(self.arrays)
        self._prove(max(proof.seconds, relaxed.objective * flow.unit), proof)
        return "lp" if flow.is_integral(relaxed.values) else "lp rounded"

    def _approach(self) -> str:
        """The relaxation over parts of what may be in something better, with prices that go from box to box.

        A part is what the proof has least against, so that all assignments outside take longer than it reaches.
        """
        arrays, best = self.arrays, self.best
        assert self._proof is not None
        most, width, least, gained = int(_ROOMY * self._within(self._proof, 0.0).size), _WIDTH, math.inf, math.inf
        while True:
            proof, known = self._proof, self._proof.seconds
            room = self._wanted - known
            reach = min(room, _reach(proof, most))
            flow = Flow(arrays, self._within(proof, reach), self._unit)
            try:
                relaxed = flow.model.relax(self._left)
                assert relaxed is not None, "the part has an assignment"
                seconds, integral = relaxed.objective * flow.unit, flow.is_integral(relaxed.values)
                best.offer(flow.rounded(relaxed.values))
                self.bound, least = max(self.bound, min(seconds, known + reach)), min(least, seconds)
                # the whole's relaxation lies between the bound and the part's
                near = least - self.bound <= max(TOLERANCE, _RELAXED * self.gap) * least
                solved = reach == room or near
                if solved:  # the nearer the proof, the less is left to integers
                    left = least - known
                    solved = gained < _LITTLE * left or left <= _RELAXED * (best.objective - known)
                late = time.perf_counter() >= self.until
                if solved or late or best.meets(self.bound) or self._surpassed:
                    return "lp" if integral else "lp rounded"
                flow.keep_near(proof.prices.yielded, proof.prices.wanted, width * reach)
                relaxed = flow.model.relax(self._left)
            except TimeoutError:
                return "lp"
            assert relaxed is not None, "slack makes it feasible"
            self._ascend(completed(arrays, flow.duals(relaxed)))
            promised, gained = relaxed.objective * flow.unit - known, self._proof.seconds - known
            if gained < _KEPT * promised:
                width /= 2
            if gained <= _LITTLE * promised:
                most = int(_GROWTH * most)

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
        flow = Flow(arrays, part, self._unit)
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


def _reach(proof: Bound, pairs: int) -> float:
    """Seconds that the proof has against about so many pairs at most; infinite where there are fewer."""
    slack = np.concatenate([use.ravel() for uses in proof.slack for use in uses])
    return float(np.partition(slack, pairs)[pairs]) if pairs < len(slack) else math.inf


def _join(arrays: ProblemArrays, part: Part, choices: Sequence[int]) -> None:
    """Adds an assignment, in the problem's numbers, to a part."""
    chosen = [live.index(c) for live, c in zip(arrays.live, choices, strict=True)]
    for mask, choice in zip(part.choices, chosen, strict=True):
        mask[choice] = True
    for edge, pairs in zip(arrays.edges, part.pairs, strict=True):
        for use, mask in zip(edge.uses, pairs, strict=True):
            mask[edge.produced[chosen[edge.source]], use.wanted[chosen[use.op]]] = True


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
