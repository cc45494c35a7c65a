"""Tensor sharding: any strategies give the same training, and move what was counted."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from autopart.passes.conversion import Axes
from autopart.passes.program import Role
from autopart.passes.rules import Strategy, strategies
from autopart.passes.shard import collective_counts
from autopart.precision import eager_in_float64
from autopart.runtime import ParallelModule
from autopart.runtime.placement import Placements
from autopart.verify import prepare
from families import captured, family
from forcing import forced, op, run
from launch import launch
from programs import Choose, compile_program, randomly, tensors_of

AXES: Axes = (("tp", 2),)
BATCH, STEPS = 4, 3
TRANSFORMERS = (
    *("gpt2", "mixtral"),
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "bert", "t5", "vit")),
)


def in_parallel(directory: str, name: str) -> tuple[list[float], dict[str, Tensor], dict[Any, Any]]:
    """Losses, the state afterwards, and the traffic of one step."""
    item = family(name)
    parallel = ParallelModule(directory, tensors_of(item.build()))
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    losses: list[float] = []
    traffic: dict[Any, Any] = {}
    for _ in range(STEPS):
        parallel.traffic.reset()
        loss = parallel(**item.inputs(BATCH)).loss
        loss.backward()
        traffic = {
            (axis, phase, operation): (count.calls, count.bytes)
            for (operation, axis, phase), count in parallel.traffic.counts().items()
            if axis not in ("dp", "stage") and phase in ("forward", "backward")
        }
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, parallel.state_dict(), traffic


def serial(name: str) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses, the state afterwards, and the first gradients."""
    item = family(name)
    model = item.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[float] = []
    first: dict[str, Tensor] = {}
    for step in range(STEPS):
        with eager_in_float64(model):
            loss = model(**item.inputs(BATCH)).loss
        loss.backward()
        if not step:
            first = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict(), first


def check(directory: Path, name: str, choose: Choose, axes: Axes = AXES) -> dict[tuple[str, str, str], int]:
    """Compares a family's training under these strategies; returns the counted calls."""
    compiled = compile_program(captured(name), axes=axes, choose=choose)
    compiled.emitted.save(directory)
    losses, state, gradients = serial(name)
    (graph,) = compiled.graphs
    counted = {
        (axis, phase, operation): tuple(found)
        for (axis, phase), operations in collective_counts(graph, axes, BATCH).items()
        for operation, found in operations.items()
    }
    ranks = math.prod(parts for _, parts in axes)
    for parallel_losses, weights, traffic in launch(in_parallel, ranks, str(directory), name, timeout=400.0):
        torch.testing.assert_close(parallel_losses, losses, rtol=1e-9, atol=0)
        for key, tensor in state.items():
            # AdamW turns a gradient that is zero up to rounding into a step of full size
            if key in gradients and gradients[key].abs().max() < 1e-12:
                continue
            torch.testing.assert_close(weights[key], tensor, rtol=1e-9, atol=1e-9, msg=key)
        assert traffic == counted
    return {key: found[0] for key, found in counted.items()}


def megatron(graph: fx.Graph, parts: int) -> tuple[dict[fx.Node, tuple[Strategy, ...]], dict[str, Placements]]:
    """Column, then row, wherever the weights' names say so; every other op follows its inputs if it can."""
    columns = ("c_attn", "c_fc", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    rows = ("attn.c_proj", "mlp.c_proj", "o_proj", "down_proj")
    found: dict[fx.Node, tuple[Strategy, ...]] = {}
    storage: dict[str, Placements] = {}
    given: dict[fx.Node, Any] = {}
    for node, options in strategies(graph, parts).items():
        if node.op == "placeholder":
            name = node.meta["name"]
            is_bias = name.endswith("bias")
            if any(part in name for part in columns):
                wanted = [option for option in options if option.outputs[0].is_shard]
                # the last dim of a (in, out) weight, the first of (out, in); fused parts inside three blocks
                picked = max(
                    wanted, key=lambda option: (option.outputs[0].outer, option.outputs[0].dim * (not is_bias))
                )
            elif any(part in name for part in rows) and not is_bias:
                picked = next(option for option in options if option.outputs[0].is_shard)
            else:
                picked = options[0]
            if node.meta["role"] in (Role.PARAMETER, Role.BUFFER):
                storage[name] = (picked.outputs[0],)
            given[node] = picked.outputs[0]
            continue
        sources = [given.get(source) for source in node.all_input_nodes]

        def fit(option: Strategy, sources: list[Any] = sources) -> int:
            return sum(wanted == source for wanted, source in zip(option.inputs, sources, strict=False))

        best = max(options, key=fit)
        found[node] = (best,)
        given[node] = best.outputs[0]
        for user in node.users:
            given.setdefault(user, best.outputs[0])
    return found, storage


@pytest.mark.parametrize("name", ["gpt2"])
def test_by_weights(tmp_path: Path, name: str) -> None:
    counted = check(tmp_path, name, megatron)
    assert sum(counted.values()) > 0


@pytest.mark.parametrize("name", TRANSFORMERS)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_random_strategies(tmp_path: Path, name: str, seed: int) -> None:
    counted = check(tmp_path, name, randomly(seed))
    assert len(counted) >= 5


def test_resnet_with_sharded_channels(tmp_path: Path) -> None:
    """Channels of every convolution and norm; running statistics are stored sharded and gathered in the state."""
    stored: dict[str, Placements] = {}

    def choose(graph: fx.Graph, parts: int) -> tuple[dict[fx.Node, tuple[Strategy, ...]], dict[str, Placements]]:
        found: dict[fx.Node, tuple[Strategy, ...]] = {}
        options = strategies(graph, parts)
        for node, offered in options.items():
            if "batch_norm" in str(node.target):
                (picked,) = [option for option in offered if option.outputs[0].is_shard and option.outputs[0].dim == 1]
                found[node] = (picked,)
                for source, placement in zip(node.all_input_nodes[1:], picked.inputs[1:], strict=True):
                    stored[source.meta["name"]] = (placement,)
            elif node.op != "placeholder" and "aten.conv" in str(node.target):
                picked = next(option for option in offered if option.name != "P" and option.inputs[1].is_shard)
                found[node] = (picked,)
                stored[node.all_input_nodes[1].meta["name"]] = (picked.inputs[1],)
        return found, stored

    check(tmp_path, "resnet", choose)
    statistics = [name for name in stored if "running" in name]
    assert statistics and all(str(stored[name][0]) == "S0" for name in statistics)


def scatter_and_exchange() -> list[tuple[Tensor, Tensor]]:
    """What two ranks get from partial sums with channels-last strides, and what they should get."""
    from autopart.runtime import collectives
    from autopart.runtime.mesh import Axis
    from autopart.runtime.traffic import Traffic

    axis = Axis("tp", 2, dist.get_rank(), dist.group.WORLD, Traffic())
    whole = torch.arange(4.0 * 6 * 4 * 2).reshape(4, 6, 4, 2).permute(0, 3, 1, 2)
    rows = whole.chunk(2, 0)[axis.index].contiguous(memory_format=torch.channels_last)
    columns = whole.chunk(2, 3)[axis.index]
    return [
        (collectives.reduce_scatter(whole / 2, axis, dim=3), columns),
        (collectives.all_to_all(rows, axis, dim=0, to_dim=3), columns),
    ]


def test_strides_do_not_matter() -> None:
    for pairs in launch(scatter_and_exchange, 2):
        for found, expected in pairs:
            assert torch.equal(found, expected)


def test_one_collective_for_all_uses(tmp_path: Path) -> None:
    """A value that several ops want in one placement is moved once."""
    (graph,) = compile_program(captured("gpt2"), axes=AXES, choose=randomly(3)).graphs
    inserted = [(node, *node.meta["transition"]) for node in graph.nodes if "transition" in node.meta]
    moved = [(node.args[0], axis, step.target) for node, axis, step in inserted]
    assert len(moved) == len(set(moved)) > 20
    for node, _, step in inserted:
        assert node.meta["placements"] == (step.target,)


class Shaped(nn.Module):
    """A value of which one reader takes the shape alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        return (hidden.tanh() + torch.zeros_like(hidden).cos()).square().mean()


def test_collectives_for_what_has_no_gradient_have_no_backward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(node: fx.Node, strategy: Strategy) -> bool:
        return strategy.outputs[0].is_shard if op(node) == "zeros_like" else strategy.name == "R"

    subject = prepare(Shaped(), (torch.randn(8, 4),))
    _, source = run(subject, forced(subject, 2, keep), tmp_path, monkeypatch)
    assert "torch.zeros_like(split)" in source
