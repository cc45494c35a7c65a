"""Programs for inputs of other sizes than the planned, such as longer sequences: made when first seen, and kept.

All variants of a program have the same stages, ranks, parameters and buffers: these are the very same tensors, so that
optimizer state, gradients, hooks and checkpoints know nothing of them. What differs is the stages' code and the shapes
that cross between them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autopart.runtime.agreement import model_call, unlike
from autopart.runtime.assumptions import Assumptions
from autopart.runtime.errors import BatchError, PlanError
from autopart.runtime.inputs import BatchMode, Sizes, at_sizes, changes_text, check, sizes_of, sizes_text
from autopart.runtime.links import Links
from autopart.runtime.loading import Originals, build_stage, constants_of, local_share, place, tensors_in
from autopart.runtime.manifest import InputSpec, Manifest, OutputSpec, ParameterSpec
from autopart.runtime.mesh import Mesh
from autopart.runtime.planned_schedules import PlannedSchedules
from autopart.runtime.totals import Totals

# Makes the program for a call's arguments, whose sizes are told as well, on rank 0; returns its folder on every rank.
Compile = Callable[[Sequence[Any], Mapping[str, Any], str], Path]
# What a variant is found by: the inputs' sizes, the samples where a program takes one number of them only, and the
# inputs whose gradients it gives.
Key = tuple[Sizes, int, frozenset[str]]


@dataclass(frozen=True, slots=True, eq=False)
class Variant:
    """What of a program depends on the sizes of its inputs. stages: this rank's, by number; inputs: that they read."""

    manifest: Manifest
    stages: Mapping[int, nn.Module]
    links: Links
    totals: Totals
    schedules: PlannedSchedules
    assumptions: Assumptions
    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]

    @staticmethod
    def of(
        directory: Path, manifest: Manifest, mesh: Mesh, stages: Mapping[int, nn.Module], beside: Links | None = None
    ) -> Variant:
        own = [manifest.stages[stage] for stage in mesh.stages]
        return Variant(
            manifest,
            stages,
            Links(manifest, mesh, beside),
            Totals(directory, manifest, mesh),
            PlannedSchedules(manifest, mesh),
            Assumptions(directory, manifest, mesh),
            tuple(spec for spec in manifest.inputs if any(spec.name in stage.inputs for stage in own)),
            tuple(spec for spec in manifest.outputs if spec.combine != "constant"),
        )

    def tensors(self) -> dict[str, Tensor]:
        """This rank's parameters and buffers by their specs' names."""
        return tensors_in(self.stages.values(), self.manifest)

    def train(self, mode: bool) -> None:
        for stage in self.stages.values():
            if stage.training != mode:
                stage.train(mode)


class Variants:
    """The variants of a program, the planned one included. Until :meth:`allow`, other sizes are refused."""

    def __init__(self, planned: Variant, mesh: Mesh) -> None:
        self.planned = planned
        self._mesh = mesh
        self._compile: Compile | None = None
        self._originals: Originals = {}
        self._most = 0
        # The least recently used first. Of those that are not kept the folder is known still.
        self._kept: dict[Key, Variant] = {}
        self._folders: dict[Key, Path] = {}

    @property
    def made(self) -> int:
        """How many were compiled beside the planned one."""
        return len(self._folders)

    def allow(self, compile_: Compile, originals: Originals, most: int) -> None:
        """From now on other sizes are compiled for. originals: the model's buffers. most: variants that are kept."""
        if self.planned.manifest.schedule != "2bw":  # there a batch of the sizes before is always in flight
            self._compile, self._originals, self._most = compile_, originals, most

    def set_buffer(self, name: str, value: Tensor) -> None:
        """Gives a buffer of the model another value. Raises PlanError for one that the program writes itself."""
        for variant in (self.planned, *self._kept.values()):
            spec = next((s for s in variant.manifest.parameters if s.buffer and name in (s.name, *s.aliases)), None)
            if spec is None:
                continue
            if spec.mutated:
                raise PlanError(
                    f"{name!r} was set on the original once it was planned; forward writes it as well, so the program "
                    "has the value that goes on: take it from state_dict(), and load another by load_state_dict"
                )
            share = local_share(value, spec, self._mesh)
            if spec.name in (own := variant.tensors()):
                with torch.no_grad():
                    own[spec.name].copy_(share)
        if name in self._originals:
            self._originals = {**self._originals, name: value}

    def find(
        self,
        leaves: Mapping[str, Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        mode: BatchMode,
        training: bool,
        gradients: frozenset[str] = frozenset(),
    ) -> tuple[Variant, int]:
        """The variant for a call, and the samples in it. All ranks call it; those that disagree raise BatchError.

        leaves: of the arguments, by path. training: not in evaluation. gradients: of them those whose gradients are
        wanted. Raises InputError for inputs that do not fit, on all ranks where the model cannot be compiled for them,
        and where some ranks train and others evaluate.
        """
        manifest = self.planned.manifest
        if self._compile is None:
            return self.planned, check(manifest, leaves)
        sizes = sizes_of(manifest, leaves)
        samples = check(at_sizes(manifest, sizes, gradients=True), leaves)
        own = _differentiable(manifest)
        key = sizes, samples if manifest.fixed_batch else 0, own if gradients <= own else gradients
        text = sizes_text(manifest, sizes).replace("[b", f"[{samples}")
        if gradients:
            text += f" and gradients of {', '.join(sorted(gradients))}"
        value = (sizes, samples, gradients) if mode == "global" else (key, gradients)
        told = unlike(value, text, model_call(training))
        if told:
            raise BatchError(_disagreement(told, mode))
        return self._at(key, args, kwargs), samples

    def _at(self, key: Key, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Variant:
        manifest = self.planned.manifest
        sizes = tuple(spec.shape for spec in manifest.inputs if spec.kind == "tensor")
        if key == (sizes, manifest.fixed_batch, _differentiable(manifest)):
            return self.planned
        variant = self._kept.pop(key, None)
        if variant is None:
            if key not in self._folders:
                assert self._compile is not None
                self._folders[key] = self._compile(args, kwargs, changes_text(manifest, *key))
            with torch.inference_mode(False):  # it will train as well
                variant = self._load(self._folders[key])
            while len(self._kept) >= self._most:
                _forget(self._kept.pop(next(iter(self._kept))))
        self._kept[key] = variant
        return variant

    def _load(self, directory: Path) -> Variant:
        """A variant from its folder, with the tensors that this rank has."""
        mesh, planned = self._mesh, self.planned.manifest
        manifest = Manifest.load(directory).seen_from(mesh.stages)
        ours, theirs = _lasting(planned), _lasting(manifest)
        differing = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
        if differing:
            raise PlanError(
                f"for inputs of these sizes {differing[0]!r} is another parameter, or used on other stages, than for "
                "the planned ones, so the two cannot share it; pad to the planned sizes"
            )
        before = {spec.name: spec for spec in planned.parameters}
        tensors = self.planned.tensors()
        constants = constants_of(directory)
        held = {
            spec.name: tensors[spec.name]
            for spec in manifest.parameters
            if spec.name in tensors and spec.name not in constants and _alike(spec, before.get(spec.name))
        }
        given = {**self._originals, **constants}
        for spec in manifest.parameters:
            known = spec.name in held or any(given.get(name) is not None for name in (spec.name, *spec.aliases))
            assert known or not set(spec.stages) & set(mesh.stages), f"no value for {spec.name}"
        stages = {stage: build_stage(directory, manifest, mesh, stage) for stage in mesh.stages}
        place(stages, manifest, mesh, given, held)
        return Variant.of(directory, manifest, mesh, stages, self.planned.links)


def _differentiable(manifest: Manifest) -> frozenset[str]:
    return frozenset(spec.name for spec in manifest.inputs if spec.differentiable)


def _lasting(manifest: Manifest) -> dict[str, ParameterSpec]:
    """Parameters, and the buffers that a step changes or a checkpoint has."""
    return {spec.name: spec for spec in manifest.parameters if not spec.buffer or spec.persistent or spec.mutated}


def _alike(one: ParameterSpec, other: ParameterSpec | None) -> bool:
    return other is not None and replace(one, stages=other.stages) == other


def _forget(variant: Variant) -> None:
    for stage in variant.stages.values():
        sys.modules.pop(type(stage).__module__, None)


def _disagreement(told: Sequence[str], mode: BatchMode) -> str:
    other = next(rank for rank, text in enumerate(told) if text != told[0])
    advice = (
        'with batch="local" pad to the longest of all replicas, such as by all-reducing the length with MAX'
        if mode == "local"
        else 'every rank has to pass the same batch; batch="local" takes each replica\'s own'
    )
    return (
        f"ranks were called with inputs of unlike sizes: rank 0 with {told[0]}, rank {other} with {told[other]}; "
        f"{advice}"
    )
