"""Blocks: where a graph may be cut, which pieces repeat, and what every stage computes for itself."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from autopart.analysis import analyze
from autopart.passes import graph as graphs
from autopart.passes.batch import split_batch
from autopart.passes.blocks import Block, chain, crossing, cut_positions, find_blocks, free_nodes, value_bytes
from autopart.passes.graph import Value
from autopart.passes.program import Program
from autopart.passes.rules import RULES
from autopart.tracing import capture
from families import Family, captured, unlike_first


def blocks_of(program: Program) -> list[Block]:
    graph = split_batch(program, RULES).graph
    return find_blocks(chain(graph, free_nodes(graph, program.updated_buffers)), lambda node: 1.0, 8)


def check_blocks(blocks: list[Block]) -> None:
    """All ops once, in order; every block reads from itself and from blocks before it."""
    home = {node: block.index for block in blocks for node in block.nodes}
    assert [block.index for block in blocks] == list(range(len(blocks)))
    assert len(home) == sum(len(block.nodes) for block in blocks)
    for node, index in home.items():
        for value in graphs.inputs(node):
            assert home.get(value.node, -1) <= index


@pytest.mark.slow
def test_a_deep_gpt2_folds() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        config = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=12, n_head=2, use_cache=False)
        model = GPT2LMHeadModel(config)
    ids = torch.zeros(2, 8, dtype=torch.int64, device="meta")
    blocks = blocks_of(capture(model, (), {"input_ids": ids, "labels": ids}, check_eval=False))
    check_blocks(blocks)
    assert len(blocks) >= 24 and len({block.signature for block in blocks}) <= 7
    # every layer's attention and feed-forward
    counts = sorted((sum(block.signature == other.signature for other in blocks) for block in blocks), reverse=True)
    assert counts[0] >= 10


@pytest.mark.parametrize("family", unlike_first())
def test_families(family: Family) -> None:
    blocks = blocks_of(captured(family.name))
    check_blocks(blocks)
    assert len(blocks) >= 8


class Skips(nn.Module):
    """Two halvings and two doublings with skips between them, as a U-Net has."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.down = nn.ModuleList([nn.Linear(16, 8), nn.Linear(8, 4)])
        self.up = nn.ModuleList([nn.Linear(4, 8), nn.Linear(16, 16)])
        self.last = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down[0](x).relu()
        second = self.down[1](first).relu()
        third = self.up[0](second).relu()
        fourth = self.up[1](torch.cat([third, first], -1)).relu()
        return self.last(torch.cat([fourth, x * self.scale], -1)).square().mean()


class Branches(nn.Module):
    """Two towers that meet in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
        self.right = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.left(x) * self.right(y)).sum(-1).mean()


@pytest.mark.parametrize("case", ["skips", "branches"])
def test_nets_that_are_no_chains(case: str) -> None:
    if case == "skips":
        program = capture(Skips(), (torch.randn(4, 16),), check_eval=False)
    else:
        program = capture(Branches(), (torch.randn(4, 8), torch.randn(4, 8)), check_eval=False)
    blocks = blocks_of(program)
    check_blocks(blocks)
    assert len(blocks) >= 4
    graph = split_batch(program, RULES).graph
    ops = chain(graph, free_nodes(graph))
    lives = crossing(ops)
    assert lives[0] == lives[-1] == ()
    for cut, live in enumerate(lives):
        before, after = set(ops[:cut]), ops[cut:]
        read = {value for node in after for value in graphs.inputs(node) if value.node in before}
        assert set(live) == read


def test_cuts_divide_heavy_blocks() -> None:
    program = capture(Branches(), (torch.randn(4, 8), torch.randn(4, 8)), check_eval=False)
    graph = split_batch(program, RULES).graph
    ops = chain(graph, free_nodes(graph))
    cuts = cut_positions(ops, lambda node: 1.0, 4)
    assert cuts[0] == 0 and cuts[-1] == len(ops) and cuts == sorted(set(cuts))
    assert all(end - start <= max(1, len(ops) // 4) for start, end in pairwise(cuts))


class Masked(nn.Module):
    """The mask and the positions come from inputs alone; the noise is random, the count of calls is updated."""

    table: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(4.0))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        self.calls += 1
        mask = (valid * 2 - 1).unsqueeze(-1) + self.table.cos()
        return self.linear(x * mask) + torch.rand_like(x) + self.calls


def test_free_values() -> None:
    program = capture(Masked(), (torch.randn(2, 4), torch.ones(2)), check_eval=False)
    free = free_nodes(program.graph, program.updated_buffers)
    names = {node.name for node in free if node.op == "call_function"}
    assert {"cos_default", "unsqueeze_default"} <= names or any("cos" in name for name in names)
    for node in program.graph.nodes:
        text = str(node.target)
        if "linear" in text or "rand_like" in text:
            assert node not in free
        if node.op == "placeholder" and node.meta["name"] == "calls":
            assert node not in free and not any(user in free for user in node.users)


def test_signatures_tell_shared_parameters_apart() -> None:
    class Tied(nn.Module):
        def __init__(self, tie: bool) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
            if tie:
                self.layers[4].weight = self.layers[1].weight

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x).tanh()
            return x.sum()

    def distinct(tie: bool) -> int:
        return len({block.signature for block in blocks_of(capture(Tied(tie), (torch.randn(2, 8),), check_eval=False))})

    assert distinct(True) > distinct(False)


class Sharing(nn.Module):
    """A layer whose two products are in blocks of their own, and read the same scales. swapped: the second in another
    order than the first.
    """

    def __init__(self, swapped: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.swapped = nn.Linear(8, 8), nn.Linear(8, 8), swapped
        self.one, self.other = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x * self.one) * self.other
        one, other = (self.other, self.one) if self.swapped else (self.one, self.other)
        return x + self.second(x * one) * other


@pytest.mark.parametrize("swapped", [None, 1, 2])
def test_layers_that_share_within_themselves_are_alike(swapped: int | None) -> None:
    """As far as the same tensors are at the same places, and not with a layer that swaps them."""
    model = nn.Sequential(*(Sharing(number == swapped) for number in range(4)))
    blocks = blocks_of(capture(model, (torch.randn(2, 8),), check_eval=False))
    homes: dict[str, set[int]] = {}
    for block in blocks:
        for node in block.nodes:
            for value in graphs.inputs(node):
                if value.node.op == "placeholder" and "one" in value.node.name:
                    homes.setdefault(value.node.name, set()).add(block.index)
    assert all(len(own) > 1 for own in homes.values()), "cut so that blocks share"
    inside = [[own.signature for own in blocks if graphs.module_path(own.nodes[-1])[:1] == str(n)] for n in range(4)]
    assert len(inside[3]) >= 2 and inside[0] != inside[3], "the first layer's input has no gradient"
    assert [own == inside[3] for own in inside[1:3]] == [swapped != 1, swapped != 2]


def test_bytes_of_values() -> None:
    program = capture(Branches(), (torch.randn(4, 8), torch.randn(4, 8)), check_eval=False)
    linear = next(node for node in program.graph.nodes if "linear" in str(node.target))
    assert value_bytes(Value(linear), 3) == 3 * 8 * 4


class Chosen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        labelled = y > 0
        hidden = torch.relu(self.first(x))[labelled]
        return nn.functional.cross_entropy(self.last(hidden), y[labelled])


def test_nothing_is_cut_where_values_decide_sizes() -> None:
    program = capture(Chosen(), (torch.randn(8, 4), torch.randint(3, (8,))), check_eval=False)
    analysis = analyze(program)
    ops = [node for block in analysis.blocks for node in block.nodes]
    ends = list(accumulate(len(block.nodes) for block in analysis.blocks))
    assert len(ends) > 1
    for live in (crossing(ops)[end] for end in ends):
        assert not any(free_unbacked_symbols(size) for value in live for size in value.fake.shape)
