"""What computing modules of layers again, and mixing layers' strategies, is worth, priced, where memory falls short.

    python benchmarks/recompute.py [--model hf:gpt2?seq=1024] [--cluster 1xA100-40GB] [--batch 32]
    python benchmarks/recompute.py --cluster 2xRTX-4090 --tp 2 --batch 16 --microbatches 4

One stage, the capacity of whose devices is set between what a step needs that computes every layer again and one that
computes none again. For each capacity the step's time over that of the step that computes nothing again, where the
solver may choose among whole layers alone, among modules in them too, and on tensor axes also strategies of their own
for layers; with the seconds of CPU that the last two plans took.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

from tabulate import tabulate

import autopart.layer_frontier
from autopart import cache
from autopart.analysis import Analysis, analyze
from autopart.candidates import Candidates
from autopart.cluster import Cluster
from autopart.models import load_model
from autopart.plan import Plan
from autopart.planner import make_plan
from autopart.tracing import capture

SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9)


def with_memory(cluster: Cluster, memory_bytes: int) -> Cluster:
    nodes = [replace(node, device=replace(node.device, memory_bytes=memory_bytes)) for node in cluster.nodes]
    return Cluster(tuple(nodes))


@contextlib.contextmanager
def without(*found: str) -> Iterator[None]:
    """Inside, plans compute no "modules" again by themselves, or make no "mixtures"."""
    with contextlib.ExitStack() as stack:
        if "modules" in found:
            stack.enter_context(mock.patch.object(autopart.layer_frontier, "frontier", lambda *_: ()))
        if "mixtures" in found:
            stack.enter_context(mock.patch.object(Candidates, "_mixture", lambda *_: None))
        yield


def planned(analysis: Analysis, cluster: Cluster, options: argparse.Namespace, recompute: str) -> tuple[Plan, float]:
    """The plan, and the seconds of CPU that it took."""
    limits = {"pp": 1, "dp": 1, "tp": options.tp, "microbatches": options.microbatches, "recompute": recompute}
    start = time.process_time()
    with cache.used(False):
        plan = make_plan(analysis.program, cluster, batch=options.batch, analysis=analysis, **limits)
    return plan, time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="hf:gpt2?seq=1024")
    parser.add_argument("--cluster", default="1xA100-40GB")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--microbatches", type=int, default=1)
    options = parser.parse_args()
    loaded = load_model(options.model, meta=True)
    analysis = analyze(capture(loaded.model, loaded.args, loaded.kwargs, check_eval=False))
    cluster = with_memory(Cluster.parse(options.cluster), 2**50)
    none, full = (planned(analysis, cluster, options, recompute)[0] for recompute in ("none", "full"))
    least, most = full.stages[0].memory_bytes, none.stages[0].memory_bytes
    print(f"{options.model}, {options.batch} samples on {options.cluster}: all kept {most / 1e9:.2f} GB, ", end="")
    print(f"every layer again {least / 1e9:.2f} GB and {full.step_time_s / none.step_time_s:.3f} times the seconds")
    rows = []
    for share in SHARES:
        capacity = with_memory(cluster, int(least + share * (most - least)) + 1)
        with without("modules", "mixtures"):
            layers, _ = planned(analysis, capacity, options, "auto")
        with without("mixtures"):
            modules, before = planned(analysis, capacity, options, "auto")
        mixed, after = planned(analysis, capacity, options, "auto")
        named = sorted({path.split(".", 3)[-1] for path in mixed.stages[0].recompute if path.count(".") > 2})
        times = [f"{plan.step_time_s / none.step_time_s:.3f}" for plan in (layers, modules, mixed)]
        rows.append([f"{share:.0%}", *times, f"{before:.1f}, {after:.1f} s", ", ".join(named) or mixed.recompute])
    headers = ["room between", "layers", "modules", "mixtures", "CPU", "which again"]
    print(tabulate(rows, headers=headers, disable_numparse=True))


if __name__ == "__main__":
    main()
