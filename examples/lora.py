"""Fine-tunes a small GPT-2 by low-rank adapters: what is frozen has no gradients, and nothing is sent for it.

    torchrun --nproc-per-node 2 examples/lora.py

LoRA (arXiv 2106.09685) is written out here, for the library PEFT need not be installed; its models work alike.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

import autopart
import corpus
from small_gpt2 import build_model, validation_loss


class Adapted(nn.Module):
    """A frozen layer plus ``x A B * scale``; B starts as zeros, so that nothing changes at first."""

    def __init__(self, layer: nn.Module, inputs: int, outputs: int, rank: int, scale: float = 2.0) -> None:
        super().__init__()
        self.layer, self.scale = layer, scale
        like = next(layer.parameters())
        self.down = nn.Parameter(torch.randn(inputs, rank, dtype=like.dtype) / inputs**0.5)
        self.up = nn.Parameter(torch.zeros(rank, outputs, dtype=like.dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + (x @ self.down @ self.up) * self.scale


def add_adapters(model: nn.Module, suffix: str = "c_attn", rank: int = 4) -> nn.Module:
    """Freezes the model and puts adapters around its layers of this name (transformers' Conv1D: weight [in, out])."""
    model.requires_grad_(False)
    for path, module in list(model.named_modules()):
        if path.endswith(suffix):
            parent, _, name = path.rpartition(".")
            inputs, outputs = module.weight.shape
            setattr(model.get_submodule(parent), name, Adapted(module, int(inputs), int(outputs), rank))
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tunes a small GPT-2 by low-rank adapters.")
    parser.add_argument("--steps", type=int, default=50, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="rows per step, all ranks (default: %(default)s)")
    parser.add_argument("--seq", type=int, default=64, help="bytes per row (default: %(default)s)")
    arguments = parser.parse_args()
    first = int(os.environ.get("RANK", "0")) == 0
    torch.manual_seed(0)

    model: Any = autopart.parallelize(add_adapters(build_model(arguments.seq)))
    opt = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    before = validation_loss(model, arguments.batch, arguments.seq)
    batches = corpus.training_batches(arguments.batch, arguments.seq)
    progress = tqdm(range(arguments.steps), disable=not first, unit="step")
    meter = autopart.Meter(model, progress=progress)
    for _ in progress:
        x = next(batches)
        loss = model(input_ids=x, labels=x).loss
        loss.backward()
        opt.step()
        opt.zero_grad()
        meter.step(loss=loss)
    after = validation_loss(model, arguments.batch, arguments.seq)
    sent = sum(count.bytes for (_, _, phase), count in model.parallel.traffic.counts().items() if phase == "update")
    if first:
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        print(f"validation loss {before:.4f} before, {after:.4f} after; {trained:,} numbers trained on this rank,")
        print(f"{sent // arguments.steps:,} bytes of gradients summed in a step")


if __name__ == "__main__":
    main()
