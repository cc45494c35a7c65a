"""What the stages of a plan exchange: collectives of one microbatch, and those of a step for the parameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from autopart.analysis import Analysis
from autopart.passes.backward_memory import is_parameter
from autopart.passes.conversion import Axes
from autopart.passes.data_axis import (
    Gathering,
    UnitMessages,
    gathering_counts,
    gatherings,
    read_bytes,
    unit_messages,
    units,
)
from autopart.passes.emit.layers import runs_of
from autopart.passes.emit.program import Layout, StageMesh, gradient_roots, parameter_specs
from autopart.passes.kept import rerun
from autopart.passes.program import reached_by_gradients
from autopart.passes.shard import collective_counts
from autopart.passes.unlike_meshes import StageSetting
from autopart.realize import Realization
from autopart.runtime.buckets import (
    gradient_buckets,
    home_of,
    kept_buckets,
    learning_at,
    pass_counts,
    summed_bytes,
    tensor_bytes,
    update_counts,
)
from autopart.runtime.links import dtype_of
from autopart.runtime.manifest import ParameterSpec

# operation -> {"calls": ..., "bytes": ...}, as a plan writes them
Collectives = dict[str, dict[str, int]]


@dataclass(frozen=True, slots=True)
class Message:
    """Of several parameters that replicas update in shares: its bytes, and the ops that read these."""

    size: int
    readers: tuple[fx.Node, ...]


@dataclass(frozen=True, slots=True)
class Exchanges:
    """Collectives of one rank of a stage by operation, over all axes of the stage and, per step, between stages.

    axes: those of a microbatch by axis. units: of them what replicas exchange for parameters that are gathered at use,
    in order; scattered: messages of the gradients of others that they divide, in each backward (level 2). arriving: of
    whole weights, when a step begins (levels 1 and 2). All in the order of sending. limit: bytes that fill a message;
    read: the most of whole weights that one statement reads.
    """

    microbatch: Collectives
    step: Collectives
    axes: dict[str, Collectives]
    units: Sequence[UnitMessages]
    scattered: Sequence[Message]
    arriving: Sequence[Message]
    limit: int = 0
    read: int = 0


def exchanges(
    analysis: Analysis,
    found: Realization,
    replicas: int,
    samples: int,
    recompute: Sequence[Collection[str]],
    bucket_bytes: int,
    places: Sequence[int] | None = None,
) -> list[Exchanges]:
    """For every stage; a microbatch has ``samples`` samples on one replica.

    recompute: the layers of each stage that run again in the backward. bucket_bytes: of a message of gradients.
    places: default, each stage on its own.
    """
    places = range(len(found.stages)) if places is None else places
    layout = Layout((), replicas, found.axes, "", 1, (), (), cuts=found.cuts)
    in_order = _specs(analysis, found, layout)
    return [
        _of_stage(
            *(analysis, found, index, in_order, [(("dp", replicas), *found.axes)] * len(found.stages)),
            *(samples, recompute[index], places, bucket_bytes),
        )
        for index in range(len(found.stages))
    ]


def exchanges_unlike(
    analysis: Analysis,
    found: Realization,
    settings: Sequence[StageSetting],
    rows: Sequence[int],
    recompute: Sequence[Collection[str]],
    places: Sequence[int],
    bucket_bytes: int,
) -> list[Exchanges]:
    """For every stage by its own setting. rows: samples of a microbatch on the largest replica of each stage."""
    seen = specs_by_stage(analysis, found, settings)
    meshes = [(("dp", own.dp), *own.axes) for own in settings]
    return [
        _of_stage(analysis, found, index, seen[index], meshes, rows[index], recompute[index], places, bucket_bytes)
        for index in range(len(meshes))
    ]


def specs_by_stage(
    analysis: Analysis, found: Realization, settings: Sequence[StageSetting]
) -> list[list[ParameterSpec]]:
    """All parameters in the model's order, as each stage stores them."""
    meshes = tuple(StageMesh(own.dp, own.axes, own.storage, own.shares) for own in settings)
    layout = Layout((), settings[0].dp, found.axes, "", 1, (), (), cuts=found.cuts, unlike=meshes)
    in_order = _specs(analysis, found, layout)
    placed = [dict(zip(spec.stages, spec.by_stage, strict=True)) for spec in in_order]
    return [
        [
            replace(spec, placements=by_stage.get(index, spec.placements))
            for spec, by_stage in zip(in_order, placed, strict=True)
        ]
        for index in range(len(settings))
    ]


def _specs(analysis: Analysis, found: Realization, layout: Layout) -> list[ParameterSpec]:
    program = analysis.program
    specs = parameter_specs(program, analysis.split, found.stages, found.local, found.storage, layout)
    by_name = {spec.name: spec for spec in specs}
    return [by_name[info.name] for info in program.parameters]


def _of_stage(
    analysis: Analysis,
    found: Realization,
    index: int,
    in_order: Sequence[ParameterSpec],
    meshes: Sequence[Axes],
    samples: int,
    recompute: Collection[str],
    places: Sequence[int],
    bucket_bytes: int,
) -> Exchanges:
    stage, graph, mesh = found.stages[index], found.local[index], meshes[index]
    axes = mesh[1:]
    runs = runs_of(graph)
    reached = reached_by_gradients(gradient_roots(analysis.program, stage, graph))
    reduce_dtype = analysis.program.reduce_dtype
    summed = dtype_of(reduce_dtype) if reduce_dtype else None
    statements = gatherings(runs, found.cuts, recompute)
    gathers = units(statements, found.cuts)
    messages = unit_messages(gathers, reached, axes, summed)
    microbatch: Collectives = {}
    by_axis: dict[str, Collectives] = {}
    passed: dict[tuple[str, str], dict[str, list[int]]] = {}
    for (operation, axis), count in pass_counts(in_order, stage.index, mesh, places, bucket_bytes).items():
        passed.setdefault((axis, "backward"), {})[operation] = count
    gathered = gathering_counts(messages)
    for part in (collective_counts(graph, axes, samples, rerun(graph, recompute)), gathered, passed):
        for (axis, _), operations in part.items():
            _add(microbatch, operations)
            _add(by_axis.setdefault(axis, {}), operations)
    step: Collectives = {}
    for (operation, _), count in update_counts(in_order, stage.index, meshes, places, bucket_bytes).items():
        _add(step, {operation: count})
    own = [other for other, place in enumerate(places) if place == places[index]]
    home = [spec for spec in in_order if stage.index in spec.stages and home_of(spec, own) == stage.index]
    learning = learning_at(in_order, stage.index, own)
    scattered = _scattered(learning, graph, mesh[0][1], axes, bucket_bytes) if mesh[0][1] > 1 else []
    arriving = _arriving(home, statements, axes, bucket_bytes) if mesh[0][1] > 1 else []
    kept = {spec.name: spec for spec in home if spec.zero in (1, 2)}
    read = max((read_bytes(statement, kept, [size for _, size in axes]) for statement in statements), default=0)
    return Exchanges(microbatch, step, by_axis, messages, scattered, arriving, bucket_bytes, read)


def _scattered(
    learning: Sequence[ParameterSpec], graph: fx.Graph, replicas: int, axes: Axes, bucket_bytes: int
) -> list[Message]:
    """learning: parameters with gradients that the stage sums."""
    read = {node.meta["name"]: tuple(node.users) for node in graph.nodes if is_parameter(node)}
    sizes = [size for _, size in axes]
    return [
        Message(
            sum(summed_bytes(spec, tensor_bytes(spec, sizes)) for spec in bucket.specs),
            tuple(node for spec in bucket.specs for node in read.get(spec.name, ())),
        )
        for bucket in gradient_buckets(learning, replicas, sizes, bucket_bytes)
        if bucket.zero == 2
    ]


def _arriving(
    home: Sequence[ParameterSpec], statements: Sequence[Gathering], axes: Axes, bucket_bytes: int
) -> list[Message]:
    """home: the parameters that arrive with this stage."""
    readers: dict[str, list[fx.Node]] = {}
    for statement in statements:
        for node in statement.parameters:
            readers.setdefault(node.meta["name"], []).extend(statement.readers)
    sizes = [size for _, size in axes]
    return [
        Message(
            sum(tensor_bytes(spec, sizes) for spec in run),
            tuple(node for spec in run for node in readers.get(spec.name, ())),
        )
        for run in kept_buckets(home, sizes, bucket_bytes)
    ]


def _add(totals: Collectives, operations: Mapping[str, Sequence[int]]) -> None:
    for operation, (calls, size) in operations.items():
        entry = totals.setdefault(operation, {"calls": 0, "bytes": 0})
        entry["calls"] += calls
        entry["bytes"] += size
