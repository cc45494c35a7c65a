"""``autopart what-if``: a plan made again for other hardware or another batch, beside the first."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopart.cli.arguments import add_json, check_output, file_path, positive, read_cluster, read_planned
from autopart.cli.explaining import add_model_option
from autopart.cli.progress import working

if TYPE_CHECKING:
    from autopart.cluster import Cluster
    from autopart.plan import Plan

NAME = "what-if"
HELP = "plan again for other hardware, and compare"
DESCRIPTION = """Plans the model of a plan again on a changed cluster or for another batch, and prints three things side
by side: the plan as it is, the same degrees under the change, and the best plan under the change. So what the change
gives by itself is told apart from what other decisions add.

The best plan keeps what was forced when the plan was made, such as --pp 2, where that works; --free leaves it out."""
EXAMPLE = "autopart what-if plan.json --model hf:gpt2 --network 2x --memory 40GB"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, metavar="plan.json")
    add_model_option(parser, required=True)
    parser.add_argument("--cluster", metavar="CLUSTER", help="another cluster (default: the plan's)")
    parser.add_argument("--batch", type=positive, metavar="N", help="samples per step")
    for name, what in (
        ("network", "bandwidth of the nodes' network ports"),
        ("inside", "bandwidth of the links within nodes"),
        ("flops", "FLOP/s of the devices"),
        ("bandwidth", "bandwidth of the devices' memory"),
    ):
        parser.add_argument(f"--{name}", type=_read("read_factor"), default=1.0, metavar="2x", help=what)
    parser.add_argument("--memory", type=_read("read_memory"), default=1.0, metavar="80GB|2x", help="of a device")
    parser.add_argument(
        "--free", action="store_true", help="the best plan without what was forced when the plan was made"
    )
    parser.add_argument("-o", "--output", type=file_path, metavar="FILE", help="write the new plan")
    add_json(parser)


def _read(name: str) -> Callable[[str], float]:
    """A reader of autopart.what_if as argparse wants it."""

    def read(text: str) -> float:
        from autopart import what_if
        from autopart.runtime.errors import ClusterError

        try:
            value: float = getattr(what_if, name)(text)
        except ClusterError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        return value

    return read


def run(arguments: argparse.Namespace) -> int:
    from autopart.analysis import analyze
    from autopart.explain import cluster_of, compare, edited_notes, given_cluster
    from autopart.plan import Plan
    from autopart.planned import planned
    from autopart.realize import check_plan
    from autopart.report.explanation import comparison_text
    from autopart.runtime.errors import BatchError, InfeasibleError, PlanError
    from autopart.same_degrees import asked_of, chosen_anew, have_same_degrees, limits_of_plan
    from autopart.solver.tensor_problem import relative_gap
    from autopart.what_if import Change

    plan = Plan.load(arguments.plan)
    before = base = cluster_of(plan)
    named = plan.cluster
    if arguments.cluster is not None:
        base = read_cluster(arguments.cluster)
        named, before = str(base), given_cluster(plan, base) or before
    if base is None:
        raise PlanError(f"{plan.cluster} is no cluster that can be looked up by name; give its file with --cluster")
    change = Change(arguments.network, arguments.inside, arguments.flops, arguments.bandwidth, arguments.memory)
    batch = arguments.batch or plan.batch
    if change == Change() and batch == plan.batch and arguments.cluster is None and not arguments.free:
        raise PlanError(
            "nothing is changed; give --network, --inside, --flops, --bandwidth, --memory, --batch, --cluster or --free"
        )
    check_output(arguments.output)
    cluster = change.applied(base)
    program = read_planned(arguments, plan)
    named += f" ({change})" if str(change) else ""
    with working(f"planning for {named}"):
        analysis = analyze(program, samples=plan.example_batch)
        check_plan(program, analysis, plan)

        def anew(where: Cluster, samples: int, **limits: Any) -> Plan:
            return planned(program, where, batch=samples, analysis=analysis, **limits, **asked_of(plan))

        best, notes = _best(plan, lambda limits: anew(cluster, batch, **limits), arguments.free)
        now, told = _now(plan, before, lambda at: anew(at, plan.batch, **limits_of_plan(plan, analysis, plan.batch)))
        try:
            same = anew(cluster, batch, **limits_of_plan(plan, analysis, batch))
        except (BatchError, InfeasibleError, PlanError) as error:
            same = None
            told.append(f"same degrees: do not work under the change: {str(error).splitlines()[0]}")
    if same is not None and best.step_time_s < same.step_time_s and have_same_degrees(best, same):
        same = best  # a search that is wider may know of a better one of these
    if same is not None and same.step_time_s < best.step_time_s:
        # what nobody asks for is not tried among others, such as other schedules; its bound is of its degrees alone
        bound = min(best.bound_s, same.step_time_s)
        best = replace(same, asked=best.asked, bound_s=bound, gap=relative_gap(same.step_time_s, bound))
        notes.append("best: of the same degrees, which take less than what is found where these are not given")
    best = replace(best, cluster=named)
    otherwise = chosen_anew(now, same) if same is not None else []
    told += [f"same degrees: chosen anew, and otherwise than now: {', '.join(otherwise)}"] if otherwise else []
    told += [f"now: {note}" for note in edited_notes(now)]
    told += notes + [f"best: {note}" for note in best.notes if note not in (*plan.notes, *now.notes)]
    if arguments.output is not None:
        best.save(arguments.output)
        print(f"plan written to {arguments.output}", file=sys.stderr)
    columns = [("now", now, before)]
    columns += [("same degrees", replace(same, cluster=named), cluster)] if same is not None else []
    columns += [("best", best, cluster)]
    names, plans, clusters = zip(*columns, strict=True)
    found = compare(plans, clusters)
    if arguments.json:
        print(json.dumps({"plans": list(names), **found.to_json_object(), "notes": told}))
    else:
        print("\n".join([comparison_text(names, found), *(f"note: {note}" for note in told)]))
    return 0


def _now(plan: Plan, before: Cluster | None, again: Callable[[Cluster], Plan]) -> tuple[Plan, list[str]]:
    """The plan as it is, made again where its cluster has other numbers now, and what to tell of that.

    before: its cluster as it is at hand. again: the plan with the same decisions there. Raises PlanError.
    """
    from autopart.explain import has_other_numbers
    from autopart.report.units import format_seconds
    from autopart.runtime.errors import BatchError, InfeasibleError, PlanError

    if before is None or not has_other_numbers(plan, before):
        return plan, []
    try:
        now = again(before)
    except (BatchError, InfeasibleError, PlanError) as error:
        raise PlanError(
            f"the plan was made with other numbers of {plan.cluster} than those at hand, with which it does "
            f"not work; give the file that has those with --cluster, or plan again ({error})"
        ) from error
    note = (
        f"now: the plan made again, as {plan.cluster} has other numbers at hand than those that it was made "
        f"with, by which it takes {format_seconds(plan.step_time_s)}; for these give their file with --cluster"
    )
    return replace(now, cluster=plan.cluster), [note]


def _best(plan: Plan, anew: Callable[[dict[str, Any]], Plan], free: bool) -> tuple[Plan, list[str]]:
    """The best plan under the change with what the plan's user forced, and what to tell of that.

    anew: a plan under these limits of make_plan. free: without what was forced, as where there is no plan with it.
    Raises what ``anew`` does.
    """
    from autopart.runtime.errors import BatchError, InfeasibleError, PlanError
    from autopart.wishes import forced_in, forced_text

    forced = forced_in(plan)
    if not forced:
        return anew({}), []
    if free:
        return anew({}), [f"best: made without what was asked for ({forced_text(plan)})"]
    try:
        return anew(forced), [f"best: with what was asked for ({forced_text(plan)}); --free leaves that out"]
    except (BatchError, InfeasibleError, PlanError) as error:
        why = f"which does not work under the change: {str(error).splitlines()[0]}"
        return anew({}), [f"best: made without what was asked for ({forced_text(plan)}), {why}"]
