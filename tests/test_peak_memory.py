"""The most bytes of tensors that are alive in a step of a real run, against the walk over the emitted graph."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from chains import chain_of, subject_of
from test_recompute import recomputing
from test_schedules_equal_serial import placed

from autopart.api import load
from autopart.candidate_prices import CUDA_OVERHEAD_BYTES
from autopart.planner import make_plan
from autopart.realize import realize, realized, recomputed
from autopart.stage_memory import stage_peaks
from autopart.step_memory import step_peaks
from autopart.verify.live_bytes import LiveBytes
from clusters import ideal
from launch import launch


@pytest.mark.parametrize(
    ("name", "microbatches", "again"),
    [("gpt2", 1, ()), ("gpt2", 2, (1, 2)), ("gpt2", 2, (0, 1, 2, 3)), ("t5", 1, ()), ("unet", 2, ())],
)
def test_peak_of_a_step(name: str, microbatches: int, again: tuple[int, ...], tmp_path: Path) -> None:
    subject, analysis = subject_of(name)
    limits = {"pp": 1, "dp": 1, "tp": 1, "microbatches": microbatches, "recompute": "none"}
    plan = make_plan(subject.program, ideal(1), batch=8, analysis=analysis, **limits)  # type: ignore[arg-type]
    if again:
        plan = recomputing(plan, realized(analysis, plan).local, again)
    realize(subject.program, plan, analysis).save(tmp_path / "program")
    weights = {key: tensor.detach() for key, tensor in subject.model.state_dict().items()}
    model = load(str(tmp_path / "program"), weights, device=torch.device("cpu")).train()
    with LiveBytes([*model.parameters(), *model.buffers(), *subject.leaves.values()]) as live:
        model(**subject.leaves)
    found = realized(analysis, plan)
    (peak,) = stage_peaks(subject.program, found, 8 // microbatches, recomputed(plan, found.local), "cpu")
    assert peak.of_stage(1, microbatches) == pytest.approx(live.most, rel=0.02)
    assert peak.gradients == sum(p.numel() * p.element_size() for p in model.parameters())


def _most(directory: str, weights: Mapping[str, torch.Tensor], leaves: Mapping[str, Any]) -> int:
    model = load(directory, dict(weights), device=torch.device("cpu")).train()
    with LiveBytes([*model.parameters(), *model.buffers(), *leaves.values()]) as live:
        model(**leaves)
    return live.most


PIPELINES = {
    "gpt2-3": ("gpt2", "1f1b", (0, 1, 2)),
    "gpt2-4on2": ("gpt2", "interleaved", (0, 1, 0, 1)),
    "t5-3": ("t5", "gpipe", (0, 1, 2)),
}


@pytest.mark.parametrize(
    "case", [pytest.param("gpt2-3", marks=pytest.mark.slow), "gpt2-4on2", pytest.param("t5-3", marks=pytest.mark.slow)]
)
def test_peak_of_a_pipeline(case: str, tmp_path: Path) -> None:
    """Received and sent tensors among them: what was sent is let go once an arrival proves that it is there."""
    name, schedule, places = PIPELINES[case]
    subject, analysis = subject_of(name)
    plan = placed(chain_of(name, len(places), 8), schedule, places)
    realize(subject.program, plan, analysis).save(tmp_path / "program")
    weights = {key: tensor.detach() for key, tensor in subject.model.state_dict().items()}
    counted = launch(_most, 1 + max(places), str(tmp_path / "program"), weights, subject.leaves)
    predicted = step_peaks(subject.program, plan, realized(analysis, plan), "cpu")
    assert predicted == pytest.approx(counted, rel=0.05)


@pytest.mark.parametrize(("name", "stages"), [("gpt2", 2), ("t5", 3), ("unet", 2)])
def test_plans_count_what_the_code_of_a_stage_holds(name: str, stages: int) -> None:
    """The blocks' estimates, which the stage solver goes by, are seldom below the walk over it, and not far above."""
    subject, analysis = subject_of(name)
    plan = chain_of(name, stages)
    found = realized(analysis, plan)
    peaks = stage_peaks(subject.program, found, plan.batch // plan.microbatches, [()] * stages, "cuda")
    for stage, peak, most in zip(plan.stages, peaks, step_peaks(subject.program, plan, found, "cuda"), strict=True):
        # AdamW's state is twice the weights, of which there are as many bytes as of gradients
        held = 3 * peak.gradients + most
        assert 0.95 * held <= stage.memory_bytes - CUDA_OVERHEAD_BYTES <= 1.25 * held
