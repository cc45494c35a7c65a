"""Compiles a model on rank 0: planned for the first batch, then under the same plan for inputs of other sizes."""

from __future__ import annotations

import math
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autopart.analysis import analyze
from autopart.cluster import Cluster
from autopart.collection import seldom_collected
from autopart.divided_original import captured_again
from autopart.fewer_devices import advised_plan
from autopart.other_sizes import Outline, carry
from autopart.passes.emit.program import Emitted
from autopart.passes.program import Evaluation
from autopart.passes.rules import RULES
from autopart.plan import Plan
from autopart.realize import realize
from autopart.report.table import plan_text
from autopart.report.units import counted
from autopart.runtime.errors import ClusterError, PlanError
from autopart.runtime.inputs import BatchMode
from autopart.runtime.mesh import job_size
from autopart.set_by_forward import SetTensor
from autopart.tracing import capture


@dataclass(frozen=True, slots=True)
class _Planned:
    """What compiling for other sizes goes by. batch_dims: of the tensor inputs, by path."""

    plan: Plan
    outline: Outline
    batch_dims: Mapping[str, int | None]
    precision: str
    evaluation: Evaluation


@dataclass(frozen=True, slots=True)
class _Whole:
    """A parameter as it was before ranks divided it."""

    parameter: nn.Parameter
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: torch.device
    trained: bool


def _dividing(samples: int, limits: Mapping[str, Any]) -> int:
    """The next number of samples that divides by what is asked for.

    For a first batch that does not train, such as a validation set or a single sample: what training gets is another.
    """
    if limits.get("meshes") == "unlike":
        return samples
    parts = math.prod(n for n in (limits.get("dp"), limits.get("microbatches")) if isinstance(n, int) and n > 1)
    return math.ceil(samples / parts) * parts


class Compiler:
    """Makes the files of a model's programs. settings: the arguments of ``parallelize`` by name.

    set_attributes: of the model that was planned, see Program.
    """

    def __init__(self, model: nn.Module, settings: Mapping[str, Any], batch: BatchMode) -> None:
        self._model = model
        self._settings = settings
        self._batch: BatchMode = batch
        self._planned: _Planned | None = None
        self._whole: list[_Whole] = []
        self.set_attributes: tuple[SetTensor, ...] = ()

    @seldom_collected()
    def plan(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, bytes]:
        """Captures, plans and emits; returns the program's files."""
        settings = self._settings
        rules = settings["rules"] or RULES
        options = {name: settings[name] for name in ("loss_fn", "batch_dims", "precision", "reduce_dtype")}
        with _as_ever():
            program = capture(self._model, args, kwargs, **options)
            evaluation = program.evaluation
        self.set_attributes = program.set_attributes
        if not settings["verbose"]:  # else the plan that is printed has them
            for note in program.notes:
                warnings.warn(note, stacklevel=2)
        plan = settings["plan"]
        if plan is None:
            analysis = analyze(program, rules)
            limits = dict(settings["limits"])
            if self._batch == "local":
                if limits.get("dp") is None:
                    raise PlanError(
                        'batch="local" needs the number of replicas: parallelize(model, batch="local", dp=...)'
                    )
                limits["batch"] = program.batch * limits["dp"]
                limits["meshes"] = "equal"  # each replica's own part goes through all stages
            elif not (self._model.training and torch.is_grad_enabled()):
                limits.setdefault("batch", _dividing(program.batch, limits))
            cluster = _cluster(settings["cluster"])
            plan = advised_plan(cluster, analysis, **limits)
        else:
            plan = plan if isinstance(plan, Plan) else Plan.load(plan)
            analysis = analyze(program, rules, plan.example_batch)
        emitted = realize(program, plan, analysis)
        emitted.files["plan.json"] = plan.to_json()
        emitted.files["plan.txt"] = plan_text(plan)
        dims = {spec.name: spec.batch_dim for spec in program.inputs if spec.kind == "tensor"}
        self._planned = _Planned(plan, Outline.of(analysis), dims, program.precision, evaluation)
        self._whole = self._parameters()
        return self._files(emitted)

    def follow(self, other: Compiler) -> None:
        """Takes on the plan of an equal model's, whose parameters are divided already, as this one's are not."""
        self._planned, trains = other._planned, [was.trained for was in other._whole]
        self._whole = [replace(was, trained=train) for was, train in zip(self._parameters(), trains, strict=True)]

    def _parameters(self) -> list[_Whole]:
        return [
            _Whole(p, tuple(p.shape), p.stride(), p.device, p.requires_grad)
            for p in self._model.parameters()
            if not p.is_meta
        ]

    def for_sizes(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[dict[str, bytes], tuple[str, ...]]:
        """The files for inputs of other sizes, under the same plan; and the ops that are sharded by it, but not there.

        Raises CaptureError and PlanError where the model, or the plan, does not hold for these sizes.
        """
        planned, settings = self._planned, self._settings
        assert planned is not None
        with _as_ever(), _undivided(self._whole):
            program = capture(
                self._model,
                args,
                kwargs,
                loss_fn=settings["loss_fn"],
                batch_dims=planned.batch_dims,
                check_eval=not planned.evaluation.flaw,
                precision=planned.precision,
                reduce_dtype=settings["reduce_dtype"],
            )
            evaluation = planned.evaluation if planned.evaluation.flaw else program.evaluation
        program.check_evaluation = lambda: evaluation
        plan, analysis, whole = carry(planned.plan, planned.outline, analyze(program, settings["rules"] or RULES))
        return self._files(realize(program, plan, analysis)), whole

    def _files(self, emitted: Emitted) -> dict[str, bytes]:
        """A program's files as they would be saved, without the tensors that every rank has itself."""
        for members in (self._model.named_parameters, self._model.named_buffers):
            for name, _ in members(remove_duplicate=False):
                emitted.constants.pop(name, None)
        return files_of(emitted)


def files_of(emitted: Emitted) -> dict[str, bytes]:
    """A program's files as they would be saved."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "program"
        emitted.save(target)
        return {path.name: path.read_bytes() for path in target.iterdir()}


def _cluster(given: Any) -> Cluster:
    """Raises ClusterError for one of another size than the job."""
    if given is None:
        cluster = Cluster.local(job_size())
    elif isinstance(given, str):
        cluster = Cluster.read(given)
    elif isinstance(given, Cluster):
        cluster = given
    else:
        raise ClusterError(f"cluster is a Cluster or its text, such as '8xH100', not {given!r}")
    if cluster.device_count != job_size():
        raise ClusterError(
            f"the cluster {cluster} has {counted(cluster.device_count, 'device')}, but this job has "
            f"{counted(job_size(), 'process')}; start one process per device, or leave cluster out"
        )
    return cluster


@contextmanager
def _as_ever() -> Iterator[None]:
    """Whatever the call is for, training is captured; and only rank 0 does, so it leaves random numbers as they are."""
    with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices=[]):
        yield


@contextmanager
def _undivided(whole: Sequence[_Whole]) -> Iterator[None]:
    """Parameters have the shapes that they had, and no memory: capturing reads no values."""
    kept: list[tuple[nn.Parameter, Tensor, Tensor | None, bool]] = []
    with captured_again():
        try:
            for was in whole:
                parameter = was.parameter
                kept.append((parameter, parameter.data, parameter.grad, parameter.requires_grad))
                empty = torch.empty_strided(was.shape, was.stride, dtype=parameter.dtype, device=was.device)
                empty.untyped_storage().resize_(0)
                parameter.grad = None
                parameter.data = empty
                parameter.requires_grad_(was.trained)
            yield
        finally:
            for parameter, data, gradient, trained in kept:
                parameter.data = data
                parameter.grad = gradient
                parameter.requires_grad_(trained)
