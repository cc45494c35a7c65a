"""What stages hold of values that cross between them, beside what their ops keep."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopart.analysis import analyze
from autopart.candidates import Candidates
from autopart.crossing_memory import buffer_bytes
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


def test_buffers_of_several_microbatches() -> None:
    """Before: gradients that come; behind: one that goes, beside what comes for the next microbatch."""
    assert buffer_bytes(4.0, 3.0, 1) == (3.0, 3.0)
    assert buffer_bytes(4.0, 3.0, 2) == (6.0, 7.0)
