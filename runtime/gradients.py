"""Sums of gradients over ranks, once per step: over replicas, partial ones over tensor axes, tied ones over stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from autopart.runtime.collectives import sum_in_place
from autopart.runtime.manifest import Manifest, ParameterSpec
from autopart.runtime.mesh import Axis, Mesh
from autopart.runtime.norms import counted, plain, reduce_norms

BUCKET_BYTES = 25 * 2**20


class GradientSums:
    """The sums that a rank takes part in. ``parameters``: its own trainable ones by name, in the plan's order."""

    def __init__(
        self,
        manifest: Manifest,
        mesh: Mesh,
        parameters: dict[str, nn.Parameter],
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._mesh = mesh
        self._bucket_bytes = bucket_bytes
        specs = {spec.name: spec for spec in manifest.parameters}
        self._own: list[tuple[ParameterSpec, nn.Parameter]] = [(specs[name], p) for name, p in parameters.items()]
        # Every rank meets the sets of tied stages in the order of the whole plan, so no two wait for each other.
        ties = dict.fromkeys(specs[n].stages for n in manifest.parameter_order if len(specs[n].stages) > 1)
        self._ties = [(stages, axis) for stages in ties if (axis := mesh.tie(stages)) is not None]

    def reduce(self) -> None:
        """Replaces every ``.grad`` by its sum. A parameter without a gradient anywhere keeps None."""
        own = [(spec, p) for spec, p in self._own if p.requires_grad]
        with torch.no_grad():
            sum_in_buckets(_gradients(p for _, p in own), self._mesh.data, self._bucket_bytes)
            for position, axis in enumerate(self._mesh.tensor_axes):
                partial = (p for spec, p in own if spec.placements and spec.placements[position] == "B")
                sum_in_buckets(_gradients(partial), axis, self._bucket_bytes)
            for stages, axis in self._ties:
                self._reduce_tied([p for spec, p in own if spec.stages == stages], axis, self._mesh.counts_in(stages))

    def _reduce_tied(self, parameters: Sequence[nn.Parameter], axis: Axis, counts: bool) -> None:
        """A stage may use a tied parameter without a gradient reaching it, and still needs the others' sum.

        counts: whether this rank's gradients are among those that are added.
        """
        if not parameters:
            return
        device = parameters[0].device
        present = torch.tensor([float(p.grad is not None) for p in parameters], device=device)
        sum_in_place(present, axis, "step")
        used = [p for p, count in zip(parameters, present.tolist(), strict=True) if count]
        for parameter in used:
            if parameter.grad is None or not counts:
                parameter.grad = torch.zeros_like(parameter)
        sum_in_buckets(_gradients(used), axis, self._bucket_bytes)


def _gradients(parameters: Iterator[nn.Parameter] | Sequence[nn.Parameter]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def sum_in_buckets(tensors: Sequence[Tensor], axis: Axis, bucket_bytes: int = BUCKET_BYTES) -> None:
    """Replaces each tensor by its sum over the axis, several of one dtype in one call of up to ``bucket_bytes``."""
    if axis.size == 1:
        return
    for bucket in _buckets(tensors, bucket_bytes):
        if len(bucket) == 1 and bucket[0].is_contiguous():
            sum_in_place(bucket[0], axis, "step")
            continue
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        sum_in_place(flat, axis, "step")
        pieces = flat.split([tensor.numel() for tensor in bucket])
        for tensor, piece in zip(bucket, pieces, strict=True):
            tensor.copy_(piece.view(tensor.shape))


def _buckets(tensors: Sequence[Tensor], bucket_bytes: int) -> list[list[Tensor]]:
    """Groups of one dtype, in order, each of at most that many bytes or of one tensor."""
    buckets: list[list[Tensor]] = []
    open_buckets: dict[torch.dtype, tuple[list[Tensor], int]] = {}
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        bucket, filled = open_buckets.get(tensor.dtype, ([], 0))
        if not bucket or filled + size > bucket_bytes:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(tensor)
        open_buckets[tensor.dtype] = (bucket, filled + size)
    return buckets


@contextmanager
def separate_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[list[Tensor | None]]:
    """Inside, the parameters have no gradients; afterwards the list holds those made inside, and ``.grad`` the old."""
    kept = [p.grad for p in parameters]
    made: list[Tensor | None] = []
    for parameter in parameters:
        parameter.grad = None
    try:
        yield made
        made.extend(p.grad for p in parameters)
    finally:
        for parameter, gradient in zip(parameters, kept, strict=True):
            parameter.grad = gradient


def average_buffers(manifest: Manifest, mesh: Mesh, buffers: dict[str, Tensor]) -> None:
    """Makes running statistics equal on all replicas: their mean over the data axis."""
    names = [s.name for s in manifest.parameters if s.buffer and s.mutated and s.name in buffers]
    statistics = [buffers[name] for name in names if buffers[name].is_floating_point()]
    if mesh.data.size == 1 or not statistics:
        return
    with torch.no_grad():
        sum_in_buckets(statistics, mesh.data)
        for tensor in statistics:
            tensor /= mesh.data.size


def clip_gradients(
    manifest: Manifest, mesh: Mesh, parameters: dict[str, nn.Parameter], max_norm: float, norm_type: float = 2.0
) -> Tensor:
    """Scales all gradients so that the norm over the whole model is at most ``max_norm``; returns the norm before.

    Each element is counted once, however many ranks hold it.
    """
    specs = {spec.name: spec for spec in manifest.parameters}
    norms = [
        torch.linalg.vector_norm(plain(parameter.grad), norm_type, dtype=torch.float64)
        for name, parameter in parameters.items()
        if parameter.grad is not None and counted(specs[name], mesh)
    ]
    norm = reduce_norms(torch.stack(norms) if norms else torch.zeros(0), norm_type, mesh)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in parameters.values():
        if parameter.grad is not None:
            parameter.grad.mul_(scale.to(parameter.grad.dtype))
    return norm
