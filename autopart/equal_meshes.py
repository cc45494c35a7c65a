"""The configurations in which all stages have one mesh: pp x dp x tensor axes of all devices, as far as they run."""

from __future__ import annotations

from autopart.candidates import Candidates
from autopart.given_limits import Limits
from autopart.runtime.errors import PlanError
from autopart.solver.degrees import Degrees, degrees


def equal_meshes(candidates: Candidates, limits: Limits, most_ranks: int | None = None) -> tuple[Degrees, ...]:
    """Those under the limits, with at most so many tensor ranks (None: any). Raises PlanError when there is none."""
    cluster, pinned, schedules = candidates.cluster, limits.pins, limits.schedules
    configs = degrees(
        cluster.device_count,
        limits.batch,
        pp=limits.pp,
        dp=limits.dp,
        tp=limits.tp,
        microbatches=limits.microbatches,
        schedules=schedules,
        recompute=limits.recompute,
        max_pp=pinned.most_stages,
        max_tp=most_ranks,
        scheme=limits.scheme,
    )
    if len(schedules) > 1:  # on one rank all schedules are one
        configs = tuple(config for config in configs if config.pp > 1 or config.schedule == "1f1b")
    stages = max(config.stages for config in configs)
    configs = tuple(config for config in configs if config.stages >= pinned.least_stages)
    most = candidates.analysis.program.most_samples
    if most:
        held = tuple(config for config in configs if limits.batch <= config.dp * config.microbatches * most)
        if not held:
            raise PlanError(
                f"the model's code was captured for at most {most} samples at a time, and microbatches of a batch of "
                f"{limits.batch} have more; give more microbatches, or leave them open"
            )
        configs = held
    least = candidates.least_samples
    held = tuple(config for config in configs if limits.batch >= config.dp * config.microbatches * least)
    if configs and not held:
        raise PlanError(
            f"a batch norm of the model needs {least} samples at a time, and microbatches of a batch of "
            f"{limits.batch} have fewer; give fewer microbatches or replicas, or a larger batch"
        )
    configs = held
    if not configs:
        raise PlanError(
            f"pins: stage {pinned.least_stages - 1} is named, but these limits and devices allow {stages} "
            f"stage{'s' if stages > 1 else ''}, counted from 0; raise pp, or pin on a lower stage"
        )
    return configs
