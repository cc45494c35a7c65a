"""FLOPs against closed forms and torch's counter, saved activations against what autograd really keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kept_storages import KeptStorages
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from autopart.analysis import analyze
from autopart.block_costs import BlockCosts
from autopart.cost.transformer import gpt2_forward_flops, gpt2_parameters
from autopart.passes import saved
from autopart.passes.amounts import ONE, ZERO, Amount, constant
from autopart.passes.annotate import OpCost, annotate, contraction_flops, is_contraction, op_cost, parameter_bytes
from autopart.passes.graph import is_op
from autopart.passes.program import Program
from autopart.passes.saved import (
    copied_inside,
    has_rule,
    is_differentiated,
    saved_bytes,
    saved_inside,
    saved_tensors,
    saved_values,
)
from autopart.passes.storage import is_view, op_name, storage_of
from autopart.runtime import Axis
from autopart.runtime.local_forms import query_sharded_attention
from autopart.tracing import capture
from families import captured, families, family, unlike_first

BATCH = 4


def ops(program: Program) -> list[fx.Node]:
    return [node for node in program.graph.nodes if is_op(node)]


def bytes_kept(model: nn.Module, call: Callable[[], Any], given: list[Tensor]) -> int:
    """Bytes of distinct storages that autograd keeps, parameters, buffers and inputs left out."""
    storages = KeptStorages.beside((*model.parameters(), *model.buffers(), *given))
    with saved_tensors_hooks(storages.pack, lambda tensor: tensor):
        result = call()
    assert result is not None
    return storages.nbytes


# --- Amounts ---


def test_amounts() -> None:
    line = Amount((3, 2))
    assert line.at(5) == 13
    assert (line + line).at(5) == 26
    assert (line * line).at(5) == 169
    assert (3 * line).at(5) == 39
    assert (line + Amount((0, -2))).coefficients == (3,)
    assert not ZERO and constant(0) == ZERO and ONE.at(7) == 1
    assert str(line) == "3 + 2*b" and str(ZERO) == "0"


# --- GPT-2's closed forms ---


@pytest.mark.parametrize(
    ("layers", "width", "heads", "vocabulary", "sequence"), [(2, 64, 4, 128, 16), (3, 48, 2, 96, 24)]
)
def test_gpt2_matches_its_closed_forms(layers: int, width: int, heads: int, vocabulary: int, sequence: int) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers,
        n_head=heads,
        n_embd=width,
        vocab_size=vocabulary,
        n_positions=32,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
        ids = torch.zeros(BATCH, sequence, dtype=torch.long)
        mask = torch.ones(BATCH, sequence, dtype=torch.long)
        labels = torch.zeros(BATCH, sequence, dtype=torch.long)
    program = capture(model, (), {"input_ids": ids, "attention_mask": mask, "labels": labels}, check_eval=False)
    assert program.parameter_count == gpt2_parameters(layers, width, vocabulary, 32)
    for batch in (1, 4, 7):
        flops = sum(contraction_flops(node).at(batch) for node in ops(program))
        assert flops == gpt2_forward_flops(batch, sequence, layers, width, vocabulary)


def test_megatron_equations() -> None:
    """GPT-3 175B: equation 2 of Narayanan et al. (2021), with positions where they write the sequence length."""
    layers, width, vocabulary, sequence = 96, 12288, 51200, 2048
    equation = 12 * layers * width**2 * (1 + 13 / (12 * width) + (vocabulary + sequence) / (12 * layers * width))
    assert gpt2_parameters(layers, width, vocabulary, sequence) == pytest.approx(equation + 2 * width, rel=1e-12)
    flops = 24 * 8 * sequence * layers * width**2 * (1 + sequence / (6 * width) + vocabulary / (12 * layers * width))
    assert gpt2_forward_flops(8, sequence, layers, width, vocabulary) == pytest.approx(flops, rel=1e-12)


# --- FLOPs of single ops ---


class Contractions(nn.Module):
    """One of each contraction, all differentiable."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 8))
        self.conv = nn.Conv2d(4, 6, 3, padding=1)
        self.up = nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.line = nn.Conv1d(6, 8, 5)

    def forward(self, x: Tensor, image: Tensor) -> Tensor:
        y = torch.einsum("bsk,nk->bsn", x, self.weight)
        z = torch.einsum("...sk,...tk->...st", y, y) + y @ y.transpose(1, 2)
        w = F.linear(y, self.weight.t())
        v = torch.bmm(z, w)
        grown = self.up(self.conv(image))
        return v.sum() + grown.sum() + self.line(y.transpose(1, 2)).sum() + torch.einsum("bsk,bsk->", w, x)


def test_contractions_match_torchs_counter() -> None:
    model = Contractions()
    x, image = torch.randn(BATCH, 10, 8), torch.randn(BATCH, 4, 6, 6)
    program = capture(model, (x, image), {}, check_eval=False)
    with FlopCounterMode(display=False) as counter:
        loss = model(x, image)
    forward = counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    costs = annotate(program.graph.nodes)
    counted = {node: cost for node, cost in costs.items() if is_contraction(node)}
    # The counter does not see einsum without a matrix product in it: bsk,bsk-> is one, of 2 b s k FLOPs.
    assert sum(cost.flops_forward.at(BATCH) for cost in counted.values()) == forward
    assert sum(cost.flops_backward.at(BATCH) for cost in counted.values()) == counter.get_total_flops()


def test_grouped_convolution_counts_its_groups() -> None:
    program = capture(nn.Conv2d(4, 6, 3, groups=2), (torch.rand(BATCH, 4, 6, 6),), {}, check_eval=False)
    (node,) = (node for node in ops(program) if is_contraction(node))
    assert contraction_flops(node).at(BATCH) == 2 * (BATCH * 6 * 4 * 4) * (2 * 3 * 3)


@pytest.mark.parametrize(
    "name", ["gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "bert", "vit", "t5")), "resnet"]
)
def test_families_flops_match_torchs_counter(name: str) -> None:
    item = family(name, dtype=torch.float32)
    model = item.build()
    inputs = item.inputs(item.batch)
    program = captured(name, dtype=torch.float32)
    # The counter does not know the CPU's fused attention; of the plain one it sees both products.
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model(**inputs)
    estimate = sum(contraction_flops(node).at(item.batch) for node in ops(program))
    # Products of tables that hold no parameters (rotary angles) are counted by one and not the other.
    assert estimate == pytest.approx(counter.get_total_flops(), rel=0.01)


# --- What backward needs ---


@pytest.mark.parametrize("item", unlike_first(families(dtype=torch.float32)))
def test_saved_activations_match_autograd(item: Any) -> None:
    model = item.build()
    inputs = item.inputs(item.batch)
    program = captured(item.name, dtype=torch.float32)
    kept = bytes_kept(model, lambda: model(**inputs).loss, list(inputs.values()))
    # The captured ViT passes an all-true attention mask that the eager one leaves out.
    tolerance = 0.05 if item.name == "vit" else 0.001
    assert saved_bytes(ops(program), "cpu").at(item.batch) == pytest.approx(kept, rel=tolerance)


@pytest.mark.parametrize("name", ["bert", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "t5"))])
def test_saved_activations_with_dropout(name: str) -> None:
    item = family(name, dropout=0.1, dtype=torch.float32)
    model = item.build()
    inputs = item.inputs(item.batch)
    program = captured(name, 0.1, torch.float32)
    kept = bytes_kept(model, lambda: model(**inputs).loss, list(inputs.values()))
    assert saved_bytes(ops(program), "cpu").at(item.batch) == pytest.approx(kept, rel=0.05)


@pytest.mark.parametrize("item", families(dtype=torch.float32), ids=str)
def test_families_need_no_fallback(item: Any) -> None:
    program = captured(item.name, dtype=torch.float32)
    assert [op_name(node) for node in ops(program) if is_differentiated(node) and not has_rule(node)] == []


class One(nn.Module):
    """Applies a function to a tensor that has a gradient."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.rand(8))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x + self.shift)


SINGLE: dict[str, Callable[[Tensor], Tensor]] = {
    "add": lambda x: x + 1,
    "mul": lambda x: x * x.flip(-1),
    "mul_scalar": lambda x: x * 3,
    "div": lambda x: x / (x.flip(-1) + 2),
    "div_scalar": lambda x: x / 3,
    "pow": lambda x: x**3,
    "exp": torch.exp,
    "log": lambda x: torch.log(x + 2),
    "sqrt": lambda x: torch.sqrt(x + 2),
    "rsqrt": lambda x: torch.rsqrt(x + 2),
    "reciprocal": lambda x: torch.reciprocal(x + 2),
    "relu": torch.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "elu": F.elu,
    "leaky_relu": F.leaky_relu,
    "hardswish": F.hardswish,
    "softplus": F.softplus,
    "softmax": lambda x: torch.softmax(x, -1),
    "log_softmax": lambda x: torch.log_softmax(x, -1),
    "logsumexp": lambda x: torch.logsumexp(x, -1),
    "abs": torch.abs,
    "clamp": lambda x: x.clamp(0, 1),
    "sin": torch.sin,
    "sum": lambda x: x.sum(-1),
    "mean": lambda x: x.mean(-1),
    "amax": lambda x: x.amax(-1),
    "max": lambda x: x.max(-1).values,
    "sort": lambda x: x.sort(-1).values,
    "topk": lambda x: x.topk(2).values,
    "var": lambda x: x.var(-1),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "masked_fill": lambda x: x.masked_fill(x > 0, 0.0),
    "cat": lambda x: torch.cat([x, x]),
    "stack": lambda x: torch.stack([x, x]),
    "cumsum": lambda x: x.cumsum(-1),
    "layer_norm": lambda x: F.layer_norm(x, [8]),
    "group_norm": lambda x: F.group_norm(x, 2),
    "matmul": lambda x: x @ x.transpose(-1, -2),
    "views": lambda x: x.transpose(1, 2).reshape(x.shape[0], -1).unsqueeze(1),
    "max_pool": lambda x: F.max_pool1d(x, 2),
    "mse": lambda x: F.mse_loss(x, x.flip(-1)),
    "avg_pool": lambda x: F.avg_pool2d(x, 2),
    "pad": lambda x: F.pad(x, (1, 1)),
    "cast": lambda x: x.to(torch.float64),
    "dropout": lambda x: F.dropout(x, 0.5),
    "glu": lambda x: F.glu(x, -1),
    "prod": lambda x: x.prod(-1),
    "tril": torch.tril,
    "index_select": lambda x: x.index_select(1, torch.tensor([0, 2])),
    "pow_of_number": lambda x: 2.0**x,
    "lerp": lambda x: torch.lerp(x, x.flip(-1), torch.sigmoid(x)),
    "gather": lambda x: x.gather(1, (x > 0.5).long()),
    "index_add": lambda x: torch.zeros(x.shape[0], 3, 8).index_add(1, torch.arange(6) % 3, x),
    "reflection_pad": lambda x: F.pad(x, (1, 1), mode="reflect"),
    "circular_pad": lambda x: F.pad(x, (1, 1), mode="circular"),
    "log_sigmoid": F.logsigmoid,
    "instance_norm": F.instance_norm,
    "rms_norm": lambda x: F.rms_norm(x, [8], x.mean((0, 1))),
    "adaptive_max_pool": lambda x: F.adaptive_max_pool2d(x, (2, 2)),
    "matmul_broadcast": lambda x: x.unflatten(1, (2, 3)) @ x.mean(0).view(2, 8, 3),
    "frozen_convolution": lambda x: F.conv1d(x.detach().transpose(1, 2), x.mean(0).unsqueeze(-1)),
    # without rules
    "einsum_of_three": lambda x: torch.einsum("bld,de,bme->blm", x, torch.ones(8, 8), x),
    "l1": lambda x: F.l1_loss(x, x.flip(-1)),
    "kl": lambda x: F.kl_div(torch.log_softmax(x, -1), torch.softmax(x.flip(-1), -1), reduction="batchmean"),
    "take_along": lambda x: torch.take_along_dim(x, (x > 0.5).long(), 1),
    "fft": lambda x: torch.fft.rfft(x, dim=1),
    "cosine": lambda x: F.cosine_similarity(x, x.flip(-1), dim=-1),
    "sinh": torch.sinh,
    "bessel": torch.special.i0,
    "gru": nn.GRU(8, 8, num_layers=2, batch_first=True).requires_grad_(False),
}


@pytest.mark.parametrize("name", SINGLE)
def test_each_op_keeps_what_its_rule_says(name: str) -> None:
    model, x = One(SINGLE[name]), torch.rand(BATCH, 6, 8)
    program = capture(model, (x,), {}, check_eval=False)
    kept = bytes_kept(model, lambda: model(x), [x])
    estimate = saved_bytes(ops(program), "cpu").at(BATCH)
    assert estimate == pytest.approx(kept, abs=16)  # scalars that autograd wraps as tensors are left out


def test_an_op_that_meta_tensors_do_not_have_keeps_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    program = capture(One(torch.special.i0), (torch.rand(BATCH, 6, 8),), {}, check_eval=False)
    (node,) = (node for node in ops(program) if not has_rule(node))
    assert [value.node for value in saved_tensors(node)] == [node.args[0]]
    monkeypatch.setattr(saved, "keeping", lambda *_: None)
    assert [value.node for value in saved_tensors(node)] == [node.args[0], node]


def test_frozen_parameters_save_nothing() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    model[0].requires_grad_(False)
    model.append(nn.Flatten(0))
    program = capture(model, (torch.rand(BATCH, 8),), {}, check_eval=False)
    first, gelu, second = (node for node in ops(program) if not is_view(node))
    assert saved_tensors(first) == [] and op_cost(first).flops_backward == ZERO
    assert saved_tensors(gelu) == [] and not is_differentiated(gelu)
    # Only the weight's gradient: as much as the forward, not twice.
    assert op_cost(second).flops_backward == op_cost(second).flops_forward


def test_views_share_one_storage() -> None:
    def function(x: Tensor) -> Tensor:
        first, second = x.split(4, -1)
        return first.transpose(1, 2).exp() * second.transpose(1, 2)

    program = capture(One(function), (torch.rand(BATCH, 6, 8),), {}, check_eval=False)
    total, split, exponential, product = (
        next(node for node in ops(program) if op_name(node) == name)
        for name in ("add", "split_with_sizes", "exp", "mul")
    )
    kept = saved_values([exponential, product])
    assert is_view(split)
    assert [value.node for value in kept] == [exponential, total]
    # The second half is kept, and with it the whole that it is a view of.
    assert saved_bytes([product]).at(BATCH) == BATCH * 6 * (4 + 8) * 4
    assert storage_of(saved_tensors(product)[1]).node is total


def test_a_copying_reshape_is_no_view() -> None:
    program = capture(
        One(lambda x: x.transpose(1, 2).reshape(-1, 6).relu()), (torch.rand(BATCH, 6, 8),), {}, check_eval=False
    )
    reshape = next(node for node in ops(program) if op_name(node) == "reshape")
    assert is_view(reshape) is False
    assert op_cost(reshape).bytes_forward.at(BATCH) == 2 * BATCH * 6 * 8 * 4
    program = capture(One(lambda x: x.reshape(-1, 8).relu()), (torch.rand(BATCH, 6, 8),), {}, check_eval=False)
    reshape = next(node for node in ops(program) if op_name(node) == "reshape")
    assert is_view(reshape)
    assert op_cost(reshape) == OpCost()


def test_devices_keep_different_masks() -> None:
    program = capture(One(lambda x: F.dropout(x, 0.5)), (torch.rand(BATCH, 6, 8),), {}, check_eval=False)
    dropout = next(node for node in ops(program) if op_name(node) == "dropout")
    assert saved_inside(dropout, "cuda").at(BATCH) == BATCH * 6 * 8
    assert saved_inside(dropout, "cpu").at(BATCH) == BATCH * 6 * 8 * 4
    program = capture(One(lambda x: F.dropout(x, 0.0)), (torch.rand(BATCH, 6, 8),), {}, check_eval=False)
    assert all(cost.saved_bytes == ZERO for cost in annotate(program.graph.nodes).values())


def test_traffic_of_a_linear_and_an_embedding() -> None:
    class Tiny(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(100, 8), nn.Linear(8, 5, bias=False)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.table(ids))

    program = capture(Tiny(), (torch.zeros(BATCH, 6, dtype=torch.long),), {}, check_eval=False)
    costs = {op_name(node): cost for node, cost in annotate(program.graph.nodes).items()}
    tokens = BATCH * 6
    assert costs["linear"].bytes_forward.at(BATCH) == 4 * (tokens * 8 + 8 * 5 + tokens * 5)
    # Reads the output's gradient, the input and the weight; writes the gradients of both.
    assert costs["linear"].bytes_backward.at(BATCH) == 4 * (tokens * 5 + 2 * (tokens * 8 + 8 * 5))
    assert costs["embedding"].bytes_forward.at(BATCH) == 2 * 4 * tokens * 8 + 8 * tokens
    assert costs["embedding"].bytes_backward.at(BATCH) >= 4 * 100 * 8  # a dense gradient of the whole table
    whole = costs["linear"] + costs["embedding"]
    assert whole.flops_forward.at(BATCH) == 2 * tokens * 8 * 5


def test_parameter_bytes() -> None:
    found = parameter_bytes((10, 3), torch.float32)
    assert (found.weight, found.gradient, found.optimizer, found.total) == (120, 120, 240, 480)
    assert parameter_bytes((10, 3), torch.bfloat16, "sgd").total == 120
    assert parameter_bytes((10, 3), torch.bfloat16, "momentum").total == 180
    assert parameter_bytes((10, 3), torch.float32, trainable=False).total == 120
    with pytest.raises(ValueError, match="adamw"):
        parameter_bytes((1,), torch.float32, "lion")


class Biased(nn.Module):
    """Attention with a learned bias of positions, which the CPU computes by its formula, copying what it scales."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.rand(2, 8, 4))

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=self.bias)


def test_copies_that_attention_keeps_lie_as_its_operands_do() -> None:
    query, key, value = (torch.rand(BATCH, 2, length, 16, requires_grad=True) for length in (8, 4, 4))
    analysis = analyze(capture(Biased(), (query, key, value), {}, check_eval=False))
    (node,) = (node for node in analysis.graph.nodes if op_name(node) == "scaled_dot_product_attention")
    copies = [(item.node.name, size.at(BATCH) / BATCH / 4) for item, size in copied_inside(node, "cpu")]
    assert copies == [("query", 2 * 8 * 16), ("key", 2 * 4 * 16)]
    offered = analysis.strategies(2)[node]
    # keys are differentiated too, so that ranks have parts of their gradient
    by_rows = next(strategy for strategy in offered if [str(item) for item in strategy.inputs[:2]] == ["S2", "B"])
    costs = BlockCosts(analysis, "cpu")
    whole, half = (costs.held_bytes(node, chosen, sizes, BATCH)[0] for chosen, sizes in (((), ()), ((by_rows,), (2,))))
    scores, rows, keys = (BATCH * 4 * count for count in (2 * 8 * 4, 2 * 8 * 16, 2 * 4 * 16))
    assert whole == scores + rows + keys  # values are the model's input
    assert half == (scores + rows) / 2 + keys


class Causal(nn.Module):
    """Attention of what ops make, so that it keeps its operands for itself."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.shift, self.dropout = nn.Parameter(torch.ones(())), dropout

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = query + self.shift, key + self.shift, value + self.shift
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=self.dropout).sum()


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_what_a_shard_of_causal_queries_keeps(dropout: float) -> None:
    """On the CPU it adds a mask of its rows, and with dropout computes by the formula."""
    leaves = [torch.rand(BATCH, 2, 8, 16, requires_grad=True) for _ in range(3)]
    analysis = analyze(capture(Causal(dropout), leaves, {}, check_eval=False))
    (node,) = (node for node in analysis.graph.nodes if op_name(node) == "scaled_dot_product_attention")
    by_rows = next(strategy for strategy in analysis.strategies(4)[node] if strategy.form is not None)
    predicted, _ = BlockCosts(analysis, "cpu").held_bytes(node, (by_rows,), (4,), BATCH)

    def attend() -> Tensor:
        query, key, value = leaves[0][:, :, 6:] + 1, leaves[1] + 1, leaves[2] + 1
        return query_sharded_attention(query, key, value, dropout_p=dropout, axis=Axis("tp", 4, 3)).sum()

    assert bytes_kept(nn.Identity(), attend, leaves) == predicted
