"""Trains a small GPT-2 in a loop of the Accelerate library: one import is another.

    torchrun --nproc-per-node 2 examples/accelerate_gpt2.py

Without torchrun it trains in one process. Needs Accelerate: pip install accelerate.
"""

from __future__ import annotations

import argparse

import torch
from torch.utils.data import DataLoader

from autopart.accelerator import Accelerator  # instead of: from accelerate import Accelerator
from small_gpt2 import Rows, build_model


def train(accelerator_class: type = Accelerator, steps: int = 100, batch: int = 16, seq: int = 64) -> list[float]:
    """Returns the loss of each batch, of which two make a step."""
    torch.manual_seed(0)
    accelerator = accelerator_class(gradient_accumulation_steps=2)
    model = build_model(seq)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)
    loader = DataLoader(Rows(8 * batch, seq), batch, shuffle=True, generator=torch.Generator().manual_seed(0))
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    losses: list[float] = []
    while len(losses) < 2 * steps:
        for rows in loader:
            with accelerator.accumulate(model):
                loss = model(**rows).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            if len(losses) % 20 == 0:
                accelerator.print(f"step {len(losses) // 2:4d}  loss {losses[-1]:.4f}")
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a small GPT-2 in a loop of the Accelerate library.")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps (default: %(default)s)")
    train(steps=parser.parse_args().steps)


if __name__ == "__main__":
    main()
