"""What emitted code costs: step time of the one-stage program over the eager model's, paired in one run.

    python benchmarks/emitted_overhead.py [--model gpt2] [--rounds 15]

Both train the same weights on the same batch in this process; rounds alternate, so that drift of the machine falls on
both. Reported is the ratio of the medians, and the median and spread of the per-round ratios.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable

import torch

import autopart
from autopart.models import load_model

MODELS = {
    "gpt2": "hf:gpt2?n_layer=6&n_embd=384&n_head=6&vocab_size=2048&batch=8&seq=128",
    "llama": "hf:llama?num_hidden_layers=4&hidden_size=384&intermediate_size=1024&num_attention_heads=6"
    "&num_key_value_heads=6&vocab_size=2048&batch=8&seq=128",
    "bert": "hf:bert?num_hidden_layers=4&hidden_size=384&intermediate_size=1536&num_attention_heads=6"
    "&vocab_size=2048&batch=8&seq=128",
    "vit": "hf:vit?num_hidden_layers=4&hidden_size=384&intermediate_size=1536&num_attention_heads=6&batch=8",
}


def steps(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> Callable[[], float]:
    """A function that trains one step and returns its seconds."""
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> float:
        start = time.perf_counter()
        model(**inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - start

    return step


def measure(spec: str, rounds: int) -> dict[str, float]:
    """Seconds per step of both, and their ratio."""
    loaded = load_model(spec)
    assert not loaded.args
    eager = copy.deepcopy(loaded.model).train()
    emitted = autopart.parallelize(loaded.model.train(), verbose=False)
    run_eager, run_emitted = steps(eager, loaded.kwargs), steps(emitted, loaded.kwargs)
    for _ in range(3):
        run_eager(), run_emitted()
    pairs = []
    for index in range(rounds):
        first, second = (run_eager, run_emitted) if index % 2 else (run_emitted, run_eager)
        one, two = first(), second()
        pairs.append((one, two) if index % 2 else (two, one))
    eager_s, emitted_s = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratios = sorted(emitted / plain for plain, emitted in pairs)
    return {
        "eager_s": eager_s,
        "emitted_s": emitted_s,
        "ratio": emitted_s / eager_s,
        "median_of_ratios": statistics.median(ratios),
        "lowest_ratio": ratios[0],
        "highest_ratio": ratios[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*MODELS, "all"], default="all")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    names = list(MODELS) if arguments.model == "all" else [arguments.model]
    results = {name: measure(MODELS[name], arguments.rounds) for name in names}
    if arguments.json:
        print(json.dumps(results))
        return
    for name, found in results.items():
        print(
            f"{name:6} eager {found['eager_s'] * 1e3:7.1f} ms, emitted {found['emitted_s'] * 1e3:7.1f} ms, "
            f"ratio {found['ratio']:.3f} (per round: median {found['median_of_ratios']:.3f}, "
            f"{found['lowest_ratio']:.3f} to {found['highest_ratio']:.3f})"
        )


if __name__ == "__main__":
    main()
