"""Which parameters share a message when gradients are summed or weights gathered; all ranks and the plan agree on it.

A bucket's message holds tensors of one dtype that are treated alike, up to a limit, a plan's ``bucket_bytes``, or one
tensor. Gradients are taken from the last parameter to the first, about the order in which a backward makes them.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from autopart.runtime.links import dtype_of
from autopart.runtime.manifest import ParameterSpec
from autopart.runtime.placement import Placement
from autopart.runtime.ties import copies_in
from autopart.runtime.traffic import Operation

BUCKET_BYTES = 25 * 2**20
"""Of plans that say nothing else."""

_Item = TypeVar("_Item")
_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters whose gradients are summed in one message.

    zero: of all of them. partial: positions of the tensor axes on which the gradients are partial sums as well.
    """

    specs: tuple[ParameterSpec, ...]
    zero: int
    partial: tuple[int, ...]


def tensor_bytes(spec: ParameterSpec, sizes: Sequence[int]) -> int:
    """Bytes of what the tensor axes leave to one rank, before the data axis divides it. sizes: of the tensor axes."""
    shared = math.prod(
        size for text, size in zip(spec.placements, sizes, strict=False) if Placement.parse(text).is_shard
    )
    return math.prod(spec.shape) * dtype_of(spec.dtype).itemsize // shared


def summed_bytes(spec: ParameterSpec, size: int) -> int:
    """What ``size`` bytes of a parameter's gradient are in the dtype that they are summed in."""
    return size // dtype_of(spec.dtype).itemsize * dtype_of(spec.summed).itemsize if spec.summed else size


def summed_over(spec: ParameterSpec, sizes: Sequence[int]) -> tuple[int, ...]:
    """Positions of the tensor axes on which a parameter's gradients are partial sums. sizes: of the axes."""
    placed = enumerate(zip(spec.placements, sizes, strict=False))
    return tuple(index for index, (text, size) in placed if text == "B" and size > 1)


def gradient_buckets(specs: Sequence[ParameterSpec], replicas: int, sizes: Sequence[int], limit: int) -> list[Bucket]:
    """The buckets of parameters with gradients, given in the model's order; those that need no sum are left out.

    replicas, sizes: of the data axis and of the tensor axes. ZeRO-3's gradients are summed over replicas where they
    arise, so that only their partial sums are left. In the order in which a backward completes them.
    """
    found: list[tuple[ParameterSpec, tuple[str, int, tuple[int, ...]], int]] = []
    for spec in reversed(specs):
        partial = summed_over(spec, sizes)
        if partial or (replicas > 1 and spec.zero < 3):
            size = tensor_bytes(spec, sizes) // (replicas if spec.zero == 3 else 1)
            found.append((spec, (spec.dtype, spec.zero, partial), size))
    return [Bucket(members, zero, partial) for members, (_, zero, partial) in messages_of(found, limit)]


def messages_of(items: Sequence[tuple[_Item, _Key, float]], limit: float) -> list[tuple[tuple[_Item, ...], _Key]]:
    """Items with what those of one message have in common and with their bytes, as messages in the order of sending.

    Items come in the order in which they are expected, messages in that of their last items.
    """
    groups: dict[_Key, list[tuple[tuple[int, _Item], float]]] = {}
    for index, (item, key, size) in enumerate(items):
        groups.setdefault(key, []).append(((index, item), size))
    runs = [(run, key) for key, found in groups.items() for run in split_by_bytes(found, limit)]
    runs.sort(key=lambda run: run[0][-1][0])
    return [(tuple(item for _, item in run), key) for run, key in runs]


def kept_buckets(specs: Iterable[ParameterSpec], sizes: Sequence[int], limit: int) -> list[tuple[ParameterSpec, ...]]:
    """The weights that are kept whole but updated in shares (ZeRO-1, -2), as they are gathered after an update."""
    groups: dict[str, list[tuple[ParameterSpec, int]]] = {}
    for spec in specs:
        if spec.zero in (1, 2):
            groups.setdefault(spec.dtype, []).append((spec, tensor_bytes(spec, sizes)))
    return [bucket for found in groups.values() for bucket in split_by_bytes(found, limit)]


def split_by_bytes(items: Iterable[tuple[_Item, float]], limit: float) -> list[tuple[_Item, ...]]:
    """Runs of items of at most ``limit`` bytes together, or of one item."""
    runs: list[list[_Item]] = []
    filled = 0.0
    for item, size in items:
        if not runs or filled + size > limit:
            runs.append([])
            filled = 0.0
        runs[-1].append(item)
        filled += size
    return [tuple(run) for run in runs]


# (operation, axis' name) -> [calls, bytes], counted as autopart.runtime.traffic counts them
Counts = dict[tuple[Operation, str], list[int]]
Mesh = Sequence[tuple[str, int]]


def pass_counts(specs: Sequence[ParameterSpec], stage: int, mesh: Mesh, places: Sequence[int], limit: int) -> Counts:
    """What a rank exchanges in every backward of a stage for ZeRO-2: sums of gradients, divided.

    specs: all parameters of the program, in the model's order. mesh: the data axis and the tensor axes. places: the
    pipeline's rank that runs each stage.
    """
    counts: Counts = {}
    replicas, axes = _split(mesh)
    learning = learning_at(specs, stage, _together(stage, places))
    for bucket in gradient_buckets(learning, replicas, [size for _, size in axes], limit):
        if replicas > 1 and bucket.zero == 2:
            _count(counts, "reduce_scatter", "dp", _summed(bucket.specs, axes))
    return counts


def update_counts(
    specs: Sequence[ParameterSpec], stage: int, meshes: Sequence[Mesh], places: Sequence[int], limit: int
) -> Counts:
    """What a rank exchanges once a step for a stage: gradients are summed, updated weights gathered (ZeRO-1, -2).

    Arguments as for :func:`pass_counts`, meshes: of all stages. Parameters of several ranks of the pipeline are summed
    over these at the end, after a message that says whose gradients exist (one float32 for each); where these have
    copies (:mod:`autopart.runtime.ties`) each sums a share, and all are gathered. What several stages of one rank share
    counts for the first.
    """
    counts: Counts = {}
    replicas, axes = _split(meshes[stage])
    sizes, together = [size for _, size in axes], _together(stage, places)
    if replicas > 1:
        for run in kept_buckets((spec for spec in specs if home_of(spec, together) == stage), sizes, limit):
            _count(counts, "all_gather", "dp", _bytes(run, axes))
    for bucket in gradient_buckets(learning_at(specs, stage, together), replicas, sizes, limit):
        size = _summed(bucket.specs, axes)
        if replicas > 1 and bucket.zero < 2:
            _count(counts, "reduce_scatter" if bucket.zero else "all_reduce", "dp", size)
        for position in bucket.partial:
            _count(counts, "all_reduce", axes[position][0], size // (replicas if bucket.zero else 1))
    for tie in ties_of(specs):
        if stage == next((s for s in together if s in tie), None) and len({places[s] for s in tie}) > 1:
            tied = [spec for spec in specs if spec.stages == tie and spec.trainable and not spec.buffer]
            _count(counts, "all_reduce", "stage", 4 * len(tied))
            used = [spec for spec in tied if any(map(spec.learns, tie))]
            copies = copies_in([[size for _, size in meshes[other]] for other in tie])
            for run in tied_buckets(used, replicas, sizes, limit):
                size = sum(summed_bytes(spec, _held(spec, replicas, sizes)) for spec in run)
                if run[0].zero or copies == 1:
                    _count(counts, "all_reduce", "stage", size)
                    continue
                item = dtype_of(run[0].summed or run[0].dtype).itemsize
                share = -(-size // item // copies) * item
                _count(counts, "all_reduce", "stage", share)
                _count(counts, "all_gather", "dp", share * copies)
    return counts


def home_of(spec: ParameterSpec, stages: Sequence[int]) -> int | None:
    """Of the stages of one rank the first that uses a parameter, None when none does."""
    return next((stage for stage in stages if stage in spec.stages), None)


def learning_at(specs: Iterable[ParameterSpec], stage: int, stages: Sequence[int]) -> list[ParameterSpec]:
    """The parameters at home in a stage, one of a rank's ``stages``, that a gradient reaches on that rank."""
    return [spec for spec in specs if home_of(spec, stages) == stage and any(map(spec.learns, stages))]


def _together(stage: int, places: Sequence[int]) -> list[int]:
    """The stages that run on the same rank."""
    return [other for other, place in enumerate(places) if place == places[stage]]


def _count(counts: Counts, operation: Operation, axis: str, size: int) -> None:
    entry = counts.setdefault((operation, axis), [0, 0])
    entry[0] += 1
    entry[1] += size


def _split(mesh: Mesh) -> tuple[int, list[tuple[str, int]]]:
    """The number of replicas, and the tensor axes."""
    return dict(mesh).get("dp", 1), [(name, size) for name, size in mesh if name != "dp"]


def _bytes(specs: Iterable[ParameterSpec], axes: Mesh) -> int:
    return sum(tensor_bytes(spec, [size for _, size in axes]) for spec in specs)


def _summed(specs: Iterable[ParameterSpec], axes: Mesh) -> int:
    sizes = [size for _, size in axes]
    return sum(summed_bytes(spec, tensor_bytes(spec, sizes)) for spec in specs)


def ties_of(specs: Iterable[ParameterSpec]) -> list[tuple[int, ...]]:
    """The sets of stages that share trainable parameters, in the order in which all ranks meet them."""
    return list(
        dict.fromkeys(spec.stages for spec in specs if len(spec.stages) > 1 and spec.trainable and not spec.buffer)
    )


def tied_buckets(
    specs: Iterable[ParameterSpec], replicas: int, sizes: Sequence[int], limit: int
) -> list[tuple[ParameterSpec, ...]]:
    """The gradients of parameters of several stages, as they are summed over these: what one rank holds of them."""
    groups: dict[tuple[str, bool], list[tuple[ParameterSpec, int]]] = {}
    for spec in specs:
        groups.setdefault((spec.dtype, bool(spec.zero)), []).append((spec, _held(spec, replicas, sizes)))
    return [run for found in groups.values() for run in split_by_bytes(found, limit)]


def _held(spec: ParameterSpec, replicas: int, sizes: Sequence[int]) -> int:
    return tensor_bytes(spec, sizes) // (replicas if spec.zero else 1)
