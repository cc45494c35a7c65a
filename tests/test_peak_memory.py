"""The most bytes of tensors that are alive in a step of a real run, against the walk over the emitted graph."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from chains import chain_of, subject_of
from test_recompute import recomputing
from test_schedules_equal_serial import placed
from unlike_cases import with_meshes

from autopart import step_memory
from autopart.analysis import analyze
from autopart.api import load
from autopart.candidate_settings import CUDA_OVERHEAD_BYTES
from autopart.passes.kept import kept_bytes
from autopart.planner import make_plan
from autopart.realize import realize, realized, recomputed
from autopart.stage_memory import stage_peaks
from autopart.step_memory import step_peaks
from autopart.tracing import capture
from autopart.verify.live_bytes import LiveBytes, scattering_in_sight
from clusters import ideal
from families import family
from launch import launch


@pytest.mark.parametrize(
    ("name", "microbatches", "again"),
    [
        ("gpt2", 1, ()),
        ("gpt2", 2, (1, 2)),
        ("gpt2", 2, (0, 1, 2, 3)),
        ("t5", 1, ()),
        ("unet", 2, ()),
        ("mixtral", 2, ()),
        pytest.param("vit", 2, (), marks=pytest.mark.slow),
        pytest.param("resnet", 2, (), marks=pytest.mark.slow),
        pytest.param("llama", 2, (), marks=pytest.mark.slow),
        pytest.param("bert", 2, (), marks=pytest.mark.slow),
        pytest.param("branches", 2, (), marks=pytest.mark.slow),
    ],
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
    assert [peak.call for peak in step_peaks(analysis, plan, found, "cpu")] == [pytest.approx(live.most, rel=0.02)]
    (peak,) = stage_peaks(subject.program, found, 8 // microbatches, recomputed(plan, found.local), "cpu")
    assert peak.gradients == sum(p.numel() * p.element_size() for p in model.parameters())


def _most(
    directory: str, weights: Mapping[str, torch.Tensor], leaves: Mapping[str, Any], calls: int, steady: int
) -> int:
    """Of the calls from number ``steady`` on the least: gloo's threads may hold a message for a moment longer."""
    model = load(directory, dict(weights), device=torch.device("cpu")).train()
    known = [*model.parameters(), *model.buffers(), *leaves.values()]
    found = []
    with scattering_in_sight(), LiveBytes(known) as live:
        for _ in range(calls):
            live.most = live.now
            model(**leaves)
            found.append(live.most)
    if model.manifest.schedule == "2bw":
        model.finish()  # or no other model could run
    return min(found[steady:])


# The model, the schedule, the ranks that run the stages, and the replicas and tensor ranks of each of these.
PIPELINES: dict[str, tuple[str, str, tuple[int, ...], tuple[tuple[int, int], ...]]] = {
    "gpt2-3": ("gpt2", "1f1b", (0, 1, 2), ()),
    "gpt2-4on2": ("gpt2", "interleaved", (0, 1, 0, 1), ()),
    "t5-3": ("t5", "gpipe", (0, 1, 2), ()),
    "gpt2-zb-h1-3": ("gpt2", "zb-h1", (0, 1, 2), ()),
    "gpt2-zb-v-4on2": ("gpt2", "zb-v", (0, 1, 1, 0), ()),
    "t5-zb-h1-3": ("t5", "zb-h1", (0, 1, 2), ()),
    "t5-zb-v-4on2": ("t5", "zb-v", (0, 1, 1, 0), ()),
    "vit-2": ("vit", "1f1b", (0, 1), ()),
    "gpt2-2bw-3": ("gpt2", "2bw", (0, 1, 2), ()),
    "gpt2-replicas": ("gpt2", "1f1b", (0, 1), ((2, 1), (2, 1))),
    "gpt2-dp2-1": ("gpt2", "1f1b", (0, 1), ((2, 1), (1, 1))),
    "gpt2-1-dp2": ("gpt2", "1f1b", (0, 1), ((1, 1), (2, 1))),
    "gpt2-1-tp2": ("gpt2", "1f1b", (0, 1), ((1, 1), (1, 2))),
    "unet-dp2-1": ("unet", "1f1b", (0, 1), ((2, 1), (1, 1))),
}
QUICK = ("gpt2-zb-v-4on2", "gpt2-1-dp2")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in QUICK else pytest.mark.slow) for case in PIPELINES]
)
def test_peak_of_a_pipeline(case: str, tmp_path: Path) -> None:
    """Received and sent tensors among them: what was sent is let go once an arrival proves that it is there."""
    name, schedule, places, meshes = PIPELINES[case]
    subject, analysis = subject_of(name)
    if meshes:
        plan = with_meshes(name, meshes, schedule=schedule)
    else:
        plan = placed(chain_of(name, len(places), 8), schedule, places)
    realize(subject.program, plan, analysis).save(tmp_path / "program")
    weights = {key: tensor.detach() for key, tensor in subject.model.state_dict().items()}
    sizes = [math.prod(mesh) for mesh in meshes] or [1] * (1 + max(places))
    calls = (5, 3) if schedule == "2bw" else (2, 0)
    counted = launch(_most, sum(sizes), str(tmp_path / "program"), weights, subject.leaves, *calls)
    ends = list(itertools.accumulate(sizes, initial=0))
    largest = [max(counted[first:last]) for first, last in itertools.pairwise(ends)]
    predicted = [peak.call for peak in step_peaks(analysis, plan, realized(analysis, plan), "cpu")]
    assert predicted == pytest.approx(largest, rel=0.03 if meshes else 0.05)


@pytest.mark.parametrize(("name", "stages"), [("gpt2", 2), ("t5", 3), ("unet", 2)])
def test_plans_count_what_the_code_of_a_stage_holds(name: str, stages: int) -> None:
    """The blocks' estimates, which the stage solver goes by, are seldom below the walk over it, and not far above."""
    subject, analysis = subject_of(name)
    plan = chain_of(name, stages)
    found = realized(analysis, plan)
    peaks = stage_peaks(subject.program, found, plan.batch // plan.microbatches, [()] * stages, "cuda")
    for stage, peak, most in zip(plan.stages, peaks, step_peaks(analysis, plan, found, "cuda"), strict=True):
        # AdamW's state is twice the weights, of which there are as many bytes as of gradients
        held = 3 * peak.gradients + most.most
        assert 0.95 * held <= stage.memory_bytes - CUDA_OVERHEAD_BYTES <= 1.25 * held


@pytest.mark.parametrize("summed", ["", "bfloat16", "float64"])
def test_peak_where_replicas_sum_in_another_type(summed: str, tmp_path: Path) -> None:
    """Of float32 weights: messages stand beside the gradients until the end of the step, half or twice as large."""
    item = family("gpt2")
    model, leaves = item.build(), item.inputs(8)
    analysis = analyze(capture(model, (), leaves, reduce_dtype=summed, check_eval=False))
    limits: dict[str, Any] = {"pp": 1, "dp": 2, "tp": 1, "microbatches": 2, "recompute": "none", "zero": 0}
    plan = make_plan(analysis.program, ideal(2), batch=8, analysis=analysis, **limits)
    realize(analysis.program, plan, analysis).save(tmp_path / "program")
    counted = launch(_most, 2, str(tmp_path / "program"), model.state_dict(), leaves, 2, 0)
    (predicted,) = step_peaks(analysis, plan, realized(analysis, plan), "cpu")
    assert predicted.call == pytest.approx(max(counted), rel=0.02)


# The model, the tensor axes, and the stages.
SHARDED: dict[str, tuple[str, str, int]] = {
    "gpt2-tp2": ("gpt2", "2", 1),
    "gpt2-tp4": ("gpt2", "4", 1),
    "gpt2-tp2x2": ("gpt2", "2x2", 1),
    "gpt2-tp2-pp2": ("gpt2", "2", 2),
    "t5-tp2": ("t5", "2", 1),
    "mixtral-tp2": ("mixtral", "2", 1),
    "resnet-tp2": ("resnet", "2", 1),
    "vit-tp2": ("vit", "2", 1),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case in ("gpt2-tp2", "resnet-tp2") else pytest.mark.slow) for case in SHARDED],
)
def test_peak_on_tensor_axes(case: str, tmp_path: Path) -> None:
    """Messages of transitions among it, and weights' gradients that are put off."""
    name, tp, stages = SHARDED[case]
    subject, analysis = subject_of(name)
    ranks = stages * math.prod(map(int, tp.split("x")))
    limits: dict[str, Any] = {"pp": stages, "dp": 1, "tp": tp, "microbatches": 2, "recompute": "none"}
    plan = make_plan(subject.program, ideal(ranks), batch=8, analysis=analysis, **limits)
    assert plan.strategies
    realize(subject.program, plan, analysis).save(tmp_path / "program")
    weights = {key: tensor.detach() for key, tensor in subject.model.state_dict().items()}
    counted = launch(_most, ranks, str(tmp_path / "program"), weights, subject.leaves, 2, 0)
    predicted = [peak.call for peak in step_peaks(analysis, plan, realized(analysis, plan), "cpu")]
    size = ranks // stages
    assert predicted == pytest.approx([max(counted[size * i : size * (i + 1)]) for i in range(stages)], rel=0.05)


@pytest.mark.slow
def test_peak_of_weights_that_are_cast_and_put_off(tmp_path: Path) -> None:
    """Under mixed precision products beside a collective read casts of weights."""
    item = family("llama", dtype=torch.float32)
    model, leaves = item.build(), item.inputs(8)
    analysis = analyze(capture(model, (), leaves, precision="bf16-mixed", check_eval=False))
    plan = make_plan(analysis.program, ideal(2), batch=8, analysis=analysis, pp=1, dp=1, tp=2, microbatches=2)
    realize(analysis.program, plan, analysis).save(tmp_path / "program")
    counted = launch(_most, 2, str(tmp_path / "program"), model.state_dict(), leaves, 2, 0)
    (predicted,) = step_peaks(analysis, plan, realized(analysis, plan), "cpu")
    assert predicted.call == pytest.approx(max(counted), rel=0.05)


# The model, the level, the stages and the microbatches of two replicas each. Messages of the first are small.
DIVIDED: dict[str, tuple[str, int, int, int]] = {
    "messages-gpt2-zero1": ("gpt2", 1, 1, 4),
    "messages-gpt2-zero2": ("gpt2", 2, 1, 4),
    "messages-t5-zero2-pp2": ("t5", 2, 2, 2),
    "gpt2-zero1": ("gpt2", 1, 1, 4),
    "gpt2-zero2": ("gpt2", 2, 1, 4),
    "gpt2-zero2-m2": ("gpt2", 2, 1, 2),
    "gpt2-zero3": ("gpt2", 3, 1, 4),
    "gpt2-zero3-m1": ("gpt2", 3, 1, 1),
    "gpt2-zero2-pp2": ("gpt2", 2, 2, 4),
    "gpt2-zero3-pp2": ("gpt2", 3, 2, 4),
    "t5-zero2": ("t5", 2, 1, 4),
    "t5-zero3": ("t5", 3, 1, 2),
    "unet-zero3": ("unet", 3, 1, 2),
}
DIVIDED_QUICK = ("messages-gpt2-zero2", "gpt2-zero3")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in DIVIDED_QUICK else pytest.mark.slow) for case in DIVIDED]
)
def test_peak_where_replicas_divide_parameters(case: str, tmp_path: Path) -> None:
    """What is gathered and scattered among it; the second step, which knows in what order weights are gathered."""
    name, level, stages, microbatches = DIVIDED[case]
    subject, analysis = subject_of(name)
    limits: dict[str, Any] = {"pp": stages, "dp": 2, "tp": 1, "microbatches": microbatches, "zero": level}
    plan = make_plan(subject.program, ideal(2 * stages), batch=8, analysis=analysis, recompute="none", **limits)
    if case.startswith("messages-"):
        largest = max(item.nbytes for item in subject.model.parameters())
        plan = replace(plan, bucket_bytes=largest)
    realize(subject.program, plan, analysis).save(tmp_path / "program")
    weights = {key: tensor.detach() for key, tensor in subject.model.state_dict().items()}
    counted = launch(_most, 2 * stages, str(tmp_path / "program"), weights, subject.leaves, 4, 1)
    predicted = [peak.call for peak in step_peaks(analysis, plan, realized(analysis, plan), "cpu")]
    assert predicted == pytest.approx([max(counted[2 * i : 2 * i + 2]) for i in range(stages)], rel=0.04)


def test_peak_with_sums_of_two_levels_on_their_way(tmp_path: Path) -> None:
    subject, analysis = subject_of("gpt2")
    limits: dict[str, Any] = {"pp": 1, "dp": 2, "tp": 1, "microbatches": 3, "recompute": "none"}
    plan = make_plan(subject.program, ideal(2), batch=12, analysis=analysis, zero=2, **limits)
    levels = {name: 3 if "c_fc" in name or "c_attn" in name else level for name, level in plan.zero.items()}
    assert set(levels.values()) == {2, 3}
    plan = replace(plan, zero=levels)
    realize(subject.program, plan, analysis).save(tmp_path / "program")
    weights = {key: tensor.detach() for key, tensor in subject.model.state_dict().items()}
    leaves = {key: value.repeat(2, *[1] * (value.dim() - 1))[:12] for key, value in subject.leaves.items()}
    counted = launch(_most, 2, str(tmp_path / "program"), weights, leaves, 4, 1)
    predicted = [peak.call for peak in step_peaks(analysis, plan, realized(analysis, plan), "cpu")]
    assert predicted == pytest.approx([max(counted)], rel=0.03)


# The model, and its plan: parameters that are gathered or summed on a tensor axis before replicas divide them, gathers
# that are begun early in a backward that is in one piece alone, and layers that run again up to what they keep last.
MIXED: dict[str, tuple[str, dict[str, Any]]] = {
    "vit-dp2-tp2-zero2": ("vit", {"dp": 2, "tp": 2, "zero": 2}),
    "vit-dp2-tp2-zero3": ("vit", {"dp": 2, "tp": 2, "zero": 3}),
    "t5-pp2-tp2-zb-h1": ("t5", {"pp": 2, "tp": 2, "schedule": "zb-h1"}),
    # W makes the gradients of level 1, B those of levels 2 and 3
    "gpt2-pp2-dp2-zero1-zb-h1": ("gpt2", {"pp": 2, "dp": 2, "zero": 1, "schedule": "zb-h1"}),
    "gpt2-pp2-dp2-zero1-zb-v": ("gpt2", {"pp": 2, "dp": 2, "zero": 1, "schedule": "zb-v"}),
    "t5-pp2-dp2-zero1-zb-h1": ("t5", {"pp": 2, "dp": 2, "zero": 1, "schedule": "zb-h1"}),
    "gpt2-pp2-dp2-zero2-zb-h1": ("gpt2", {"pp": 2, "dp": 2, "zero": 2, "schedule": "zb-h1"}),
    "gpt2-pp2-dp2-zero3-zb-h1": ("gpt2", {"pp": 2, "dp": 2, "zero": 3, "schedule": "zb-h1"}),
    # a stage's message is settled by that of the rank's other one
    "gpt2-pp2-dp2-zero2-zb-v": ("gpt2", {"pp": 2, "dp": 2, "zero": 2, "schedule": "zb-v", "microbatches": 4}),
    "t5-pp2-dp2-zero2-zb-v": ("t5", {"pp": 2, "dp": 2, "zero": 2, "schedule": "zb-v", "recompute": "full"}),
    "llama-pp2-dp2-zero3": ("llama", {"pp": 2, "dp": 2, "zero": 3, "schedule": "interleaved", "microbatches": 4}),
    "vit-tp2-again": ("vit", {"tp": 2, "recompute": "full"}),
    "vit-pp2-again": ("vit", {"pp": 2, "recompute": "full"}),
}
MIXED_QUICK = ("vit-tp2-again", "gpt2-pp2-dp2-zero2-zb-v")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in MIXED_QUICK else pytest.mark.slow) for case in MIXED]
)
def test_peak_of_mixed_plans(case: str, tmp_path: Path) -> None:
    name, wanted = MIXED[case]
    subject, analysis = subject_of(name)
    limits: dict[str, Any] = {"pp": 1, "dp": 1, "tp": 1, "microbatches": 2, "recompute": "none", **wanted}
    ranks = limits["pp"] * limits["dp"] * limits["tp"]
    plan = make_plan(subject.program, ideal(ranks), batch=8, analysis=analysis, **limits)
    realize(subject.program, plan, analysis).save(tmp_path / "program")
    weights = {key: tensor.detach() for key, tensor in subject.model.state_dict().items()}
    counted = launch(_most, ranks, str(tmp_path / "program"), weights, subject.leaves, 4, 1)
    predicted = [peak.call for peak in step_peaks(analysis, plan, realized(analysis, plan), "cpu")]
    size = ranks // limits["pp"]
    largest = [max(counted[size * i : size * (i + 1)]) for i in range(limits["pp"])]
    assert predicted == pytest.approx(largest, rel=0.05)


def test_only_stages_that_send_gradients_leave_those_of_weights_for_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first stage B makes all, with products beside collectives, and with no W."""
    subject, analysis = subject_of("gpt2")
    limits: dict[str, Any] = {"pp": 2, "dp": 1, "tp": 1, "microbatches": 4, "schedule": "zb-h1", "recompute": "none"}
    plan = make_plan(subject.program, ideal(2), batch=8, analysis=analysis, **limits)
    seen: list[list[bool]] = []

    def watched(*arguments: Any) -> Any:
        seen.append(arguments[7])
        return stage_peaks(*arguments)

    monkeypatch.setattr(step_memory, "stage_peaks", watched)
    step_peaks(analysis, plan, realized(analysis, plan), "cpu")
    assert seen == [[False, True]]


def _updates(directory: str, weights: Mapping[str, torch.Tensor], leaves: Mapping[str, Any], calls: int) -> int:
    """The most bytes while AdamW updates, its state left out, the least of the last calls (see :func:`_most`)."""
    model = load(directory, dict(weights), device=torch.device("cpu")).train()
    optimizer = torch.optim.AdamW(model.parameters())
    found = []
    with LiveBytes([*model.parameters(), *model.buffers(), *leaves.values()]) as live:
        for _ in range(calls):
            model(**leaves)["loss"].backward()
            state = [item for own in optimizer.state.values() for item in own.values()]
            held = sum(item.untyped_storage().nbytes() for item in state)
            live.most = live.now
            optimizer.step()
            found.append(live.most - held)
            optimizer.zero_grad()
    if model.manifest.schedule == "2bw":
        model.finish()
    return min(found[-2:])


@pytest.mark.parametrize(
    ("name", "limits"),
    [
        ("gpt2", {"dp": 2, "zero": 0}),
        pytest.param("gpt2", {"dp": 2, "zero": 1}, marks=pytest.mark.slow),
        pytest.param("gpt2", {"dp": 2, "zero": 3}, marks=pytest.mark.slow),
        pytest.param("gpt2", {"tp": 2}, marks=pytest.mark.slow),
        pytest.param("gpt2", {"dp": 2, "tp": 2, "zero": 3}, marks=pytest.mark.slow),
        pytest.param("t5", {"pp": 2}, marks=pytest.mark.slow),
        pytest.param("gpt2", {"pp": 2, "schedule": "2bw", "microbatches": 4}, marks=pytest.mark.slow),
    ],
)
def test_peak_of_the_optimizers_step(name: str, limits: dict[str, Any], tmp_path: Path) -> None:
    """Gradients, what 2BW keeps for the next call, and what AdamW makes for one parameter after the other.

    On tensor axes some of level 3's gradients are summed once more, in other messages than they arrived in.
    """
    subject, analysis = subject_of(name)
    limits = {"pp": 1, "dp": 1, "tp": 1, "microbatches": 2, "recompute": "none", **limits}
    ranks = limits["pp"] * limits["dp"] * limits["tp"]
    plan = make_plan(subject.program, ideal(ranks), batch=8, analysis=analysis, **limits)
    realize(subject.program, plan, analysis).save(tmp_path / "program")
    weights = {key: tensor.detach() for key, tensor in subject.model.state_dict().items()}
    counted = launch(_updates, ranks, str(tmp_path / "program"), weights, subject.leaves, 5)
    predicted = [peak.update for peak in step_peaks(analysis, plan, realized(analysis, plan), "cpu")]
    size = ranks // limits["pp"]
    largest = [max(counted[size * i : size * (i + 1)]) for i in range(limits["pp"])]
    assert predicted == pytest.approx(largest, rel=0.02)


class _Recurrent(torch.nn.Module):
    def __init__(self, layers: int, two_ways: bool, first: bool) -> None:
        super().__init__()
        self.lstm = torch.nn.LSTM(24, 40, num_layers=layers, bidirectional=two_ways, batch_first=first)
        self.head = torch.nn.Linear(80 if two_ways else 40, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0]).square().mean()


@pytest.mark.parametrize(("layers", "two_ways", "first"), [(1, False, True), (3, False, True), (2, True, True)])
@pytest.mark.parametrize("level", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_peak_of_lstms(layers: int, two_ways: bool, first: bool, level: int, tmp_path: Path) -> None:
    """What oneDNN keeps of each layer and direction, which autograd goes back through one by one: what replicas divide
    of a layer is gathered, and its gradients are made, when those behind it have let go of what they kept.
    """
    torch.manual_seed(0)
    model, x = _Recurrent(layers, two_ways, first), torch.randn(8, 12, 24)
    program = capture(model, (x,), {}, check_eval=False)
    analysis = analyze(program)
    replicas = 2 if level else 1
    limits: dict[str, Any] = {"pp": 1, "dp": replicas, "tp": 1, "microbatches": 2, "zero": level, "recompute": "none"}
    plan = make_plan(program, ideal(replicas), batch=8, analysis=analysis, **limits)
    realize(program, plan, analysis).save(tmp_path / "program")
    counted = launch(_most, replicas, str(tmp_path / "program"), model.state_dict(), {"x": x}, 4, 1)
    (predicted,) = step_peaks(analysis, plan, realized(analysis, plan), "cpu")
    assert predicted.call == pytest.approx(max(counted), rel=0.05)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "t5", "unet", "mixtral"])
def test_what_is_left_of_a_forward_is_what_is_kept(name: str, again: bool) -> None:
    """What a layer returns is let go when the stage returns, unless the backward needs it."""
    subject, analysis = subject_of(name)
    limits: dict[str, Any] = {"pp": 1, "dp": 1, "tp": 1, "microbatches": 2, "recompute": "full" if again else "none"}
    plan = make_plan(subject.program, ideal(1), batch=8, analysis=analysis, **limits)
    found = realized(analysis, plan)
    (own,) = recomputed(plan, found.local)
    (peak,) = stage_peaks(subject.program, found, 4, [own], "cpu")
    assert peak.retained == pytest.approx(kept_bytes(found.local[0], found.axes, 4, own, "cpu"))
