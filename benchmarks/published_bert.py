"""The planner's prices against measured steps of BERT-base on one V100 and replicas of it, in float32 and float16.

    python benchmarks/published_bert.py [--only TEXT] [--json]

The rows of ``autopart/cost/published/dlperf_bert.csv``, nodes of eight V100 with one port of 100 Gb/s: transformers'
BERT with attention in single ops, captured without weights and priced by ``make_plan`` as so many replicas. Nothing was
fitted to them. Gradients' sums pass beside the backward here, as the runtime sends them; there they came after it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

import published_rows
from autopart.analysis import Analysis, analyze
from autopart.cluster import Cluster
from autopart.cost.published import read_table
from autopart.models import load_model
from autopart.planner import make_plan
from autopart.tracing import capture
from autopart.what_if import Change

TABLE = "dlperf_bert"
MODEL = "hf:bert?seq=128&attn_implementation=eager"
DEVICE, PORT, NODE = "V100-16GB", "InfiniBand-100", 8


@dataclass(frozen=True, slots=True)
class Priced:
    """A row. samples: of one replica."""

    dtype: str
    gpus: int
    samples: int
    measured_s: float
    predicted_s: float


@functools.cache
def analysis_of(dtype: str) -> Analysis:
    loaded = load_model(MODEL, meta=True, dtype=getattr(torch, dtype))
    return analyze(capture(loaded.model, loaded.args, loaded.kwargs, check_eval=False))


def priced(row: dict[str, str]) -> Priced:
    gpus, samples, analysis = int(row["gpus"]), int(row["samples"]), analysis_of(row["dtype"])
    nodes = f"{gpus // NODE}x{NODE}x{DEVICE}@{PORT}" if gpus > NODE else f"{gpus}x{DEVICE}"
    plan = make_plan(
        analysis.program,
        Change(memory=4.0).applied(Cluster.parse(nodes)),
        analysis=analysis,
        batch=gpus * samples,
        pp=1,
        dp=gpus,
        tp=1,
        microbatches=1,
        recompute="none",
        meshes="equal",
        zero=0,
    )
    return Priced(row["dtype"], gpus, samples, gpus * samples / float(row["samples_per_s"]), plan.step_time_s)


def report(rows: list[Priced]) -> None:
    published_rows.table_of_steps(rows, ("dtype", "gpus", "samples"))


def main() -> None:
    options = published_rows.parser(__doc__, "dtype").parse_args()
    rows = [priced(row) for row in read_table(TABLE) if options.only in row["dtype"]]
    published_rows.show(rows, options.json, report)


if __name__ == "__main__":
    main()
