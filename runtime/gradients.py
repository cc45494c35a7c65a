"""Sums of gradients over ranks, once per step: over replicas, partial ones over tensor axes, tied ones over stages.

Sums over replicas start during the last microbatch's backward (ZeRO-2: during each), as the gradients of a bucket
become final, and always in the order of the buckets (:mod:`autopart.runtime.buckets`), so that all replicas make the
same calls in the same order. At the end of the step those start that are incomplete, because no gradient reached some
parameter. Of ZeRO-2's some are on their way at once (:func:`autopart.runtime.data_weights.summed_beside`), so that a
backward goes on beside a large one; those of the backward before have ended when a backward sends its first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopart.runtime.buckets import (
    BUCKET_BYTES,
    Bucket,
    gradient_buckets,
    learning_at,
    summed_bytes,
    tied_buckets,
    ties_of,
)
from autopart.runtime.collectives import scatter_message, sum_in_place, sum_message, sum_of_copies
from autopart.runtime.data_weights import Pass, Weights, add_gradient, in_sum_type, summed_beside
from autopart.runtime.errors import InputError
from autopart.runtime.flat import FlatShares
from autopart.runtime.hooks import weakly
from autopart.runtime.manifest import Manifest, ParameterSpec
from autopart.runtime.mesh import Axis, Mesh
from autopart.runtime.norms import counted, plain, reduce_norms
from autopart.runtime.schedule import Action, Work


@dataclass(eq=False, slots=True)
class _Queue:
    """Buckets whose sums start in this order. final: leaves whose gradients are, by id."""

    buckets: list[Bucket] = field(default_factory=list)
    started: int = 0
    final: set[int] = field(default_factory=set)

    def restart(self) -> None:
        self.started, self.final = 0, set()


@dataclass(eq=False, slots=True)
class _Sum:
    """A sum on its way: of this rank's shares in ``message``; then also over ``axes``."""

    specs: Sequence[ParameterSpec]
    layout: FlatShares
    message: Tensor
    work: dist.Work
    axes: list[Axis]


class GradientSums:
    """The sums that a rank takes part in. ``parameters``: its own by name, in the plan's order."""

    def __init__(
        self,
        manifest: Manifest,
        mesh: Mesh,
        parameters: dict[str, nn.Parameter],
        weights: Weights,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._mesh = mesh
        self._weights = weights
        self._bucket_bytes = bucket_bytes
        self._parameters = parameters
        by_name = {spec.name: spec for spec in manifest.parameters}
        in_order = [by_name[name] for name in manifest.parameter_order]
        self._specs = [spec for spec in in_order if spec.name in parameters]
        # Every rank meets the sets of tied stages in the order of the whole plan, so no two wait for each other.
        self._ties = [(stages, axis) for stages in ties_of(in_order) if (axis := mesh.tie(stages)) is not None]
        self._sizes = [axis.size for axis in mesh.tensor_axes]
        self._hooked: set[int] = set()
        self._trained: list[ParameterSpec] | None = None
        self._once = _Queue()  # started in the last microbatch
        self._always: dict[int, _Queue] = {}  # ZeRO-2: started in every one, by stage
        self._divided: list[Bucket] = []  # ZeRO-2 and -3: partial sums of what is divided already
        self._sums: list[_Sum] = []
        self._scattering: list[_Sum] = []  # ZeRO-2
        self._carried = False  # whether they are of the backward before
        self._stages_of: dict[int, list[int]] = {}  # by leaf: the stages in which it has gradients
        self._passes_left: Counter[tuple[Pass, int]] = Counter()  # to come, that of now included
        self._now: tuple[Pass, int] | None = None
        self._arrange()

    # --- While microbatches go backward ---

    def begin(self, actions: Sequence[Action]) -> None:
        """A step starts, in which the microbatches go backward that the actions say."""
        self._arrange()
        for bucket in self._whole_buckets():
            for spec in bucket.specs:
                self._leaf(spec).grad = None
        self._sums, self._scattering = [], []
        kinds: dict[Work, Pass] = {Work.BACKWARD: "backward", Work.WEIGHT: "weight"}
        self._passes_left = Counter((kinds[a.work], a.stage) for a in actions if a.work in kinds)

    def _arrange(self) -> None:
        """Makes the buckets anew where other parameters are trained than before, and begins with the first.

        Raises InputError where one is that the program was not planned to train.
        """
        for queue in (self._once, *self._always.values()):
            queue.restart()
        trained = [spec for spec in self._specs if self._parameters[spec.name].requires_grad]
        if trained == self._trained:
            return
        for spec in trained:
            if not spec.trainable:
                raise InputError(
                    f"parameter {spec.name!r} requires a gradient, but was frozen when the model was captured, so that "
                    "its program makes none; capture the model with all that is ever trained, and freeze it afterwards"
                )
        stages = self._mesh.stages
        self._trained = trained
        self._once, self._always, self._divided, self._stages_of = _Queue(), {}, [], {}
        for stage in reversed(stages):
            learning = learning_at(trained, stage, stages)
            buckets = gradient_buckets(learning, self._mesh.data.size, self._sizes, self._bucket_bytes)
            self._once.buckets += [bucket for bucket in buckets if bucket.zero < 2]
            self._always[stage] = _Queue([bucket for bucket in buckets if bucket.zero == 2])
            self._divided += [bucket for bucket in buckets if bucket.zero >= 2 and bucket.partial]
        for bucket in self._whole_buckets():
            for spec in bucket.specs:
                leaf = self._leaf(spec)
                self._stages_of[id(leaf)] = [stage for stage in stages if spec.learns(stage)]
                if id(leaf) not in self._hooked:
                    self._hooked.add(id(leaf))
                    leaf.register_post_accumulate_grad_hook(weakly(self._arrived))

    def _whole_buckets(self) -> list[Bucket]:
        """Those of gradients that autograd makes whole."""
        return [bucket for queue in (*self._always.values(), self._once) for bucket in queue.buckets]

    def _leaf(self, spec: ParameterSpec) -> Tensor:
        """Where autograd adds a parameter's gradients up: the parameter, or the whole weight that it is a share of."""
        parameter = self._parameters[spec.name]
        return self._weights.leaves.get(id(parameter), parameter)

    def _arrived(self, leaf: Tensor) -> None:
        if self._now is None:
            return  # the user's own backward, which hands out what was summed
        kind, at = self._now
        self._start_final(self._always[at], leaf)
        # a split backward makes a leaf's gradients either in B or in W
        if sum(self._passes_left[kind, stage] for stage in self._stages_of[id(leaf)]) == 1:
            self._start_final(self._once, leaf)

    def _start_final(self, queue: _Queue, leaf: Tensor) -> None:
        """Starts the sums of buckets that are complete and whose turn it is."""
        queue.final.add(id(leaf))
        while queue.started < len(queue.buckets):
            bucket = queue.buckets[queue.started]
            if any(id(self._leaf(spec)) not in queue.final for spec in bucket.specs):
                return
            queue.started += 1
            self._start(bucket)

    @contextmanager
    def passing(self, kind: Pass, stage: int) -> Iterator[None]:
        """Around one stage's forward or backward of one microbatch."""
        if kind == "forward":
            yield
            return
        self._now, self._carried = (kind, stage), True
        try:
            yield
        finally:
            self._now = None
        self._start_rest(self._always[stage])
        self._always[stage].restart()
        self._passes_left[kind, stage] -= 1

    def _start_rest(self, queue: _Queue) -> None:
        for bucket in queue.buckets[queue.started :]:
            self._start(bucket)
        queue.started = len(queue.buckets)

    @torch.no_grad()
    def _start(self, bucket: Bucket) -> None:
        """Starts the sum of a bucket's gradients, of those that there are; they are taken off their leaves."""
        specs = [spec for spec in bucket.specs if self._leaf(spec).grad is not None]
        if not specs:
            return
        made = [gradient for spec in specs if (gradient := self._leaf(spec).grad) is not None]
        for spec in specs:
            self._leaf(spec).grad = None
        data = self._mesh.data
        axes = [self._mesh.tensor_axes[position] for position in bucket.partial]
        layout = self._layout(specs)
        if bucket.zero == 0:
            message = in_sum_type(layout.message(made), specs[0])
            axes = [data, *axes] if data.size > 1 else axes
            self._sums.append(_Sum(specs, layout, message, sum_message(message, axes[0], "update"), axes[1:]))
            return
        if bucket.zero == 2:
            self._make_room(sum(summed_bytes(spec, g.nbytes) for spec, g in zip(specs, made, strict=True)))
        message = in_sum_type(layout.whole_message(made), specs[0])
        del made
        if bucket.zero == 1:
            work, message = scatter_message(message, data, "update")
            self._sums.append(_Sum(specs, layout, message, work, axes))
        else:
            work, message = scatter_message(message, data, "backward")
            self._scattering.append(_Sum(specs, layout, message, work, []))

    def _layout(self, specs: Sequence[ParameterSpec]) -> FlatShares:
        shapes = [self._parameters[spec.name].shape for spec in specs]
        return FlatShares(shapes, [spec.data_dim for spec in specs], self._mesh.data.size)

    def _make_room(self, size: int) -> None:
        """Ends ZeRO-2's sums, the first ones first, beside which no message of so many bytes is sent."""
        if self._carried:
            self._settle()
            self._carried = False
        ranks = self._mesh.data.size  # of what was sent each has a part
        while self._scattering and not summed_beside(
            [found.message.nbytes * ranks for found in self._scattering], size, self._bucket_bytes
        ):
            self._finish(self._scattering.pop(0))

    def _settle(self) -> None:
        """Ends ZeRO-2's sums that are on their way."""
        while self._scattering:
            self._finish(self._scattering.pop(0))

    def _finish(self, found: _Sum) -> None:
        found.work.wait()
        message = found.message.to(self._parameters[found.specs[0].name].dtype)
        for spec, gradient in zip(found.specs, found.layout.shares(message), strict=True):
            add_gradient(self._parameters[spec.name], gradient)

    # --- At the end of a step ---

    @torch.no_grad()
    def reduce(self) -> None:
        """Replaces every ``.grad`` by its sum. A parameter without a gradient anywhere keeps None.

        Gradients may also have been put there by other means than a step's backwards.
        """
        self._start_rest(self._once)
        for bucket in self._whole_buckets():
            self._start(bucket)  # only what came after its bucket had started
        self._settle()
        self._weights.settle()
        for bucket in self._divided:
            self._start_divided(bucket)
        while any(found.axes for found in self._sums):
            for found in self._sums:
                if found.axes:
                    found.work.wait()
                    found.work = sum_message(found.message, found.axes.pop(0), "update")
        while self._sums:  # a message is freed before the next is taken apart
            self._finish(self._sums.pop(0))
        self._arrange()
        for stages, axis in self._ties:
            tied = [spec for spec in self._trained or () if spec.stages == stages]
            self._reduce_tied(tied, axis, self._mesh.copies(stages), self._mesh.counts_in(stages))

    def _start_divided(self, bucket: Bucket) -> None:
        """Starts the sum over the tensor axes of gradients that are this rank's shares already."""
        specs = [spec for spec in bucket.specs if self._parameters[spec.name].grad is not None]
        if not specs:
            return
        layout = self._layout(specs)
        message = layout.message([g for spec in specs if (g := self._parameters[spec.name].grad) is not None])
        message = in_sum_type(message, specs[0])
        for spec in specs:
            self._parameters[spec.name].grad = None
        axes = [self._mesh.tensor_axes[position] for position in bucket.partial]
        self._sums.append(_Sum(specs, layout, message, sum_message(message, axes[0], "update"), axes[1:]))

    def _reduce_tied(self, specs: Sequence[ParameterSpec], axis: Axis, copies: Axis, counts: bool) -> None:
        """A stage may use a tied parameter without a gradient reaching it, and still needs the others' sum.

        copies: the ranks of this stage that have equal gradients of parameters that are not divided. counts: whether
        this rank's gradients are among those that are added.
        """
        if not specs:
            return
        parameters = {spec.name: self._parameters[spec.name] for spec in specs}
        present = torch.tensor([float(p.grad is not None) for p in parameters.values()], device=self._mesh.device)
        sum_in_place(present, axis, "update")
        used = [spec for spec, count in zip(specs, present.tolist(), strict=True) if count]
        for run in tied_buckets(used, self._mesh.data.size, self._sizes, self._bucket_bytes):
            members = [parameters[spec.name] for spec in run]
            layout = self._layout(run)
            message = layout.message([torch.zeros_like(p) if p.grad is None or not counts else p.grad for p in members])
            message = in_sum_type(message, run[0])
            message = sum_of_copies(message, axis, Axis(copies.name) if run[0].zero else copies, "update")
            for parameter, gradient in zip(members, layout.shares(message.to(members[0].dtype)), strict=True):
                parameter.grad = gradient


@contextmanager
def separate_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[list[Tensor | None]]:
    """Inside, the parameters have no gradients; afterwards the list holds those made inside, and ``.grad`` the old.

    The user's hooks on the parameters rest: they are called when the script's ``backward()`` hands the gradients out.
    """
    kept = [p.grad for p in parameters]
    resting = [(hooks, _foreign(hooks)) for p in parameters for hooks in _hooks_of(p)]
    made: list[Tensor | None] = []
    for parameter in parameters:
        parameter.grad = None
    for hooks, foreign in resting:
        for key in foreign:
            del hooks[key]
    try:
        yield made
        made.extend(p.grad for p in parameters)
    finally:
        for parameter, gradient in zip(parameters, kept, strict=True):
            parameter.grad = gradient
        for hooks, foreign in resting:
            hooks.update(foreign)


def _hooks_of(parameter: nn.Parameter) -> list[dict[int, Any]]:
    """The hooks by number, as torch holds them."""
    found = (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
    return [hooks for hooks in found if hooks]


def _foreign(hooks: dict[int, Any]) -> dict[int, Any]:
    return {key: hook for key, hook in hooks.items() if not str(hook.__module__).startswith("autopart.runtime.")}


def _magnitudes(gradient: Tensor) -> Tensor:
    """Of complex numbers the real ones that their norm is of, as torch takes no real type for it."""
    return gradient.abs() if gradient.is_complex() else gradient


def clip_gradients(
    manifest: Manifest, mesh: Mesh, parameters: dict[str, nn.Parameter], max_norm: float, norm_type: float = 2.0
) -> Tensor:
    """Scales all gradients so that the norm over the whole model is at most ``max_norm``; returns the norm before.

    Each element is counted once, however many ranks hold it.
    """
    specs = {spec.name: spec for spec in manifest.parameters}
    norms = [
        torch.linalg.vector_norm(_magnitudes(plain(parameter.grad)), norm_type, dtype=torch.float64)
        for name, parameter in parameters.items()
        if parameter.grad is not None and counted(specs[name], mesh)
    ]
    norm = reduce_norms(torch.stack(norms) if norms else torch.zeros(0), norm_type, mesh)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in parameters.values():
        if parameter.grad is not None:
            parameter.grad.mul_(scale.to(parameter.grad.dtype))
    return norm
