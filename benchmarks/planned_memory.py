"""What plans count on for memory, over the exact peak of the code that is emitted for them, by level of ZeRO.

    python benchmarks/planned_memory.py [--only TEXT] [--list]

Models without weights on four H200, where all of these fit, in bfloat16: four replicas, two stages of two, two of two
tensor ranks, and four stages, under 1F1B and under GPipe; two and eight microbatches; nothing computed again, and every
layer. Of each rank the libraries' part is left out of both. The exact peak is what ``autopart explain plan.json
--model`` prints (:mod:`autopart.rank_peaks`), which ``benchmarks/memory.py`` holds against real steps. --list: every
rank.
"""

from __future__ import annotations

import argparse
import itertools
from statistics import mean

import torch
from tabulate import tabulate

from autopart.analysis import analyze
from autopart.candidate_settings import CUDA_OVERHEAD_BYTES
from autopart.cluster import Cluster
from autopart.models import load_model
from autopart.planner import make_plan
from autopart.rank_peaks import rank_peaks
from autopart.tracing import capture

MODELS = {
    "GPT-2, width 4,096, 8 layers": "hf:gpt2?n_layer=8&n_embd=4096&n_head=32&n_positions=1024&seq=1024",
    "Llama 1.5B": (
        "hf:llama?num_hidden_layers=16&hidden_size=2048&intermediate_size=8192&num_attention_heads=32"
        "&num_key_value_heads=8&vocab_size=128256&seq=1024"
    ),
    "Gemma-2, 6 layers, 256,000 tokens": (
        "hf:gemma2?num_hidden_layers=6&hidden_size=2304&intermediate_size=9216&num_attention_heads=8"
        "&num_key_value_heads=4&head_dim=256&vocab_size=256000&seq=1024"
    ),
    "T5 large, 6 + 6 layers": "hf:t5?num_layers=6&d_model=1024&d_ff=4096&num_heads=16&d_kv=64&seq=512",
}
DEGREES = (
    *(((1, 4, 1), level, "1f1b") for level in range(4)),
    *(((2, 2, 1), level, "1f1b") for level in range(4)),
    *(((1, 2, 2), level, "1f1b") for level in range(4)),
    *(((4, 1, 1), 0, schedule) for schedule in ("1f1b", "gpipe")),
)
"""pp, dp and tp, level of ZeRO, schedule."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="models whose name contains it")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    cluster, found = Cluster.parse("4xH200"), dict[int, list[float]]()
    for name, spec in MODELS.items():
        if options.only not in name:
            continue
        loaded = load_model(spec, meta=True, dtype=torch.bfloat16)
        analysis = analyze(capture(loaded.model, loaded.args, loaded.kwargs, check_eval=False))
        for of, parts, recompute in itertools.product(DEGREES, (2, 8), ("none", "full")):
            (pp, dp, tp), zero, schedule = of
            plan = make_plan(
                *(analysis.program, cluster),
                analysis=analysis,
                batch=32,
                pp=pp,
                dp=dp,
                tp=tp,
                microbatches=parts,
                zero=zero,
                recompute=recompute,
                schedule=schedule,
            )
            for rank in rank_peaks(plan, analysis, "cuda"):
                ratio = (rank.planned - CUDA_OVERHEAD_BYTES) / rank.total
                found.setdefault(zero, []).append(ratio)
                if options.list:
                    degrees = (
                        f"pp {pp} dp {dp} tp {tp}, {schedule}, {parts} microbatches, zero {zero}, recompute {recompute}"
                    )
                    print(f"{name}, {degrees}, stage {rank.stages[0]}: {ratio:.3f} of {rank.total / 1e9:.2f} GB")
    rows = [(zero, len(own), mean(own), min(own), max(own)) for zero, own in sorted(found.items())]
    print(tabulate(rows, ("level", "ranks", "mean", "least", "most"), tablefmt="github", floatfmt=".3f"))


if __name__ == "__main__":
    main()
