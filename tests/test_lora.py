"""Low-rank adapters on a frozen model: equal to one process, and nothing is summed for what is frozen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import autopart
from launch import launch
from lora import add_adapters

STEPS = 3


def build() -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=8, bos_token_id=0, eos_token_id=0)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return add_adapters(GPT2LMHeadModel(config).double(), rank=2)


def train(model: nn.Module) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    losses = []
    for step in range(STEPS):
        x = torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=x, labels=x.clone())["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def in_parallel(plans: list[dict[str, Any]]) -> list[Any]:
    found = []
    for limits in plans:
        model: Any = autopart.parallelize(build(), verbose=False, **limits)
        losses = train(model)
        counts = model.parallel.traffic.counts().items()
        found.append((losses, {key[:2]: count.bytes for key, count in counts if key[2] == "update"}))
    return found


def test_only_the_adapters_gradients_are_summed() -> None:
    plain = build()
    expected = train(plain)
    trained = sum(p.numel() * 8 for p in plain.parameters() if p.requires_grad)
    for replicas, stages in launch(in_parallel, 2, [{"dp": 2}, {"pp": 2, "microbatches": 2}], timeout=180.0):
        assert replicas[0] == pytest.approx(expected, rel=1e-6)  # transformers computes the loss in float32
        assert replicas[1] == {("all_reduce", "dp"): STEPS * trained}
        # The embedding is tied over both stages, and frozen.
        assert stages[0] == pytest.approx(expected, rel=1e-6)
        assert stages[1] == {}
