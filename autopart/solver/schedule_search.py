"""The fastest order of a step's computations for given times and room, proven: a yardstick for the named schedules.

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
    no overlap of the computations of the stages of one rank                  build
    C ≥ B[s,m-1] + b_s + Σ r over the stages of the rank of s                 _add_stage

Where the backward is split, b_s is the inputs' share and W[s,k] starts the weights', of w_s: W[s,k] ≥ B[s,k] + b_s, in
order, and W takes B's place in the lines of room and C. Between stages of one rank transfers take nothing. Where a rank
sends to another for several stages, for any two transfers i, j of different edges, made by the computations x_i, x_j

    x_i before x_j and A_j ≥ A_i + a_i, or x_j before x_i and A_i ≥ A_j + a_j     _add_channel     in the order made

That microbatches pass every stage in one order loses nothing, as they are alike: in any feasible times, give the k-th
forward on each stage to microbatch k, and the k-th backward and the k-th transfer of each link likewise. If every start
on one stage lies at least d after its partner's on another, so does the k-th smallest after the k-th smallest; so all
lines above still hold. What remains to be chosen is how forwards and backwards interleave on each stage.

The simulator (autopart.simulate) starts everything as early as the order allows, so it never takes longer than C; as
no order takes less than the optimum, it takes exactly that.
"""

from __future__ import annotations

import itertools
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
    places: Sequence[int] | None = None,
    splits: bool = False,
) -> Found:
    """The schedule with the smallest makespan whose stages hold at most ``held`` microbatches each.

    times: seconds of each stage. places: the rank of each stage; None: each has its own. splits: backwards are split,
    so that weight_s of them may come later, and a microbatch is held until then. transfers: for each edge (source,
    target), source < target, the seconds of a microbatch's activations and of their gradients, None where none go back.
    For small cases: the number of orders grows exponentially with stages and microbatches.

    Raises PlanError when the arguments contradict, InfeasibleError when nothing was found in time.
    """
    stages = len(times)
    if not stages or len(held) != stages or microbatches < 1 or min(held) < 1:
        raise PlanError(
            f"{stages} stages need {stages} numbers of at least 1 in held, and a microbatch; got {list(held)}"
        )
    if any(not 0 <= source < target < stages for source, target in transfers):
        raise PlanError(f"transfers go from a stage to a later one of {stages}: {sorted(transfers)}")
    places = tuple(range(stages)) if places is None else tuple(places)
    if len(places) != stages or set(places) != set(range(1 + max(places))):
        raise PlanError(f"places: one rank for each of {stages} stages, counted from 0; got {list(places)}")
    model = _Model.build(times, microbatches, transfers, held, places, splits)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit_s
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = _SEED
    status = solver.solve(model.cp)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise InfeasibleError(f"no order of {stages} x {microbatches} microbatches found in {time_limit_s:g} s")
    order = [model.order(solver, rank) for rank in range(1 + max(places))]
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


@dataclass(frozen=True, slots=True)
class _Stream:
    """The transfers of one edge in one direction: what makes them, their starts, and how long both take."""

    made: Sequence[cp_model.IntVar]
    makes: int
    starts: Sequence[cp_model.IntVar]
    takes: int


@dataclass(slots=True)
class _Model:
    """The formulas of the module.

    Per stage and work ("F", "B", "W"), starts: of all microbatches; lasts: units of time.
    """

    cp: cp_model.CpModel
    starts: list[dict[str, list[cp_model.IntVar]]]
    lasts: list[dict[str, int]]
    places: Sequence[int]
    makespan: cp_model.IntVar
    horizon: int
    unit: float

    @staticmethod
    def build(
        times: Sequence[StageTimes],
        microbatches: int,
        transfers: Mapping[Edge, tuple[float, float | None]],
        held: Sequence[int],
        places: Sequence[int],
        splits: bool,
    ) -> _Model:
        unit = _unit(times, microbatches, transfers, splits)
        works = {"F": Work.FORWARD, "B": Work.BACKWARD, **({"W": Work.WEIGHT} if splits else {})}
        lasts = [{name: _ticks(own.seconds(work, splits), unit) for name, work in works.items()} for own in times]
        # One after another: every computation, transfer and sum of the step.
        serial = sum(sum(own.values()) for own in lasts)
        serial += sum(_ticks(there, unit) + _ticks(back or 0.0, unit) for there, back in transfers.values())
        horizon = microbatches * serial + sum(_ticks(own.reduce_s, unit) for own in times)
        cp = cp_model.CpModel()
        starts = [
            {work: [cp.new_int_var(0, horizon, f"{work}{s}.{k}") for k in range(microbatches)] for work in works}
            for s in range(len(times))
        ]
        model = _Model(cp, starts, lasts, places, cp.new_int_var(0, horizon, "makespan"), horizon, unit)
        for stage, room_for in enumerate(held):
            sums = sum(_ticks(own.reduce_s, unit) for own, at in zip(times, places, strict=True) if at == places[stage])
            model._add_stage(stage, room_for, sums)
        for rank in set(places):
            cp.add_no_overlap(
                cp.new_fixed_size_interval_var(start, lasts[stage][work], "")
                for stage, at in enumerate(places)
                if at == rank
                for work in works
                for start in starts[stage][work]
            )
        channels: dict[Edge, list[_Stream]] = {}
        for (source, target), (there, back) in sorted(transfers.items()):
            channels.setdefault((places[source], places[target]), []).append(
                model._add_transfers("F", source, target, there)
            )
            if back is not None:
                channels.setdefault((places[target], places[source]), []).append(
                    model._add_transfers("B", target, source, back)
                )
        for (sender, receiver), streams in channels.items():
            if sender != receiver:
                model._add_channel(streams)
        cp.minimize(model.makespan)
        return model

    def _add_stage(self, stage: int, room_for: int, sums: int) -> None:
        starts, lasts = self.starts[stage], self.lasts[stage]
        works = list(starts)
        for earlier, later in itertools.pairwise(works):
            for first, second in zip(starts[earlier], starts[later], strict=True):
                self.cp.add(second >= first + lasts[earlier])
        for work in works:
            for first, second in itertools.pairwise(starts[work]):
                self.cp.add(second >= first + lasts[work])
        ends = [start + lasts[works[-1]] for start in starts[works[-1]]]
        for end, forward in zip(ends, starts["F"][room_for:], strict=False):
            self.cp.add(forward >= end)
        self.cp.add(self.makespan >= ends[-1] + sums)

    def _add_transfers(self, work: str, source: int, target: int, seconds: float) -> _Stream:
        made, makes = self.starts[source][work], self.lasts[source][work]
        takes = 0 if self.places[source] == self.places[target] else _ticks(seconds, self.unit)
        starts = [self.cp.new_int_var(0, self.horizon, "") for _ in made]
        for maker, start, user in zip(made, starts, self.starts[target][work], strict=True):
            self.cp.add(start >= maker + makes)
            self.cp.add(user >= start + takes)
        for first, second in itertools.pairwise(starts):
            self.cp.add(second >= first + takes)
        return _Stream(made, makes, starts, takes)

    def _add_channel(self, streams: Sequence[_Stream]) -> None:
        for one, other in itertools.combinations(streams, 2):
            if not one.takes and not other.takes:
                continue
            for (x, a), (y, b) in itertools.product(
                zip(one.made, one.starts, strict=True), zip(other.made, other.starts, strict=True)
            ):
                if x is y:  # made by one computation: sent in the order of the peers, as the streams are
                    self.cp.add(b >= a + one.takes)
                    continue
                first = self.cp.new_bool_var("")
                self.cp.add(y >= x + one.makes).only_enforce_if(first)
                self.cp.add(b >= a + one.takes).only_enforce_if(first)
                self.cp.add(x >= y + other.makes).only_enforce_if(~first)
                self.cp.add(a >= b + other.takes).only_enforce_if(~first)

    def order(self, solver: cp_model.CpSolver, rank: int) -> list[Step]:
        """The rank's computations by their starts and, of those that take no time, by their ends and microbatches."""
        items = [
            (solver.value(start), self.lasts[stage][work], k, "FBW".index(work), stage if work == "F" else -stage)
            for stage, at in enumerate(self.places)
            if at == rank
            for work, starts in self.starts[stage].items()
            for k, start in enumerate(starts)
        ]
        return [("FBW"[work], abs(stage), k) for _, _, k, work, stage in sorted(items)]


def _ticks(seconds: float, unit: float) -> int:
    return round(seconds / unit)


def _unit(
    times: Sequence[StageTimes],
    microbatches: int,
    transfers: Mapping[Edge, tuple[float, float | None]],
    splits: bool,
) -> float:
    """Seconds of the model's unit: what all times are multiples of, unless that makes the numbers too large."""
    seconds = [value for t in times for value in (t.forward_s, t.backward_s, t.reduce_s)]
    seconds += [value for t in times for value in (t.weight_s, t.backward_s - t.weight_s) if splits]
    seconds += [value or 0.0 for pair in transfers.values() for value in pair]
    longest = microbatches * math.fsum(seconds)
    if not longest:
        return 1.0
    parts = [Fraction(value).limit_denominator(_RESOLUTION) for value in seconds if value]
    denominator = math.lcm(*(part.denominator for part in parts))
    common = math.gcd(*(int(part * denominator) for part in parts)) / denominator
    exact = all(math.isclose(value / common, round(value / common), rel_tol=1e-9) for value in seconds)
    return common if exact and longest / common <= _RESOLUTION else longest / _RESOLUTION
