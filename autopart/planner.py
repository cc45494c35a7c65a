"""Planning: which mesh, which microbatches, which strategies, which stages, and how far from the best that can be.

Candidates are all pp x dp x tp of the devices with all numbers of microbatches (see autopart.solver.degrees). For each
one the tensor solver chooses strategies, which gives every block its seconds and bytes, and the stage solver cuts the
chain of blocks (:mod:`autopart.candidates`). The search takes the promising candidates first
(:mod:`autopart.estimates`), and none of which a bound says that it cannot be faster. The fastest are timed again on the
graphs that will be emitted (:mod:`autopart.describe`), which know what passes beside ops, and the fastest of them wins.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from autopart.analysis import Analysis, analyze
from autopart.candidates import Answer, Candidates
from autopart.cluster import Cluster
from autopart.cluster_notes import speeds
from autopart.collection import seldom_collected
from autopart.describe import describe
from autopart.describe_unlike import describe_unlike
from autopart.earlier_plans import EarlierPlans
from autopart.estimates import Estimates
from autopart.given_limits import check_counts, check_given, check_seconds, check_warmups, is_whole
from autopart.mesh_prices import MeshPrices
from autopart.passes.data_axis import LEVELS
from autopart.passes.program import Program
from autopart.passes.rules import RULES, RuleBook
from autopart.pins import check_stages, read_pins
from autopart.plan import DROPOUT, Plan, check_warmup
from autopart.plan_notes import notes, unfactored, untried
from autopart.recomputation import RECOMPUTE
from autopart.runtime.errors import BatchError, InfeasibleError, PlanError
from autopart.runtime.schedule import NAMES
from autopart.several_axes import several_axes
from autopart.solver.degrees import Degrees, UnlikeMeshes, degrees, read_axes
from autopart.solver.search import WORTH, Considered, Evaluation, NotBetter, search
from autopart.solver.tensor_problem import relative_gap
from autopart.step_time import WHOLE_SCHEDULES
from autopart.tensor_scheme import TensorScheme
from autopart.unlike import UnlikeCandidates
from autopart.unlike_answer import UnlikeAnswer

MOST_UNLIKE = 16
"""Alike devices up to which unlike meshes are searched, where equal ones can be."""
MOST_OPS, LEAST_TRIED, LAST_TRIED = 60_000, 16, 8
"""Ops of all configurations that are tried unasked in the order of estimates, and how many of these at least; and how
many of those left in the order of bounds."""
MOST_TIGHTENED = 24
"""Configurations, of those whose bounds are the smallest, that are bounded by a solver of their own in the end."""
UNBALANCED = 1.2
"""Seconds of the slowest stage over the mean of all, from which unlike meshes are searched."""
MESHES = ("auto", "equal", "unlike")


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
    one axis is searched, and more where one is short of something (:mod:`autopart.several_axes`), within a node
    unless pp and dp are given.
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
    meshes: equal: all stages have one; unlike: stages may differ in replicas and tensor ranks; auto: equal, and
    unlike where that can win (:func:`unlike_can_win`).
    time_limit_s: for each solver call. thorough: try all configurations that may be faster than the best; else some of
    a large model (:data:`MOST_OPS`), and none that takes long to search and may gain less than the share WORTH: the gap
    says what those that are left may gain.
    below: seconds that a step has to stay below to be of interest.
    rules: what ops allow (``RULES.extended({...})`` adds a user's own); an ``analysis`` that is given has its own.
    earlier: of plans with this analysis and these limits on other clusters, whose work is not repeated.
    Raises InfeasibleError when nothing fits in memory, BatchError when the model's batch may not be split that way,
    PlanError for contradicting limits, NotBetter of :mod:`autopart.solver.search` when no plan found stays below.
    """
    start = time.perf_counter()
    check_given(program, cluster, rules)
    check_counts({"batch": batch, "pp": pp, "dp": dp, "microbatches": microbatches, "virtual": virtual})
    check_seconds(time_limit_s, below)
    check_warmups(warmup)
    analysis = analysis or analyze(program, rules)
    batch = batch or program.batch
    if recompute not in RECOMPUTE:
        raise PlanError(f"recompute is one of {', '.join(RECOMPUTE)}, not {recompute!r}")
    if dropout not in DROPOUT:
        raise PlanError(f"dropout is one of {', '.join(DROPOUT)}, not {dropout!r}")
    if meshes not in MESHES:
        raise PlanError(f"meshes is one of {', '.join(MESHES)}, not {meshes!r}")
    scheme = _scheme(tensor_scheme)
    if zero is not None and not (is_whole(zero) and zero in LEVELS):
        raise PlanError(f"zero is one of {', '.join(map(str, LEVELS))} or None (chosen), not {zero!r}")
    if zero and schedule == "2bw":
        raise PlanError("the schedule 2bw keeps two versions of whole weights; leave zero out, or use 2bw-flush")
    if analysis.split.flaw:
        if (dp or 1) > 1 or (microbatches or 1) > 1:
            raise BatchError(
                f"the batch may not be split: {analysis.split.flaw}; use one replica and one microbatch, "
                "and pipeline or tensor parallelism instead"
            )
        dp, microbatches = 1, 1
    schedules = _schedules(program, schedule, virtual)
    schedule = schedules[0][0] if len(schedules) == 1 else "auto"
    if warmup is not None and not isinstance(warmup, int):
        warmup, pp = tuple(warmup), pp or max(1, len(warmup))
        check_warmup(schedule, warmup, pp)
    elif warmup is not None:
        check_warmup(schedule, (warmup,), 1)
    asked = {"zero": zero, "warmup": warmup if isinstance(warmup, int) else None}
    pinned = read_pins(analysis, together or (), pins)
    check_stages(analysis, pp, pinned, together, pins)
    samples, known = batch, earlier or EarlierPlans()
    candidates = known.take(
        cluster,
        lambda: Candidates(
            *(analysis, cluster, samples, optimizer, time_limit_s, warmup, pinned, zero, scheme),
            all_levels=known.less_memory,
        ),
    )
    axes = None if tp is None else read_axes(tp)
    unlike: UnlikeCandidates | None = None
    most_samples = program.most_samples

    @functools.cache
    def others() -> tuple[UnlikeMeshes, ...]:
        """Made when they are asked for: the runs of many devices are many."""
        nonlocal unlike
        if meshes == "equal" or isinstance(axes, tuple) or scheme is not TensorScheme.AUTO:
            return ()
        unlike = UnlikeCandidates(MeshPrices(candidates, dp, axes))
        found = unlike.configs(pp, microbatches, schedules, recompute)
        return tuple(
            config
            for config in found
            if config.stages >= pinned.least_stages
            and (not most_samples or batch <= config.microbatches * most_samples)
        )

    if meshes == "unlike" and not others():
        raise PlanError(
            "meshes=unlike: no stages of unlike meshes are left under these limits; they need several devices, one "
            "tensor axis at most, and degrees and microbatches that leave them a choice: leave out what is forced, or "
            "meshes"
        )
    free_axes = scheme is TensorScheme.AUTO and tp is None
    configs: tuple[Degrees | UnlikeMeshes, ...] = ()
    if meshes != "unlike":
        try:
            configs = _equal(candidates, pp, dp, tp, microbatches, schedules, recompute)
        except PlanError:
            uneven = len(set(cluster.nodes)) > 1 or cluster.device_count & (cluster.device_count - 1)
            if not uneven or not others():
                raise
    solving = time.perf_counter()

    estimates = Estimates(candidates)
    taken: dict[Degrees, float] = {}  # seconds of what was evaluated; as expected of what was stopped

    def evaluate(config: Degrees | UnlikeMeshes, below: float) -> Evaluation[Answer | UnlikeAnswer]:
        if isinstance(config, Degrees):
            try:
                evaluation = known.evaluate(config, below)
            except NotBetter as error:
                taken[config] = max(error.seconds, estimates.expected(config, error.seconds))
                raise
            taken[config] = evaluation.objective
            return cast(Any, evaluation)
        assert unlike is not None
        return cast(Any, unlike.evaluate(config, below))

    def lower_bound(config: Degrees | UnlikeMeshes) -> float:
        if isinstance(config, Degrees):
            return candidates.lower_bound(config)
        assert unlike is not None
        return unlike.lower_bound(config)

    def more(best: Any) -> list[Degrees | UnlikeMeshes]:
        found: list[Degrees | UnlikeMeshes] = []
        if free_axes:
            found += several_axes(
                candidates, [config for config in configs if isinstance(config, Degrees)], best, taken
            )
        if not configs or unlike_can_win(cluster, best):
            found += others()
        return found

    def refine(config: Degrees | UnlikeMeshes, below: float) -> float:
        if isinstance(config, Degrees):
            return candidates.work_floor(config, below)
        assert unlike is not None
        return unlike.refined(config, below)

    def rules_out(config: Degrees | UnlikeMeshes, below: float) -> bool:
        return isinstance(config, Degrees) and candidates.surely_takes(config, below)

    def unfit(config: Degrees | UnlikeMeshes) -> InfeasibleError | None:
        return candidates.unfit(config) if isinstance(config, Degrees) else None

    def tighten(config: Degrees | UnlikeMeshes, below: float) -> float:
        return candidates.last_floor(config, below) if isinstance(config, Degrees) else refine(config, below)

    def order(config: Degrees | UnlikeMeshes, floor: float) -> float:
        if config == known.best:
            return 0.0
        return estimates.expected(config, floor) if isinstance(config, Degrees) else floor

    described: dict[int, Plan] = {}  # by identity of the answer

    def settle(answer: Answer | UnlikeAnswer) -> tuple[Answer | UnlikeAnswer, float]:
        best = answer
        if isinstance(answer, Answer):
            found = describe(candidates, answer)
            for other in answer.others:
                # what divided parameters exchange makes most answers slower than they were taken to be
                if not other.choice.levels or candidates.seconds_of(other) < found.step_time_s:
                    timed = describe(candidates, other)
                    if timed.step_time_s < found.step_time_s:
                        best, found = other, timed
        else:
            assert unlike is not None
            found = describe_unlike(unlike, answer)
        described[id(best)] = found
        return best, found.step_time_s

    first = {*configs}

    def worth(config: Degrees | UnlikeMeshes) -> float:
        """Of what takes long, beside the first; and of hosts' seconds, which are known less well than that."""
        if thorough or not first:
            return 0.0
        cheap = isinstance(config, Degrees) and config in first and not candidates.starts_bind(config)
        return 0.0 if cheap else WORTH

    # under other schedules than 1F1B and GPipe each takes the solver several times as long, and raises no bound
    in_turn = [name in WHOLE_SCHEDULES for name, _ in schedules]
    most = None if thorough else max(LEAST_TRIED, MOST_OPS // len(analysis.block_of)) // (1 if any(in_turn) else 2)
    result = search(
        *(configs, evaluate, lower_bound),
        refine=refine,
        rules_out=rules_out,
        unfit=unfit,
        order=order,
        most=most,
        more=more,
        tighten=tighten,
        most_tightened=MOST_TIGHTENED,
        most_last=LAST_TRIED if all(in_turn) else 0,
        settle=settle,
        worth=worth,
        below=below,
    )
    solved = time.perf_counter()
    answer, plan, known.best = result.answer, described[id(result.answer)], result.config
    bound = min(result.bound, plan.step_time_s)
    return replace(
        plan,
        bound_s=bound,
        gap=relative_gap(plan.step_time_s, bound),
        solve_s=solved - solving,
        total_s=time.perf_counter() - start,
        dropout=dropout,
        pins=dict(pins or {}),
        together=tuple(map(tuple, together or ())),
        tensor_scheme=scheme.value,
        asked={name: value for name, value in asked.items() if value is not None},
        notes=(
            *plan.notes,
            *speeds(cluster),
            *notes(candidates, answer, plan.step_time_s),
            *(unfactored(candidates, configs, result.considered, bound) if free_axes else ()),
            *(() if thorough else untried(result.considered)),
        ),
        considered=tuple(_row(item) for item in result.considered),
    )


def unlike_can_win(cluster: Cluster, best: Evaluation[Answer | UnlikeAnswer] | None) -> bool:
    """Whether stages of unlike meshes are worth a search, after the best plan with equal ones.

    They are where devices are unlike; and of a few alike ones where their number is no power of two, which leaves equal
    meshes few choices, or where the chosen plan's slowest stage has much more to do than the mean.
    """
    count = cluster.device_count
    if count == 1:
        return False
    if len(set(cluster.nodes)) > 1:
        return True
    if count > MOST_UNLIKE:
        return False
    if count & (count - 1):
        return True
    if best is None:
        return False
    answer = best.answer
    busy = [answer.problem.busy_seconds(step) for step in answer.way]
    return max(busy) > UNBALANCED * sum(busy) / len(busy)


def _equal(
    candidates: Candidates,
    pp: int | None,
    dp: int | None,
    tp: int | Sequence[int] | str | None,
    microbatches: int | None,
    schedules: Sequence[tuple[str, int]],
    recompute: str,
) -> tuple[Degrees, ...]:
    """The configurations in which all stages have one mesh. Raises PlanError when there is none."""
    cluster, pinned = candidates.cluster, candidates.pins
    assert pinned is not None
    configs = degrees(
        cluster.device_count,
        candidates.batch,
        pp=pp,
        dp=dp,
        tp=tp,
        microbatches=microbatches,
        schedules=schedules,
        recompute=recompute,
        max_pp=pinned.most_stages,
        max_tp=None if tp or (pp and dp) else max(node.count for node in cluster.nodes),
        scheme=candidates.scheme,
    )
    if len(schedules) > 1:  # on one rank all schedules are one
        configs = tuple(config for config in configs if config.pp > 1 or config.schedule == "1f1b")
    stages = max(config.stages for config in configs)
    configs = tuple(config for config in configs if config.stages >= pinned.least_stages)
    most = candidates.analysis.program.most_samples
    if most:
        held = tuple(config for config in configs if candidates.batch <= config.dp * config.microbatches * most)
        if not held:
            raise PlanError(
                f"the model's code was captured for at most {most} samples at a time, and microbatches of a batch of "
                f"{candidates.batch} have more; give more microbatches, or leave them open"
            )
        configs = held
    least = candidates.least_samples
    held = tuple(config for config in configs if candidates.batch >= config.dp * config.microbatches * least)
    if configs and not held:
        raise PlanError(
            f"a batch norm of the model needs {least} samples at a time, and microbatches of a batch of "
            f"{candidates.batch} have fewer; give fewer microbatches or replicas, or a larger batch"
        )
    configs = held
    if not configs:
        raise PlanError(
            f"pins: stage {pinned.least_stages - 1} is named, but these limits and devices allow {stages} "
            f"stage{'s' if stages > 1 else ''}, counted from 0; raise pp, or pin on a lower stage"
        )
    return configs


def _scheme(wanted: TensorScheme | str) -> TensorScheme:
    try:
        return TensorScheme(wanted)
    except ValueError:
        names = ", ".join(scheme.value for scheme in TensorScheme)
        raise PlanError(f"tensor_scheme is one of {names}, not {wanted!r}") from None


def _schedules(program: Program, wanted: str | None, virtual: int | None) -> tuple[tuple[str, int], ...]:
    """What is tried, with the stages on each rank; 1F1B by default.

    A loss that the script computes is known only after all forwards. Raises PlanError.
    """
    if wanted not in (None, "auto", *NAMES):
        raise PlanError(f"schedule is one of {', '.join(NAMES)} or auto, not {wanted!r}")
    if program.loss is None:
        if wanted not in (None, "gpipe", "auto"):
            raise PlanError(
                f"{program.name} returns no loss, so that backwards start after all forwards: only the schedule gpipe "
                f"runs it, not {wanted}; pass loss_fn, or leave schedule out"
            )
        return (("gpipe", 1),)
    if virtual is not None and wanted not in ("interleaved", "auto") and not (wanted == "zb-v" and virtual == 2):
        raise PlanError(f"virtual: {virtual} stages on each rank are for interleaved, not {wanted or '1f1b'}")
    if wanted == "auto":
        return ("1f1b", 1), ("zb-h1", 1), ("zb-v", 2), ("interleaved", virtual or 2)
    name = wanted or "1f1b"
    return ((name, {"interleaved": virtual or 2, "zb-v": 2}.get(name, 1)),)


def _row(item: Considered) -> dict[str, object]:
    return {
        "config": str(item.config),
        "status": item.status.value,
        "seconds": item.seconds,
        "reason": item.reason.splitlines()[0],
    }
