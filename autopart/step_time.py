"""Seconds of a step of a divided model: the simulated ones, and a floor under those of every division.

Lower bound of a candidate. With W the least seconds that the ops of one microbatch take, p stages and m microbatches,
:mod:`autopart.solver.stages_floor` bounds a step over all ways to divide W: under GPipe, and 1F1B of more than p
microbatches, by W (m + p - 1) / p. Work at the end of a step (gradient sums, the optimizer) counts only for one stage,
where nothing can overlap with it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

from autopart.host_starts import HostStarts
from autopart.runtime.schedule import Action, Schedule, in_flight, make_schedule
from autopart.runtime.schedule.flushing import one_f_one_b_order
from autopart.simulate import Durations, StageTimes, row_makespan, steady_seconds
from autopart.solver.degrees import Degrees
from autopart.solver.stages_floor import least_step
from autopart.solver.stages_problem import StageProblem, Step, Way

WHOLE_SCHEDULES = ("gpipe", "1f1b", "2bw-flush")
"""Schedules of whole backwards, one stage on each rank, that end with each batch."""
STEADY_SCHEDULES = ("2bw",)
"""Schedules whose batches follow each other without a gap: a step is what one more batch takes."""
# How many schedules are kept for further candidates; one of 64 stages and 512 microbatches takes some 30 MB.
_SCHEDULES = 8


def simulated_seconds(
    problem: StageProblem,
    way: Way,
    schedule: str,
    weight_shares: Sequence[float],
    warmup: tuple[int, ...],
    places: Sequence[int],
    durations: Durations | None = None,
    starts: HostStarts | None = None,
) -> float:
    """The simulated step of a division; what crosses several cuts is taken to be passed on from stage to stage.

    weight_shares: the parts of the stages' backwards that a schedule may leave for W. durations: see simulate.
    starts: seconds in which a GPU's host starts what a stage takes no less than; None: no host counts.
    """
    times = []
    for step, share in zip(way, weight_shares, strict=True):
        chosen = problem.chosen(step)
        backward = sum(choice.backward_s for choice in chosen)
        forward = sum(choice.forward_s for choice in chosen)
        if starts is not None:
            started = starts.of(problem.blocks_between(step.first, step.last))
            forward, backward = max(forward, started[0]), max(backward, started[1])
        end = step_end_seconds(problem, step, schedule, share)
        times.append(StageTimes(forward, backward, weight_s=backward * share, reduce_s=end))
    crossed = [problem.crossings(before, after) for before, after in itertools.pairwise(way)]
    there = [max(cut.forward_s for cut in cuts) for cuts in crossed]
    back = [max(cut.backward_s for cut in cuts) for cuts in crossed]
    if schedule in ("1f1b", "2bw-flush") and len(set(places)) == len(way) and durations is None:
        # this search's own schedule; in many microbatches its actions take longer to write down than to time
        order = one_f_one_b_order(len(way), problem.microbatches, warmup or None)
        return row_makespan(order, times, there, back) + problem.tied_seconds(way)
    made = _schedule(schedule, len(way), problem.microbatches, warmup, tuple(places))

    def transfer(action: Action) -> float:
        return there[action.stage] if action.stage < (action.peer or 0) else back[action.stage - 1]

    makespan = steady_seconds(made, schedule, problem.microbatches, times, transfer, durations)
    return makespan + problem.tied_seconds(way)


@functools.lru_cache(maxsize=_SCHEDULES)
def _schedule(name: str, stages: int, microbatches: int, warmup: tuple[int, ...], places: tuple[int, ...]) -> Schedule:
    """The order of a step's work, which candidates of equal stages and microbatches share."""
    edges = {(stage, stage + 1) for stage in range(stages - 1)}
    return make_schedule(name, stages, microbatches, edges, warmup=warmup, places=places)


def step_end_seconds(problem: StageProblem, step: Step, schedule: str, weight_share: float) -> float:
    """Seconds of a stage after its last backward, which hides sums of gradients where the step ends with it.

    weight_share: the part of it that is left for W, where there is such a part; no more than W is taken to hide.
    """
    if schedule in STEADY_SCHEDULES:
        return problem.step_end_seconds(step)
    return problem.exposed_step_end_seconds(step, weight_share or 1.0)


def pipeline_floor(work: float, config: Degrees, warmup: tuple[int, ...] = ()) -> float:
    """Least seconds of a step whose microbatches take ``work`` seconds each through all stages; see the module.

    Where the last backward need not go back whole (W split off, several stages on a rank, no end of the batch), this
    has that a rank does its share of the work alone, and :mod:`autopart.solver.stages_least` more. warmup: of 1F1B,
    where it is not the least.
    """
    if config.schedule not in WHOLE_SCHEDULES:
        return config.microbatches * work / config.pp
    return work * least_step(config.microbatches, in_flight(config.schedule, config.pp, config.microbatches, warmup))


def one_stage_floor(seconds: float, sums: float, config: Degrees) -> float:
    """Least seconds of a step in one stage, whose microbatches take ``seconds`` each, parts of the step's end included.

    sums: of gradients, at most. The last backward hides no more than these, and no more than a microbatch takes.
    """
    hidden = 0.0 if config.schedule in STEADY_SCHEDULES else min(sums, seconds)
    return pipeline_floor(seconds, config) - hidden
