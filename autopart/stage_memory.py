"""The peak memory of a plan's stages, from the code that is emitted for them."""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set

from torch import fx

from autopart.passes.conversion import Axes
from autopart.passes.emit.program import gradient_roots
from autopart.passes.emit.releases import Lifetimes
from autopart.passes.emit.source import StageSource
from autopart.passes.partition import StageGraph
from autopart.passes.peak import Peak, peak
from autopart.passes.peak_code import Message
from autopart.passes.peak_weights import Divided, Scattered, scattered
from autopart.passes.program import Program
from autopart.realize import Realization
from autopart.runtime.buckets import gradient_buckets, home_of, learning_at, summed_bytes, tensor_bytes
from autopart.runtime.manifest import ParameterSpec


def stage_peaks(
    program: Program,
    found: Realization,
    samples: int | Sequence[int],
    recompute: Sequence[Collection[str]],
    kind: str,
    axes: Sequence[Axes] | None = None,
    messages: Sequence[Sequence[Message]] | None = None,
    splits: Sequence[bool] | None = None,
    divided: Sequence[Divided] | None = None,
    there: Sequence[Set[str]] | None = None,
    alone: Sequence[bool] | None = None,
) -> list[Peak]:
    """Bytes of one microbatch of ``samples`` samples on a rank of each stage.

    samples: for all stages, or of each. recompute: what each stage computes again in the backward. kind: of devices,
    "cuda" or "cpu". axes: of each stage; None: those of the realization. messages: of each stage, those in which its
    gradients are summed. splits: of each, whether its weights' gradients are left for W. divided: of each, the weights
    of which replicas have shares. there: of each, the parameters whose gradients other stages of its rank have made by
    then. alone: of each, whether its rank has no other.
    """
    counts = [samples] * len(found.stages) if isinstance(samples, int) else samples
    axes = axes or [found.axes] * len(found.stages)
    return [
        peak(
            *(graph, own_axes, count, gradient_roots(program, stage, graph)),
            recompute=own,
            lifetimes=_lifetimes(program, stage, graph, own_axes, own, shares),
            kind=kind,
            sends=len(stage.sends),
            messages=sent,
            splits=apart,
            divided=shares,
            there=made,
            alone=single,
        )
        for stage, graph, own, own_axes, count, sent, apart, shares, made, single in zip(
            *(found.stages, found.local, recompute, axes, counts),
            messages or [()] * len(found.stages),
            splits or [False] * len(found.stages),
            divided or [Divided() for _ in found.stages],
            there or [frozenset[str]()] * len(found.stages),
            alone or [True] * len(found.stages),
            strict=True,
        )
    ]


def gradient_messages(
    specs: Sequence[ParameterSpec],
    stage: int,
    stages: Sequence[int],
    replicas: int,
    axes: Axes,
    bucket_bytes: int,
    kind: str,
) -> list[Message]:
    """Of the gradients of a stage, one of a rank's ``stages``; those that ZeRO-2 and -3 sum in each backward left out.

    specs: all parameters of the program, as the stage stores them, in the model's order. bucket_bytes: of gradients
    that share a message. kind: of devices, "cuda" or "cpu".
    """
    sizes, found = [size for _, size in axes], []
    for bucket in gradient_buckets(learning_at(specs, stage, stages), replicas, sizes, bucket_bytes):
        if bucket.zero >= 2:
            continue
        if bucket.zero == 1:
            found.append(_divided_message(scattered(bucket.specs, sizes, replicas), kind == "cpu"))
            continue
        own = sum(tensor_bytes(spec, sizes) for spec in bucket.specs)
        sent = sum(summed_bytes(spec, tensor_bytes(spec, sizes)) for spec in bucket.specs)
        names, several = frozenset(spec.name for spec in bucket.specs), len(bucket.specs) > 1
        if sent == own:
            found.append(Message(names, *[own if several else 0] * 3))
        else:  # put together in their own type, then converted
            found.append(Message(names, sent, own, sent + (own if several else 0)))
    return found


def made_before(specs: Sequence[ParameterSpec], stage: int, stages: Sequence[int]) -> frozenset[str]:
    """The parameters of a stage, one of a rank's ``stages``, whose gradients the rank has when the stage's first
    microbatch goes back: those of stages behind it, where the microbatch was before.
    """
    behind = [other for other in stages if other > stage]
    return frozenset(spec.name for spec in specs if stage in spec.stages and any(map(spec.learns, behind)))


def waiting_bytes(specs: Sequence[ParameterSpec], stage: int, stages: Sequence[int], axes: Axes) -> dict[int, float]:
    """Of a stage, one of a rank's ``stages``: bytes of gradients that wait whole for the next backward of another, in
    whose messages ZeRO-2 sums them; by that stage.
    """
    found: dict[int, float] = {}
    for spec in specs:
        home = home_of(spec, stages)
        if spec.zero == 2 and home is not None and home != stage and spec.learns(stage):
            found[home] = found.get(home, 0.0) + tensor_bytes(spec, [size for _, size in axes])
    return found


def _divided_message(sent: Scattered, copied: bool) -> Message:
    """ZeRO-1's, which stays until the end of the step beside what arrives of it. copied: a copy of it does (gloo)."""
    made = sent.converted + (0.0 if sent.alone else sent.whole)
    going = sent.own + (sent.sent if copied else 0.0)
    if sent.alone and not sent.converted:  # the gradient itself
        return Message(sent.names, sent.own, 0.0, going)
    return Message(sent.names, sent.sent + sent.own, sent.whole, max(made, sent.sent - sent.whole + sent.last + going))


def _lifetimes(
    program: Program,
    stage: StageGraph,
    graph: fx.Graph,
    axes: Axes,
    recompute: Collection[str],
    divided: Divided,
) -> Lifetimes:
    """Of the names in the stage's code, in which gathers of divided weights count as well."""
    results = len(stage.sends) + len(stage.outputs)
    source = StageSource(
        *(graph, axes, program.tensors, ("",), results, stage.updates, recompute),
        cuts=divided.cuts,
        replicas=divided.replicas,
    )
    source.write()
    return source.lifetimes
