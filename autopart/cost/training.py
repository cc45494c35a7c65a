"""Seconds of a training step of a GPT model under a given plan: pipeline, gradients' reduction, optimizer.

``p`` stages, each of ``v`` chunks, ``m`` microbatches, ``t_i`` seconds of stage i for one microbatch forward and
backward with its collectives and messages (Narayanan et al., SC 2021, section 2.2; ``v = 1`` is 1F1B)::

    pipeline = (m - 1) max_i t_i + max_i t_i + (sum_i t_i - max_i t_i) / v

The fastest stages wait for the slowest, and filling and draining pass each other stage's share once. With equal
stages that is ``m t (1 + (p - 1) / (v m))``: the paper's bubble. After it come the gradients' reduction over replicas
(what of it is not hidden behind the last microbatch's backward), the sum of a tied embedding's gradients, and the
optimizer's step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopart.cluster import Cluster
from autopart.cost.communication import (
    all_gather_seconds,
    all_reduce_seconds,
    reduce_scatter_seconds,
    send_seconds,
)
from autopart.cost.compute import copy_seconds
from autopart.cost.devices import Device, Link
from autopart.cost.gpt import Gpt, Part, embedding_part, head_part, layer_parts
from autopart.runtime.errors import PlanError

_HALF = 2
# Of mixed-precision Adam on one parameter: gradient converted (6), looked through for infinities (4), its norm (4),
# clipped (8), Adam reads gradient, weight, two moments and writes three (28), weight converted (6), zeroing (2).
OPTIMIZER_BYTES = 58
# Weight and gradient in half precision, gradient, weight and two moments in single precision.
STATE_BYTES = 18
_SHARED_STATE_BYTES = 14
_OVERHEAD_BYTES = 1.2e9  # context, workspaces, communication buffers of a V100 job


@dataclass(frozen=True, slots=True)
class Layout:
    """A published plan.

    samples: of one microbatch on one replica. chunks: of the model per stage (interleaving). scatter: a message between
    stages is sent in ``tp`` pieces and gathered on arrival. overlap: the gradients' reduction hides behind the last
    microbatch's backward. sharded: ranks reduce-scatter gradients and update one share of the weights each.
    by_halves: stages may be cut between a layer's attention and MLP.
    """

    tp: int
    pp: int
    dp: int
    samples: int
    chunks: int = 1
    recompute: bool = True
    scatter: bool = False
    overlap: bool = False
    sharded: bool = False
    by_halves: bool = False

    @property
    def devices(self) -> int:
        return self.tp * self.pp * self.dp

    def microbatches(self, batch: int) -> int:
        """Raises PlanError where the batch does not divide."""
        count, rest = divmod(batch, self.samples * self.dp)
        if rest or not count:
            raise PlanError(f"a batch of {batch} does not divide into microbatches of {self.samples} x {self.dp}")
        return count


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Where a step's seconds go; of the slowest stage, over all microbatches. ``bubble``: filling and draining."""

    forward: float
    backward: float
    recompute: float
    tensor_collectives: float
    messages: float
    bubble: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return (
            self.forward
            + self.backward
            + self.recompute
            + self.tensor_collectives
            + self.messages
            + self.bubble
            + self.gradients
            + self.optimizer
        )


@dataclass(frozen=True, slots=True)
class _Stage:
    forward: float
    backward: float
    recompute: float
    collectives: float
    messages: float
    parameters: float

    @property
    def seconds(self) -> float:
        return self.forward + self.backward + self.recompute + self.collectives + self.messages


def step_seconds(model: Gpt, cluster: Cluster, layout: Layout, batch: int) -> StepSeconds:
    """Seconds of one step. Tensor ranks are neighbours, then replicas, then stages.

    Raises PlanError when the layout does not fit the cluster or the batch.
    """
    if layout.devices != cluster.device_count:
        raise PlanError(f"the layout has {layout.devices} devices, the cluster {cluster.device_count}")
    device = cluster.device(0)
    count = layout.microbatches(batch)
    stages = _stages(model, cluster, layout, device)
    slowest = max(stages, key=lambda stage: stage.seconds)
    others = sum(stage.seconds for stage in stages) - slowest.seconds
    held = max(stage.parameters for stage in stages)
    gradients = _gradient_seconds(cluster, layout, held)
    if layout.overlap and layout.pp == 1:
        # The first gradients are there when the backward starts on its second layer; the last bucket is exposed.
        gradients = max(gradients / model.layers, gradients - slowest.backward - slowest.recompute)
    if layout.pp > 1:
        ends = [0, cluster.device_count - layout.tp * layout.dp]
        tied = _HALF * model.embedding_parameters / layout.tp
        gradients += all_reduce_seconds(tied, 2, _between(cluster, ends[0], ends[1], layout.tp * layout.dp))
    updated = held / layout.dp if layout.sharded else held
    return StepSeconds(
        count * slowest.forward,
        count * slowest.backward,
        count * slowest.recompute,
        count * slowest.collectives,
        count * slowest.messages,
        others / layout.chunks,
        gradients,
        copy_seconds(device, OPTIMIZER_BYTES * updated),
    )


def _stages(model: Gpt, cluster: Cluster, layout: Layout, device: Device) -> list[_Stage]:
    attention, mlp = layer_parts(model, device, layout.samples, layout.tp)
    layers = [(attention, mlp)] * model.layers
    first = embedding_part(model, device, layout.samples, layout.tp)
    last = head_part(model, device, layout.samples, layout.tp)
    link = cluster.group_link(range(layout.tp))

    def seconds(part: Part) -> float:
        reduces = part.reduces * all_reduce_seconds(part.reduced_bytes, layout.tp, link) if part.reduces else 0.0
        again = part.forward_s + reduces if layout.recompute else 0.0
        return part.forward_s + part.backward_s + again + 2 * reduces

    if layout.by_halves:
        units = [[part] for layer in layers for part in layer]
    else:
        units = [list(layer) for layer in layers]
    groups = _cut(units, layout.pp, lambda unit: sum(map(seconds, unit)), seconds(first), seconds(last))
    message = _message_seconds(model, cluster, layout)
    stages = []
    for index, parts in enumerate(groups):
        recompute = sum(part.forward_s for part in parts) if layout.recompute else 0.0
        reduces = sum(part.reduces for part in parts) * (3 if layout.recompute else 2)
        if index == 0:
            parts = [first, *parts]
            reduces += first.reduces
        if index == layout.pp - 1:
            parts = [*parts, last]
            reduces += last.reduces
        payload = _HALF * layout.samples * model.sequence * model.width
        stages.append(
            _Stage(
                sum(part.forward_s for part in parts),
                sum(part.backward_s for part in parts),
                recompute,
                reduces * all_reduce_seconds(payload, layout.tp, link) if layout.tp > 1 else 0.0,
                2 * layout.chunks * message,
                sum(part.parameters for part in parts) + (first.parameters if 0 < index == layout.pp - 1 else 0.0),
            )
        )
    return stages


def _cut(units: Sequence[list[Part]], count: int, seconds, first: float, last: float) -> list[list[Part]]:  # type: ignore[no-untyped-def]
    """Units in ``count`` runs: equally many each where that is possible (as Megatron-LM does), else least maximum."""
    if len(units) % count == 0:
        size = len(units) // count
        return [[part for unit in units[i * size : (i + 1) * size] for part in unit] for i in range(count)]
    if len(units) < count:
        raise PlanError(f"{count} stages need as many pieces, there are {len(units)}")
    costs = [seconds(unit) for unit in units]
    low, high = max(costs), sum(costs) + first + last
    for _ in range(50):
        middle = (low + high) / 2
        if _runs(costs, count, middle, first, last) is None:
            low = middle
        else:
            high = middle
    ends = _runs(costs, count, high, first, last)
    assert ends is not None
    return [[part for unit in units[i:j] for part in unit] for i, j in zip([0, *ends], ends, strict=False)]


def _runs(costs: Sequence[float], count: int, limit: float, first: float, last: float) -> list[int] | None:
    """Ends of at most ``count`` runs within the limit, taken greedily, the rest spread so that none is empty."""
    ends: list[int] = []
    used = first
    for index, cost in enumerate(costs):
        tail = last if index == len(costs) - 1 else 0.0
        pieces_left, runs_left = len(costs) - index, count - len(ends)
        if used and (used + cost + tail > limit or pieces_left < runs_left) and (index or used > limit):
            ends.append(index)
            used = 0.0
        if cost + tail > limit:
            return None
        used += cost
    ends.append(len(costs))
    return ends if len(ends) == count and used + last <= limit * (1 + 1e-9) else None


def _message_seconds(model: Gpt, cluster: Cluster, layout: Layout) -> float:
    """Of one activation, or its gradient, to the next stage; all replicas and tensor ranks of a stage send at once."""
    if layout.pp == 1:
        return 0.0
    ranks = layout.tp * layout.dp
    payload = _HALF * layout.samples * model.sequence * model.width
    slowest = 0.0
    for stage in range(layout.pp - 1):
        start, end = stage * ranks, (stage + 1) * ranks
        link = _between(cluster, start, end, ranks)
        pieces = layout.tp if layout.scatter else 1
        seconds = send_seconds(payload / pieces, link)
        if pieces > 1:
            seconds += all_gather_seconds(payload, layout.tp, cluster.group_link(range(layout.tp)))
        slowest = max(slowest, seconds)
    return slowest


def _between(cluster: Cluster, i: int, j: int, senders: int) -> Link:
    """What joins two devices when ``senders`` neighbours send at once: on one port as much as they share."""
    link = cluster.link(i, j)
    node = cluster.nodes[cluster.node_of(i)]
    if cluster.node_of(i) == cluster.node_of(j):
        return link.among(2)
    share = min(1.0, node.ports / min(senders, node.count))
    return replace(link, bandwidth=node.port.bandwidth * share)


def _gradient_seconds(cluster: Cluster, layout: Layout, parameters: float) -> float:
    """The sum over replicas of one rank's half-precision gradients; sharded weights are gathered afterwards."""
    if layout.dp == 1:
        return 0.0
    link = cluster.group_link(range(0, layout.dp * layout.tp, layout.tp))
    if not layout.sharded:
        return all_reduce_seconds(_HALF * parameters, layout.dp, link)
    scatter = reduce_scatter_seconds(_HALF * parameters, layout.dp, link)
    return scatter + all_gather_seconds(_HALF * parameters, layout.dp, link)


def memory_bytes(model: Gpt, layout: Layout, batch: int) -> float:
    """Most bytes of a device: state, a kept input per layer and microbatch in flight, one layer's activations.

    A layer keeps ``s b d (10 + 24/t + 5 a s / (d t))`` bytes (Korthikanti et al., arXiv 2205.05198, equation 2). The
    first stage has ``min(m, p)`` microbatches in flight; the last holds float32 logits.
    """
    per_stage = -(-model.layers // layout.pp)
    parameters = (per_stage * model.layer_parameters + model.embedding_parameters) / layout.tp
    state = STATE_BYTES * parameters
    if layout.sharded:
        state = (STATE_BYTES - _SHARED_STATE_BYTES + _SHARED_STATE_BYTES / layout.dp) * parameters
    tokens = layout.samples * model.sequence
    inside = tokens * (
        model.width * (10 + 24 / layout.tp) + 5 * model.heads * model.sequence / layout.tp
    )
    in_flight = min(layout.microbatches(batch), layout.pp)
    kept = _HALF * tokens * model.width * per_stage if layout.recompute else inside * per_stage
    logits = 10 * tokens * model.vocabulary / layout.tp if layout.pp == 1 else 0.0
    return state + in_flight * kept + max(inside, logits) + _OVERHEAD_BYTES


def fits(model: Gpt, cluster: Cluster, layout: Layout, batch: int) -> bool:
    return memory_bytes(model, layout, batch) <= cluster.device(0).memory_bytes
