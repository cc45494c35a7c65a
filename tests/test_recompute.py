"""Some layers of a stage are computed again in the backward: what plans say of it, what is emitted, how it trains."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from test_schedules_equal_serial import chain_of, subject_of
from torch import fx

import autopart.verify
from autopart.passes.emit.layers import recomputable_layers
from autopart.plan import Plan
from autopart.realize import realize, realized
from autopart.report.table import plan_text
from autopart.runtime.errors import PlanError
from autopart.verify import compare_emitted
from launch import run_kept_job


def recomputing(plan: Plan, local: Sequence[fx.Graph], numbers: Collection[int]) -> Plan:
    """The plan with the layers of these numbers, in any list, computed again."""
    stages = tuple(
        replace(stage, recompute=tuple(x for x in recomputable_layers(graph) if int(x.rpartition(".")[2]) in numbers))
        for stage, graph in zip(plan.stages, local, strict=True)
    )
    return replace(plan, recompute="some", stages=stages)


def two_stages(*layers: Sequence[str]) -> Plan:
    plan = chain_of("gpt2", 2)
    stages = tuple(replace(stage, recompute=tuple(own)) for stage, own in zip(plan.stages, layers, strict=True))
    return replace(plan, recompute="some", stages=stages)


def test_some_layers_train_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autopart.verify, "run_local_job", run_kept_job)
    subject, analysis = subject_of("gpt2")
    plan = two_stages(("transformer.h.1",), ("transformer.h.3",))
    emitted = realize(subject.program, plan, analysis)
    for stage, layer in enumerate((1, 3)):
        text = emitted.files[f"stage_{stage}.py"]
        assert f'checkpoint(self.transformer.h["{layer}"], ' in text
        assert text.count("checkpoint(") == 1 and text.count("class TransformerH") == 1
    emitted.save(tmp_path / "program")
    assert compare_emitted(tmp_path / "program", subject, plan=plan).equal


def test_plans_name_the_layers() -> None:
    plan = two_stages(("transformer.h.0", "transformer.h.1"), ())
    assert Plan.from_json(plan.to_json()) == plan
    assert "recompute transformer.h.0-1 on stage 0" in plan_text(plan)
    with pytest.raises(PlanError, match="only there"):
        replace(plan, recompute="none")
    with pytest.raises(PlanError, match="only there"):
        replace(chain_of("gpt2", 2), recompute="some")


def test_layers_that_a_stage_does_not_have() -> None:
    subject, analysis = subject_of("gpt2")
    plan = two_stages(("transformer.h.3",), ())
    with pytest.raises(PlanError, match=r"stages\[0\].recompute: 'transformer.h.3' is no layer .* transformer.h.0"):
        realize(subject.program, plan, analysis)
    assert realized(analysis, plan)
