"""ZeRO-1, -2 and -3: equal to one process, shares of 1/dp in memory, and exactly the traffic that the plan counts."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopart.verify
from autopart.analysis import Analysis, analyze, fold
from autopart.api import load
from autopart.exchanges import exchanges
from autopart.passes.data_axis import data_dim
from autopart.plan import Plan
from autopart.planner import make_plan
from autopart.realize import realize, realized, recomputed
from autopart.runtime import checkpoint
from autopart.runtime.errors import PlanError
from autopart.runtime.executor import Run
from autopart.runtime.schedule import Action
from autopart.tracing import capture
from autopart.verify import Subject, compare_emitted, prepare
from clusters import ideal
from families import family
from launch import launch, run_kept_job


@functools.lru_cache(maxsize=2)
def subject_of(name: str) -> tuple[Subject, Analysis]:
    item = family(name)
    subject = prepare(item.build(), (), item.inputs(item.batch))
    return subject, analyze(subject.program)


def divided(analysis: Analysis, plan: Plan, level: int) -> Plan:
    """The plan with every parameter that can be at a level of ZeRO, and what it exchanges then."""
    found = realized(analysis, plan)
    levels = {
        info.name: level
        for info in analysis.program.parameters
        if data_dim(info, found.storage.get(info.name, ()), found.axes, plan.dp) is not None
    }
    plan = replace(plan, zero=fold(levels))
    samples = plan.batch // (plan.dp * plan.microbatches)
    found = realized(analysis, plan)
    counted = exchanges(analysis, found, plan.dp, samples, recomputed(plan, found.local), plan.bucket_bytes)
    stages = tuple(
        replace(stage, collectives=item.microbatch, step_collectives=item.step)
        for stage, item in zip(plan.stages, counted, strict=True)
    )
    return replace(plan, stages=stages)


def check(name: str, limits: Mapping[str, Any], level: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject, analysis = subject_of(name)
    devices = limits["pp"] * limits["dp"] * limits["tp"]
    plan = make_plan(subject.program, ideal(devices), batch=8, analysis=analysis, **limits)
    run(name, divided(analysis, plan, level), level, folder, monkeypatch)


def run(name: str, plan: Plan, level: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autopart.verify, "run_local_job", run_kept_job)
    subject, analysis = subject_of(name)
    assert set(plan.zero.values()) == {level}
    assert Plan.from_json(plan.to_json()) == plan
    realize(subject.program, plan, analysis).save(folder / "program")
    result = compare_emitted(folder / "program", subject, plan=plan)
    worst = sorted(result.groups, key=lambda group: -max(group.gradient or 0.0, group.parameter))[:3]
    assert result.equal, f"{result.loss_difference=} {worst}"
    assert all(stage.as_planned for stage in result.traffic), result.traffic


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("level", [1, 2, 3])
def test_replicas_equal_one_process(name: str, level: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"pp": 1, "dp": 2, "tp": 1, "microbatches": 2, "recompute": "none"}
    check(name, limits, level, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("level", "limits"),
    [
        (3, {"pp": 1, "dp": 2, "tp": 1, "microbatches": 2, "recompute": "full"}),
        pytest.param(2, {"pp": 1, "dp": 4, "tp": 1, "microbatches": 1, "recompute": "none"}, marks=pytest.mark.slow),
        (3, {"pp": 1, "dp": 4, "tp": 1, "microbatches": 1, "recompute": "none"}),
        (1, {"pp": 1, "dp": 2, "tp": 2, "microbatches": 1, "recompute": "none"}),
        pytest.param(3, {"pp": 1, "dp": 2, "tp": 2, "microbatches": 2, "recompute": "none"}, marks=pytest.mark.slow),
        pytest.param(2, {"pp": 2, "dp": 2, "tp": 1, "microbatches": 2, "recompute": "none"}, marks=pytest.mark.slow),
        (3, {"pp": 2, "dp": 2, "tp": 1, "microbatches": 2, "recompute": "none"}),
    ],
)
def test_other_meshes_equal_one_process(
    level: int, limits: Mapping[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check("gpt2", limits, level, tmp_path, monkeypatch)


def _split(level: int, schedule: str) -> Plan:
    subject, analysis = subject_of("gpt2")
    limits: dict[str, Any] = {"pp": 2, "dp": 2, "tp": 1, "microbatches": 2, "recompute": "none", "zero": level}
    return make_plan(subject.program, ideal(4), batch=8, analysis=analysis, schedule=schedule, **limits)


@pytest.mark.parametrize(
    ("level", "schedule"),
    [
        (1, "zb-h1"),
        *(pytest.param(level, "zb-h1", marks=pytest.mark.slow) for level in (2, 3)),
        *(pytest.param(level, "zb-v", marks=pytest.mark.slow) for level in (1, 2, 3)),
    ],
)
def test_split_backwards_equal_one_process(
    level: int, schedule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("gpt2", _split(level, schedule), level, tmp_path, monkeypatch)


def test_what_split_backwards_leave_for_w() -> None:
    """Level 1's gradients as whole ones; B sums those of levels 2 and 3, beside what it computes."""
    plans = [_split(level, "zb-h1").stages for level in (0, 1, 2, 3)]
    whole, first, *others = ([stage.weight_s for stage in stages] for stages in plans)
    assert first == pytest.approx(whole) and [seconds > 0.0 for seconds in first] == [False, True]
    assert not any(map(any, others)), "and the first stage hands on no gradients"
    assert all(stage.hidden_s.get("dp", 0.0) > 0.0 for stages in plans[2:] for stage in stages)


def test_modules_without_weights_run_again_by_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In layers whose weights are gathered; a module that reads one would keep it, and is refused."""
    subject, analysis = subject_of("gpt2")
    limits: dict[str, Any] = {"pp": 1, "dp": 2, "tp": 1, "microbatches": 2, "recompute": "none"}
    plan = make_plan(subject.program, ideal(2), batch=8, analysis=analysis, **limits)
    (stage,) = plan.stages
    layers = sorted({layer for layer in analysis.layers if layer})

    def again(module: str) -> Plan:
        own = replace(stage, recompute=tuple(f"{layer}.{module}" for layer in layers))
        return replace(plan, stages=(own,), recompute="some")

    run("gpt2", divided(analysis, again("mlp.act"), 3), 3, tmp_path, monkeypatch)
    with pytest.raises(PlanError, match="ZeRO level 3 and gathered by layer"):
        realize(subject.program, divided(analysis, again("mlp"), 3), analysis)


@pytest.mark.parametrize(
    ("level", "scheme", "tp"),
    [
        (3, "1d", (2,)),
        pytest.param(3, "2d", (2, 2), marks=pytest.mark.slow),
        pytest.param(1, "2d", (2, 2), marks=pytest.mark.slow),
        pytest.param(2, "2d", (2, 2), marks=pytest.mark.slow),
        pytest.param(1, "1d", (2,), marks=pytest.mark.slow),
        pytest.param(2, "1d", (2,), marks=pytest.mark.slow),
    ],
)
def test_schemes_of_tensor_axes_equal_one_process(
    level: int, scheme: str, tp: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two replicas of each scheme, as make_plan divides them: every matrix over both replicas and tensor axes."""
    subject, analysis = subject_of("gpt2-1")
    limits: dict[str, Any] = {"pp": 1, "dp": 2, "tp": tp, "tensor_scheme": scheme, "microbatches": 2, "zero": level}
    cluster = ideal(2 * math.prod(tp))
    plan = make_plan(subject.program, cluster, batch=8, analysis=analysis, recompute="none", **limits)
    assert not plan.notes
    assert divided(analysis, plan, level) == plan
    manifest = realize(subject.program, plan, analysis).manifest
    matrices = [spec for spec in manifest.parameters if len(spec.shape) > 1 and not spec.buffer]
    assert all(spec.zero == level and all(text[0] == "S" for text in spec.placements) for spec in matrices)
    run("gpt2-1", plan, level, tmp_path, monkeypatch)


# --- What one rank has in memory, and what a script does besides training ---


def emitted(name: str, level: int, folder: Path, bucket_bytes: int = 0, **limits: Any) -> Path:
    """A program of a family on two replicas (or ``limits``), everything divided. bucket_bytes: default, the plan's."""
    subject, analysis = subject_of(name)
    limits = {"pp": 1, "dp": 2, "tp": 1, "microbatches": 2, "recompute": "none", **limits}
    devices = limits["pp"] * limits["dp"] * limits["tp"]
    plan = make_plan(subject.program, ideal(devices), batch=8, analysis=analysis, **limits)
    plan = replace(plan, bucket_bytes=bucket_bytes or plan.bucket_bytes)
    plan = divided(analysis, plan, level) if level else plan
    target = folder / f"zero{level}"
    realize(subject.program, plan, analysis).save(target)
    return target


def train_a_little(directory: str) -> dict[str, Any]:
    """Bytes of one rank while it trains, and what the module's own methods give."""
    item = family("gpt2")
    original = item.build()
    whole = {name: tensor.clone() for name, tensor in original.state_dict().items()}
    user = list(original.parameters())
    model = load(directory, original).train()
    parameters = list(model.parameters())
    assert all(any(p is q for q in user) for p in parameters)
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    alive: list[int] = []
    gather = model.mesh.weights.gather

    def counting(*shares: Any) -> Any:
        found = gather(*shares)
        units = model.mesh.weights._units.values()
        alive.append(sum(unit.wholes is not None or unit.arriving is not None for unit in units))
        return found

    model.mesh.weights.gather = counting  # type: ignore[method-assign]
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, whole[name]), name
    norms = []
    for _ in range(3):
        model(**item.inputs(8)).loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, 0.2).item())
        norms.append(model.clip_grad_norm_(0.1).item())
        optimizer.step()
        gradients = sum(p.grad.nbytes for p in parameters if p.grad is not None)
        optimizer.zero_grad()
    with torch.no_grad():
        evaluated = model(**item.inputs(8)).loss.item()
    state = model.state_dict()
    model.load_state_dict(whole)
    again = model(**item.inputs(8)).loss.item()
    return {
        "norms": norms,
        "parameters": sum(p.nbytes for p in parameters),
        "storage": sum({p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in parameters}.values()),
        "gradients": gradients,
        "optimizer": sum(t.nbytes for s in optimizer.state.values() for t in s.values() if t.dim()),
        "alive": max(alive, default=0),
        "evaluated": evaluated,
        "state": {name: tensor.double().sum().item() for name, tensor in state.items()},
        "again": again,
        "held": [unit for unit in model.mesh.weights._units.values() if unit.wholes is not None],
    }


def test_a_rank_holds_its_share_and_nothing_else(tmp_path: Path) -> None:
    whole = launch(train_a_little, 2, str(emitted("gpt2", 0, tmp_path)))[0]
    for level in (1, 2, 3):
        for found in launch(train_a_little, 2, str(emitted("gpt2", level, tmp_path))):
            assert found["norms"] == pytest.approx(whole["norms"], rel=1e-9)
            assert found["evaluated"] == pytest.approx(whole["evaluated"], rel=1e-9)
            assert found["again"] == pytest.approx(whole["again"], rel=1e-12)
            assert found["state"] == pytest.approx(whole["state"], rel=1e-9, abs=1e-9)
            for kind in ("parameters", "gradients", "optimizer"):
                assert 2 * found[kind] == whole[kind], kind
            assert found["storage"] == (found["parameters"] if level == 3 else whole["parameters"])
            assert found["alive"] == (2 if level == 3 else 0)
            assert not found["held"]


def saved_and_loaded(folder: str, first: str, then: str, checkpoint_in: str) -> list[float]:
    """Losses after a checkpoint: of the program that wrote it, and of another one that read it."""
    item = family("gpt2")
    losses = []
    for directory, action in ((first, checkpoint.save), (then, checkpoint.load)):
        model = load(directory, item.build()).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if action is checkpoint.save:
            for _ in range(2):
                step(model, optimizer, item)
            checkpoint.save(checkpoint_in, model, optimizer)
        else:
            checkpoint.load(checkpoint_in, model, optimizer)
        losses += [step(model, optimizer, item) for _ in range(2)]
    return losses


def step(model: Any, optimizer: torch.optim.Optimizer, item: Any) -> float:
    loss = model(**item.inputs(8)).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


@pytest.mark.parametrize(("first", "then"), [((3, 2, 1), (0, 1, 2)), ((3, 2, 1), (1, 2, 1)), ((0, 1, 2), (3, 2, 1))])
def test_checkpoints_move_between_divisions(
    first: tuple[int, int, int], then: tuple[int, int, int], tmp_path: Path
) -> None:
    """(level, replicas, tensor ranks)"""
    programs = []
    for place, (level, dp, tp) in (("first", first), ("then", then)):
        programs.append(str(emitted("gpt2", level, tmp_path / place, dp=dp, tp=tp, microbatches=1)))
    for losses in launch(saved_and_loaded, 2, str(tmp_path), *programs, str(tmp_path / "saved")):
        assert losses[2:] == pytest.approx(losses[:2], rel=1e-9)
        assert losses[0] != pytest.approx(losses[1], rel=1e-3)


def there_before(directory: str) -> dict[str, bool]:
    """By kind of this rank's actions, when the first begins: whether all whole weights are there."""
    item, found = family("gpt2"), dict[str, bool]()
    model = load(directory, dict(item.build().state_dict()), device=torch.device("cpu")).train()
    do = Run.do

    def noted(self: Run, action: Action) -> None:
        weights = model.mesh.weights
        found.setdefault(action.work.name, not weights._stale and not weights._flying)
        do(self, action)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "do", noted)
        model(**item.inputs(item.batch))
    return found


@pytest.mark.parametrize("level", [1, 2])
def test_weights_arrive_while_a_stage_waits_for_others(level: int, tmp_path: Path) -> None:
    found = launch(there_before, 4, str(emitted("gpt2", level, tmp_path, pp=2)))
    # the first stage has them one after another, as its forward reads them
    assert [own["FORWARD"] for own in found[:2]] == [False, False]
    assert [own["RECV_ACTIVATION"] for own in found[2:]] == [True, True]


def sent_late(directory: str) -> tuple[list[bool], int]:
    """By statement of a second step: whether some of what it reads was not on its way before; and messages in all."""
    item = family("gpt2")
    model = load(directory, item.build()).train()
    weights = model.mesh.weights
    gather, found = weights.gather, list[bool]()

    def noted(*shares: Any) -> Any:
        found.append(any(weights._kept_of[id(share)] in weights._stale for share in shares))
        return gather(*shares)

    model(**item.inputs(8)).loss.backward()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "gather", noted)
        model(**item.inputs(8))
    return found, len(weights._kept)


@pytest.mark.parametrize("level", [1, 2])
def test_weights_of_the_next_layer_arrive_while_one_runs(level: int, tmp_path: Path) -> None:
    """However many messages it reads."""
    program = emitted("gpt2", level, tmp_path, bucket_bytes=4096, microbatches=1)
    for late, messages in launch(sent_late, 2, str(program)):
        assert messages > 3 * len(late) > 12
        assert not any(late[1:])


def freeze_some(directory: str) -> list[Any]:
    """Traffic and gradients where the user froze all but the last layer after the program was emitted."""
    item = family("gpt2")
    model = load(directory, item.build()).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("h.3." in name)
    model(**item.inputs(8)).loss.backward()
    scattered = model.traffic.get("reduce_scatter", "dp", "backward").calls
    return [scattered, sorted(n for n, p in model.named_parameters() if p.grad is not None)]


def test_frozen_weights_are_gathered_and_have_no_gradients(tmp_path: Path) -> None:
    for scattered, learned in launch(freeze_some, 2, str(emitted("gpt2", 3, tmp_path))):
        assert scattered == 2  # one unit, two microbatches
        assert len(learned) == 12 and all("h.3." in name for name in learned)


def step_too_early(directory: str) -> str:
    item = family("gpt2")
    model = load(directory, item.build()).train()
    found: dict[str, bool] = {}
    original = model.mesh.weights._unpack

    def unpack(saved: Any) -> Any:
        if not found:
            found["once"] = True
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(2.0)
        return original(saved)

    model.mesh.weights._unpack = unpack  # type: ignore[method-assign]
    try:
        model(**item.inputs(8))
    except RuntimeError as error:
        return str(error)
    return ""


class _Transformed(nn.Module):
    """Weights that are seen as complex numbers, conjugate in one place and negative in another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(16, 16, 2) / 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = torch.view_as_complex(x) @ torch.view_as_complex(self.first)
        turned = torch.view_as_complex(self.second).conj()
        return ((seen * seen) @ turned * torch.imag(turned).sum(0)).abs().square().mean()


class _Convolutions(nn.Module):
    """The first has no gradient to hand on, and autograd keeps its weight all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(4, 8, 3), nn.GELU(), nn.Conv2d(8, 8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


class _Pieces(nn.Module):
    """Of one weight two products keep a piece each, outside of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.randn(16, 8) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.both.chunk(2)
        return (torch.tanh(x @ first) @ second).square().mean()


class _FrozenNorm(nn.Module):
    """What nothing that is trained stands before has no backward, which would keep its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(8).requires_grad_(False), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x)).square().mean()


@pytest.mark.parametrize(
    ("model", "shape"),
    [(_Transformed, (8, 16, 2)), (_Convolutions, (8, 4, 8, 8)), (_Pieces, (8, 8)), (_FrozenNorm, (8, 8))],
    ids=["complex", "convolutions", "pieces", "frozen norm"],
)
def test_what_autograd_keeps_of_weights_is_gathered_again(
    model: type[nn.Module], shape: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autopart.verify, "run_local_job", run_kept_job)
    torch.manual_seed(0)
    subject = prepare(model(), (), {"x": torch.randn(shape)})
    limits: dict[str, Any] = {"pp": 1, "dp": 2, "tp": 1, "microbatches": 2, "zero": 3, "recompute": "none"}
    plan = make_plan(subject.program, ideal(2), batch=8, **limits)
    realize(subject.program, plan).save(tmp_path / "program")
    result = compare_emitted(tmp_path / "program", subject, plan=plan)
    assert result.equal, result.groups
    assert all(stage.as_planned for stage in result.traffic), result.traffic


def test_weights_that_change_under_the_backward_are_noticed(tmp_path: Path) -> None:
    for message in launch(step_too_early, 2, str(emitted("gpt2", 3, tmp_path))):
        assert "changed between its forward and its backward" in message


def test_plans_say_what_stays_whole() -> None:
    """Three replicas: 24 rows divide by three, 16 hidden columns and the scalar do not."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(16, 16, bias=False) for _ in range(2)])
            self.wide, self.scale = nn.Linear(16, 24, bias=False), nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            for layer in self.layers:
                x = x + layer(x)
            return {"loss": (self.scale * self.wide(x)).square().mean()}

    program = capture(Mixed(), (), {"x": torch.randn(3, 16)}, check_eval=False)
    limits: dict[str, Any] = {"pp": 1, "dp": 3, "tp": 1, "microbatches": 1}
    plan = make_plan(program, ideal(3), zero=3, **limits)
    assert plan.zero == {"wide.weight": 3}
    note = "zero=3 leaves these whole on all 3 replicas, as none of their sizes on a rank divides by 3: "
    assert plan.notes == (note + "scale (4 B), layers.*.weight (2 tensors, 2 KiB)",)
    assert not make_plan(program, ideal(3), zero=0, **limits).notes


def test_plans_say_where_a_level_is_wrong(tmp_path: Path) -> None:
    subject, analysis = subject_of("gpt2")
    plan = make_plan(subject.program, ideal(2), batch=8, analysis=analysis, pp=1, dp=2, tp=1)
    with pytest.raises(PlanError, match=r"zero\['wrong'\]: the model has no such parameter"):
        realize(subject.program, replace(plan, zero={"wrong": 3}), analysis)
    with pytest.raises(PlanError, match="one of 0, 1, 2, 3, found 4"):
        replace(plan, zero={"transformer.wte.weight": 4})
    text = plan.to_json().replace('"zero": {}', '"zero": {"transformer.wte.weight": "3"}')
    with pytest.raises(PlanError, match="zero: expected an object of whole numbers"):
        Plan.from_json(text)
