"""Planning: which mesh, which microbatches, which strategies, which stages, and how far from the best that can be.

Candidates are all pp x dp x tp of the devices with all numbers of microbatches (see autopart.solver.degrees). For each
one the tensor solver chooses strategies, which gives every block its seconds and bytes, and the stage solver cuts the
chain of blocks (:mod:`autopart.candidates`). The search takes the promising candidates first
(:mod:`autopart.estimates`), and none of which a bound says that it cannot be faster. The fastest are timed again on the
graphs that will be emitted (:mod:`autopart.describe`), which know what passes beside ops, and the fastest of them wins.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from autopart.analysis import Analysis, analyze
from autopart.candidates import Candidates
from autopart.cluster import Cluster
from autopart.cluster_notes import speeds
from autopart.collection import seldom_collected
from autopart.earlier_plans import EarlierPlans
from autopart.given_limits import (
    Limits,
    check_counts,
    check_dropout,
    check_given,
    check_seconds,
    check_warmups,
    read_limits,
)
from autopart.overfull import Overfull, overfull, with_capacities, with_share
from autopart.passes.program import Program
from autopart.passes.rules import RULES, RuleBook
from autopart.plan import Plan
from autopart.plan_finish import unbounded
from autopart.plan_notes import notes, unfactored, untried, whole_nodes
from autopart.plan_space import AnyAnswer, PlanSpace
from autopart.runtime.errors import InfeasibleError
from autopart.solver.search import SearchResult, search
from autopart.solver.search_outcomes import Considered
from autopart.solver.search_space import Effort, NotBetter
from autopart.solver.tensor_problem import relative_gap
from autopart.step_time import WHOLE_SCHEDULES
from autopart.tensor_scheme import TensorScheme
from autopart.wishes import recorded

MOST_OPS, LEAST_TRIED, LAST_TRIED = 60_000, 16, 8
"""Ops of all configurations that are tried unasked in the order of estimates, and how many of these at least; and how
many of those left in the order of bounds."""
MOST_AGAIN = 4
"""How often planning is repeated with less memory, as the code of a plan holds too much."""
MOST_TIGHTENED = 24
"""Configurations, of those whose bounds are the smallest, that are bounded by a solver of their own in the end."""


@seldom_collected()
def make_plan(
    program: Program,
    cluster: Cluster,
    *,
    batch: int | None = None,
    pp: int | None = None,
    dp: int | None = None,
    tp: int | Sequence[int] | str | None = None,
    tensor_scheme: TensorScheme | str = TensorScheme.AUTO,
    microbatches: int | None = None,
    schedule: str | None = None,
    warmup: int | Sequence[int] | None = None,
    virtual: int | None = None,
    recompute: str = "auto",
    together: Sequence[Sequence[str]] | None = None,
    pins: Mapping[str, int] | None = None,
    zero: int | None = None,
    meshes: str = "auto",
    bucket_bytes: int | None = None,
    optimizer: str = "adamw",
    dropout: str = "torch",
    time_limit_s: float = 60.0,
    thorough: bool = False,
    below: float = math.inf,
    analysis: Analysis | None = None,
    rules: RuleBook = RULES,
    earlier: EarlierPlans | None = None,
) -> Plan:
    """The fastest plan found, with its lower bound; what is given is forced.

    tp: devices that share tensors, or the sizes of their axes, outermost first: (2, 4) or "2x4". Where it is not given
    one axis is searched, and more where one is short of something (:mod:`autopart.several_axes`); within a node
    first (:mod:`autopart.wide_ranks`) unless pp and dp are given.
    tensor_scheme: 1d, sp, 2d, 2.5d or 3d (:mod:`autopart.tensor_scheme`) for products with weights, on the axes that
    it is for; the rest is chosen. auto: all is chosen.
    batch: samples of a step over all replicas (default: those of the example inputs). warmup: of 1F1B, forwards that
    each stage runs ahead of the next (1: the least; 2 hides transfers), or one number of forwards for each stage.
    schedule: a name of runtime.schedule.NAMES (default: 1f1b), or "auto": 1f1b, zb-h1, zb-v and interleaved are tried.
    virtual: of interleaved, stages on each rank of the pipeline (default: 2).
    together: groups of patterns of module paths, [["encoder.*", "embed"]]: these modules on one stage. pins: pattern
    -> stage, {"decoder.layers.3": 2}; see :mod:`autopart.pins`.
    recompute: layers whose activations are computed again in the backward: "none", "full" (all), or "auto": layers, or
    modules in them, as memory asks for. dropout: "torch", or "invariant", whose masks are the same under every plan and
    in one process.
    zero: what replicas divide between them of every parameter that can be: 0 nothing, 1 the optimizer's state, 2
    gradients too, 3 weights too; None: nothing where it fits, else chosen for each parameter.
    meshes: equal: all stages have one, whose replicas have equal parts of the batch; unlike: stages may differ in
    replicas and tensor ranks, and replicas in their parts; auto: equal, and unlike where that can win
    (:func:`autopart.plan_space.unlike_can_win`), or the batch does not divide by the replicas that were asked for.
    bucket_bytes: of gradients that share a message; None: by what these take to sum (:mod:`autopart.bucket_size`).
    optimizer: none, sgd, momentum, adagrad, rmsprop, adam or adamw, whose state and step are counted. microbatches: of
    each replica's batch.
    time_limit_s: for each solver call. thorough: try all configurations that may be faster than the best; else some of
    a large model (:data:`MOST_OPS`), and none that takes long to search and may gain less than the share WORTH: the gap
    says what those that are left may gain.
    below: seconds that a step has to stay below to be of interest.
    rules: what ops allow (``RULES.extended({...})`` adds a user's own); an ``analysis`` that is given has its own.
    earlier: of plans with this analysis and these limits on other clusters, whose work is not repeated.
    Raises InfeasibleError when nothing fits in memory, BatchError when the model's batch may not be split that way,
    PlanError for contradicting limits, NotBetter of :mod:`autopart.solver.search_space` when no plan found stays below.
    """
    start = time.perf_counter()
    check_given(program, cluster, rules)
    check_counts({"batch": batch, "pp": pp, "dp": dp, "microbatches": microbatches, "virtual": virtual})
    check_counts({"bucket_bytes": bucket_bytes})
    check_seconds(time_limit_s, below)
    check_warmups(warmup)
    check_dropout(dropout)
    degrees_given = {"pp": pp, "dp": dp, "tp": tp, "microbatches": microbatches, "schedule": schedule}
    others_given = {"virtual": virtual, "recompute": recompute, "zero": zero, "meshes": meshes, "warmup": warmup}
    forced = recorded({**degrees_given, **others_given, "bucket_bytes": bucket_bytes})
    analysis = analysis or analyze(program, rules)
    limits = read_limits(
        analysis,
        batch=batch,
        pp=pp,
        dp=dp,
        tp=tp,
        microbatches=microbatches,
        schedule=schedule,
        virtual=virtual,
        warmup=warmup,
        tensor_scheme=tensor_scheme,
        recompute=recompute,
        zero=zero,
        meshes=meshes,
        bucket_bytes=bucket_bytes,
        together=together,
        pins=pins,
    )
    known = earlier or EarlierPlans()
    solving = time.perf_counter()

    def fastest(part: Cluster) -> tuple[PlanSpace, SearchResult[AnyAnswer]]:
        candidates = known.take(part, lambda: _candidates(analysis, part, limits, optimizer, time_limit_s, known))
        space = PlanSpace(candidates, limits, known, thorough)
        found = search(space.first, space, effort=_effort(analysis, limits, thorough), below=below)
        known.best = found.config
        return space, found

    def over_memory(plan: Plan) -> Overfull | None:
        return None if known.less_memory else overfull(plan, analysis, cluster)  # a frontier's bytes are what it counts

    found = _within_memory(fastest, over_memory, cluster)
    solved = time.perf_counter()
    plan, result, candidates = found.plan, found.result, found.space.candidates
    bound = min(found.bound_s, plan.step_time_s)
    return replace(
        plan,
        bound_s=bound,
        gap=relative_gap(plan.step_time_s, bound),
        solve_s=solved - solving,
        total_s=time.perf_counter() - start,
        dropout=dropout,
        pins=dict(pins or {}),
        together=tuple(map(tuple, together or ())),
        tensor_scheme=limits.scheme.value,
        asked=forced,
        notes=(
            *plan.notes,
            *speeds(cluster),
            *notes(candidates, result.answer, plan.step_time_s),
            *unbounded(candidates, result.config, plan),
            *(unfactored(candidates, found.space.first, result.considered, bound) if limits.free_axes else ()),
            *whole_nodes(cluster, result.considered),
            *(() if thorough else untried(result.considered, bound)),
            *found.notes,
        ),
        considered=tuple(_row(item) for item in result.considered),
    )


class _Fits(NamedTuple):
    """The fastest plan whose code its devices have room for. space, result: of the search that found it.

    bound_s: no plan takes less. notes: of what less memory it was planned for.
    """

    space: PlanSpace
    result: SearchResult[AnyAnswer]
    plan: Plan
    bound_s: float
    notes: tuple[str, ...] = ()


def _within_memory(
    fastest: Callable[[Cluster], tuple[PlanSpace, SearchResult[AnyAnswer]]],
    over_memory: Callable[[Plan], Overfull | None],
    cluster: Cluster,
) -> _Fits:
    """The fastest plan by what plans count on, or, where its code holds more than a device has, for as much less.

    fastest: of a cluster. over_memory: a rank of a plan whose code holds too much. Where nothing fits in as much less,
    half as much less is tried.
    Raises what ``fastest`` does, InfeasibleError.
    """
    space, result = fastest(cluster)
    found = _Fits(space, result, space.plan_of(result.answer), result.bound)
    over = over_memory(found.plan)
    share, least = 1.0, 0.0  # for which plans' code holds too much, and in which nothing fits
    failure = "it holds too much as well"
    for _ in range(MOST_AGAIN):
        if over is None:
            break
        less = max(share * over.share, (share + least) / 2)
        note = f"planned for {less:.1%} of the memory, as {over}"
        try:
            space, result = fastest(with_share(cluster, less))
        except (InfeasibleError, NotBetter) as error:
            least, failure = less, str(error)
            continue
        plan = with_capacities(space.plan_of(result.answer), cluster, less)
        share, found = less, _Fits(space, result, plan, min(found.bound_s, result.bound), (note,))
        over = over_memory(plan)
    if over is not None:
        told = f"{over}; planned for less memory, {failure}"
        raise InfeasibleError(told, over.held_bytes - over.room_bytes)
    return found


def _candidates(
    analysis: Analysis, cluster: Cluster, limits: Limits, optimizer: str, time_limit_s: float, known: EarlierPlans
) -> Candidates:
    return Candidates(
        *(analysis, cluster, limits.batch, optimizer, time_limit_s, limits.warmup, limits.pins, limits.zero),
        limits.scheme,
        all_levels=known.less_memory,
        bucket=limits.bucket_bytes,
    )


def _effort(analysis: Analysis, limits: Limits, thorough: bool) -> Effort:
    """Of a large model not all is tried; under other schedules than 1F1B and GPipe, of which each takes the solver
    several times as long and raises no bound, half as much.
    """
    in_turn = [name in WHOLE_SCHEDULES for name, _ in limits.schedules]
    most = max(LEAST_TRIED, MOST_OPS // len(analysis.block_of)) // (1 if any(in_turn) else 2)
    return Effort(most=None if thorough else most, tightened=MOST_TIGHTENED, last=LAST_TRIED if all(in_turn) else 0)


def _row(item: Considered) -> dict[str, object]:
    return {
        "config": str(item.config),
        "status": item.status.value,
        "seconds": item.seconds,
        "reason": item.reason.splitlines()[0],
    }
