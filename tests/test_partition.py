"""Partition: what crosses between stages, where outputs and parameters lie, and that the stages make the whole."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autopart.passes.batch import split_batch
from autopart.passes.blocks import Block, chain, free_nodes
from autopart.passes.partition import partition
from autopart.passes.program import Program, Role
from autopart.passes.rules import RULES
from autopart.runtime import ParallelModule
from autopart.tracing import capture
from launch import launch
from programs import Compiled, compile_program, tensors_of


class Net(nn.Module):
    """A skip over the middle, one weight tied over the ends, an op with several outputs, outputs on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.middle = nn.ModuleList(nn.Linear(4, 8) for _ in range(2))
        self.last = nn.Linear(4, 8)
        self.last.weight = self.first.weight
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor, valid: Tensor) -> dict[str, Tensor]:
        mask = (valid * 2 - 1).unsqueeze(-1)
        left, right = self.first(x).split(4, -1)
        hidden = left.tanh() * mask
        one, two = self.middle[0](hidden).split(4, -1)
        hidden = (one * two).tanh() * mask
        early = hidden.square().sum(-1)
        one, two = self.middle[1](hidden).split(4, -1)
        hidden = one.tanh() * two * mask
        return {"loss": self.last(hidden + right).square().mean(), "early": early, "mask": mask}


def inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 4, dtype=torch.float64, generator=generator)
    return {"x": x, "valid": torch.ones(8, dtype=torch.float64)}


def model() -> nn.Module:
    torch.manual_seed(0)
    return Net().double()


def captured() -> Program:
    return capture(model(), (), inputs(), check_eval=False)


def cut(*targets: str) -> tuple[Program, Any, Any]:
    """Stages that start at the n-th op of a kind each: ``linear.1`` is the second linear."""
    program = captured()
    graph = split_batch(program, RULES).graph
    free = free_nodes(graph, program.updated_buffers)
    ops = chain(graph, free)
    starts = [0]
    for target in targets:
        kind, number = target.split(".")
        starts.append([index for index, node in enumerate(ops) if kind in str(node.target)][int(number)])
    starts.append(len(ops))
    blocks = [Block(index, tuple(ops[start:end]), str(index)) for index, (start, end) in enumerate(pairwise(starts))]
    stages, crossings = partition(program, graph, blocks, range(len(blocks) + 1))
    return program, stages, crossings


def test_skips_go_straight() -> None:
    _, stages, crossings = cut("linear.1", "linear.2", "add.0")
    skips = [crossing for crossing in crossings if crossing.targets == (3,) and crossing.source == 0]
    assert len(skips) == 1
    name = skips[0].name
    assert [name in stage.receives for stage in stages] == [False, False, False, True]
    assert [name in stage.sends for stage in stages] == [True, False, False, False]


def test_cut_behind_an_op_with_several_outputs() -> None:
    """Names of the outputs differ, also from those of other such ops."""
    _, stages, crossings = cut("tanh.0", "linear.2")
    names = [crossing.name for crossing in crossings]
    assert len(names) == len(set(names)) and sum("split" in name for name in names) == 2
    for stage in stages:
        placeholders = [node.name for node in stage.graph.nodes if node.op == "placeholder"]
        assert len(placeholders) == len(set(placeholders))
    _, _, two_splits = cut("mul.1")
    assert len({crossing.name for crossing in two_splits}) == len(two_splits) >= 3


def test_free_values_are_not_sent() -> None:
    _, stages, crossings = cut("linear.1", "linear.2", "add.0")
    for crossing in crossings:
        assert crossing.value.node.meta["differentiable"], crossing
    makers = [any("unsqueeze" in str(node.target) for node in stage.graph.nodes) for stage in stages]
    assert makers == [True, True, True, True]  # the last one returns it


def test_parameters_and_outputs() -> None:
    program, stages, _ = cut("linear.1", "linear.2", "add.0")
    held = [
        {
            node.meta["name"]
            for node in stage.graph.nodes
            if node.op == "placeholder" and node.meta["role"] is Role.PARAMETER
        }
        for stage in stages
    ]
    assert "first.weight" in held[0] & held[3] and "last.bias" in held[3]
    assert [stage.outputs for stage in stages] == [(), ("early",), (), ("loss", "mask")]
    assert program.loss == "loss"


def compiled() -> Compiled:
    return compile_program(captured(), pp=4, microbatches=2)


def in_stages(directory: str) -> tuple[list[float], dict[str, Tensor], Tensor]:
    parallel = ParallelModule(directory, tensors_of(model()), outputs="all")
    losses, early = train(parallel)
    return losses, parallel.state_dict(), early


def train(net: nn.Module) -> tuple[list[float], Tensor]:
    # a stage may have no parameters
    optimizer = torch.optim.SGD(list(net.parameters()) or [torch.zeros(1)], lr=0.5)
    losses, early = [], torch.empty(0)
    for _ in range(3):
        result = net(**inputs())
        result["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(result["loss"].item())
        early = result["early"].detach()
    return losses, early


def test_stages_train_as_the_whole(tmp_path: Path) -> None:
    built = compiled()
    built.emitted.save(tmp_path)
    specs = {spec.name: spec for spec in built.emitted.manifest.parameters}
    assert len(specs["first.weight"].stages) == 2 and specs["first.weight"].aliases == ("last.weight",)
    assert specs["unused"].stages == (0,)
    plain = model()
    losses, early = train(plain)
    for found, state, arrived in launch(in_stages, 4, str(tmp_path)):
        torch.testing.assert_close(found, losses, rtol=1e-12, atol=0)
        torch.testing.assert_close(arrived, early)
        for name, tensor in plain.state_dict().items():
            torch.testing.assert_close(state[name], tensor)
