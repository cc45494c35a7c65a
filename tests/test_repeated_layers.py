"""A capture that traces few of a model's alike layers and copies the rest is the capture of the whole model."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import autopart.verify
from autopart import layer_copies, repeated_layers, tracing
from autopart.cluster import Cluster
from autopart.models import LoadedModel, load_model
from autopart.passes.program import Program
from autopart.tracing import capture
from hidden_differences import HIDDEN
from launch import run_kept_job
from layer_models import LAYERS, RAN, TOYS, Batched, Counted, Making, Odd, Stack, Tallying, in_turn, looking

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


def of_squares(found: Tensor, targets: Tensor) -> Tensor:
    return (found - targets).square().mean()


def both(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Program, Program, bool]:
    """Captured as a whole and with copies; and whether there are copies."""
    random.seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracing, "export_with_copies", lambda *_: None)
        whole = capture(model, args, kwargs, check_eval=False)
    random.seed(0)
    made: list[bool] = []
    original = layer_copies.insert_copies
    with pytest.MonkeyPatch.context() as patch:

        def insert(*given: Any) -> None:
            original(*given)
            made.append(True)

        patch.setattr(repeated_layers, "insert_copies", insert)
        copied = capture(model, args, kwargs, check_eval=False)
    return whole, copied, bool(made)


def attributes(model: nn.Module) -> list[Any]:
    """What there is in a model's modules beside tensors, and the names of these."""
    return [
        [repr(value) if isinstance(value, int | float | str | list | tuple) else type(value), name]
        if not isinstance(value, dict)
        else [name, *value]
        for module in model.modules()
        for name, value in sorted(vars(module).items())
    ]


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


@pytest.mark.parametrize("name", [*TOYS, *HIDDEN])
def test_odd_models_have_the_same_program(name: str) -> None:
    build, expected = {**TOYS, **HIDDEN}[name]
    with torch.device("meta"):
        model, x = build(), torch.zeros(2, 3, 4)
    whole, copied, made = both(model, (x,), {})
    assert made == expected
    assert_same(whole, copied)


def test_what_a_failed_trace_computed_is_not_used_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(2, 3, 4)
    program = capture(looking(), (x,), {}, check_eval=False)
    monkeypatch.setattr(tracing, "export_with_copies", lambda *_: None)
    assert_same(capture(looking(), (x,), {}, check_eval=False), program)


@pytest.mark.parametrize("layer", [Counted, Tallying, Making, Odd], ids=lambda layer: layer.__name__)
def test_a_capture_leaves_the_model_as_it_was(layer: type[nn.Module]) -> None:
    with torch.device("meta"):
        model, x = Stack(layer, in_turn), torch.zeros(2, 3, 4)
    RAN.clear()
    before = attributes(model)
    capture(model, (x,), {}, check_eval=False)
    assert attributes(model) == before


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
        RAN.clear()
        program = capture(model, (x,), {}, check_eval=False)
        assert sum(node.target is torch.ops.aten.linear.default for node in program.graph.nodes) == layers
        assert len(RAN) == layers  # each is compared, so that what it does beside its ops is done once
    # The first layer is a kind by itself, since the model's input has no gradient; then come two that are traced.
    assert traced == [3, 3]
    assert seen == [1 + 4 * 3, 1 + 4 * 3]
