"""The steps of the Python API by themselves: what they take from each other, and what they refuse."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopart.analysis import analyze
from autopart.api import load
from autopart.cluster import Cluster
from autopart.passes.program import Program
from autopart.plan import Plan
from autopart.planner import make_plan
from autopart.realize import emit, realize
from autopart.runtime.errors import CaptureError, ClusterError, PlanError
from autopart.tracing import capture

SAMPLES = (torch.zeros(2, 16), torch.zeros(2, dtype=torch.long))


class Residual(nn.Module):
    """Of which weights or activations weigh more, as there are few samples or many."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))
        self.last = nn.Linear(64, 32)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x)
        for layer in self.layers:
            h = h + layer(h)
        return F.cross_entropy(self.last(h), y)


@cache
def program_of(samples: int) -> Program:
    return capture(Residual(), (torch.randn(samples, 16), torch.zeros(samples, dtype=torch.long)), check_eval=False)


def planned(samples: int) -> Plan:
    return make_plan(program_of(samples), Cluster.parse("cpu:2"), batch=16, pp=2, tp=1)


def test_a_plan_is_for_example_inputs_of_any_number_of_samples() -> None:
    few, many = program_of(8), program_of(64)
    assert few.fingerprint == many.fingerprint
    assert len(analyze(few).blocks) != len(analyze(many).blocks), "else this tests nothing"
    plan = planned(8)
    assert plan.example_batch == 8
    assert realize(many, plan).files == realize(few, plan).files
    assert realize(few, planned(64)).files == realize(many, planned(64)).files


def test_a_plan_that_does_not_tell_its_samples_has_the_blocks_of_the_program_at_hand() -> None:
    plan = planned(8)
    assert realize(program_of(8), replace(plan, example_batch=0)).files == realize(program_of(8), plan).files


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"args": torch.zeros(2)}, r"args is a tuple or list of inputs, such as \(x,\), not a Tensor"),
        ({"args": {"x": torch.zeros(2)}}, "args is a tuple or list of inputs"),
        ({"args": None}, "args is a tuple or list of inputs"),
        ({"kwargs": [1]}, "kwargs has inputs by name"),
        ({"args": SAMPLES, "batch_dims": ["x"]}, "a dim for each input"),
        (
            {"args": SAMPLES, "batch_dims": {"x": "0"}},
            "a dim is a whole number",
        ),
    ],
)
def test_capture_says_what_it_takes(given: dict[str, Any], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(Residual(), **given)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"tp": 2.0}, "tp is a number of devices, or sizes"),
        ({"warmup": "2"}, "warmup is a number of forwards"),
        ({"warmup": (1.0, 0)}, "warmup is a number of forwards"),
        ({"together": 5}, "together is a list of groups"),
        ({"together": [[1]]}, "together is a list of groups"),
        ({"pins": {3: 1}}, "pins has a stage for each pattern"),
        ({"time_limit_s": "a"}, "time_limit_s is a number of seconds"),
        ({"time_limit_s": 0}, "time_limit_s is a number of seconds above 0"),
        ({"below": math.nan}, "below is a number of seconds"),
        ({"rules": {}}, "rules is a RuleBook"),
        ({"batch": 10**30}, "batch is at most"),
        ({"cluster": "cpu:2"}, "make_plan takes a Cluster"),
    ],
)
def test_planning_says_what_it_takes(limits: dict[str, Any], message: str) -> None:
    given = {"cluster": Cluster.parse("cpu:2"), **limits}
    with pytest.raises((PlanError, ClusterError), match=message):
        make_plan(program_of(8), **given)


def test_each_step_takes_what_the_step_before_gives(tmp_path: Path) -> None:
    model: Any = Residual()
    plan: Any = planned(8)
    with pytest.raises(PlanError, match=r"make_plan takes a Program, such as .*, not a Residual"):
        make_plan(model, Cluster.parse("cpu:2"))
    with pytest.raises(PlanError, match="emitted is a Program that capture gives, not a Residual"):
        emit(model, plan, tmp_path)
    with pytest.raises(PlanError, match=r"such as Plan.load.'plan.json'., not a str"):
        emit(program_of(8), "plan.json", tmp_path)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_a_model_with_more_parameters_is_another(tmp_path: Path) -> None:
    model = Residual()
    emit(program_of(8), make_plan(program_of(8), Cluster.parse("cpu:1")), tmp_path)
    load(tmp_path, model)
    model.layers.append(nn.Sequential(nn.Linear(64, 64)))
    with pytest.raises(PlanError, match=r"'layers.4.0.weight' is a parameter of the model that was given"):
        load(tmp_path, model)


@pytest.mark.parametrize("text", [None, 8, "9" * 5000 + "xH100", "cpu:" + "9" * 5000])
def test_descriptions_of_clusters_are_texts_of_a_reasonable_size(text: Any) -> None:
    with pytest.raises(ClusterError, match=r"is a text such as|cannot read"):
        Cluster.parse(text)


@pytest.mark.parametrize("count", [0, -1, 2.0, "2", True])
def test_local_clusters_have_a_whole_number_of_devices(count: Any) -> None:
    with pytest.raises(ClusterError, match="whole one of at least 1"):
        Cluster.local(count)
