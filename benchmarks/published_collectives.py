"""Prices of collectives by message size against published runs of nccl-tests.

    python benchmarks/published_collectives.py [--only TEXT] [--json]

The rows of ``autopart/cost/published/collectives.csv``: all-reduces, gathers, scattered sums and all-to-alls of 1 MiB
to 1 GiB among 8 GPUs of one node to 256 of sixteen. Beside the prices' errors are those of bytes over the links'
nominal bandwidth, which is what is left of the formulas without latencies and efficiencies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from tabulate import tabulate

import published_rows
from autopart.cluster import Cluster
from autopart.cost.communication import ALL_REDUCE, collective_seconds
from autopart.cost.published import read_table

TABLE = "collectives"
SIZES = ((2**20, 2**22), (2**23, 2**25), (2**26, 2**28), (2**29, 2**30))
"""Least and most bytes of the columns."""


@dataclass(frozen=True, slots=True)
class Priced:
    """A row. num_bytes: of the tensor that is summed, scattered or exchanged, or of the gathered one."""

    source: str
    cluster: str
    collective: str
    num_bytes: int
    measured_s: float
    predicted_s: float
    nominal_s: float


def priced(row: dict[str, str]) -> Priced:
    cluster = Cluster.parse(row["cluster"])
    parts, num_bytes, kind = cluster.device_count, int(row["bytes"]), row["collective"]
    link = cluster.group_link(range(parts))
    sent = (2 if kind == ALL_REDUCE else 1) * (parts - 1) / parts * num_bytes
    return Priced(
        *(row["source"], row["cluster"], kind, num_bytes),
        measured_s=sent / (1e9 * float(row["bus_gb_per_s"])),
        predicted_s=collective_seconds(kind, num_bytes, parts, link),
        nominal_s=sent / link.ring_bandwidth,
    )


def report(rows: Sequence[Priced]) -> None:
    groups: dict[tuple[str, str, str], list[Priced]] = {}
    for row in rows:
        groups.setdefault((row.cluster, row.collective, row.source), []).append(row)
    table = []
    for name, found in groups.items():
        by_size = [
            [published_rows.error(row) for row in found if least <= row.num_bytes <= most] for least, most in SIZES
        ]
        table.append((*name, *(f"{mean(errors):+.0%}" if errors else "" for errors in by_size), _off(found)))
    columns = [f"{least >> 20} to {most >> 20} MiB" for least, most in SIZES]
    print(tabulate(table, headers=("cluster", "collective", "source", *columns, "mean |error|"), disable_numparse=True))
    bare = f"{mean(abs(row.nominal_s / row.measured_s - 1) for row in rows):.1%}"
    off, middle, correlation = published_rows.summary(rows)
    print(f"\nmean |error| {off}, median {middle}, rank correlation {correlation}; bytes over nominal bandwidth {bare}")


def _off(rows: Sequence[Priced]) -> str:
    return f"{mean(abs(published_rows.error(row)) for row in rows):.0%}"


def main() -> None:
    options = published_rows.parser(__doc__, "cluster, collective or source").parse_args()
    rows = [priced(row) for row in read_table(TABLE) if options.only in " ".join(row.values())]
    published_rows.show(rows, options.json, report)


if __name__ == "__main__":
    main()
