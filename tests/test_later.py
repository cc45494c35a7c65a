"""Gradients of weights beside the collective of the input's gradient: the order, equal results, equal traffic."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from order_log import Log
from torch import Tensor, nn

import autopart
from autopart.analysis import analyze
from autopart.planner import make_plan
from autopart.realize import emit
from autopart.runtime import collectives, later
from autopart.runtime.later import Later
from autopart.runtime.mesh import Axis
from autopart.runtime.recompute import checkpoint
from autopart.runtime.traffic import Traffic
from autopart.runtime.weight_split import LaterGradients, SplitBackward
from autopart.tracing import capture
from clusters import ideal
from launch import launch

Convert = Callable[..., Tensor]
WAYS: dict[str, Convert] = {
    "sum_gradients": collectives.sum_gradients,
    "all_reduce_sum_gradients": collectives.all_reduce_sum_gradients,
    "split": functools.partial(collectives.split, dim=0),
    "all_gather_scatter_gradients": functools.partial(collectives.all_gather_scatter_gradients, dim=0),
    "reduce_scatter": functools.partial(collectives.reduce_scatter, dim=1, outer=2),
}


def _axis() -> Axis:
    group = torch.distributed.group.WORLD
    return Axis("tp", 2, torch.distributed.get_rank(), group, Traffic())


def _products(
    convert: Convert, axis: Axis, late: bool, again: bool = False, frozen: bool = False
) -> tuple[list[Tensor], Any, list[str]]:
    """Values and gradients of three products that read one converted tensor; what was exchanged; the backward's log."""
    random = torch.Generator().manual_seed(axis.index)

    def make(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64).requires_grad_()

    x, bias, second, one, two, three = make(4, 6), make(5), make(7), make(5, 6), make(6, 7), make(6, 3)
    one.requires_grad_(not frozen)

    def run(x: Tensor) -> tuple[Tensor, ...]:
        h = torch.tanh(x)
        if not late:
            y = convert(h, axis)
            return nn.functional.linear(y, one, bias), torch.addmm(second, y, two), torch.mm(y, three)
        beside = Later(one, two, three)
        y = convert(h, axis, later=beside)
        return beside.linear(y, one, bias), beside.addmm(second, y, two), beside.mm(y, three)

    def narrow(x: Tensor) -> tuple[Tensor, ...]:  # columns of y are halved by reduce_scatter over dim 1
        return run(torch.cat([x, x], 1) if convert is WAYS["reduce_scatter"] else x)

    found = checkpoint(narrow, x) if again else narrow(x)
    loss = sum((item * item).sum() for item in found)
    log = Log()
    with log:
        loss.backward()  # type: ignore[union-attr]
    given = [x, bias, second, two, three, *([] if frozen else [one])]
    gradients = [item.grad for item in given]
    assert all(gradient is not None for gradient in gradients)
    return [*found, *(g for g in gradients if g is not None)], axis.traffic.counts(), log.events


def _compare() -> dict[str, list[str]]:
    logs = {}
    for name, convert in WAYS.items():
        for options in ({}, {"again": True}, {"frozen": True}):
            plain, sent, _ = _products(convert, _axis(), late=False, **options)
            late, sent_late, log = _products(convert, _axis(), late=True, **options)
            for one, other in zip(plain, late, strict=True):
                torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-12)
            assert sent == sent_late
            if not options:
                logs[name] = log
    return logs


def test_results_and_traffic_are_equal_and_products_lie_between_start_and_wait() -> None:
    for logs in launch(_compare, 2):
        assert set(logs) == set(WAYS)
        for name in ("sum_gradients", "all_reduce_sum_gradients", "all_gather_scatter_gradients"):
            # three gradients of the input, then those of three weights while its sum is on the way
            assert logs[name] == ["mm"] * 3 + ["start"] + ["mm"] * 3 + ["wait"]


def _plainly() -> list[bool]:
    """Where nothing can be put off: no gradients, none of x, a split backward."""
    axis, weight = _axis(), torch.ones(2, 3, requires_grad=True)
    active = []

    def run(x: Tensor) -> Tensor:
        beside = Later(weight)
        y = beside.linear(collectives.sum_gradients(x, axis, later=beside), weight)
        active.append(beside._active)
        return y

    with torch.no_grad():
        run(torch.ones(4, 3, requires_grad=True))
    run(torch.ones(4, 3)).sum().backward()
    assert weight.grad is not None and axis.traffic.counts() == {}
    weight.grad = None
    rest = LaterGradients()
    with SplitBackward([weight], rest):
        y = run(torch.ones(4, 3, requires_grad=True))
    y.sum().backward()
    assert weight.grad is None
    rest.compute([weight])
    assert weight.grad is not None
    return active


def test_nothing_is_put_off_without_use() -> None:
    assert launch(_plainly, 2) == [[False, False, False]] * 2


class Gated(nn.Module):
    """Two columns-split products that read one value, and a row-split one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 64)
        self.norm = nn.LayerNorm(64)
        self.up, self.gate = nn.Linear(64, 256, bias=False), nn.Linear(64, 256)
        self.down = nn.Linear(256, 64)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        h = self.norm(x)
        x = x + self.down(torch.sigmoid(self.gate(h)) * self.up(h))
        return x.square().mean()


def _train(directory: str) -> list[str]:
    """Trains a step beside the plain model; the log of the backward."""
    torch.manual_seed(0)
    plain = Gated().double()
    model = autopart.load(directory, copy.deepcopy(plain))
    ids = torch.arange(32).view(8, 4) % 16
    log = Log()
    with log:
        model(ids).backward()
    plain(ids).backward()
    for trained in (model, plain):
        torch.optim.SGD(trained.parameters(), 0.1).step()
    whole = model.full_state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(whole[name], value, rtol=1e-9, atol=1e-12)
    return log.events


@pytest.mark.parametrize("precision", ["", "bf16-mixed"])
def test_emitted_code_puts_weights_gradients_off(tmp_path: Path, precision: str) -> None:
    model = Gated() if precision else Gated().double()
    program = capture(model, (torch.zeros(8, 4, dtype=torch.long),), precision=precision, check_eval=False)
    plan = make_plan(program, ideal(2), batch=8, analysis=analyze(program), tp=2, microbatches=1, tensor_scheme="1d")
    emit(program, plan, tmp_path)
    code = (tmp_path / "stage_0.py").read_text()
    assert len(re.findall(r"later(_\d)?\.linear\(", code)) == 2 and "F.linear(" in code
    if precision:  # each product casts for itself, and may have a collective for itself
        assert "later = collectives.Later(to" in code and ".to(torch.bfloat16)" in code
        return
    assert "collectives.Later(self.gate.weight, self.up.weight)" in code
    for events in launch(_train, 2, str(tmp_path)):
        start = events.index("start")
        assert events[start : start + 4] == ["start", "mm", "mm", "wait"]


def test_a_weight_that_is_used_twice_gets_both_gradients() -> None:
    weight, beside = torch.ones(2, 2), Later(torch.ones(2, 2))
    beside.put_off(0, lambda: weight)
    beside.put_off(0, lambda: 2 * weight)
    (made,) = beside.gradients()
    assert made is not None and torch.equal(made, 3 * weight)
    assert beside.gradients() == [None]
    assert later.Later().gradients() == []
