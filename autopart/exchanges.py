"""What the stages of a plan exchange: collectives of one microbatch, and those of a step for the parameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from autopart.analysis import Analysis
from autopart.passes.data_axis import gathering_counts, gatherings, reached_by_gradients
from autopart.passes.emit.layers import runs_of
from autopart.passes.emit.program import Layout, gradient_roots, parameter_specs
from autopart.passes.shard import collective_counts
from autopart.realize import Realization
from autopart.runtime.buckets import pass_counts, update_counts

# operation -> {"calls": ..., "bytes": ...}, as a plan writes them
Collectives = dict[str, dict[str, int]]


@dataclass(frozen=True, slots=True)
class Exchanges:
    """Collectives of one rank of a stage by operation, over all axes of the stage and, per step, between stages."""

    microbatch: Collectives
    step: Collectives


def exchanges(
    analysis: Analysis,
    found: Realization,
    replicas: int,
    samples: int,
    recompute: Sequence[Collection[str]],
    places: Sequence[int] | None = None,
) -> list[Exchanges]:
    """For every stage; a microbatch has ``samples`` samples on one replica.

    recompute: the layers of each stage that run again in the backward. places: default, each stage on its own.
    """
    places = range(len(found.stages)) if places is None else places
    program = analysis.program
    layout = Layout((), replicas, found.axes, "", 1, (), (), cuts=found.cuts)
    arguments = (program, analysis.split, found.stages, found.local, found.storage, layout)
    specs = {spec.name: spec for spec in parameter_specs(*arguments)}
    in_order = [specs[info.name] for info in program.parameters]
    mesh = (("dp", replicas), *found.axes)
    result = []
    for stage, graph in zip(found.stages, found.local, strict=True):
        runs = runs_of(graph)
        reached = reached_by_gradients(graph, gradient_roots(program, stage, graph))
        gathered = gathering_counts(gatherings(runs, found.cuts, recompute[stage.index]), reached, found.axes)
        microbatch: Collectives = {}
        for part in (collective_counts(graph, found.axes, samples), gathered):
            for operations in part.values():
                _add(microbatch, operations)
        _add(microbatch, {key[0]: value for key, value in pass_counts(in_order, stage.index, mesh, places).items()})
        step: Collectives = {}
        for (operation, _), count in update_counts(in_order, stage.index, mesh, places).items():
            _add(step, {operation: count})
        result.append(Exchanges(microbatch, step))
    return result


def _add(totals: Collectives, operations: Mapping[str, Sequence[int]]) -> None:
    for operation, (calls, size) in operations.items():
        entry = totals.setdefault(operation, {"calls": 0, "bytes": 0})
        entry["calls"] += calls
        entry["bytes"] += size
