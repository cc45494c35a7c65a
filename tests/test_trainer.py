"""The transformers library's Trainer over parallel programs: its losses, files and resumed runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments
from transformers import Trainer as PlainTrainer

import autopart
from launch import launch

pytest.importorskip("accelerate", reason="the Trainer needs accelerate: pip install accelerate")

STEPS = 6


class Rows(Dataset[dict[str, Tensor]]):
    """Ragged labels, so that every batch has another number of them; an extra column that the model does not take."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(32, (22, 8), generator=generator)
        ignored = torch.rand(self.ids.shape, generator=generator, dtype=torch.float64) < 0.3
        self.labels = self.ids.masked_fill(ignored, -100)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.labels[index], "note": torch.tensor(index)}


def model_of() -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32, n_positions=8, bos_token_id=0, eos_token_id=0)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return GPT2LMHeadModel(config).double()


def arguments(folder: str, **more: Any) -> TrainingArguments:
    """Batches of 4 of 22 rows (the last one has 2), two of them accumulated, evaluated and saved on the way."""
    settings: dict[str, Any] = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.01,
        "weight_decay": 0.1,
        "max_grad_norm": 0.3,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_strategy": "steps",
        "save_steps": 4,
        "report_to": [],
        "disable_tqdm": True,
    }
    return TrainingArguments(output_dir=folder, **{**settings, **more})


def history(trainer: Any) -> list[float]:
    """Losses of training and evaluation, and norms, in their order."""
    kept = ("loss", "eval_loss", "grad_norm")
    return [entry[name] for entry in trainer.state.log_history for name in kept if name in entry]


def in_parallel(folder: str, limits: dict[str, Any], resume: str | None) -> tuple[list[float], dict[str, Tensor]]:
    from autopart.trainer import Trainer

    # accelerate asks for what torchrun sets; the processes are connected already
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0", LOCAL_WORLD_SIZE="2")
    model = autopart.parallelize(model_of(), verbose=False, **limits)
    trainer = Trainer(model=model, args=arguments(folder), train_dataset=Rows(), eval_dataset=Rows())
    assert trainer.args.world_size == 2 and trainer.args.should_save == (dist.get_rank() == 0)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(folder)
    return history(trainer), model.state_dict()


def test_it_trains_saves_and_resumes_as_the_library_s_own(tmp_path: Path) -> None:
    plain = PlainTrainer(
        model=model_of(),
        args=arguments(str(tmp_path / "plain"), save_strategy="no"),
        train_dataset=Rows(),
        eval_dataset=Rows(),
    )
    plain.train()
    expected, weights = history(plain), plain.model.state_dict()
    folder = tmp_path / "parallel"
    # Under another plan from the checkpoint at step 4 of the first run.
    runs = [({"pp": 2, "microbatches": 2}, None), ({"dp": 2}, str(folder / "checkpoint-4"))]
    for limits, resume in runs:
        for losses, state in launch(in_parallel, 2, str(folder), limits, resume, timeout=240.0):
            assert losses == pytest.approx(expected, rel=1e-6)
            for name, tensor in weights.items():
                torch.testing.assert_close(state[name], tensor, rtol=1e-6, atol=1e-9)
    again = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float64)
    torch.testing.assert_close(again.state_dict()["lm_head.weight"], weights["lm_head.weight"], rtol=1e-6, atol=1e-9)
