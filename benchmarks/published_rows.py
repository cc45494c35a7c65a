"""What the benchmarks on published tables share: their command line, errors, and how they print rows."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import mean, median
from typing import Any, Protocol

from tabulate import tabulate

from autopart.cost.validate import rank_correlation


class Row(Protocol):
    """Seconds."""

    @property
    def measured_s(self) -> float: ...

    @property
    def predicted_s(self) -> float: ...


def parser(description: str | None, what: str) -> argparse.ArgumentParser:
    """what: of a row the text that ``--only`` looks in."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--only", default="", metavar="TEXT", help=f"rows whose {what} contain it")
    found.add_argument("--json", action="store_true")
    return found


def error(row: Row) -> float:
    """0 where it is as measured, above where it is priced too slow."""
    return row.predicted_s / row.measured_s - 1


def summary(rows: Sequence[Row]) -> tuple[str, str, str]:
    """The mean of errors without signs, their median, and the rank correlation."""
    errors = [error(row) for row in rows]
    correlation = rank_correlation([row.predicted_s for row in rows], [row.measured_s for row in rows])
    return f"{mean(map(abs, errors)):.1%}", f"{median(errors):+.1%}", f"{correlation:.3f}"


def table_of_steps(rows: Sequence[Any], columns: Sequence[str]) -> None:
    """Prints rows in milliseconds, with their errors, and the summary. columns: attributes of rows that come first."""
    cells = [
        (
            *(getattr(row, name) for name in columns),
            *(f"{1e3 * row.measured_s:.1f}", f"{1e3 * row.predicted_s:.1f}", f"{error(row):+.1%}"),
        )
        for row in rows
    ]
    headers = (*columns, "measured ms", "predicted ms", "error")
    print(tabulate(cells, headers=headers, disable_numparse=True))
    off, middle, correlation = summary(rows)
    print(f"\nmean |error| {off}, median {middle}, rank correlation {correlation}")


def show(rows: Sequence[Any], as_json: bool, report: Callable[[Any], None]) -> None:
    """rows: dataclasses."""
    if as_json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        report(rows)
