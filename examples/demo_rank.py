"""One rank of the demo, started by torchrun: loads the emitted program and trains it.

    torchrun --nproc-per-node 4 examples/demo_rank.py DIRECTORY ONE_PROCESS.json RESULT.json STEPS BATCH SEQ

ONE_PROCESS.json holds what training in one process gave; RESULT.json is written.
"""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

import autopart
import corpus
from small_gpt2 import build_model, validation_loss

VALIDATION_BATCHES = 4
# The first steps allocate memory and start threads; they are left out of the throughput.
WARM_UP = 2


@dataclass(frozen=True, slots=True)
class Training:
    """The same for one process and for many. batch: rows of a step over all ranks; seq: bytes of a row."""

    steps: int
    batch: int
    seq: int
    learning_rate: float = 1e-3


def train(
    model: torch.nn.Module,
    settings: Training,
    name: str,
    beside: list[float] | None = None,
    limit_s: float = math.inf,
) -> dict[str, Any]:
    """Trains with a progress bar and prints the loss of every step, ``beside`` those of another run.

    limit_s: no step is begun after that many seconds. Returns losses, the validation loss before and after, and tokens
    per second.
    """
    first = not dist.is_initialized() or dist.get_rank() == 0
    before = validation_loss(model, settings.batch, settings.seq, VALIDATION_BATCHES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
    batches = corpus.training_batches(settings.batch, settings.seq)
    losses: list[float] = []
    start = time.perf_counter()
    progress = tqdm(range(settings.steps), desc=name, unit="step", disable=not first)
    for step in progress:
        if step == WARM_UP:
            start = time.perf_counter()
        if step > WARM_UP and time.perf_counter() - start > limit_s:
            break
        x = next(batches)
        loss = model(input_ids=x, labels=x).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if first and beside is not None:
            both = f"one process {beside[step]:.6f}  {name} {losses[-1]:.6f}"
            progress.write(f"step {step + 1:3d}  {both}  difference {abs(losses[-1] - beside[step]):.1e}", sys.stdout)
        progress.set_postfix(loss=f"{losses[-1]:.3f}")
    seconds = (time.perf_counter() - start) / max(len(losses) - WARM_UP, 1)
    after = validation_loss(model, settings.batch, settings.seq, VALIDATION_BATCHES)
    return {
        "losses": losses,
        "before": before,
        "after": after,
        "tokens_per_s": settings.batch * settings.seq / seconds,
    }


def main() -> None:
    directory, alone, result = map(Path, sys.argv[1:4])
    settings = Training(*map(int, sys.argv[4:7]))
    torch.manual_seed(0)
    model = autopart.load(directory, build_model(settings.seq))
    beside = json.loads(alone.read_text())["losses"]
    found = train(model, settings, f"{dist.get_world_size()} processes", beside)
    if dist.get_rank() == 0:
        result.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
