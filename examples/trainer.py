"""Trains a small GPT-2 with the transformers library's Trainer: one import is another.

    torchrun --nproc-per-node 2 examples/trainer.py

Without torchrun it trains in one process. Needs accelerate, as the library's Trainer does: pip install accelerate.
"""

from __future__ import annotations

import argparse
import os
import tempfile

import torch
from transformers import TrainingArguments

from autopart.trainer import Trainer  # instead of: from transformers import Trainer
from small_gpt2 import Rows, build_model


def train(trainer_class: type = Trainer, steps: int = 100, batch: int = 16, seq: int = 64, folder: str = "") -> float:
    """Returns the mean loss over all steps, as the Trainer reports it."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as temporary:
        arguments = TrainingArguments(
            output_dir=folder or temporary,
            max_steps=steps,
            per_device_train_batch_size=batch,  # of the whole job: the model divides it
            learning_rate=1e-3,
            logging_steps=10,
            save_strategy="no",
            report_to=[],
        )
        trainer = trainer_class(model=build_model(seq), args=arguments, train_dataset=Rows(8 * batch, seq))
        found = trainer.train()
        if folder:
            trainer.save_model(folder)
    return float(found.training_loss)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a small GPT-2 with the Trainer of the transformers library.")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--folder", default="", help="where the model is saved for from_pretrained")
    options = parser.parse_args()
    loss = train(steps=options.steps, folder=options.folder)
    if os.environ.get("RANK", "0") == "0":
        print(f"mean loss {loss:.6f}")


if __name__ == "__main__":
    main()
