"""A plan's own decisions as limits of planning: planned again under a change of the cluster, it stays the same plan.

Limits say degrees, tensor scheme, microbatches, schedule, warm-up, stages on a rank, what is computed again, bytes of
gradients that share a message, and the level of ZeRO where all that can be divided has one. Strategies, the blocks of
stages, unlike meshes, single layers that are computed again and mixed levels are chosen anew; :func:`chosen_anew` names
those that come out otherwise.
"""

from __future__ import annotations

from typing import Any

from autopart.analysis import Analysis, look_up
from autopart.data_prices import offered_levels
from autopart.explain import limits_of
from autopart.passes.program import Role
from autopart.plan import Plan
from autopart.realize import axes_of, settings_of
from autopart.solver.degrees import Degrees
from autopart.wishes import forced_in


def asked_of(plan: Plan) -> dict[str, Any]:
    """What a plan records of its user's wishes, as :func:`autopart.planner.make_plan` takes it."""
    names = ("pins", "together", "optimizer", "dropout")
    return {name: getattr(plan, name) for name in names}


def searched_with(plan: Plan) -> dict[str, Any]:
    """:func:`asked_of`, and what its user forced: all candidates had it among which the plan was chosen."""
    return {**asked_of(plan), **forced_in(plan)}


def limits_beside(plan: Plan, config: str) -> dict[str, Any]:
    """Limits of ``make_plan`` under which another candidate is planned, with what the plan's user forced.

    config: as the plan's rows of candidates describe it.
    """
    own = limits_of(config)
    found = {**searched_with(plan), **own}
    if "virtual" not in own:  # of a candidate with one stage on each rank
        found.pop("virtual", None)
    if "dp" in own:  # a mesh of all stages
        found["meshes"] = "equal"
    return found


def limits_of_plan(plan: Plan, analysis: Analysis, batch: int) -> dict[str, Any]:
    """Limits of ``make_plan``, besides :func:`asked_of`, under which a plan with the same decisions is made.

    batch: samples of a step; where it is not the plan's, microbatches keep their samples, or are free where these do
    not divide it. Raises PlanError for a plan that is another model's.
    """
    dp, tp = ({getattr(stage, name) for stage in plan.stages} for name in ("dp", "tp"))
    axes = {axes_of(stage) for stage in plan.stages}
    sizes = tuple(size for _, size in min(axes)) if len(axes) == 1 else ()
    return {
        "pp": plan.pp,
        "dp": min(dp) if len(dp) == 1 else None,
        "tp": (sizes or 1) if len(tp) == 1 else None,
        "microbatches": _microbatches(plan, batch),
        "schedule": plan.schedule,
        "warmup": plan.warmup or (1 if plan.schedule == "1f1b" else None),
        "virtual": _virtual(plan) if plan.schedule == "interleaved" else None,
        "recompute": "auto" if plan.recompute == "some" else plan.recompute,
        "zero": _level(plan, analysis),
        "tensor_scheme": plan.tensor_scheme,
        "bucket_bytes": plan.bucket_bytes,
        "meshes": "unlike" if _has_meshes_of_stages(plan) else "equal",
    }


def chosen_anew(plan: Plan, same: Plan) -> list[str]:
    """The decisions, for people, that limits did not hold, where ``same`` takes them otherwise than the plan."""
    taken: dict[str, list[Any]] = {
        "microbatches": [item.batch / item.microbatches for item in (plan, same)],
        "meshes of stages": [_by_stage(item, "mesh", "shares") for item in (plan, same)],
        "levels of ZeRO": [item.zero for item in (plan, same)],
        "what is computed again": [(item.recompute, _by_stage(item, "recompute")) for item in (plan, same)],
        "blocks of stages": [(item.order, _by_stage(item, "blocks")) for item in (plan, same)],
        "strategies": [
            (item.strategies, item.storage, _by_stage(item, "strategies", "storage")) for item in (plan, same)
        ],
    }
    return [name for name, values in taken.items() if values[0] != values[1]]


def have_same_degrees(plan: Plan, other: Plan) -> bool:
    """Whether they take all decisions alike that limits hold, and have the same meshes."""

    def decided(item: Plan) -> tuple[Any, ...]:
        schedule = item.schedule, item.microbatches, item.warmup, item.tensor_scheme, item.bucket_bytes
        return *schedule, item.recompute, item.zero, item.places, *_by_stage(item, "mesh", "shares")

    return decided(plan) == decided(other)


def _by_stage(plan: Plan, *names: str) -> list[tuple[Any, ...]]:
    return [tuple(getattr(stage, name) for name in names) for stage in plan.stages]


def _virtual(plan: Plan) -> int:
    return len(plan.stages) // plan.pp


def _microbatches(plan: Plan, batch: int) -> int | None:
    """As many of the same samples; None where these do not divide the batch, or the schedule does not take as many."""
    count, left = divmod(batch * plan.microbatches, plan.batch)
    if left or not count:
        return None
    return count if Degrees(plan.pp, 1, (), count, plan.schedule, virtual=_virtual(plan)).runs else None


def _has_meshes_of_stages(plan: Plan) -> bool:
    """Whether each stage was priced by its own devices: also where all came to have one mesh, as its search tells."""
    chosen = (str(row.get("config", "")) for row in plan.considered if row.get("status") == "chosen")
    return not plan.is_uniform or any("meshes=unlike" in config for config in chosen)


def _level(plan: Plan, analysis: Analysis) -> int | None:
    """The level of ZeRO of all parameters that replicas can divide; None where there are several, or no such one."""
    settings = settings_of(analysis, plan)
    home = {block: stage for stage in range(len(plan.stages)) for block in plan.blocks_of(stage)}
    levels = set()
    for node in analysis.graph.nodes:
        if node.op != "placeholder" or node.meta["role"] is not Role.PARAMETER:
            continue
        blocks = {analysis.block_of[user] for user in node.users if user in analysis.block_of}
        # stages with meshes of their own divide only what one block reads
        if not blocks or (len(blocks) > 1 and not plan.is_uniform):
            continue
        info, own = analysis.program.tensors[node.meta["name"]], settings[home[min(blocks)]]
        if offered_levels(info, own.storage.get(info.name, ()), own.axes, own.dp) != (0,):
            levels.add(look_up(plan.zero, info.name) or 0)
    return levels.pop() if len(levels) == 1 else None
