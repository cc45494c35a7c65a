"""``autopart validate``: the cost model against published step times."""

from __future__ import annotations

import argparse
import json

from autopart.cli.arguments import add_json

NAME = "validate"
HELP = "compare predicted with published step times"
DESCRIPTION = """Prices published training runs (Megatron-LM, Alpa) under their published plans and prints predicted
beside measured step times. The constants were fitted to the rows marked fit; those marked test were kept aside."""
EXAMPLE = "autopart validate"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--fit", action="store_true", help="fit the constants anew and print them")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    from autopart.cost.fit import fit
    from autopart.cost.published import TABLES
    from autopart.cost.validate import rows_text, summaries, summary_text, to_json_object, validate

    if arguments.fit:
        found = fit([item for table in TABLES.values() for item in table()])
        if arguments.json:
            print(json.dumps({"constants": dict(found.constants), "loss": found.loss}))
        else:
            for name, value in found.constants.items():
                print(f"{name:10} {value:.3f}")
        return 0
    tables = {name: validate(name) for name in TABLES}
    if arguments.json:
        print(json.dumps([item for rows in tables.values() for item in to_json_object(rows)]))
        return 0
    for name, rows in tables.items():
        print(f"{name}\n\n{rows_text(rows)}\n")
    print(summary_text([item for name, rows in tables.items() for item in summaries(name, rows)]))
    return 0
