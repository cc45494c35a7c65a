r"""One strategy per op on the tensor axes: a flow between produced and wanted placements, relaxed first, then integer.

With o an op, c one of its choices, e an edge, u one of its uses, p a placement that the source of e yields and t one
that a use of it wants:

    minimise  sum_{o,c} cost[o,c] x[o,c]  +  sum_{e,p,t} weight[e] cost[e,p,t] z[e,p,t]

    x[o,c] in {0, 1}:  op o runs by its choice c;                     sum_c x[o,c] = 1                   _add_choices
    y[e,u,p,t] >= 0:   use u of e reads as t what was produced as p;
                       sum_t y[e,u,p,t] = sum_{c of source yields p} x[source,c]
                       sum_p y[e,u,p,t] = sum_{c of u wants t} x[u,c]                                       _add_flow
    z[e,p,t] >= 0:     the value of e is converted from p to t, once for all its uses;
                       z[e,p,t] >= y[e,u,p,t]      (z is y where e has one use)                            _add_shared
    memory:            sum_{o,c} memory[o,c] x[o,c] <= memory_limit                                        _add_memory

An impossible conversion has no y. The flow is what makes the relaxation tight: it is exact where the graph is a tree,
and on the graphs of models it mostly comes out integral. So GLOP solves the relaxation; where that is fractional, its
rounding improved one op at a time either meets its bound, or bounds the search: variables whose reduced cost exceeds
the distance between the two are fixed at 0, and the rest goes to the integer solver.

Seconds are scaled by a known assignment's, so that tolerances are relative to the answer: objective and bound count as
equal when they differ by less than TOLERANCE of the objective.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from autopart.runtime.errors import InfeasibleError, PlanError
from autopart.solver.linear import LinearModel, Relaxation
from autopart.solver.tensor_presolve import Live, live_choices
from autopart.solver.tensor_problem import IMPOSSIBLE, Edge, Op, TensorProblem, TensorSolution, relative_gap

TOLERANCE = 1e-7
_SCALE = 1e4
_INTEGRAL = 1e-6


def solve(problem: TensorProblem, time_limit_s: float = 60.0) -> TensorSolution:
    """The strategies that take the fewest seconds within the memory limit, or the best found in ``time_limit_s``.

    Raises InfeasibleError, naming what binds, when there are none; PlanError when none were found in time.
    """
    start = time.perf_counter()
    live = live_choices(problem)
    if live is None:
        raise _infeasible(problem, time_limit_s)
    best = _Incumbent(problem, live)
    best.offer([choices[0] for choices in live])
    best.offer(
        [min(choices, key=lambda c: op.choices[c].memory) for op, choices in zip(problem.ops, live, strict=True)]
    )
    bound, method = _trivial_bound(problem, live), "presolve"
    if not best.meets(bound):
        flow = _Flow(problem, live, best.objective)
        try:
            relaxed = flow.model.relax(time_limit_s)
        except TimeoutError:
            relaxed = None
        else:
            if relaxed is None and best.choices is None:
                raise _infeasible(problem, time_limit_s)
        if relaxed is not None:
            bound = max(bound, relaxed.objective * flow.unit)
            method = "lp" if flow.is_integral(relaxed.values) else "lp rounded"
            best.offer(flow.rounded(relaxed.values))
        if not best.meets(bound):
            left = max(0.1, time_limit_s - (time.perf_counter() - start))
            proved = flow.improve(best, relaxed, left)
            if proved == math.inf and best.choices is None:
                raise _infeasible(problem, time_limit_s)
            bound, method = max(bound, min(proved, best.objective)), "mip"
    if best.choices is None:
        raise PlanError(f"no assignment of strategies was found in {time_limit_s:g} s; raise the time limit")
    bound = best.objective if best.meets(bound) else bound
    return TensorSolution(
        choices=tuple(best.choices),
        objective=best.objective,
        bound=bound,
        gap=relative_gap(best.objective, bound),
        seconds=time.perf_counter() - start,
        method=method,
        conversions=problem.conversions(best.choices),
    )


class _Incumbent:
    """The best assignment so far. Every offer is first made to fit and then improved, one op at a time."""

    def __init__(self, problem: TensorProblem, live: Live) -> None:
        self.choices: list[int] | None = None
        self.objective = math.inf
        self._problem = problem
        self._live = live
        self._touching: list[list[Edge]] = [[] for _ in problem.ops]
        for edge in problem.edges:
            for op in {edge.source, *(op for op, _ in edge.uses)}:
                self._touching[op].append(edge)

    def meets(self, bound: float) -> bool:
        return self.choices is not None and self.objective - bound <= TOLERANCE * self.objective

    def offer(self, choices: Iterable[int]) -> None:
        """Keeps ``choices``, improved, if they are possible, fit and take fewer seconds than those kept so far."""
        improved = list(choices)
        self._shrink(improved)
        self._descend(improved)
        objective = self._problem.objective(improved)
        if objective < self.objective and self._problem.fits(improved):
            self.choices, self.objective = improved, objective

    def _shrink(self, choices: list[int]) -> None:
        """Until it fits, changes the op that frees memory at the fewest seconds per byte."""
        ops = self._problem.ops
        while not self._problem.fits(choices):
            moves: list[tuple[float, int, int]] = []
            over = self._problem.memory(choices) - (self._problem.memory_limit or 0.0)
            for op, candidates in enumerate(self._live):
                before = choices[op]
                smaller = [c for c in candidates if ops[op].choices[c].memory < ops[op].choices[before].memory]
                if not smaller:
                    continue
                seconds = self._seconds_around(op, choices)
                for choice in smaller:
                    choices[op] = choice
                    freed = min(over, ops[op].choices[before].memory - ops[op].choices[choice].memory)
                    rise = self._seconds_around(op, choices) - seconds
                    moves.append((IMPOSSIBLE if math.isnan(rise) else rise / freed, op, choice))
                choices[op] = before
            if not moves:
                return
            _, op, choice = min(moves)
            choices[op] = choice

    def _descend(self, choices: list[int]) -> None:
        limit = self._problem.memory_limit
        held = self._problem.memory(choices)
        moved = True
        while moved:
            moved = False
            for op, candidates in enumerate(self._live):
                if len(candidates) == 1:
                    continue
                options = self._problem.ops[op].choices
                before = choices[op]
                kept, kept_seconds = before, self._seconds_around(op, choices)
                others = held - options[before].memory
                for candidate in candidates:
                    if limit is not None and others + options[candidate].memory > max(limit, held):
                        continue
                    choices[op] = candidate
                    seconds = self._seconds_around(op, choices)
                    if seconds < kept_seconds * (1 - 1e-12):
                        kept, kept_seconds = candidate, seconds
                choices[op] = kept
                held = others + options[kept].memory
                moved |= kept != before

    def _seconds_around(self, op: int, choices: Sequence[int]) -> float:
        ops = self._problem.ops
        seconds = ops[op].choices[choices[op]].cost
        for edge in self._touching[op]:
            produced = ops[edge.source].choices[choices[edge.source]].outputs[edge.output]
            for wanted in {ops[user].choices[choices[user]].inputs[slot] for user, slot in edge.uses}:
                seconds += edge.seconds(produced, wanted)
        return seconds


class _Flow:
    """The model of this file's docstring over the live choices; its costs are seconds / ``unit``."""

    def __init__(self, problem: TensorProblem, live: Live, seconds: float) -> None:
        self.problem = problem
        self.live = live
        self.unit = (seconds if 0 < seconds < math.inf else _largest_seconds(problem)) / _SCALE
        self.model = LinearModel()
        self.x: list[dict[int, int]] = []
        self._add_choices()
        for edge in problem.edges:
            self._add_edge(edge)
        if problem.memory_limit is not None:
            self._add_memory(problem.memory_limit)

    def rounded(self, values: Sequence[float]) -> list[int]:
        """Per op the choice of the largest value."""
        return [max(row, key=lambda c, row=row: values[row[c]]) for row in self.x]  # type: ignore[misc]

    def is_integral(self, values: Sequence[float]) -> bool:
        return all(min(values[v], 1 - values[v]) < _INTEGRAL for row in self.x for v in row.values())

    def improve(self, best: _Incumbent, relaxed: Relaxation | None, time_limit_s: float) -> float:
        """Offers the integer optimum to ``best``; returns a bound in seconds, infinite when nothing better exists."""
        if best.choices is not None:
            if relaxed is not None:
                self._fix_by_reduced_cost(relaxed, best.objective)
            self.model.hint({row[c]: float(c == best.choices[o]) for o, row in enumerate(self.x) for c in row})
        until = time.perf_counter() + time_limit_s
        while True:
            answer = self.model.solve(max(0.1, until - time.perf_counter()))
            if answer.values is None:
                return answer.bound * self.unit
            found = self.rounded(answer.values)
            best.offer(found)
            if self.problem.fits(found) or time.perf_counter() > until:
                return answer.bound * self.unit
            self._exclude(found)

    def _add_choices(self) -> None:
        """sum_c x[o,c] = 1."""
        for op, choices in zip(self.problem.ops, self.live, strict=True):
            row = {c: self.model.add_variable(op.choices[c].cost / self.unit, integer=True) for c in choices}
            self.model.add_row(list(row.values()), [1.0] * len(row), lower=1.0, upper=1.0)
            self.x.append(row)

    def _add_edge(self, edge: Edge) -> None:
        yields = self._by_placement(edge.source, edge.output, outputs=True)
        flows: dict[tuple[int, int], list[int]] = defaultdict(list)
        single = len(edge.uses) == 1
        for use in edge.uses:
            for pair, y in self._add_flow(edge, yields, use, priced=single).items():
                flows[pair].append(y)
        if not single:
            self._add_shared(edge, flows)

    def _add_flow(
        self, edge: Edge, yields: dict[int, list[int]], use: tuple[int, int], *, priced: bool
    ) -> dict[tuple[int, int], int]:
        """sum_t y[e,u,p,t] = sum of x that yield p, and sum_p y[e,u,p,t] = sum of x that want t."""
        wants = self._by_placement(*use, outputs=False)
        y: dict[tuple[int, int], int] = {}
        for p in yields:
            for t in wants:
                seconds = edge.seconds(p, t)
                if seconds < IMPOSSIBLE:
                    y[p, t] = self.model.add_variable(seconds / self.unit if priced else 0.0, integer=True)
        for p, sources in yields.items():
            self._add_balance([y[p, t] for t in wants if (p, t) in y], sources)
        for t, users in wants.items():
            self._add_balance([y[p, t] for p in yields if (p, t) in y], users)
        return y

    def _add_shared(self, edge: Edge, flows: dict[tuple[int, int], list[int]]) -> None:
        """z[e,p,t] >= y[e,u,p,t] for each use u."""
        for (p, t), uses in flows.items():
            seconds = edge.seconds(p, t)
            if seconds == 0:
                continue
            z = self.model.add_variable(seconds / self.unit, integer=True)
            for y in uses:
                self.model.add_row([z, y], [1.0, -1.0], lower=0.0)

    def _add_memory(self, limit: float) -> None:
        """sum memory[o,c] x[o,c] <= memory_limit, both as shares of the limit."""
        held = [(x, self.problem.ops[o].choices[c].memory) for o, row in enumerate(self.x) for c, x in row.items()]
        unit = max(abs(limit), 1.0) / _SCALE
        self.model.add_row([x for x, _ in held], [size / unit for _, size in held], upper=limit / unit)

    def _exclude(self, choices: Sequence[int]) -> None:
        """Not these choices again: over the memory limit by less than the solver's tolerance."""
        self.model.add_row(
            [row[c] for row, c in zip(self.x, choices, strict=True)], [1.0] * len(choices), upper=len(choices) - 1.0
        )

    def _add_balance(self, flow: Sequence[int], choices: Sequence[int]) -> None:
        self.model.add_row([*flow, *choices], [1.0] * len(flow) + [-1.0] * len(choices), lower=0.0, upper=0.0)

    def _by_placement(self, op: int, slot: int, *, outputs: bool) -> dict[int, list[int]]:
        groups: dict[int, list[int]] = defaultdict(list)
        for c, x in self.x[op].items():
            choice = self.problem.ops[op].choices[c]
            groups[(choice.outputs if outputs else choice.inputs)[slot]].append(x)
        return groups

    def _fix_by_reduced_cost(self, relaxed: Relaxation, objective: float) -> None:
        """x[o,c] = 0 where the relaxation with x[o,c] = 1 is already no better than the known assignment."""
        room = objective / self.unit - relaxed.objective
        for row in self.x:
            for x in row.values():
                if relaxed.values[x] < _INTEGRAL and relaxed.reduced_costs[x] > room * (1 + 1e-6) + 1e-6:
                    self.model.fix(x, 0.0)


def _trivial_bound(problem: TensorProblem, live: Live) -> float:
    return math.fsum(min(op.choices[c].cost for c in choices) for op, choices in zip(problem.ops, live, strict=True))


def _largest_seconds(problem: TensorProblem) -> float:
    costs = [choice.cost for op in problem.ops for choice in op.choices]
    costs += [edge.weight * s for edge in problem.edges for s in edge.cost.values() if s < IMPOSSIBLE]
    return max(costs, default=0.0) or 1.0


def _infeasible(problem: TensorProblem, time_limit_s: float) -> InfeasibleError:
    """Why there is no assignment: the conversions that nothing can avoid, or else by how many bytes it does not fit."""
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
        return InfeasibleError(
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
    return InfeasibleError(
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
