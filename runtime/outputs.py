"""Puts the outputs of microbatches and replicas together, on every rank; cuts their gradients apart again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from autopart.runtime.collectives import broadcast_in_place, gather_shards, start_broadcast, sum_in_place, sum_over
from autopart.runtime.inputs import Division
from autopart.runtime.links import dtype_of
from autopart.runtime.manifest import OutputSpec, size_of
from autopart.runtime.mesh import Axis, Mesh
from autopart.runtime.placement import Kind, Placement, local_cuts


def collect(spec: OutputSpec, outputs: Mapping[int, Mapping[str, Tensor]], division: Division, mesh: Mesh) -> Tensor:
    """One output of the whole batch, equal on all ranks.

    outputs: what this rank computed, by microbatch and name; only ranks of the output's stage need to have it. All
    ranks call it for the same outputs in the same order.
    """
    whole = _own_or_empty(spec, outputs, division, mesh)
    broadcast_in_place(whole, *mesh.route_from(spec.stage), "step")
    return whole


def collect_later(
    spec: OutputSpec, outputs: Mapping[int, Mapping[str, Tensor]], division: Division, mesh: Mesh
) -> Callable[[], Tensor]:
    """As :func:`collect`, begun now and waited for when the result is called."""
    whole = _own_or_empty(spec, outputs, division, mesh)
    work = start_broadcast(whole, *mesh.route_from(spec.stage), "step")

    def wait() -> Tensor:
        if work is not None:
            work.wait()
        return whole

    return wait


def _own_or_empty(
    spec: OutputSpec, outputs: Mapping[int, Mapping[str, Tensor]], division: Division, mesh: Mesh
) -> Tensor:
    """The output on ranks of its stage, elsewhere room for it."""
    if spec.stage in mesh.stages:
        pieces = [_whole(spec, outputs[k][spec.name], division, mesh) for k in range(division.microbatches)]
        # A batch that was not divided over the replicas is whole on each.
        data = mesh.data if division.replicas > 1 else Axis(mesh.data.name, traffic=mesh.traffic)
        whole = _combine(spec, pieces, data, division)
    else:
        batch = division.batch if spec.combine == "cat" else division.samples
        shape = [size_of(size, batch) for size in spec.shape]
        whole = torch.empty(shape, dtype=dtype_of(spec.dtype), device=mesh.device)
    return whole


def _whole(spec: OutputSpec, piece: Tensor, division: Division, mesh: Mesh) -> Tensor:
    """A microbatch's output, put together over the tensor axes: sums of shares, then the whole from its shares."""
    placements = [Placement.parse(text) for text in spec.placements]
    if not placements:  # whole on every rank
        return piece
    for axis, placement in zip(mesh.tensor_axes, placements, strict=True):
        if placement.kind is Kind.PARTIAL and axis.size > 1:
            piece = sum_over(piece, axis, "step")
    for position, cut in reversed(local_cuts(placements, mesh.tensor_sizes)):
        axis = mesh.tensor_axes[position]
        piece = gather_shards(piece, axis, cut.dim, cut.blocks(division.samples), "step")
    return piece


def _combine(spec: OutputSpec, pieces: Sequence[Tensor], data: Axis, division: Division) -> Tensor:
    if spec.combine == "same":
        return pieces[0].clone(memory_format=torch.contiguous_format)
    if spec.combine == "sum":
        total = torch.stack(tuple(pieces)).sum(0) if len(pieces) > 1 else pieces[0].clone()
        sum_in_place(total, data, "step")
        return total
    assert spec.combine == "cat", f"unknown way to combine an output: {spec.combine!r}"
    if division.shares:
        return _fill(spec, pieces, data, division)
    whole = torch.cat([_in_blocks(spec, piece) for piece in pieces], spec.batch_dim + 1)
    whole = whole.flatten(spec.batch_dim, spec.batch_dim + 1)
    if data.size > 1:
        whole = gather_shards(whole, data, spec.batch_dim, spec.blocks, "step")
    return whole.contiguous()


def _in_blocks(spec: OutputSpec, tensor: Tensor) -> Tensor:
    """A view whose dim behind ``batch_dim`` holds samples and what belongs to one, and the one before it the blocks."""
    return tensor.unflatten(spec.batch_dim, (spec.blocks, tensor.size(spec.batch_dim) // spec.blocks))


def _fill(spec: OutputSpec, pieces: Sequence[Tensor], data: Axis, division: Division) -> Tensor:
    """Pieces of unlike sizes, which alternate with those of other replicas: each at its place, added up."""
    rows = size_of(spec.shape[spec.batch_dim], 1) // spec.blocks
    first = pieces[0]
    # sums know no booleans
    kind = torch.uint8 if first.dtype is torch.bool else first.dtype
    whole = torch.zeros([size_of(size, division.batch) for size in spec.shape], dtype=kind, device=first.device)
    for microbatch, piece in enumerate(pieces):
        piece = _in_blocks(spec, piece.detach())
        place = _in_blocks(spec, whole).narrow(
            spec.batch_dim + 1, division.start(microbatch) * rows, piece.size(spec.batch_dim + 1)
        )
        place.copy_(piece)
    sum_in_place(whole, data, "step")
    return whole.to(first.dtype)


def gradient_piece(spec: OutputSpec, gradient: Tensor, division: Division, microbatch: int) -> Tensor | None:
    """What of the whole output's gradient belongs to this rank's microbatch."""
    if spec.combine == "sum":
        return gradient
    if spec.combine == "same":
        # Every microbatch and replica computes the same value; one of them stands for it.
        return gradient if microbatch == 0 and division.replica == 0 else torch.zeros_like(gradient)
    blocks = _in_blocks(spec, gradient)
    rows = blocks.size(spec.batch_dim + 1) // division.batch
    piece = blocks.narrow(spec.batch_dim + 1, division.start(microbatch) * rows, division.samples * rows)
    return piece.flatten(spec.batch_dim, spec.batch_dim + 1)
