"""Programs with unlike meshes as users call them: outputs, norms, states, checkpoints, unlike parts, late gradients."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from chains import subject_of
from torch import Tensor
from unlike_cases import CASES, Mesh, divided, with_meshes

import autopart
from autopart.passes.emit.program import Emitted
from autopart.precision import eager_in_float64
from autopart.realize import realize
from autopart.runtime import checkpoint
from autopart.runtime.errors import BatchError
from autopart.runtime.placement import Placement
from autopart.runtime.resharding import Side, backward_messages, forward_messages
from autopart.verify import Subject
from autopart.weights import load_weights, save_weights
from launch import launch

BATCH = 8
ODD = 5
"""Samples that neither the parts 3:1 nor two microbatches divide."""


def put(emitted: Emitted, subject: Subject, folder: Path) -> None:
    """What the ranks read: the program, and the model's weights."""
    emitted.save(folder / "program")
    members = [*subject.model.named_parameters(), *subject.model.named_buffers()]
    torch.save({name: tensor.detach() for name, tensor in members}, folder / "weights.pt")


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
    odd = []
    for samples in (ODD, 1):
        outputs_of_few = model(**{name: tensor[:samples] for name, tensor in batch.items()})
        outputs_of_few["loss"].backward()
        odd += [outputs_of_few["loss"].detach(), outputs_of_few["logits"].detach(), model.clip_grad_norm_(0.1)]
        optimizer.zero_grad()
    model.batch = "local"
    with pytest.raises(BatchError) as error:
        model(**batch)
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
        "refused": str(error.value),
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
        odd = []
        for samples in (ODD, 1):
            model.zero_grad()
            found = model(**{name: tensor[:samples] for name, tensor in batch.items()})
            found["loss"].backward()
            odd += [found["loss"].detach(), found["logits"].detach()]
            odd.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    return {"outputs": outputs, "evaluated": evaluated, "norm": norm, "state": state, "odd": odd}


@pytest.mark.parametrize("level", [0, 3])
def test_what_users_call(level: int, tmp_path: Path) -> None:
    """level: what the replicas divide of their stage's parameters."""
    subject, analysis = subject_of("gpt2")
    emitted = realize(subject.program, divided("gpt2", "dp2-1", level), analysis)
    put(emitted, subject, tmp_path)
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
            atol = 1e-9 if plain_odd.dim() else 0.0  # logits; loss and norm
            torch.testing.assert_close(found_odd.double(), plain_odd.double(), rtol=1e-9, atol=atol)
        assert "global" in item["refused"]
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
    put(realize(subject.program, plan, analysis), subject, tmp_path)
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
    put(realize(subject.program, with_meshes("gpt2", *CASES[case], schedule="2bw"), analysis), subject, tmp_path)
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
