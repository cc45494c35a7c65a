"""Plans as text: a few lines on the whole, a table of the stages, a table of what else was considered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tabulate import tabulate

from autopart.plan import Plan, StagePlan
from autopart.report.units import counted, format_bytes, format_count, format_seconds, format_share
from autopart.wishes import forced_text

_HEADERS = (
    *("stage", "devices", "blocks", "mesh", "parameters", "forward", "backward", "memory / capacity"),
    "collectives per microbatch",
)


def plan_text(plan: Plan) -> str:
    """The header lines and the stages' table."""
    return "\n".join([*plan_header(plan), "", stage_table(plan.stages, plan.order)])


def plan_header(plan: Plan) -> list[str]:
    """What the plan is for, its predicted time, and how good that is at most."""
    warmup = f" with warm-up {', '.join(map(str, plan.warmup))}" if plan.warmup else ""
    lines = [
        f"{plan.model} on {plan.cluster}: batch {plan.batch}, {plan.dtype}, {plan.layout}",
        f"schedule {plan.schedule}{warmup}, {counted(plan.microbatches, 'microbatch')}, "
        f"{', '.join([_recompute(plan), *levels(plan)])}",
        f"step time {format_seconds(plan.step_time_s)}, lower bound {format_seconds(plan.bound_s)}, "
        f"gap {format_share(plan.gap)}; solved in {format_seconds(plan.solve_s)}, "
        f"planned in {format_seconds(plan.total_s)}",
    ]
    if plan.tokens or plan.flops:
        speed = f"{format_count(round(plan.tokens_per_s, 1))} {plan.throughput_unit}/s"
        lines.append(f"{speed}, {plan.tflops_per_device:.3g} TFLOP/s per device")
    lines += [f"asked for: {text}" for text in (forced_text(plan), *_pinned(plan)) if text]
    return [*lines, *(f"note: {note}" for note in plan.notes)]


def _pinned(plan: Plan) -> list[str]:
    """The user's pins."""
    found = [f"{pattern} on stage {stage}" for pattern, stage in plan.pins.items()]
    return [*found, *(f"{' and '.join(group)} on one stage" for group in plan.together)]


def levels(plan: Plan) -> list[str]:
    """``zero 1 and 3``: the levels at which replicas divide parameters; none where all are whole."""
    found = sorted(set(plan.zero.values()) - {0})
    return [f"zero {' and '.join(map(str, found))}"] if found else []


def _recompute(plan: Plan) -> str:
    if plan.recompute != "some":
        return f"recompute {plan.recompute}"
    stages = [(index, stage.recompute) for index, stage in enumerate(plan.stages) if stage.recompute]
    return "recompute " + "; ".join(f"{format_layers(layers)} on stage {index}" for index, layers in stages)


def format_layers(paths: Sequence[str]) -> str:
    """Numbered layers of one list together, and modules in such: ``h.0-2, h.5, h.3-4.mlp``."""
    lists: dict[tuple[str, str], list[int]] = {}
    for path in paths:
        names = path.split(".")
        at = max((index for index, name in enumerate(names) if name.isdecimal()), default=None)
        if at is None:
            lists.setdefault((path, ""), [])
            continue
        lists.setdefault((".".join(names[:at]), ".".join(names[at + 1 :])), []).append(int(names[at]))
    return ", ".join(
        ".".join(filter(None, (before, run, behind)))
        for (before, behind), numbers in lists.items()
        for run in (format_devices(sorted(numbers)).split(", ") if numbers else ("",))
    )


def stage_table(stages: Sequence[StagePlan], order: Sequence[int] = ()) -> str:
    """A row per stage. order: of the blocks, as in the plan."""
    named = len({stage.device for stage in stages}) > 1
    return tabulate([_stage_row(index, stage, order, named) for index, stage in enumerate(stages)], headers=_HEADERS)


def _stage_row(index: int, stage: StagePlan, order: Sequence[int], named: bool) -> tuple[object, ...]:
    """named: with what the devices are, as stages have unlike ones."""
    first, end = stage.blocks
    return (
        index,
        format_devices(stage.devices) + (f" ({stage.device})" if named else ""),
        format_devices(order[first:end]) if order else f"{first}-{end - 1}",
        format_mesh(stage),
        format_count(stage.parameters),
        format_seconds(stage.forward_s),
        format_seconds(stage.backward_s),
        format_memory(stage.memory_bytes, stage.capacity_bytes),
        format_collectives(stage.collectives),
    )


def format_mesh(stage: StagePlan) -> str:
    """``dp 2 (3:1) x tp 1``, with the replicas' parts of a microbatch where they are unlike."""
    parts = f" ({':'.join(map(str, stage.shares))})" if len(set(stage.shares)) > 1 else ""
    (data, replicas), *axes = stage.mesh
    return " x ".join([f"{data} {replicas}{parts}", *(f"{name} {size}" for name, size in axes)])


def format_memory(used: int, capacity: int) -> str:
    """``12.3 GiB / 80 GiB (15.4%)``, marked when it does not fit."""
    if not capacity:
        return format_bytes(used)
    mark = " OVER" if used > capacity else ""
    return f"{format_bytes(used)} / {format_bytes(capacity)} ({format_share(used / capacity)}){mark}"


def format_devices(devices: Sequence[int]) -> str:
    """Runs of neighbours as ranges: ``0-7, 16-23``."""
    runs: list[list[int]] = []
    for device in devices:
        if runs and device == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], device]
        else:
            runs.append([device])
    return ", ".join("-".join(map(str, run)) for run in runs)


def format_collectives(collectives: Mapping[str, Mapping[str, int]]) -> str:
    """``4 all_reduce 8 MiB``, one after another."""
    parts = [f"{count['calls']} {kind} {format_bytes(count['bytes'])}" for kind, count in collectives.items()]
    return ", ".join(parts) or "-"


def considered_table(rows: Sequence[Mapping[str, object]]) -> str:
    """What else was considered; columns in the order in which keys first appear, units by the keys' endings."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    return tabulate([[_cell(key, row.get(key)) for key in keys] for row in rows], headers=[_title(key) for key in keys])


def _title(key: str) -> str:
    return "step time" if key == "seconds" else key.removesuffix("_bytes").removesuffix("_s").replace("_", " ")


def _cell(key: str, value: object) -> object:
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if key == "seconds" or key.endswith("_s"):
        return format_seconds(value)
    if key.endswith("_bytes"):
        return format_bytes(value)
    return format_share(value) if key == "gap" else value
