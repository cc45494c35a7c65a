"""``autopart compare``: two plans beside each other."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from autopart.cli.arguments import add_json, read_cluster

NAME = "compare"
HELP = "lay two plans beside each other"
DESCRIPTION = """Prints the decisions that two plans take differently, what is predicted of each, and where the time of
each plan's slowest stage goes."""
EXAMPLE = "autopart compare a.json b.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plans", type=Path, nargs=2, metavar="plan.json")
    parser.add_argument("--cluster", metavar="CLUSTER", help="the plans' cluster, where it was described in a file")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    from autopart.cli.explaining import not_made_for
    from autopart.explain import cluster_of, compare, edited_notes, given_cluster, numbers_notes
    from autopart.plan import Plan
    from autopart.report.explanation import comparison_text
    from autopart.runtime.errors import PlanError

    plans = [Plan.load(path) for path in arguments.plans]
    clusters = [cluster_of(plan) for plan in plans]
    if arguments.cluster is not None:
        given = read_cluster(arguments.cluster)
        matching = [given_cluster(plan, given) for plan in plans]
        if not any(matching):
            raise PlanError(not_made_for(plans, given))
        clusters = [match or known for match, known in zip(matching, clusters, strict=True)]
    found = compare(plans, clusters)
    named = zip(arguments.plans, plans, strict=True)
    edited = [f"{path}: {note}" for path, plan in named for note in edited_notes(plan)]
    notes = [*numbers_notes(plans, clusters), *edited]
    if arguments.json:
        print(json.dumps({**found.to_json_object(), "notes": notes}))
    else:
        names = [path.stem for path in arguments.plans]
        text = comparison_text(names if names[0] != names[1] else list(map(str, arguments.plans)), found)
        print("\n".join([text, *(f"note: {note}" for note in notes)]))
    return 0
