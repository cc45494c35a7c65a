r"""Divides blocks into p pipeline stages on a row of devices: the shortest step of m microbatches that fits in memory.

A stage s has a slot (a run of devices with a mesh) and the blocks between two positions (a convex piece of the graph),
each in one of its choices, such as with recomputation. Its busy time per microbatch t_s holds its blocks' forward and
backward and its own sends and receives, which are taken as not overlapped. With x_s the seconds of crossing from stage
s to the next, both ways, the largest of what the two sides need on the link between them, each alone and together:

    minimise  sum_s (block seconds)_s + sum_s x_s                         the first microbatch's way through and back
              + (m - 1) max_s t_s                                         the others, at the slowest stage's pace
              + max_s step_end_s + sum_{tied groups over several stages} seconds                  once per step

    state + tied + in_flight[s] * (activations + what crosses) + transient peak + buffers + overhead <= capacity(slot)
                                                                                                    for every s

A layer's blocks that are in one stage are run in one way, as a unit (:class:`stages_parts.Layer`), and a tensor that
several blocks keep counts once (:class:`stages_parts.KeptGroup`).
Seconds of the blocks appear in every term with a positive sign, and choices of one stage bind no other: so a stage has
the fastest choices that fit into its memory, d[s,a,b] seconds (:mod:`autopart.solver.stages_choices`). What remains is
a way through the arcs (s, slot k, positions a, b) of :mod:`autopart.solver.stages_graph`, of which those that do not
fit are left out; h is the shape of the stage before:

    y[s,k,a,b,h] in {0, 1};  one arc for each stage                                                     _add_flow
    sum y[s,k,a,b,h] = sum y[s+1,l,b,c,h']  with l starting at the place where k stops, h' = shape(k)   _add_flow
    T >= sum t[k,a,b] y[s,k,a,b,h] and E >= sum step_end[k,a,b] y[s,k,a,b,h]  for every stage s         _add_maximum
    minimise  sum (once[k,a,b] + x[h,k,a]) y[s,k,a,b,h] + (m - 1) T + E

The two maxima are what makes it hard: with both bounded from above, the cheapest sum is a shortest way. So the search
first goes over boxes of (T, E). In a box, the cheapest sum under its upper limits, with the smallest T and the smallest
E under them, bounds every way from below, and each way found is a candidate. Boxes that may hold something better are
halved (:mod:`autopart.solver.stages_boxes`). If that takes more than ``max_programs`` boxes, the arcs that can still be
part of a better way form the model above, which CP-SAT solves (:mod:`autopart.solver.stages_model`). d is a bound at
first, and made exact for the arcs of every way that is found, until the best way has exact arcs alone. Objective and
bound count as equal when they differ by less than TOLERANCE of the objective.

Where the schedule's own seconds are asked for, divisions that these find better are tried as well
(:mod:`autopart.solver.stages_trips`, and :mod:`autopart.solver.stages_ranks` where ranks run several stages or W is
apart, of which the formula is a guess that few boxes have to do for).

Where there are many positions, a division at few of them comes first (:mod:`autopart.solver.stages_few`): runs of
blocks that alone take too long to be part of a better one are left out.

Positions decide how exact that is for a graph that is no chain: with all of them (:func:`stages_order.positions`) no
convex division is left out; with those of some orders, only divisions that cut one of these orders are considered.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from autopart.report.units import format_bytes, format_enough
from autopart.runtime.errors import InfeasibleError, PlanError
from autopart.solver import time_limits
from autopart.solver.search_space import NotBetter
from autopart.solver.stages_boxes import BoxSearch
from autopart.solver.stages_few import most_seconds, spread
from autopart.solver.stages_graph import StageGraph
from autopart.solver.stages_model import solve_rest
from autopart.solver.stages_problem import StageProblem, StageSolution, Step, Way
from autopart.solver.stages_ranks import balanced
from autopart.solver.stages_trips import Timed, faster_way, raised_floor
from autopart.solver.stages_ways import Found, least_sum, smallest_maximum
from autopart.solver.tensor_problem import relative_gap

LeastStep = Callable[[float, float, float], float]
"""Of a microbatch's seconds forward, and all of them, the least of a step; no interest in more than the third says."""
MAX_PROGRAMS = 300
# A division at some of the positions is sought first, where there are at least twice as many.
_FEW, _FEW_A_STAGE, _FEW_PROGRAMS = 64, 3, 20
_ORDERED_PROGRAMS = 6
"""Boxes for orders other than 1F1B's and GPipe's, of which the formula is a guess."""


def solve(
    problem: StageProblem,
    time_limit_s: float = 60.0,
    *,
    max_programs: int = MAX_PROGRAMS,
    below: float = math.inf,
    least_step: LeastStep | None = None,
    steady: bool = False,
    timed: Timed | None = None,
    places: Sequence[int] = (),
    known: Way = (),
) -> StageSolution:
    """The division into stages with the shortest step, or the best found in ``time_limit_s``.

    max_programs: boxes to go over before the integer solver takes the rest. below: of interest are only divisions whose
    steps take fewer seconds; NotBetter is raised where surely none does. least_step: None: steps are of some 1F1B or
    GPipe order, with a rank for each stage; else, of any order, the seconds at least. steady: in that order no stage
    waits for those before, as batches follow each other without a gap. timed: what steps take, by which divisions in a
    row are compared in the end; what is best by the formula may not be. places: the rank of each stage, with a
    ``least_step``. known: a division, than which the one returned is no worse where it fits.
    Raises InfeasibleError, with the stage and the bytes that bind and the capacity that would do, when none fits;
    PlanError when there are too few blocks.
    """
    start = time.perf_counter()
    until = start + time_limit_s
    last = len(problem.positions) - 1
    if problem.stages == 1 and last > 1:  # there is one division
        known = tuple(replace(step, last=1) for step in known)
        fewer = problem.at((0, last))
        found = solve(
            fewer,
            time_limit_s,
            max_programs=max_programs,
            below=below,
            least_step=least_step,
            steady=steady,
            known=known,
        )
        return replace(found, way=tuple(replace(step, last=last) for step in found.way))
    begun = [known] if known else []
    most = below / problem.microbatches
    if most == math.inf:
        begun.append(_few_positions(problem, until))
        most = most_seconds(problem, begun[-1])
    graph = _graph(problem, most)
    beyond = below if below < math.inf else problem.microbatches * most  # seconds of what is left out
    try:
        floor = min(_floor(graph)[0] if least_step is None else _work_floor(graph, least_step, below, steady), beyond)
    except InfeasibleError:
        if below < math.inf and _fits(_graph(problem)):  # by stages that were left out for their seconds
            raise NotBetter(below, below) from None
        raise
    if floor >= below:
        raise NotBetter(floor, floor)
    search = BoxSearch(problem, graph, until)
    for way in filter(None, begun):
        search.offer(way)
    in_turn = least_step is None  # other orders take what the formula does not know
    bound = search.run(max_programs if in_turn else min(max_programs, _ORDERED_PROGRAMS))
    method = "dynamic program"
    if in_turn and not search.meets(bound):
        proved = solve_rest(search)
        bound, method = max(bound, min(proved, search.objective)), "cp-sat"
    if search.meets(bound):
        bound = search.objective
    time_limits.ended(until)
    way, objective = search.way, search.objective
    if timed is not None:
        ways = [way, known] if known and problem.excess_bytes(known) <= 0 else [way]
        if in_turn:
            way, least = faster_way(graph, min(ways, key=timed), floor, timed)
            floor = min(least, beyond)
        else:
            way = min(dict.fromkeys([*ways, *balanced(graph, way, places)]), key=timed)
        objective = problem.objective(way)
    return StageSolution(
        way=way,
        objective=objective,
        bound=bound,
        gap=relative_gap(objective, bound),
        lower_bound_s=floor,
        seconds=time.perf_counter() - start,
        programs=search.programs,
        method=method,
    )


def least_seconds(problem: StageProblem, below: float = 0.0) -> float:
    """StageSolution.lower_bound_s alone, with sums that pass the last backward. Raises as :func:`solve` does.

    below: seconds up to which a higher bound is sought.
    """
    graph = _graph(problem, late=True)
    return raised_floor(graph, _floor(graph)[0], below)


def _few_positions(problem: StageProblem, until: float) -> Way:
    """A good division at few of the positions, where there are many; empty where none of these fits."""
    kept = spread(problem, max(_FEW, _FEW_A_STAGE * problem.stages))
    if 2 * len(kept) > len(problem.positions):
        return ()
    fewer = problem.at(kept)
    graph = _graph(fewer)
    if not _fits(graph):
        return ()
    search = BoxSearch(fewer, graph, until)
    search.run(_FEW_PROGRAMS)
    return tuple(replace(step, first=kept[step.first], last=kept[step.last]) for step in search.way)


def _graph(problem: StageProblem, most_seconds: float = math.inf, late: bool = False) -> StageGraph:
    if problem.stages > len(problem.blocks):
        raise PlanError(
            f"{problem.stages} stages need as many blocks, but there are {len(problem.blocks)}; "
            f"use at most {len(problem.blocks)} stages"
        )
    return StageGraph.build(problem, most_seconds, late)


def _fits(graph: StageGraph) -> bool:
    """Whether some division does."""
    return smallest_maximum(graph, np.where(graph.fits, graph.busy, np.inf)) is not None


def _floor(graph: StageGraph) -> Found:
    found = smallest_maximum(graph, np.where(graph.fits, graph.floor, np.inf))
    if found is None:
        raise _infeasible(graph.problem, graph)
    return found


def _work_floor(graph: StageGraph, least_step: LeastStep, below: float, steady: bool) -> float:
    """Seconds of a step at least, in whatever order: before a stage's first forward come those of the stages before,
    unless it is steady, and from then on its rank has all its work; and what the order makes of all work.
    """
    seconds = np.where(graph.fits, graph.seconds, np.inf)
    before = 0.0 if steady else graph.forward[graph.runs.first]
    found = smallest_maximum(graph, graph.problem.microbatches * seconds + before)
    if found is None:
        raise _infeasible(graph.problem, graph)
    if found[0] >= below:
        return found[0]
    return max(found[0], least_step(float(graph.forward[-1]), least_sum(graph, seconds), below))


def _infeasible(problem: StageProblem, graph: StageGraph) -> InfeasibleError:
    """Which stage is over memory at least, by how many bytes, and the capacity that would do."""
    least = smallest_maximum(graph, graph.excess)
    if least is None:
        if graph.most_seconds < math.inf:
            raise NotBetter(problem.microbatches * graph.most_seconds, 0.0)
        if not all(graph.slots):
            return InfeasibleError(
                f"no {problem.stages} stages can be placed on the devices with the meshes that are offered; "
                "use another number of stages, or offer other meshes"
            )
        pins = ", ".join(f"{problem.blocks[block].name} on stage {stage}" for block, stage in problem.pins)
        return InfeasibleError(
            f"no division of {len(problem.blocks)} blocks into {problem.stages} stages has what is pinned ({pins}): "
            "a pin leaves too few blocks before, behind or between; move it or use fewer stages"
        )
    over, way = least
    tables = [dict(found)[step.slot] for found, step in zip(graph.slots, way, strict=True)]
    number = graph.runs.number
    stage = max(range(problem.stages), key=lambda s: float(graph.excess[tables[s], number(way[s].first, way[s].last)]))
    step = _leanest(problem, stage, way[stage])
    inside = problem.blocks_between(step.first, step.last)
    names = [problem.blocks[block].name for block in inside]
    named = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
    slot = problem.slots[step.slot]
    named += f" on {problem.shapes[slot.shape].name}" if problem.shapes[slot.shape].name else ""
    in_flight = problem.in_flight[stage]
    running, kept = problem.running_bytes(stage, step), problem.flying_bytes(stage, step)
    what = (
        f"{format_bytes(kept)} activations of {in_flight} microbatch{'es' if in_flight > 1 else ''} in flight, "
        f"{format_bytes(running - kept)} what the largest op takes, and buffers"
    )
    advice = "or more devices, or smaller microbatches where they have several samples"
    update = problem.shapes[slot.shape].passing.update_bytes(inside)
    if update > running:
        what, advice = f"{format_bytes(update)} are made by the optimizer for its step", "or more devices"
    overhead = problem.shapes[slot.shape].overhead_bytes
    if overhead >= slot.capacity_bytes:
        advice = "nothing else does, as what a process takes is all that they have"
    if overhead:
        what += f", {format_bytes(overhead)} are what a process takes besides its tensors, as CUDA and its libraries do"
    enough = f"Devices with {format_enough(slot.sharing * (slot.capacity_bytes + over))}"
    if len({other.capacity_bytes for other in problem.slots}) > 1:
        enough = f"{format_enough(slot.sharing * over)} more on every device"
    shared = f", as {slot.sharing} stages share a device's" if slot.sharing > 1 else ""
    held, state = problem.stage_bytes(stage, step), problem.state_bytes(step)
    return InfeasibleError(
        f"no cut into {problem.stages} stage{'s' if problem.stages > 1 else ''} fits: in the best one stage {stage} "
        f"({named}) holds {format_bytes(held)}, {format_bytes(over)} ({over:.0f} bytes) over its capacity of "
        f"{format_bytes(slot.capacity_bytes)}{shared}; {format_bytes(state)} of it are parameters with gradients and "
        f"optimizer state, {what}. {enough} would do; {advice}",
        over,
    )


def _leanest(problem: StageProblem, stage: int, step: Step) -> Step:
    """The stage with the choices that need the fewest bytes."""
    units, in_flight = problem.units(step), problem.in_flight[stage]
    tried = []
    for most in {choice.transient_bytes for _, family in units for choice in family}:
        made = []
        for part, family in units:
            allowed = [
                (choice.kept_bytes(in_flight), index)
                for index, choice in enumerate(family)
                if choice.transient_bytes <= most
            ]
            made += [(block, min(allowed)[1]) for block in part if allowed]
        if len(made) == sum(len(part) for part, _ in units):
            whole = Step(step.slot, step.first, step.last, tuple(item for item in made if item[1]))
            tried.append((problem.stage_bytes(stage, whole), whole.choices, whole))
    return min(tried)[2]
