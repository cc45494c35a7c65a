"""``as_strided``, whose meaning is the layout of its operand: of the captured one, whatever ranks have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_normalize import refuses, test_writes
from torch import Tensor, nn

import autopart.verify
from autopart.planner import make_plan
from autopart.realize import realize
from autopart.verify import compare_emitted, prepare
from clusters import ideal
from launch import run_kept_job


def windows(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).as_strided((x.shape[0], 5, 2), (6, 1, 1)).sum(2)


def in_the_order_of_memory(x: Tensor, y: Tensor) -> Tensor:
    turned = (x * y).view(-1, 2, 3).transpose(1, 2)  # steps 6, 1, 3
    return turned.as_strided((x.shape[0], 3, 2), (6, 2, 1)) * turned


def from_the_second(x: Tensor, y: Tensor) -> Tensor:
    return (x + y).as_strided((2, 5), (6, 1), 1)


def written_before(x: Tensor, y: Tensor) -> Tensor:
    z = x * y
    z[:, 0] = 1.0
    seen = z.as_strided((x.shape[0], 3, 2), (6, 2, 1))
    z[:, 3] = 2.0
    return seen.sin()


def along_a_dim_that_is_not_the_last_in_memory(x: Tensor, y: Tensor) -> Tensor:
    turned = (x * y).t()  # [6, b], steps 1 and 6
    return turned.as_strided((5, 2, x.shape[0]), (1, 1, 6)).sum(1).t()


@pytest.mark.parametrize(
    "function",
    [along_a_dim_that_is_not_the_last_in_memory, windows, in_the_order_of_memory, from_the_second, written_before],
)
def test_alone(function: Callable[..., Tensor]) -> None:
    test_writes(function)


def test_what_is_beside_the_operand() -> None:
    refuses(lambda x, y: (x * y)[:, ::2].as_strided((2, 3), (6, 1)), "does not fill it")
    refuses(lambda x, y: (x * y).view(-1)[:6].as_strided((2, 6), (6, 1)), "beyond it")


class Windows(nn.Module):
    """Windows of two tokens, of a transposed value."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.first(x).tanh().transpose(1, 2)  # [b, 16, 12], a token's values one after the other in memory
        chunks = hidden.as_strided((x.shape[0], 11, 32), (192, 16, 1))
        return {"loss": self.last(chunks).square().mean()}


@pytest.mark.parametrize(("link", "dp"), [(1e12, 1), (1e9, 1), (1e9, 2)], ids=["sharded", "whole", "replicas"])
def test_over_two_ranks(link: float, dp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that are gathered before it may have another layout than in one process; samples are apart in it."""
    monkeypatch.setattr(autopart.verify, "run_local_job", run_kept_job)
    torch.manual_seed(0)
    subject = prepare(Windows(), (torch.randn(4, 12, 8),))
    plan = make_plan(subject.program, ideal(2, bandwidth=link), pp=1, dp=dp, tp=2 // dp, microbatches=dp, batch=4)
    realize(subject.program, plan).save(tmp_path / "program")
    assert compare_emitted(tmp_path / "program", subject, plan=plan).equal
