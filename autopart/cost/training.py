"""Seconds of a training step of a GPT model under a given plan: pipeline, gradients' reduction, optimizer.

``p`` stages, each of ``v`` chunks, ``m`` microbatches, ``t_i`` seconds of stage i for one microbatch forward and
backward with its collectives and messages (Narayanan et al., SC 2021, section 2.2; ``v = 1`` is 1F1B)::

    pipeline = m max_i t_i + (sum_i t_i - max_i t_i) / v

The fastest stages wait for the slowest, and filling and draining pass each other stage's share once. With equal
stages that is ``m t (1 + (p - 1) / (v m))``: the paper's bubble. After it come the gradients' reduction over replicas
(what of it is not hidden behind the last microbatch's backward), the sum of a tied embedding's gradients, and the
optimizer's step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopart.cluster import Cluster
from autopart.cost.communication import (
    all_gather_seconds,
    all_reduce_seconds,
    reduce_scatter_seconds,
    send_seconds,
)
from autopart.cost.compute import copy_seconds
from autopart.cost.devices import Device
from autopart.cost.gpt import MEGATRON, Gpt, Part, Style, embedding_part, head_part, layer_parts
from autopart.runtime.errors import PlanError

_HALF = 2
_BISECTIONS = 50
_RECOMPUTE = ("full", "selective", "none")
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

    samples: of one microbatch on one replica. recompute: "full", each layer from its input; "selective", attention's
    scores only; "none". chunks: of the model per stage (interleaving). scatter: a message between
    stages is sent in ``tp`` pieces and gathered on arrival. overlap: the gradients' reduction hides behind the last
    microbatch's backward. sharded: ranks reduce-scatter gradients and update one share of the weights each.
    balanced: stages are cut where the slowest is fastest, also between a layer's attention and MLP; otherwise they have
    equally many layers, and where these do not divide, whole layers so that the slowest is fastest.
    """

    tp: int
    pp: int
    dp: int
    samples: int
    chunks: int = 1
    recompute: str = "full"
    scatter: bool = False
    overlap: bool = False
    sharded: bool = False
    balanced: bool = False
    style: Style = MEGATRON

    def __post_init__(self) -> None:
        if min(self.tp, self.pp, self.dp, self.samples, self.chunks) < 1 or self.recompute not in _RECOMPUTE:
            raise PlanError(f"degrees are at least 1 and recompute is one of {', '.join(_RECOMPUTE)}: {self}")

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
    bubble = pipeline_seconds([stage.seconds for stage in stages], count, layout.chunks) - count * slowest.seconds
    held = max(stage.parameters for stage in stages)
    gradients = _gradient_seconds(cluster, layout, held)
    if layout.overlap and layout.pp == 1:
        # The first gradients are there when the backward starts on its second layer; the last bucket is exposed.
        gradients = max(gradients / model.layers, gradients - slowest.backward - slowest.recompute)
    if layout.pp > 1:
        ends = [0, cluster.device_count - layout.tp * layout.dp]
        tied = _HALF * model.embedding_parameters / layout.tp
        gradients += all_reduce_seconds(tied, 2, cluster.link(ends[0], ends[1], layout.tp * layout.dp))
    updated = held / layout.dp if layout.sharded else held
    return StepSeconds(
        count * slowest.forward,
        count * slowest.backward,
        count * slowest.recompute,
        count * slowest.collectives,
        count * slowest.messages,
        bubble,
        gradients,
        copy_seconds(device, OPTIMIZER_BYTES * updated),
    )


def pipeline_seconds(stages: Sequence[float], microbatches: int, chunks: int = 1) -> float:
    """Seconds of all microbatches through stages that take so long for one, forward and backward; see the module."""
    slowest = max(stages)
    return microbatches * slowest + (sum(stages) - slowest) / chunks


def _stages(model: Gpt, cluster: Cluster, layout: Layout, device: Device) -> list[_Stage]:
    halves = layer_parts(model, device, layout.samples, layout.tp, layout.style) * model.layers
    first = embedding_part(model, device, layout.samples, layout.tp)
    last = head_part(model, device, layout.samples, layout.tp)
    payload = _HALF * layout.samples * model.sequence * model.width
    reduce_s = all_reduce_seconds(payload, layout.tp, cluster.group_link(range(layout.tp)))

    def again(part: Part) -> float:
        return {"full": part.forward_s, "selective": part.core_s, "none": 0.0}[layout.recompute]

    passes = 3 if layout.recompute == "full" else 2

    def exchanged(part: Part, times: int) -> float:
        hidden = min(part.reduces * reduce_s, part.weight_s) if layout.style.beside else 0.0
        return times * part.reduces * reduce_s - hidden

    def seconds(part: Part) -> float:
        return part.forward_s + part.backward_s + again(part) + exchanged(part, passes)

    groups = _cut(halves, layout, seconds, first, last)
    edges = _edge_seconds(model, cluster, layout)
    stages = []
    for index, parts in enumerate(groups):
        # Embedding and head are not recomputed. A stage alone holds the tied table once, the last of several a copy.
        ends = [first] if index == 0 else []
        ends += [last] if index == layout.pp - 1 else []
        copy = first.parameters if 0 < index == layout.pp - 1 else 0.0
        held = [*parts, *ends]
        collectives = sum(exchanged(part, passes) for part in parts) + sum(exchanged(part, 1) for part in ends)
        stages.append(
            _Stage(
                sum(part.forward_s for part in held),
                sum(part.backward_s for part in held),
                sum(map(again, parts)),
                collectives,
                _edge_uses(index, layout, edges),
                sum(part.parameters for part in held) + copy,
            )
        )
    return stages


def _cut(
    halves: Sequence[Part], layout: Layout, seconds: Callable[[Part], float], first: Part, last: Part
) -> list[Sequence[Part]]:
    """The stages' runs of layers' halves. Raises PlanError where there are fewer pieces than stages."""
    count, grain = layout.pp, 1 if layout.balanced else 2
    pieces = [halves[start : start + grain] for start in range(0, len(halves), grain)]
    if len(pieces) < count:
        kind = "halves of layers" if layout.balanced else "layers"
        raise PlanError(f"{count} stages need as many {kind}, there are {len(pieces)}")
    if not layout.balanced and len(pieces) % count == 0:
        size = len(halves) // count
        return [halves[start : start + size] for start in range(0, len(halves), size)]
    costs = [sum(map(seconds, piece)) for piece in pieces]
    costs[0] += seconds(first)
    costs[-1] += seconds(last)
    low, high = max(costs), sum(costs)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if len(_runs(costs, middle)) <= count else (middle, high)
    ends = _runs(costs, high)
    # Fewer runs than stages: any cut of a run keeps within the limit.
    for position in range(1, len(costs)):
        if len(ends) < count and position not in ends:
            ends = sorted([*ends, position])
    return [halves[grain * start : grain * end] for start, end in zip([0, *ends], ends, strict=False)]


def _runs(costs: Sequence[float], limit: float) -> list[int]:
    """Ends of the fewest runs whose sums stay within the limit (no piece alone exceeds it)."""
    ends: list[int] = []
    used = 0.0
    for index, cost in enumerate(costs):
        if used and used + cost > limit * (1 + 1e-12):
            ends.append(index)
            used = 0.0
        used += cost
    return [*ends, len(costs)]


def _edge_seconds(model: Gpt, cluster: Cluster, layout: Layout) -> list[float]:
    """Seconds of an exchange between each stage and the next, the last one's next being the first.

    An activation goes on while a gradient comes back. All tensor ranks and replicas of a stage send at once.
    """
    ranks = layout.tp * layout.dp
    payload = float(_HALF * layout.samples * model.sequence * model.width)
    gathered = 0.0
    if layout.scatter and layout.tp > 1:
        payload /= layout.tp
        gathered = all_gather_seconds(payload * layout.tp, layout.tp, cluster.group_link(range(layout.tp)))
    starts = [stage * ranks for stage in range(layout.pp)]
    if layout.pp == 1:
        return [0.0]
    return [
        send_seconds(payload, cluster.link(start, after, ranks)) + gathered
        for start, after in zip(starts, [*starts[1:], 0], strict=True)
    ]


def _edge_uses(stage: int, layout: Layout, edges: Sequence[float]) -> float:
    """Seconds of one microbatch that a stage spends in exchanges with the stages before and after each of its chunks.

    Both take part until the exchange is done, so that a slow edge delays both its stages (Megatron-LM's batched sends
    and receives; where sends do not block, 1F1B's fixed number of microbatches in flight has the same effect).
    """
    last = layout.pp - 1
    before = layout.chunks - (1 if stage == 0 else 0)
    after = layout.chunks - (1 if stage == last else 0)
    return before * edges[stage - 1] + after * edges[stage]


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
    scores = tokens * 5 * model.heads * model.sequence / layout.tp
    inside = tokens * model.width * (10 + 24 / layout.tp) + scores
    in_flight = min(layout.microbatches(batch), layout.pp)
    kept = (
        per_stage
        * {"full": _HALF * tokens * model.width, "selective": inside - scores, "none": inside}[layout.recompute]
    )
    logits = 10 * tokens * model.vocabulary / layout.tp if layout.pp == 1 else 0.0
    return state + in_flight * kept + max(inside, logits) + _OVERHEAD_BYTES


def fits(model: Gpt, cluster: Cluster, layout: Layout, batch: int) -> bool:
    return memory_bytes(model, layout, batch) <= cluster.device(0).memory_bytes
