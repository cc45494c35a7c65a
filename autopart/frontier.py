"""All undominated plans of a model: step time against memory per device, and time against cost over device counts.

**Memory.** Plans are made under falling capacities (epsilon-constraint): the first on the cluster as it is, each next
one with no device allowed as many bytes as the fullest of the last plan holds. A plan's bound holds for every plan of
the searched space within its capacity. So with ``step`` s and the plans' gaps, for every plan of that space with (t, b)
there is a point with at most (t / (1 - gap), b / (1 - s)): the proven epsilon. Where no level of ZeRO is given, and
nothing has to be computed again, plans with all parameters at one level are made besides: while memory does not ask for
it the search keeps parameters whole, or divides some, and a step can take less with all of them divided.

**Device counts.** For each count the fastest plan on the cluster's first devices, with its cost, devices times seconds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopart.analysis import Analysis, analyze
from autopart.cluster import Cluster, Node
from autopart.earlier_plans import EarlierPlans
from autopart.passes.data_axis import LEVELS
from autopart.passes.program import Program
from autopart.plan import Plan
from autopart.planner import make_plan
from autopart.report.units import counted
from autopart.runtime.errors import ClusterError, InfeasibleError, PlanError
from autopart.solver.tensor_problem import relative_gap

MOST_PLANS = 50
_ENDED = "plans that hold less were not looked for, as"


@dataclass(frozen=True, slots=True)
class PlanPoint:
    """A plan of the frontier. memory_bytes: of the fullest device. bound_s: no plan with as few bytes is faster.
    device_seconds: devices times step time, which is what a step costs.
    """

    plan: Plan
    devices: int
    memory_bytes: int
    bound_s: float

    @staticmethod
    def of(plan: Plan) -> PlanPoint:
        """The point of a plan of all devices that it has."""
        return PlanPoint(plan, plan.device_count, plan.fullest_bytes, plan.bound_s)

    @property
    def seconds(self) -> float:
        return self.plan.step_time_s

    @property
    def device_seconds(self) -> float:
        return self.devices * self.plan.step_time_s

    @property
    def gap(self) -> float:
        return relative_gap(self.seconds, self.bound_s)

    def to_json_object(self) -> dict[str, Any]:
        return {
            "devices": self.devices,
            "step_time_s": self.seconds,
            "memory_bytes": self.memory_bytes,
            "bound_s": self.bound_s,
            "gap": self.gap,
            "device_seconds": self.device_seconds,
            "tokens_per_s": self.plan.tokens_per_s,
            "plan": self.plan.to_json_object(),
        }


def memory_frontier(
    program: Program,
    cluster: Cluster,
    *,
    step: float = 0.1,
    most: int = MOST_PLANS,
    analysis: Analysis | None = None,
    report: Callable[[PlanPoint], None] = lambda _: None,
    **limits: Any,
) -> list[PlanPoint]:
    """Undominated plans, the fastest first.

    step: share of the last plan's bytes by which the next has to hold less; 0 for all plans. most: plans made at most;
    where there may be more the last one's notes say so (:func:`ended_early`).
    limits: as ``make_plan`` takes them. Raises InfeasibleError where nothing fits in the cluster at all, PlanError.
    """
    if not 0 <= step < 1:
        raise PlanError(f"a step is a share, at least 0 and below 1, not {step}")
    analysis = analysis or analyze(program)
    divides = limits.get("zero") is None and limits.get("dp") != 1 and cluster.device_count > 1
    known = {level: EarlierPlans(less_memory=True) for level in (None, *(LEVELS[1:] if divides else ()))}
    points: list[PlanPoint] = []
    capacity = max(device.memory_bytes for device in cluster.devices)
    for _ in range(most):
        try:
            plan = _fastest(analysis, capped(cluster, capacity), known, limits)
        except InfeasibleError:
            if not points:
                raise
            break
        points.append(PlanPoint.of(plan))
        report(points[-1])
        held = points[-1].memory_bytes
        capacity = min(held - 1, int(held * (1 - step)))
        if capacity < 1:
            break
    else:
        plan = points[-1].plan
        points[-1] = replace(points[-1], plan=replace(plan, notes=(*plan.notes, f"{_ENDED} {most} were made")))
    return undominated(points, lambda point: point.memory_bytes)


def _fastest(
    analysis: Analysis, cluster: Cluster, known: Mapping[int | None, EarlierPlans], limits: Mapping[str, Any]
) -> Plan:
    """The fastest plan, with its bound. Where it computes nothing again, so that memory may not ask for divided
    parameters, the fastest of it and of those with all parameters at a level of ZeRO.

    known: of earlier plans, by level; the first, None, of those whose levels are chosen. Raises what make_plan does.
    """
    chosen, *levels = known
    plan = make_plan(analysis.program, cluster, analysis=analysis, earlier=known[chosen], **limits)
    bound = plan.bound_s
    for level in () if any(stage.recompute for stage in plan.stages) else levels:
        with contextlib.suppress(PlanError):  # nothing fits at that level, or a schedule has none
            own_limits = {**limits, "zero": level}
            other = make_plan(analysis.program, cluster, analysis=analysis, earlier=known[level], **own_limits)
            plan = min(plan, other, key=lambda item: item.step_time_s)
    bound = min(bound, plan.step_time_s)
    return replace(plan, bound_s=bound, gap=relative_gap(plan.step_time_s, bound))


def ended_early(points: Sequence[PlanPoint]) -> str | None:
    """Why plans that hold less than the last were not looked for; None where none fits."""
    return next((note for note in points[-1].plan.notes if note.startswith(_ENDED)), None)


def count_frontier(
    program: Program,
    cluster: Cluster,
    counts: Sequence[int],
    *,
    analysis: Analysis | None = None,
    report: Callable[[PlanPoint], None] = lambda _: None,
    left_out: Callable[[int, PlanError], None] = lambda *_: None,
    **limits: Any,
) -> list[PlanPoint]:
    """The fastest plan for each number of devices, in that order.

    left_out: told of counts that nothing fits on, or that the limits do not go with, such as two tensor ranks on one
    device. Raises what make_plan does for the last count where there is no plan for any, ClusterError for more devices
    than the cluster has.
    """
    analysis, earlier = analysis or analyze(program), EarlierPlans()
    points: list[PlanPoint] = []
    failure: PlanError | None = None
    for count in sorted(set(counts)):
        part = first_devices(cluster, count)
        try:
            plan = make_plan(program, part, analysis=analysis, earlier=earlier, **limits)
        except PlanError as error:
            failure = error
            left_out(count, error)
            continue
        points.append(PlanPoint.of(plan))
        report(points[-1])
    if not points:
        raise failure or PlanError("give at least one number of devices")
    return points


def undominated(points: Sequence[PlanPoint], other: Callable[[PlanPoint], float]) -> list[PlanPoint]:
    """Those that no point beats in both step time and ``other``, the fastest first."""
    kept: list[PlanPoint] = []
    for point in sorted(points, key=lambda item: (item.seconds, other(item))):
        if not kept or other(point) < other(kept[-1]):
            kept.append(point)
    return kept


def capped(cluster: Cluster, memory_bytes: int) -> Cluster:
    """The cluster with no device that has more memory than that."""
    return cluster.with_memory(lambda device: min(device.memory_bytes, memory_bytes))


def first_devices(cluster: Cluster, count: int) -> Cluster:
    """The cluster's first ``count`` devices, of a node of which a part is left as in ``Node.first``. ClusterError."""
    if not 1 <= count <= cluster.device_count:
        raise ClusterError(f"{cluster} has {counted(cluster.device_count, 'device')}, not {count}")
    return Cluster(tuple(_first_nodes(cluster, count)))


def _first_nodes(cluster: Cluster, left: int) -> Iterator[Node]:
    for node in cluster.nodes:
        if left <= 0:
            return
        yield node.first(left)
        left -= node.count
