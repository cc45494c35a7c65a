"""``autopart show``: a plan file as a table."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

from autopart.cli.arguments import add_json

NAME = "show"
HELP = "print a plan file as a table"
DESCRIPTION = "Prints a plan: its layout, its predicted time with bound and gap, and a line for each stage."
EXAMPLE = "autopart show plan.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, metavar="plan.json")
    parser.add_argument("--considered", action="store_true", help="also the other candidates, and why each lost")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    from autopart.explain import edited_notes
    from autopart.plan import Plan

    plan = Plan.load(arguments.plan)
    plan = replace(plan, notes=(*plan.notes, *edited_notes(plan)))
    if arguments.json:
        more = {"considered": [dict(row) for row in plan.considered]} if arguments.considered else {}
        print(json.dumps({**plan.to_json_object(), **more}))
    else:
        from autopart.report.table import considered_table, plan_text

        print(plan_text(plan))
        if arguments.considered:
            print(f"\n{considered_table(plan.considered)}")
    return 0
