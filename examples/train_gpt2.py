"""Trains transformers' GPT-2 on bytes: an ordinary training script, and one line of autopart.

In one process: ``python examples/train_gpt2.py``. In four, planned at the first call:
``torchrun --nproc-per-node 4 examples/train_gpt2.py``.
"""

from __future__ import annotations

import argparse
import os

import torch
from tqdm import tqdm

import autopart
import corpus
from small_gpt2 import build_model, validation_loss


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a small GPT-2 on the source files of the standard library.")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="rows per step, all ranks (default: %(default)s)")
    parser.add_argument("--seq", type=int, default=128, help="bytes per row (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of AdamW (default: %(default)s)")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    first = int(os.environ.get("RANK", "0")) == 0
    torch.manual_seed(0)

    model: torch.nn.Module = build_model(arguments.seq)
    model = autopart.parallelize(model)
    model.train()

    before = validation_loss(model, arguments.batch, arguments.seq)
    opt = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    batches = corpus.training_batches(arguments.batch, arguments.seq)
    progress = tqdm(range(1, arguments.steps + 1), disable=not first, unit="step")
    meter = autopart.Meter(model, progress=progress)
    for step in progress:
        x = next(batches)
        out = model(input_ids=x, labels=x)
        out.loss.backward()
        opt.step()
        opt.zero_grad()
        meter.step(loss=out.loss)
        if first and (step == 1 or step % 10 == 0):
            progress.write(f"step {step:4d}  loss {out.loss.item():.4f}")
    after = validation_loss(model, arguments.batch, arguments.seq)
    if first:
        print(f"validation loss {before:.4f} before, {after:.4f} after {arguments.steps} steps")


if __name__ == "__main__":
    main()
