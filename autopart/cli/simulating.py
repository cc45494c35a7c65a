"""``autopart simulate``: the predicted timeline of a plan."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopart.cli.arguments import (
    add_json,
    add_limits,
    add_model,
    check_output,
    choose_plan,
    file_path,
    read_cluster,
    read_program,
    refuse_limits,
)

if TYPE_CHECKING:
    from autopart.plan import Plan
    from autopart.simulate import Simulation

NAME = "simulate"
HELP = "time a plan's schedule, and draw it"
DESCRIPTION = """Times the schedule of a plan file, or of the plan that a model, a cluster and limits give.

Prints how long each rank of the pipeline (a stage, or its stages) is busy and idle. With -o it writes the timeline for
chrome://tracing or ui.perfetto.dev, in the format of ParallelModule.trace; --beside joins it with such a trace of a
real run."""
EXAMPLE = "autopart simulate plan.json -o predicted.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, or_plan=True)
    add_limits(parser, cluster_required=False)
    parser.add_argument("-o", "--output", type=file_path, metavar="FILE", help="write the timeline as a trace")
    parser.add_argument(
        "--beside", type=Path, metavar="FILE", help="the trace of a real run, to be written to -o as well"
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    from autopart.predict import predicted_trace, simulate_plan
    from autopart.runtime.errors import PlanError
    from autopart.runtime.trace import save_trace

    check_output(arguments.output)
    if arguments.beside is not None and arguments.output is None:
        raise PlanError("--beside joins two traces in one file; say which with -o")
    executed = _read_trace(arguments.beside) if arguments.beside is not None else {"traceEvents": []}
    plan = _plan(arguments)
    found = simulate_plan(plan)
    if arguments.output is not None:
        beyond = 1 + max((event.get("pid", 0) for event in executed["traceEvents"]), default=-1)
        trace = predicted_trace(plan, found, beyond)
        trace["traceEvents"] = executed["traceEvents"] + trace["traceEvents"]
        save_trace(arguments.output, trace)
        print(f"timeline written to {arguments.output}", file=sys.stderr)
    print(json.dumps(to_json_object(plan, found)) if arguments.json else describe(plan, found))
    return 0


def _plan(arguments: argparse.Namespace) -> Plan:
    """The plan file, or the plan of the model. Raises PlanError when limits are given with a file, which fixes them."""
    from autopart.plan import Plan
    from autopart.runtime.errors import PlanError

    if not arguments.model.endswith(".json"):
        if arguments.cluster is None:
            raise PlanError("give a plan file, or a model with --cluster and limits")
        read_cluster(arguments.cluster)
        return choose_plan(arguments, read_program(arguments))
    refuse_limits(arguments)
    return Plan.load(arguments.model)


def _read_trace(path: Path) -> dict[str, Any]:
    from autopart.runtime.errors import PlanError

    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise PlanError(f"{path} is not readable as JSON: {error}; write one with ParallelModule.trace") from error
    events = found.get("traceEvents") if isinstance(found, dict) else None
    if not isinstance(events, list):
        raise PlanError(f"{path} is no trace: it has no list traceEvents; write one with ParallelModule.trace")
    for at, event in enumerate(events):
        if not isinstance(event, dict) or not isinstance(event.get("pid", 0), int):
            raise PlanError(
                f"{path} is no trace: traceEvents[{at}] is no object whose pid is a whole number; write one with "
                "ParallelModule.trace"
            )
    assert isinstance(found, dict)
    return found


def to_json_object(plan: Plan, found: Simulation) -> dict[str, Any]:
    """makespan_s: of the schedule; step_time_s: with the sums of tied gradients. bubble: idle share of all time.

    ranks: of the pipeline, each with the numbers of its stages; in_flight is one number for each of these.
    """
    return {
        "makespan_s": found.makespan_s,
        "tied_s": plan.tied_s,
        "step_time_s": found.makespan_s + plan.tied_s,
        "bubble": found.bubble,
        "schedule": plan.schedule,
        "microbatches": plan.microbatches,
        "ranks": [
            {
                "stages": stages,
                "busy_s": busy,
                "idle_s": idle,
                "in_flight": [found.in_flight[stage] for stage in stages],
                "memory_bytes": sum(plan.stages[stage].memory_bytes for stage in stages),
                "capacity_bytes": sum(plan.stages[stage].capacity_bytes for stage in stages),
            }
            for stages, busy, idle in zip(_stages_by_rank(plan), found.busy_s, found.idle_s, strict=True)
        ],
    }


def _stages_by_rank(plan: Plan) -> list[list[int]]:
    """The stages that each rank of the pipeline runs, several under a schedule with virtual stages."""
    return [[stage for stage, its in enumerate(plan.places) if its == place] for place in range(plan.pp)]


def describe(plan: Plan, found: Simulation) -> str:
    """The step's time and a line for each rank of the pipeline."""
    from tabulate import tabulate

    from autopart.report.table import format_memory
    from autopart.report.units import counted, format_seconds, format_share

    share = (lambda part: format_share(part / found.makespan_s)) if found.makespan_s else (lambda _: "-")
    rows = [
        (
            ", ".join(map(str, rank["stages"])),
            format_seconds(rank["busy_s"]),
            format_seconds(rank["idle_s"]),
            share(rank["idle_s"]),
            ", ".join(map(str, rank["in_flight"])),
            format_memory(rank["memory_bytes"], rank["capacity_bytes"]),
        )
        for rank in to_json_object(plan, found)["ranks"]
    ]
    tied = f" and {format_seconds(plan.tied_s)} for gradients of tied parameters" if plan.tied_s else ""
    headers = ("stages", "busy", "idle", "idle share", "in flight", "memory / capacity")
    lines = [
        f"{plan.model} on {plan.cluster}: {plan.schedule}, {counted(plan.microbatches, 'microbatch')}",
        f"makespan {format_seconds(found.makespan_s)}{tied}, bubble {format_share(found.bubble)}",
    ]
    if len(plan.stages) > 1 and not plan.transfers:
        lines.append("note: the plan has no transfer times; they are taken as nothing")
    return "\n".join([*lines, "", tabulate(rows, headers=headers, disable_numparse=True)])
