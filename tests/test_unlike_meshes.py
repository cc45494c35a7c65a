"""Stages with unlike meshes: training equals the single process; plans that hold together, and those that do not."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from chains import subject_of
from unlike_cases import CASES, DIVIDED, MODELS, Mesh, divided, with_meshes

import autopart.verify
from autopart.passes.emit.program import Emitted
from autopart.plan import Plan
from autopart.realize import realize
from autopart.runtime.errors import PlanError
from autopart.verify import Subject, compare_emitted
from launch import run_kept_job

EQUAL = [
    *itertools.product(MODELS, CASES),
    # a bias that depends on no sample, and weights that both ends share
    *itertools.product(["t5", "branches"], ["dp2-1", "1-dp2"]),
]


# Of every kind of crossing one; the others are slow.
QUICK = {("gpt2", "dp2-1"), ("unet", "1-tp2"), ("unet", "shares 3:1"), ("t5", "1-dp2")}


def check_training(subject: Subject, emitted: Emitted, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The emitted program in processes against the model in one."""
    monkeypatch.setattr(autopart.verify, "run_local_job", run_kept_job)
    emitted.save(folder)
    result = compare_emitted(folder, subject)
    worst = sorted(result.groups, key=lambda group: -max(group.gradient or 0.0, group.parameter))[:3]
    assert result.equal, f"{result.loss_difference=} {worst}"


@pytest.mark.parametrize(
    ("name", "case"), [pytest.param(*item, marks=() if item in QUICK else pytest.mark.slow) for item in EQUAL]
)
def test_equal(name: str, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject, analysis = subject_of(name)
    emitted = realize(subject.program, with_meshes(name, *CASES[case]), analysis)
    check_training(subject, emitted, tmp_path / "program", monkeypatch)


# Schedules with W, and with several stages on a rank: the meshes and places.
SCHEDULED: dict[str, tuple[tuple[Mesh, ...], tuple[int, ...], tuple[int, ...], str]] = {
    "zb-h1 dp2-1": (((2, 1), (1, 1)), (), (0, 1), "zb-h1"),
    "zb-h1 1-dp2": (((1, 1), (2, 1)), (), (0, 1), "zb-h1"),
    "zb-h1 dp2-1-1": (((2, 1), (1, 1), (1, 1)), (3, 1), (0, 1, 2), "zb-h1"),
    "interleaved dp2-1": (((2, 1), (1, 1)), (), (0, 1, 0, 1), "interleaved"),
    "interleaved 1-tp2": (((1, 1), (1, 2)), (), (0, 1, 0, 1), "interleaved"),
    "zb-v dp2-1": (((2, 1), (1, 1)), (3, 1), (0, 1, 1, 0), "zb-v"),
    "zb-v 1-tp2": (((1, 1), (1, 2)), (), (0, 1, 1, 0), "zb-v"),
}
QUICK_SCHEDULES = {("t5", "interleaved dp2-1"), ("unet", "zb-v 1-tp2")}


@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(*item, marks=() if item in QUICK_SCHEDULES else pytest.mark.slow)
        for item in itertools.product(("gpt2", "unet", "t5", "branches"), SCHEDULED)
        if not (item[0] in ("t5", "branches") and "tp2" in item[1])
    ],
)
def test_schedules_equal(name: str, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject, analysis = subject_of(name)
    emitted = realize(subject.program, with_meshes(name, *SCHEDULED[case]), analysis)
    check_training(subject, emitted, tmp_path / "program", monkeypatch)


QUICK_DIVIDED = {("gpt2", "dp2-1", 3), ("gpt2", "1-dp2", 1)}


@pytest.mark.parametrize(
    ("name", "case", "level"),
    [
        pytest.param(*item, marks=() if item in QUICK_DIVIDED else pytest.mark.slow)
        for item in itertools.product(("gpt2", "unet"), DIVIDED, (1, 2, 3))
    ],
)
def test_replicas_of_one_stage_divide_its_parameters(
    name: str, case: str, level: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeRO inside a stage's own data axis; what lies on a stage of one replica is whole."""
    subject, analysis = subject_of(name)
    plan = divided(name, case, level)
    emitted = realize(subject.program, plan, analysis)
    levels = {
        plan.stages[spec.stages[0]].dp: spec.zero for spec in emitted.manifest.parameters if spec.name in plan.zero
    }
    assert levels == {2: level, 1: 0}
    check_training(subject, emitted, tmp_path / "program", monkeypatch)


def test_a_tie_of_unlike_meshes_is_not_divided() -> None:
    subject, analysis = subject_of("branches")
    plan = with_meshes("branches", ((1, 1), (2, 1)))
    name = next(
        spec.name for spec in realize(subject.program, plan, analysis).manifest.parameters if len(spec.stages) > 1
    )
    with pytest.raises(PlanError, match="share it and have unlike meshes"):
        realize(subject.program, replace(plan, zero={name: 1}), analysis)


def test_cases_cross_all_kinds_of_values() -> None:
    """Sharded and replicated values, values without samples, and tied parameters cross in the cases above."""
    shared = {name: realize_of(name, "dp2-1").manifest for name in ("gpt2", "t5", "branches")}
    assert any(value.batch_dim is None and value.needs_grad for value in shared["t5"].values)
    assert any(len(spec.stages) > 1 and spec.trainable for spec in shared["branches"].parameters)
    sharded = realize_of("unet", "dp2-tp2").manifest
    assert any(text.startswith("S") for value in sharded.values for text in value.arrivals[0])
    assert any(text.startswith("S") for spec in sharded.parameters for texts in spec.by_stage for text in texts)


def realize_of(name: str, case: str) -> Emitted:
    subject, analysis = subject_of(name)
    return realize(subject.program, with_meshes(name, *CASES[case]), analysis)


def test_a_tie_of_unlike_meshes_is_stored_whole() -> None:
    subject, analysis = subject_of("branches")
    plan = with_meshes("branches", ((1, 1), (1, 2)))
    name = next(spec.name for spec in subject.program.tensors.values() if spec.aliases)
    stages = (plan.stages[0], replace(plan.stages[1], storage={name: "S0"}))
    with pytest.raises(PlanError, match="unlike meshes and stored in shares"):
        realize(subject.program, replace(plan, stages=stages), analysis)


def test_plans_check_shares() -> None:
    plan = with_meshes("unet", ((2, 1), (1, 1)))
    with pytest.raises(PlanError, match="a part of at least 1 for each replica"):
        replace(plan.stages[0], shares=(3, 1, 1))
    with pytest.raises(PlanError, match=r"shares \[5, 2\]; make batch a multiple of 14"):
        replace(plan, stages=(replace(plan.stages[0], shares=(5, 2)), plan.stages[1]))
    again = Plan.from_json(replace(plan, stages=(replace(plan.stages[0], shares=(3, 1)), plan.stages[1])).to_json())
    assert again.stages[0].shares == (3, 1) and not again.is_uniform
