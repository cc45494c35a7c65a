"""What is chosen last, with stages and strategies as they are: how far 1F1B runs ahead, and how large messages are.

Candidates are solved, compared and bounded with the least warm-up, and with messages of gradients of a size that knows
the bytes of all of them alone (:mod:`autopart.bucket_size`). Of a plan both are tried over, each on its simulated step:
a deeper warm-up hides transfers where memory has room for more microbatches in flight; with another size less may be in
the last message, which nothing hides, as that jumps with where parameters and layers end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from autopart.answers import Answer
from autopart.bucket_size import UNIT
from autopart.candidates import Candidates
from autopart.crossing_memory import sent_ahead
from autopart.describe import describe
from autopart.plan import Plan
from autopart.predict import simulate_plan
from autopart.report.units import format_bytes
from autopart.runtime.schedule import deeper_warmup, in_flight
from autopart.solver.degrees import Config, Degrees
from autopart.solver.stages_problem import StageProblem, Way

LEAST_GAIN = 0.001
"""Share of a step by which another choice has to be faster."""
_MOST_AHEAD = 4
_SIZES = tuple(units * UNIT for units in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128))


def with_other_messages(candidates: Candidates, answer: Answer, plan: Plan) -> Plan:
    """The plan of an answer, or that with messages of the best other size."""
    config, way = answer.config, answer.way
    ends = max(stage.step_end_s for stage in plan.stages)
    if candidates.bucket is not None or config.dp == 1 or ends < 10 * LEAST_GAIN * plan.step_time_s:
        return plan
    least, best = (1 - LEAST_GAIN) * candidates.seconds_of(answer), None
    for size in _SIZES:
        other = candidates.with_messages(size)
        again = replace(answer, problem=other.problem(config, answer.choice))
        if again.problem.excess_bytes(way) <= 0 and (seconds := other.seconds_of(again)) < least:
            least, best = seconds, (other, again)
    found = plan if best is None else describe(*best)
    return found if found.step_time_s < (1 - LEAST_GAIN) * plan.step_time_s else plan


def with_deeper_warmup(plan: Plan, problem: StageProblem, way: Way, held: Callable[[StageProblem, int], float]) -> Plan:
    """The plan of these stages under 1F1B, or that in which they run further ahead, where it fits.

    held: bytes of a stage under a problem.
    """
    while plan.schedule == "1f1b" and len(plan.stages) > 1 and _waits(plan):
        depth = plan.warmup[-2] + 1 if plan.warmup else 2
        warmup = deeper_warmup(len(plan.stages), depth)
        flying = in_flight("1f1b", len(plan.stages), plan.microbatches, warmup, plan.places)
        deeper = replace(problem, in_flight=tuple(flying), ahead=sent_ahead(flying))
        if depth > _MOST_AHEAD or deeper.excess_bytes(way) > 0:
            break
        stages = [replace(stage, memory_bytes=round(held(deeper, at))) for at, stage in enumerate(plan.stages)]
        if any(stage.memory_bytes > stage.capacity_bytes for stage in stages):
            break
        other = replace(plan, stages=tuple(stages), warmup=warmup)
        other = replace(other, step_time_s=simulate_plan(other).makespan_s + other.tied_s)
        if other.step_time_s >= (1 - LEAST_GAIN) * plan.step_time_s:
            break
        plan = other
    return plan


def unbounded(candidates: Candidates, config: Config, plan: Plan) -> list[str]:
    """A note of what a plan was given here, which its lower bound knows nothing of."""
    known = []
    if plan.warmup and candidates.warmup is None:
        known.append("the least warm-up")
    if isinstance(config, Degrees) and plan.bucket_bytes != (size := candidates.bucket_bytes(config)):
        known.append(f"messages of {format_bytes(size)}")
    if not known:
        return []
    return [
        f"the lower bound is of plans with {' and '.join(known)}: this one takes less without, and others may as well"
    ]


def _waits(plan: Plan) -> bool:
    """Whether a step takes longer than if no stage waited for a transfer."""
    own = [stage.forward_s + stage.backward_s for stage in plan.stages]
    least = math.fsum(own) + (plan.microbatches - 1) * max(own) + plan.tied_s
    return (1 - LEAST_GAIN) * plan.step_time_s > least
