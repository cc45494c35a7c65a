"""The main test: parallel equals serial.

Seven transformers models, each under plans of every kind and under the plan that the solver chooses: loss, every
gradient, and every parameter after three AdamW steps equal those of the unmodified model in one process, in float64
over gloo; and what the collectives move is what the plan charged.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import autopart.verify
from autopart.analysis import Analysis, analyze
from autopart.plan import Plan
from autopart.planner import make_plan
from autopart.realize import realize
from autopart.verify import Subject, compare_emitted, prepare
from clusters import ideal
from families import NAMES, family
from launch import run_kept_job

LARGER = (
    "t5",
    "mixtral",
)  # planned for longer; under forced plans they are tried by default, tensors divided with two stages
PLANS: dict[str, dict[str, int]] = {
    "pp2": {"pp": 2, "dp": 1, "tp": 1},
    "tp2": {"pp": 1, "dp": 1, "tp": 2},
    "dp2": {"pp": 1, "dp": 2, "tp": 1, "microbatches": 2},
    "pp2xtp2": {"pp": 2, "dp": 1, "tp": 2, "microbatches": 2},
    "pp2xdp2": {"pp": 2, "dp": 2, "tp": 1, "microbatches": 2},
    "pp4": {"pp": 4, "dp": 1, "tp": 1, "microbatches": 4},
}


@functools.lru_cache(maxsize=7)
def subject_of(name: str) -> tuple[Subject, Analysis]:
    item = family(name)
    subject = prepare(item.build(), (), item.inputs(item.batch))
    return subject, analyze(subject.program)


def check(name: str, limits: Mapping[str, Any], devices: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.setattr(autopart.verify, "run_local_job", run_kept_job)
    subject, analysis = subject_of(name)
    plan = make_plan(subject.program, ideal(devices), batch=8, analysis=analysis, **limits)
    if limits.get("tp", 1) != 1:
        assert plan.strategies, "nothing is sharded, so that this plan tests nothing"
    realize(subject.program, plan, analysis).save(folder / "program")
    result = compare_emitted(folder / "program", subject, plan=plan)
    worst = sorted(result.groups, key=lambda group: -max(group.gradient or 0.0, group.parameter))[:3]
    assert result.equal, f"{result.loss_difference=} {worst}"
    assert all(stage.as_planned for stage in result.traffic), result.traffic
    return plan


@pytest.mark.parametrize(
    ("name", "plan"),  # by name, so that a process captures few families
    [
        pytest.param(name, plan, marks=pytest.mark.slow if name in LARGER and plan == "tp2" else ())
        for name in NAMES
        for plan in PLANS
    ],
)
def test_forced_plan(name: str, plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = PLANS[plan]
    found = check(name, limits, limits["pp"] * limits["dp"] * limits["tp"], tmp_path, monkeypatch)
    if (name, plan) == ("resnet", "tp2"):
        kernels = [placement for weight, placement in found.storage.items() if weight.endswith("convolution.weight")]
        # out channels or in channels, each rank with half of the weights; two of 1 x 1 are whole
        assert len(kernels) == 10 and sum(placement in ("S0", "S1") for placement in kernels) > 6, kernels


@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def test_two_tensor_axes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"pp": 1, "dp": 1, "tp": (2, 2), "microbatches": 1, "recompute": "none"}
    check(name, limits, 4, tmp_path, monkeypatch)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in LARGER else ()) for n in NAMES])
def test_chosen_plan(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(name, {}, 4, tmp_path, monkeypatch)
