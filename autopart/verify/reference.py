"""The plain model, trained in this process on the batch that the parallel program gets."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from autopart.precision import eager_in_float64
from autopart.runtime.inputs import Division, check, microbatch_of
from autopart.runtime.manifest import Manifest
from autopart.runtime.structure import flatten, rebuild
from autopart.runtime.written_buffers import set_values
from autopart.verify.errors import VerifyError
from autopart.verify.rank import adamw, loss_of
from autopart.verify.subject import Subject

_BATCH_STATISTICS = "batch norm's statistics"


@dataclass(slots=True)
class Reference:
    """losses: of each step. gradients: after the first step; state: parameters and buffers after the last; by name."""

    losses: list[float]
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]


def divide(manifest: Manifest, subject: Subject) -> Division:
    """How the program divides the batch; the plain model is given the same pieces where batch norm asks for it."""
    leaves = {**{spec.name: spec.constant for spec in manifest.inputs if spec.kind != "tensor"}, **subject.tensors}
    replicas = dict(manifest.stages[0].mesh).get("dp", 1)
    batch = check(manifest, leaves)
    if not manifest.is_uniform:
        if any(note.startswith(_BATCH_STATISTICS) for note in manifest.notes):
            raise VerifyError(
                "stages have unlike replicas, so no pieces of the batch have the statistics that all of the model's "
                "batch norms take; give all stages the same mesh"
            )
        return Division(batch, 1, 0, 1)
    if batch % (replicas * manifest.microbatches):
        raise VerifyError(
            f"the batch of {batch} samples does not divide into {manifest.microbatches} microbatches on {replicas} "
            f"replicas; give a multiple of {replicas * manifest.microbatches}"
        )
    return Division(batch, replicas, 0, manifest.microbatches)


def train_reference(
    subject: Subject, manifest: Manifest, division: Division, steps: int, learning_rate: float
) -> Reference:
    """Trains the plain model in this process. Replica by replica, microbatch by microbatch, where pieces are asked.

    Where the program's gradients are those of the batch before, each is applied one step late (PipeDream-2BW, arXiv
    2006.09503, section 3.1): W(t+1) = W(t) - lr * grad(W(t-1)), and the last after the last step.
    """
    once = {spec.name: spec.combine for spec in manifest.parameters if spec.once}
    in_pieces = any(note.startswith(_BATCH_STATISTICS) for note in manifest.notes)
    specs = [spec for spec in manifest.inputs if spec.kind == "tensor"]
    pieces: list[dict[str, Any]] = [subject.leaves]
    if in_pieces:
        pieces = [
            {
                **subject.leaves,
                **microbatch_of(specs, subject.leaves, replace(division, replica=replica), k, torch.device("cpu")),
            }
            for replica in range(division.replicas)
            for k in range(division.microbatches)
        ]
    model = subject.model
    initial = copy.deepcopy(model.state_dict())
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = adamw(parameters, learning_rate)
    result = Reference([], {}, {})
    waiting: list[Tensor | None] = [None] * len(parameters)

    def update(gradients: list[Tensor | None]) -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()

    with eager_in_float64(model):
        for step in range(steps):
            losses = []
            before = {name: buffer.clone() for name, buffer in model.named_buffers() if name in once}
            sums: dict[str, Tensor] = {}
            for piece in pieces:
                set_values([model.get_buffer(name) for name in before], [*before.values()])
                outputs = flatten(subject.call(**rebuild(subject.structure, piece)))[0]
                losses.append(loss_of(outputs, manifest.loss))
                for name, old in before.items():
                    if once[name] == "added":
                        new = model.get_buffer(name).detach()
                        sums[name] = sums.get(name, old.clone()) + new - old
            set_values([model.get_buffer(name) for name in sums], [*sums.values()])
            loss = torch.stack(losses).mean()
            if not loss.requires_grad:
                raise VerifyError("the loss depends on no trainable parameter, so there are no gradients to compare")
            loss.backward()
            result.losses.append(loss.item())
            if step == 0:
                named = model.named_parameters()
                result.gradients = {name: p.grad.clone() for name, p in named if p.grad is not None}
            made = [parameter.grad for parameter in parameters]
            update(waiting if manifest.delays_gradients else made)
            waiting = made
    if manifest.delays_gradients:
        update(waiting)
    if not all(map(math.isfinite, result.losses)):
        raise VerifyError(f"the plain model's losses are not finite: {result.losses}; give other inputs")
    statistics = {spec.name for spec in manifest.parameters if spec.mutated} - {*once}
    ignored = statistics if division.replicas > 1 else set()
    if in_pieces:  # whether a sum over the batch is one or a mean does not show in the pieces' values
        ignored |= {name for name, combine in once.items() if combine == "sum"}
    members = [*model.named_parameters(), *model.named_buffers()]
    result.state = {name: tensor.detach().clone() for name, tensor in members if name not in ignored}
    # The copy is left as it came, so that it may be compared again.
    model.load_state_dict(initial)
    model.zero_grad()
    return result
