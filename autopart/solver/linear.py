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

_Request = linear_solver_pb2.MPModelRequest


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
        self._request = _Request()
        self._proto = self._request.model

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

    def extend_row(self, row: int, variable: int, coefficient: float) -> None:
        """Adds coefficient * variable to a row."""
        self._proto.constraint[row].var_index.append(variable)
        self._proto.constraint[row].coefficient.append(coefficient)

    def fix(self, variable: int, value: float) -> None:
        self._proto.variable[variable].lower_bound = value
        self._proto.variable[variable].upper_bound = value

    def hint(self, values: dict[int, float]) -> None:
        """Where the integer solve starts from."""
        self._proto.solution_hint.Clear()
        self._proto.solution_hint.var_index.extend(values.keys())
        self._proto.solution_hint.var_value.extend(values.values())

    def relax(
        self, time_limit_s: float = math.inf, *, primal: bool = False, preprocess: bool = True
    ) -> Relaxation | None:
        """Solves with every variable continuous. None: infeasible. Raises TimeoutError when not solved in time.

        primal: by the primal simplex, which takes twice as long as the dual for strategies, and half as long for the
        stages of a pipeline. preprocess: which takes half of the time of a small model.
        """
        flags = {"use_dual_simplex": not primal, "use_preprocessing": preprocess}
        parameters = " ".join(f"{name}: {str(flag).lower()}" for name, flag in flags.items())
        found = self._solved(_Request.GLOP_LINEAR_PROGRAMMING, time_limit_s, parameters)
        if found.status == linear_solver_pb2.MPSOLVER_INFEASIBLE:
            return None
        if found.status != linear_solver_pb2.MPSOLVER_OPTIMAL:
            stopped = linear_solver_pb2.MPSolverResponseStatus.Name(found.status)
            raise TimeoutError(f"GLOP stopped: {stopped} on {self.variables} variables, {self.rows} rows")
        return Relaxation(found.objective_value, list(found.variable_value), list(found.dual_value))

    def solve(self, time_limit_s: float = math.inf, gap: float = 0.0) -> IntegerAnswer:
        """Solves with the integer variables as integers, to a relative gap of 1e-9 or ``gap``."""
        limits = f"limits/gap = {max(gap, 1e-9):g}\nnumerics/feastol = 1e-9\n"
        found = self._solved(_Request.SCIP_MIXED_INTEGER_PROGRAMMING, time_limit_s, limits)
        if found.status == linear_solver_pb2.MPSOLVER_INFEASIBLE:
            return IntegerAnswer(None, math.inf, infeasible=True)
        if found.status not in (linear_solver_pb2.MPSOLVER_OPTIMAL, linear_solver_pb2.MPSOLVER_FEASIBLE):
            return IntegerAnswer(None, -math.inf, infeasible=False)
        return IntegerAnswer(list(found.variable_value), found.best_objective_bound, infeasible=False)

    def _solved(self, solver: int, time_limit_s: float, parameters: str) -> linear_solver_pb2.MPSolutionResponse:
        """The answer as a protocol buffer too: OR-Tools' objects for variables and rows took longer than solving."""
        self._request.solver_type, self._request.solver_specific_parameters = solver, parameters
        self._request.ClearField("solver_time_limit_seconds")
        if math.isfinite(time_limit_s):
            self._request.solver_time_limit_seconds = max(time_limit_s, 1e-3)
        found = linear_solver_pb2.MPSolutionResponse()
        pywraplp.Solver.SolveWithProto(self._request, found)
        return found
