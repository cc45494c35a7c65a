"""Modules that users keep together or put on a stage: where they lie in plans, and pins that cannot be had."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

from autopart.analysis import Analysis, analyze
from autopart.cli.arguments import pin
from autopart.fewer_devices import advised_plan
from autopart.passes import graph as graphs
from autopart.pins import check_stages, read_pins
from autopart.plan import Plan
from autopart.planner import make_plan
from autopart.report.table import plan_text
from autopart.runtime.errors import PlanError
from autopart.solver.stages_order import chain_positions
from autopart.tracing import capture
from clusters import ideal

LAYERS = 6


class Tower(nn.Module):
    """Layers one after the other, and a position that depends on no weight."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(16, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(LAYERS))
        self.clock = Clock()
        self.leave = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return {"loss": self.leave(x + self.clock()).square().mean()}


class Clock(nn.Module):
    def forward(self) -> Tensor:
        return torch.arange(16).sin()


@functools.lru_cache
def tower() -> Analysis:
    return analyze(capture(Tower(), (torch.randn(16, 16),), check_eval=False))


def plan_of(devices: int, **limits: object) -> Plan:
    limits = {"batch": 16, "dp": 1, "tp": 1, "recompute": "none", **limits}
    return make_plan(tower().program, ideal(devices), analysis=tower(), **limits)  # type: ignore[arg-type]


def stages_of(plan: Plan, module: str) -> set[int]:
    """The stages that have ops of a module."""
    inside = [
        block for node, block in tower().block_of.items() if f"{graphs.module_path(node)}.".startswith(f"{module}.")
    ]
    return {index for index, stage in enumerate(plan.stages) if any(block in range(*stage.blocks) for block in inside)}


def test_pins_move_the_cut() -> None:
    free = plan_of(2, pp=2)
    assert stages_of(free, "layers.4") == {1} and stages_of(free, "layers.0") == {0}
    assert stages_of(plan_of(2, pp=2, pins={"layers.4": 0}), "layers.4") == {0}
    late = plan_of(2, pp=2, pins={"layers.0": 1})
    assert stages_of(late, "layers.0") == stages_of(late, "layers.5") == {1}
    assert late.step_time_s > free.step_time_s and late.bound_s <= late.step_time_s


def test_modules_stay_together() -> None:
    free = plan_of(4, pp=4)
    assert len(stages_of(free, "layers.4") | stages_of(free, "leave")) > 1
    plan = plan_of(4, pp=4, together=[["layers.1", "layers.[23]"], ["layers.4", "leave"]])
    assert stages_of(plan, "layers.1") == stages_of(plan, "layers.2") == stages_of(plan, "layers.3")
    assert len(stages_of(plan, "layers.1")) == 1
    assert stages_of(plan, "layers.5") == stages_of(plan, "leave") == stages_of(plan, "layers.4") == {3}
    assert plan.pp == 4
    assert len(stages_of(plan_of(2, pp=2), "layers.1") | stages_of(plan_of(2, pp=2), "layers.4")) == 2
    both = plan_of(2, pp=2, together=[["layers.1", "layers.4"]], pins={"layers.2": 1})
    assert stages_of(both, "layers.1") == stages_of(both, "layers.4") == {1}
    # the file says what was asked for
    again = Plan.from_json(both.to_json())
    assert again == both and again.pins == {"layers.2": 1} and again.together == (("layers.1", "layers.4"),)
    text = plan_text(again)
    assert "asked for: layers.2 on stage 1" in text and "asked for: layers.1 and layers.4 on one stage" in text
    with pytest.raises(PlanError, match="together: expected a list of groups"):
        Plan.from_json(both.to_json().replace('[["layers.1", "layers.4"]]', '["layers.1"]'))


def test_a_named_stage_asks_for_as_many() -> None:
    plan = plan_of(4, dp=None, pins={"layers.5.*": 1})
    assert plan.pp > 1 and stages_of(plan, "layers.5") == {1}
    assert all("pp=1" not in str(row["config"]) for row in plan.considered)
    # what stays together leaves no place for more stages
    plan = plan_of(4, dp=None, together=[["*"]])
    assert plan.pp == 1


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"pins": {"layer.3": 1}}, r"no op is in a module 'layer\.3'; there are layers"),
        ({"together": [["layers.1", "head"]]}, "no op is in a module 'head'"),
        ({"together": ["layers.1"]}, "list of groups"),
        ({"pins": {"clock": 1}}, "every stage computes it for itself"),
        ({"pins": {"leave": -1}}, "whole number from 0 on"),
        ({"pins": {"leave": 2}}, "stage 2 is named, .* allow 2 stages"),
        ({"pins": {"layers.1": 0, "layers.*.0": 1}}, "a block is on one stage"),
        ({"pins": {"layers.3": 0, "layers.1": 1}}, "stages follow the order of computation"),
        ({"pins": {"enter": 1}}, "'enter' is pinned on stage 1, but before it there are 0 pieces"),
        ({"pins": {"layers.1": 0, "layers.3": 1}, "together": [["layers.0", "layers.4"]]}, "have to stay together"),
        ({"pp": 2, "together": [["*"]]}, r"together \* allows 1 at most"),
    ],
)
def test_what_cannot_be_had(limits: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_of(2, **limits)


def test_least_and_most_stages() -> None:
    """Of n pieces, those up to a pin on stage s are s + 1 stages, and each behind it may be one more."""
    analysis = tower()
    count = len(analysis.blocks)
    assert read_pins(analysis).most_stages == count and read_pins(analysis).least_stages == 1
    first = max(block for node, block in analysis.block_of.items() if graphs.module_path(node).startswith("layers.2"))
    pins = read_pins(analysis, stages={"layers.2": 0})
    assert pins.most_stages == count - first
    assert chain_positions(5, [(1, 3), (3, 2)]) == (0, 1, 4, 5)


def test_stages_that_pins_leave_no_room_for() -> None:
    together = read_pins(tower(), [["*"]])
    for pp in (None, 1):
        check_stages(tower(), pp, together, [["*"]])
    check_stages(tower(), 2, read_pins(tower()))
    with pytest.raises(PlanError, match=r"pp=2 needs 2 stages, but together \* allows 1 at most; use pp=1"):
        check_stages(tower(), 2, together, [["*"]])
    with pytest.raises(PlanError, match=r"together \* with pin .*=0 allow 1 at most"):
        advised_plan(ideal(3), tower(), pp=2, together=[["*"]], pins={"*": 0})


def test_a_pin_on_the_command_line() -> None:
    assert pin("decoder.layers.3=2") == ("decoder.layers.3", 2)


def test_counters_lie_beside_their_layers() -> None:
    """Batch norm counts its calls, which no op reads: each counter is where its layer is, which can be pinned."""
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())))
    program = capture(model, (torch.randn(8, 8),), check_eval=False)
    analysis = analyze(program)
    counters = [node for node in analysis.block_of if graphs.updates_statistics(node) or "add" in str(node.target)]
    assert len(counters) == 8
    paths = {path: [b for n, b in analysis.block_of.items() if graphs.module_path(n) == path] for path in ("1", "4")}
    assert all(max(found) - min(found) <= 1 for found in paths.values())
    pins = {"1": 0, "3": 1, "4": 1}
    plan = make_plan(program, ideal(2), pp=2, dp=1, tp=1, microbatches=1, recompute="none", pins=pins)
    begin = plan.stages[1].blocks[0]
    assert max(paths["1"]) < begin <= min(paths["4"])
