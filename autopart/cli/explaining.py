"""``autopart explain``: what binds a plan, what it sends, and why others lost."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopart.cli.arguments import add_dtype, add_json, positive, read_cluster, read_planned
from autopart.cli.progress import working

if TYPE_CHECKING:
    from autopart.cluster import Cluster
    from autopart.explain import Comparison
    from autopart.plan import Plan
    from autopart.rank_peaks import RankPeak
    from autopart.reshardings import Resharding

_MOST_BESIDE = 6
"""Other candidates that are planned to find the fastest of them."""

NAME = "explain"
HELP = "say what binds a plan, and why others lost"
DESCRIPTION = """Says which stage and which resource set the pace of a plan, where each stage's time and memory go, and
which candidates came next.

With --model also what each change of placement costs, by op, what each rank holds at most by the code that is emitted,
and the fastest other candidate is planned and laid beside the chosen one."""
EXAMPLE = "autopart explain plan.json --model hf:gpt2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, metavar="plan.json")
    add_model_option(parser)
    parser.add_argument("--cluster", metavar="CLUSTER", help="the plan's cluster, where it was described in a file")
    parser.add_argument("--top", type=positive, default=10, metavar="N", help="lines of each table (default: 10)")
    add_json(parser)


def add_model_option(parser: argparse.ArgumentParser, required: bool = False) -> None:
    """The model as an option, for commands whose first argument is a plan file."""
    parser.add_argument(
        "--model",
        required=required,
        metavar="MODEL",
        help="the plan's: hf:FAMILY?key=value&… or file.py:function",
    )
    add_dtype(parser, "the plan's")


def plan_cluster(plan: Plan, given: str | None) -> Cluster | None:
    """The plan's cluster, for which one may be given. Raises PlanError where that is another one, ClusterError."""
    from autopart.explain import cluster_of, given_cluster
    from autopart.report.units import counted
    from autopart.runtime.errors import PlanError

    if given is None:
        return cluster_of(plan)
    cluster = read_cluster(given)
    found = given_cluster(plan, cluster)
    if found is None:
        raise PlanError(not_made_for([plan], cluster))
    if found.device_count < plan.device_count:
        raise PlanError(
            f"the plan uses {counted(plan.device_count, 'device')}, {found} has {found.device_count}; "
            "make the plan again"
        )
    return found


def not_made_for(plans: Sequence[Plan], cluster: Cluster) -> str:
    """What is wrong with a cluster that is none of the plans'."""
    from autopart.explain import cluster_of

    names = " and ".join(dict.fromkeys(plan.cluster for plan in plans))
    made = "the plan was" if len(plans) == 1 else "the plans were"
    known = all(cluster_of(plan) is not None for plan in plans)
    other = "leave out --cluster" if known else "give the file that describes it with --cluster"
    return f"{made} made for {names}, not for {cluster}; {other}, or see 'autopart what-if' for another cluster"


def run(arguments: argparse.Namespace) -> int:
    from autopart.breakdown import break_down
    from autopart.explain import edited_notes, infeasible, numbers_notes, runners_up
    from autopart.plan import Plan
    from autopart.runtime.errors import PlanError

    if arguments.dtype is not None and arguments.model is None:
        raise PlanError("--dtype is the type in which --model is captured; give --model too, or leave --dtype out")
    plan = Plan.load(arguments.plan)
    cluster = plan_cluster(plan, arguments.cluster)
    if arguments.model is not None and cluster is None:
        raise PlanError(f"{plan.cluster} is no cluster that can be looked up by name; give its file with --cluster")
    found = break_down(plan, cluster)
    notes = [*numbers_notes([plan], [cluster]), *edited_notes(plan)]
    rows, unfit = runners_up(plan), infeasible(plan)
    beside: Comparison | None = None
    sent = peaks = None
    if arguments.model is not None:
        assert cluster is not None
        sent, peaks, beside = _with_model(arguments, plan, cluster, rows)
    if arguments.json:
        printed: dict[str, Any] = {
            "step_time_s": plan.step_time_s,
            "asked": plan.asked,
            "pins": plan.pins,
            "together": plan.together,
            **found.to_json_object(),
            "runners_up": rows[: arguments.top],
            "infeasible": unfit[: arguments.top],
            "notes": notes,
        }
        if sent is not None:
            printed["reshardings"] = [item.to_json_object() for item in sent]
        if peaks is not None:
            printed["rank_peaks"] = [item.to_json_object() for item in peaks]
        if beside is not None:
            printed["runner_up"] = beside.to_json_object()
        print(json.dumps(printed))
        return 0
    from autopart.report.explanation import (
        binding_text,
        breakdown_table,
        comparison_text,
        peaks_table,
        resharding_table,
        runners_table,
    )
    from autopart.report.table import plan_header
    from autopart.wishes import forced_text

    told = [f"note: {note}" for note in notes]
    print("\n".join([*plan_header(plan), *told, "", binding_text(plan, found, len(unfit)), "", breakdown_table(found)]))
    if sent is not None:
        print("\n" + (resharding_table(sent, plan.step_time_s, arguments.top) if sent else "nothing is resharded"))
    if peaks is not None:
        print(f"\n{peaks_table(peaks)}")
    if plan.considered and (forced := forced_text(plan)):
        print(f"\n{'all other' if rows or unfit else 'no other'} candidates have what was asked for ({forced})")
    if rows:
        print(f"\n{runners_table(rows[: arguments.top], plan.step_time_s)}")
    if unfit:
        print(f"\n{runners_table(unfit[: arguments.top], plan.step_time_s)}")
    if beside is not None:
        print(f"\nthe fastest other candidate:\n\n{comparison_text(('chosen', 'runner-up'), beside)}")
    return 0


def _with_model(
    arguments: argparse.Namespace, plan: Plan, cluster: Cluster, rows: list[dict[str, Any]]
) -> tuple[list[Resharding], list[RankPeak], Comparison | None]:
    """Reshardings, ranks' peaks, and the chosen plan beside the fastest other candidate that can be planned.

    None is laid beside a plan that was made with other numbers of the cluster.
    """
    from autopart.analysis import analyze
    from autopart.explain import compare, has_other_numbers, to_plan_beside
    from autopart.planned import planned
    from autopart.rank_peaks import rank_peaks
    from autopart.reshardings import reshardings
    from autopart.runtime.errors import InfeasibleError
    from autopart.same_degrees import limits_beside

    program = read_planned(arguments, plan)
    with working("analysing the model"):
        analysis = analyze(program, samples=plan.example_batch)
        sent = reshardings(plan, analysis, cluster)
        peaks = rank_peaks(plan, analysis, cluster.device(0).kind)
    other: Plan | None = None
    if has_other_numbers(plan, cluster):
        rows = []
    with working("planning the runner-up"):
        for row in to_plan_beside(rows, _MOST_BESIDE):
            # one that was ruled out takes longer than its bound, and may not fit
            if other is not None and row["seconds"] >= other.step_time_s:
                continue
            try:
                limits = limits_beside(plan, str(row["config"]))
                found = planned(program, cluster, batch=plan.batch, analysis=analysis, **limits)
            except InfeasibleError:
                continue
            if not compare((plan, found), (cluster, cluster)).decisions:
                continue  # another way to the same plan
            other = found if other is None or found.step_time_s < other.step_time_s else other
    return sent, peaks, None if other is None else compare((plan, other), (cluster, cluster))
