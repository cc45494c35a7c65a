"""Collectives that are begun before other ops and waited for behind them: order, equal results, prices."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from order_log import Log
from torch import Tensor, fx, nn

import autopart
from autopart.analysis import Analysis, analyze
from autopart.candidates import Candidates
from autopart.describe import describe
from autopart.passes.ahead import begun
from autopart.passes.annotate import is_contraction
from autopart.plan import Plan
from autopart.planner import make_plan
from autopart.realize import emit, realized
from autopart.runtime import collectives
from autopart.runtime.later import Later
from autopart.runtime.mesh import Axis
from autopart.runtime.recompute import checkpoint
from autopart.runtime.traffic import Traffic
from autopart.solver.degrees import Degrees
from autopart.tensor_scheme import TensorScheme
from autopart.tracing import capture
from clusters import ideal
from launch import launch

WIDTH = 64


class Branches(nn.Module):
    """Two sublayers that read one value, and are read again only when both are there; one that reads a second value."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 256), nn.Linear(256, WIDTH)
        self.wide, self.back = nn.Linear(WIDTH, 256), nn.Linear(256, WIDTH)
        self.cross, self.out = nn.Linear(WIDTH, 256), nn.Linear(256, WIDTH)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        h = self.norm(x)
        one = torch.tanh(self.down(torch.relu(self.up(h))).view(-1, 2, WIDTH // 2))
        two = torch.tanh(self.back(torch.relu(self.wide(h))))
        x = x + one.view(x.shape) + two
        y: Tensor = self.out(torch.relu(self.cross(memory)))
        return x + y


class Branched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.other = nn.Embedding(16, WIDTH), nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList(Branches() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x, memory = self.embed(ids), torch.tanh(self.other(ids))
        for layer in self.layers:
            x = layer(x, memory)
        return x.square().mean()


@functools.cache
def _analysis() -> Analysis:
    return analyze(capture(Branched().double(), (torch.zeros(8, 4, dtype=torch.long),), check_eval=False))


def _plan(**limits: Any) -> Plan:
    limits = {"pp": 1, "dp": 1, "tp": 2, "microbatches": 1, "tensor_scheme": "1d", **limits}
    devices = limits.pop("devices", 2)
    return make_plan(_analysis().program, ideal(devices), batch=8, analysis=_analysis(), **limits)


def _train(directory: str) -> list[str]:
    """Trains steps beside the plain model, and compares a pass without gradients; the log of the first step."""
    plain = Branched().double()
    model = autopart.load(directory, copy.deepcopy(plain))
    optimizers = [torch.optim.SGD(item.parameters(), 0.1) for item in (model, plain)]
    log = Log()
    for step in range(3):
        ids = (torch.arange(32).view(8, 4) + step) % 16
        with log:
            loss = model(ids)
        loss.backward()
        expected = plain(ids)
        expected.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-12)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if not step:
            events = list(log.events)
    whole = model.full_state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(whole[name], value, rtol=1e-9, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(model(ids), plain(ids), rtol=1e-9, atol=1e-12)
    return events


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_collective_goes_on_beside_products_that_do_not_need_it(tmp_path: Path, recompute: str) -> None:
    emit(_analysis().program, _plan(recompute=recompute), tmp_path)
    code = (tmp_path / "stage_0.py").read_text()
    assert code.count("collectives.begin(collectives.all_reduce,") == 4, (
        "two in the first layer's class, and in the second's"
    )
    for events in launch(_train, 2, str(tmp_path)):
        start = events.index("start")
        assert events[:start] == ["mm"] * 2, "up and down"
        assert events[start : start + 4] == ["start", "mm", "mm", "wait"], "the other branch lies between"
        # back: the gradient of what both layers read, beside the gradients of the first layer's other branch
        back = len(events) - events[::-1].index("start") - 1
        assert "wait" in events[back:]


@pytest.mark.slow
def test_on_two_axes(tmp_path: Path) -> None:
    emit(_analysis().program, _plan(tp=(2, 2), devices=4, tensor_scheme="auto"), tmp_path)
    launch(_train, 4, str(tmp_path))


def test_products_keep_their_order() -> None:
    plan = _plan()
    (stage,), (local,) = realized(_analysis(), plan).stages, realized(_analysis(), plan).local
    before = [stage.origin[node] for node in stage.graph.nodes if is_contraction(node)]
    after = [node.meta["origin"] for node in local.nodes if is_contraction(node)]
    assert [node.name for node in before] == [node.name for node in after]


@pytest.mark.parametrize("bandwidth", [1e6, 1e12])
def test_what_passes_meanwhile_is_not_counted(bandwidth: float) -> None:
    """Of a collective as much as is computed between its beginning and its end, and no more than it takes."""
    candidates = Candidates(_analysis(), ideal(2, bandwidth=bandwidth), 8, "adamw", scheme=TensorScheme("1d"))
    config = Degrees(1, 1, (2,), 1, "1f1b", "none")
    answer = candidates.evaluate(config).answer
    setting, choice = candidates.setting(config), answer.choice
    plan = describe(candidates, answer)
    (local,) = realized(_analysis(), plan).local
    priced = candidates._block_costs.costs(
        setting.prices, choice.strategies, choice.storage, setting.conversions, beside=False
    )
    plain = sum(block.forward_s for block in priced)

    def seconds(node: fx.Node) -> float:
        origin = node.meta["origin"]
        return setting.prices.op_seconds(origin, choice.strategies[origin], setting.sizes)[0]

    unseen = 0.0
    for node, meanwhile in begun(local).items():
        step = node.meta["transition"][1]
        if step.forward:
            sent = setting.conversions.step(0, step.source, step.target, True).seconds(8 * 4 * WIDTH * 8)[0]
            unseen += min(sent, sum(map(seconds, meanwhile)))
    assert unseen > 0
    assert plan.stages[0].forward_s == pytest.approx(plain - unseen)
    assert sum(plan.stages[0].hidden_s.values()) >= unseen * (1 - 1e-9)


def _beside_weights() -> None:
    """A begun transition whose gradient's collective has weights' gradients beside it, also where it runs again."""
    axis = Axis("tp", 2, torch.distributed.get_rank(), torch.distributed.group.WORLD, Traffic())
    weights = [torch.randn(6, 6, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    given = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)

    def run(x: Tensor, late: bool) -> Tensor:
        x = torch.tanh(x)
        later = Later(weights[0]) if late else None
        flying = collectives.begin(collectives.sum_gradients, x, axis, later=later)
        other = torch.tanh(x @ weights[1])
        y = flying.wait()
        return other + (later.linear(y, weights[0]) if later else nn.functional.linear(y, weights[0]))

    found = []
    for late in (False, True):
        for again in (False, True):
            result = checkpoint(functools.partial(run, late=late), given) if again else run(given, late)
            found.append(torch.autograd.grad(result.square().sum(), [given, *weights]))
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            torch.testing.assert_close(two, one, rtol=1e-12, atol=1e-12)


def test_weights_gradients_beside_a_begun_transition() -> None:
    launch(_beside_weights, 2)
