"""Models that :mod:`gpu_steps` trains on one GPU, as scripts for pretraining build them: tokens and labels, no mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def gpt2_124m(batch: int = 8) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """GPT-2 as published, 1,024 tokens."""
    return _gpt2(batch)


def gpt2_355m(batch: int = 8) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """GPT-2 medium, 1,024 tokens."""
    return _gpt2(batch, n_layer=24, n_embd=1024, n_head=16)


def llama_1b(batch: int = 4) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The sizes of Llama 3.2 1B with tied embeddings, 2,048 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return LlamaForCausalLM(config), (), _tokens(batch, 2048, config.vocab_size)


def _gpt2(batch: int, **sizes: int) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(use_cache=False, **sizes)
    return GPT2LMHeadModel(config), (), _tokens(batch, config.n_positions, config.vocab_size)


def _tokens(batch: int, seq: int, vocabulary: int) -> dict[str, Any]:
    tokens = torch.randint(vocabulary, (batch, seq))
    return {"input_ids": tokens, "labels": tokens}
