"""``autopart validate``: the cost model against published step times."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from autopart.cli.arguments import add_json

NAME = "validate"
HELP = "compare predicted with published step times"
DESCRIPTION = """Prices published training runs (Megatron-LM, NeMo, Alpa) under their published plans and prints
predicted beside measured step times. The constants were fitted to the rows marked fit; those marked test were kept
aside. With a file the same for its runs: a row for each, with columns layers, hidden, heads, cluster, batch, tp, pp,
seconds (or tflops) and more; an unknown column's error names all."""
EXAMPLE = "autopart validate runs.csv"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", nargs="?", type=Path, help="a table of measured steps (CSV) instead of the published ones"
    )
    parser.add_argument("--fit", action="store_true", help="fit the constants anew and print them")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    from autopart.cost.fit import fit
    from autopart.cost.measured import read_file
    from autopart.cost.validate import published, rows_text, summaries, summary_text, to_json_object, validate
    from autopart.runtime.errors import InputError

    if arguments.fit:
        if arguments.file:
            raise InputError("--fit fits the published tables; leave out the file, or --fit")
        found = fit([item for table in published().values() for item in table])
        if arguments.json:
            print(json.dumps({"constants": dict(found.constants), "loss": found.loss}))
        else:
            for name, value in found.constants.items():
                print(f"{name:10} {value:.3f}")
        return 0
    file: Path | None = arguments.file
    measured = published() if file is None else {file.stem: read_file(file)}
    tables = {name: validate(items) for name, items in measured.items()}
    if arguments.json:
        print(json.dumps([item for rows in tables.values() for item in to_json_object(rows)]))
        return 0
    for name, rows in tables.items():
        print(f"{name}\n\n{rows_text(rows)}\n")
    print(summary_text([item for name, rows in tables.items() for item in summaries(name, rows)]))
    return 0
