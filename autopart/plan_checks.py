"""What a plan has to be: each field by itself and with the others. An error says which, and what to write instead."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from autopart.cost.communication import KINDS
from autopart.report.units import counted
from autopart.runtime.errors import PlanError, ScheduleError
from autopart.runtime.manifest import MIXED
from autopart.runtime.placement import Placement
from autopart.runtime.schedule import NAMES, deeper_warmup, make_schedule
from autopart.solver.degrees import MOST_MICROBATCHES
from autopart.tensor_scheme import TensorScheme
from autopart.update_memory import OPTIMIZERS
from autopart.wishes import check_recorded

if TYPE_CHECKING:
    from autopart.plan import Plan, StagePlan

SCHEDULES = NAMES
RECOMPUTE = ("none", "full", "some")
DROPOUT = ("torch", "invariant")
_MOST = 2**20
"""Of blocks, and of how many times as fast a device is alone."""

_ROUNDED = 1e-9
"""Seconds: what rounding may leave of differences."""
_LONGEST = 1e15
"""Seconds: more is a slip of the pen, of which sums over microbatches are no numbers any more."""


def check_stage(stage: StagePlan) -> None:
    """Raises PlanError for a stage that contradicts itself."""
    names = [name for name, _ in stage.mesh]
    _require(bool(stage.mesh) and names[0] == "dp", f"mesh: the first axis is 'dp', found {names}; write ['dp', 1]")
    _require(
        not stage.shares or (len(stage.shares) == stage.mesh[0][1] and min(stage.shares) >= 1),
        f"shares: a part of at least 1 for each replica, found {list(stage.shares)}",
    )
    _require(len(set(names)) == len(names), f"mesh: two axes are both called one of {names}; rename one")
    _require(all(size >= 1 for _, size in stage.mesh), "mesh: an axis has at least 1 device")
    _require(all(name.isidentifier() for name in names), f"mesh: axis names are identifiers, found {names}")
    size = math.prod(size for _, size in stage.mesh)
    _require(
        size == len(stage.devices), f"mesh: {size} positions for {len(stage.devices)} devices; make the product equal"
    )
    _require(len(set(stage.devices)) == len(stage.devices), "devices: a device is named twice; each has one place")
    _require(all(device >= 0 for device in stage.devices), "devices: numbers count from 0")
    other = next((axis for axis in stage.axis_collectives if axis not in names), None)
    _require(other is None, f"axis_collectives: {other!r} is no axis of the mesh, which has {', '.join(names)}")
    for name, counts in (
        ("collectives", stage.collectives),
        ("step_collectives", stage.step_collectives),
        *((f"axis_collectives[{axis!r}]", counts) for axis, counts in stage.axis_collectives.items()),
    ):
        unknown = next((kind for kind in counts if kind not in KINDS), None)
        _require(unknown is None, f"{name}: {unknown!r} is none of {', '.join(KINDS)}")
        least = min((number for count in counts.values() for number in count.values()), default=0)
        _require(least >= 0, f"{name}: calls and bytes are at least 0, found {least}")
    # of one kind it may be below, where these wait for another's that are on their way
    for kind, passed in stage.hidden_s.items():
        _require(abs(passed) <= _LONGEST, f"hidden_s[{kind!r}]: expected at most {_LONGEST:g} seconds, found {passed}")
    hidden = math.fsum(stage.hidden_s.values())
    _require(hidden > -_ROUNDED, f"hidden_s: expected seconds of at least 0 in all, found {hidden}")
    first, end = stage.blocks
    _require(0 <= first < end <= _MOST, f"blocks: expected [first, end) with first < end, found [{first}, {end})")
    for name in (
        "forward_s",
        "backward_s",
        "step_end_s",
        "arrival_s",
        "weight_s",
        "memory_bytes",
        "capacity_bytes",
        "state_bytes",
        "parameters",
    ):
        _check_amount(name, getattr(stage, name))


def _check_amount(name: str, value: float) -> None:
    """Raises PlanError for what is below nothing, no number, or seconds beyond all that is planned."""
    _require(value >= 0 and math.isfinite(value), f"{name}: expected a number of at least 0, found {value}")
    _require(
        not name.endswith("_s") or value <= _LONGEST, f"{name}: expected at most {_LONGEST:g} seconds, found {value}"
    )


def check_plan(plan: Plan) -> None:
    """Raises PlanError for a plan whose fields, or stages, contradict each other."""
    _require(plan.schedule in SCHEDULES, f"schedule: {plan.schedule!r} is not one of {', '.join(SCHEDULES)}")
    _require(plan.recompute in RECOMPUTE, f"recompute: {plan.recompute!r} is not one of {', '.join(RECOMPUTE)}")
    _require(
        (plan.recompute == "some") == any(stage.recompute for stage in plan.stages),
        'recompute: "some" where stages list layers to recompute, and only there; '
        f"found {plan.recompute!r} with {[list(stage.recompute) for stage in plan.stages]}",
    )
    _require(plan.dropout in DROPOUT, f"dropout: {plan.dropout!r} is not one of {', '.join(DROPOUT)}")
    _require(plan.batch >= 1 and plan.microbatches >= 1, "batch and microbatches: at least 1")
    _require(plan.example_batch >= 0, f"example_batch: at least 0, found {plan.example_batch}")
    _require(plan.bucket_bytes >= 1, f"bucket_bytes: at least 1, found {plan.bucket_bytes}")
    _require(
        plan.shared_host >= 0 and 1 <= plan.alone <= _MOST,
        f"shared_host: at least 0, and alone: at least 1, found {plan.shared_host} and {plan.alone}",
    )
    _require(
        plan.microbatches <= MOST_MICROBATCHES, f"microbatches: at most {MOST_MICROBATCHES}, found {plan.microbatches}"
    )
    _require(
        plan.dtype in MIXED or isinstance(getattr(torch, plan.dtype, None), torch.dtype),
        f"dtype: one of torch's, such as bfloat16, or {', '.join(MIXED)}, found {plan.dtype!r}",
    )
    _require(bool(plan.stages), "stages: a plan has at least one stage")
    if plan.warmup:
        check_warmup(plan.schedule, plan.warmup, len(plan.stages))
    for source, target, *seconds in plan.transfers:
        _require(
            0 <= source < target < len(plan.stages) and all(x is None or 0 <= x <= _LONGEST for x in seconds),
            f"transfers: [{source}, {target}, ...]: expected source < target < {len(plan.stages)} and seconds, at most "
            f"{_LONGEST:g}",
        )
    groups = {stage.devices: stage.mesh for stage in plan.stages}
    used = [device for devices in groups for device in devices]
    _require(
        len(set(used)) == len(used),
        "stages: a device is in two stages; stages share all of their devices, in the same order, or none",
    )
    _require(
        all(stage.mesh == groups[stage.devices] for stage in plan.stages),
        "stages: two stages share their devices but not their mesh; give them the same mesh",
    )
    try:
        chain = tuple((stage, stage + 1) for stage in range(len(plan.stages) - 1))
        make_schedule(plan.schedule, len(plan.stages), plan.microbatches, chain, places=plan.places)
    except ScheduleError as error:
        raise PlanError(f"schedule: {error}") from error
    for index, (before, after) in enumerate(zip(plan.stages, plan.stages[1:], strict=False)):
        _require(
            before.blocks[1] == after.blocks[0],
            f"stages[{index + 1}].blocks: starts at {after.blocks[0]}, the stage before ends at {before.blocks[1]}",
        )
    _require(plan.stages[0].blocks[0] == 0, "stages[0].blocks: the first stage starts at block 0")
    schemes = [scheme.value for scheme in TensorScheme]
    _require(
        plan.tensor_scheme in schemes,
        f"tensor_scheme: one of {', '.join(schemes)}, not {plan.tensor_scheme!r}",
    )
    _require(plan.optimizer in OPTIMIZERS, f"optimizer: one of {', '.join(OPTIMIZERS)}, not {plan.optimizer!r}")
    _require(
        not plan.order or sorted(plan.order) == list(range(plan.stages[-1].blocks[1])),
        f"order: every block from 0 to {plan.stages[-1].blocks[1] - 1} once, or nothing",
    )
    for index, stage in enumerate(plan.stages):
        parts = sum(stage.shares) // math.gcd(*stage.shares) if stage.shares else stage.dp
        samples = plan.microbatches * parts
        pieces, replicas = counted(plan.microbatches, "microbatch"), counted(stage.dp, "replica")
        _require(
            plan.batch % samples == 0,
            f"stages[{index}]: a batch of {plan.batch} does not divide into {pieces} on "
            f"{replicas}{f' with the shares {list(stage.shares)}' if stage.shares else ''}; make batch a "
            f"multiple of {samples}",
        )
    for name in ("step_time_s", "bound_s", "gap", "solve_s", "total_s", "tokens", "flops", "peak_flops", "tied_s"):
        _check_amount(name, getattr(plan, name))
    _require(plan.gap <= 1, f"gap: a share of step_time_s, at most 1, found {plan.gap}")
    check_recorded(plan.asked)
    for pattern, pinned in plan.pins.items():
        _require(
            0 <= pinned < len(plan.stages),
            f"pins[{pattern!r}]: stage {pinned}, but the plan's stages are 0 to {len(plan.stages) - 1}",
        )
    for pattern, level in plan.zero.items():
        _require(level in (0, 1, 2, 3), f"zero[{pattern!r}]: one of 0, 1, 2, 3, found {level}")
    for pattern, text in plan.storage.items():
        for item in text.split(","):
            try:
                Placement.parse(item.strip())
            except ValueError as error:
                raise PlanError(f"storage[{pattern!r}]: {error}") from error


def check_warmup(schedule: str, warmup: Sequence[int], stages: int) -> None:
    """Raises PlanError when the schedule has no warm-up, or stages would wait for each other."""
    _require(schedule == "1f1b", f"warmup: only the schedule 1f1b has a warm-up, not {schedule}; leave it out")
    least = f"such as {list(deeper_warmup(stages, 1))}"
    _require(len(warmup) == stages, f"warmup: one number for each of {stages} stages, {least}, found {list(warmup)}")
    falls = all(before >= after for before, after in itertools.pairwise(warmup))
    _require(
        falls and min(warmup) >= 0,
        f"warmup: a stage runs ahead at least as far as the next one, {least}; with {list(warmup)} they would wait for "
        "each other",
    )


def check_devices(plan: Plan, where: str) -> None:
    """Raises PlanError for devices that the plan's cluster does not have, as far as its name tells how many it has."""
    from autopart.what_if import cluster_named

    cluster = cluster_named(plan.cluster)
    if cluster is None:
        return
    for index, stage in enumerate(plan.stages):
        last = max(stage.devices)
        _require(
            last < cluster.device_count,
            f"{where}: stages[{index}].devices: there is no device {last} in {plan.cluster}, whose "
            f"{counted(cluster.device_count, 'device')} count from 0; name others, or plan again",
        )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise PlanError(message)
