"""The user's view of the parallel program: a module that is called like the original one."""

from __future__ import annotations

import math
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autopart.runtime.attach import Scale, hand_out, run_later
from autopart.runtime.buckets import BUCKET_BYTES
from autopart.runtime.data_weights import Pass, Weights
from autopart.runtime.double_buffer import DoubleBuffer, check_nothing_waits
from autopart.runtime.elsewhere import elsewhere
from autopart.runtime.errors import BatchError, InputError, PlanError
from autopart.runtime.executor import Feed, Run
from autopart.runtime.gradients import (
    GradientSums,
    clip_gradients,
    separate_gradients,
)
from autopart.runtime.held_stages import HeldStages
from autopart.runtime.input_gradients import InputGradients, requiring
from autopart.runtime.inputs import (
    BatchMode,
    Division,
    Returned,
    bind,
    check_modes,
    divide,
    given_samples,
    microbatch_of,
)
from autopart.runtime.links import dtype_of
from autopart.runtime.loading import Originals, build_stage, place, starting_tensors
from autopart.runtime.loss_scale import Gradients, LossScale
from autopart.runtime.manifest import Manifest, OutputSpec
from autopart.runtime.mesh import Mesh
from autopart.runtime.norms import GradientNorms
from autopart.runtime.not_returned import NotReturned
from autopart.runtime.optimizers import OptimizerCheck
from autopart.runtime.outputs import collect, collect_later, gradient_piece
from autopart.runtime.pipelining import PipelineStages, to_pipeline_stages
from autopart.runtime.precision_check import check_autocast, computes_in_float16
from autopart.runtime.refused import LeftOut, refused, tell_of_loss_outside
from autopart.runtime.rng import default_generator, resumed
from autopart.runtime.same_batches import SameBatches
from autopart.runtime.schedule import backward_part, forward_part
from autopart.runtime.schedule.receipts import Receipts
from autopart.runtime.structure import rebuild
from autopart.runtime.tally import Tally
from autopart.runtime.trace import Recorder, Timeline, gather_timelines, save_trace, trace_object
from autopart.runtime.uncaught import watch
from autopart.runtime.variants import Variant, Variants
from autopart.runtime.written_buffers import set_values, written_once


class ParallelModule(HeldStages):
    """Runs an emitted program; built on every rank of the job.

    directory: what was emitted. originals: the original model's parameters and buffers by name, see
    :func:`autopart.runtime.loading.place`; None: zeros, to be filled by :meth:`load_state_dict`. Constants of the
    program are read from its folder.
    batch: "global": every rank is called with the same whole batch; "local": each replica with its own part.
    outputs: "loss": in training only the loss is returned, all other outputs are None; "all": all of them.
    seed: of the random numbers; by default rank 0's ``torch.initial_seed()``.
    bucket_bytes: of gradients that share a message; by default the plan's.

    In training a call runs the whole schedule, forward and backward, and returns the loss of the whole batch;
    ``loss.backward()`` adds the gradients, times the gradient that comes in, to this rank's parameters. Where the model
    has no loss inside, a call runs forward and the backward runs in the user's ``backward()``.

    In evaluation (``model.eval()``) and under ``torch.no_grad()`` a call runs forward only and returns all outputs.

    All ranks have to make the same calls: also of :meth:`state_dict`, which gathers the weights of all.

    Raises ClusterError when the job has another size than the plan, PlanError when the emitted files or the originals
    contradict.
    """

    def __init__(
        self,
        directory: str | Path,
        originals: Originals | None = None,
        *,
        batch: BatchMode = "global",
        outputs: Returned = "loss",
        device: torch.device | None = None,
        seed: int | None = None,
        bucket_bytes: int | None = None,
    ) -> None:
        check_modes(batch, outputs)
        directory = Path(directory)
        manifest = Manifest.load(directory)
        mesh = Mesh(manifest, device, seed)
        manifest = manifest.seen_from(mesh.stages)
        built = {stage: build_stage(directory, manifest, mesh, stage) for stage in mesh.stages}
        super().__init__(built, manifest, mesh)
        self.batch: BatchMode = batch
        self.returned = outputs
        started = starting_tensors(directory, manifest, originals)
        place(built, manifest, mesh, started)
        tensors = self.own_tensors()
        self.elsewhere = elsewhere(manifest, mesh.device, tensors, started)
        self._parameters_in_order = {
            name: tensor
            for name in self.manifest.parameter_order
            if isinstance(tensor := tensors.get(name), nn.Parameter)
        }
        specs = {spec.name: spec for spec in self.manifest.parameters}
        in_order = [specs[name] for name in self.manifest.parameter_order]
        bucket_bytes = bucket_bytes or manifest.bucket_bytes or BUCKET_BYTES
        self.mesh.weights = Weights(in_order, self.mesh, self._parameters_in_order, bucket_bytes)
        self._sums = GradientSums(self.manifest, self.mesh, self._parameters_in_order, self.mesh.weights, bucket_bytes)
        self._scale = LossScale(self.mesh) if computes_in_float16(self.manifest) else None
        self._norms = GradientNorms(self.manifest, self.mesh, self._parameters_in_order)
        self._optimizer_check = OptimizerCheck(self.manifest, self.mesh, self._parameters_in_order)
        watch(self)
        planned = Variant.of(directory, self.manifest, self.mesh, built)
        self.variants = Variants(planned, self.mesh)
        self.schedule = planned.schedules.planned
        self._buffer: DoubleBuffer | None = None
        if self.manifest.delays_gradients:
            if outputs == "all" or self._scale is not None:
                raise PlanError(
                    "the schedule 2bw returns the loss of the batch before and repeats no step, so it gives no other "
                    "outputs and computes nothing in float16; use 2bw-flush"
                )
            if any(spec.zero for spec in in_order):
                raise PlanError(
                    "the schedule 2bw keeps two versions of whole weights, so none can be divided over replicas; leave "
                    "zero out of the plan, or use 2bw-flush"
                )
            self._buffer = DoubleBuffer(
                built.values(), self._trainable(), planned.schedules.own(self.schedule), self._sums.reduce
            )
        self._same_batches, self._left_out = SameBatches(self.mesh), LeftOut()
        self._recorder: Recorder | None = None
        # Set by a meter (runtime/meter.py).
        self.tally: Tally | None = None

    # --- Calls ---

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The original's outputs for this batch; see the class. Raises InputError and BatchError."""
        with self._reporting():
            check_autocast(self.manifest, self.mesh.device.type)
            self.take_writes()
            with self._plainly():
                return self._call(args, kwargs)

    def _plainly(self) -> AbstractContextManager[None]:
        """Without autocast: the stages say themselves what is cast."""
        return torch.autocast(self.mesh.device.type, enabled=False)

    def prepare(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Variant, Feed, Division]:
        """Checks and divides a batch, which begins a step. Raises InputError and BatchError."""
        check_nothing_waits(self._buffer)
        given = bind(self.manifest, args, kwargs)
        wanted = requiring(given) if self.training and torch.is_grad_enabled() else frozenset()
        if wanted and self._buffer is not None:
            raise InputError(f"the schedule 2bw gives no gradients of inputs, as of {min(wanted)!r}; use 2bw-flush")
        variant, found = self.variants.find(given, args, kwargs, self.batch, self.training, wanted)
        leaves = {name: leaf.detach() if isinstance(leaf, Tensor) else leaf for name, leaf in given.items()}
        if self.batch == "global" or self.manifest.is_uniform:
            self._same_batches.check(leaves, self.batch == "local")
        variant.train(self.training)
        data = self.mesh.data
        samples = given_samples(found, self.mesh) if self.batch == "local" else None
        division = divide(self.manifest, found, data.size, data.index, self.data_shares, samples)
        variant.assumptions.check(leaves, division)
        gradients = InputGradients(variant.manifest, wanted, given, division, self.mesh)
        feed = self._feed(variant, leaves, division, gradients)
        if self.training:
            self.steps += 1
            if self.tally is not None and torch.is_grad_enabled():
                self.tally.add(variant.manifest, division.batch)
        self.mesh.step = self.steps
        self.mesh.weights.refresh()
        return variant, feed, division

    def set_buffer(self, name: str, value: Tensor) -> None:
        """Gives a buffer of the original another value, of which each rank takes its share; all ranks call it.

        Raises PlanError for buffers that forward writes, and values of another shape.
        """
        self.variants.set_buffer(name, value)

    def to_pipeline_stages(self) -> PipelineStages:
        """This rank's part for a schedule of ``torch.distributed.pipelining``; see :class:`PipelineStages`.

        Raises PlanError, with the reason, for programs that are no linear pipeline.
        """
        return to_pipeline_stages(self)

    def _call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        variant, feed, division = self.prepare(args, kwargs)
        if not (self.training and torch.is_grad_enabled()):
            return self._evaluate(variant, feed, division)
        if self._buffer is not None:
            return self._train_without_flush(feed, division)
        if not self._learns(feed):  # all is frozen, as in the network of a perceptual loss: outputs have no gradient
            return self._evaluate(variant, feed, division)
        train = self._train_with_loss if self.manifest.loss else self._train_without
        return train(variant, feed, division)

    def _feed(self, variant: Variant, leaves: Mapping[str, Any], division: Division, gradients: InputGradients) -> Feed:
        totals = variant.totals.compute(leaves, division, variant.tensors)
        device = self.mesh.device
        return Feed(
            lambda k: microbatch_of(variant.inputs, leaves, division, k, device),
            division.samples,
            division.whole,
            division.batch,
            totals,
            division.start,
            division.replicas,
            division.in_copies,
            gradients,
        )

    def _train_with_loss(self, variant: Variant, feed: Feed, division: Division) -> Any:
        loss_name = self.manifest.loss
        assert loss_name is not None

        keep = None if self.returned == "all" else {loss_name}
        parameters = self._trainable()
        actions = variant.schedules.own(variant.schedules.of(division.microbatches))
        part = self._part(division)

        def run_with(seed: float) -> tuple[Run, list[Tensor | None]]:
            def seeds(microbatch: int, outputs: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
                return {loss_name: torch.full_like(outputs[loss_name], seed * part)} if loss_name in outputs else {}

            run = self._run(variant, feed, True, seeds, keep, variant.schedules.receipts(division.microbatches))
            with self._norms.running(), separate_gradients(parameters) as made:
                self._sums.begin(actions)
                run.execute(actions)
            return run, [*made, *feed.gradients.whole()]

        seed = 1.0 if self._scale is None else self._scale.seed
        again = None if self._scale is None else self._repeatable(variant, lambda wanted: run_with(wanted)[1])
        run, gradients = run_with(seed)
        run.settle_buffers(self.own_buffers())
        wanted = [spec for spec in variant.outputs if self.returned == "all" or spec.name == loss_name]
        values = self._collected(wanted, run, division)
        scale = None
        if self._scale is not None and again is not None:
            settle, repeat = self._scale.settle, again
            scale = lambda found, incoming: settle(found, seed, incoming, repeat)  # noqa: E731
        values[loss_name] = self._handed(values[loss_name], gradients, scale, feed.gradients.given)
        if self.returned == "all":
            others = [spec for spec in wanted if spec.name != loss_name]
            values.update(refused(others, values, loss_name))
            values.update(_constants(variant, division.batch))
        else:
            self.none_for = self._left_out.tell(variant.outputs, loss_name)
        return rebuild(variant.manifest.output_structure, values)

    def _train_without_flush(self, feed: Feed, division: Division) -> Any:
        """Begins this batch and ends the one before, whose loss and gradients it gives; see double_buffer.py."""
        assert self._buffer is not None
        if division.microbatches != self.manifest.microbatches or division.in_copies:
            least = max(len(stage.replica_shares) for stage in self.manifest.stages)
            raise BatchError(
                f"the schedule 2bw takes batches of {self.manifest.microbatches} microbatches on {least} replicas "
                f"only, {division.batch} samples do not; drop the last partial batch, or use 2bw-flush"
            )
        planned = self.variants.planned
        receipts = planned.schedules.receipts(division.microbatches)
        run = self._run(planned, feed, True, self._seeds, {spec.name for spec in self._loss_specs}, receipts)
        losses = self._collect_losses()
        with self._norms.running():
            gradients = self._buffer.advance(run, division)
        run.settle_buffers(self.own_buffers())
        return self._hand_out_late(losses(), gradients)

    def finish(self) -> Any:
        """Under the schedule "2bw": ends the last batch and returns its loss, as the call after it would have.

        Every call of such a model returns the loss, and its backward hands out the gradients, of the batch before: the
        first one's loss is nan and has no gradients. Call this after the last batch, or where the loop pauses; a call
        after it begins anew. All ranks call it. Raises InputError where no batch is in flight.
        """
        if self._buffer is None or self._buffer.batch is None:
            raise InputError("no batch is in flight; finish() ends the last batch of the schedule 2bw")
        with self._reporting(), self._plainly():
            losses = self._collect_losses()
            with self._norms.running():
                gradients = self._buffer.finish()
            self.variants.planned.links.flush()
            return self._hand_out_late(losses(), gradients)

    @property
    def _loss_specs(self) -> list[OutputSpec]:
        return [spec for spec in self.variants.planned.outputs if spec.name == self.manifest.loss]

    def _seeds(self, microbatch: int, outputs: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
        name = self.manifest.loss
        assert name is not None
        return {name: torch.ones_like(outputs[name])} if name in outputs else {}

    def _collect_losses(self) -> Callable[[], Tensor]:
        """The loss of the batch in flight, begun now: its last stage has it already."""
        assert self._buffer is not None
        (spec,) = self._loss_specs
        batch = self._buffer.batch
        if batch is None:
            return lambda: torch.full((), math.nan, dtype=dtype_of(spec.dtype), device=self.mesh.device)
        return collect_later(spec, batch.run.outputs, batch.division, self.mesh)

    def _hand_out_late(self, loss: Tensor, gradients: list[Tensor | None]) -> Any:
        (spec,) = self._loss_specs
        values = {spec.name: self._handed(loss, gradients)}
        return rebuild(self.manifest.output_structure, values)

    def _train_without(self, variant: Variant, feed: Feed, division: Division) -> Any:
        tell_of_loss_outside(variant.outputs, division, self.schedule.stages)
        parameters = self._trainable()
        part = self._part(division)
        run, check_weights = self._run(variant, feed, train=True), self.mesh.weights.watch()
        schedules = variant.schedules
        schedule = schedules.of(division.microbatches)
        run.execute(schedules.own(forward_part(schedule)))
        run.settle_buffers(self.own_buffers())
        values = self._collected(variant.outputs, run, division)
        differentiable = [spec for spec in variant.outputs if spec.differentiable]
        if not differentiable:
            return rebuild(variant.manifest.output_structure, {**values, **_constants(variant, division.batch)})

        def backward(gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
            check_weights()
            run.seeds = lambda microbatch, _: {
                spec.name: None if piece is None else piece * part
                for spec, gradient in zip(differentiable, gradients, strict=True)
                if gradient is not None
                for piece in (gradient_piece(spec, gradient, division, microbatch),)
            }
            with self._norms.running(), separate_gradients(parameters) as made, self._reporting():
                actions = schedules.own(backward_part(schedule))
                self._sums.begin(actions)
                run.execute(actions)
            if self._scale is not None:
                self._scale.agree(made)
            return [*self._norms.shares(made, parameters), *feed.gradients.whole()]

        reached = [*parameters, *feed.gradients.given]
        attached = run_later([values[s.name] for s in differentiable], backward, reached, self._parameters_elsewhere())
        values.update({spec.name: value for spec, value in zip(differentiable, attached, strict=True)})
        return rebuild(variant.manifest.output_structure, {**values, **_constants(variant, division.batch)})

    def _evaluate(self, variant: Variant, feed: Feed, division: Division) -> Any:
        if not self.training and variant.manifest.eval_flaw:
            raise InputError(
                f"the stages were captured in training mode and cannot run in evaluation mode: "
                f"{variant.manifest.eval_flaw}; "
                "load what state_dict() gives on every rank into a model that is built anew, and evaluate that"
            )
        if variant.manifest.no_grad_flaw and not torch.is_grad_enabled():
            raise InputError(
                "the stages were captured with gradients on and cannot run under torch.no_grad() or inference_mode(): "
                f"{variant.manifest.no_grad_flaw}; call the model outside of these"
            )
        schedule = variant.schedules.evaluation(division.microbatches)
        run = self._run(variant, feed, train=False)
        # A gradient that is on its way between two batches is received in the next one's call.
        run.execute(variant.schedules.own(schedule), flush=self._buffer is None)
        run.settle_buffers(self.own_buffers())
        values = self._collected(variant.outputs, run, division)
        if torch.is_grad_enabled() and self._learns(feed):
            values.update(refused(variant.outputs, values))
        return rebuild(variant.manifest.output_structure, {**values, **_constants(variant, division.batch)})

    def _collected(self, specs: Sequence[OutputSpec], run: Run, division: Division) -> dict[str, Any]:
        """The outputs of the whole batch by name. All ranks call it for the same ones."""
        return {spec.name: collect(spec, run.outputs, division, self.mesh) for spec in specs}

    def _repeatable(self, variant: Variant, run: Callable[[float], Gradients]) -> Callable[[float], Gradients]:
        """``run``, later, as if now: with this step's random numbers and buffers, and leaving these as they are."""
        device, step = self.mesh.device, self.mesh.step
        state = default_generator(device).get_state()
        written = [item.tensor for own in written_once(variant.stages, variant.manifest).values() for item in own]
        before = [buffer.clone() for buffer in written]

        def again(seed: float) -> Gradients:
            kept = {name: buffer.clone() for name, buffer in self.own_buffers().items()}
            later, self.mesh.step = self.mesh.step, step
            set_values(written, before)
            with self._reporting(), self._plainly(), resumed(device, state):
                made = run(seed)
            self.mesh.step = later
            with torch.no_grad():
                for name, buffer in self.own_buffers().items():
                    buffer.copy_(kept[name])
            return made

        return again

    def _run(
        self,
        variant: Variant,
        feed: Feed,
        train: bool,
        seeds: Any = None,
        keep: set[str] | None = None,
        receipts: Receipts | None = None,
    ) -> Run:
        tallied = self.tally.recorder if self.tally is not None and train else None
        recorders = [recorder for recorder in (self._recorder, tallied) if recorder is not None]
        own = variant.stages, variant.manifest, self.mesh, variant.links
        return Run(*own, feed, train, seeds, self._sums.reduce, keep, recorders, self._passing, receipts)

    @contextmanager
    def _passing(self, kind: Pass, stage: int) -> Iterator[None]:
        """Around one stage's forward or backward of one microbatch."""
        with self.mesh.weights.passing(kind, stage), self._sums.passing(kind, stage):
            yield

    @contextmanager
    def trace(self, path: str | Path) -> Iterator[None]:
        """Records the calls inside the block; after it rank 0 writes all ranks' timelines to ``path``.

        The file is for chrome://tracing or ui.perfetto.dev, see :mod:`autopart.runtime.trace`. All ranks enter and
        leave the block together; one that raises writes nothing. Raises OSError on rank 0 when it cannot be written.
        """
        recorder = self._recorder = Recorder(self.mesh.device)
        try:
            yield
        finally:
            self._recorder = None
        found = gather_timelines(Timeline(self.mesh.stages, self.mesh.rank, recorder.spans()))
        if found is not None:
            save_trace(path, trace_object(found))

    def _handed(
        self, loss: Tensor, made: Gradients, scale: Scale | None = None, inputs: Sequence[Tensor] = ()
    ) -> Tensor:
        """The loss; ``made`` are the gradients of this rank's trained parameters, then of inputs."""
        own = self._trainable()

        def shown(known: Gradients) -> Gradients:
            return [*self._norms.shares(known[: len(own)], own), *known[len(own) :]]

        return hand_out(loss, made, [*own, *inputs], scale, shown, self._parameters_elsewhere())

    def _part(self, division: Division) -> float:
        """What a backward starts from: where every replica has the whole batch, the sum over them counts each once."""
        return division.replicas / self.mesh.data.size

    def _trainable(self) -> list[nn.Parameter]:
        return [p for p in self._parameters_in_order.values() if p.requires_grad]

    def _learns(self, feed: Feed) -> bool:
        """Whether anything requires a gradient, here or on other ranks: an input, or a parameter."""
        return bool(feed.gradients.asked or self._trainable()) or any(
            parameter.requires_grad for parameter in self._parameters_elsewhere()
        )

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Says at once which rank failed and why: its peers fail moments later, because their connections break."""
        try:
            yield
        except Exception:
            if self.mesh.world_size > 1:
                text = traceback.format_exc()
                if re.search(r"closed by peer|Connection reset|Broken pipe", text):
                    text = (
                        "lost the connection to another rank; its own message says why, and if it has none, it was "
                        "killed, as for want of memory, or ended before this one, as with fewer batches"
                    )
                where = f"rank {self.mesh.rank} ({self.mesh.title})"
                print(f"[autopart] {where} failed: {text}", file=sys.stderr, flush=True)
            raise

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales the gradients of all ranks to a norm of at most ``max_norm`` over the whole model.

        Returns the norm before. All ranks call it. ``torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)``
        does the same, see :mod:`autopart.runtime.norms`.
        """
        return clip_gradients(self.manifest, self.mesh, self._parameters_in_order, max_norm, norm_type)


def _constants(variant: Variant, batch: int) -> dict[str, Any]:
    return {
        spec.name: NotReturned(spec.name, spec.kind) if spec.kind else spec.per_sample * batch or spec.constant
        for spec in variant.manifest.outputs
        if spec.combine == "constant"
    }
