"""The fastest order of forwards and backwards for given times and room, proven: a yardstick for the named schedules.

Stages s, microbatches k = 0 .. m - 1, all alike. F[s,k] and B[s,k] are the starts of the forward and the backward, f_s
and b_s their seconds, r_s those of the sum at the end, H_s the microbatches that stage s has room for. For each edge
(s, t), A[s,t,k] and G[s,t,k] are the starts of the transfers of activations and of their gradients, which take a_st and
g_st. On whole numbers of a unit of time:

    minimise  C
    A[s,t,k] ≥ F[s,k] + f_s,  F[t,k] ≥ A[s,t,k] + a_st                        _add_transfers
    G[s,t,k] ≥ B[t,k] + b_t,  B[s,k] ≥ G[s,t,k] + g_st                        _add_transfers
    A[s,t,k+1] ≥ A[s,t,k] + a_st,  G[s,t,k+1] ≥ G[s,t,k] + g_st               _add_transfers   one at a time on a link
    B[s,k] ≥ F[s,k] + f_s                                                     _add_stage
    F[s,k+1] ≥ F[s,k] + f_s,  B[s,k+1] ≥ B[s,k] + b_s                         _add_stage
    F[s,k+H_s] ≥ B[s,k] + b_s                                                 _add_stage       room
    no overlap of F[s,j] and B[s,k] for any j, k                              _add_stage
    C ≥ B[s,m-1] + b_s + r_s                                                  _add_stage

That microbatches pass every stage in one order loses nothing, as they are alike: in any feasible times, give the k-th
forward on each stage to microbatch k, and the k-th backward and the k-th transfer of each link likewise. If every start
on one stage lies at least d after its partner's on another, so does the k-th smallest after the k-th smallest; so all
lines above still hold. What remains to be chosen is how forwards and backwards interleave on each stage.

The simulator (autopart.simulate) starts everything as early as the order allows, so it never takes longer than C; as
no order takes less than the optimum, it takes exactly that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from ortools.sat.python import cp_model

from autopart.runtime.errors import InfeasibleError, PlanError
from autopart.runtime.schedule import Action, Schedule, Step, Work, with_exchanges
from autopart.simulate import StageTimes, simulate

Edge = tuple[int, int]
_SEED = 0
# Times that have no common unit are rounded to this part of the longest step.
_RESOLUTION = 10**6


@dataclass(frozen=True, slots=True)
class Found:
    """The best order found. makespan_s: simulated. bound_s: no order takes less, up to rounding to ``unit_s`` seconds.

    optimal: proven within the time limit.
    """

    schedule: Schedule
    makespan_s: float
    bound_s: float
    unit_s: float
    optimal: bool


def room(times: StageTimes, capacity_bytes: float, microbatches: int) -> int:
    """Microbatches that a stage has room for in ``capacity_bytes``, at most all. Raises InfeasibleError below one."""
    left = capacity_bytes - times.fixed_bytes - times.working_bytes
    held = microbatches if not times.saved_bytes else min(microbatches, math.floor(left / times.saved_bytes))
    if left < 0 or held < 1:
        raise InfeasibleError(f"a stage that holds one microbatch takes more than its {capacity_bytes:g} bytes")
    return held


def find_schedule(
    times: Sequence[StageTimes],
    microbatches: int,
    transfers: Mapping[Edge, tuple[float, float | None]],
    held: Sequence[int],
    time_limit_s: float = 30.0,
) -> Found:
    """The schedule with the smallest makespan whose stages hold at most ``held`` microbatches each.

    times: seconds of each stage (weight_s is not used: backwards are whole). transfers: for each edge (source, target),
    source < target, the seconds of a microbatch's activations and of their gradients, None where none go back. For
    small cases: the number of orders grows exponentially with stages and microbatches.

    Raises PlanError when the arguments contradict, InfeasibleError when nothing was found in time.
    """
    stages = len(times)
    if not stages or len(held) != stages or microbatches < 1 or min(held) < 1:
        raise PlanError(
            f"{stages} stages need {stages} numbers of at least 1 in held, and a microbatch; got {list(held)}"
        )
    if any(not 0 <= source < target < stages for source, target in transfers):
        raise PlanError(f"transfers go from a stage to a later one of {stages}: {sorted(transfers)}")
    model = _Model.build(times, microbatches, transfers, held)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit_s
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = _SEED
    status = solver.solve(model.cp)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise InfeasibleError(f"no order of {stages} x {microbatches} microbatches found in {time_limit_s:g} s")
    order = [model.order(solver, stage) for stage in range(stages)]
    back = [edge for edge, (_, gradient) in transfers.items() if gradient is not None]
    schedule = with_exchanges(order, sorted(transfers), sorted(back), reduce=True)

    def transfer(action: Action) -> float:
        assert action.peer is not None
        if action.work is Work.SEND_ACTIVATION:
            return transfers[action.stage, action.peer][0]
        return transfers[action.peer, action.stage][1] or 0.0

    makespan = simulate(schedule, times, transfer).makespan_s
    bound = min(makespan, solver.best_objective_bound * model.unit)
    return Found(schedule, makespan, bound, model.unit, status == cp_model.OPTIMAL)


@dataclass(slots=True)
class _Model:
    """The formulas of the module. Per stage and work ("F", "B"), starts: of all microbatches; lasts: units of time."""

    cp: cp_model.CpModel
    starts: list[dict[str, list[cp_model.IntVar]]]
    lasts: list[dict[str, int]]
    makespan: cp_model.IntVar
    horizon: int
    unit: float

    @staticmethod
    def build(
        times: Sequence[StageTimes],
        microbatches: int,
        transfers: Mapping[Edge, tuple[float, float | None]],
        held: Sequence[int],
    ) -> _Model:
        unit = _unit(times, microbatches, transfers)
        # One after another: every computation, transfer and sum of the step.
        serial = sum(_ticks(own.forward_s, unit) + _ticks(own.backward_s, unit) for own in times)
        serial += sum(_ticks(there, unit) + _ticks(back or 0.0, unit) for there, back in transfers.values())
        horizon = microbatches * serial + max(_ticks(own.reduce_s, unit) for own in times)
        cp = cp_model.CpModel()
        starts = [
            {work: [cp.new_int_var(0, horizon, f"{work}{s}.{k}") for k in range(microbatches)] for work in "FB"}
            for s in range(len(times))
        ]
        lasts = [{"F": _ticks(own.forward_s, unit), "B": _ticks(own.backward_s, unit)} for own in times]
        model = _Model(cp, starts, lasts, cp.new_int_var(0, horizon, "makespan"), horizon, unit)
        for stage, (own, room_for) in enumerate(zip(times, held, strict=True)):
            model._add_stage(stage, own, room_for)
        for (source, target), (there, back) in sorted(transfers.items()):
            model._add_transfers(starts[source]["F"], starts[target]["F"], times[source].forward_s, there)
            if back is not None:
                model._add_transfers(starts[target]["B"], starts[source]["B"], times[target].backward_s, back)
        cp.minimize(model.makespan)
        return model

    def _add_stage(self, stage: int, times: StageTimes, room_for: int) -> None:
        forwards, backwards = self.starts[stage]["F"], self.starts[stage]["B"]
        f, b = self.lasts[stage]["F"], self.lasts[stage]["B"]
        for k, (forward, backward) in enumerate(zip(forwards, backwards, strict=True)):
            self.cp.add(backward >= forward + f)
            if k:
                self.cp.add(forward >= forwards[k - 1] + f)
                self.cp.add(backward >= backwards[k - 1] + b)
            if k >= room_for:
                self.cp.add(forward >= backwards[k - room_for] + b)
        self.cp.add_no_overlap(
            [self.cp.new_fixed_size_interval_var(start, f, "") for start in forwards]
            + [self.cp.new_fixed_size_interval_var(start, b, "") for start in backwards]
        )
        self.cp.add(self.makespan >= backwards[-1] + b + _ticks(times.reduce_s, self.unit))

    def _add_transfers(
        self, made: Sequence[cp_model.IntVar], used: Sequence[cp_model.IntVar], makes_s: float, takes_s: float
    ) -> None:
        makes, takes = _ticks(makes_s, self.unit), _ticks(takes_s, self.unit)
        before: cp_model.IntVar | None = None
        for maker, user in zip(made, used, strict=True):
            start = self.cp.new_int_var(0, self.horizon, "")
            self.cp.add(start >= maker + makes)
            self.cp.add(user >= start + takes)
            if before is not None:
                self.cp.add(start >= before + takes)
            before = start

    def order(self, solver: cp_model.CpSolver, stage: int) -> list[Step]:
        """The stage's computations by their starts and, of those that take no time, by their ends and microbatches."""
        items = [
            (solver.value(start), self.lasts[stage][work], k, work)
            for work, starts in self.starts[stage].items()
            for k, start in enumerate(starts)
        ]
        return [(work, stage, k) for _, _, k, work in sorted(items, key=lambda item: (*item[:3], item[3] == "B"))]


def _ticks(seconds: float, unit: float) -> int:
    return round(seconds / unit)


def _unit(
    times: Sequence[StageTimes], microbatches: int, transfers: Mapping[Edge, tuple[float, float | None]]
) -> float:
    """Seconds of the model's unit: what all times are multiples of, unless that makes the numbers too large."""
    seconds = [value for t in times for value in (t.forward_s, t.backward_s, t.reduce_s)]
    seconds += [value or 0.0 for pair in transfers.values() for value in pair]
    longest = microbatches * math.fsum(seconds)
    if not longest:
        return 1.0
    parts = [Fraction(value).limit_denominator(_RESOLUTION) for value in seconds if value]
    denominator = math.lcm(*(part.denominator for part in parts))
    common = math.gcd(*(int(part * denominator) for part in parts)) / denominator
    exact = all(math.isclose(value / common, round(value / common), rel_tol=1e-9) for value in seconds)
    return common if exact and longest / common <= _RESOLUTION else longest / _RESOLUTION
