"""The most bytes of tensors that each rank holds in a step: its list of actions gone through as the executor does.

A stage's microbatch takes what :mod:`autopart.passes.peak` says of its code. Between computations a rank holds what
each microbatch keeps, buffers of what it receives from when the receive is posted, one computation early, and what it
sent until an arrival proves that it was received (:mod:`autopart.runtime.schedule.receipts`).

Counted beside parameters: activations, buffers, gradients. Not counted: optimizer state, buckets in which replicas sum
gradients, and what the weights' share of a split backward ("zb-h1", "zb-v") keeps until its W.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from autopart.passes import graph as graphs
from autopart.passes.amounts import stored_bytes
from autopart.passes.kept import share_of_rank
from autopart.passes.peak import Peak
from autopart.passes.program import Program, Role
from autopart.plan import Plan
from autopart.realize import Realization, recomputed
from autopart.runtime.schedule import Action, Work, make_schedule, post_receives_early
from autopart.runtime.schedule.receipts import Receipts, receipts
from autopart.stage_memory import stage_peaks

_Edge = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Exchanged:
    """Bytes of one microbatch on one rank by (source stage, target stage): of values, and of those with a gradient."""

    values: dict[_Edge, float]
    gradients: dict[_Edge, float]


def exchanged_bytes(found: Realization, samples: int) -> Exchanged:
    """What crosses between stages with equal meshes, ``samples`` to a microbatch of a replica."""
    sources = {crossing.name: crossing.source for crossing in found.crossings}
    values: dict[_Edge, float] = {}
    gradients: dict[_Edge, float] = {}
    for target, graph in enumerate(found.local):
        for node in graph.nodes:
            if node.op == "placeholder" and node.meta.get("role") is Role.RECEIVED:
                edge, fake = (sources[node.meta["name"]], target), node.meta["val"]
                size = stored_bytes(fake).at(samples) * share_of_rank(node, found.axes)
                values[edge] = values.get(edge, 0.0) + size
                if node.meta.get("differentiable") and graphs.may_have_gradient(fake.dtype):
                    gradients[edge] = gradients.get(edge, 0.0) + size
    return Exchanged(values, gradients)


def step_peaks(program: Program, plan: Plan, found: Realization, kind: str) -> list[float]:
    """Bytes on a rank of each rank of the pipeline. kind: of devices, "cuda" or "cpu". For plans with equal meshes."""
    samples = plan.batch // plan.microbatches // plan.stages[0].dp
    peaks = stage_peaks(program, found, samples, recomputed(plan, found.local), kind)
    crossing = exchanged_bytes(found, samples)
    schedule = make_schedule(
        *(plan.schedule, len(plan.stages), plan.microbatches, sorted(crossing.values), sorted(crossing.gradients)),
        plan.warmup,
        plan.places,
    )
    repeats = plan.microbatches if plan.schedule == "2bw" else None
    return [
        step_peak(post_receives_early(actions), receipts(schedule, rank, repeats), peaks, crossing)
        for rank, actions in enumerate(schedule.ranks)
    ]


def step_peak(actions: Sequence[Action], proofs: Receipts, peaks: Sequence[Peak], crossing: Exchanged) -> float:
    """The most bytes of one rank. proofs: what its arrivals prove. peaks: of all stages."""
    walk = _Walk(proofs, peaks, crossing, {action.stage for action in actions})
    for action in actions:
        walk.do(action)
    return walk.most


@dataclass(slots=True)
class _Walk:
    proofs: Receipts
    peaks: Sequence[Peak]
    crossing: Exchanged
    own: Collection[int]
    now: float = 0.0
    most: float = 0.0
    sent: dict[Action, float] = field(default_factory=dict)  # what nothing but the send holds
    posted: dict[tuple[Work, int, int | None], list[Action]] = field(default_factory=dict)
    summed: set[int] = field(default_factory=set)  # stages whose parameters have gradients

    def do(self, action: Action) -> None:
        work, stage = action.work, action.stage
        if work.is_receive:
            self.posted.setdefault((work, stage, action.microbatch), []).append(action)
            self.add(0.0 if action.peer in self.own else self.size(action))
        elif work is Work.FORWARD:
            self.arrive(Work.RECV_ACTIVATION, action)
            peak, there = self.peaks[stage], self.received(stage, self.crossing.values)
            self.add(peak.retained - there, peak.forward - peak.retained)
        elif work is Work.SEND_ACTIVATION and action.peer not in self.own:
            self.sent[action] = 0.0  # a result, which is kept until the backward
        elif work is Work.BACKWARD:
            self.arrive(Work.RECV_GRADIENT, action)
            self.backward(action)
        elif work is Work.SEND_GRADIENT and action.peer not in self.own:
            self.now -= self.size(action)  # the value; the gradient stays
            self.sent[action] = self.size(action)

    def backward(self, action: Action) -> None:
        stage, peak = action.stage, self.peaks[action.stage]
        for send in self.sent:
            if send.work is Work.SEND_ACTIVATION and (send.stage, send.microbatch) == (stage, action.microbatch):
                self.sent[send] = self.size(send)
                self.now += self.sent[send]
        coming = sum(size for (source, _), size in self.crossing.gradients.items() if source == stage)
        top = peak.backward if stage in self.summed else peak.first_backward
        self.add(0.0, top - peak.retained - coming)
        if stage not in self.summed:
            self.summed.add(stage)
            self.now += peak.gradients
        there = self.received(stage, self.crossing.values)
        self.now += self.received(stage, self.crossing.gradients) - (peak.retained - there) - coming
        for (source, target), size in self.crossing.values.items():
            if target == stage and source not in self.own:  # those with a gradient are held until that is sent
                self.now -= size - self.crossing.gradients.get((source, target), 0.0)

    def arrive(self, work: Work, action: Action) -> None:
        """The computation waits for what was posted for it."""
        for receive in self.posted.pop((work, action.stage, action.microbatch), ()):
            for send, _ in self.proofs.get(receive, ()):
                self.now -= self.sent.pop(send, 0.0)

    def size(self, action: Action) -> float:
        back = action.work in (Work.SEND_GRADIENT, Work.RECV_GRADIENT)
        return (self.crossing.gradients if back else self.crossing.values)[action.edge]

    def received(self, stage: int, sizes: dict[_Edge, float]) -> float:
        return sum(size for (_, target), size in sizes.items() if target == stage)

    def add(self, size: float, passing: float = 0.0) -> None:
        self.now += size
        self.most = max(self.most, self.now + passing)
