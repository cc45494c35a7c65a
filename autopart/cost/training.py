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
from dataclasses import dataclass, replace

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
_ENDS = 2
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
    scores only; "none". chunks: of the model per stage (interleaving), of which embedding and head may be one each.
    scatter: a message between stages is sent in ``tp`` pieces and gathered on arrival. overlap: the gradients'
    reduction hides behind the last microbatches' backward, and weights' gathering behind the first ones' forward.
    sharded: ranks reduce-scatter gradients and update one share of the weights each. cp: ranks that share each
    sequence, and pass keys and values around beside attention (ring attention, arXiv 2310.01889). message_overlap:
    messages between stages pass beside computation, but for those of filling and draining.
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
    cp: int = 1
    message_overlap: bool = False

    def __post_init__(self) -> None:
        if min(self.tp, self.pp, self.dp, self.samples, self.chunks, self.cp) < 1:
            raise PlanError(f"degrees, samples and chunks are at least 1: {self}")
        if self.recompute not in _RECOMPUTE:
            raise PlanError(f"recompute is one of {', '.join(_RECOMPUTE)}, not {self.recompute!r}")

    @property
    def devices(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

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
    def busy(self) -> float:
        return self.forward + self.backward + self.recompute + self.collectives

    @property
    def seconds(self) -> float:
        return self.busy + self.messages


def step_seconds(model: Gpt, cluster: Cluster, layout: Layout, batch: int) -> StepSeconds:
    """Seconds of one step. Tensor ranks are neighbours, then those of a sequence, then replicas, then stages.

    Raises PlanError when the layout does not fit the cluster or the batch, or ``cp`` not the sequence.
    """
    if layout.devices != cluster.device_count:
        raise PlanError(f"the layout has {layout.devices} devices, the cluster {cluster.device_count}")
    if model.sequence % layout.cp:
        raise PlanError(f"a sequence of {model.sequence} does not divide among {layout.cp} ranks")
    device = cluster.device(0)
    count = layout.microbatches(batch)
    stages = _stages(model, cluster, layout, device)
    slowest = max(stages, key=lambda stage: stage.seconds)
    bubble = pipeline_seconds([stage.seconds for stage in stages], count, layout.chunks) - count * slowest.seconds
    if layout.message_overlap:
        bubble += 2 * sum(_edge_seconds(model, cluster, layout)[:-1])
    held = max(stage.parameters for stage in stages)
    gradients = _gradient_seconds(model, cluster, layout, held, slowest, count)
    if layout.pp > 1 and not model.untied:
        ranks = layout.devices // layout.pp
        tied = _HALF * model.embedding_parameters / layout.tp
        gradients += all_reduce_seconds(tied, 2, cluster.link(0, cluster.device_count - ranks, ranks))
    updated = held / (layout.dp * layout.cp) if layout.sharded else held
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
    halves = layer_parts(model, device, layout.samples, layout.tp, layout.style, layout.cp) * model.layers
    first = embedding_part(model, device, layout.samples, layout.tp, layout.cp)
    last = head_part(model, device, layout.samples, layout.tp, layout.cp)
    exchanges = _Exchanges.of(model, cluster, layout)

    def again(part: Part) -> float:
        return {"full": part.forward_s, "selective": part.core_s, "none": 0.0}[layout.recompute]

    def seconds(part: Part) -> float:
        return part.forward_s + part.backward_s + again(part) + exchanges.of_layer(part)

    groups = _cut(halves, layout, seconds, first, last)
    edges = _edge_seconds(model, cluster, layout)
    stages = []
    for index, parts in enumerate(groups):
        # Embedding and head are not recomputed. A stage alone holds the tied table once, the last of several a copy.
        ends = [first] if index == 0 else []
        ends += [last] if index == layout.pp - 1 else []
        copy = first.parameters if 0 < index == layout.pp - 1 and not model.untied else 0.0
        held = [*parts, *ends]
        stage = _Stage(
            sum(part.forward_s for part in held),
            sum(part.backward_s for part in held),
            sum(map(again, parts)),
            sum(map(exchanges.of_layer, parts)) + sum(map(exchanges.of_end, ends)),
            _edge_uses(index, layout, edges),
            sum(part.parameters for part in held) + copy,
        )
        stages.append(
            replace(stage, messages=max(0.0, stage.messages - stage.busy)) if layout.message_overlap else stage
        )
    return stages


@dataclass(frozen=True, slots=True)
class _Exchanges:
    """What a stage waits for of exchanges among tensor ranks and ranks of a sequence.

    reduce_s: of an all-reduce over the tensor axis, or of a reduce-scatter and an all-gather. keys_s: of a layer's keys
    and values on their way around the ranks of a sequence, forward; back their gradients go with them. forwards: of a
    microbatch, what runs again among them.
    """

    style: Style
    reduce_s: float
    keys_s: float
    forwards: int

    @classmethod
    def of(cls, model: Gpt, cluster: Cluster, layout: Layout) -> _Exchanges:
        rows = layout.samples * model.sequence / layout.cp
        tensor, sequence = range(layout.tp), range(0, layout.tp * layout.cp, layout.tp)
        keys_s = 0.0
        if layout.cp > 1:
            keys = 2 * _HALF * rows * model.kv_width / min(layout.tp, model.kv_heads)
            keys_s = (layout.cp - 1) * send_seconds(keys, cluster.group_link(sequence))
        sent = _HALF * rows * model.width, layout.tp, cluster.group_link(tensor)
        apart = layout.style.sequence_parallel or layout.style.tensor_overlap
        reduce_s = reduce_scatter_seconds(*sent) + all_gather_seconds(*sent) if apart else all_reduce_seconds(*sent)
        return cls(layout.style, reduce_s, keys_s, 2 if layout.recompute == "full" else 1)

    def of_layer(self, part: Part) -> float:
        """Of a layer's half."""
        around = (self.forwards + 2) * max(0.0, self.keys_s - part.core_s) if part.core_s else 0.0
        if self.style.tensor_overlap:
            forward, backward = self._left(part.read_s, part.made_s), self._left(part.made_back_s, part.weight_s)
            return around + part.reduces * (self.forwards * forward + backward)
        return around + (self.forwards + 1) * part.reduces * self.reduce_s - self._hidden(part)

    def of_end(self, part: Part) -> float:
        """Of the embedding or the head: what it gathers or scatters forward, and the other of the two back."""
        if self.style.tensor_overlap:
            return part.reduces * self._left(part.read_s, part.weight_s)
        return part.reduces * self.reduce_s - self._hidden(part)

    def _left(self, *products: float) -> float:
        """Of a gathering or scattering beside each of the products, half an all-reduce."""
        return sum(max(0.0, self.reduce_s / 2 - product) for product in products)

    def _hidden(self, part: Part) -> float:
        return min(part.reduces * self.reduce_s, part.weight_s) if self.style.beside else 0.0


def _cut(
    halves: Sequence[Part], layout: Layout, seconds: Callable[[Part], float], first: Part, last: Part
) -> list[Sequence[Part]]:
    """The stages' runs of layers' halves. Raises PlanError where there are fewer pieces than stages.

    Of an interleaved stage the first chunk may be the embedding alone, and the last the head: Megatron-LM and Llama 3
    (arXiv 2407.21783) leave a layer out of each, so that ``k p - 2`` layers make equal stages.
    """
    count, grain = layout.pp, 1 if layout.balanced else 2
    pieces = [halves[start : start + grain] for start in range(0, len(halves), grain)]
    kind = "halves of layers" if layout.balanced else "layers"
    if len(pieces) < count:
        raise PlanError(f"{count} stages need as many {kind}, there are {len(pieces)}")
    if layout.chunks > 1 and len(pieces) + _ENDS < count * layout.chunks:
        raise PlanError(
            f"{count} stages x {layout.chunks} chunks need as many {kind}, embedding and head counted as one each, "
            f"there are {len(pieces) + _ENDS}"
        )
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
    ranks = layout.devices // layout.pp
    payload = _HALF * layout.samples * model.sequence / layout.cp * model.width
    gathered = 0.0
    if layout.style.sequence_parallel:
        payload /= layout.tp  # what tensor ranks hold between layers, whose gathering is the next layer's
    elif layout.scatter and layout.tp > 1:
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


def _gradient_seconds(
    model: Gpt, cluster: Cluster, layout: Layout, parameters: float, slowest: _Stage, microbatches: int
) -> float:
    """The sum over replicas of one rank's half-precision gradients; sharded weights are gathered afterwards.

    With overlap what is not hidden: sums pass beside the last microbatch's backward, of ``v`` chunks beside that of
    the last ``p`` microbatches on the chunks that come after, and weights are gathered beside as much of the forward.
    """
    count = layout.dp * layout.cp
    if count == 1:
        return 0.0
    link = cluster.group_link(range(0, count * layout.tp, layout.tp))
    passes = (reduce_scatter_seconds, all_gather_seconds) if layout.sharded else (all_reduce_seconds,)
    payload = _HALF * parameters
    if not layout.overlap:
        return sum(seconds(payload, count, link) for seconds in passes)
    beside = (min(microbatches, layout.pp) * (layout.chunks - 1) + 1) / layout.chunks
    hides = (beside * (slowest.backward + slowest.recompute), beside * slowest.forward)
    # The first gradients are there when the backward starts on its second layer; the last bucket is exposed.
    bucket = payload * min(1.0, layout.pp / model.layers)
    return sum(
        max(seconds(bucket, count, link), seconds(payload, count, link) - hidden)
        for seconds, hidden in zip(passes, hides, strict=False)
    )


def memory_bytes(model: Gpt, layout: Layout, batch: int) -> float:
    """Most bytes of a device: state, a kept input per layer and microbatch in flight, one layer's activations.

    A layer keeps ``s b d (10 + 24/t + 5 a s / (d t))`` bytes (Korthikanti et al., arXiv 2205.05198, equation 2). The
    first stage has ``min(m, p)`` microbatches in flight; the last holds float32 logits. Of a plain or gated model the
    layer's bytes are those of a GPT of its width.
    """
    per_stage = -(-model.layers // layout.pp)
    ends = model.embedding_parameters + (model.head_parameters if layout.pp == 1 else 0)
    parameters = (per_stage * model.layer_parameters + ends) / layout.tp
    state = STATE_BYTES * parameters
    if layout.sharded:
        replicas = layout.dp * layout.cp
        state = (STATE_BYTES - _SHARED_STATE_BYTES + _SHARED_STATE_BYTES / replicas) * parameters
    tokens = layout.samples * model.sequence / layout.cp
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
