"""The planner's own plans against published ones, both priced by make_plan, on the published clusters.

    python benchmarks/published_plans.py [--table megatron_sc21_table1] [--only TEXT] [--schedule auto]

For each row of the table (of Alpa's: its Megatron-LM column) the model is captured without weights and planned twice:
with the published degrees, microbatches, schedule and full recomputation, and freely. Memory limits hold for both; a
published plan that does not fit by this model of memory is said so. The gap is that of the free plan; where that runs
ahead, which is said, it is to the bound of plans with the least warm-up.
"""

from __future__ import annotations

import argparse
import time

import torch

from autopart.analysis import Analysis, analyze
from autopart.cost.gpt import Gpt
from autopart.cost.published import TABLES, Measurement
from autopart.cost.training import Layout
from autopart.models import load_model
from autopart.plan import Plan
from autopart.planner import make_plan
from autopart.runtime.errors import InfeasibleError
from autopart.tracing import capture

PLANNED = ("megatron_sc21_table1", "alpa_gpt")


def analysis_of(model: Gpt) -> Analysis:
    spec = (
        f"hf:gpt2?n_layer={model.layers}&n_embd={model.width}&n_head={model.heads}"
        f"&n_positions={model.sequence}&seq={model.sequence}&vocab_size={model.vocabulary}"
    )
    loaded = load_model(spec, meta=True, dtype=torch.float16)
    return analyze(capture(loaded.model, loaded.args, loaded.kwargs, check_eval=False))


def published(analysis: Analysis, row: Measurement, layout: Layout) -> Plan | None:
    """The plan of the table's authors; None where it does not fit."""
    microbatches = row.batch // layout.dp // layout.samples
    interleaved = {"schedule": "interleaved", "virtual": layout.chunks} if layout.chunks > 1 else {}
    try:
        return make_plan(
            analysis.program,
            row.cluster,
            analysis=analysis,
            batch=row.batch,
            pp=layout.pp,
            dp=layout.dp,
            tp=layout.tp,
            microbatches=microbatches,
            recompute="full",
            meshes="equal",
            **interleaved,  # type: ignore[arg-type]
        )
    except InfeasibleError as error:
        print(f"  published: {str(error).splitlines()[0][:160]}")
        return None


def compare(row: Measurement, schedule: str | None) -> None:
    layout, _ = row.best()
    start = time.process_time()
    analysis = analysis_of(row.model)
    theirs = published(analysis, row, layout)
    ours = make_plan(analysis.program, row.cluster, analysis=analysis, batch=row.batch, schedule=schedule)
    chosen = next(str(item["config"]) for item in ours.considered if item["status"] == "chosen")
    chosen += " runs ahead" if ours.warmup else ""
    priced = "does not fit"
    if theirs is not None:
        priced = f"{theirs.step_time_s:.2f} s, planned/published {ours.step_time_s / theirs.step_time_s:.2f}"
    print(
        f"{row.name:8} {row.cluster!s:24} pp={layout.pp} dp={layout.dp} tp={layout.tp} x{layout.chunks}: "
        f"measured {row.seconds:.2f} s, priced {priced}; "
        f"planned {chosen}: {ours.step_time_s:.2f} s, gap {ours.gap:.1%}; {time.process_time() - start:.0f} s of CPU",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", choices=PLANNED)
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose name contains it")
    parser.add_argument("--schedule", help="as 'autopart plan' takes it (default: 1f1b)")
    options = parser.parse_args()
    for table in PLANNED if options.table is None else (options.table,):
        print(table)
        for row in TABLES[table]():
            if row.column in ("", "megatron") and options.only in row.name:
                compare(row, options.schedule)


if __name__ == "__main__":
    main()
