"""Plans explained: what binds, why the runner-up lost, how two plans differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from autopart.breakdown import Breakdown, break_down, columns
from autopart.cluster import Cluster
from autopart.plan import Plan
from autopart.plan_checks import SCHEDULES
from autopart.predict import simulate_plan
from autopart.report.units import format_apart
from autopart.what_if import changed_as, cluster_named

_OUTCOMES = {"step_time_s", "bound_s", "gap", "solve_s", "total_s", "tokens", "flops", "notes", "considered", "tied_s"}
_OUTCOMES |= {"transfers", "peak_flops", "cluster_digest", "example_batch", "asked"}
_STAGE_OUTCOMES = {"forward_s", "backward_s", "memory_bytes", "state_bytes", "capacity_bytes", "parameters"}
_LIMITS = ("pp", "dp", "tp", "meshes", "microbatches")
_STAGE_OUTCOMES |= {
    "collectives",
    "axis_collectives",
    "step_end_s",
    "arrival_s",
    "hidden_s",
    "first_op",
    "last_op",
}
_PLACES = {"device", "devices"}
"""What says where a stage lies."""
_ROUNDED = 1e-6
"""Of a step's seconds: what files with fewer digits may leave of differences."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One decision that two plans take differently. values: one per plan, None where a plan does not take it."""

    what: str
    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Plans beside each other. decisions: those that differ. figures: predicted numbers by name, one per plan.
    breakdowns: one per plan. parts: seconds of the stage that sets each plan's pace, by part of the step.
    units: what each plan's "tokens per second" are, of a model without tokens samples.
    """

    decisions: tuple[Difference, ...]
    figures: Mapping[str, tuple[float, ...]]
    breakdowns: tuple[Breakdown, ...]
    parts: Mapping[str, tuple[float, ...]]
    units: tuple[str, ...]

    def to_json_object(self) -> dict[str, Any]:
        return {
            "decisions": [{"what": item.what, "values": list(item.values)} for item in self.decisions],
            "figures": {name: list(values) for name, values in self.figures.items()},
            "throughput_units": list(self.units),
            "parts_s": {name: list(values) for name, values in self.parts.items()},
            "breakdowns": [item.to_json_object() for item in self.breakdowns],
        }


def cluster_of(plan: Plan) -> Cluster | None:
    """The cluster that a plan names; None for one that was described in a file."""
    found = cluster_named(plan.cluster)
    return found if found is not None and found.device_count >= plan.device_count else None


def given_cluster(plan: Plan, given: Cluster) -> Cluster | None:
    """The plan's cluster where ``given`` is it, or what it is a change of: by its numbers, else by its name; or None.

    Numbers go first, as what was measured of a host may not be what its name stands for any more.
    """
    changed = changed_as(plan.cluster, given)
    alike = (cluster for cluster in (changed, given) if cluster.digest == plan.cluster_digest)
    return next(alike, None) or cluster_named(plan.cluster, given)


def has_other_numbers(plan: Plan, cluster: Cluster | None) -> bool:
    """Whether the plan was made with other numbers of the cluster than these, as where a host was measured anew."""
    return cluster is not None and bool(plan.cluster_digest) and cluster.digest != plan.cluster_digest


def numbers_notes(plans: Sequence[Plan], clusters: Sequence[Cluster | None]) -> list[str]:
    """What to tell of plans that were made with other numbers than those of their clusters at hand."""
    pairs = zip(plans, clusters, strict=True)
    names = dict.fromkeys(plan.cluster for plan, cluster in pairs if has_other_numbers(plan, cluster))
    return [
        f"the numbers of {name} at hand, by which collectives are priced here, are not those that the plan was made "
        "with; give the file that has those with --cluster, or plan again"
        for name in names
    ]


def edited_notes(plan: Plan) -> list[str]:
    """What to tell of a plan whose step time is not that of its own stages and schedule, as where it was edited."""
    taken = simulate_plan(plan).makespan_s + plan.tied_s
    if not plan.step_time_s or not taken or abs(plan.step_time_s - taken) <= _ROUNDED * taken:
        return []
    stated, own = format_apart(plan.step_time_s, taken)
    return [
        f"the step time in the file, {stated}, is not that of its stages under its schedule, {own}, as where it was "
        "edited: bound, gap and memory may be those of another plan too; 'autopart plan' with these decisions given "
        "prices them"
    ]


def compare(plans: Sequence[Plan], clusters: Sequence[Cluster | None]) -> Comparison:
    """clusters: of each plan, None where it is not known."""
    breakdowns = [break_down(plan, cluster) for plan, cluster in zip(plans, clusters, strict=True)]
    figures = {
        "step time": tuple(plan.step_time_s for plan in plans),
        "lower bound": tuple(plan.bound_s for plan in plans),
        "tokens per second": tuple(plan.tokens_per_s for plan in plans),
        "TFLOP/s per device": tuple(plan.tflops_per_device for plan in plans),
        "memory of the fullest device": tuple(float(plan.fullest_bytes) for plan in plans),
    }
    slowest = [found.stages[found.slowest] for found in breakdowns]
    parts = {name: tuple(stage.seconds.get(name, 0.0) for stage in slowest) for name in columns(slowest)}
    units = tuple(plan.throughput_unit for plan in plans)
    unlike = any(cluster is not None and len(set(cluster.nodes)) > 1 for cluster in clusters)
    unlike |= any(len({stage.device for stage in plan.stages}) > 1 for plan in plans)
    return Comparison(tuple(_decisions(plans, unlike)), figures, tuple(breakdowns), parts, units)


def _decisions(plans: Sequence[Plan], unlike: bool) -> list[Difference]:
    """Fields of plans and stages that are no outcome, and entries of their tables, where plans differ.

    unlike: devices are, so that it matters on which a stage lies.
    """
    taken = [_taken(plan, unlike) for plan in plans]
    names = dict.fromkeys(name for found in taken for name in found)
    rows = (Difference(name, tuple(found.get(name) for found in taken)) for name in names)
    return [row for row in rows if any(value != row.values[0] for value in row.values)]


def _taken(plan: Plan, unlike: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"pp": plan.pp, "dp": plan.dp, "tp": plan.tp}
    for item in fields(plan):
        value = getattr(plan, item.name)
        if item.name in _OUTCOMES or item.name == "stages":
            continue
        if isinstance(value, Mapping):
            found |= {f"{item.name} of {name}": entry for name, entry in value.items()}
        else:
            found[item.name] = _listed(value)
    left_out = _STAGE_OUTCOMES if unlike else _STAGE_OUTCOMES | _PLACES
    for index, stage in enumerate(plan.stages):
        for item in fields(stage):
            if item.name in left_out:
                continue
            value = getattr(stage, item.name)
            if not isinstance(value, float):  # seconds are outcomes
                found[f"stage {index} {item.name}"] = _listed(value)
    return found


def _listed(value: Any) -> Any:
    """Tuples as lists, as JSON has them."""
    return [_listed(item) for item in value] if isinstance(value, tuple) else value


def runners_up(plan: Plan) -> list[dict[str, Any]]:
    """The other candidates that could have run, the fastest first; of pruned ones the seconds are a lower bound."""
    rows = [dict(row) for row in plan.considered if row.get("status") != "chosen" and row.get("seconds") is not None]
    return sorted(rows, key=lambda row: float(row["seconds"]))


def to_plan_beside(rows: Sequence[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """Of :func:`runners_up` those to be planned: the first that was timed, then the first by what is known of them."""
    named = [row for row in rows if "config" in row]
    timed = [row for row in named if row.get("status") == "slower"][:1]
    return [*timed, *(row for row in named[:most] if row not in timed)]


def infeasible(plan: Plan) -> list[dict[str, Any]]:
    """The candidates that did not fit in memory, in the order of the search: those with the lowest bounds first."""
    return [dict(row) for row in plan.considered if row.get("status") == "infeasible"]


def limits_of(config: str) -> dict[str, Any]:
    """A candidate's description (``pp=2 dp=4 tp=1 microbatches=8 1f1b recompute``) as limits of ``make_plan``."""
    found: dict[str, Any] = {"recompute": "auto"}
    for word in config.split():
        name, equals, value = word.partition("=")
        if equals and name in _LIMITS:
            found[name] = int(value) if value.isdecimal() else value
        elif word in SCHEDULES:
            found["schedule"] = word
        elif word[:1] == "x" and word[1:].isdecimal() and found.get("schedule") == "interleaved":
            found["virtual"] = int(word[1:])
        elif word in ("recompute", "no-recompute"):
            found["recompute"] = "full" if word == "recompute" else "none"
    return found
