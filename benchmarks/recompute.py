"""What computing modules of layers again is worth against whole layers, priced, where memory falls short.

    python benchmarks/recompute.py [--model hf:gpt2?seq=1024] [--cluster 1xA100-40GB] [--batch 32]

One microbatch on one device, whose capacity is set between what a step needs that computes every layer again and one
that computes none again. For each capacity the step's time over that of the step that computes nothing again, where the
solver may choose among whole layers alone, and among modules in them too.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from unittest import mock

from tabulate import tabulate

import autopart.layer_frontier
from autopart.analysis import Analysis, analyze
from autopart.cluster import Cluster
from autopart.models import load_model
from autopart.plan import Plan
from autopart.planner import make_plan
from autopart.tracing import capture

SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9)


def with_memory(cluster: Cluster, memory_bytes: int) -> Cluster:
    nodes = [replace(node, device=replace(node.device, memory_bytes=memory_bytes)) for node in cluster.nodes]
    return Cluster(tuple(nodes))


def planned(analysis: Analysis, cluster: Cluster, batch: int, recompute: str) -> Plan:
    limits = {"pp": 1, "dp": 1, "tp": 1, "microbatches": 1}
    return make_plan(analysis.program, cluster, batch=batch, analysis=analysis, recompute=recompute, **limits)  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="hf:gpt2?seq=1024")
    parser.add_argument("--cluster", default="1xA100-40GB")
    parser.add_argument("--batch", type=int, default=32)
    options = parser.parse_args()
    loaded = load_model(options.model, meta=True)
    analysis = analyze(capture(loaded.model, loaded.args, loaded.kwargs, check_eval=False))
    cluster = with_memory(Cluster.parse(options.cluster), 2**50)
    none, full = (planned(analysis, cluster, options.batch, recompute) for recompute in ("none", "full"))
    least, most = full.stages[0].memory_bytes, none.stages[0].memory_bytes
    print(f"{options.model}, {options.batch} samples on {options.cluster}: all kept {most / 1e9:.2f} GB, ", end="")
    print(f"every layer again {least / 1e9:.2f} GB and {full.step_time_s / none.step_time_s:.3f} times the seconds")
    rows = []
    for share in SHARES:
        capacity = with_memory(cluster, int(least + share * (most - least)) + 1)
        with mock.patch.object(autopart.layer_frontier, "frontier", lambda *_: ()):
            layers = planned(analysis, capacity, options.batch, "auto")
        modules = planned(analysis, capacity, options.batch, "auto")
        named = sorted({path.split(".", 3)[-1] for path in modules.stages[0].recompute if path.count(".") > 2})
        rows.append(
            [
                f"{share:.0%}",
                f"{layers.step_time_s / none.step_time_s:.3f}",
                f"{modules.step_time_s / none.step_time_s:.3f}",
                ", ".join(named) or modules.recompute,
            ]
        )
    print(tabulate(rows, headers=["room between", "layers", "modules", "which"], disable_numparse=True))


if __name__ == "__main__":
    main()
