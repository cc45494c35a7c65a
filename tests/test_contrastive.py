"""A contrastive loss, CLIP's: every sample meets every other, so the batch is run whole, and autopart says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CLIPConfig, CLIPModel

import autopart
from autopart.runtime.errors import BatchError
from launch import launch


def build() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**sizes, "vocab_size": 32, "max_position_embeddings": 8, "bos_token_id": 0, "eos_token_id": 31}
    vision = {**sizes, "image_size": 8, "patch_size": 4}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)).double()


def batch() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    words: Tensor = torch.randint(1, 31, (4, 6), generator=generator)
    words[:, -1] = 31
    images = torch.randn(4, 3, 8, 8, generator=generator, dtype=torch.float64)
    return {"input_ids": words, "pixel_values": images, "return_loss": True}


def train(model: nn.Module) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        loss = model(**batch()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def in_parallel() -> list[Any]:
    found = []
    every: tuple[dict[str, Any], ...] = ({"pp": 2}, {"tp": 2})
    for limits in every:
        model: Any = autopart.parallelize(build(), verbose=False, **limits)
        losses = train(model)
        manifest = model.parallel.manifest
        found.append((losses, len(manifest.stages), manifest.microbatches, manifest.batch_splittable))
    return found


@pytest.mark.slow
def test_the_batch_is_run_whole() -> None:
    expected = train(build())
    for pipeline, tensor in launch(in_parallel, 2, timeout=240.0):
        assert pipeline[0] == tensor[0] == pytest.approx(expected, rel=1e-6)
        assert pipeline[1:] == (2, 1, False) and tensor[1:] == (1, 1, False)


class Pairs(nn.Module):
    """The same loss with the batch's size asked of an input; transformers' asks ``len(logits)``."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 4), nn.Linear(5, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.one(x) @ self.other(y).T
        return nn.functional.cross_entropy(logits, torch.arange(x.shape[0]))


@pytest.mark.parametrize("name", ["pairs", "clip"])
def test_it_says_so(name: str) -> None:
    model, inputs = (build(), batch()) if name == "clip" else (Pairs(), {"x": torch.ones(4, 6), "y": torch.ones(4, 5)})
    program = autopart.capture(model, (), inputs, check_eval=False)
    plan = autopart.make_plan(program, autopart.Cluster.parse("2xH100"), pp=2 if name == "clip" else None)
    assert plan.dp == plan.microbatches == 1
    reason = "combines different samples"
    assert not program.static_batch
    assert any(reason in note for note in plan.notes)
    with pytest.raises(BatchError, match=rf"may not be split: .*{reason}"):
        autopart.make_plan(program, autopart.Cluster.parse("2xH100"), dp=2)
