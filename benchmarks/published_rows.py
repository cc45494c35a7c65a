"""What the benchmarks on published tables share: their command line and how they print rows."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any


def parser(description: str | None, what: str) -> argparse.ArgumentParser:
    """what: of a row the text that ``--only`` looks in."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--only", default="", metavar="TEXT", help=f"rows whose {what} contain it")
    found.add_argument("--json", action="store_true")
    return found


def show(rows: Sequence[Any], as_json: bool, report: Callable[[Any], None]) -> None:
    """rows: dataclasses."""
    if as_json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        report(rows)
