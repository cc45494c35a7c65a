"""Models by name: every hf: task and family, files of the user's, and one clear line for every mistake."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from autopart.hf_inputs import IGNORED_LABEL
from autopart.models import ModelError, load_model
from autopart.precision import eager_in_float64
from autopart.runtime.errors import AutopartError

TINY = {
    "gpt2": "n_layer=2&n_embd=32&n_head=4&vocab_size=96&n_positions=32&seq=12",
    "llama": "num_hidden_layers=2&hidden_size=32&intermediate_size=64&num_attention_heads=4&num_key_value_heads=2"
    "&vocab_size=96&seq=12",
    "bert": "num_hidden_layers=2&hidden_size=32&num_attention_heads=4&intermediate_size=64&vocab_size=96&seq=12",
    "t5": "d_model=32&d_kv=8&d_ff=64&num_layers=2&num_heads=4&vocab_size=96&seq=12",
    "vit": "hidden_size=32&num_hidden_layers=2&num_attention_heads=4&intermediate_size=64&image=16&patch_size=4",
    "resnet": "embedding_size=8&hidden_sizes=8,16&depths=[1,1]&layer_type=basic&image=32",
    "mixtral": "hidden_size=32&intermediate_size=64&num_hidden_layers=2&num_attention_heads=4&num_key_value_heads=2"
    "&num_local_experts=4&vocab_size=96&seq=12",
    "bart": "d_model=32&encoder_layers=1&decoder_layers=1&encoder_attention_heads=4&decoder_attention_heads=4"
    "&encoder_ffn_dim=64&decoder_ffn_dim=64&vocab_size=96&seq=12",
    "roberta": "num_hidden_layers=1&hidden_size=32&num_attention_heads=4&intermediate_size=64&vocab_size=96&seq=12",
}


def tiny(family: str, more: str = "") -> str:
    return f"hf:{family}?{TINY[family]}{more}"


@pytest.mark.parametrize("family", TINY)
def test_every_family_trains_with_its_loss_inside(family: str) -> None:
    loaded = load_model(tiny(family, "&batch=3"), dtype=torch.float64)
    assert loaded.model.training
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.float64}
    assert all(len(value) == 3 for value in loaded.kwargs.values())
    with eager_in_float64(loaded.model):
        loss = loaded.model(**loaded.kwargs).loss
    loss.backward()
    assert loss.dim() == 0 and torch.isfinite(loss) and loss > 0
    assert all(parameter.grad is not None for parameter in loaded.model.parameters() if family != "bert")


@pytest.mark.parametrize("family", TINY)
def test_meta_builds_the_same_shapes_without_storage(family: str) -> None:
    real, meta = load_model(tiny(family)), load_model(tiny(family), meta=True)
    shapes = [{name: (tuple(p.shape), p.dtype) for name, p in item.model.state_dict().items()} for item in (real, meta)]
    assert shapes[0] == shapes[1]
    assert all(parameter.is_meta for parameter in meta.model.parameters())
    assert all(buffer.is_meta for buffer in meta.model.buffers())
    assert {name: (value.shape, value.dtype) for name, value in real.kwargs.items()} == {
        name: (value.shape, value.dtype) for name, value in meta.kwargs.items() if value.is_meta
    }


def test_a_model_larger_than_memory_is_built_on_meta() -> None:
    loaded = load_model("hf:gpt2?n_layer=96&n_embd=12288&n_head=96&n_positions=2048&batch=4096", meta=True)
    assert sum(parameter.numel() for parameter in loaded.model.parameters()) > 174e9
    assert loaded.kwargs["input_ids"].shape == (4096, 1024)


def test_the_same_name_gives_the_same_tensors_and_leaves_the_callers_random_numbers() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = load_model(tiny("gpt2"))
    assert torch.equal(torch.rand(3), expected)
    second = load_model(tiny("gpt2"))
    for name, value in first.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name]), name
    assert all(torch.equal(value, second.kwargs[name]) for name, value in first.kwargs.items())


def test_tied_weights_stay_tied() -> None:
    for meta in (False, True):
        model: Any = load_model(tiny("gpt2"), meta=meta).model
        assert model.lm_head.weight is model.transformer.wte.weight
        model = load_model(tiny("t5"), meta=meta).model
        assert model.lm_head.weight is model.encoder.embed_tokens.weight is model.decoder.embed_tokens.weight


@pytest.mark.parametrize("family", ["gpt2", "bert", "t5"])
def test_labels_are_ragged_and_a_tensor_of_their_own(family: str) -> None:
    inputs = load_model(tiny(family, "&batch=16")).kwargs
    assert list(inputs) == ["input_ids", "attention_mask", "labels"]
    counts = (inputs["labels"] != IGNORED_LABEL).sum(1)
    assert counts.min() >= 1 and counts.unique().numel() > 1
    assert inputs["labels"].data_ptr() != inputs["input_ids"].data_ptr()
    assert inputs["attention_mask"].sum(1).unique().numel() > 1


@pytest.mark.parametrize("family", ["gpt2", "bert", "t5"])
def test_rows_without_padding_are_full_and_have_no_mask(family: str) -> None:
    inputs = load_model(tiny(family, "&batch=16&padding=no")).kwargs
    assert list(inputs) == ["input_ids", "labels"]
    assert (inputs["labels"] != IGNORED_LABEL).all(dim=1).any() == (family != "bert")
    padded = load_model(tiny(family, "&batch=16&padding=yes")).kwargs
    assert list(padded) == list(load_model(tiny(family, "&batch=16")).kwargs)
    assert padded["input_ids"].equal(inputs["input_ids"])


def test_batch_sequence_and_image_shape_the_inputs() -> None:
    assert load_model(tiny("gpt2", "&batch=3")).kwargs["input_ids"].shape == (3, 12)
    assert load_model(tiny("gpt2", "&batch=3"), batch=5).kwargs["input_ids"].shape == (5, 12)
    assert load_model(tiny("vit", "&batch=2")).kwargs["pixel_values"].shape == (2, 3, 16, 16)
    assert load_model(tiny("vit"), dtype=torch.float64).kwargs["pixel_values"].dtype == torch.float64
    assert load_model(tiny("resnet")).kwargs["labels"].max() < 10
    assert load_model("hf:gpt2", meta=True).kwargs["input_ids"].shape == (8, 1024)
    assert load_model("hf:roberta", meta=True).kwargs["input_ids"].shape == (8, 512)
    assert load_model("hf:vit", meta=True).kwargs["pixel_values"].shape == (8, 3, 224, 224)


def test_the_task_picks_the_head() -> None:
    classes = {
        "hf:bert": "BertForMaskedLM",
        "hf:bert?task=causal-lm&is_decoder=true": "BertLMHeadModel",
        "hf:bart": "BartForConditionalGeneration",
        "hf:bart?task=causal-lm": "BartForCausalLM",
        "hf:llama": "LlamaForCausalLM",
        "hf:resnet": "ResNetForImageClassification",
        "hf:deit?num_hidden_layers=1": "DeiTForImageClassification",  # one of two heads
        "hf:bert?task=token-classification&num_labels=3": "BertForTokenClassification",
    }
    assert {spec: type(load_model(spec, meta=True).model).__name__ for spec in classes} == classes


_WAV2VEC2 = "num_hidden_layers=1&hidden_size=16&num_attention_heads=2&intermediate_size=16&conv_dim=8,8,8,8,8,8,8"


@pytest.mark.parametrize(
    ("spec", "head", "name", "shape", "labels"),
    [
        (f"wav2vec2?{_WAV2VEC2}&task=ctc&audio=4", "Wav2Vec2ForCTC", "input_values", (2, 1280), (2, 1)),
        (
            "whisper?task=speech-seq2seq&seq=5",
            "WhisperForConditionalGeneration",
            "input_features",
            (2, 80, 3000),
            (2, 5),
        ),
        ("speech_to_text?audio=9", "Speech2TextForConditionalGeneration", "input_features", (2, 9, 80), (2, 16)),
        ("audio-spectrogram-transformer", "ASTForAudioClassification", "input_values", (2, 1024, 128), (2,)),
    ],
)
def test_sound_is_a_waveform_or_frames_of_features(
    spec: str, head: str, name: str, shape: tuple[int, ...], labels: tuple[int, ...]
) -> None:
    loaded = load_model(f"hf:{spec}{'&' if '?' in spec else '?'}batch=2", meta=True)
    assert type(loaded.model).__name__ == head
    shapes = {key: leaf.shape for key, leaf in loaded.kwargs.items() if key != "attention_mask"}
    assert shapes == {name: shape, "labels": labels}


def test_tokens_are_labelled_by_classes() -> None:
    name = "hf:bert?num_hidden_layers=1&hidden_size=8&num_attention_heads=2&vocab_size=50&seq=12&batch=3"
    labels = load_model(f"{name}&task=token-classification&num_labels=3").kwargs["labels"]
    assert labels.shape == (3, 12) and set(labels.unique().tolist()) <= {-100, 0, 1, 2}


def test_values_are_read_as_the_type_of_the_default() -> None:
    config: Any = load_model(
        "hf:gpt2?n_layer=1&resid_pdrop=0&scale_attn_weights=false&n_inner=64&activation_function=relu&hidden_size=24"
        "&pad_token_id=7&attn_implementation=eager&dtype=bf16",
        meta=True,
    ).model.config
    assert (config.n_layer, config.n_inner, config.n_embd, config.pad_token_id) == (1, 64, 24, 7)
    assert config.resid_pdrop == 0.0 and isinstance(config.resid_pdrop, float)
    assert config.scale_attn_weights is False and config.activation_function == "relu"
    assert config._attn_implementation == "eager" and config.dtype == torch.bfloat16
    mixtral: Any = load_model("hf:mixtral?num_hidden_layers=1&sliding_window=null&head_dim=16", meta=True).model.config
    assert mixtral.sliding_window is None and mixtral.head_dim == 16


def test_what_a_model_reads_of_its_configuration_undeclared_may_be_given() -> None:
    """Qwen3-MoE's heads are not the hidden size by their number, which its configuration has no field for."""
    model = load_model(
        "hf:qwen3_moe?num_hidden_layers=1&hidden_size=64&num_attention_heads=4&head_dim=32", meta=True
    ).model
    assert model.get_parameter("model.layers.0.self_attn.q_proj.weight").shape == (4 * 32, 64)


def test_special_tokens_follow_a_smaller_vocabulary() -> None:
    config: Any = load_model("hf:gpt2?vocab_size=256&n_layer=1", meta=True).model.config
    assert config.bos_token_id == config.eos_token_id == 255
    config = load_model("hf:gpt2?vocab_size=256&n_layer=1&bos_token_id=3", meta=True).model.config
    assert (config.bos_token_id, config.eos_token_id) == (3, 255)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("hf:gtp2", "no family 'gtp2'; did you mean gpt2"),
        ("hf:", "no family ''"),
        ("hf:gpt2?n_layers=3", "GPT2Config has no field 'n_layers'; did you mean n_layer"),
        ("hf:gpt2?architectures=x", "no field 'architectures'"),
        ("hf:gpt2?n_layer=three", "n_layer=three cannot be read; a value of type int such as 12"),
        ("hf:gpt2?resid_pdrop=high", "resid_pdrop=high cannot be read"),
        ("hf:gpt2?use_cache=maybe", "use_cache=maybe cannot be read"),
        ("hf:gpt2?n_layer=1&n_layer=2", "n_layer is given twice"),
        ("hf:gpt2?n_layer=1&num_hidden_layers=2", "num_hidden_layers is another name of n_layer"),
        ("hf:gpt2?n_layer", "'n_layer' is not of the form key=value"),
        ("hf:gpt2?n_layer=", "not of the form key=value"),
        ("hf:gpt2?n_layer=-1", "n_layer=-1 is below zero; the family's own is 12"),
        ("hf:llama?num_hidden_layers=-2", "num_hidden_layers=-2 is below zero"),
        ("hf:gpt2?batch=0", "batch=0 has to be a whole number of at least 1"),
        ("hf:gpt2?seq=-4", "seq=-4 has to be a whole number"),
        ("hf:gpt2?seq=2000", "longer than the model's 1024 positions"),
        ("hf:gpt2?image=32", "image= does not apply to causal-lm"),
        ("hf:vit?seq=32", "seq= does not apply to image-classification"),
        ("hf:vit?image=32&image_size=64", "image=32 contradicts image_size=64"),
        ("hf:gpt2?task=seq2seq", "no head for task=seq2seq; it has causal-lm"),
        ("hf:gpt2?dtype=int3", "dtype=int3 is unknown; use one of"),
        ("hf:gpt2?padding=maybe", "padding=maybe is neither yes nor no"),
        ("hf:vit?padding=no", "padding= does not apply to image-classification"),
        ("hf:gpt2?vocab_size=10&eos_token_id=12", "eos_token_id=12 lies outside the vocabulary of 10"),
        ("hf:gpt2?n_embd=30&n_head=4", "transformers cannot build it"),
        ("hf:dac", "dac has no head for"),
        ("gpt2", "names no model: write hf:FAMILY"),
        ("model.txt:build", "names no model"),
        ("model.py", "names no model"),
        ("nowhere/model.py:build", "there is no file"),
    ],
)
def test_mistakes_are_told_in_one_line(spec: str, expected: str) -> None:
    with pytest.raises(ModelError) as caught:
        load_model(spec, meta=True)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value) and isinstance(caught.value, AutopartError)


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(text: str, name: str = "user.py") -> str:
        (tmp_path / name).write_text(textwrap.dedent(text))
        return str(tmp_path / name)

    return write


MLP = """
    import torch
    from torch import nn

    def plain():
        return nn.Linear(4, 4)

    def with_inputs(batch=2):
        x = torch.ones(batch, 4)
        return nn.Linear(4, 4), (x,), {"again": x, "factor": 3}

    def tied():
        import numpy
        a = nn.Linear(4, 4, bias=False)
        a.weight = nn.Parameter(torch.from_numpy(numpy.ones((4, 4), dtype="float32")))
        b = nn.Linear(4, 4, bias=False)
        b.weight = a.weight
        return nn.Sequential(a, b), (torch.from_numpy(numpy.ones((2, 4), dtype="float32")),), {}

    def text():
        return "a model"

    def swapped():
        return (torch.ones(2, 4),), nn.Linear(4, 4)

    def wrong():
        x = torch.ones(2, 4)
        return nn.Linear(5, 4)(x)

    def leaves():
        raise SystemExit("no data\\nhere")
"""


def test_arguments_need_no_keywords_beside_them(write: Any) -> None:
    path = write("import torch\ndef f(): return torch.nn.Linear(3, 1), [torch.ones(2, 3)]")
    found = load_model(f"{path}:f")
    assert [tuple(item.shape) for item in found.args] == [(2, 3)] and found.kwargs == {}


def test_a_function_returns_a_model_or_a_call(write: Any) -> None:
    path = write(MLP)
    loaded = load_model(f"{path}:plain")
    assert isinstance(loaded.model, torch.nn.Linear) and (loaded.args, loaded.kwargs) == ((), {})
    assert torch.equal(loaded.model.weight, load_model(f"{path}:plain").model.weight)  # type: ignore[arg-type]
    loaded = load_model(f"{path}:with_inputs", batch=6, dtype=torch.float64)
    assert loaded.args[0].shape == (6, 4) and loaded.args[0].dtype == torch.float64
    assert loaded.kwargs["again"] is loaded.args[0] and loaded.kwargs["factor"] == 3
    assert load_model(f"{path}:with_inputs").args[0].shape == (2, 4)


def test_a_file_on_meta_keeps_ties(write: Any) -> None:
    loaded = load_model(f"{write(MLP)}:tied", meta=True, dtype=torch.float64)
    assert [(p.is_meta, p.dtype) for p in loaded.model.parameters()] == [(True, torch.float64)]
    assert loaded.args[0].is_meta


def test_a_file_may_import_its_neighbours(write: Any) -> None:
    write("width = 3", "autopart_test_neighbour.py")
    path = write("import torch, autopart_test_neighbour as n\ndef f(): return torch.nn.Linear(n.width, 1)", "main.py")
    assert isinstance(load_model(f"{path}:f").model, torch.nn.Linear)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("plane", "user.py has no function 'plane'; did you mean plain?"),
        ("text", "text() has to return a model or (model, args, kwargs), it returned str"),
        ("swapped", "swapped() has to return a model or (model, args, kwargs), it returned tuple (tuple, Linear)"),
        ("wrong", "user.py:28 raised in wrong(): RuntimeError: "),
        ("leaves", "user.py:31 raised in leaves(): SystemExit: no data here"),
    ],
)
def test_a_users_mistakes_name_the_line(write: Any, function: str, expected: str) -> None:
    with pytest.raises(ModelError) as caught:
        load_model(f"{write(MLP)}:{function}")
    assert expected in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import torch\n\nimport no_such_library\n", "user.py:3 raised while it was imported: ModuleNotFoundError"),
        ("def f():\n    return (\n", "user.py:2 raised while it was imported: SyntaxError"),
    ],
)
def test_a_file_that_cannot_be_imported(write: Any, text: str, expected: str) -> None:
    with pytest.raises(ModelError, match="raised while it was imported") as caught:
        load_model(f"{write(text)}:f")
    assert expected in str(caught.value)


def test_a_file_without_transformers_does_not_load_it(write: Any) -> None:
    path = write(MLP)
    code = f"""
import sys
from autopart.models import load_model
load_model({path + ":plain"!r})
sys.exit("transformers" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
