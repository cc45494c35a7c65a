"""Gradients of inputs, as of embeddings, of what a generator made, or of samples to be changed against a model.

A program gives the gradients of those inputs that required one when it was captured; for others a program of the same
plan is made (:mod:`autopart.runtime.variants`). Every rank gets the whole gradient of what it passed: under global
batches that of the whole batch, under local ones that of its replica's samples, of the whole batch's loss either way.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopart.runtime.inputs import Division
from autopart.runtime.links import dtype_of
from autopart.runtime.manifest import InputSpec, Manifest, size_of
from autopart.runtime.mesh import Mesh


def requiring(leaves: Mapping[str, Any]) -> frozenset[str]:
    """The inputs that require a gradient, by path."""
    return frozenset(name for name, leaf in leaves.items() if isinstance(leaf, Tensor) and leaf.requires_grad)


class InputGradients:
    """The gradients of one batch's inputs, added up as microbatches go back.

    names: of the inputs whose gradients are wanted. given: the tensors that the script passed for them, in the order in
    which :meth:`whole` gives their gradients. asked: whether any input requires a gradient, wanted or not.
    """

    def __init__(
        self,
        manifest: Manifest,
        names: Collection[str],
        leaves: Mapping[str, Any],
        division: Division,
        mesh: Mesh,
    ) -> None:
        read = {name for stage in manifest.stages for name in stage.inputs}  # others have none, as in torch
        self._specs = {spec.name: spec for spec in manifest.inputs if spec.name in names and spec.name in read}
        self.given: list[Tensor] = [leaves[name] for name in self._specs]
        self.asked = bool(requiring(leaves))
        self._division, self._mesh = division, mesh
        self._sums: dict[str, Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._specs

    def __bool__(self) -> bool:
        return bool(self._specs)

    def add(self, name: str, microbatch: int, gradient: Tensor) -> None:
        """Of a stage's microbatch, the same on all ranks of the stage's tensor axes."""
        if any(axis.index for axis in self._mesh.tensor_axes):
            return
        spec, division = self._specs[name], self._division
        whole = self._sum(spec)
        if spec.batch_dim is not None:
            rows = self._rows(spec)
            whole = whole.narrow(spec.batch_dim, division.start(microbatch) * rows, division.samples * rows)
        whole += gradient

    def whole(self) -> list[Tensor]:
        """Added up over all stages and replicas. All ranks call it."""
        found = []
        for spec, given in zip(self._specs.values(), self.given, strict=True):
            total, division = self._sum(spec), self._division
            if self._mesh.world_size > 1:
                dist.all_reduce(total)
            if division.is_local and spec.batch_dim is not None:
                rows = self._rows(spec)
                own = division.microbatches * division.samples * rows
                total = total.narrow(spec.batch_dim, division.start(0) * rows, own).clone()
            found.append(total.to(given.device))
        self._sums = {}
        return found

    def _rows(self, spec: InputSpec) -> int:
        assert spec.batch_dim is not None
        return size_of(size, 1) if isinstance(size := spec.shape[spec.batch_dim], str) else 1

    def _sum(self, spec: InputSpec) -> Tensor:
        if spec.name not in self._sums:
            shape = [size_of(size, self._division.batch) for size in spec.shape]
            self._sums[spec.name] = torch.zeros(shape, dtype=dtype_of(spec.dtype), device=self._mesh.device)
        return self._sums[spec.name]
