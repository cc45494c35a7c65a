"""``autopart plan``: who runs what, and what that is predicted to cost."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from autopart.cli.arguments import (
    add_json,
    add_limits,
    add_model,
    check_output,
    choose_plan,
    file_path,
    limits,
    read_cluster,
    read_dtype,
    read_program,
)

if TYPE_CHECKING:
    from autopart.plan import Plan

NAME = "plan"
HELP = "choose how to train a model on a cluster"
DESCRIPTION = """Chooses pipeline, data and tensor parallelism, microbatches and schedule.

What is given is forced, the rest is chosen; with everything given that very plan is priced. Needs neither a GPU nor
memory for the model's weights."""
EXAMPLE = "autopart plan hf:gpt2 --cluster 4x8xA100-80GB --batch 512 --dtype bf16 -o plan.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_limits(parser, cluster_required=True)
    parser.add_argument("-o", "--output", type=file_path, metavar="FILE", help="write the plan as JSON")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:

    # Mistakes in these are said at once, not after the capture.
    cluster, given = read_cluster(arguments.cluster), limits(arguments)
    check_output(arguments.output)
    from autopart.asked import asked

    def choose() -> Plan:
        return choose_plan(arguments, read_program(arguments))

    plan = asked(arguments.model, read_dtype(arguments), cluster, given, choose)
    if arguments.output is not None:
        plan.save(arguments.output)
        print(f"plan written to {arguments.output}", file=sys.stderr)
    if arguments.json:
        print(json.dumps(plan.to_json_object()))
    else:
        from autopart.report.table import plan_text

        print(plan_text(plan))
    return 0
