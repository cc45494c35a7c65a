"""Seven transformers models, small enough to be compared with their parallel programs in float64.

Sizes divide by 2 and by 4 wherever a plan may want to split them, and most have four layers, so that four pipeline
stages each get one. The classes are transformers' own; tied weights are tied as the library ties them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopart.passes.program import Program
from autopart.precision import float64_throughout
from autopart.tracing import capture

BATCH = 8
SEQ = 12
VOCAB = 96
LABELS = 8
IMAGE = 16


@dataclass(frozen=True, slots=True)
class Family:
    """A model and its inputs: ``build()(**inputs(batch)).loss``.

    Compare in float64: capture under ``autopart.precision.float64_throughout`` and run the original under
    ``autopart.precision.eager_in_float64``, since the library computes parts of it in float32 otherwise.

    build: the same weights at every call, training mode.
    inputs: keyword arguments for ``batch`` samples; the first samples are the same for every batch size.
    batch: a size that every plan of four devices with up to two microbatches divides.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], dict[str, Tensor]]
    batch: int = BATCH

    def __str__(self) -> str:
        return self.name


def families(dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> tuple[Family, ...]:
    """All seven. ``dropout`` is the probability wherever a family has dropout (ResNet has none)."""
    makers = (gpt2, llama, bert, t5, vit, resnet, mixtral)
    return tuple(_seeded(maker(dropout, dtype)) for maker in makers)


def family(name: str, dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> Family:
    """One of them by name: gpt2, llama, bert, t5, vit, resnet, mixtral; with -1 gpt2, llama, mixtral of one layer."""
    short = {"gpt2-1": gpt2, "llama-1": llama, "mixtral-1": mixtral}
    if name in short:
        return replace(_seeded(short[name](dropout, dtype, layers=1)), name=name)
    return next(item for item in families(dropout, dtype) if item.name == name)


def _seeded(item: Family) -> Family:
    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return item.build().train()

    return replace(item, build=build)


@functools.lru_cache(maxsize=64)
def captured(name: str, dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> Program:
    """A family's program, not asked about evaluation; passes do not change it: the tests of one process share it."""
    item = family(name, dropout, dtype)
    with float64_throughout() if dtype == torch.float64 else nullcontext():
        return capture(item.build(), (), item.inputs(item.batch), check_eval=False)


def gpt2(dropout: float, dtype: torch.dtype, layers: int = 4) -> Family:
    """Learned positions, one fused projection for query, key and value, output tied to the embedding."""

    def build() -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=VOCAB,
            n_positions=32,
            n_embd=32,
            n_layer=layers,
            n_head=4,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        )
        return GPT2LMHeadModel(config).to(dtype)

    return Family("gpt2", build, _causal)


def llama(dropout: float, dtype: torch.dtype, layers: int = 4) -> Family:
    """Rotary positions, four query heads on two key-value heads, gated MLP, untied."""

    def build() -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            attention_dropout=dropout,
            use_cache=False,
        )
        return LlamaForCausalLM(config).to(dtype)

    return Family("llama", build, _causal)


def bert(dropout: float, dtype: torch.dtype) -> Family:
    """An encoder; the decoder at its end is tied to the embedding at its start."""

    def build() -> nn.Module:
        from transformers import BertConfig, BertForMaskedLM

        config = BertConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=32,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
        return BertForMaskedLM(config).to(dtype)

    return Family("bert", build, _masked)


def t5(dropout: float, dtype: torch.dtype) -> Family:
    """Encoder and decoder of two layers each; three uses of one embedding; relative positions shared by all layers."""

    def build() -> nn.Module:
        from transformers import T5Config, T5ForConditionalGeneration

        config = T5Config(
            vocab_size=VOCAB,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_decoder_layers=2,
            num_heads=4,
            relative_attention_num_buckets=8,
            relative_attention_max_distance=16,
            dropout_rate=dropout,
            decoder_start_token_id=0,
            use_cache=False,
        )
        return T5ForConditionalGeneration(config).to(dtype)

    return Family("t5", build, _seq2seq)


def vit(dropout: float, dtype: torch.dtype) -> Family:
    """16 patches and the class token."""

    def build() -> nn.Module:
        from transformers import ViTConfig, ViTForImageClassification

        config = ViTConfig(
            hidden_size=32,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=64,
            image_size=IMAGE,
            patch_size=4,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
            num_labels=LABELS,
        )
        return ViTForImageClassification(config).to(dtype)

    return Family("vit", build, lambda batch: _images(batch, IMAGE, dtype))


def resnet(dropout: float, dtype: torch.dtype) -> Family:
    """Four stages of one basic block, batch norm, skips with and without a projection."""

    def build() -> nn.Module:
        from transformers import ResNetConfig, ResNetForImageClassification

        config = ResNetConfig(
            embedding_size=16,
            hidden_sizes=[16, 16, 32, 32],
            depths=[1, 1, 1, 1],
            layer_type="basic",
            num_labels=LABELS,
        )
        return ResNetForImageClassification(config).to(dtype)

    # 64 pixels leave 2x2 at the last stage: batch norm needs more than one value even for one sample.
    return Family("resnet", build, lambda batch: _images(batch, 4 * IMAGE, dtype))


def mixtral(dropout: float, dtype: torch.dtype, layers: int = 4) -> Family:
    """Four experts, two per token. Eagerly in float64 it runs under ``eager_in_float64`` only."""

    def build() -> nn.Module:
        from transformers import MixtralConfig, MixtralForCausalLM

        config = MixtralConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
            max_position_embeddings=32,
            attention_dropout=dropout,
            use_cache=False,
        )
        return MixtralForCausalLM(config).to(dtype)

    return Family("mixtral", build, _causal)


def _per_sample(batch: int, make: Callable[[torch.Generator], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Stacks samples that depend on their own number alone, so that a larger batch extends a smaller one."""
    samples: list[dict[str, Any]] = [make(torch.Generator().manual_seed(index)) for index in range(batch)]
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def _text(random: torch.Generator) -> tuple[Tensor, Tensor]:
    """One row of tokens and its mask: true for the first tokens, at least half of them."""
    length = torch.randint(SEQ // 2, SEQ + 1, (), generator=random)
    return torch.randint(VOCAB, (SEQ,), generator=random), torch.arange(SEQ) < length


def _causal(batch: int) -> dict[str, Tensor]:
    def make(random: torch.Generator) -> dict[str, Tensor]:
        ids, valid = _text(random)
        return {"input_ids": ids, "attention_mask": valid.long(), "labels": ids.masked_fill(~valid, -100)}

    return _per_sample(batch, make)


def _masked(batch: int) -> dict[str, Tensor]:
    def make(random: torch.Generator) -> dict[str, Tensor]:
        ids, valid = _text(random)
        asked = valid & (torch.rand(SEQ, generator=random, dtype=torch.float64) < 0.4)
        asked[0] = True
        return {"input_ids": ids, "attention_mask": valid.long(), "labels": ids.masked_fill(~asked, -100)}

    return _per_sample(batch, make)


def _seq2seq(batch: int) -> dict[str, Tensor]:
    def make(random: torch.Generator) -> dict[str, Tensor]:
        ids, valid = _text(random)
        target, asked = _text(random)
        return {"input_ids": ids, "attention_mask": valid.long(), "labels": target.masked_fill(~asked, -100)}

    return _per_sample(batch, make)


def _images(batch: int, size: int, dtype: torch.dtype) -> dict[str, Tensor]:
    def make(random: torch.Generator) -> dict[str, Tensor]:
        pixels = torch.randn((3, size, size), generator=random, dtype=torch.float64).to(dtype)
        return {"pixel_values": pixels, "labels": torch.randint(LABELS, (), generator=random)}

    return _per_sample(batch, make)


FAMILIES = families()
NAMES = tuple(item.name for item in FAMILIES)

_UNLIKE = ("gpt2", "t5", "resnet", "mixtral")


def unlike_first(items: Sequence[Family] = FAMILIES) -> list[Any]:
    """For tests of every family: those that have least in common by default, the others as slow tests."""
    return [pytest.param(item, marks=() if item.name in _UNLIKE else pytest.mark.slow, id=item.name) for item in items]
