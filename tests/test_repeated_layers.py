"""A capture that traces few of a model's alike layers and copies the rest is the capture of the whole model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, fx, nn

import autopart.verify
from autopart import layer_copies, repeated_layers, tracing
from autopart.cluster import Cluster
from autopart.models import LoadedModel, load_model
from autopart.passes.program import Program
from autopart.tracing import capture
from launch import run_kept_job

LAYERS = 9
TEXT = "batch=2&seq=8&vocab_size=32"
SPECS = {
    "gpt2": f"hf:gpt2?n_layer={LAYERS}&n_embd=16&n_head=2&n_positions=16&{TEXT}",
    "llama": f"hf:llama?num_hidden_layers={LAYERS}&hidden_size=16&intermediate_size=32&num_attention_heads=4"
    f"&num_key_value_heads=2&{TEXT}",
    "bert": f"hf:bert?num_hidden_layers={LAYERS}&hidden_size=16&intermediate_size=32&num_attention_heads=2&{TEXT}",
    "vit": f"hf:vit?num_hidden_layers={LAYERS}&hidden_size=16&intermediate_size=32&num_attention_heads=2&batch=2"
    "&image=8&patch_size=4",
    "t5": f"hf:t5?num_layers={LAYERS}&num_decoder_layers={LAYERS}&d_model=16&d_kv=8&d_ff=32&num_heads=2&{TEXT}",
    "mixtral": f"hf:mixtral?num_hidden_layers={LAYERS}&hidden_size=16&intermediate_size=32&num_attention_heads=4"
    f"&num_key_value_heads=2&num_local_experts=4&{TEXT}",
}


class Counted(nn.Module):
    """A layer that says how often its forward ran."""

    def __init__(self, index: int = 0):
        super().__init__()
        self.layer_idx = index
        self.norm = nn.LayerNorm(4)
        self.inner = nn.Linear(4, 4)
        self.ran: list[int] = _RAN

    def forward(self, x: Tensor) -> Tensor:
        self.ran.append(1)
        return torch.relu(self.inner(self.norm(x))) + x


_RAN: list[int] = []


class Stack(nn.Module):
    """Layers in a list, called by ``run(model, x)``."""

    def __init__(self, layer: Callable[[int], nn.Module], run: Callable[[Any, Tensor], Tensor], layers: int = LAYERS):
        super().__init__()
        self.layers = nn.ModuleList(layer(index) for index in range(layers))
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def of_squares(found: Tensor, targets: Tensor) -> Tensor:
    return (found - targets).square().mean()


def in_turn(model: Any, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x)
    return x


def both(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Program, Program, bool]:
    """Captured as a whole and with copies; and whether there are copies."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracing, "export_with_copies", lambda *_: None)
        whole = capture(model, args, kwargs, check_eval=False)
    made: list[bool] = []
    original = layer_copies.insert_copies
    with pytest.MonkeyPatch.context() as patch:

        def insert(*given: Any) -> None:
            original(*given)
            made.append(True)

        patch.setattr(repeated_layers, "insert_copies", insert)
        copied = capture(model, args, kwargs, check_eval=False)
    return whole, copied, bool(made)


def text(node: fx.Node, numbers: dict[fx.Node, int]) -> str:
    """Everything about a node that passes read."""
    kept = {key: node.meta.get(key) for key in ("path", "source", "name", "role", "differentiable", "trainable")}
    arguments = fx.map_arg((node.args, node.kwargs), lambda argument: numbers[argument])
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        value = f"{tuple(value.shape)}{value.stride()}{value.dtype}"
    elif isinstance(value, tuple | list):
        value = [f"{tuple(item.shape)}{item.dtype}" if isinstance(item, Tensor) else item for item in value]
    return f"{node.name} {node.op} {node.target} {arguments} {kept} {value}"


def assert_same(one: Program, other: Program) -> None:
    texts = []
    for program in (one, other):
        numbers = {node: number for number, node in enumerate(program.graph.nodes)}
        texts.append([text(node, numbers) for node in program.graph.nodes])
    for left, right in zip(*texts, strict=True):
        assert left == right
    assert one.fingerprint == other.fingerprint
    assert list(one.tensors.values()) == list(other.tensors.values())
    assert (one.loss, one.notes, one.imports, one.updated_buffers) == (
        other.loss,
        other.notes,
        other.imports,
        other.updated_buffers,
    )
    assert one.output_structure == other.output_structure


@pytest.mark.parametrize(
    "name", ["gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in SPECS if name != "gpt2")]
)
def test_families_have_the_same_program(name: str) -> None:
    loaded = load_model(SPECS[name], meta=True)
    whole, copied, made = both(loaded.model, loaded.args, loaded.kwargs)
    assert made
    assert_same(whole, copied)


def every_third(model: Any, x: Tensor) -> Tensor:
    for index, layer in enumerate(model.layers):
        x = layer(x) if index % 3 == 0 else x + layer(x)
    return x


def summed(model: Any, x: Tensor) -> Tensor:
    total = x
    for layer in model.layers:
        x = layer(x)
        total = total + x
    return total


def two_widths(model: Any, x: Tensor) -> Tensor:
    for index, layer in enumerate(model.layers):
        x = torch.cat([layer(x[:, :2]), x[:, 2:]], 1) if index % 2 else layer(x)
    return x


def one_layer(model: Any, x: Tensor) -> Tensor:
    for _ in model.layers:
        x = model.layers[0](x)
    return x


def without_gradient(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        x = in_turn(model, x)
    return model.layers[-1](x)


def with_penalty(model: Any, x: Tensor) -> Tensor:
    return in_turn(model, x) + sum(parameter.square().sum() for parameter in model.parameters())


def by_their_number(model: Any, x: Tensor) -> Tensor:
    return in_turn(model, x) / len(list(model.parameters()))


def asking(model: Any, x: Tensor) -> Tensor:
    return in_turn(model, x) * sum(hasattr(layer, "inner") for layer in model.layers)


def reading(model: Any, x: Tensor) -> Tensor:
    return in_turn(model, x) + model.layers[5].inner.weight.sum()


class Batched(Counted):
    """Statistics, a draw, a write in place, a view and a result that is the argument."""

    def __init__(self, index: int = 0):
        super().__init__(index)
        self.statistics = nn.BatchNorm1d(3)
        self.rectified = nn.ReLU(inplace=True)
        self.dropped = nn.Dropout(0.5)
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.rectified(self.statistics(super().forward(x)) + self.table)
        return self.dropped(y).view(x.shape[0], 3, 2, 2).flatten(2)


class Numbered(Counted):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.layer_idx)


class Odd(Counted):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * 2 if self.layer_idx % 2 else y


class OddOne(Counted):
    """One in the middle does something else, by its number."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * 2 if self.layer_idx == LAYERS // 2 else y


class Counting(Counted):
    """What it computes depends on how many were called before."""

    def forward(self, x: Tensor) -> Tensor:
        if self.layer_idx == 0:
            _BEFORE.clear()
        _BEFORE.append(1)
        return super().forward(x) / len(_BEFORE)


_BEFORE: list[int] = []


class UnlikeLast(Counted):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.layer_idx < LAYERS - 1 else x


class Keeping(Counted):
    """Leaves its argument where the model picks it up."""

    def forward(self, x: Tensor) -> Tensor:
        Telling.losses.append(x)
        return super().forward(x)


class Telling(Counted):
    """Leaves a loss where the model picks it up."""

    losses: ClassVar[list[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.losses.append((y * y).sum())
        return y


def with_losses(model: Any, x: Tensor) -> Tensor:
    Telling.losses.clear()
    return in_turn(model, x) + sum(Telling.losses)


def sharing() -> nn.Module:
    """One bias in all layers."""
    model = Stack(Counted, in_turn)
    layers: Any = model.layers
    for layer in layers[1:]:
        layer.norm.bias = layers[0].norm.bias
    return model


class Tied(Counted):
    def __init__(self, index: int = 0):
        super().__init__(index)
        self.outer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(super().forward(x))


def chained() -> nn.Module:
    """Each layer ends with the weight that the next begins with."""
    model = Stack(Tied, in_turn)
    layers: Any = model.layers
    for layer, following in zip(layers, layers[1:], strict=False):
        following.inner.weight = layer.outer.weight
    return model


def in_pairs() -> nn.Module:
    model = Stack(Counted, in_turn)
    layers: Any = model.layers
    for layer, following in zip(layers[1::2], layers[2::2], strict=True):
        following.inner.weight = layer.inner.weight
    return model


class Halves(nn.Module):
    """Lists in a list, after a Sequential of Sequentials."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(LAYERS)))
        self.halves = nn.ModuleList(nn.ModuleList(Counted() for _ in range(LAYERS)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        halves: Any = self.halves
        for half in halves:
            for layer in half:
                x = layer(x)
        return x


class FixedBatch(Stack):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.zeros(int(x.shape[0]), 3, 4, device="meta").reshape(2, 3, 4)


TOYS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "every third without residual": (lambda: Stack(Counted, every_third), True),
    "sum of all layers": (lambda: Stack(Counted, summed), True),
    "two sizes in turn": (lambda: Stack(Counted, two_widths, 20), True),
    "one layer again and again": (lambda: Stack(lambda index: Counted(), one_layer), True),
    "statistics": (lambda: Stack(Batched, in_turn), True),
    "lists in a list": (Halves, True),
    "fixed batch": (lambda: FixedBatch(Counted, in_turn), True),
    "shared parameters": (sharing, True),
    "parameters tied to the next layer's": (chained, True),
    "parameters tied in pairs": (in_pairs, True),
    "a penalty on all parameters": (lambda: Stack(Counted, with_penalty), True),
    "divided by the number of parameters": (lambda: Stack(Counted, by_their_number), True),
    "asking what layers have": (lambda: Stack(Counted, asking), True),
    "one layer's weight beside it": (lambda: Stack(Counted, reading), True),
    "ops that depend on the number": (lambda: Stack(Numbered, in_turn), False),
    "ops of odd layers": (lambda: Stack(Odd, in_turn), False),
    "one other op in the middle": (lambda: Stack(OddOne, in_turn), False),
    "numbers by the calls before": (lambda: Stack(Counting, in_turn), False),
    "a last layer that returns its argument": (lambda: Stack(UnlikeLast, in_turn), False),
    "arguments kept": (lambda: Stack(Keeping, with_losses), False),
    "values beside the result": (lambda: Stack(Telling, with_losses), False),
    "layers without gradient": (lambda: Stack(Counted, without_gradient), False),
    "few layers": (lambda: Stack(Counted, in_turn, 7), False),
}


@pytest.mark.parametrize("name", TOYS)
def test_odd_models_have_the_same_program(name: str) -> None:
    build, expected = TOYS[name]
    with torch.device("meta"):
        model, x = build(), torch.zeros(2, 3, 4)
    whole, copied, made = both(model, (x,), {})
    assert made == expected
    assert_same(whole, copied)
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.parametrize(
    ("build", "limits"),
    [
        (lambda: load_model(SPECS["gpt2"], meta=False), {"pp": 2, "tp": 2, "microbatches": 2}),
        (lambda: Stack(Batched, in_turn), {"pp": 3, "microbatches": 1}),
    ],
    ids=["gpt2", "statistics"],
)
def test_training_what_was_copied_is_equal(
    build: Callable[[], Any], limits: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autopart.verify, "run_local_job", run_kept_job)
    torch.manual_seed(0)
    model = build()
    given: dict[str, Any] = {}
    if not isinstance(model, LoadedModel):
        x, targets = torch.randn(2, 2, 3, 4)
        given = {"args": (x,), "kwargs": {"targets": targets}, "loss_fn": of_squares}
    cluster = Cluster.parse(f"cpu:{limits['pp'] * limits.get('tp', 1)}")
    assert autopart.verify.verify(model, cluster=cluster, limits=limits, **given).equal


def test_as_much_is_traced_of_many_layers_as_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    traced, seen = [], list[int]()
    add_tensors = layer_copies.add_tensors

    def counted(exported: torch.export.ExportedProgram, *others: Any) -> None:
        traced.append(len(list(exported.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default))))
        seen.append(len(list(exported.graph.find_nodes(op="placeholder"))))
        add_tensors(exported, *others)

    monkeypatch.setattr(repeated_layers, "add_tensors", counted)
    for layers in (LAYERS, 40):
        with torch.device("meta"):
            model, x = Stack(Counted, in_turn, layers), torch.zeros(2, 3, 4)
        _RAN.clear()
        program = capture(model, (x,), {}, check_eval=False)
        assert sum(node.target is torch.ops.aten.linear.default for node in program.graph.nodes) == layers
        assert len(_RAN) == layers  # each is compared, so that what it does beside its ops is done once
    # The first layer is a kind by itself, since the model's input has no gradient; then come two that are traced.
    assert traced == [3, 3]
    assert seen == [1 + 4 * 3, 1 + 4 * 3]
