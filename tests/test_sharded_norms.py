"""Norms and softmax of which each rank has a part of the normalised dim: equal, and a few numbers per row are sent."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from autopart.passes.rules import Strategy
from autopart.planner import make_plan
from autopart.runtime import Axis, local_forms
from autopart.tracing import capture
from autopart.verify import Subject, prepare
from clusters import ideal
from families import family
from forcing import forced, op, run
from launch import launch

BATCH, ROWS, WIDTH = 8, 6, 32


class Mixed(nn.Module):
    """Every local form of a normalisation, between a column and a row split."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.up, self.down = nn.Linear(16, width), nn.Linear(width, 16)
        self.layer, self.root = nn.LayerNorm(width), nn.RMSNorm(width)
        self.group, self.one = nn.GroupNorm(2, width), nn.GroupNorm(1, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.root(torch.tanh(self.layer(self.up(x))))
        hidden = self.one(torch.sin(self.group(hidden.transpose(1, 2)))).transpose(1, 2)
        weights = torch.softmax(hidden, 2) + 0.1 * torch.log_softmax(hidden, -1)
        extra = torch.logsumexp(hidden, 2).square().sum()
        return self.down(hidden * weights).square().sum() + 0.01 * extra


@functools.lru_cache(maxsize=1)
def subject_of(name: str) -> Subject:
    if name == "mixed":
        return prepare(Mixed().double(), (torch.randn(BATCH, ROWS, 16, generator=torch.Generator().manual_seed(4)),))
    item = family(name)
    return prepare(item.build(), (), item.inputs(item.batch))


def by_form(node: fx.Node, strategy: Strategy) -> bool:
    if op(node) in ("layer_norm", "mean", "rms_norm", "group_norm", "softmax", "log_softmax", "logsumexp"):
        return strategy.form is not None
    return True


@pytest.mark.parametrize(
    ("name", "parts", "forms"),
    [
        ("gpt2", 2, ("sharded_layer_norm",)),
        ("llama", 4, ("partial_mean",)),
        (
            "mixed",
            4,
            (
                "sharded_layer_norm",
                "sharded_rms_norm",
                "sharded_group_norm",
                "sharded_softmax",
                "sharded_log_softmax",
                "sharded_logsumexp",
            ),
        ),
    ],
)
def test_whole_models(
    name: str, parts: int, forms: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = forced(subject_of(name), parts, by_form)
    _, source = run(subject_of(name), plan, tmp_path, monkeypatch)
    assert all(f"local_forms.{form}(" in source for form in forms)


def test_the_solver_takes_it_between_a_column_and_a_row_split() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.norm, self.down = nn.Linear(64, 4096), nn.LayerNorm(4096), nn.Linear(4096, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(F.gelu(self.norm(self.up(x)))).square().sum()

    program = capture(Block(), (torch.randn(4, 64),), check_eval=False)
    plan = make_plan(program, ideal(4, bandwidth=1e9), pp=1, dp=1, tp=4)
    assert plan.strategies["norm:layer_norm"] == "n0"
    assert {plan.storage[f"norm.{name}"] for name in ("weight", "bias")} == {"S0"}
    # two numbers per row of every rank forward, two backward; the row split's sum
    assert plan.stages[0].collectives["all_gather"] == {"calls": 1, "bytes": 4 * 2 * 4 * 4}


# -- precision ------------------------------------------------------------------------------------------------------


def normalised(dtype: torch.dtype, shift: float) -> Tensor:
    size, index = torch.distributed.get_world_size(), torch.distributed.get_rank()
    axis = Axis("tp", size, index, torch.distributed.group.WORLD)
    x = rows(dtype, shift).chunk(size, 1)[index]
    return local_forms.sharded_layer_norm(x, [64], axis=axis)


def rows(dtype: torch.dtype, shift: float) -> Tensor:
    return (torch.randn(5, 64, generator=torch.Generator().manual_seed(1)) + shift).to(dtype)


def test_a_large_mean_does_not_cancel_the_variance() -> None:
    """In float32 a mean of 4000 leaves no digit of a variance of 1 in a difference of squares."""
    found = torch.cat(launch(normalised, 2, torch.float32, 4000.0), 1)
    expected = F.layer_norm(rows(torch.float32, 4000.0).double(), [64])
    assert (found - expected).abs().max() < 2e-3


def test_half_precision_is_computed_in_single() -> None:
    found = torch.cat(launch(normalised, 2, torch.bfloat16, 3.0), 1)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, F.layer_norm(rows(torch.bfloat16, 3.0), [64]))
