"""What one rank of a verification does: trains the emitted program and compares its own shares with the original's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autopart import models
from autopart.api import load
from autopart.passes.graph import may_have_gradient
from autopart.precision import in_float64
from autopart.runtime.loading import local_share
from autopart.runtime.manifest import Manifest, ParameterSpec
from autopart.runtime.module import ParallelModule
from autopart.runtime.structure import flatten

WEIGHTS, INPUTS, REFERENCE = "weights.pt", "inputs.pt", "reference.pt"


def train_and_compare(
    directory: str, job: str, steps: int, learning_rate: float, model_file: str, device: str = "cpu"
) -> dict[str, Any]:
    """Trains ``steps`` steps on the same batch. Every rank of the job calls it.

    directory: the emitted program. job: the folder with WEIGHTS (originals by name), INPUTS (leaves by path) and
    REFERENCE (the original's ``gradients`` after the first step and ``state`` after the last, by name). model_file: a
    user's file that defines custom ops or output classes, "" for none. device: on which this rank computes.

    Returns the rank's stages, its losses, the traffic of a step inside the stages, and the largest absolute difference
    of each of its own tensors: of the share that it holds, so that replicas and tied copies all count.
    """
    if model_file:
        models._import(Path(model_file))
    folder = Path(job)
    model = load(directory, _load(folder / WEIGHTS, device), device=torch.device(device)).train()
    leaves = _leaves(model.manifest, _load(folder / INPUTS, device))
    reference = _load(folder / REFERENCE, device)
    specs = {spec.name: spec for spec in model.manifest.parameters}
    own = {name: tensor for name, tensor in model.own_tensors().items() if name in specs}
    parameters = [tensor for tensor in own.values() if tensor.requires_grad]
    optimizer = adamw(parameters, learning_rate)
    losses: list[float] = []
    gradients: dict[str, float] = {}
    traffic: list[tuple[str, str, str, int, int]] = []
    late = model.manifest.delays_gradients
    calls: list[Callable[[], Any]] = [partial(model, **leaves)] * steps
    model.traffic.reset()
    for number, call in enumerate([*calls, model.finish] if late else calls):
        loss = loss_of(flatten(call())[0], model.manifest.loss)
        loss.backward()
        if late and number == 0:
            continue  # the loss of no batch, without gradients
        losses.append(loss.item())
        if len(losses) == 1:
            traffic = _traffic(model)
            for name, tensor in own.items():
                if tensor.requires_grad:
                    expected = _share(reference["gradients"].get(name), specs[name], model)
                    gradients[name] = _difference(tensor.grad, expected)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    if late:  # a step begins in one call and ends in the next
        traffic = _traffic(model, steps)
    # Read anew: a stage may assign a new tensor to a buffer that it updates.
    state = {
        name: _difference(tensor.detach(), _share(reference["state"][name], specs[name], model))
        for name, tensor in model.own_tensors().items()
        if name in reference["state"]
    }
    return {
        "stages": list(model.mesh.stages),
        "losses": losses,
        "gradients": gradients,
        "state": state,
        "traffic": traffic,
    }


def _traffic(model: ParallelModule, steps: int = 1) -> list[tuple[str, str, str, int, int]]:
    """Kind, axis, phase, calls and bytes of a step's collectives, of so many that were counted."""
    return [(*key, count.calls // steps, count.bytes // steps) for key, count in model.traffic.counts().items()]


def adamw(parameters: Sequence[Tensor], learning_rate: float) -> torch.optim.AdamW | None:
    """AdamW for the comparison; None where nothing is trained.

    With torch's eps of 1e-8 a gradient that is zero by mathematics (of a bias in front of a batch norm) moves its
    parameter by its rounding noise times ``learning_rate / eps``, 1e5, which is no difference between programs.
    """
    return torch.optim.AdamW(parameters, lr=learning_rate, eps=1e-4) if parameters else None


def loss_of(leaves: Mapping[str, Any], loss: str | None) -> Tensor:
    """The loss among a model's outputs; without one the sum of the outputs' mean squares, which reaches them all."""
    if loss is not None:
        found = leaves[loss]
        assert isinstance(found, Tensor)
        return found
    outputs = [leaf for leaf in leaves.values() if isinstance(leaf, Tensor) and may_have_gradient(leaf.dtype)]
    return torch.stack([leaf.abs().square().mean() for leaf in outputs]).sum()


def _leaves(manifest: Manifest, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    constants = {spec.name: spec.constant for spec in manifest.inputs if spec.kind != "tensor"}
    return {**constants, **tensors}


def _share(whole: Tensor | None, spec: ParameterSpec, model: ParallelModule) -> Tensor | None:
    return None if whole is None else local_share(whole, spec, model.mesh)


def _difference(found: Tensor | None, expected: Tensor | None) -> float:
    """The largest absolute difference; a missing gradient counts as zeros, and what is not a number as infinite."""
    present = [in_float64(item) for item in (found, expected) if item is not None and item.numel()]
    if not present:
        return 0.0
    largest = float((present[0] - present[1] if len(present) == 2 else present[0]).abs().max())
    return largest if math.isfinite(largest) else math.inf


def _load(path: Path, device: str) -> Any:
    return torch.load(path, map_location=device, weights_only=True)
