"""Weights from and to safetensors folders: what transformers wrote, and what it reads again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    LlamaConfig,
)

import autopart
from autopart.runtime.errors import InputError, PlanError
from autopart.weights import load_or_start
from launch import launch

CONFIGS: dict[str, Any] = {
    # its output layer is tied to the embedding
    "gpt2": GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=8, bos_token_id=0, eos_token_id=0),
    # its rotary frequencies are in no file
    "llama": LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=32,
        max_position_embeddings=8,
    ),
}
for _config in CONFIGS.values():
    _config.use_cache = False
for _name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
    setattr(CONFIGS["gpt2"], _name, 0.0)


def batch() -> dict[str, Tensor]:
    x = torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(1))
    return {"input_ids": x, "labels": x.clone()}


def step(model: nn.Module) -> float:
    loss = model(**batch())["loss"]
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    return float(loss.detach())


def from_folder(family: str, source: str, target: str, limits: dict[str, Any]) -> tuple[float, int]:
    """Reads, makes a step, writes; the loss, and this rank's number of weights."""
    with autopart.parameters_on_meta():
        model = AutoModelForCausalLM.from_config(CONFIGS[family], dtype=torch.float64)
    assert all(parameter.is_meta for parameter in model.parameters())
    parallel: Any = autopart.parallelize(model, weights=source, example=batch(), verbose=False, **limits)
    loss = step(parallel)
    parallel.save_pretrained(target)
    return loss, sum(parameter.numel() for parameter in parallel.parameters())


@pytest.mark.parametrize(
    ("family", "limits"),
    [
        ("gpt2", {"pp": 2, "pins": {"transformer.h.0": 0, "transformer.h.1": 1}}),
        pytest.param("llama", {"tp": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_folder_is_read_in_shares_and_written_again(family: str, limits: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(CONFIGS[family], dtype=torch.float64)
    plain.save_pretrained(tmp_path / "in", max_shard_size="8KB")
    assert (tmp_path / "in" / "model.safetensors.index.json").is_file()
    expected = step(plain)
    total = sum(parameter.numel() for parameter in plain.parameters())
    results = launch(from_folder, 2, family, str(tmp_path / "in"), str(tmp_path / "out"), limits, timeout=240.0)
    for loss, held in results:
        assert loss == pytest.approx(expected, rel=1e-9)
        assert "pp" not in limits or held < total
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64)
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], tensor, rtol=1e-9, atol=1e-12)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    from autopart.weights import load_weights, save_weights

    model: Any = autopart.parallelize(nn.Sequential(nn.Linear(4, 4)), loss_fn=nn.MSELoss(), verbose=False)
    with pytest.raises(PlanError, match="known when the model is planned"):
        model.save_pretrained(tmp_path)
    model(torch.ones(2, 4), targets=torch.ones(2, 4))
    save_weights(tmp_path, model.parallel, shard_bytes=16)
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    other = nn.Sequential(nn.Linear(4, 4))
    load_weights(tmp_path, other)
    assert torch.equal(other.state_dict()["0.weight"], model.state_dict()["0.weight"])
    with pytest.raises(InputError, match=r"0.weight is \[4, 4\] in .* and \[3, 4\] in the model"):
        load_weights(tmp_path, nn.Sequential(nn.Linear(4, 3)))
    with pytest.raises(InputError, match=r"missing \['1.weight', '1.bias'\], unexpected \[\]"):
        load_weights(tmp_path, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(InputError, match="which are not there"):
        load_weights(tmp_path, other)
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(InputError, match=r"index.json is no index of weights"):
        load_weights(tmp_path, other)
    with pytest.raises(InputError, match="no readable safetensors file"):
        load_weights(tmp_path / "model.safetensors.index.json", other)
    with pytest.raises(InputError, match="holds neither"):
        load_weights(tmp_path / "nothing", other)


def test_a_head_reads_the_weights_of_a_model_without(tmp_path: Path) -> None:
    """And the other way round; the file may hold a buffer that today's models make themselves."""
    config = BertConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=16, num_labels=3
    )
    config.max_position_embeddings = 8
    base = BertModel(config)
    base.save_pretrained(tmp_path / "base")
    stored = load_file(tmp_path / "base" / "model.safetensors")
    save_file({**stored, "embeddings.position_ids": torch.arange(8)[None]}, tmp_path / "base" / "model.safetensors")
    torch.manual_seed(1)
    with autopart.parameters_on_meta():
        empty = BertForSequenceClassification(config)
    x = torch.arange(8)[None]
    batch = {"input_ids": x, "labels": torch.tensor([1])}
    whole = BertForSequenceClassification(config)
    head = whole.classifier.weight.detach().clone()
    for built in (empty, whole):
        model: Any = autopart.parallelize(built, weights=tmp_path / "base", verbose=False)
        with pytest.warns(UserWarning, match="keep their initial values: .*classifier.weight"):
            model(**batch)
        state = model.state_dict()
        for name, tensor in base.state_dict().items():
            assert torch.equal(state[f"bert.{name}"], tensor)
        assert torch.equal(state["classifier.weight"], head)
    model.save_pretrained(tmp_path / "head")
    other = BertModel(config)
    load_or_start(tmp_path / "head", other)
    for name, tensor in base.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor)
    with pytest.raises(InputError, match="does not fit"):
        load_or_start(tmp_path / "head", nn.Linear(2, 2))


class Lost(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("table", torch.ones(4), persistent=False)


def test_on_meta_nothing_is_lost_in_silence(tmp_path: Path) -> None:
    """What no file holds is made by the modules' initializers, or asked for."""
    plain = AutoModelForCausalLM.from_config(CONFIGS["llama"])
    plain.save_pretrained(tmp_path)
    with torch.device("meta"):
        llama = AutoModelForCausalLM.from_config(CONFIGS["llama"])
        lost = Lost()
    with pytest.warns(UserWarning, match="inv_freq, were not built under"):
        parallel = autopart.parallelize(llama, weights=tmp_path, verbose=False)
    with pytest.raises(PlanError, match="make the optimizer after that"):
        torch.optim.SGD(parallel.parameters(), lr=0.1)
    assert float(parallel(**batch()).loss) == pytest.approx(float(plain(**batch()).loss), rel=1e-5)
    with pytest.raises(PlanError, match=r"how table start.*parameters_on_meta"):
        autopart.parallelize(lost, weights=tmp_path, verbose=False)
    parallel = autopart.parallelize(lost, loss_fn=nn.MSELoss(), init=False, verbose=False)
    with pytest.raises(PlanError, match=r"'table' is on meta.*parameters_on_meta"):
        parallel(torch.ones(2, 4), targets=torch.ones(2, 4))
