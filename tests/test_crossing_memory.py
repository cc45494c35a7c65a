"""What stages hold of values that cross between them, beside what their ops keep."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

from autopart.analysis import analyze
from autopart.block_costs import BlockCost
from autopart.candidates import Candidates
from autopart.crossing_memory import cut_of, held_across
from autopart.passes.graph import Value
from autopart.positions import Positions
from autopart.rank_memory import RankMemory, Views
from autopart.solver.degrees import Degrees
from autopart.solver.stages_parts import CrossingGroup
from autopart.tracing import capture
from clusters import ideal

ROWS, WIDTH = 8, 16
SIZE = ROWS * WIDTH * 4
"""Bytes of a microbatch's hidden tensor."""


class Residual(nn.Module):
    """Its sum is kept by the first op of the next layer, and by none of its own, or by its last."""

    def __init__(self, ends: bool) -> None:
        super().__init__()
        self.ends = ends
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        return torch.relu(x) if self.ends else x


class Layers(nn.Module):
    def __init__(self, count: int, skip: bool = False, ends: bool = False) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Residual(ends) for _ in range(count))
        self.skip = skip

    def forward(self, x: Tensor) -> Tensor:
        x = first = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return (x + first if self.skip else x).abs().mean()


def candidates(model: nn.Module) -> Candidates:
    analysis = analyze(capture(model, (torch.randn(ROWS, WIDTH),)))
    return Candidates(analysis, ideal(4), ROWS, "adamw", zero=0)


@pytest.mark.parametrize("recompute", ["none", "full", "auto"])
@pytest.mark.parametrize("ends", [False, True])
def test_a_sum_is_held_where_it_is_made_and_kept_where_it_is_read(recompute: str, ends: bool) -> None:
    """What a layer's last op keeps of its own is held as well, where it may be gone since the layer's forward."""
    found, config = candidates(Layers(3, ends=ends)), Degrees(4, 1, (), 1, "1f1b", recompute)
    layers, held = found.analysis.layers, found.across(config, found.choose(config)).held
    between = [at for at in range(2, len(layers)) if layers[at] != layers[at - 1]]
    assert len(between) == 3
    assert all(held[at] == (0.0 if ends and recompute == "none" else SIZE, 0.0) for at in between)
    assert held[0] == held[-1] == (0.0, 0.0)


def test_what_skips_stages_is_held_at_its_two_ends() -> None:
    found, config = candidates(Layers(12, skip=True)), Degrees(4, 1, (), 1, "1f1b", "none")
    (group,) = found.across(config, found.choose(config)).groups
    last = len(found.analysis.blocks) - 1
    assert group.bytes == SIZE and (group.blocks[0], group.blocks[-1]) == (0, last)
    plain = CrossingGroup(group.blocks, (), group.bytes)
    middle = set(range(2, last))
    assert not middle & set(group.blocks) and not plain.is_held(middle)
    assert plain.is_held({0}) and plain.is_held({last}) and not plain.is_held({*group.blocks})
    assert not CrossingGroup((0, 5), (0,), 1.0).is_held({0, 1}) and CrossingGroup((0, 5), (0,), 1.0).is_held({5})


class Patches(nn.Module):
    """Its residual stream lies in another order than its dims, so that a copy of it is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.layers = nn.Conv2d(3, WIDTH, 4, 4), nn.ModuleList(Residual(False) for _ in range(2))

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_a_copy_that_is_sent_is_there_beside_what_it_is_of() -> None:
    analysis = analyze(capture(Patches(), (torch.randn(ROWS, 3, 8, 8),)))
    found, config = Candidates(analysis, ideal(4), ROWS, "adamw", zero=0), Degrees(2, 1, (), 1, "1f1b", "none")
    before, _ = found.across(config, found.choose(config)).held[1]
    assert before == 2 * 4 * SIZE  # of four patches: the convolution's result, and the copy


class Sorted(nn.Module):
    """The first of an op's results skips all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Residual(False) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        gate, _ = x.sort(-1)
        for layer in self.layers:
            x = layer(x)
        return (x + gate).abs().mean()


def test_one_of_several_results_may_skip_stages() -> None:
    found, config = candidates(Sorted()), Degrees(4, 1, (), 1, "1f1b", "none")
    last = len(found.analysis.blocks) - 1
    (group,) = (item for item in found.across(config, found.choose(config)).groups if item.blocks[-1] == last)
    assert len(group.blocks) == 2 and group.bytes == SIZE
    assert group.is_held({group.blocks[0]}) and group.is_held({last}) and not group.is_held({4, 5})


def test_who_keeps_it_on_a_later_stage_does_not_count() -> None:
    """Block 1 adds what block 0 makes, block 2 multiplies it."""
    graph = fx.Graph()
    node = graph.call_function(torch.ops.aten.relu.default, (graph.placeholder("x"),))
    node.meta["val"] = torch.empty(ROWS, WIDTH, device="meta")
    value, memory = Value(node), RankMemory(Views(), {}, {}, (), 1)
    crossings = (), (value,), (value,), ()
    positions = Positions((0, 1, 3, 7), crossings, True, ((0, 1), (0, 2), (1, 2)), {value: 0b110})
    costs = [BlockCost(), BlockCost(), BlockCost(kept={(value, ()): SIZE})]
    found = held_across(positions, costs, ("",) * 3, {node: 0}, "none", memory)
    assert found.held == ((0.0, 0.0), (SIZE, SIZE), (SIZE, 0.0), (0.0, 0.0))
    costs[1].kept[value, ()] = SIZE
    assert held_across(positions, costs, ("",) * 3, {node: 0}, "none", memory).held[1:3] == ((SIZE, 0.0), (0.0, 0.0))


def test_bounds_of_one_microbatch_are_not_those_of_several() -> None:
    found = candidates(Layers(3))
    link = found.layout.stage_link(Degrees(2, 1, (), 2, "1f1b"), 0, 1)
    several, one = (found.least_cuts(Degrees(2, dp, (), m, "1f1b"), link) for dp, m in ((1, 2), (2, 1)))
    assert max(cut.before_bytes for cut in several) == 2 * max(cut.before_bytes for cut in one) > 0


def test_buffers_of_several_microbatches() -> None:
    """Before: gradients that come; behind: one that goes, beside what comes for the next microbatch."""
    graph, link = fx.Graph(), ideal(2).group_link(range(2))
    plain, differentiable = (graph.placeholder(name) for name in ("plain", "differentiable"))
    differentiable.meta["differentiable"] = True
    sizes = {Value(plain): 1.0, Value(differentiable): 3.0}
    one, several = (cut_of(sizes, link, microbatches) for microbatches in (1, 2))
    assert (one.before_bytes, one.behind_bytes) == (3.0, 3.0)
    assert (several.before_bytes, several.behind_bytes) == (6.0, 7.0)
