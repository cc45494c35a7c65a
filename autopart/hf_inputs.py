"""Example inputs of transformers' models, from the fields of a configuration: tokens, images, sound, and labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autopart.models import SEED, ModelError

# A rotary model's limit may be 131,072 tokens; nobody means that by leaving ``seq`` out.
DEFAULT_SEQ_LIMIT = 1024
DEFAULT_AUDIO_FRAMES = 200
DEFAULT_TRANSCRIPT = 16
SAMPLES_PER_FRAME = 320  # 20 ms at 16 kHz, as wav2vec 2.0 has them (Baevski et al. 2020)
IGNORED_LABEL = -100
# How families name the width of a frame of features.
_FEATURES = ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "input_dim")


def hf_inputs(
    spec: str,
    config: Any,
    task: str,
    takes: Sequence[str],
    batch: int,
    shape: Mapping[str, int],
    meta: bool,
    dtype: torch.dtype | None,
) -> dict[str, Tensor]:
    """Seeded inputs of one call with labels, by name.

    takes: the parameters of the model's forward. shape: ``seq``, ``image`` and ``audio`` as far as given.
    meta: on the meta device. dtype: of images and sound; None: float32. Raises ModelError.
    """
    random = torch.Generator().manual_seed(SEED)
    if task == "image-classification":
        vision = getattr(config, "vision_config", config)
        size = shape.get("image") or getattr(vision, "image_size", None) or 224
        height, width = (size, size) if isinstance(size, int) else tuple(size)
        dims = (batch, getattr(vision, "num_channels", 3), height, width)
        # Only the images are large enough that they must not be made on the way to the meta device.
        pixels = torch.empty(dims, device="meta") if meta else torch.randn(dims, generator=random)
        labels = torch.randint(config.num_labels, (batch,), generator=random)
        inputs = {"pixel_values": pixels.to(dtype or torch.float32), "labels": labels}
    elif task in ("speech-seq2seq", "ctc", "audio-classification"):
        inputs = _audio_inputs(spec, config, task, takes, batch, shape, random)
        inputs = {name: leaf.to(dtype) if dtype and leaf.is_floating_point() else leaf for name, leaf in inputs.items()}
    else:
        inputs = _text_inputs(task, _vocab_size(spec, config), batch, _sequence(spec, config, shape.get("seq")), random)
        if task == "token-classification":
            classes = torch.randint(config.num_labels, inputs["labels"].shape, generator=random)
            inputs["labels"] = classes.where(inputs["labels"] != IGNORED_LABEL, inputs["labels"])
    return {name: value.to("meta") for name, value in inputs.items()} if meta else inputs


def _text_inputs(task: str, vocab: int, batch: int, seq: int, random: torch.Generator) -> dict[str, Tensor]:
    """Rows of different lengths, as a padding collator makes them; every row has at least one label."""
    ids = torch.randint(vocab, (batch, seq), generator=random)
    valid = _ragged(batch, seq, random)
    if task in ("causal-lm", "token-classification"):
        labels = ids.masked_fill(~valid, IGNORED_LABEL)
    elif task == "masked-lm":
        asked = torch.rand((batch, seq), generator=random) < 0.3
        asked[:, 0] = True
        labels = ids.masked_fill(~(asked & valid), IGNORED_LABEL)
    else:
        target = torch.randint(vocab, (batch, seq), generator=random)
        labels = target.masked_fill(~_ragged(batch, seq, random), IGNORED_LABEL)
    return {"input_ids": ids, "attention_mask": valid.long(), "labels": labels}


def _audio_inputs(
    spec: str,
    config: Any,
    task: str,
    takes: Sequence[str],
    batch: int,
    shape: Mapping[str, int],
    random: torch.Generator,
) -> dict[str, Tensor]:
    """Sound of one length, and a transcript of its own length for each row, or a class."""
    name = next((name for name in ("input_features", "input_values") if name in takes), None)
    if name is None or "input_ids" in takes:
        raise ModelError(f"{spec}: it takes {', '.join(takes)}, not sound alone; build it in a file.py:function")
    sound = torch.randn((batch, *_sound(spec, config, name, shape.get("audio"))), generator=random)
    if task == "audio-classification":
        labels = torch.randint(config.num_labels, (batch,), generator=random)
    else:
        # The last id pads or is blank in some families, the first in others.
        seq = shape.get("seq", DEFAULT_TRANSCRIPT)
        ids = torch.randint(1, _vocab_size(spec, config) - 1, (batch, seq), generator=random)
        labels = ids.masked_fill(~_ragged(batch, seq, random), IGNORED_LABEL)
    return {name: sound, "labels": labels}


def _sound(spec: str, config: Any, name: str, frames: int | None) -> tuple[int, ...]:
    """The shape of one sample's sound: ``[samples]``, ``[frames, features]``, or with as many frames as positions."""
    fields: dict[str, Any] = {}
    for part in (config, getattr(config, "encoder_config", None), getattr(config, "audio_config", None)):
        if part is not None:
            fields = {**part.to_dict(), **fields}
    width = next((fields[key] for key in _FEATURES if isinstance(fields.get(key), int)), None)
    if name == "input_values":
        if width and isinstance(fields.get("max_length"), int):  # a spectrogram, cut into patches (Gong et al. 2021)
            return fields["max_length"], width
        return ((frames or DEFAULT_AUDIO_FRAMES) * SAMPLES_PER_FRAME,)
    if width is None:
        raise ModelError(
            f"{spec}: its configuration has none of {', '.join(_FEATURES)}, so sound cannot be made for it"
        )
    if "num_mel_bins" in fields and isinstance(positions := fields.get("max_source_positions"), int):
        return width, 2 * positions  # the second of two convolutions halves them (Whisper, Radford et al. 2022)
    return frames or DEFAULT_AUDIO_FRAMES, width


def _ragged(batch: int, seq: int, random: torch.Generator) -> Tensor:
    """Bool [batch, seq]: row lengths between half and the whole sequence, the first row whole."""
    lengths = torch.randint(max(1, seq // 2), seq + 1, (batch, 1), generator=random)
    lengths[0] = seq
    return torch.arange(seq) < lengths


def _vocab_size(spec: str, config: Any) -> int:
    vocab = getattr(config.get_text_config(), "vocab_size", None)
    if not isinstance(vocab, int):
        raise ModelError(f"{spec}: its configuration has no vocab_size, so example inputs cannot be made for it")
    return vocab


def _sequence(spec: str, config: Any, given: int | None) -> int:
    """Tokens per row: as given, else the largest power of two that the model's positions hold, 1,024 at most."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:  # relative positions
        return given or DEFAULT_SEQ_LIMIT
    if given is not None and given > limit:
        raise ModelError(f"{spec}: seq={given} is longer than the model's {limit} positions (max_position_embeddings)")
    # A power of two, because some families (RoBERTa: 514) count positions that no token can take.
    return given or min(DEFAULT_SEQ_LIMIT, 1 << (limit.bit_length() - 1))
