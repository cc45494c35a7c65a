"""The families that other tests compare with: deterministic, float64, finite, tied where they should be."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopart.precision import eager_in_float64
from families import BATCH, FAMILIES, Family, family


@pytest.mark.parametrize("item", FAMILIES, ids=str)
def test_a_family_is_deterministic_and_trains(item: Family) -> None:
    losses = []
    for _ in range(2):
        model = item.build()
        with eager_in_float64(model):
            loss = model(**item.inputs(item.batch)).loss
        loss.backward()
        losses.append(loss.item())
        assert loss.dtype == torch.float64 and torch.isfinite(loss)
    assert losses[0] == losses[1]


@pytest.mark.parametrize("item", FAMILIES, ids=str)
def test_a_smaller_batch_is_the_beginning_of_a_larger_one(item: Family) -> None:
    small, large = item.inputs(2), item.inputs(BATCH)
    assert all(torch.equal(value, large[name][:2]) for name, value in small.items())


def test_dropout_is_kept_on_request() -> None:
    item = family("gpt2", dropout=0.5)
    model, inputs = item.build(), item.inputs(2)
    assert not torch.equal(model(**inputs).loss, model(**inputs).loss)


def test_ties() -> None:
    model: Any = family("bert").build()
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
    model = family("t5").build()
    assert model.lm_head.weight is model.encoder.embed_tokens.weight is model.decoder.embed_tokens.weight
