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
    padded: bool = True,
) -> dict[str, Tensor]:
    """Seeded inputs of one call with labels, by name.

    takes: the parameters of the model's forward. shape: ``seq``, ``image`` and ``audio`` as far as given.
    meta: on the meta device. dtype: of images and sound; None: float32. padded: rows of text have different lengths,
    which a mask says; else none is given. Raises ModelError.
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
        sizes = _vocab_size(spec, config), batch, _sequence(spec, config, shape.get("seq"))
        inputs = _text_inputs(task, *sizes, random, padded)
        if task == "token-classification":
            classes = torch.randint(config.num_labels, inputs["labels"].shape, generator=random)
            inputs["labels"] = classes.where(inputs["labels"] != IGNORED_LABEL, inputs["labels"])
    return {name: value.to("meta") for name, value in inputs.items()} if meta else inputs


def _text_inputs(
    task: str, vocab: int, batch: int, seq: int, random: torch.Generator, padded: bool
) -> dict[str, Tensor]:
    """Rows of different lengths, as a padding collator makes them, or full ones; every row has at least one label."""
    ids = torch.randint(vocab, (batch, seq), generator=random)
    valid = _ragged(batch, seq, random) if padded else torch.ones(batch, seq, dtype=torch.bool)
    if task in ("causal-lm", "token-classification"):
        labels = ids.masked_fill(~valid, IGNORED_LABEL)
    elif task == "masked-lm":
        asked = torch.rand((batch, seq), generator=random) < 0.3
        asked[:, 0] = True
        labels = ids.masked_fill(~(asked & valid), IGNORED_LABEL)
    else:
        target = torch.randint(vocab, (batch, seq), generator=random)
        labels = target.masked_fill(~_ragged(batch, seq, random), IGNORED_LABEL) if padded else target
    mask = {"attention_mask": valid.long()} if padded else {}
    return {"input_ids": ids, **mask, "labels": labels}


def _audio_inputs(
    spec: str,
    config: Any,
    task: str,
    takes: Sequence[str],
    batch: int,
    shape: Mapping[str, int],
    random: torch.Generator,
) -> dict[str, Tensor]:
    """Sound of one length, and a transcript of one length or a class; of several lengths, and short, for CTC."""
    if "input_ids" in takes or not {"input_features", "input_values"}.intersection(takes):
        raise ModelError(f"{spec}: it takes {', '.join(takes)}, not sound alone; build it in a file.py:function")
    name, size, frames = _sound(spec, config, takes, shape.get("audio"))
    inputs = {name: torch.randn((batch, *size), generator=random)}
    if frames and "attention_mask" in takes:
        inputs["attention_mask"] = torch.ones(batch, frames, dtype=torch.long)
    if task == "audio-classification":
        inputs["labels"] = torch.randint(config.num_labels, (batch,), generator=random)
    elif task == "ctc":
        # Frames are often merged by eight, and equal neighbours in a transcript need one between them.
        length = shape.get("seq", max(1, (shape.get("audio") or DEFAULT_AUDIO_FRAMES) // 16))
        classes = torch.randint(_vocab_size(spec, config) - 1, (batch, length), generator=random)
        classes += classes >= (getattr(config, "pad_token_id", None) or 0)  # which stands for the blank
        inputs["labels"] = classes.masked_fill(~_ragged(batch, length, random), IGNORED_LABEL)
    elif task == "speech-seq2seq":
        seq = shape.get("seq", DEFAULT_TRANSCRIPT)
        inputs["labels"] = torch.randint(_vocab_size(spec, config), (batch, seq), generator=random)
    return inputs


def _sound(spec: str, config: Any, takes: Sequence[str], frames: int | None) -> tuple[str, tuple[int, ...], int]:
    """The name and the shape of one sample's sound, ``[samples]`` or frames of features, and its mask's length.

    A waveform and a spectrogram of fixed length have no mask: 0.
    """
    fields: dict[str, Any] = {}
    for part in ("", "encoder_config", "audio_config", "encoder"):
        if (found := getattr(config, part, None) if part else config) is not None:
            fields = {**found.to_dict(), **fields}
    width = next((fields[key] for key in _FEATURES if isinstance(fields.get(key), int)), None)
    if "input_features" in takes and width is not None:
        if "num_mel_bins" in fields and isinstance(positions := fields.get("max_source_positions"), int):
            # The second of two convolutions halves them (Whisper, Radford et al. 2022).
            return "input_features", (width, 2 * positions), 2 * positions
        count = frames or DEFAULT_AUDIO_FRAMES
        return "input_features", (count, width), count
    if "input_values" not in takes:
        raise ModelError(
            f"{spec}: its configuration has none of {', '.join(_FEATURES)}, so there is no example of sound"
        )
    if width is not None and isinstance(fields.get("max_length"), int):
        return "input_values", (fields["max_length"], width), 0  # cut into patches (Gong et al. 2021)
    return "input_values", ((frames or DEFAULT_AUDIO_FRAMES) * SAMPLES_PER_FRAME,), 0


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
