"""The planner's prices against measured steps of BERT on one GPU and on replicas of it, in float32 and float16.

    python benchmarks/published_bert.py [--only TEXT] [--json]

The rows of ``autopart/cost/published/dlperf_bert.csv``, BERT-base on nodes of eight V100 with one port of 100 Gb/s, of
``nvidia_bert.csv``, BERT-large on up to 16 V100 of one node, and of ``lambda_bert.csv``, fine-tuning on one GPU of
seven kinds: all NVIDIA's BERT, of 2019 to 2023. Priced is transformers' with attention in single ops, captured without
weights, by ``make_plan`` as so many replicas; its vocabulary is padded to 30,528 as there. Nothing was fitted to them.
Gradients' sums pass beside the backward here, as the runtime sends them; in DLPerf's runs they came after it.
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

HEADS = {"dlperf_bert": "masked-lm", "nvidia_bert": "masked-lm", "lambda_bert": "token-classification&num_labels=2"}
"""Of each table; answers in a text are two numbers for each token, where they begin and end."""
SIZES = {
    "base": "",
    "large": "&num_hidden_layers=24&hidden_size=1024&num_attention_heads=16&intermediate_size=4096",
}
DEVICE, PORT, NODE = "V100-16GB", "InfiniBand-100", 8
"""Of DLPerf's."""
COLUMNS = ("device", "model", "dtype", "sequence", "gpus", "samples")


@dataclass(frozen=True, slots=True)
class Priced:
    """A row. samples: of a microbatch on one replica. Seconds of a microbatch."""

    table: str
    device: str
    model: str
    dtype: str
    sequence: int
    gpus: int
    samples: int
    measured_s: float
    predicted_s: float


@functools.cache
def analysis_of(table: str, model: str, dtype: str, sequence: int) -> Analysis:
    spec = f"hf:bert?seq={sequence}&attn_implementation=eager&vocab_size=30528&task={HEADS[table]}{SIZES[model]}"
    loaded = load_model(spec, meta=True, dtype=getattr(torch, dtype))
    return analyze(capture(loaded.model, loaded.args, loaded.kwargs, check_eval=False))


def priced(table: str, row: dict[str, str]) -> Priced:
    gpus, samples, microbatches = int(row["gpus"]), int(row["samples"]), int(row.get("microbatches", 1))
    device, model, sequence = row.get("device", DEVICE), row.get("model", "base"), int(row.get("sequence", 128))
    analysis = analysis_of(table, model, row["dtype"], sequence)
    apart = table == "dlperf_bert" and gpus > NODE
    plan = make_plan(
        analysis.program,
        Change(memory=8.0).applied(
            Cluster.parse(f"{gpus // NODE}x{NODE}x{device}@{PORT}" if apart else f"{gpus}x{device}")
        ),
        analysis=analysis,
        batch=gpus * samples * microbatches,
        pp=1,
        dp=gpus,
        tp=1,
        microbatches=microbatches,
        recompute="none",
        meshes="equal",
        zero=0,
    )
    return Priced(
        *(table, device, model, row["dtype"], sequence, gpus, samples),
        *(gpus * samples / float(row["samples_per_s"]), plan.step_time_s / microbatches),
    )


def report(rows: list[Priced]) -> None:
    for table in dict.fromkeys(row.table for row in rows):
        print(f"{table}\n")
        published_rows.table_of_steps([row for row in rows if row.table == table], COLUMNS)
        print()


def main() -> None:
    options = published_rows.parser(__doc__, "table, device and dtype, as lambda_bert H100 float16,").parse_args()
    rows = [
        priced(table, row)
        for table in HEADS
        for row in read_table(table)
        if options.only in f"{table} {row.get('device', DEVICE)} {row['dtype']}"
    ]
    published_rows.show(rows, options.json, report)


if __name__ == "__main__":
    main()
