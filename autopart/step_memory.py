"""The most bytes of tensors that each rank holds in a step: its list of actions gone through as the executor does.

A stage's microbatch takes what :mod:`autopart.passes.peak` says of its code, between B and W what W needs. Between
computations a rank holds what each microbatch keeps, buffers of what it receives from when the receive is posted, one
computation early (twice where pieces from unlike meshes are put together), and what it sent until an arrival proves
that it was received (:mod:`autopart.runtime.schedule.receipts`). Replicas copy gradients into messages in the last
microbatch. Under 2BW steps follow without a gap: a rank may hold gradients of two batches, and a copy of its weights.

Counted beside parameters: activations, buffers of messages, copies of the model's buffers that a forward writes,
gradients, and what replicas that divide parameters (ZeRO) gather and scatter (:mod:`autopart.passes.peak_weights`). Not
counted: optimizer state. Of replicas with unlike parts the largest counts. While the optimizer updates parameters there
are gradients, what 2BW keeps for the next call, and what the optimizer makes (:mod:`autopart.update_memory`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from autopart.analysis import Analysis
from autopart.exchanges import specs_by_stage
from autopart.passes import graph as graphs
from autopart.passes.amounts import stored_bytes
from autopart.passes.conversion import Axes
from autopart.passes.kept import share_of_rank
from autopart.passes.peak import Peak
from autopart.passes.peak_weights import divided_weights
from autopart.passes.program import Role
from autopart.passes.storage import is_contiguous
from autopart.passes.unlike_meshes import StageSetting
from autopart.plan import Plan, StagePlan
from autopart.realize import Realization, axes_of, recomputed, settings_of
from autopart.runtime.buckets import tensor_bytes
from autopart.runtime.manifest import ParameterSpec
from autopart.runtime.resharding import rows_of
from autopart.runtime.schedule import Action, Work, make_schedule, post_receives_early
from autopart.runtime.schedule.double_buffered import carried
from autopart.runtime.schedule.receipts import Receipts, receipts
from autopart.runtime.written_buffers import COPIES
from autopart.stage_memory import gradient_messages, made_before, stage_peaks, waiting_bytes
from autopart.update_memory import temporary_bytes

_Edge = tuple[int, int]
_STEADY = 4
"""Batches of 2BW after which a rank holds what it will hold."""


@dataclass(frozen=True, slots=True)
class Crossing:
    """Bytes of one microbatch of a value between two stages, as ranks of either have it.

    pieces: meshes are unlike. copied: what is sent is a copy of what the source has, since that is not contiguous, or
    the pieces are no rows of it.
    """

    at_source: float
    at_target: float
    differentiable: bool
    pieces: bool
    copied: bool = False


Exchanged = Mapping[_Edge, Sequence[Crossing]]
"""What crosses, by (source stage, target stage)."""


def exchanged_bytes(found: Realization, samples: Sequence[int], axes: Sequence[Axes], unlike: bool) -> Exchanged:
    """samples, axes: of a microbatch on each stage's largest replica, and of the stage."""
    sources = {crossing.name: crossing.source for crossing in found.crossings}
    results = [
        dict(zip(s.sends, graphs.results(g), strict=False)) for s, g in zip(found.stages, found.local, strict=True)
    ]
    made: dict[_Edge, list[Crossing]] = {}
    for target, graph in enumerate(found.local):
        for node in graph.nodes:
            if node.op == "placeholder" and node.meta.get("role") is Role.RECEIVED:
                name = node.meta["name"]
                source, fake = sources[name], node.meta["val"]
                here = _bytes(results[source][name], axes[source], samples[source])
                there = _bytes(node, axes[target], samples[target])
                back = bool(node.meta.get("differentiable")) and graphs.may_have_gradient(fake.dtype)
                pieces = unlike and (axes[source], samples[source]) != (axes[target], samples[target])
                cuts = [item for item in node.meta["placements"] if item.is_shard and item.dim]
                copied = pieces and any(item not in results[source][name].meta["placements"] for item in cuts)
                copied = copied or not is_contiguous(graphs.value_of(results[source][name]))
                made.setdefault((source, target), []).append(Crossing(here, there, back, pieces, copied))
    return made


def _bytes(node: fx.Node, axes: Axes, samples: int) -> float:
    value = graphs.value_of(node)
    return stored_bytes(value.fake).at(samples) * share_of_rank(value.node, axes, value.index)


def replica_rows(plan: Plan, stage: StagePlan) -> tuple[int, ...]:
    """Samples of a microbatch on each of the stage's replicas."""
    return rows_of(plan.batch // plan.microbatches, stage.shares or (1,) * stage.dp)


@dataclass(frozen=True, slots=True)
class StepPeak:
    """The most bytes of one rank. call: while it goes forward and back. update: while the plan's optimizer updates."""

    call: float
    update: float

    @property
    def most(self) -> float:
        return max(self.call, self.update)


def step_peaks(
    analysis: Analysis,
    plan: Plan,
    found: Realization,
    kind: str,
    settings: Sequence[StageSetting] | None = None,
    samples: Sequence[int] | None = None,
) -> list[StepPeak]:
    """Of a rank of each rank of the pipeline. kind: of devices, "cuda" or "cpu". settings: of stages, where known.

    samples: of a microbatch on each stage's replica, by default on its largest.
    """
    samples = samples or [max(replica_rows(plan, stage)) for stage in plan.stages]
    axes = [axes_of(stage) for stage in plan.stages]
    crossing = exchanged_bytes(found, samples, axes, not plan.is_uniform)
    back = [edge for edge, values in crossing.items() if any(value.differentiable for value in values)]
    schedule = make_schedule(
        *(plan.schedule, len(plan.stages), plan.microbatches, sorted(crossing), sorted(back)), plan.warmup, plan.places
    )
    later = {action.stage for actions in schedule.ranks for action in actions if action.work is Work.WEIGHT}
    splits = [stage in later.intersection(target for _, target in back) for stage in range(len(plan.stages))]
    specs = specs_by_stage(analysis, found, settings or settings_of(analysis, plan))
    together = [[other for other, there in enumerate(plan.places) if there == place] for place in plan.places]
    messages = [
        gradient_messages(specs[index], index, together[index], stage.dp, axes[index], plan.bucket_bytes, kind)
        for index, stage in enumerate(plan.stages)
    ]
    divided = [
        divided_weights(specs[index], index, together[index], stage.dp, axes[index], plan.bucket_bytes, found.cuts)
        for index, stage in enumerate(plan.stages)
    ]
    there = [made_before(specs[index], index, together[index]) for index in range(len(plan.stages))]
    again = recomputed(plan, found.local)
    alone = [len(stages) == 1 for stages in together]
    peaks = stage_peaks(analysis.program, found, samples, again, kind, axes, messages, splits, divided, there, alone)
    endless = plan.schedule == "2bw"
    repeats = plan.microbatches if endless else None
    waiting = [waiting_bytes(specs[index], index, together[index], axes[index]) for index in range(len(plan.stages))]
    steps = []
    for rank, actions in enumerate(schedule.ranks):
        proofs = receipts(schedule, rank, repeats)
        call, left = call_peak(post_receives_early(actions), proofs, peaks, crossing, endless, waiting)
        own = [index for index, place in enumerate(plan.places) if place == rank]
        call += sum(_written_bytes(found, index, axes[index]) for index in own)
        shares = trained_shares(specs[own[0]], own, plan.stages[own[0]].dp, axes[own[0]])
        held = left if endless else sum(shares)
        held += sum(divided[index].lingering(index) for index in own)
        steps.append(StepPeak(call, held + temporary_bytes(plan.optimizer, shares, kind)))
    return steps


def _written_bytes(found: Realization, stage: int, axes: Axes) -> float:
    """Of the copies of buffers that a stage's forward writes."""
    updates = len(found.stages[stage].updates)
    values = graphs.results(found.local[stage])[-updates:] if updates else ()
    return COPIES * sum(_bytes(value, axes, 1) for value in values)


def trained_shares(specs: Sequence[ParameterSpec], stages: Sequence[int], replicas: int, axes: Axes) -> list[int]:
    """Bytes of what a rank that runs these stages updates, by parameter, which its gradients take as well."""
    sizes = [size for _, size in axes]
    return [
        tensor_bytes(spec, sizes) // (replicas if spec.zero else 1)
        for spec in specs
        if not set(stages).isdisjoint(spec.stages) and any(map(spec.learns, spec.stages))
    ]


def call_peak(
    actions: Sequence[Action],
    proofs: Receipts,
    peaks: Sequence[Peak],
    crossing: Exchanged,
    endless: bool = False,
    waiting: Sequence[Mapping[int, float]] | None = None,
) -> tuple[float, float]:
    """The most bytes of one rank, and what it has at the end of a call.

    proofs: what its arrivals prove. peaks: of all stages. endless: steps have no gap. waiting: of all stages, see
    :func:`autopart.stage_memory.waiting_bytes`.
    """
    walk = _Walk(proofs, peaks, crossing, {action.stage for action in actions}, waiting or [{} for _ in peaks])
    walk.begin_call()
    marks = carried(tuple(actions)) if endless else [False] * len(actions)
    kinds = [(action.work, action.stage, before) for action, before in zip(actions, marks, strict=True)]
    ends = {kind: index for index, kind in enumerate(kinds)}  # what is carried over ends in the next step
    last = [ends[kind] == index and (kind[2] or (*kind[:2], True) not in ends) for index, kind in enumerate(kinds)]
    if not endless:
        for action, ending in zip(actions, last, strict=True):
            walk.do(action, 0, ending)
        return walk.most, walk.now
    left = 0.0
    retains = any(before and action.work is not Work.REDUCE for action, before in zip(actions, marks, strict=True))
    for turn in range(_STEADY):
        for action, before, ending in zip(actions, marks, last, strict=True):
            if turn or not before:
                walk.do(action, turn - before, ending)
        left = walk.now
        walk.end_of_call(turn, retains)
    return walk.most, left


@dataclass(slots=True)
class _Walk:
    proofs: Receipts
    peaks: Sequence[Peak]
    crossing: Exchanged
    own: Collection[int]
    waiting: Sequence[Mapping[int, float]]
    now: float = 0.0
    most: float = 0.0
    sent: dict[tuple[Action, int], float] = field(default_factory=dict)  # by batch: what nothing but the send holds
    posted: dict[tuple[Work, int, int | None, int], list[Action]] = field(default_factory=dict)
    summed: dict[tuple[Work, int, int], float] = field(default_factory=dict)  # by batch: gradients of a stage
    shared: dict[tuple[int, int | None, int], float] = field(default_factory=dict)  # received, and kept for W
    passed: Counter[tuple[Work, int, int]] = field(default_factory=Counter)  # microbatches that went back, by batch
    arriving: dict[int, float] = field(default_factory=dict)  # by stage: divided weights, until they are read
    tails: dict[int, float] = field(default_factory=dict)  # by stage: divided gradients on their way
    waits: dict[tuple[int, int], float] = field(default_factory=dict)  # by stage, and that whose messages they are in

    def begin_call(self) -> None:
        self.arriving = {stage: self.peaks[stage].arriving for stage in self.own if self.peaks[stage].arriving}
        self.add(sum(self.arriving.values()))

    def do(self, action: Action, batch: int, last: bool) -> None:
        """last: no such action of the stage is to come in this batch."""
        work, stage = action.work, action.stage
        if work.is_receive:
            self.posted.setdefault((work, stage, action.microbatch, batch), []).append(action)
            self.add(0.0 if action.peer in self.own else self.size(action) + self.pieces(action))
        elif work is Work.FORWARD:
            self.arrive(Work.RECV_ACTIVATION, action, batch)
            peak, there = self.peaks[stage], self.received(stage)
            most = peak.forward
            if stage in self.arriving:
                most = peak.arrival
                self.now -= self.arriving.pop(stage)
            self.add(peak.retained - there, most - peak.retained)
        elif work is Work.SEND_ACTIVATION and action.peer not in self.own:
            copies = sum(value.at_source for value in self.crossing.get(action.edge, ()) if value.copied)
            self.sent[action, batch] = copies  # else results, which are kept until the backward
            self.add(copies)
        elif work is Work.BACKWARD:
            self.arrive(Work.RECV_GRADIENT, action, batch)
            self.backward(action, batch, last)
        elif work is Work.WEIGHT:
            self.weight(action, batch, last)
        elif work is Work.SEND_GRADIENT and action.peer not in self.own:
            self.now -= self.size(action)  # the value; the gradient stays
            self.now += self.shared.get((stage, action.microbatch, batch), 0.0)
            self.sent[action, batch] = self.size(action)

    def backward(self, action: Action, batch: int, last: bool) -> None:
        stage, peak = action.stage, self.peaks[action.stage]
        for send, number in self.sent:
            same = (send.stage, send.microbatch, number) == (stage, action.microbatch, batch)
            if same and send.work is Work.SEND_ACTIVATION:
                whole = [value for value in self.crossing.get(send.edge, ()) if not value.copied]
                held = sum(value.at_source for value in whole)
                self.sent[send, number] += held
                self.now += held
        coming = sum(value.at_source for value in self.between(stage, None) if value.differentiable)
        own = self.tails.pop(stage, 0.0)  # which the walk counts
        going = peak.back(self.passed[Work.BACKWARD, stage, batch], last, bool(own))
        self.now -= own
        self.add(0.0, going.unsettled - peak.retained - coming)
        if going.tail:  # of several stages the last message alone is on its way
            self.settle()
            self.tails[stage] = going.tail
        self.add(0.0, going.backward - peak.retained - coming)
        self.now += going.tail
        self.grow(Work.BACKWARD, stage, batch, peak.gradients - peak.later)
        self.now += peak.messages if last and not peak.later else 0.0
        self.wait(stage)
        there = self.received(stage)
        back = sum(value.at_target for value in self.between(None, stage) if value.differentiable)
        self.now += back - (peak.retained - there) - coming + peak.left
        if peak.left_received and not any(source in self.own for source, target in self.crossing if target == stage):
            self.shared[stage, action.microbatch, batch] = peak.left_received
        for (source, target), values in self.crossing.items():
            if target == stage and source not in self.own:  # those with a gradient are held until that is sent
                self.now -= sum(value.at_target for value in values if not value.differentiable)

    def settle(self) -> None:
        """What was on its way is added up, as another message starts."""
        self.now -= sum(self.tails.values())
        self.tails.clear()

    def wait(self, stage: int) -> None:
        """Gradients that a stage's backward made for another's messages stay until that goes back."""
        for (source, home), size in list(self.waits.items()):
            if home == stage:
                self.now -= size
                del self.waits[source, home]
        for home, size in self.waiting[stage].items():
            self.now += size - self.waits.get((stage, home), 0.0)
            self.waits[stage, home] = size

    def weight(self, action: Action, batch: int, last: bool) -> None:
        stage, peak = action.stage, self.peaks[action.stage]
        if not peak.left:
            return
        going = peak.back(self.passed[Work.WEIGHT, stage, batch], last)
        received = self.shared.pop((stage, action.microbatch, batch), 0.0)
        self.add(0.0, going.weight - peak.left - peak.left_received)
        self.grow(Work.WEIGHT, stage, batch, peak.later)
        self.now += peak.messages if last else 0.0
        self.now -= peak.left + received

    def grow(self, work: Work, stage: int, batch: int, size: float) -> None:
        """The gradients of a stage's parameters, at their first."""
        self.passed[work, stage, batch] += 1
        if (work, stage, batch) not in self.summed:
            self.summed[work, stage, batch] = size
            self.now += size

    def end_of_call(self, batch: int, retains: bool) -> None:
        """Gradients of the batch before are handed out and let go; what backwards need moves out of the parameters."""
        for key in [key for key in self.summed if key[2] < batch]:
            self.now -= self.summed.pop(key)
        if retains and not batch:
            self.add(sum(self.peaks[stage].gradients for stage in self.own))

    def arrive(self, work: Work, action: Action, batch: int) -> None:
        """The computation waits for what was posted for it."""
        for receive in self.posted.pop((work, action.stage, action.microbatch, batch), ()):
            self.now -= 0.0 if receive.peer in self.own else self.pieces(receive)
            for send, later in self.proofs.get(receive, ()):
                self.now -= self.sent.pop((send, batch + later), 0.0)

    def size(self, action: Action) -> float:
        """Of what an action sends or receives, as this rank has it."""
        values = self.crossing.get(action.edge, ())
        if action.work is Work.SEND_ACTIVATION:
            return sum(value.at_source for value in values)
        if action.work is Work.RECV_ACTIVATION:
            return sum(value.at_target for value in values)
        own = [value.at_source if action.work is Work.RECV_GRADIENT else value.at_target for value in values]
        return sum(size for size, value in zip(own, values, strict=True) if value.differentiable)

    def pieces(self, action: Action) -> float:
        """Of what a receive puts together."""
        values = [value for value in self.crossing.get(action.edge, ()) if value.pieces]
        if action.work is Work.RECV_ACTIVATION:
            return sum(value.at_target for value in values)
        return sum(value.at_source for value in values if value.differentiable)

    def between(self, source: int | None, target: int | None) -> list[Crossing]:
        """What leaves a stage, or comes to one."""
        return [
            value
            for edge, values in self.crossing.items()
            if source in (None, edge[0]) and target in (None, edge[1])
            for value in values
        ]

    def received(self, stage: int) -> float:
        return sum(value.at_target for value in self.between(None, stage))

    def add(self, size: float, passing: float = 0.0) -> None:
        self.now += size
        self.most = max(self.most, self.now + passing)
