"""An emitted program under the schedules of ``torch.distributed.pipelining``, for loops that are built on these.

torch's stages form a chain: each takes what the one before returns and gives a gradient back for each of these tensors.
So only *linear* programs can be run that way; :func:`to_pipeline_stages` says what else a program has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from autopart.runtime.errors import BatchError, InputError, PlanError
from autopart.runtime.executor import Feed
from autopart.runtime.invariant import Share
from autopart.runtime.manifest import Manifest, argument_name
from autopart.runtime.mesh import Mesh

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

    from autopart.runtime.module import ParallelModule


@dataclass(frozen=True, slots=True)
class PipelineStages:
    """What a rank gives to one of torch's schedules.

    stages: this rank's, one. microbatches, loss_fn: arguments of the schedule, which divides the sums of gradients by
    the number of microbatches (its ``scale_grads``, on by default): the last stage returns its microbatch's part of
    the loss times that number, so that the mean of ``losses`` is the loss of the batch.
    inputs: called with the model's inputs of a whole batch, gives the keyword arguments of ``schedule.step``; raises
    InputError, and BatchError for a batch that does not divide. All ranks call it, with the same batch::

        pipeline = autopart.load("emitted", model).to_pipeline_stages()
        schedule = Schedule1F1B(pipeline.stages[0], pipeline.microbatches, pipeline.loss_fn)
        schedule.step(**pipeline.inputs(x, y), losses=losses)
    """

    stages: tuple[PipelineStage, ...]
    microbatches: int
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    inputs: Callable[..., dict[str, Any]]


def to_pipeline_stages(program: ParallelModule) -> PipelineStages:
    """This rank's part of a linear program as torch's stage. Raises PlanError, with the reason, for other programs."""
    from torch.distributed.pipelining import PipelineStage

    manifest, mesh = program.manifest, program.mesh
    check_linear(manifest, mesh.stages, mesh.data.size)
    (number,) = mesh.stages
    count = len(manifest.stages)
    (module,) = program.stages
    submodule = LinearStage(module, manifest, mesh, number)
    stage = PipelineStage(submodule, number, count, mesh.device, group=mesh.pipeline.group)

    def inputs(*args: Any, **kwargs: Any) -> dict[str, Any]:
        _, feed, division = program.prepare(args, kwargs)
        if feed.gradients:
            raise InputError("torch's schedules give no gradients of inputs; detach them")
        if division.microbatches != manifest.microbatches:
            raise BatchError(
                f"a batch of {division.batch} does not divide into the {manifest.microbatches} microbatches that "
                "torch's schedules need; drop the last partial batch"
            )
        submodule.feed = feed
        # The schedule divides along the first dim: each microbatch gets its own number.
        numbers = torch.arange(manifest.microbatches)
        given = {"microbatch": numbers}
        return {**given, "target": numbers} if number == count - 1 else given

    return PipelineStages((stage,), manifest.microbatches, lambda output, _: output.sum(), inputs)


class LinearStage(nn.Module):
    """An emitted stage as torch calls it: what arrives by position, the microbatch's number by name.

    Returns what it sends; the last stage, ``[1]``, its part of the loss times the number of microbatches.
    """

    def __init__(self, module: nn.Module, manifest: Manifest, mesh: Mesh, number: int) -> None:
        super().__init__()
        self.module = module
        self.feed: Feed | None = None
        self._mesh = mesh
        self._spec = manifest.stages[number]
        self._arriving = manifest.stages[number - 1].sends if number else ()
        self._loss = manifest.loss if number == len(manifest.stages) - 1 else None
        self._microbatches = manifest.microbatches

    def forward(self, *arriving: Tensor, microbatch: Tensor) -> Tensor | tuple[Tensor, ...]:
        feed, spec, index = self.feed, self._spec, int(microbatch)
        if feed is None:
            raise PlanError("a step needs a batch: schedule.step(**pipeline.inputs(...))")
        place = _Place(self._mesh, self._mesh.step, index, Share(feed.first(index), feed.samples, feed.batch))
        place.take()
        inputs = feed.inputs(index)
        arguments = {
            **{argument_name(name): inputs[name] for name in spec.inputs},
            **{argument_name(name): tensor for name, tensor in zip(self._arriving, arriving, strict=True)},
            **{argument_name(name): feed.totals[name] for name in spec.totals},
        }
        with torch.autocast(self._mesh.device.type, enabled=False):
            results = self.module(b=feed.samples, B=feed.batch, **arguments)
        found = dict(zip((*spec.sends, *spec.outputs), results, strict=True))
        if self._loss is not None:
            (loss,) = _InBackward.apply(place, found[self._loss] * self._microbatches)
            return loss.reshape(1)
        sent = _InBackward.apply(place, *(found[name].contiguous() for name in spec.sends))
        return tuple(sent)


@dataclass(frozen=True, slots=True)
class _Place:
    """The step and the microbatch that random numbers follow from."""

    mesh: Mesh
    step: int
    microbatch: int
    share: Share

    def take(self) -> None:
        self.mesh.step, self.mesh.microbatch, self.mesh.share = self.step, self.microbatch, self.share


class _InBackward(torch.autograd.Function):
    """The same values; layers that the backward computes again draw their random numbers as in the forward."""

    @staticmethod
    def forward(ctx: Any, place: _Place, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.place = place
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.place.take()
        return (None, *gradients)


def check_linear(manifest: Manifest, stages: Sequence[int], replicas: int) -> None:
    """Raises PlanError with the first reason why torch's stages cannot run the program on a rank of these stages."""
    last = len(manifest.stages) - 1
    reason = ""
    if last < 1:
        reason = "it has one stage"
    elif len(stages) > 1:
        reason = "a rank runs several stages; plan with schedule='1f1b'"
    elif not manifest.is_uniform:
        reason = "its stages have unlike meshes"
    elif replicas > 1:
        reason = "it has replicas, whose gradients torch's schedules do not add up; plan with dp=1"
    elif manifest.loss is None:
        reason = "its loss is computed outside; plan with loss_fn"
    elif manifest.loss not in manifest.stages[last].outputs:
        reason = "its loss is not computed on the last stage"
    elif manifest.precision == "fp16-mixed":
        reason = "it computes in float16, which needs a scaled loss"
    for value in manifest.values:
        if value.targets != (value.source + 1,):
            targets = ", ".join(map(str, value.targets))
            reason = reason or f"{value.name} goes from stage {value.source} to {targets}, not to the next one alone"
        elif not value.needs_grad:
            reason = reason or f"{value.name} goes to the next stage and has no gradient"
    for index, stage in enumerate(manifest.stages[:-1]):
        if not stage.sends:
            reason = reason or f"stage {index} sends nothing to the next one"
    for spec in manifest.parameters:
        if spec.mutated:
            reason = reason or f"{spec.name} is updated by the forward, which torch runs once more to see shapes"
        elif not spec.buffer and len(spec.stages) > 1:
            reason = reason or f"{spec.name} is on the stages {', '.join(map(str, spec.stages))}"
        elif "B" in spec.placements:
            reason = reason or f"{spec.name} has partial gradients on a tensor axis, to be added up after the step"
    if reason:
        raise PlanError(f"the program is no linear pipeline of torch.distributed.pipelining: {reason}")
