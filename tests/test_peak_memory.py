"""The most bytes of tensors that are alive in a step of a real run, against the walk over the emitted graph."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from chains import chain_of, subject_of
from test_recompute import recomputing

from autopart.api import load
from autopart.candidates import CUDA_OVERHEAD_BYTES
from autopart.planner import make_plan
from autopart.realize import realize, realized, recomputed
from autopart.stage_memory import stage_peaks
from autopart.verify.live_bytes import LiveBytes
from clusters import ideal


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


@pytest.mark.parametrize(("name", "stages"), [("gpt2", 2), ("t5", 3), ("unet", 2)])
def test_plans_count_what_the_code_of_a_stage_holds(name: str, stages: int) -> None:
    """The blocks' estimates, which the stage solver goes by, are seldom below the walk over it, and not far above."""
    subject, analysis = subject_of(name)
    plan = chain_of(name, stages)
    samples = plan.batch // plan.microbatches
    peaks = stage_peaks(subject.program, realized(analysis, plan), samples, [()] * stages, "cuda")
    for stage, peak, in_flight in zip(plan.stages, peaks, plan.in_flight, strict=True):
        # AdamW's state is twice the weights, of which there are as many bytes as of gradients
        held = 3 * peak.gradients + peak.of_stage(in_flight, plan.microbatches)
        assert 0.95 * held <= stage.memory_bytes - CUDA_OVERHEAD_BYTES <= 1.25 * held
