"""Loss curves of a small GPT-2 on real text, in one process and under five plans.

    python benchmarks/loss_curves.py [--steps 200] [--json]

In float32 all curves are one but for rounding: the largest difference in loss at any step is printed. In bf16-mixed a
curve depends on the order of sums; how far runs in one process are apart whose batches are added up in 1, 2, 4 and 8
pieces says how much that is, and plans are held against it. Text: the source files of Python's standard library.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

BATCH, SEQ = 16, 32
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp 2": (2, {"pp": 2, "microbatches": 4}),
    "dp 2": (2, {"dp": 2, "microbatches": 2}),
    "tp 2": (2, {"tp": 2, "microbatches": 1}),
    "dp 2, ZeRO-3": (2, {"dp": 2, "zero": 3, "microbatches": 2}),
    "pp 2 x dp 2": (4, {"pp": 2, "dp": 2, "microbatches": 2}),
}
PIECES = (1, 2, 4, 8)


def curve(limits: dict[str, Any], precision: str, steps: int, pieces: int = 1) -> list[float]:
    """The loss of every step on this rank. pieces: of a batch, called one after the other."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    import autopart
    import corpus

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=corpus.VOCAB_SIZE, n_positions=SEQ, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    model = autopart.parallelize(GPT2LMHeadModel(config), precision=precision, verbose=False, **limits)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for x in islice(corpus.training_batches(BATCH, SEQ), steps):
        total = 0.0
        for part in x.chunk(pieces):
            loss = model(input_ids=part, labels=part.clone()).loss / pieces
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        found.append(total)
    return found


def distance(one: list[float], other: list[float]) -> float:
    """The largest difference at any step."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="all curves, for other programs")
    arguments = parser.parse_args()
    from autopart.local_job import run_local_job

    results: dict[str, Any] = {}
    for precision in ("", "bf16-mixed"):
        with tempfile.TemporaryDirectory() as folder:

            def run(processes: int, directory: str = folder, **named: Any) -> list[float]:
                place = Path(tempfile.mkdtemp(dir=directory))
                ranks = run_local_job("loss_curves:curve", processes, named, place, 1200.0)
                return list(ranks[0])

            common = {"precision": precision, "steps": arguments.steps}
            alone = {pieces: run(1, limits={}, pieces=pieces, **common) for pieces in (PIECES if precision else (1,))}
            plans = {name: run(count, limits=limits, **common) for name, (count, limits) in PLANS.items()}
        name = precision or "float32"
        results[name] = {
            "one process": alone[1],
            **plans,
            "spread": max((distance(a, b) for a in alone.values() for b in alone.values()), default=0.0),
        }
        if not arguments.json:
            print(f"{name}: loss {alone[1][0]:.4f} at first, {alone[1][-1]:.4f} after {arguments.steps} steps")
            if precision:
                print(
                    f"  one process, in {', '.join(map(str, PIECES))} pieces: up to {results[name]['spread']:.1e} apart"
                )
            for plan, losses in plans.items():
                print(f"  {plan:14} differs by at most {distance(losses, alone[1]):.1e}", flush=True)
    if arguments.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
