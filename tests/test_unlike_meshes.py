"""Stages with unlike meshes: what crosses is cut into overlapping pieces, and training equals the single process."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from chains import chain_of, subject_of
from torch import Tensor

import autopart
import autopart.verify
from autopart.passes.emit.program import Emitted
from autopart.plan import Plan, StagePlan
from autopart.planner import make_plan
from autopart.precision import eager_in_float64
from autopart.realize import realize
from autopart.runtime import checkpoint
from autopart.runtime.errors import BatchError, PlanError
from autopart.runtime.placement import REPLICATE, Placement, shard, take_share
from autopart.runtime.resharding import Message, Side, backward_messages, forward_messages, local_shape, rows_of
from autopart.verify import Subject, compare_emitted
from autopart.weights import load_weights, save_weights
from clusters import ideal
from launch import launch, run_kept_job

# --- Pieces ---

SHAPE = ("b", 4, 6)
BATCH = 8


def side(first: int, samples: tuple[int, ...], *axes: tuple[Placement, int]) -> Side:
    sizes = tuple(size for _, size in axes)
    count = len(samples) * math.prod(sizes)
    return Side(tuple(range(first, first + count)), samples, sizes, tuple(placement for placement, _ in axes))


SIDES = {
    "one": side(0, (8,)),
    "dp2": side(0, (4, 4)),
    "dp3:1": side(0, (6, 2)),
    "dp4": side(0, (2,) * 4),
    "tp2": side(0, (8,), (REPLICATE, 2)),
    "tp2 split": side(0, (8,), (shard(1), 2)),
    "tp2 blocks": side(0, (8,), (shard(2, 3), 2)),
    "tp3 split": side(0, (8,), (shard(2), 3)),
    "dp2 tp2": side(0, (4, 4), (shard(2), 2)),
    "dp2 2x2": side(0, (4, 4), (shard(1), 2), (REPLICATE, 2)),
}


def moved(found: Side, by: int) -> Side:
    return replace(found, ranks=tuple(rank + by for rank in found.ranks))


def share_of(value: Tensor, found: Side, rank: int) -> Tensor:
    width = math.prod(found.sizes)
    replica, position = divmod(found.ranks.index(rank), width)
    start = sum(found.samples[:replica])
    coordinates = list(itertools.product(*map(range, found.sizes)))[position]
    return take_share(value[start : start + found.samples[replica]], found.placements, found.sizes, coordinates)


def carry(messages: tuple[Message, ...], have: dict[int, Tensor], target: Side) -> dict[int, Tensor]:
    made = {rank: torch.zeros(local_shape(SHAPE, target, rank), dtype=torch.float64) for rank in target.ranks}
    for message in messages:
        made[message.target][message.put] += have[message.source][message.take]
    return made


@pytest.mark.parametrize("target", SIDES)
@pytest.mark.parametrize("source", SIDES)
def test_pieces_make_every_share(source: str, target: str) -> None:
    """Forward and back, and no element is sent twice to one rank."""
    here, there = SIDES[source], moved(SIDES[target], 100)
    value = torch.arange(8 * 4 * 6, dtype=torch.float64).reshape(8, 4, 6) + 1
    messages = forward_messages(SHAPE, 0, here, there)
    made = carry(messages, {rank: share_of(value, here, rank) for rank in here.ranks}, there)
    for rank in there.ranks:
        assert torch.equal(made[rank], share_of(value, there, rank))
        assert sum(math.prod(m.shape) for m in messages if m.target == rank) == made[rank].numel()
    back = carry(backward_messages(SHAPE, 0, here, there), made, here)
    assert all(torch.equal(back[rank], share_of(value, here, rank)) for rank in here.ranks)


@pytest.mark.parametrize("target", ["one", "dp2", "dp4", "dp2 tp2"])
@pytest.mark.parametrize("source", ["one", "dp2", "tp2 split", "dp4"])
def test_gradients_of_what_has_no_samples_add_up(source: str, target: str) -> None:
    """Each replica has a part of the gradient; the copies' gradients add up to the sum of all parts."""
    here, there = SIDES[source], moved(SIDES[target], 100)
    shape = (4, 6)
    parts = torch.arange(len(there.samples) * 24, dtype=torch.float64).reshape(len(there.samples), 4, 6) + 1
    width = math.prod(there.sizes)
    inner = replace(there, placements=tuple(_lower(p) for p in there.placements))
    outer = replace(here, placements=tuple(_lower(p) for p in here.placements))

    def cut(value: Tensor, found: Side, position: int) -> Tensor:
        coordinates = list(itertools.product(*map(range, found.sizes)))[position % math.prod(found.sizes)]
        return take_share(value, found.placements, found.sizes, coordinates)

    have = {rank: cut(parts[index // width], inner, index) for index, rank in enumerate(inner.ranks)}
    made = {rank: torch.zeros(local_shape(shape, outer, rank), dtype=torch.float64) for rank in outer.ranks}
    for message in backward_messages(shape, None, outer, inner):
        made[message.target][message.put] += have[message.source][message.take]
    own = math.prod(outer.sizes)
    for position in range(own):
        total = torch.stack([made[rank] for index, rank in enumerate(outer.ranks) if index % own == position]).sum(0)
        assert torch.equal(total, cut(parts.sum(0), outer, position))


def _lower(placement: Placement) -> Placement:
    return shard(placement.dim - 1, placement.outer) if placement.is_shard else placement


# --- Training ---

Mesh = tuple[int, int]  # replicas, tensor ranks
MODELS = ("gpt2", "unet")
CASES: dict[str, tuple[tuple[Mesh, ...], tuple[int, ...]]] = {
    "dp2-1": (((2, 1), (1, 1)), ()),
    "1-dp2": (((1, 1), (2, 1)), ()),
    "tp2-1": (((1, 2), (1, 1)), ()),
    "1-tp2": (((1, 1), (1, 2)), ()),
    "dp2-tp2": (((2, 1), (1, 2)), ()),
    "dp2-1-1": (((2, 1), (1, 1), (1, 1)), ()),
    "1-dp2-1": (((1, 1), (2, 1), (1, 1)), ()),
    "shares 3:1": (((2, 1), (1, 1)), (3, 1)),
}


@functools.lru_cache(maxsize=2)
def tensor_plan(name: str) -> Plan:
    subject, analysis = subject_of(name)
    return make_plan(subject.program, ideal(2), pp=1, dp=1, tp=2, microbatches=2, batch=8, analysis=analysis)


def with_meshes(
    name: str,
    meshes: tuple[Mesh, ...],
    shares: tuple[int, ...] = (),
    places: tuple[int, ...] = (),
    schedule: str = "1f1b",
) -> Plan:
    """A chain of stages on these meshes; the replicas of the first rank of the pipeline have these parts.

    places: the rank of the pipeline of each stage, ``meshes`` by rank; empty: each stage has its own.
    """
    places = places or tuple(range(len(meshes)))
    plan = chain_of(name, len(places), microbatches=2)
    starts = list(itertools.accumulate((dp * tp for dp, tp in meshes), initial=0))
    stages: list[StagePlan] = []
    for stage, place in zip(plan.stages, places, strict=True):
        dp, tp = meshes[place]
        sharded = tensor_plan(name) if tp > 1 else None
        stages.append(
            replace(
                stage,
                devices=tuple(range(starts[place], starts[place + 1])),
                mesh=(("dp", dp), ("tp", tp)),
                shares=() if place else shares,
                strategies=sharded.strategies if sharded else {},
                storage=sharded.storage if sharded else {},
            )
        )
    return replace(plan, stages=tuple(stages), schedule=schedule)


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


DIVIDED: dict[str, tuple[tuple[Mesh, ...], tuple[int, ...], tuple[int, ...], str]] = {
    "dp2-1": (((2, 1), (1, 1)), (3, 1), (), "1f1b"),
    "1-dp2": (((1, 1), (2, 1)), (), (), "1f1b"),
    "dp2-1-1": (((2, 1), (1, 1), (1, 1)), (), (), "1f1b"),
    "zb-h1 dp2-1": (((2, 1), (1, 1)), (), (), "zb-h1"),
    "interleaved dp2-1": (((2, 1), (1, 1)), (), (0, 1, 0, 1), "interleaved"),
}
QUICK_DIVIDED = {("gpt2", "dp2-1", 3), ("gpt2", "1-dp2", 1)}


def divided(name: str, case: str, level: int) -> Plan:
    """All parameters of one stage whose first size is even are divided between that stage's replicas."""
    subject, analysis = subject_of(name)
    plan = with_meshes(name, *DIVIDED[case])
    several = {s.name for s in realize(subject.program, plan, analysis).manifest.parameters if len(s.stages) > 1}
    can = [i.name for i in subject.program.parameters if i.name not in several and i.shape and i.shape[0] % 2 == 0]
    return replace(plan, zero=dict.fromkeys(can, level))


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


# --- What users call ---

ODD = 5
"""Samples that neither the parts 3:1 nor two microbatches divide."""


def as_users_do(directory: str, folder: str, batch: dict[str, Tensor]) -> dict[str, Any]:
    """On each rank: outputs with and without gradients, the norm, bytes sent, the state, a checkpoint, refusals."""
    weights = torch.load(Path(folder) / "weights.pt")
    model = autopart.load(directory, weights, outputs="all").train()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.traffic.reset()
    outputs = model(**batch)
    outputs["loss"].backward()
    sent = {key[2]: count.bytes for key, count in model.traffic.counts().items() if key[:2] == ("send", "stage")}
    norm = model.clip_grad_norm_(0.1)
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        evaluated = model(**batch)
    loss = model(**{name: tensor[:ODD] for name, tensor in batch.items()})["loss"]
    loss.backward()
    odd = loss.detach(), model.clip_grad_norm_(0.1)
    optimizer.zero_grad()
    refused = {}
    for key, wrong in (("few", {name: tensor[:1] for name, tensor in batch.items()}), ("local", batch)):
        model.batch = "local" if key == "local" else "global"
        with pytest.raises(BatchError) as error:
            model(**wrong)
        refused[key] = str(error.value)
    checkpoint.save(Path(folder) / "saved", model, optimizer, step=1)
    save_weights(Path(folder) / "weights", model)
    state = model.state_dict()
    model.load_state_dict({name: tensor * 0 for name, tensor in state.items()})
    again = model.state_dict()
    return {
        "outputs": {name: tensor.detach() for name, tensor in outputs.items()},
        "evaluated": evaluated,
        "norm": norm,
        "sent": sent,
        "state": state,
        "zeros": all(not tensor.any() for tensor in again.values()),
        "odd": odd,
        "refused": refused,
    }


def plain_run(subject: Subject, batch: dict[str, Tensor]) -> dict[str, Any]:
    model = copy.deepcopy(subject.model).train()
    with eager_in_float64(model):
        outputs = model(**batch)
        outputs["loss"].backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        torch.optim.SGD(model.parameters(), 0.1).step()
        with torch.no_grad():
            evaluated = model(**batch)
        model.zero_grad()
        odd = model(**{name: tensor[:ODD] for name, tensor in batch.items()})["loss"]
        odd.backward()
        odd_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    odds = odd.detach(), odd_norm
    return {"outputs": outputs, "evaluated": evaluated, "norm": norm, "state": state, "odd": odds}


@pytest.mark.parametrize("level", [0, 3])
def test_what_users_call(level: int, tmp_path: Path) -> None:
    """level: what the replicas divide of their stage's parameters."""
    subject, analysis = subject_of("gpt2")
    emitted = realize(subject.program, divided("gpt2", "dp2-1", level), analysis)
    emitted.save(tmp_path / "program")
    members = [*subject.model.named_parameters(), *subject.model.named_buffers()]
    torch.save({name: tensor.detach() for name, tensor in members}, tmp_path / "weights.pt")
    batch = dict(subject.tensors)
    plain = plain_run(subject, batch)
    found = launch(as_users_do, 3, str(tmp_path / "program"), str(tmp_path), batch, timeout=300)
    for rank, item in enumerate(found):
        for key in ("loss", "logits"):
            torch.testing.assert_close(item["outputs"][key], plain["outputs"][key].detach(), rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(item["evaluated"][key], plain["evaluated"][key], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(item["norm"].double(), plain["norm"].double(), rtol=1e-9, atol=0.0)
        for name, tensor in item["state"].items():
            torch.testing.assert_close(tensor, plain["state"][name], rtol=1e-8, atol=1e-8, msg=name)
        assert item["zeros"]
        for found_odd, plain_odd in zip(item["odd"], plain["odd"], strict=True):
            torch.testing.assert_close(found_odd.double(), plain_odd.double(), rtol=1e-9, atol=0.0)
        assert "pass at least 2" in item["refused"]["few"] and "global" in item["refused"]["local"]
        for phase in ("forward", "backward"):
            assert item["sent"].get(phase, 0) == sent_bytes(emitted, rank, phase), (rank, phase)
    written = copy.deepcopy(subject.model)
    load_weights(tmp_path / "weights", written)
    for name, tensor in written.state_dict().items():
        torch.testing.assert_close(tensor, plain["state"][name], rtol=1e-8, atol=1e-8, msg=name)
    again = copy.deepcopy(subject.model)
    checkpoint.load(tmp_path / "saved", again, strict=False)
    for name, tensor in again.state_dict().items():
        torch.testing.assert_close(tensor, plain["state"][name], rtol=1e-8, atol=1e-8, msg=name)


def fed_by_their_parts(directory: str, folder: str, batch: dict[str, Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Each replica passes its own run of the batch; then a smaller one, then parts that are not the shares."""
    model = autopart.load(directory, torch.load(Path(folder) / "weights.pt"), batch="local", outputs="all").train()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = []
    assert model.data_shares == (3, 1) and model.data_world_size == 2
    for total in (BATCH, BATCH // 2):
        ends = [0, total * 3 // 4, total]
        first, last = ends[model.data_rank], ends[model.data_rank + 1]
        outputs = model(**{name: tensor[first:last] for name, tensor in batch.items()})
        outputs["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [outputs["loss"].detach(), outputs["logits"].detach()]
    with pytest.raises(BatchError, match=r"pass 3:1 of each batch .*such as 6, 2 samples; found 4, 4"):
        model(**{name: tensor[:4] for name, tensor in batch.items()})
    return found, model.state_dict()


@pytest.mark.parametrize("meshes", [((2, 1),), pytest.param(((2, 1), (2, 1)), marks=pytest.mark.slow)])
def test_replicas_of_unlike_shares_are_fed_their_parts(meshes: tuple[Mesh, ...], tmp_path: Path) -> None:
    subject, analysis = subject_of("gpt2")
    plan = with_meshes("gpt2", meshes)
    plan = replace(plan, stages=tuple(replace(stage, shares=(3, 1)) for stage in plan.stages))
    realize(subject.program, plan, analysis).save(tmp_path / "program")
    members = [*subject.model.named_parameters(), *subject.model.named_buffers()]
    torch.save({name: tensor.detach() for name, tensor in members}, tmp_path / "weights.pt")
    model, batch = copy.deepcopy(subject.model).train(), dict(subject.tensors)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    expected = []
    with eager_in_float64(model):
        for total in (BATCH, BATCH // 2):
            outputs = model(**{name: tensor[:total] for name, tensor in batch.items()})
            outputs["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            expected += [outputs["loss"].detach(), outputs["logits"].detach()]
    for found, state in launch(fed_by_their_parts, 2 * len(meshes), str(tmp_path / "program"), str(tmp_path), batch):
        for own, plain in zip(found, expected, strict=True):
            torch.testing.assert_close(own, plain, rtol=1e-9, atol=1e-9)
        for name, tensor in state.items():
            torch.testing.assert_close(tensor, model.state_dict()[name], rtol=1e-8, atol=1e-8, msg=name)


def train_late(directory: str, folder: str, batch: dict[str, Tensor]) -> tuple[list[float], dict[str, Tensor], int]:
    model = autopart.load(directory, torch.load(Path(folder) / "weights.pt")).train()
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    losses = []
    for turn in range(3):
        loss = model(**{name: tensor.roll(turn, 1) for name, tensor in batch.items()})["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    loss = model.finish()["loss"]
    loss.backward()
    optimizer.step()
    assert model._buffer is not None
    return [*losses[1:], loss.item()], model.state_dict(), model._buffer.most_versions


@pytest.mark.parametrize("case", [pytest.param("dp2-1", marks=pytest.mark.slow), "1-dp2", "shares 3:1"])
def test_2bw_equals_gradients_applied_one_step_late(case: str, tmp_path: Path) -> None:
    """W(t+1) = W(t) - lr grad(W(t-1)) in one process."""
    subject, analysis = subject_of("gpt2")
    realize(subject.program, with_meshes("gpt2", *CASES[case], schedule="2bw"), analysis).save(tmp_path / "program")
    members = [*subject.model.named_parameters(), *subject.model.named_buffers()]
    torch.save({name: tensor.detach() for name, tensor in members}, tmp_path / "weights.pt")
    model, batch = copy.deepcopy(subject.model).train(), dict(subject.tensors)
    parameters, waiting, losses = list(model.parameters()), None, []

    def apply(gradients: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.sub_(gradient, alpha=0.3)

    with eager_in_float64(model):
        for turn in range(3):
            loss = model(**{name: tensor.roll(turn, 1) for name, tensor in batch.items()})["loss"]
            made = torch.autograd.grad(loss, parameters)
            losses.append(loss.item())
            if waiting is not None:
                apply(waiting)
            waiting = made
    assert waiting is not None
    apply(waiting)
    for found, state, versions in launch(train_late, 3, str(tmp_path / "program"), str(tmp_path), batch):
        assert found == pytest.approx(losses, rel=1e-9) and versions <= 2
        for name, tensor in state.items():
            torch.testing.assert_close(tensor, model.state_dict()[name], rtol=1e-8, atol=1e-8, msg=name)


def sent_bytes(emitted: Emitted, rank: int, phase: str) -> int:
    """What a rank has to send in a step, by the shapes alone: the pieces that the other stage needs, once each."""
    manifest, total = emitted.manifest, 0
    samples = BATCH // manifest.microbatches
    for value in manifest.values:
        sides = []
        for stage, placements in ((value.source, value.placements), (value.targets[0], value.arrivals[0])):
            spec = manifest.stages[stage]
            parts = tuple(samples * share // sum(spec.replica_shares) for share in spec.replica_shares)
            sizes = tuple(size for _, size in spec.mesh[1:])
            sides.append(Side(spec.devices, parts, sizes, tuple(map(Placement.parse, placements))))
        if phase == "backward" and not value.needs_grad:
            continue
        make = forward_messages if phase == "forward" else backward_messages
        width = torch.empty((), dtype=getattr(torch, value.dtype)).element_size()
        found = make(value.whole, value.batch_dim, *sides)
        total += sum(math.prod(m.shape) for m in found if m.source == rank) * width
    return total * manifest.microbatches


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


@pytest.mark.parametrize("shares", [(1,), (3, 1), (3, 3, 2), (1, 1, 1, 1), (5, 1), (22, 21, 21)])
def test_whole_rows(shares: tuple[int, ...]) -> None:
    """The parts where they divide, else near them, none without a row."""
    for samples in range(len(shares), 3 * sum(shares)):
        rows = rows_of(samples, shares)
        assert sum(rows) == samples and min(rows) >= 1
        exact = [samples * share / sum(shares) for share in shares]
        if all(part.is_integer() for part in exact):
            assert list(rows) == exact
        if min(exact) >= 1:
            assert all(abs(row - part) < 1 for row, part in zip(rows, exact, strict=True))
