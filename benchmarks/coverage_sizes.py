"""Tiny configurations of transformers' families, as ``hf:`` names: which fields are made small, and to what.

A field is recognised by its name, in the configuration and in those nested in it (``text_config``); a family whose
names are its own keeps its sizes. Nothing here knows a family.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

# The heads that are covered, in the order of an ``hf:`` name's default. Of each group a family has a row.
TASKS = {
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "masked-lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "causal-lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "image-classification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "token-classification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "speech-seq2seq": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "ctc": "MODEL_FOR_CTC_MAPPING_NAMES",
    "audio-classification": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
}
SOUND = {"speech-seq2seq": "speech", "ctc": "speech", "audio-classification": "audio"}
"""Groups of heads beside that of texts and images."""

LAYERS, HEADS, VOCAB, IMAGE = 2, 4, 96, 64
FRAMES, TRANSCRIPT = 64, 8
# A number is replaced where it is larger than what stands here; the first pattern that matches the whole name decides.
_NUMBERS: tuple[tuple[str, int], ...] = (
    # Buckets of relative positions are few, and their number may be a default of the code.
    (r"type_vocab_size|(?!relative_attention).*bucket.*|num_groups", 8),
    (r"mamba_num_heads|mamba_n_heads", 8),
    (r"(.*_)?vocab_size(_.*)?", 96),
    (
        r"(num_)?((en|de)coder_|hidden_|sparse_(en|de)coder_)*layers|n_layers?|num_(en|de)coder_layers|depth|num_blocks",
        2,
    ),
    (r"num_sparse_(en|de)coder_layers", 1),
    (r"(max_2d_)?((en|de)coder_)?(max_position_embeddings|max_(en|de)coder_position_embeddings|n_positions|n_ctx)", 64),
    (r"max_(source|target)_positions|max_seq_len|model_max_length|max_pos_emb|original_max_position_embeddings", 64),
    (r"num_key_value_heads|num_kv_heads|swa_num_key_value_heads|linear_num_key_heads", 2),
    (
        r"(swa_|(num_)?(en|de)coder_|num_(self_|cross_)?|linear_|linear_num_|index_n_|mamba_n_)*(attention_|value_)?heads",
        4,
    ),
    (r"n_heads?|index_n_heads|num_(en|de)coder_attention_heads", 4),
    (r"qk_head_dim", 16),
    (r"d_kv|d_head|dim_head|.*head_dim|attention_head_size|mamba_d_head|kv_channels", 8),
    (r"rotary_dim", 4),
    (r"(.*_)?lora_rank|embedding_rank|laurel_rank|hc_lowrank|gated_norm_rank", 16),
    (r"(.*moe_|.*expert_|.*experts_)intermediate_size|moe_dim", 32),
    (
        r"(.*_)?intermediate_size(_mlp)?|((en|de)coder_)?ffn(_hidden)?_(dim|size)|d_ff|dff|dim_ff|n_inner|d_inner|mlp_dim",
        64,
    ),
    (r"feed_forward_size|hidden_dim", 64),
    (r"num_experts_per_tok(en)?|moe_k|moe_topk|top_k|top_k_experts", 2),
    (r"num_experts|num_local_experts|n_routed_experts|moe_num_experts", 4),
    (r"n_group|topk_group|num_expert_group|n_shared_experts|num_shared_experts|moe_num_shared_experts", 1),
    (r"first_k_dense_replace|max_window_layers|num_kv_shared_layers", 1),
    (r"hidden_size_per_layer_input", 8),
    (
        r"(.*_)?hidden_size(_global)?|d_model|n_embd|dim|emb(ed(ding)?)?_dim|embedding_size|projection_(dim|size)|d_latents",
        32,
    ),
    (
        r"(in|out)put_embedding_size|prediction_head_size|decoder_hidden_size|pooler_output_size|out_hidden_size|emb_dim",
        32,
    ),
    (r"(.*_)?state_size|mamba_d_state", 8),
    (r"query_pre_attn_scalar|time_step_rank|mamba_dt_rank", 8),
    (r"sliding_window(_size)?|local_attention|attention_window|attention_chunk_size|index_topk|.*chunk_size", 8),
    (r"image_size", IMAGE),
    (r"patch_size", 16),
    # Four stages of an image of 64 in patches of 4 end with 2 x 2.
    (r"window_size", 2),
    (r"mamba_d_ssm", 64),
    (r"num_latents|num_landmarks", 8),
    (r"num_mel_bins|input_feat_per_channel|feature_projection_input_dim", 32),
    (r"max_length", 64),
    (r"context_size", 16),
    (r"conv_channels|classifier_proj_size|subsampling_conv_channels|num_conv_pos_embeddings", 16),
    (r"num_conv_pos_embedding_groups", 4),
)
# Fields that a model needs and its configuration leaves open.
_MISSING = {
    "vocab_size": VOCAB,
    "head_dim": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_key_value_heads": HEADS,
    "num_experts_per_tok": 2,
}
# Lists of one entry per stage: all entries are replaced by the beginning of what stands here.
_LISTS: tuple[tuple[str, tuple[int, ...]], ...] = (
    (r"depths|layers|block_sizes", (1, 1, 1, 1, 1, 1, 1, 1)),
    (r"depth", (1, 2, 3, 4)),  # a stage takes its number of drop_path's rates, of which it has one per layer
    (r"hidden_sizes|embed_dims?|neck_hidden_sizes|channels|dims", (16, 16, 32, 32, 32, 32, 32, 32)),
    (r"num_heads|num_attention_heads|.*_heads", (2, 2, 2, 2, 2, 2, 2, 2)),
    (r"conv_dim", (32,) * 16),
)
# Masks that speech models draw with NumPy: they would be drawn once, at capture.
_RANDOM = ("mask_time_prob", "mask_feature_prob")


def spec(family: str, task: str, *, batch: int, seq: int) -> str:
    """The ``hf:`` name of a family's tiny model. Raises whatever the family's configuration class does."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[family]()
    fields = small(config.to_dict())
    shape: dict[str, Any] = {"task": task, "batch": batch}
    if task in SOUND:
        shape["audio"] = FRAMES
    if task == "speech-seq2seq":
        shape["seq"] = TRANSCRIPT
    elif task == "image-classification":
        shape |= {} if "image_size" in fields else {"image": IMAGE}
    elif task not in SOUND:
        shape["seq"] = seq
    if task.endswith("classification"):
        fields["num_labels"] = 8
    texts = [f"{key}={value if isinstance(value, int) else json.dumps(value)}" for key, value in fields.items()]
    return f"hf:{family}?" + "&".join([*texts, *(f"{key}={value}" for key, value in shape.items())])


def small(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a configuration that are changed, with their new values; nested configurations whole."""
    result: dict[str, Any] = {}
    count = _layer_count(fields)
    kinds = _kinds(fields, count)
    for key, value in fields.items():
        if isinstance(value, dict) and "model_type" in value:
            kind = {"model_type": value["model_type"]} if value["model_type"] else {}
            result[key] = {**kind, **small(value)}
        elif key in _RANDOM and value:
            result[key] = 0.0
        elif value is None and key in _MISSING:
            result[key] = _MISSING[key]
        elif key == "num_key_value_heads" and value == fields.get("num_attention_heads"):
            result[key] = min(HEADS, value or HEADS)
        elif isinstance(value, int) and not isinstance(value, bool):
            # A state space model has as many heads as its expanded width asks.
            name = "mamba_num_heads" if key == "num_heads" and "expand" in fields else key
            smaller = next((size for pattern, size in _NUMBERS if re.fullmatch(pattern, name)), value)
            if smaller < value:
                result[key] = smaller
        elif isinstance(value, list | tuple) and value and count and len(value) == count and kinds:
            result[key] = [value[index] for index in kinds]
        elif isinstance(value, list | tuple) and value and all(isinstance(item, int) for item in value):
            sizes = next((sizes for pattern, sizes in _LISTS if re.fullmatch(pattern, key)), None)
            if sizes is not None:
                result[key] = list(sizes[: len(value)])
    if kinds and len(kinds) != LAYERS:
        for key in result:
            if key in ("num_hidden_layers", "n_layer", "num_layers", "n_layers"):
                result[key] = len(kinds)
    return result


def _layer_count(fields: Mapping[str, Any]) -> int:
    for key in ("num_hidden_layers", "n_layer", "num_layers", "n_layers"):
        if isinstance(fields.get(key), int):
            return int(fields[key])
    return 0


def _per_stage(key: str) -> bool:
    return any(re.fullmatch(pattern, key) for pattern, _ in _LISTS)


def _kinds(fields: Mapping[str, Any], count: int) -> list[int]:
    """Layers that are kept where lists have an entry per layer: one of each kind, at least as many as elsewhere."""
    lists = [
        value
        for key, value in fields.items()
        if isinstance(value, list | tuple) and len(value) == count > LAYERS and not _per_stage(key)
    ]
    if any(_per_stage(key) and isinstance(value, list | tuple) for key, value in fields.items()):
        return []
    if not lists:
        return []
    first: dict[str, int] = {}
    for index in range(count):
        first.setdefault(json.dumps([value[index] for value in lists], default=str), index)
    kept = sorted(first.values())[:4]
    others = [index for index in range(count) if index not in kept]
    return sorted([*kept, *others[: max(0, LAYERS - len(kept))]])
