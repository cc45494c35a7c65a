"""Every schedule trains as the unmodified model does in one process, with one stage on a rank and with several.

GPT-2, T5, a U-Net with skips and a two-input network of branches, in two, three and four stages: the loss of each step,
every gradient, and every parameter after three AdamW steps, in float64 over gloo.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from chains import MODELS, chain_of, subject_of

import autopart.verify
from autopart.plan import Plan
from autopart.realize import realize
from autopart.runtime.schedule import places_of
from autopart.verify import compare_emitted
from launch import run_kept_job

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

SLOW = ("zb-h1-4", "gpipe-4on2")


def placed(plan: Plan, schedule: str, places: Sequence[int]) -> Plan:
    """The plan under another schedule, its stages on these ranks."""
    stages = tuple(replace(stage, devices=(place,)) for stage, place in zip(plan.stages, places, strict=True))
    return replace(plan, schedule=schedule, stages=stages, warmup=())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.slow if case in SLOW else ()) for case in CASES])
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


# Every schedule of a batch by itself, for each number of stages; of those with virtual stages on fewer ranks.
MATRIX: dict[int, tuple[tuple[str, tuple[int, ...]], ...]] = {
    stages: (
        *((schedule, tuple(range(stages))) for schedule in ("gpipe", "1f1b", "2bw-flush", "zb-h1")),
        ("interleaved", (0, 0, 0) if stages == 3 else tuple(stage % (stages // 2) for stage in range(stages))),
        *((("zb-v", places_of("zb-v", stages)),) if stages % 2 == 0 else ()),
    )
    for stages in (2, 3, 4)
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("stages", MATRIX)
def test_all_schedules_equal(name: str, stages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autopart.verify, "run_local_job", run_kept_job)
    subject, analysis = subject_of(name)
    for schedule, places in MATRIX[stages]:
        plan = placed(chain_of(name, stages), schedule, places)
        realize(subject.program, plan, analysis).save(tmp_path / schedule)
        result = compare_emitted(tmp_path / schedule, subject, plan=plan)
        worst = sorted(result.groups, key=lambda group: -max(group.gradient or 0.0, group.parameter))[:3]
        assert result.equal, f"{schedule}: {result.loss_difference=} {worst}"


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
