"""The model of the examples: transformers' own GPT-2, about 10 million parameters, on bytes."""

from __future__ import annotations

from itertools import islice

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

import corpus


def build_model(seq: int) -> GPT2LMHeadModel:
    """Random weights, those of torch's present seed; the output layer tied to the embedding; no dropout."""
    config = GPT2Config(
        vocab_size=corpus.VOCAB_SIZE,
        n_positions=seq,
        n_embd=384,
        n_layer=6,
        n_head=6,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config)


def validation_loss(model: torch.nn.Module, batch: int, seq: int, count: int = 8) -> float:
    """The mean loss over the first ``count`` validation batches; in a parallel job all ranks call it."""
    training = model.training
    model.eval()
    with torch.no_grad():
        losses = [model(input_ids=x, labels=x).loss.item() for x in corpus.validation_batches(batch, seq, count)]
    model.train(training)
    return sum(losses) / len(losses)


class Rows(Dataset[dict[str, Tensor]]):
    """The first bytes of the corpus, cut into rows."""

    def __init__(self, count: int, seq: int) -> None:
        self.rows = torch.cat(list(islice(corpus.training_batches(1, seq), count)))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}
