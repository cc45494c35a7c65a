"""The peak memory of a plan's stages, from the code that is emitted for them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import fx

from autopart.passes.conversion import Axes
from autopart.passes.emit.program import gradient_roots
from autopart.passes.emit.source import StageSource
from autopart.passes.partition import StageGraph
from autopart.passes.peak import Peak, peak
from autopart.passes.program import Program
from autopart.realize import Realization


def stage_peaks(
    program: Program, found: Realization, samples: int, recompute: Sequence[Collection[str]], kind: str
) -> list[Peak]:
    """Bytes of one microbatch of ``samples`` samples on a rank of each stage; parameters are whole on each replica.

    recompute: what each stage computes again in the backward. kind: of devices, "cuda" or "cpu".
    """
    return [
        peak(
            *(graph, found.axes, samples, gradient_roots(program, stage, graph)),
            recompute=own,
            inlined=_inlined(program, stage, graph, found.axes),
            kind=kind,
            sends=len(stage.sends),
        )
        for stage, graph, own in zip(found.stages, found.local, recompute, strict=True)
    ]


def _inlined(program: Program, stage: StageGraph, graph: fx.Graph, axes: Axes) -> set[fx.Node]:
    """The values that get no name in the stage's code."""
    results = len(stage.sends) + len(stage.outputs)
    source = StageSource(graph, axes, program.tensors, ("",), results, stage.updates)
    source.write()
    return source.inlined
