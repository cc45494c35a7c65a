"""Loss curves of a small GPT-2 on real text, in one process and under five plans.

    python benchmarks/loss_curves.py [--steps 200] [--json]

In float32 all curves are one but for rounding: the largest difference in loss at any step is printed. In bf16-mixed a
curve depends on the order of sums. How much, is measured by runs in one process on the same batches, whose samples are
in other orders and are added up in 1, 2, 4 and 8 pieces: how far any two of them are apart, at most at any step and as
the root of the mean square over steps. Plans are held against these. Text: the source files of Python's standard
library.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from itertools import combinations, islice
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
PIECES, ORDERS = (1, 2, 4, 8), 3


def curve(limits: dict[str, Any], precision: str, steps: int, pieces: int = 1, order: int = 0) -> list[float]:
    """The loss of every step on this rank.

    pieces: of a batch, called one after the other. order: of the samples in each batch; 0: as they come.
    """
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
    shuffled = torch.Generator().manual_seed(order)
    for x in islice(corpus.training_batches(BATCH, SEQ), steps):
        x = x[torch.randperm(BATCH, generator=shuffled)] if order else x
        total = 0.0
        for part in x.chunk(pieces):
            loss = model(input_ids=part, labels=part.clone()).loss / pieces
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        found.append(total)
    return found


def alone(precision: str, steps: int, runs: list[tuple[int, int]]) -> list[list[float]]:
    """Curves of one process, by pieces and order."""
    return [curve({}, precision, steps, pieces, order) for pieces, order in runs]


def distance(one: list[float], other: list[float]) -> tuple[float, float]:
    """The largest difference at any step, and the root of the mean square of all."""
    differences = [abs(a - b) for a, b in zip(one, other, strict=True)]
    return max(differences), math.sqrt(sum(d * d for d in differences) / len(differences))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--precision", nargs="+", default=["float32", "bf16-mixed"], help="default: both")
    parser.add_argument("--json", action="store_true", help="all curves, for other programs")
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    for name in arguments.precision:
        common = {"precision": "" if name == "float32" else name, "steps": arguments.steps}
        runs = [(1, 0)] if name == "float32" else [(pieces, order) for order in range(ORDERS) for pieces in PIECES]
        with tempfile.TemporaryDirectory() as folder:
            serial = list(_run("alone", 1, {**common, "runs": runs}, folder))
            plans = {
                plan: _run("curve", count, {**common, "limits": limits}, folder)
                for plan, (count, limits) in PLANS.items()
            }
        first = serial[0]
        results[name] = {"one process": serial, **plans}
        if arguments.json:
            continue
        print(f"{name}: loss {first[0]:.4f} at first, {first[-1]:.4f} after {arguments.steps} steps")
        apart = [distance(a, b) for a, b in combinations(serial, 2)]
        for which, values in zip(("at most", "root of mean square"), zip(*apart, strict=True), strict=False):
            print(f"  {len(serial)} runs of one process, {which}: {_range(values)} apart")
        for plan, losses in plans.items():
            largest, mean = zip(*(distance(losses, other) for other in serial), strict=True)
            print(f"  {plan:14} from them: at most {_range(largest)}, mean {_range(mean)}", flush=True)
    if arguments.json:
        print(json.dumps(results))


def _run(function: str, processes: int, arguments: dict[str, Any], folder: str) -> Any:
    """What rank 0 returned."""
    from autopart.local_job import run_local_job

    place = Path(tempfile.mkdtemp(dir=folder))
    return run_local_job(f"loss_curves:{function}", processes, arguments, place, 1200.0)[0]


def _range(values: Sequence[float]) -> str:
    """Least, median and largest."""
    return f"{min(values):.1e} .. {statistics.median(values):.1e} .. {max(values):.1e}"


if __name__ == "__main__":
    main()
