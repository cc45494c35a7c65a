"""Models of the transformers library by name, ``hf:FAMILY?key=value&…``; see :mod:`autopart.models` for the keys.

Random weights from a configuration; nothing is downloaded.
The library is imported when the first such model is asked for.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from autopart.hf_inputs import hf_inputs
from autopart.models import LoadedModel, ModelError, near, one_line, seeded

DEFAULT_BATCH = 8
DEFAULT_NUM_LABELS = 10

# Task -> (transformers' Auto class, its table of families), in the order in which a family's default is looked up: an
# encoder that also has a causal head (BERT) is meant as an encoder, an encoder-decoder (BART) as a whole.
_TASKS = {
    "seq2seq": ("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"),
    "masked-lm": ("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
    "causal-lm": ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    "image-classification": ("AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"),
    "token-classification": ("AutoModelForTokenClassification", "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES"),
    "speech-seq2seq": ("AutoModelForSpeechSeq2Seq", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES"),
    "ctc": ("AutoModelForCTC", "MODEL_FOR_CTC_MAPPING_NAMES"),
    "audio-classification": ("AutoModelForAudioClassification", "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES"),
}
_CLASSES = ("image-classification", "token-classification", "audio-classification")
# What shapes the example inputs of a task beside the batch.
_SHAPES: dict[str, tuple[str, ...]] = {
    "image-classification": ("image",),
    "audio-classification": ("audio",),
    "ctc": ("audio",),
    "speech-seq2seq": ("seq", "audio"),
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

_OWN_KEYS = ("batch", "seq", "image", "audio", "task", "dtype", "padding")
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
    padding = given.pop("padding", "yes")
    if padding not in ("yes", "no"):
        raise ModelError(f"{spec}: padding={padding} is neither yes nor no")
    if padding == "no" and "seq" not in _SHAPES.get(task, ("seq",)):
        raise ModelError(f"{spec}: padding= does not apply to {task}")
    shape: dict[str, int] = {
        key: _positive(spec, key, given.pop(key)) for key in ("batch", "seq", "image", "audio") if key in given
    }
    unused = [key for key in shape if key not in ("batch", *_SHAPES.get(task, ("seq",)))]
    if unused:
        raise ModelError(f"{spec}: {unused[0]}= does not apply to {task}")

    heads = getattr(modeling_auto, _TASKS[task][1])[family]
    head = heads[0] if isinstance(heads, tuple) else heads
    model_class = getattr(transformers, head)
    config = _config(spec, CONFIG_MAPPING[family], _undeclared(model_class), given, task, shape.get("image"))
    takes = tuple(inspect.signature(model_class.forward).parameters)
    inputs = hf_inputs(
        *(spec, config, task, takes, batch or shape.get("batch", DEFAULT_BATCH), shape, meta, dtype, padding == "yes")
    )
    auto = getattr(transformers, _TASKS[task][0])
    if isinstance(heads, tuple):
        config.architectures = [head]  # of several heads the library asks which
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


def _undeclared(model_class: Any) -> set[str]:
    """What a model's source asks its configuration for that this need not declare, such as Qwen3-MoE's head_dim."""
    source = inspect.getsource(sys.modules[model_class.__module__])
    return set(re.findall(r'\bgetattr\((?:self\.)?config, "(\w+)"', source))


def _config(
    spec: str, config_class: Any, undeclared: Iterable[str], given: Mapping[str, str], task: str, image: int | None
) -> Any:
    """The configuration with the given fields, made consistent where the command line leaves a field to follow."""
    try:
        defaults = config_class()
    except Exception as error:
        raise ModelError(f"{spec}: its configuration has no defaults: {one_line(error)}") from error
    fields = {key: _field(defaults, key) for key in (*defaults.to_dict(), *defaults.attribute_map)}
    fields = {key: value for key, value in fields.items() if not key.startswith("_") and key not in _BOOKKEEPING_FIELDS}
    fields = {**dict.fromkeys(undeclared), **_COMMON_FIELDS, **fields}
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
    if task in _CLASSES:
        values.setdefault("num_labels", DEFAULT_NUM_LABELS)
    if image is not None and "image_size" in fields and values.setdefault("image_size", image) != image:
        raise ModelError(f"{spec}: image={image} contradicts image_size={values['image_size']}")
    try:
        config = config_class(**values)
    except Exception as error:  # transformers' own validation of types and of combinations
        raise ModelError(f"{spec}: {config_class.__name__} refuses it: {one_line(error)}") from error
    for key in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"):
        size = _field(config, key)
        if isinstance(size, int) and size < 0:
            name = next((name for name in given if key in (name, defaults.attribute_map.get(name))), None)
            name = name or defaults.attribute_map.get(key, key)
            raise ModelError(f"{spec}: {name}={size} is below zero; the family's own is {_field(defaults, key)}")
    if task in ("seq2seq", "speech-seq2seq"):
        # Labels are shifted to be the decoder's inputs, with these in front and in place of ignored ones.
        for field in ("pad_token_id", "decoder_start_token_id"):
            if getattr(config, field, None) is None:
                setattr(config, field, getattr(config, "pad_token_id", None) or 0)
    if task not in ("image-classification", "audio-classification"):
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
