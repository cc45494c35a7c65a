"""Emitted stages under torch's own pipeline schedules equal the plain model; programs that torch cannot run say why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from autopart.models import load_model
from autopart.passes.program import Program
from autopart.plan import Plan
from autopart.planner import make_plan
from autopart.runtime import ParallelModule
from autopart.runtime.errors import BatchError, PlanError
from autopart.runtime.manifest import Manifest
from autopart.runtime.pipelining import check_linear
from autopart.tracing import capture
from clusters import ideal
from emitted import WIDTH, data, emit, plain
from launch import launch
from programs import compile_program

MICROBATCHES = 4
SPEC = "hf:gpt2?n_layer=2&n_embd=16&n_head=2&vocab_size=32&n_positions=8&seq=8&batch=4&tie_word_embeddings=False"


def _errors(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert found
    return max(float((found[name] - wanted[name]).abs().max()) for name in found)


def _steps(directory: str) -> dict[str, list[float]]:
    """Largest errors of the loss, if this rank has it, and of the gradients, by schedule."""
    x, target = data(8)
    errors: dict[str, list[float]] = {}
    for kind in (ScheduleGPipe, Schedule1F1B):
        model = ParallelModule(directory, dict(plain().named_parameters()))
        pipeline = model.to_pipeline_stages()
        schedule = kind(pipeline.stages[0], pipeline.microbatches, pipeline.loss_fn)
        with pytest.raises(BatchError, match="does not divide into the 4 microbatches"):
            pipeline.inputs(x[:6], target[:6])
        for seed in (1, 2):
            x, target = data(8, seed=seed)
            serial = plain()
            wanted = serial(x, target)["loss"]
            wanted.backward()
            model.zero_grad()
            losses: list[Tensor] = []
            schedule.step(**pipeline.inputs(x, target), losses=losses)
            gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            assert len(gradients) == sum(p.numel() > 0 for p in model.parameters())
            expected = {name: p.grad for name, p in serial.named_parameters() if p.grad is not None}
            found = errors.setdefault(kind.__name__, [])
            found.append(_errors(gradients, expected))
            found += [float((torch.stack(losses).mean() - wanted).abs())] if losses else []
    return errors


class Chain(nn.Module):
    """Layers with a loss; ``skip``: the first layer's output is added to the last's."""

    def __init__(self, skip: bool = False) -> None:
        super().__init__()
        self.skip = skip
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        kept = x = torch.tanh(self.layers[0](x))
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x))
        return {"loss": (x + kept if self.skip else x).square().mean()}


def planned(skip: bool = False, **limits: Any) -> tuple[Chain, Program, Plan, Tensor]:
    torch.manual_seed(0)
    model, x = Chain(skip).double(), torch.randn(8, WIDTH, dtype=torch.float64)
    program = capture(model, (x,), check_eval=False)
    limits = {"pp": 2, "tp": 1, "microbatches": MICROBATCHES, "recompute": "none", "meshes": "equal", **limits}
    return model, program, make_plan(program, ideal(2 * limits.get("dp", 1)), **limits), x


def _from_plan() -> float:
    """The largest difference of gradients from the model's in one process, from the plan without a folder."""
    model, program, plan, x = planned()
    pipeline = plan.to_pipeline_stages(program, {name: p.clone() for name, p in model.named_parameters()})
    schedule = Schedule1F1B(pipeline.stages[0], pipeline.microbatches, pipeline.loss_fn)
    schedule.step(**pipeline.inputs(x), losses=[])
    model(x)["loss"].backward()
    wanted = {f"module.{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    found = {name: p.grad for name, p in pipeline.stages[0].submod.named_parameters() if p.grad is not None}
    return _errors(found, wanted)


def test_a_plan_gives_its_stages() -> None:
    assert max(launch(_from_plan, 2)) < 1e-12


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"dp": 2}, "it has replicas"),
        ({"schedule": "interleaved"}, "a rank runs several stages"),
        ({"skip": True, "pp": 3}, "not to the next one alone"),
    ],
)
def test_plans_that_are_no_chain_say_why(limits: dict[str, Any], reason: str) -> None:
    if limits.get("pp") == 3:
        model, x = Chain(skip=True), torch.randn(8, WIDTH)
        program = capture(model, (x,), check_eval=False)
        pins = {f"layers.{layer}": stage for layer, stage in ((0, 0), (2, 1), (3, 2))}
        plan = make_plan(program, ideal(3), pp=3, tp=1, microbatches=4, recompute="none", pins=pins)
    else:
        model, program, plan, _ = planned(**limits)
    with pytest.raises(PlanError, match=f"no linear pipeline.*{reason}"):
        plan.to_pipeline_stages(program, model)


def test_torch_schedules_equal_the_plain_model(tmp_path: Path) -> None:
    emit(tmp_path, cuts=2, microbatches=MICROBATCHES)
    first, last = launch(_steps, 2, str(tmp_path))
    for found in (first, last):
        assert set(found) == {"ScheduleGPipe", "Schedule1F1B"}
        assert max(max(errors) for errors in found.values()) < 1e-12
    assert [len(errors) for errors in first.values()] == [2, 2]
    assert [len(errors) for errors in last.values()] == [4, 4]


def _captured(directory: str) -> float:
    """The largest difference of gradients from those of the program's own schedule, whose dropout draws alike."""
    loaded = load_model(SPEC, meta=False, dtype=torch.float64)
    own, other = (
        ParallelModule(directory, {n: p.clone() for n, p in loaded.model.named_parameters()}, seed=3) for _ in range(2)
    )
    pipeline = other.to_pipeline_stages()
    schedule = Schedule1F1B(pipeline.stages[0], pipeline.microbatches, pipeline.loss_fn)
    own(*loaded.args, **loaded.kwargs).loss.backward()
    schedule.step(**pipeline.inputs(*loaded.args, **loaded.kwargs), losses=[])
    wanted = {name: p.grad for name, p in own.named_parameters() if p.grad is not None}
    return _errors({name: p.grad for name, p in other.named_parameters() if p.grad is not None}, wanted)


def test_dropout_and_recomputed_layers_draw_as_under_the_own_schedule(tmp_path: Path) -> None:
    loaded = load_model(SPEC, meta=False, dtype=torch.float64)
    program = capture(loaded.model, loaded.args, loaded.kwargs, check_eval=False)
    compiled = compile_program(program, pp=2, microbatches=2, recompute=True)
    compiled.emitted.save(tmp_path)
    sources = "".join(path.read_text() for path in tmp_path.glob("stage_*.py"))
    assert "checkpoint(" in sources and "mesh.random" in sources
    assert max(launch(_captured, 2, str(tmp_path))) < 1e-12


@pytest.mark.parametrize(
    ("options", "stages", "reason"),
    [
        ({"cuts": 1}, (0,), "one stage"),
        ({"cuts": 2}, (0, 1), "a rank runs several stages"),
        ({"cuts": 2, "dp": 2}, (0,), "it has replicas"),
        ({"cuts": 2, "user_loss": True}, (0,), "loss is computed outside"),
        ({"cuts": 2, "tied": True}, (0,), "first.weight is on the stages 0, 1"),
        ({"cuts": 3, "skip": True}, (0,), "a goes from stage 0 to 1, 2, not to the next one alone"),
    ],
)
def test_programs_that_are_no_chain_say_why(
    options: dict[str, int], stages: tuple[int, ...], reason: str, tmp_path: Path
) -> None:
    emit(tmp_path, **options)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=f"no linear pipeline.*{reason}"):
        check_linear(Manifest.load(tmp_path), stages, options.get("dp", 1))


def test_what_torch_would_do_twice_or_not_at_all(tmp_path: Path) -> None:
    emit(tmp_path, cuts=2)
    manifest = Manifest.load(tmp_path)
    check_linear(manifest, (0,), 1)
    first, *others = manifest.parameters
    (value,) = manifest.values
    for changed, reason in (
        ({"parameters": (replace(first, mutated=True), *others)}, "updated by the forward"),
        ({"parameters": (replace(first, placements=("B",)), *others)}, "partial gradients"),
        ({"values": (replace(value, needs_grad=False),)}, "no gradient"),
        ({"precision": "fp16-mixed"}, "float16"),
    ):
        with pytest.raises(PlanError, match=reason):
            check_linear(replace(manifest, **changed), (0,), 1)
