"""Some layers of a stage are computed again in the backward: what plans say of it, what is emitted, how it trains."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chains import chain_of, subject_of
from test_planner import GPT2, analysis_of
from torch import fx

import autopart.verify
from autopart.candidates import Candidates
from autopart.passes.emit.layers import recomputable_layers
from autopart.passes.kept import kept_bytes
from autopart.plan import Plan
from autopart.planner import make_plan
from autopart.realize import build, realize, realized
from autopart.report.table import plan_text
from autopart.runtime.errors import PlanError
from autopart.solver.degrees import Degrees
from autopart.solver.stages import solve
from autopart.verify import compare_emitted
from clusters import ideal
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
        # all whole layers are of one class, the part of one at the cut of another
        assert text.count("checkpoint(") == 1 and text.count("class TransformerH") <= 2
    emitted.save(tmp_path / "program")
    assert compare_emitted(tmp_path / "program", subject, plan=plan).equal


def test_collectives_of_a_layer_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over two tensor ranks: equal training, and as many calls and bytes as the plan says."""
    monkeypatch.setattr(autopart.verify, "run_local_job", run_kept_job)
    subject, analysis = subject_of("gpt2")
    limits: dict[str, Any] = {"batch": 8, "pp": 1, "dp": 1, "tp": 2, "microbatches": 2}
    cluster = ideal(2, memory_bandwidth=1e15)
    plan = make_plan(subject.program, cluster, analysis=analysis, recompute="full", **limits)
    kept = make_plan(subject.program, cluster, analysis=analysis, recompute="none", **limits)
    calls = [sum(count["calls"] for count in p.stages[0].collectives.values()) for p in (kept, plan)]
    assert calls[0] < calls[1]
    realize(subject.program, plan, analysis).save(tmp_path / "program")
    result = compare_emitted(tmp_path / "program", subject, plan=plan)
    assert result.equal
    for stage in result.traffic:
        assert stage.counted == stage.planned


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


def planned(memory_bytes: int, **limits: Any) -> Plan:
    analysis = analysis_of(GPT2)
    limits = {"batch": 16, "dp": 1, "tp": 1, "optimizer": "sgd", **limits}
    return make_plan(analysis.program, ideal(limits["pp"], memory_bytes=memory_bytes), analysis=analysis, **limits)


def layers_of(plan: Plan) -> list[int]:
    """How many layers each stage computes again."""
    return [4 if plan.recompute == "full" else len(stage.recompute) for stage in plan.stages]


def test_as_little_as_memory_asks_for() -> None:
    roomy = {"pp": 1, "microbatches": 1}
    kept, again = (planned(2**40, recompute=name, **roomy) for name in ("none", "full"))
    least, most = again.stages[0].memory_bytes, kept.stages[0].memory_bytes
    assert least < most and kept.step_time_s < again.step_time_s
    times: list[float] = []
    for quarter in range(5):
        capacity = least + quarter * (most - least) // 4 + 1  # bytes of plans are rounded
        plan = planned(capacity, **roomy)
        assert plan.stages[0].memory_bytes <= capacity and plan.gap >= 0
        times.append(plan.step_time_s)
    assert times == sorted(times, reverse=True) and len(set(times)) == len(times)
    assert times[0] <= again.step_time_s * (1 + 1e-12) and times[-1] == pytest.approx(kept.step_time_s)
    assert plan.recompute == "none"


def test_the_stage_with_most_in_flight_recomputes_most() -> None:
    pipeline = {"pp": 2, "microbatches": 8, "batch": 32}
    kept, again = (planned(2**40, recompute=name, **pipeline) for name in ("none", "full"))
    tight = planned(
        (max(s.memory_bytes for s in kept.stages) + max(s.memory_bytes for s in again.stages)) // 2, **pipeline
    )
    assert tight.recompute == "some" and tight.step_time_s < again.step_time_s
    first, last = layers_of(tight)
    assert first > last
    assert all(stage.memory_bytes <= stage.capacity_bytes for stage in tight.stages)


@pytest.mark.parametrize(
    ("name", "recompute", "tolerance"),
    [
        ("gpt2", "none", 0.01),
        ("gpt2", "full", 0.01),
        ("t5", "none", 0.02),
        ("t5", "full", 0.05),
        ("unet", "none", 0.01),
    ],
)
def test_blocks_keep_what_their_stages_keep(name: str, recompute: str, tolerance: float) -> None:
    """What the stage solver counts of blocks, tensors of several blocks once, against the graphs that are emitted."""
    _, analysis = subject_of(name)
    candidates = Candidates(analysis, ideal(3), 8, "adamw")
    config = Degrees(3, 1, (), 4, "1f1b", recompute)
    problem = candidates.problem(config, candidates.choose(config))
    way = solve(problem).way
    local = build(analysis, problem.boundaries(way), (), {}, {}, None, problem.order(way)).local
    (shape,) = problem.shapes
    for step, graph in zip(way, local, strict=True):
        inside = set(problem.blocks_between(step.first, step.last))
        counted = sum(choice.activation_bytes for choice in problem.chosen(step))
        counted += sum(group.bytes for group in shape.kept if inside & set(group.blocks))
        layers = recomputable_layers(graph) if recompute == "full" else ()
        assert counted == pytest.approx(kept_bytes(graph, (), 2, layers), rel=tolerance)
