"""Plans on clusters of unlike nodes: the step beside that of equal meshes and of the fastest kind of nodes alone.

    python benchmarks/uneven.py [--only TEXT] [--dtype bfloat16] [--batch 32]

Equal meshes are what a script has that starts one program on all devices. For each cluster and model: seconds of a
step, with the gap to the bound, which is that of plans with the least warm-up where a * says that this one runs further
ahead; of the best plan with equal meshes, and on each kind of nodes by itself the fewest; and the seconds of CPU that
the plan took.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping

import torch
from tabulate import tabulate

from autopart import cache
from autopart.analysis import Analysis, analyze
from autopart.cluster import Cluster
from autopart.models import load_model
from autopart.planner import make_plan
from autopart.report.units import format_seconds
from autopart.runtime.errors import InfeasibleError
from autopart.tracing import capture

CLUSTERS = (
    "2xRTX-4090+2xRTX-3090",
    "1xA100-80GB+2xRTX-4090+1xRTX-3090",
    "2xA100-40GB+3xRTX-3090",
    "4xA100-40GB@4*Ethernet-25+4xV100-32GB@2*Ethernet-25",
)
MODELS: Mapping[str, str] = {
    "GPT-2 124M": "hf:gpt2?seq=1024",
    "BERT base": "hf:bert?seq=512",
    "T5 small": "hf:t5?seq=512",
    "Llama 0.9B": "hf:llama?num_hidden_layers=16&hidden_size=2048&intermediate_size=5632&num_attention_heads=32"
    "&num_key_value_heads=8&seq=2048&vocab_size=32000",
}


def seconds(analysis: Analysis, cluster: Cluster, batch: int, meshes: str) -> float | None:
    """Of a step of the best plan; None where none fits."""
    try:
        return make_plan(analysis.program, cluster, batch=batch, analysis=analysis, meshes=meshes).step_time_s
    except InfeasibleError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="clusters and models whose names contain it")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, default=32)
    options = parser.parse_args()
    rows = []
    for name, spec in MODELS.items():
        wanted = [text for text in CLUSTERS if options.only in f"{name} {text}"]
        if not wanted:
            continue
        loaded = load_model(spec, meta=True, dtype=getattr(torch, options.dtype))
        program = capture(loaded.model, loaded.args, loaded.kwargs)
        analysis = analyze(program)
        for text in wanted:
            cluster, start = Cluster.parse(text), time.process_time()
            plan = make_plan(program, cluster, batch=options.batch, analysis=analysis)
            spent = time.process_time() - start
            equal = seconds(analysis, cluster, options.batch, "equal")
            kinds = [Cluster(tuple(n for n in cluster.nodes if n == kind)) for kind in dict.fromkeys(cluster.nodes)]
            alone = [seconds(analysis, kind, options.batch, "auto") for kind in kinds]
            others = (equal, min((item for item in alone if item is not None), default=None))
            rows.append(
                (
                    *(name, text, format_seconds(plan.step_time_s), f"{100 * plan.gap:.1f}%{'*' * bool(plan.warmup)}"),
                    *("-" if item is None else f"{item / plan.step_time_s:.2f}" for item in others),
                    f"{spent:.1f}",
                )
            )
    headers = ("model", "cluster", "step", "gap", "equal meshes / step", "one kind alone / step", "CPU s")
    print(tabulate(rows, headers, tablefmt="github"))


if __name__ == "__main__":
    with cache.used(False):
        main()
