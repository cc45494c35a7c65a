"""Every schedule trains as the unmodified model does in one process, with one stage on a rank and with several.

GPT-2, T5, a U-Net with skips and a two-input network of branches, in two, three and four stages: the loss of each step,
every gradient, and every parameter after three AdamW steps, in float64 over gloo.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import autopart.verify
import branching
from autopart.analysis import Analysis, analyze
from autopart.plan import Plan
from autopart.planner import make_plan
from autopart.realize import realize
from autopart.runtime.schedule import places_of
from autopart.verify import Subject, compare_emitted, prepare
from clusters import ideal
from families import family
from launch import run_kept_job

MODELS = ("gpt2", "t5", "unet", "branches")
# (schedule, stages, places): the ranks that run the stages.
CASES: dict[str, tuple[str, tuple[int, ...]]] = {
    "gpipe-2": ("gpipe", (0, 1)),
    "gpipe-4on2": ("gpipe", (0, 1, 0, 1)),
    "interleaved-4on2": ("interleaved", (0, 1, 0, 1)),
    "zb-h1-2": ("zb-h1", (0, 1)),
    "zb-v-4on2": ("zb-v", (0, 1, 1, 0)),
    "interleaved-3on1": ("interleaved", (0, 0, 0)),
    "zb-v-2on1": ("zb-v", (0, 0)),
    "zb-h1-3": ("zb-h1", (0, 1, 2)),
    "1f1b-3": ("1f1b", (0, 1, 2)),
    "zb-h1-4": ("zb-h1", (0, 1, 2, 3)),
}


@functools.lru_cache(maxsize=16)
def subject_of(name: str) -> tuple[Subject, Analysis]:
    if name in ("gpt2", "t5"):
        item = family(name)
        subject = prepare(item.build(), (), item.inputs(item.batch))
    else:
        model, batch = getattr(branching, name)()
        subject = prepare(model, (), batch)
    return subject, analyze(subject.program)


@functools.lru_cache(maxsize=16)
def chain_of(name: str, stages: int) -> Plan:
    """A plan with one stage on each of as many devices, four microbatches."""
    subject, analysis = subject_of(name)
    cluster = ideal(stages)
    return make_plan(
        subject.program, cluster, pp=stages, dp=1, tp=1, microbatches=4, recompute="none", batch=8, analysis=analysis
    )


def placed(plan: Plan, schedule: str, places: Sequence[int]) -> Plan:
    """The plan under another schedule, its stages on these ranks."""
    stages = tuple(replace(stage, devices=(place,)) for stage, place in zip(plan.stages, places, strict=True))
    return replace(plan, schedule=schedule, stages=stages)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("case", CASES)
def test_equal(name: str, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autopart.verify, "run_local_job", run_kept_job)
    subject, analysis = subject_of(name)
    schedule, places = CASES[case]
    plan = placed(chain_of(name, len(places)), schedule, places)
    assert plan.places == places
    realize(subject.program, plan, analysis).save(tmp_path / "program")
    result = compare_emitted(tmp_path / "program", subject, plan=plan)
    worst = sorted(result.groups, key=lambda group: -max(group.gradient or 0.0, group.parameter))[:3]
    assert result.equal, f"{result.loss_difference=} {worst}"


def test_places_by_name() -> None:
    assert places_of("interleaved", 6, 3) == (0, 1, 0, 1, 0, 1)
    assert places_of("zb-v", 6) == (0, 1, 2, 2, 1, 0)
    assert places_of("1f1b", 3) == (0, 1, 2)


def test_recomputed_layers_under_a_split_backward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are computed again once, in B, which then makes their weights' gradients too."""
    monkeypatch.setattr(autopart.verify, "run_local_job", run_kept_job)
    subject, analysis = subject_of("gpt2")
    plan = replace(placed(chain_of("gpt2", 2), "zb-h1", (0, 1)), recompute="full")
    emitted = realize(subject.program, plan, analysis)
    assert all("checkpoint(" in text for name, text in emitted.files.items() if name.startswith("stage_"))
    emitted.save(tmp_path / "program")
    assert compare_emitted(tmp_path / "program", subject, plan=plan).equal
