"""Models of the transformers library by name, ``hf:FAMILY?key=value&…``; see :mod:`autopart.models` for the keys.

Random weights from a configuration; nothing is downloaded.
The library is imported when the first such model is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from autopart.models import SEED, LoadedModel, ModelError, near, one_line, seeded

DEFAULT_BATCH = 8
# A rotary model's limit may be 131,072 tokens; nobody means that by leaving ``seq`` out.
DEFAULT_SEQ_LIMIT = 1024
DEFAULT_NUM_LABELS = 10
IGNORED_LABEL = -100

# Task -> (transformers' Auto class, its table of families), in the order in which a family's default is looked up: an
# encoder that also has a causal head (BERT) is meant as an encoder, an encoder-decoder (BART) as a whole.
_TASKS = {
    "seq2seq": ("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"),
    "masked-lm": ("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
    "causal-lm": ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    "image-classification": ("AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"),
    "token-classification": ("AutoModelForTokenClassification", "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES"),
}

_DTYPES = {
    "float64": torch.float64,
    "fp64": torch.float64,
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}

_OWN_KEYS = ("batch", "seq", "image", "task", "dtype")
# Understood by every configuration although not among its fields, with the default that gives the type.
_COMMON_FIELDS: dict[str, Any] = {
    "num_labels": DEFAULT_NUM_LABELS,
    "attn_implementation": "",
    "experts_implementation": "",
    "decoder_start_token_id": 0,
}
_BOOKKEEPING_FIELDS = {"transformers_version", "architectures", "model_type", "id2label", "label2id", "dtype"}


def load_hf(spec: str, meta: bool, dtype: torch.dtype | None, batch: int | None) -> LoadedModel:
    family, given = _split(spec)
    try:
        import transformers
        from transformers.models.auto import modeling_auto
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
    except ImportError as error:
        raise ModelError(f"{spec}: hf: models need the transformers library: pip install 'autopart[hf]'") from error

    if family not in CONFIG_MAPPING_NAMES:
        raise ModelError(f"{spec}: transformers has no family {family!r}{near(family, CONFIG_MAPPING_NAMES)}")
    supported = [task for task, (_, table) in _TASKS.items() if family in getattr(modeling_auto, table)]
    if not supported:
        raise ModelError(f"{spec}: {family} has no head for {', '.join(_TASKS)}; build it in a file.py:function")
    task = given.pop("task", supported[0])
    if task not in supported:
        raise ModelError(f"{spec}: {family} has no head for task={task}; it has {', '.join(supported)}")
    if "dtype" in given:
        name = given.pop("dtype")
        if name not in _DTYPES:
            raise ModelError(f"{spec}: dtype={name} is unknown; use one of {', '.join(_DTYPES)}")
        dtype = dtype or _DTYPES[name]
    shape: dict[str, int] = {
        key: _positive(spec, key, given.pop(key)) for key in ("batch", "seq", "image") if key in given
    }
    unused = "image" if task != "image-classification" else "seq"
    if unused in shape:
        raise ModelError(f"{spec}: {unused}= does not apply to {task}")

    config = _config(spec, CONFIG_MAPPING[family], given, task, shape.get("image"))
    inputs = _hf_inputs(spec, config, task, batch or shape.get("batch", DEFAULT_BATCH), shape, meta, dtype)
    auto = getattr(transformers, _TASKS[task][0])
    if isinstance(heads := getattr(modeling_auto, _TASKS[task][1])[family], tuple):
        config.architectures = [heads[0]]  # of several heads the library asks which
    try:
        with seeded(meta):
            model = auto.from_config(config, dtype=dtype or torch.float32)
    except Exception as error:  # whatever a family's constructor makes of the configuration
        raise ModelError(f"{spec}: transformers cannot build it: {one_line(error)}") from error
    return LoadedModel(model.train(), (), inputs, spec)


def _split(spec: str) -> tuple[str, dict[str, str]]:
    """``hf:gpt2?n_layer=2&seq=8`` -> ``gpt2``, ``{n_layer: 2, seq: 8}`` (values as text)."""
    family, _, query = spec.removeprefix("hf:").partition("?")
    given: dict[str, str] = {}
    for part in query.split("&") if query else ():
        key, equals, value = part.partition("=")
        if not equals or not key or not value:
            raise ModelError(f"{spec}: {part!r} is not of the form key=value")
        if key in given:
            raise ModelError(f"{spec}: {key} is given twice")
        given[key] = value
    return family, given


def _config(spec: str, config_class: Any, given: Mapping[str, str], task: str, image: int | None) -> Any:
    """The configuration with the given fields, made consistent where the command line leaves a field to follow."""
    try:
        defaults = config_class()
    except Exception as error:
        raise ModelError(f"{spec}: its configuration has no defaults: {one_line(error)}") from error
    fields = {key: _field(defaults, key) for key in (*defaults.to_dict(), *defaults.attribute_map)}
    fields = {key: value for key, value in fields.items() if not key.startswith("_") and key not in _BOOKKEEPING_FIELDS}
    fields = {**_COMMON_FIELDS, **fields}
    annotations = {name: str(kind) for name, kind in getattr(config_class, "__annotations__", {}).items()}

    values: dict[str, Any] = {}
    for key, text in given.items():
        if key not in fields:
            known = [*fields, *_OWN_KEYS]
            raise ModelError(f"{spec}: {config_class.__name__} has no field {key!r}{near(key, known)}")
        values[key] = _parse(spec, key, text, fields[key], annotations.get(key, ""))
        if (original := defaults.attribute_map.get(key)) in given:
            raise ModelError(f"{spec}: {key} is another name of {original}; give one of them")
    # A model that trains needs no cache of keys and values; without this it would return one.
    if "use_cache" in fields:
        values.setdefault("use_cache", False)
    if task in ("image-classification", "token-classification"):
        values.setdefault("num_labels", DEFAULT_NUM_LABELS)
    if image is not None and "image_size" in fields and values.setdefault("image_size", image) != image:
        raise ModelError(f"{spec}: image={image} contradicts image_size={values['image_size']}")
    try:
        config = config_class(**values)
    except Exception as error:  # transformers' own validation of types and of combinations
        raise ModelError(f"{spec}: {config_class.__name__} refuses it: {one_line(error)}") from error
    if task == "seq2seq" and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
    if task != "image-classification":
        _clamp_token_ids(spec, config, given)
    return config


def _field(config: Any, key: str) -> Any:
    """A field's value; the library refuses to give one that differs from layer to layer."""
    try:
        return getattr(config, key, None)
    except Exception:
        return config.to_dict().get(key)


def _clamp_token_ids(spec: str, config: Any, given: Mapping[str, str]) -> None:
    """Special tokens outside a vocabulary that was made smaller become its last: embeddings index by them."""
    vocab = getattr(config.get_text_config(), "vocab_size", None)
    if vocab is None:
        return
    for part in {id(item): item for item in (config, config.get_text_config())}.values():
        for key, value in vars(part).copy().items():
            if not key.endswith("_token_id") or not isinstance(value, int | list):
                continue
            highest = max(value, default=0) if isinstance(value, list) else value
            if highest < vocab:
                continue
            if key in given:
                raise ModelError(f"{spec}: {key}={given[key]} lies outside the vocabulary of {vocab}")
            setattr(part, key, [min(item, vocab - 1) for item in value] if isinstance(value, list) else vocab - 1)


def _hf_inputs(
    spec: str, config: Any, task: str, batch: int, shape: Mapping[str, int], meta: bool, dtype: torch.dtype | None
) -> dict[str, Tensor]:
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


def _parse(spec: str, key: str, text: str, default: Any, annotation: str) -> Any:
    """The value of a field, read as its default's type; ``null`` is None for every field."""
    if text == "null":
        return None
    try:
        if isinstance(default, bool):
            return {"true": True, "false": False, "1": True, "0": False}[text.lower()]
        if isinstance(default, str):
            return text
        if text[0] in "[{":
            return json.loads(text)
        if isinstance(default, int) and "float" not in annotation:
            return int(text)
        if isinstance(default, int | float):
            return float(text)
        if isinstance(default, list | tuple):
            return [_scalar(item) for item in text.split(",")]
        return _scalar(text)
    except (ValueError, KeyError) as error:
        kind = type(default).__name__
        raise ModelError(f"{spec}: {key}={text} cannot be read; a value of type {kind} such as {default}") from error


def _scalar(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _positive(spec: str, key: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ModelError(f"{spec}: {key}={text} has to be a whole number of at least 1")
    return int(text)
