"""``autopart what-if``: a plan made again for other hardware or another batch, beside the first."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from autopart.cli.arguments import add_json, check_output, file_path, positive, read_cluster, read_planned
from autopart.cli.explaining import add_model_option
from autopart.cli.progress import working

NAME = "what-if"
HELP = "plan again for other hardware, and compare"
DESCRIPTION = """Plans the model of a plan again on a changed cluster or for another batch, and prints three things side
by side: the plan as it is, the same degrees under the change, and the best plan under the change. So what the change
gives by itself is told apart from what other decisions add."""
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
    from autopart.explain import cluster_of, compare, given_cluster, has_other_numbers
    from autopart.plan import Plan
    from autopart.planned import planned
    from autopart.realize import check_plan
    from autopart.report.explanation import comparison_text
    from autopart.report.units import format_seconds
    from autopart.runtime.errors import BatchError, InfeasibleError, PlanError
    from autopart.same_degrees import asked_of, chosen_anew, limits_of_plan
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
    if change == Change() and batch == plan.batch and arguments.cluster is None:
        raise PlanError(
            "nothing is changed; give --network, --inside, --flops, --bandwidth, --memory, --batch or --cluster"
        )
    check_output(arguments.output)
    cluster = change.applied(base)
    program = read_planned(arguments, plan)
    named += f" ({change})" if str(change) else ""
    with working(f"planning for {named}"):
        analysis = analyze(program, samples=plan.example_batch)
        check_plan(program, analysis, plan)
        asked = asked_of(plan)
        best = planned(program, cluster, batch=batch, analysis=analysis, **asked)
        limits = limits_of_plan(plan, analysis, batch)
        now, notes = plan, []
        if before is not None and has_other_numbers(plan, before):
            own = limits_of_plan(plan, analysis, plan.batch)
            try:
                now = planned(program, before, batch=plan.batch, analysis=analysis, **own, **asked)
            except (BatchError, InfeasibleError, PlanError) as error:
                raise PlanError(
                    f"the plan was made with other numbers of {plan.cluster} than those at hand, with which it does "
                    f"not work; give the file that has those with --cluster, or plan again ({error})"
                ) from error
            now = replace(now, cluster=plan.cluster)
            notes.append(
                f"now: the plan made again, as {plan.cluster} has other numbers at hand than those that it was made "
                f"with, by which it takes {format_seconds(plan.step_time_s)}; for these give their file with --cluster"
            )
        try:
            same = planned(program, cluster, batch=batch, analysis=analysis, **limits, **asked)
        except (BatchError, InfeasibleError, PlanError) as error:
            same = None
            print(f"the same degrees do not work under the change: {str(error).splitlines()[0]}", file=sys.stderr)
    # what nobody asks for is not tried among others, such as other schedules
    best = replace(best if same is None or best.step_time_s <= same.step_time_s else same, cluster=named)
    anew = chosen_anew(now, same) if same is not None else []
    notes += [f"same degrees: chosen anew, and otherwise than now: {', '.join(anew)}"] if anew else []
    notes += [f"best: {note}" for note in best.notes if note not in (*plan.notes, *now.notes)]
    if arguments.output is not None:
        best.save(arguments.output)
        print(f"plan written to {arguments.output}", file=sys.stderr)
    columns = [("now", now, before)]
    columns += [("same degrees", replace(same, cluster=named), cluster)] if same is not None else []
    columns += [("best", best, cluster)]
    names, plans, clusters = zip(*columns, strict=True)
    found = compare(plans, clusters)
    if arguments.json:
        print(json.dumps({"plans": list(names), **found.to_json_object(), "notes": notes}))
    else:
        print("\n".join([comparison_text(names, found), *(f"note: {note}" for note in notes)]))
    return 0
