"""Strategies of single ops, their propagation along a graph, and the local sizes that they lead to."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.export import Dim, export
from torch.nn import functional

from autopart.passes import graph as graphs
from autopart.passes.rules import (
    RULES,
    Strategies,
    Strategy,
    bound_rules,
    compatible,
    factor_of,
    flops,
    follow,
    localized,
    name_of,
    strategies,
)
from autopart.passes.rules.check import check
from autopart.passes.rules.examples import call, f, i
from autopart.passes.rules.strategies import _Candidates, op_strategies, strategy_named
from autopart.passes.sizes import ONE, Extent
from autopart.runtime.placement import Placement

aten = torch.ops.aten


def texts(found: tuple[Strategy, ...]) -> set[str]:
    return {str(strategy) for strategy in found}


def placements(text: str) -> tuple[Placement, ...]:
    return tuple(Placement.parse(item) for item in text.split())


def exported(model: nn.Module, *inputs: Tensor) -> fx.Graph:
    """The training graph with a symbolic first dim, views as reshapes, and parameters marked as differentiable."""
    program = export(model, inputs, dynamic_shapes=tuple({0: Dim.AUTO} for _ in inputs), strict=False)
    graph = program.graph_module.graph
    for node in list(graph.nodes):
        if name_of(node) == "aten._assert_tensor_metadata.default":
            graph.erase_node(node)
        elif name_of(node) == "aten.view.default":
            node.target = aten.reshape.default
        elif name_of(node) == "aten.split.Tensor":
            tensor, size, dim = node.args
            node.target = aten.split_with_sizes.default
            node.args = (tensor, [size] * len(node.meta["val"]), dim)
    for node in graph.nodes:
        sources = [argument.meta["differentiable"] for argument in node.all_input_nodes]
        node.meta["differentiable"] = any(sources) or (node.op == "placeholder" and node.name.startswith("p_"))
    return graph


def find(graph: fx.Graph, op: str, number: int = 0) -> fx.Node:
    return [node for node in graph.nodes if name_of(node) == op][number]


def parameter(graph: fx.Graph, name: str) -> fx.Node:
    return next(node for node in graph.nodes if node.name == f"p_{name}")


class FusedAttention(nn.Module):
    """GPT-2's attention: one projection to queries, keys and values, split, then seen as heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.view(x.shape[0], 6, 4, 2).transpose(1, 2) for part in torch.split(self.qkv(x), 8, dim=-1))
        mixed = functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(mixed.transpose(1, 2).reshape(x.shape[0], 6, 8))


def test_linear_has_megatrons_two_splits() -> None:
    node, _ = call(aten.linear.default, f(2, 8), f(6, 8), f(6))
    assert texts(strategies(node.graph, 2)[node]) == {
        "R: R, R, R -> R",
        "B: B, B, B -> B",
        "P0: P, B, P -> P",
        "P1: B, P, P -> P",
        "b0: S0, B, B -> S0",
        "n: B, S0, S0 -> S1",
        "k: S1, S1, P -> P",
    }


def test_only_what_divides_is_offered() -> None:
    node, _ = call(aten.linear.default, f(2, 8), f(6, 8))
    assert {strategy.name for strategy in strategies(node.graph, 4)[node]} == {"R", "B", "P0", "P1", "k"}


def test_what_nothing_around_asks_for_has_a_name_all_the_same() -> None:
    node, _ = call(aten.linear.default, f(2, 8), f(12, 8), f(12))
    assert "n/3" not in {strategy.name for strategy in strategies(node.graph, 2)[node]}
    assert str(strategy_named(node, "n/3", 2)) == "n/3: B, S0/3, S0/3 -> S1/3"
    assert str(strategy_named(node, "k", 2)) == "k: S1, S1, P -> P"
    assert [strategy_named(node, name, 2) for name in ("n/5", "n/12", "x", "n/", "n/b")] == [None] * 5


def test_values_without_a_gradient_are_replicated() -> None:
    node, _ = call(aten.embedding.default, f(10, 6), i(10, 4))
    assert texts(strategies(node.graph, 2)[node]) == {
        "R: R, R -> R",
        "B: B, R -> B",
        "P: P, R -> P",
        "t0: B, S0 -> S0",
        "n: S1, R -> S1",
        "v: S0, R -> P",
    }
    for operand in node.all_input_nodes:
        operand.meta["differentiable"] = False
    node.meta["differentiable"] = False
    found = strategies(node.graph, 2)
    assert texts(found[node]) == {"R: R, R -> R", "t0: R, S0 -> S0", "n: S1, R -> S1", "v: S0, R -> P"}
    assert texts(found[node.all_input_nodes[0]]) == {"R:  -> R", "S0:  -> S0", "S1:  -> S1"}


def test_a_constant_added_to_a_partial_sum_would_be_added_on_every_rank() -> None:
    node, _ = call(aten.add.Tensor, f(4), 1.0)
    assert "P" not in {strategy.name for strategy in strategies(node.graph, 2)[node]}
    node, _ = call(aten.mul.Tensor, f(4), 2.0)
    assert "P" in {strategy.name for strategy in strategies(node.graph, 2)[node]}


def test_an_op_without_a_rule_is_replicated() -> None:
    node, _ = call(aten.linalg_multi_dot.default, [f(4, 4), f(4, 4)])
    assert texts(strategies(node.graph, 2)[node]) == {"R: R, R -> R", "B: B, B -> B"}


def test_the_fused_projection_is_sharded_inside_three_blocks() -> None:
    graph = exported(FusedAttention(), torch.rand(3, 6, 8))
    found = strategies(graph, 2)
    assert "S0/3" in {str(strategy.outputs[0]) for strategy in found[parameter(graph, "qkv_weight")]}
    # The input has no gradient, so it is replicated rather than B.
    assert "n/3: R, S0/3, S0/3 -> S2/3" in texts(found[find(graph, "aten.linear.default")])
    assert "n: S2/3 -> S2, S2, S2" in texts(found[find(graph, "aten.split_with_sizes.default")])
    assert "f2: S2 -> S2" in texts(found[find(graph, "aten.reshape.default")])
    assert "h: S1, S1, S1 -> S1" in texts(found[find(graph, "aten.scaled_dot_product_attention.default")])
    assert "k: S2, S1, P -> P" in texts(found[find(graph, "aten.linear.default", 1)])


def test_sizes_shrink_where_heads_are_sharded() -> None:
    graph = exported(FusedAttention(), torch.rand(3, 6, 8))
    found = strategies(graph, 2)

    def arguments(node: fx.Node, name: str) -> Any:
        strategy = next(strategy for strategy in found[node] if strategy.name == name)
        return localized(node, [(strategy, 2)])[0][1:]

    assert arguments(find(graph, "aten.split_with_sizes.default"), "n") == ([4, 4, 4], -1)
    sizes = arguments(find(graph, "aten.reshape.default"), "f2")[0]
    assert isinstance(sizes[0], fx.Node) and sizes[1:] == [6, 2, 2]
    (sizes,) = arguments(find(graph, "aten.reshape.default", 3), "f2")
    assert isinstance(sizes[0], fx.Node) and sizes[1:] == [6, 4]


class Flattened(nn.Module):
    """Tokens of all samples in one dim: the sequence is inside b blocks, the batch is outside."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(x.shape[0] * 6, 8).relu()
        return tokens.reshape(x.shape[0], 6, 8)


def test_flattened_tokens_are_sharded_inside_every_sample() -> None:
    graph = exported(Flattened(), torch.rand(4, 6, 8))
    found = strategies(graph, 2)
    there, back = (find(graph, "aten.reshape.default", number) for number in (0, 1))
    relu = find(graph, "aten.relu.default")
    assert "f1: S1 -> S0/b" in texts(found[there]) and "f1: S0/b -> S1" in texts(found[back])
    assert "d0/b: S0/b -> S0/b" in texts(found[relu])
    strategy = next(strategy for strategy in found[there] if strategy.name == "f1")
    assert localized(there, [(strategy, 2)])[0][1] == [-1, 8]
    results = [*check(there, batch=4), *check(back, batch=4), *check(relu, batch=4)]
    assert len(results) > 12 and all(result.ok for result in results)


def test_the_batch_is_considered_only_where_asked_for() -> None:
    graph = exported(Flattened(), torch.rand(4, 6, 8))
    there, relu = find(graph, "aten.reshape.default"), find(graph, "aten.relu.default")
    assert not any(placement == Placement.parse("S0") for s in strategies(graph, 2)[there] for placement in s.inputs)
    found = strategies(graph, 2, batch=True)
    assert "f0: S0 -> S0" in texts(found[there]) and "f1: S1 -> S0/b" not in texts(found[there])
    strategy = next(strategy for strategy in found[there] if strategy.name == "f0")
    assert localized(there, [(strategy, 2)])[0] == tuple(there.args), "the local batch size stands for b"
    for node in (there, relu):
        assert all(result.ok for result in check(node, batch=4, batched=True))


def test_two_axes_shrink_sizes_one_after_the_other() -> None:
    node, _ = call(aten.reshape.default, f(2, 64), [2, 8, 8])
    found = {strategy.name: strategy for strategy in strategies(node.graph, 2)[node]}
    args, kwargs = localized(node, [(found["f1"], 2), (found["f2"], 4)])
    assert (args[1], kwargs) == ([2, 4, 2], {})
    assert localized(node, [(found["f1"], 2), (found["f1"], 2)])[0][1] == [2, 2, 8]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("S0 R R", "S0"),
        ("S0 B B", "S0"),
        ("R S0 S0", "S1"),
        ("S1 S1 P", "P"),
        ("P R P", "P"),
        ("R R R", "R"),
        ("B B B", "B"),
        ("S1 S1 R", None),
        ("S1 R P", None),
        ("S0 S0 S0", None),
        ("P R R", None),
    ],
)
def test_outputs_follow_from_inputs(given: str, expected: str | None) -> None:
    node, _ = call(aten.linear.default, f(2, 8), f(6, 8), f(6))
    rule = RULES.rule(node)
    assert rule is not None
    assert follow(rule, node, placements(given)) == (None if expected is None else placements(expected))


def test_factor_of_a_placement() -> None:
    node, _ = call(aten.reshape.default, f(2, 24), [2, 3, 8])
    rule = RULES.rule(node)
    assert rule is not None and str(rule) == "f0 (f1 f2) -> f0 f1 f2"
    for text, factor in {
        "S0": ("f0", Extent(1)),
        "S1": ("f1", Extent(1)),
        "S1/3": ("f2", Extent(1)),
        "S1/6": ("f2", Extent(2)),
        "S1/2": None,
        "R": None,
    }.items():
        assert factor_of(rule, 0, Placement.parse(text)) == factor, text


def test_strategies_cover_ops_and_sources_but_no_names() -> None:
    graph = exported(FusedAttention(), torch.rand(3, 6, 8))
    found = strategies(graph, 2)
    for node in graph.nodes:
        assert (node in found) == (node.op == "placeholder" or graphs.is_op(node)), node.name
        for strategy in found.get(node, ()):
            expected = 0 if node.op == "placeholder" else len(graphs.inputs(node))
            assert len(strategy.inputs) == expected and len(strategy.outputs) == len(graphs.outputs(node))


def test_axes_that_divide_the_same_sizes_share_what_is_propagated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes of 8 and 16: axes of 2, 4 and 8 divide both, one of 16 the larger, those of 3 and 5 none."""
    graph, propagated = exported(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), torch.rand(3, 8)), []
    propagate = _Candidates.propagate

    def counted(candidates: _Candidates) -> None:
        propagated.append(candidates.parts)
        propagate(candidates)

    monkeypatch.setattr(_Candidates, "propagate", counted)
    several = Strategies(graph, RULES, False, bound_rules(graph, RULES), {})
    found = {parts: several.on(parts) for parts in (2, 16, 4, 3, 8, 5)}
    assert propagated == [2, 16, 3]
    assert all(own == strategies(graph, parts) for parts, own in found.items())


def test_users_add_rules() -> None:
    node, _ = call(aten.rot90.default, f(4, 2, 2), 1, [1, 2])
    rules = RULES.extended({"aten.rot90.default": "b ^m ^n -> b ^n ^m"})
    assert texts(strategies(node.graph, 2, rules)[node]) == {"R: R -> R", "B: B -> B", "b: S0 -> S0"}
    assert all(result.ok for result in check(node, rules=rules, operands=[f(4, 2, 2)]))
    assert RULES.rule(node) is None


@pytest.mark.parametrize(
    ("op", "args", "expected"),
    [
        (aten.linear.default, (f(2, 4, 8), f(6, 8), f(6)), 2 * 2 * 4 * 8 * 6),
        (aten.addmm.default, (f(6), f(4, 8), f(8, 6)), 2 * 4 * 8 * 6),
        (aten.conv2d.default, (f(2, 3, 8, 8), f(5, 3, 3, 3), None, [2, 2], [1, 1]), 2 * 2 * 5 * 3 * 9 * 16),
        (aten.conv2d.default, (f(2, 4, 8, 8), f(4, 1, 3, 3), None, [1], [1], [1], 4), 2 * 2 * 4 * 9 * 64),
        (
            aten.scaled_dot_product_attention.default,
            (f(2, 4, 6, 8), f(2, 4, 5, 8), f(2, 4, 5, 8)),
            4 * 2 * 4 * 6 * 5 * 8,
        ),
        (aten.einsum.default, ("ij,jk->ik", [f(4, 6), f(6, 8)]), 2 * 4 * 6 * 8),
        (aten.relu.default, (f(4),), 0),
        (aten.linalg_inv.default, (f(4, 4),), 0),
    ],
)
def test_flops_are_two_per_multiply_and_add(op: Any, args: tuple[Any, ...], expected: int) -> None:
    assert flops(call(op, *args)[0], 1, RULES) == expected


def test_flops_grow_with_the_batch() -> None:
    node = find(exported(FusedAttention(), torch.rand(3, 6, 8)), "aten.linear.default")
    assert flops(node, 5, RULES) == 2 * 5 * 6 * 8 * 24


def test_a_form_that_takes_several_axes_has_rows_in_a_row() -> None:
    """Each axis cuts what those before it leave; pieces that another axis would make are none where it does not."""
    node, _ = call(aten.embedding.default, f(8, 4), i(8, 6))
    by_name = {item.name: item for item in op_strategies(node, 2, [("v", ONE), ("v", Extent(2)), ("t0", ONE)])}
    allowed = {
        (first, second)
        for first, second in itertools.product(by_name, repeat=2)
        if "v" in first + second and compatible(node, (by_name[first], by_name[second]), (2, 2))
    }
    alone = {"R", "B", "P", "t0"}
    assert {pair for pair in allowed if not alone.intersection(pair)} == {("v", "v/2"), ("v/2", "v")}
    assert ("v", "t0") in allowed and not any("v/2" in pair and alone.intersection(pair) for pair in allowed)
