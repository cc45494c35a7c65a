"""The peak memory of a plan's stages, from the code that is emitted for them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import fx

from autopart.passes.conversion import Axes
from autopart.passes.emit.program import gradient_roots
from autopart.passes.emit.source import StageSource
from autopart.passes.partition import StageGraph
from autopart.passes.peak import Peak, peak
from autopart.passes.peak_code import Message
from autopart.passes.program import Program
from autopart.realize import Realization
from autopart.runtime.buckets import gradient_buckets, learning_at, summed_bytes, tensor_bytes
from autopart.runtime.manifest import ParameterSpec


def stage_peaks(
    program: Program,
    found: Realization,
    samples: int | Sequence[int],
    recompute: Sequence[Collection[str]],
    kind: str,
    axes: Sequence[Axes] | None = None,
    messages: Sequence[Sequence[Message]] | None = None,
    splits: bool = False,
) -> list[Peak]:
    """Bytes of one microbatch of ``samples`` samples on a rank of each stage; parameters are whole on each replica.

    samples: for all stages, or of each. recompute: what each stage computes again in the backward. kind: of devices,
    "cuda" or "cpu". axes: of each stage; None: those of the realization. messages: of each stage, those in which its
    gradients are summed. splits: weights' gradients are left for W.
    """
    counts = [samples] * len(found.stages) if isinstance(samples, int) else samples
    axes = axes or [found.axes] * len(found.stages)
    return [
        peak(
            *(graph, own_axes, count, gradient_roots(program, stage, graph)),
            recompute=own,
            inlined=_inlined(program, stage, graph, own_axes),
            kind=kind,
            sends=len(stage.sends),
            messages=sent,
            splits=splits,
        )
        for stage, graph, own, own_axes, count, sent in zip(
            found.stages, found.local, recompute, axes, counts, messages or [()] * len(found.stages), strict=True
        )
    ]


def gradient_messages(
    specs: Sequence[ParameterSpec], stage: int, stages: Sequence[int], replicas: int, axes: Axes
) -> list[Message]:
    """Of the gradients of a stage, one of a rank's ``stages``; those of divided parameters (ZeRO) are left out.

    specs: all parameters of the program, as the stage stores them, in the model's order.
    """
    sizes, found = [size for _, size in axes], []
    for bucket in gradient_buckets(learning_at(specs, stage, stages), replicas, sizes):
        if bucket.zero:
            continue
        own = sum(tensor_bytes(spec, sizes) for spec in bucket.specs)
        sent = sum(summed_bytes(spec, tensor_bytes(spec, sizes)) for spec in bucket.specs)
        names, several = frozenset(spec.name for spec in bucket.specs), len(bucket.specs) > 1
        if sent == own:
            found.append(Message(names, own if several else 0, own if several else 0))
        else:  # put together in their own type, then converted
            found.append(Message(names, sent, own, passing=own if several else 0))
    return found


def _inlined(program: Program, stage: StageGraph, graph: fx.Graph, axes: Axes) -> set[fx.Node]:
    """The values that get no name in the stage's code."""
    results = len(stage.sends) + len(stage.outputs)
    source = StageSource(graph, axes, program.tensors, ("",), results, stage.updates)
    source.write()
    return source.inlined
