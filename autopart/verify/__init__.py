"""Verification: the parallel program against the plain model in one process, in float64.

The emitted program is run as it will be run, in local processes that talk over gloo, from the original's own weights
and on the same batch. Compared are the loss of every step, every gradient of the first step, and every parameter and
buffer after the last step of AdamW: each rank compares the share that it holds, so replicas and tied copies all count.

**The measure.** The error of a tensor is ``max|a - b| / max(max|b|, 1e-3 * M)``, where ``b`` is the original's and
``M`` the largest ``max|b|`` over all tensors of that kind (gradients, or parameters and buffers). The second term is
for gradients that are zero by mathematics, such as that of a key's bias under a softmax: they are rounding noise in
both programs. For the same reason AdamW's eps is 1e-4, as it divides by gradients. Programs are equal when every error,
and the relative error of every loss, is at most the tolerance.

**Exceptions.** Dropout is switched off in a copy of the model, since two programs draw different masks. Batch norm's
statistics are those of each microbatch on each replica, so such a model is compared with the plain model run on the
same pieces, with the mean of their losses; running statistics are compared on one replica only. Under the schedule 2bw
the plain model applies each gradient one step late, as the program does.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from autopart.analysis import Analysis, analyze
from autopart.local_job import JobError, run_local_job
from autopart.other_model import other_model
from autopart.runtime.errors import PlanError
from autopart.runtime.manifest import Manifest
from autopart.verify.errors import VerifyError
from autopart.verify.measure import GroupDifference, StageTraffic, Verification, measure
from autopart.verify.rank import INPUTS, REFERENCE, WEIGHTS, train_and_compare
from autopart.verify.reference import divide, train_reference
from autopart.verify.subject import Subject, capture_as_given, disable_dropout, prepare

if TYPE_CHECKING:
    from autopart.cluster import Cluster
    from autopart.models import LoadedModel
    from autopart.plan import Plan

TOLERANCE = 1e-9
LEARNING_RATE = 1e-3


def verify(
    model: LoadedModel | nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    plan: Plan | None = None,
    cluster: Cluster | None = None,
    limits: Mapping[str, Any] | None = None,
    loss_fn: Callable[..., Tensor] | None = None,
    batch_dims: Mapping[str, int | None] | None = None,
    steps: int = 3,
    tolerance: float = TOLERANCE,
    timeout_s: float = 600.0,
    progress: Callable[[str], None] | None = None,
) -> Verification:
    """Emits the program of a plan, trains it and the plain model for ``steps`` steps, and compares.

    model: with the arguments of one example call, or loaded by name. plan: made for this model in its own precision;
    without one a plan is made for ``cluster`` under ``limits`` (see :func:`autopart.make_plan`). progress: called with
    a line before each thing that takes time. The model itself is not changed.

    Raises VerifyError when the two cannot be compared, JobError when a process fails or hangs, and what capturing,
    planning and emitting raise.
    """
    from autopart.planner import make_plan
    from autopart.realize import planned_sums, realize

    say = progress or (lambda _: None)
    if (plan is None) == (cluster is None):
        raise VerifyError("verify needs either a plan or a cluster to plan for")
    if plan is not None:
        # Before the float64 copy is captured, whose fingerprint is another one.
        say("capturing the model as the plan saw it")
        own = capture_as_given(model, args, kwargs, loss_fn, batch_dims)
        if planned_sums(own, plan) is None:
            raise PlanError(other_model(own, plan))
    say("capturing the model in float64")
    subject = prepare(model, args, kwargs, loss_fn=loss_fn, batch_dims=batch_dims)
    analysis = analyze(subject.program, samples=plan.example_batch if plan is not None else 0)
    given = plan is not None
    if plan is None:
        assert cluster is not None
        say("planning")
        plan = make_plan(subject.program, cluster, analysis=analysis, **(limits or {}))
    else:
        plan = refit(plan, subject.program.fingerprint, analysis)
    with tempfile.TemporaryDirectory(prefix="autopart-verify-") as folder:
        say("emitting")
        emitted = Path(folder) / "emitted"
        realize(subject.program, plan, analysis).save(emitted)
        # A plan that was priced in another precision predicts other numbers of bytes.
        return compare_emitted(
            emitted,
            subject,
            plan=None if given else plan,
            steps=steps,
            tolerance=tolerance,
            timeout_s=timeout_s,
            progress=progress,
        )


def refit(plan: Plan, fingerprint: str, analysis: Analysis) -> Plan:
    """A plan for the same model in float64, where blocks are cut elsewhere: each stage still starts at its first op.

    Raises VerifyError when the plan does not name a stage's first op, or float64 has no such op (a cast).
    """
    if plan.order:
        if len(plan.order) != len(analysis.blocks):
            raise VerifyError(
                f"the plan's stages are no ranges of blocks, and in float64 the model has {len(analysis.blocks)} "
                f"blocks instead of {len(plan.order)}; give --cluster instead"
            )
        return replace(plan, fingerprint=fingerprint)
    starts = {key: analysis.block_of[node] for node, key in analysis.keys.items() if node in analysis.block_of}
    cuts = [0]
    for index, stage in enumerate(plan.stages[1:], 1):
        if stage.first_op not in starts:
            raise VerifyError(f"stages[{index}].first_op: the model in float64 has no op {stage.first_op!r}")
        cuts.append(starts[stage.first_op])
    cuts.append(len(analysis.blocks))
    if any(first >= end for first, end in pairwise(cuts)):
        raise VerifyError("two of the plan's stages start in one block of the model in float64; give --cluster instead")
    stages = tuple(replace(stage, blocks=blocks) for stage, blocks in zip(plan.stages, pairwise(cuts), strict=True))
    return replace(plan, fingerprint=fingerprint, stages=stages)


def compare_emitted(
    directory: Path,
    subject: Subject,
    *,
    plan: Plan | None = None,
    steps: int = 3,
    tolerance: float = TOLERANCE,
    timeout_s: float = 600.0,
    progress: Callable[[str], None] | None = None,
) -> Verification:
    """Compares an emitted program, as its files are now, with the model that it was emitted for."""
    if steps < 1:
        raise VerifyError(f"{steps} steps compare nothing; at least 1")
    say = progress or (lambda _: None)
    manifest = Manifest.load(directory)
    if manifest.fingerprint != subject.program.fingerprint:
        raise PlanError(f"the program in {directory} was emitted for another model or version; emit it again")
    division = divide(manifest, subject)
    with tempfile.TemporaryDirectory(prefix="autopart-verify-") as folder:
        job = Path(folder)
        members = [*subject.model.named_parameters(), *subject.model.named_buffers()]
        weights = {name: tensor.detach().clone() for name, tensor in members}
        torch.save(weights, job / WEIGHTS)
        torch.save(subject.tensors, job / INPUTS)
        say("training the plain model")
        reference = train_reference(subject, manifest, division, steps, LEARNING_RATE)
        torch.save({"gradients": reference.gradients, "state": reference.state}, job / REFERENCE)
        say(f"training the parallel program in {manifest.world_size} processes")
        arguments = {
            "directory": str(directory),
            "job": folder,
            "steps": steps,
            "learning_rate": LEARNING_RATE,
            "model_file": subject.model_file,
        }
        function = f"{train_and_compare.__module__}:{train_and_compare.__name__}"
        ranks = run_local_job(function, manifest.world_size, arguments, job, timeout_s)
    late = ("the plain model applies each gradient one step late, as the schedule 2bw does",)
    notes = (*subject.notes, *(late if manifest.delays_gradients else ()))
    return measure(manifest, notes, plan, reference, ranks, tolerance)


__all__ = [
    "GroupDifference",
    "JobError",
    "StageTraffic",
    "Subject",
    "Verification",
    "VerifyError",
    "compare_emitted",
    "disable_dropout",
    "prepare",
    "verify",
]
