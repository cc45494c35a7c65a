"""Experts sharded, their tokens whole or sent to them; and query heads on more ranks than key-value heads."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import autopart.verify
from autopart.analysis import analyze
from autopart.candidates import Candidates
from autopart.models import load_model
from autopart.passes.kept import kept_bytes
from autopart.passes.rules import RULES, Strategy, find_routings
from autopart.planner import make_plan
from autopart.realize import build, realize
from autopart.reshardings import reshardings
from autopart.runtime import Axis, local_forms
from autopart.runtime.errors import PlanError
from autopart.runtime.placement import shard
from autopart.solver.degrees import Degrees
from autopart.tracing import capture
from autopart.verify import Subject, compare_emitted, prepare
from clusters import ideal
from families import BATCH, SEQ, family
from forcing import forced, op, run
from launch import launch, run_kept_job

INNER, WIDTH, CHOSEN = 2 * 64, 32, 2
"""Of Mixtral: outputs of the first grouped product, model width, experts per token."""


@functools.lru_cache(maxsize=1)
def subject_of(name: str) -> Subject:
    item = family(name)
    return prepare(item.build(), (), item.inputs(item.batch))


def by_expert(node: fx.Node, strategy: Strategy) -> bool:
    """The experts' weights and products by expert, all else whole."""
    if node.op != "call_function":
        return True
    if any("_experts_" in item.name for item in node.all_input_nodes):
        return strategy.outputs == (shard(0),)
    return strategy.name == ("e" if "grouped_mm" in op(node) else "R")


@pytest.mark.parametrize("parts", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_mixtral(parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A summand of each product per rank: its experts' rows. One sum after each forward, and of its gradient."""
    plan = forced(subject_of("mixtral-1"), parts, by_expert)
    experts = {name: placement for name, placement in plan.storage.items() if ".experts." in name}
    assert len(experts) == 2 and set(experts.values()) == {"S0"}
    result, source = run(subject_of("mixtral-1"), plan, tmp_path, monkeypatch)
    assert source.count("local_forms.own_experts_product(") == 2
    assert len(re.findall(rf"parameter\({4 // parts}, (128, 32|32, 64)", source)) == 2
    tokens = BATCH * SEQ * CHOSEN
    moved = sum(size for _, size in result.traffic[0].counted.values())
    # forward both products' sums; backward their operands' gradients
    assert moved == 8 * tokens * (INNER + WIDTH + WIDTH + INNER // 2)


def routed(steps: str) -> Callable[[fx.Node, Strategy], bool]:
    """Rows on their own ranks, each layer's two products with experts as ``steps`` says, attention by heads."""
    chosen: dict[fx.Node, str] = {}

    def keep(node: fx.Node, strategy: Strategy) -> bool:
        if "grouped_mm" in op(node):
            step = chosen.setdefault(node, steps.split()[len(chosen) % 2])
            return strategy.name == f"{step}/b"
        return True

    return keep


@pytest.mark.parametrize(
    ("steps", "parts"),
    [
        ("dispatch combine", 2),
        pytest.param("dispatch combine", 4, marks=pytest.mark.slow),
        pytest.param("exchange exchange", 4, marks=pytest.mark.slow),
    ],
)
def test_rows_are_sent_to_their_experts(
    steps: str, parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank routes its own tokens, has 1/p of the experts, and sends rows there and back, forward and backward."""
    subject = subject_of("mixtral-1")
    plan = forced(subject, parts, routed(steps))
    experts = {name: placement for name, placement in plan.storage.items() if ".experts." in name}
    assert len(experts) == 2 and set(experts.values()) == {"S0"}
    result, source = run(subject, plan, tmp_path, monkeypatch)
    assert len(re.findall(rf"parameter\({4 // parts}, (128, 32|32, 64)", source)) == 2
    exchanged = {
        item.op: (item.source, item.target, item.direction)
        for item in reshardings(plan, analyze(subject.program), ideal(parts))
        if "grouped_mm" in item.op
    }
    assert len(exchanged) == 2 and all(source for source, _, _ in exchanged.values())
    rows, counts = BATCH * SEQ * CHOSEN // parts * 8, 4 * 8
    once = steps == "dispatch combine"
    moved = WIDTH + WIDTH if once else WIDTH + INNER + INNER // 2 + WIDTH
    found = result.traffic[0].counted["all_to_all"]
    assert found == ((5, 2 * rows * moved + counts) if once else (10, 2 * rows * moved + 2 * counts))


class _Seen(TorchFunctionMode):
    """As under a split backward, functions are seen one by one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Products(TorchDispatchMode):
    """Notes matrix products in the order of their calls."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.events.append("mm")
        return func(*args, **(kwargs or {}))


def _dispatched(apart: bool) -> tuple[list[Tensor], list[str]]:
    """The product of rows on their ways and its gradients; products and the exchange of the backward."""
    events: list[str] = []
    exchange = dist.all_to_all_single

    def noted(*args: Any, **keywords: Any) -> Any:
        work = exchange(*args, **keywords)
        events.append("send")

        def wait() -> None:
            events.append("wait")
            work.wait()

        return SimpleNamespace(wait=wait)

    axis = Axis("tp", 2, dist.get_rank(), dist.group.WORLD)
    generator = torch.Generator().manual_seed(axis.index)
    x, weight = (torch.randn(*shape, generator=generator).requires_grad_() for shape in ((6, 4), (2, 4, 3)))
    offs = torch.tensor([[1, 3, 3, 6], [2, 4, 5, 6]][axis.index])
    with _Seen() if apart else nullcontext():
        found = local_forms.dispatch_experts_product(x, weight, offs, axis=axis)
    dist.all_to_all_single = noted
    with _Products(events):
        found.square().sum().backward()
    dist.all_to_all_single = exchange
    assert x.grad is not None and weight.grad is not None
    return [found.detach(), x.grad, weight.grad], events


def _both() -> list[str]:
    (apart, _), (together, events) = _dispatched(True), _dispatched(False)
    for one, other in zip(apart, together, strict=True):
        torch.testing.assert_close(one, other)
    return events


def test_gradients_of_experts_are_computed_while_rows_go_back() -> None:
    """Of two experts on each rank: the rows' gradients, which are sent; the weights'; then the rows' are waited for."""
    assert launch(_both, 2) == [["mm", "mm", "send", "mm", "mm", "wait"]] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "limits",
    [{"pp": 2, "microbatches": 2, "schedule": "zb-h1"}, {"dp": 2, "microbatches": 2, "zero": 3}],
    ids=["split-backward", "replicas"],
)
def test_routing_beside_other_parts_of_a_plan(
    limits: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = subject_of("mixtral")
    run(subject, forced(subject, 2, routed("dispatch combine"), limits), tmp_path, monkeypatch)


@pytest.mark.slow
def test_rows_are_sent_again_when_a_layer_is_recomputed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal; what a recomputed layer exchanges again is not in a plan's counts, whatever the strategy."""
    subject = subject_of("mixtral-1")
    plan = forced(subject, 2, routed("dispatch combine"), {"recompute": "full"})
    monkeypatch.setattr(autopart.verify, "run_local_job", run_kept_job)
    realize(subject.program, plan, analyze(subject.program)).save(tmp_path / "program")
    assert "checkpoint(" in (tmp_path / "program" / "stage_0.py").read_text()
    assert compare_emitted(tmp_path / "program", subject, plan=plan).equal


@pytest.mark.slow
def test_experts_on_one_axis_and_their_matrices_on_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On 2 x 2 ranks: rows routed on one axis, both products' inner dim sharded on the other."""
    subject = subject_of("mixtral-1")
    analysis = analyze(subject.program)
    offered = dict(analysis.strategies(2, [2]))
    for node, strategies in offered.items():
        if "grouped_mm" in op(node):
            offered[node] = tuple(s for s in strategies if s.name in ("dispatch/b", "combine/b", "n/2", "n", "k"))
    analysis._strategies[2, 2] = offered
    plan = make_plan(subject.program, ideal(4), batch=8, analysis=analysis, pp=1, dp=1, tp=(2, 2), microbatches=1)
    products = {key: text for key, text in plan.strategies.items() if "grouped_mm" in key}
    # the axes are alike, so either may have the rows, but of both products the same
    assert sorted(sorted(text.split(",")) for text in products.values()) == [["combine/b", "k"], ["dispatch/b", "n/2"]]
    assert len({[name.endswith("/b") for name in text.split(",")].index(True) for text in products.values()}) == 1
    run(subject, plan, tmp_path, monkeypatch)


def test_rows_are_sent_where_that_is_cheaper() -> None:
    """Found from costs alone: experts stay and rows move, until there are so many rows that weights are gathered."""
    model = load_model(
        "hf:mixtral?num_hidden_layers=1&num_local_experts=16&hidden_size=256&intermediate_size=512&dtype=float32"
        "&num_attention_heads=8&num_key_value_heads=8&head_dim=32&vocab_size=512&sliding_window=null&seq=128&batch=8",
        meta=True,
    )
    program = capture(model.model, model.args, model.kwargs, check_eval=False)
    analysis = analyze(program)
    found = {}
    for batch in (8, 4096):
        plan = make_plan(program, ideal(8), batch=batch, analysis=analysis, pp=1, dp=1, tp=8, microbatches=1)
        found[batch] = [text for key, text in plan.strategies.items() if "grouped_mm" in key]
        assert plan.gap < 1e-6
        assert plan.stages[0].hidden_s["all_to_all"] > 0
    assert found == {8: ["dispatch/b", "combine/b"], 4096: ["own/b", "own/b"]}


def test_a_plan_that_would_convert_routed_rows_is_refused() -> None:
    subject = subject_of("mixtral-1")
    plan = forced(subject, 2, routed("dispatch combine"))
    (sort,) = (key for key in plan.strategies if key.endswith(":sort"))
    wrong = replace(plan, strategies={**plan.strategies, sort: "R"})
    with pytest.raises(PlanError, match="routed rows are not converted"):
        realize(subject.program, wrong, analyze(subject.program))


_SMALL = "hidden_size=32&num_attention_heads=4&num_key_value_heads=2&vocab_size=96&num_hidden_layers=1&seq=8&batch=8"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "steps"),
    [
        # each expert has biases, looked up for the rows where they are
        ("gpt_oss?head_dim=8&intermediate_size=64&num_local_experts=4&num_experts_per_tok=2", "exchange exchange"),
        ("gpt_oss?head_dim=8&intermediate_size=64&num_local_experts=4&num_experts_per_tok=2", "dispatch combine"),
        # and one expert for all tokens beside those that are chosen
        (
            "qwen2_moe?moe_intermediate_size=32&shared_expert_intermediate_size=32&intermediate_size=64"
            "&num_experts=4&num_experts_per_tok=2&decoder_sparse_step=1",
            "dispatch combine",
        ),
    ],
    ids=["biases of own rows", "biases of experts' rows", "shared expert"],
)
def test_other_mixtures(spec: str, steps: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(f"hf:{spec}&{_SMALL}", dtype=torch.float64)
    subject = prepare(model.model, model.args, model.kwargs)
    run(subject, forced(subject, 2, routed(steps)), tmp_path, monkeypatch)


class Mixture(nn.Module):
    """One product per expert with a bias, rows put back by sorting their numbers again."""

    def __init__(self, leaks: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4, dtype=torch.bfloat16)
        self.weight = nn.Parameter(torch.randn(4, 16, 16, dtype=torch.bfloat16))
        self.bias = nn.Parameter(torch.zeros(4, 16, dtype=torch.bfloat16))
        self.leaks = leaks

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, 16)
        keys, numbers = torch.sort(self.gate(rows).argmax(-1))
        ends = torch.bincount(keys, minlength=4).cumsum(0, dtype=torch.int32)
        product = torch.relu(torch._grouped_mm(rows[numbers], self.weight, ends) + self.bias[keys])
        return product[torch.argsort(numbers)].sum() + (product.cumsum(0)[0, 0] if self.leaks else 0)


@pytest.mark.parametrize("leaks", [False, True])
def test_routings_are_found_by_their_data_flow(leaks: bool) -> None:
    """Whatever module wrote it; rows in their groups' order that meet each other are no routing."""
    program = capture(Mixture(leaks), (torch.randn(8, 8, 16, dtype=torch.bfloat16),), check_eval=False)
    found = [[item.step.name for item in routing.ops] for routing in find_routings(program.graph, RULES)]
    steps = "SORT COUNT COUNTED PICK PRODUCT LOOK_UP ROWS ROWS ROWS RETURN"
    assert found == ([] if leaks else [steps.split()])
    analysis = analyze(program)
    offered = analysis.strategies(2)
    for routing in find_routings(analysis.graph, RULES):
        for item in routing.ops:
            if item.step.name == "LOOK_UP":
                assert {"own/b", "group/b"} <= {strategy.name for strategy in offered[item.node]}


def by_query_head(node: fx.Node, strategy: Strategy) -> bool:
    """Attention by query heads, and so the product behind it; keys and values projected whole on every rank."""
    read = " ".join(item.name for item in node.all_input_nodes)
    if node.op != "call_function":
        return True
    if "k_proj" in read or "v_proj" in read:
        return strategy.name in ("R", "B")
    if "o_proj" in read:
        return strategy.name == "k"
    return strategy.name == "h" if op(node) == "scaled_dot_product_attention" else True


@pytest.mark.parametrize("name", ["llama-1", "mixtral-1"])
def test_fewer_key_value_heads_than_ranks(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four query heads on four ranks that share two pairs of key and value heads, repeated as the model does it."""
    plan = forced(subject_of(name), 4, by_query_head)
    placed = {key.split(".")[-2]: placement for key, placement in plan.storage.items() if "_proj.weight" in key}
    assert placed["q_proj"] == "S0" and placed["o_proj"] == "S1"
    assert placed["k_proj"] == placed["v_proj"] == "B"
    run(subject_of(name), plan, tmp_path, monkeypatch)


def test_a_rank_is_planned_to_keep_its_own_routed_rows() -> None:
    """Not all of them: what blocks count is what the emitted graph keeps."""
    spec = (
        "hf:mixtral?num_hidden_layers=2&hidden_size=64&intermediate_size=128&num_attention_heads=4"
        "&num_key_value_heads=2&num_local_experts=4&vocab_size=64&experts_implementation=grouped_mm&seq=32"
    )
    loaded = load_model(spec, meta=True)
    analysis = analyze(capture(loaded.model, loaded.args, loaded.kwargs, check_eval=False))
    config = Degrees(1, 1, (4,), 1, "1f1b", "none")
    cluster = ideal(4, bandwidth=1e12, memory_bandwidth=1e12, memory_bytes=2**40)
    candidates = Candidates(analysis, cluster, 8, "adamw")
    choice = candidates.choose(config)
    assert any(strategy.name.startswith("own") for chosen in choice.strategies.values() for strategy in chosen)
    (shape,) = candidates.problem(config, choice).shapes
    planned = sum(block.activation_bytes for block in shape.blocks) + sum(group.bytes for group in shape.kept)
    axes = candidates.setting(config).named_sizes
    (graph,) = build(analysis, (0, len(analysis.blocks)), axes, choice.strategies, choice.storage).local
    assert planned == pytest.approx(kept_bytes(graph, axes, candidates.samples(config)), rel=1e-9)
