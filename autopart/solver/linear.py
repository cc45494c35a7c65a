"""A small linear model, given to OR-Tools twice: relaxed (GLOP) and with its integer variables (SCIP).

The model is built as OR-Tools' protocol buffer, without its expression layers, and both solves read the same one.
Everything is minimised; variables lie between 0 and 1 unless said otherwise. SCIP rather than CP-SAT, as what is solved
here owes its tightness to the relaxation: with 100 ops SCIP proves in a second what CP-SAT leaves a third open.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ortools.linear_solver import linear_solver_pb2, pywraplp


@dataclass(frozen=True, slots=True)
class Relaxation:
    """An optimum of the relaxed model. duals: what the objective rises by per unit of each row's bound."""

    objective: float
    values: list[float]
    duals: list[float]


@dataclass(frozen=True, slots=True)
class IntegerAnswer:
    """values: of the best solution found, or None. bound: no solution is below. infeasible: proved to have none."""

    values: list[float] | None
    bound: float
    infeasible: bool


class LinearModel:
    """Variables and rows; both are named by the integers that the adding methods return."""

    def __init__(self) -> None:
        self._proto = linear_solver_pb2.MPModelProto()

    @property
    def variables(self) -> int:
        return len(self._proto.variable)

    @property
    def rows(self) -> int:
        return len(self._proto.constraint)

    def add_variable(self, cost: float = 0.0, *, upper: float = 1.0, integer: bool = False) -> int:
        self._proto.variable.add(lower_bound=0.0, upper_bound=upper, objective_coefficient=cost, is_integer=integer)
        return len(self._proto.variable) - 1

    def add_row(
        self,
        variables: Sequence[int],
        coefficients: Sequence[float],
        *,
        lower: float = -math.inf,
        upper: float = math.inf,
    ) -> int:
        """Adds lower <= sum of coefficient * variable <= upper."""
        self._proto.constraint.add(var_index=variables, coefficient=coefficients, lower_bound=lower, upper_bound=upper)
        return len(self._proto.constraint) - 1

    def fix(self, variable: int, value: float) -> None:
        self._proto.variable[variable].lower_bound = value
        self._proto.variable[variable].upper_bound = value

    def hint(self, values: dict[int, float]) -> None:
        """Where the integer solve starts from."""
        self._proto.solution_hint.Clear()
        self._proto.solution_hint.var_index.extend(values.keys())
        self._proto.solution_hint.var_value.extend(values.values())

    def relax(self, time_limit_s: float = math.inf) -> Relaxation | None:
        """Solves with every variable continuous. None: infeasible. Raises TimeoutError when not solved in time."""
        solver = self._load("GLOP", time_limit_s)
        solver.SetSolverSpecificParametersAsString("use_dual_simplex: true")  # half the time of the primal here
        status = solver.Solve()
        if status == pywraplp.Solver.INFEASIBLE:
            return None
        if status != pywraplp.Solver.OPTIMAL:
            raise TimeoutError(f"GLOP stopped with status {status} on {self.variables} variables, {self.rows} rows")
        return Relaxation(
            objective=solver.Objective().Value(),
            values=[variable.solution_value() for variable in solver.variables()],
            duals=[row.dual_value() for row in solver.constraints()],
        )

    def solve(self, time_limit_s: float = math.inf, gap: float = 0.0) -> IntegerAnswer:
        """Solves with the integer variables as integers, to a relative gap of 1e-9 or ``gap``."""
        solver = self._load("SCIP", time_limit_s)
        solver.SetSolverSpecificParametersAsString(f"limits/gap = {max(gap, 1e-9):g}\nnumerics/feastol = 1e-9\n")
        status = solver.Solve()
        if status == pywraplp.Solver.INFEASIBLE:
            return IntegerAnswer(None, math.inf, infeasible=True)
        if status not in (pywraplp.Solver.OPTIMAL, pywraplp.Solver.FEASIBLE):
            return IntegerAnswer(None, -math.inf, infeasible=False)
        values = [variable.solution_value() for variable in solver.variables()]
        return IntegerAnswer(values, solver.Objective().BestBound(), infeasible=False)

    def _load(self, backend: str, time_limit_s: float) -> pywraplp.Solver:
        solver = pywraplp.Solver.CreateSolver(backend)
        assert solver is not None, f"this build of OR-Tools has no {backend}"
        solver.LoadModelFromProto(self._proto)
        if math.isfinite(time_limit_s):
            solver.SetTimeLimit(max(1, math.ceil(time_limit_s * 1000)))
        return solver
