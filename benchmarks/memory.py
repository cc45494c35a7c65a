"""The peak memory of a step on the CPU, counted in a real run, against what the emitted graph predicts.

    python benchmarks/memory.py [--model gpt2] [--json]

Counted are the bytes of all tensors that a step makes, while they are alive, the gradients of parameters among them;
parameters and inputs are there before. Every model is run with its layers kept, and computed again in the backward.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

import autopart
from autopart.analysis import analyze
from autopart.models import load_model
from autopart.realize import realize, realized, recomputed
from autopart.stage_memory import stage_peaks
from autopart.verify.live_bytes import LiveBytes

MODELS = {
    "gpt2": "hf:gpt2?n_layer=4&n_embd=128&n_head=4&vocab_size=4096&batch=4&seq=64&resid_pdrop=0&embd_pdrop=0"
    "&attn_pdrop=0",
    "llama": "hf:llama?num_hidden_layers=4&hidden_size=128&intermediate_size=344&num_attention_heads=4"
    "&num_key_value_heads=2&vocab_size=4096&batch=4&seq=64",
    "bert": "hf:bert?num_hidden_layers=4&hidden_size=128&intermediate_size=512&num_attention_heads=4&vocab_size=4096"
    "&batch=4&seq=64&hidden_dropout_prob=0&attention_probs_dropout_prob=0",
    "t5": "hf:t5?num_layers=2&d_model=128&d_ff=512&num_heads=4&d_kv=32&vocab_size=4096&batch=4&seq=64&dropout_rate=0",
}


def measure(spec: str, microbatches: int, recompute: str) -> dict[str, float]:
    """Bytes counted and predicted."""
    loaded = load_model(spec)
    program = autopart.capture(loaded.model.train(), loaded.args, loaded.kwargs)
    analysis = analyze(program)
    limits: dict[str, Any] = {"pp": 1, "dp": 1, "tp": 1, "microbatches": microbatches, "recompute": recompute}
    plan = autopart.make_plan(program, autopart.Cluster.parse("cpu:1"), analysis=analysis, **limits)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "program"
        realize(program, plan, analysis).save(directory)
        weights = {name: tensor.detach() for name, tensor in loaded.model.state_dict().items()}
        model = autopart.load(directory, weights, device=torch.device("cpu")).train()
    with LiveBytes([*model.parameters(), *model.buffers(), *loaded.kwargs.values()]) as live:
        model(**loaded.kwargs)
    found = realized(analysis, plan)
    (peak,) = stage_peaks(program, found, plan.batch // microbatches, recomputed(plan, found.local), "cpu")
    predicted = peak.of_stage(1, microbatches)
    return {"counted_bytes": live.most, "predicted_bytes": predicted, "ratio": predicted / live.most}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*MODELS, "all"], default="all")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    names = list(MODELS) if arguments.model == "all" else [arguments.model]
    cases = [(name, count, again) for name in names for count, again in ((1, "none"), (2, "none"), (2, "full"))]
    rows = [{"model": n, "microbatches": m, "recompute": r, **measure(MODELS[n], m, r)} for n, m, r in cases]
    if arguments.json:
        print(json.dumps(rows))
    else:
        print(tabulate(rows, headers="keys", floatfmt=".4g"))


if __name__ == "__main__":
    main()
