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
    program: Program,
    found: Realization,
    samples: int | Sequence[int],
    recompute: Sequence[Collection[str]],
    kind: str,
    axes: Sequence[Axes] | None = None,
    replicas: Sequence[int] | None = None,
    splits: bool = False,
) -> list[Peak]:
    """Bytes of one microbatch of ``samples`` samples on a rank of each stage; parameters are whole on each replica.

    samples: for all stages, or of each. recompute: what each stage computes again in the backward. kind: of devices,
    "cuda" or "cpu". axes: of each stage; None: those of the realization. replicas: of each stage; where there are
    several they sum gradients in messages. splits: weights' gradients are left for W.
    """
    counts = [samples] * len(found.stages) if isinstance(samples, int) else samples
    axes = axes or [found.axes] * len(found.stages)
    order = [info.name for info in reversed(program.parameters) if info.name not in found.cuts]
    return [
        peak(
            *(graph, own_axes, count, gradient_roots(program, stage, graph)),
            recompute=own,
            inlined=_inlined(program, stage, graph, own_axes),
            kind=kind,
            sends=len(stage.sends),
            summed=order if several > 1 else (),
            splits=splits,
        )
        for stage, graph, own, own_axes, count, several in zip(
            found.stages, found.local, recompute, axes, counts, replicas or [1] * len(found.stages), strict=True
        )
    ]


def _inlined(program: Program, stage: StageGraph, graph: fx.Graph, axes: Axes) -> set[fx.Node]:
    """The values that get no name in the stage's code."""
    results = len(stage.sends) + len(stage.outputs)
    source = StageSource(graph, axes, program.tensors, ("",), results, stage.updates)
    source.write()
    return source.inlined
