"""What CPUs compute besides products and bytes: functions of elements, random numbers, attention at its own rate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopart.analysis import analyze
from autopart.cluster import Cluster
from autopart.cost.compute import ATTENTION_KEYS, Product, causal_share, op_seconds, vector_seconds
from autopart.cost.devices import LARGE_BYTES, Device, device
from autopart.passes.annotate import OpCost
from autopart.passes.arithmetic import FUNCTIONS
from autopart.passes.storage import op_name
from autopart.prices import Prices
from autopart.tracing import capture

BATCH, WIDTH = 4, 64
CORE = replace(device("CPU"), launch_s=0.0, attention_by={"float32": 0.2}, attention_back_by={"float32": 0.1})


class Applied(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.before, self.after = nn.Linear(8, WIDTH, bias=False), nn.Linear(WIDTH, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.function(self.before(x))).sum()


class Summed(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).sum()


class Attention(nn.Module):
    """Four heads of 16. rows: of the sequence."""

    def __init__(self, dropout: float, causal: bool, rows: int) -> None:
        super().__init__()
        self.dropout, self.causal, self.rows = dropout, causal, rows
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        found = F.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout, is_causal=self.causal)
        return found.sum()


def priced(model: nn.Module, x: Tensor, name: str, on: Device = CORE) -> tuple[OpCost, tuple[float, float]]:
    """Of the first op of that name, its cost and its seconds forward and back."""
    analysis = analyze(capture(model, (x,)))
    costs = analysis.costs(on.kind)
    (node, *_) = [node for node in analysis.block_of if op_name(node) == name]
    return costs[node], Prices(on, costs, BATCH).op_seconds(node)


@pytest.mark.parametrize(
    ("function", "name", "counted"),
    [
        (lambda x: F.gelu(x, approximate="tanh"), "gelu", "gelu_tanh"),
        (F.gelu, "gelu", "gelu"),
        (F.silu, "silu", "silu"),
        (lambda x: x**2.5, "pow", "pow"),
        (lambda x: x**3, "pow", ""),
        (torch.relu, "relu", ""),
    ],
)
def test_functions_of_elements(function: Callable[[Tensor], Tensor], name: str, counted: str) -> None:
    cost, (forward, backward) = priced(Applied(function), torch.randn(BATCH, 8), name)
    there, back = FUNCTIONS.get(counted, (0, 0))
    elements = BATCH * WIDTH
    assert cost.functions_forward.at(BATCH) == there * elements and cost.functions_backward.at(BATCH) == back * elements
    rate = CORE.memory_bandwidth * CORE.memory
    assert forward == pytest.approx(max(cost.bytes_forward.at(BATCH) / rate, there * elements * CORE.function_s))
    assert backward == pytest.approx(max(cost.bytes_backward.at(BATCH) / rate, back * elements * CORE.function_s))


def test_random_numbers_are_drawn_one_by_one() -> None:
    cost, (forward, backward) = priced(Applied(nn.Dropout(0.1)), torch.randn(BATCH, 8), "dropout")
    assert cost.drawn.at(BATCH) == BATCH * WIDTH and forward == pytest.approx(BATCH * WIDTH * CORE.random_s)
    assert backward == pytest.approx(cost.bytes_backward.at(BATCH) / CORE.memory_bandwidth / CORE.memory)


def test_gpus_hide_all_of_it() -> None:
    gpu = device("A100-80GB")
    for function, name in ((nn.GELU(), "gelu"), (nn.Dropout(0.1), "dropout")):
        cost, _ = priced(Applied(function), torch.randn(BATCH, 8), name, gpu)
        assert not cost.functions_forward and not cost.functions_backward and not cost.drawn


@pytest.mark.parametrize(("causal", "rows"), [(False, 128), (True, 128), (True, 2048)])
def test_attention_has_rates_of_its_own(causal: bool, rows: int) -> None:
    cost, found = priced(Attention(0.0, causal, rows), torch.randn(BATCH, rows, WIDTH), "scaled_dot_product_attention")
    scores = BATCH * 4 * rows * rows
    products = 2.0 * 2 * scores * 16 * (causal_share(rows) if causal else 1.0) / CORE.product_rate("float32")
    weights = FUNCTIONS["scaled_dot_product_attention"]
    for seconds, factor, rate, weight in zip(found, (1.0, 2.5), (0.2, 0.1), weights, strict=True):
        share = rate / CORE.contraction  # of the peak; products reach that share of it
        assert seconds == pytest.approx(factor * products / share + weight * scores * CORE.function_s)
    assert cost.drawn.at(BATCH) == 0


def test_attention_with_dropout_goes_by_its_formula() -> None:
    """The CPU's fused kernel drops nothing out."""
    x = torch.randn(BATCH, 128, WIDTH)
    fused, (fused_s, _) = priced(Attention(0.0, False, 128), x, "scaled_dot_product_attention")
    formula, (formula_s, _) = priced(Attention(0.1, False, 128), x, "scaled_dot_product_attention")
    scores = BATCH * 4 * 128 * 128
    assert formula.drawn.at(BATCH) == scores and formula_s > scores * CORE.random_s
    assert formula.bytes_forward.at(BATCH) > fused.bytes_forward.at(BATCH) + 4 * scores
    assert formula.kernels_forward > fused.kernels_forward == 1 and formula_s > fused_s


def test_causal_attention_leaves_out_whole_blocks_of_keys() -> None:
    assert causal_share(ATTENTION_KEYS) == causal_share(16) == 1.0
    assert causal_share(2 * ATTENTION_KEYS) == 0.75
    assert causal_share(64 * ATTENTION_KEYS) < 0.51 and causal_share(1024, queries=1) == 1.0


@pytest.mark.parametrize("bias", [False, True])
def test_a_bias_is_written_into_a_products_result(bias: bool) -> None:
    model = nn.Sequential(nn.Linear(8, WIDTH, bias=bias), nn.Linear(WIDTH, 1, bias=False))
    cost, (forward, _) = priced(Summed(model), torch.randn(BATCH, 8), "linear")
    elements = BATCH * WIDTH
    assert cost.functions_forward.at(BATCH) == 2 * elements * bias and not cost.functions_backward
    products = cost.flops_forward.at(BATCH) / CORE.product_rate("float32")
    moved = cost.bytes_forward.at(BATCH) / CORE.memory_bandwidth / CORE.memory
    assert forward == pytest.approx(max(products + 2 * elements * bias * CORE.function_s, moved))


def test_large_tensors_are_mapped_anew() -> None:
    """An activation of a ReLU and its gradient, of LARGE_BYTES and of less."""
    rows = LARGE_BYTES // 4 // WIDTH // BATCH
    for factor, mapped in ((1, 1.0), (2, 0.0)):
        x = torch.randn(BATCH, rows // factor, 8)
        _, plain = priced(Applied(torch.relu), x, "relu", replace(CORE, mapped_s=0.0))
        _, found = priced(Applied(torch.relu), x, "relu")
        for seconds, before in zip(found, plain, strict=True):
            assert seconds - before == pytest.approx(mapped * LARGE_BYTES * CORE.mapped_s, abs=1e-12)
    cost, _ = priced(Applied(lambda x: x + 1), torch.randn(BATCH, 8), "add")
    assert cost.made_forward and not cost.made_backward, "the gradient is handed on"


def test_an_optimizer_takes_a_little_for_each_parameter() -> None:
    core, gpu = replace(CORE, launch_s=1e-5), device("A100-80GB")
    for on, each in ((core, 1.7e-5), (gpu, 0.0)):
        one, two = (Prices(on, {}, BATCH).optimizer_seconds(weight) for weight in (1e6, 2e6))
        assert 2 * one - two == pytest.approx(each, abs=1e-12)
        assert Prices(on, {}, BATCH).optimizer_seconds(0) == 0
    assert Prices(core, {}, BATCH, optimizer="none").optimizer_seconds(1e6) == 0


def test_what_is_computed_beside_products_adds_to_them() -> None:
    shape = Product(64, 64, 64)
    alone = op_seconds(CORE, 0.0, 0.0, products=(shape,))
    assert op_seconds(CORE, 0.0, 0.0, products=(shape,), vector_s=1.0) == pytest.approx(alone + 1.0)
    assert op_seconds(CORE, 0.0, 1e12, vector_s=1.0) == op_seconds(CORE, 0.0, 1e12) > 1.0
    assert vector_seconds(CORE, 10, 3) == pytest.approx(10 * CORE.function_s + 3 * CORE.random_s)


def test_files_and_fewer_cores_have_them_too(tmp_path: Path) -> None:
    shared = replace(CORE, function_s=3e-10, random_s=8e-9, mapped_s=6e-10, alone=2.0)
    cluster = Cluster((replace(Cluster.parse("4xCPU").nodes[0], device=shared),))
    cluster.save(tmp_path / "cluster.toml")
    again = Cluster.load(tmp_path / "cluster.toml").nodes[0]
    assert again.device == shared and again.device.attention_back_by == {"float32": 0.1}
    half = again.first(2).device  # of two cores that four ranks shared
    assert (half.function_s, half.random_s, half.mapped_s) == (1.5e-10, 4e-9, 3e-10)
