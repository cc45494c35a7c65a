"""The cost model against published step times: error by row, by half, rank correlation, and a naive model beside it.

The naive model is one constant: the median of the fit rows' FLOP/s per device, by table and kind of device; of a table
that nothing was fitted to, of all its rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from tabulate import tabulate

from autopart.cost.measured import read_measurements
from autopart.cost.published import AS_MEASURED, TABLES, Measurement, published_text
from autopart.cost.training import Layout, StepSeconds, step_seconds

_PERCENT = 100


@dataclass(frozen=True, slots=True)
class Row:
    """A measurement with what is predicted for it. naive_s: by the table's one constant."""

    measurement: Measurement
    layout: Layout
    predicted: StepSeconds
    naive_s: float

    @property
    def error(self) -> float:
        """Predicted over measured, minus 1."""
        return self.predicted.total / self.measurement.seconds - 1

    @property
    def naive_error(self) -> float:
        return self.naive_s / self.measurement.seconds - 1


@dataclass(frozen=True, slots=True)
class Summary:
    """Mean absolute errors of step time, over all rows and by half, and Spearman's rank correlation.

    fit_error: None where nothing was fitted to the table. rank_correlation: None where either side has one value alone.
    """

    name: str
    rows: int
    error: float
    fit_error: float | None
    test_error: float
    naive_error: float
    rank_correlation: float | None


def published() -> dict[str, list[Measurement]]:
    """All published tables by name, first those of which halves are fitted to."""
    return {name: list(table()) for name, table in TABLES.items()} | {
        name: read_measurements(published_text(name).splitlines(), name, f"{name}.csv") for name in AS_MEASURED
    }


def validate(measurements: Sequence[Measurement]) -> list[Row]:
    """Every row of a table with its prediction. Raises PlanError where a layout does not fit its model or cluster."""
    fitted = any(item.half == "fit" for item in measurements)
    reached: dict[str, list[float]] = {}
    for item in measurements:
        if item.half == "fit" or not fitted:
            reached.setdefault(_device(item), []).append(item.flops_per_device / item.seconds)
    rates = {device: median(found) for device, found in reached.items()}
    rows = []
    for item in measurements:
        layout, _ = item.best()
        predicted = step_seconds(item.model, item.cluster, layout, item.batch)
        rows.append(Row(item, layout, predicted, item.flops_per_device / rates[_device(item)]))
    return rows


def _device(item: Measurement) -> str:
    return item.cluster.device(0).name


def summarize(name: str, rows: Sequence[Row]) -> Summary:
    """Raises ValueError when there are no rows."""
    if not rows:
        raise ValueError(f"{name}: there are no rows to summarize")
    fitted = [abs(row.error) for row in rows if row.measurement.half == "fit"]
    sides = [row.predicted.total for row in rows], [row.measurement.seconds for row in rows]
    return Summary(
        name,
        len(rows),
        _mean(abs(row.error) for row in rows),
        _mean(fitted) if fitted else None,
        _mean(abs(row.error) for row in rows if row.measurement.half == "test"),
        _mean(abs(row.naive_error) for row in rows),
        rank_correlation(*sides) if min(len(set(side)) for side in sides) > 1 else None,
    )


def summaries(table: str, rows: Sequence[Row]) -> list[Summary]:
    """Of the whole table, and of its columns where it has several."""
    columns = list(dict.fromkeys(row.measurement.column for row in rows))
    found = [summarize(table, rows)]
    if len(columns) > 1:
        found += [
            summarize(f"  {column}", [row for row in rows if row.measurement.column == column]) for column in columns
        ]
    return found


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's: Pearson's of the ranks, equal values sharing their mean rank. 1 where one side is constant."""
    a, b = _ranks(first), _ranks(second)
    mean = (len(a) - 1) / 2
    covariance = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    scale = (sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b)) ** 0.5
    return covariance / scale if scale else 1.0


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    first = {value: ordered.index(value) for value in ordered}
    return [first[value] + (ordered.count(value) - 1) / 2 for value in values]


_HEADERS = ("row", "plan", "measured s", "predicted s", "error", "half", "one constant")
_SUMMARY_HEADERS = ("table", "rows", "mean |error|", "fit half", "test half", "one constant", "rank correlation")


def rows_text(rows: Sequence[Row]) -> str:
    """Predicted beside measured, row by row."""
    cells = [
        (
            f"{row.measurement.name} {row.measurement.column}".strip(),
            layout_text(row.layout),
            _seconds(row.measurement.seconds),
            _seconds(row.predicted.total),
            _signed(row.error),
            row.measurement.half,
            _signed(row.naive_error),
        )
        for row in rows
    ]
    return tabulate(cells, headers=_HEADERS, colalign=("left", "left", *("right",) * 3, "left", "right"))


def summary_text(found: Sequence[Summary]) -> str:
    cells = [
        (
            item.name,
            item.rows,
            *map(_percent, (item.error, item.fit_error, item.test_error, item.naive_error)),
            "" if item.rank_correlation is None else f"{item.rank_correlation:.3f}",
        )
        for item in found
    ]
    return tabulate(cells, headers=_SUMMARY_HEADERS, disable_numparse=True, preserve_whitespace=True)


def layout_text(layout: Layout) -> str:
    """``tp 8 pp 4 dp 32, 2 a microbatch, 3 chunks``."""
    cp = f"cp {layout.cp} " if layout.cp > 1 else ""
    text = f"tp {layout.tp} {cp}pp {layout.pp} dp {layout.dp}, {layout.samples} a microbatch"
    return text if layout.chunks == 1 else f"{text}, {layout.chunks} chunks"


def to_json_object(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [
        {
            "table": row.measurement.table,
            "column": row.measurement.column,
            "row": row.measurement.name,
            "half": row.measurement.half,
            "tp": row.layout.tp,
            "cp": row.layout.cp,
            "pp": row.layout.pp,
            "dp": row.layout.dp,
            "samples": row.layout.samples,
            "chunks": row.layout.chunks,
            "measured_s": row.measurement.seconds,
            "predicted_s": row.predicted.total,
            "error": row.error,
            "one_constant_s": row.naive_s,
        }
        for row in rows
    ]


def _percent(error: float | None) -> str:
    return "" if error is None else f"{_PERCENT * error:.1f} %"


def _seconds(number: float) -> str:
    return f"{number:.2f}" if number >= 1 else f"{number:.3g}"


def _signed(error: float) -> str:
    return f"{_PERCENT * error:+.1f} %"
