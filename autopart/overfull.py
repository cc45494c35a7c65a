"""Whether the code of a plan holds no more than its devices have.

What a plan counts on is added up from blocks and messages. That is mostly more than a rank holds at once, and can be
less, as conversions are not counted: 0.6 to 0.9 of it in networks whose layers sum two products each, 0.7 where a
product of logits is summed in parts and scattered. So the code of a plan that comes near to what its devices have is
walked over (:mod:`autopart.rank_peaks`), and planning is repeated with less memory if a rank holds more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopart.analysis import Analysis
from autopart.candidate_settings import overhead_bytes
from autopart.cluster import Cluster
from autopart.cost.devices import Device
from autopart.plan import Plan, StagePlan
from autopart.rank_peaks import rank_peaks
from autopart.report.units import format_bytes
from autopart.step_memory import replica_rows

SURELY = 0.5
"""Of what a device has besides what libraries take: plans that count on no more than this are not walked over."""
MOST_OPS = 1_500
"""Of a program whose plans are walked over, which takes about half a millisecond for each."""
_LEAST = 0.01
"""The share of memory by which planning is repeated with less, at least."""


@dataclass(frozen=True, slots=True)
class Overfull:
    """A rank of the pipeline that holds more than its device has. stage: the first that it runs.

    held_bytes: what libraries take left out. room_bytes: what the device has for that.
    """

    stage: int
    held_bytes: int
    room_bytes: int

    @property
    def share(self) -> float:
        """What may be planned for of the memory that the plan was made with."""
        return min(self.room_bytes / self.held_bytes, 1 - _LEAST)

    def __str__(self) -> str:
        return (
            f"the code of a faster plan holds {format_bytes(self.held_bytes)} on stage {self.stage}, "
            f"{format_bytes(self.held_bytes - self.room_bytes)} more than its devices have for that"
        )


def overfull(plan: Plan, analysis: Analysis, cluster: Cluster) -> Overfull | None:
    """The rank that is the most over what its device has; None where all fit, or have more ops than are walked over."""
    if len(analysis.block_of) > MOST_OPS:
        return None
    kind = cluster.device(0).kind
    overhead = overhead_bytes(kind)
    replicas = [_replicas(plan, stage, cluster) for stage in plan.stages]
    rounds = max(map(len, replicas))
    if rounds == 1 and not _near(plan, overhead):
        return None
    over: list[Overfull] = []
    for number in range(rounds):
        looked_at = [own[min(number, len(own) - 1)] for own in replicas]
        rooms = [capacity - overhead for capacity, _ in looked_at]
        for peak in rank_peaks(plan, analysis, kind, [samples for _, samples in looked_at]):
            first = peak.stages[0]
            if peak.total > rooms[first]:
                over.append(Overfull(first, peak.total, rooms[first]))
    return min(over, key=lambda item: item.share, default=None)


def _near(plan: Plan, overhead: int) -> bool:
    """Whether a rank counts on more than SURELY of what its device has."""
    held, rooms = dict.fromkeys(plan.places, -overhead), dict.fromkeys(plan.places, -overhead)
    for place, stage in zip(plan.places, plan.stages, strict=True):
        held[place] += stage.memory_bytes
        rooms[place] += stage.capacity_bytes
    return any(held[place] > SURELY * rooms[place] for place in held)


def _replicas(plan: Plan, stage: StagePlan, cluster: Cluster) -> list[tuple[int, int]]:
    """Bytes of the smallest device of a replica, and its samples of a microbatch: of the largest ones with as much.

    Left out are those with more memory and no more samples.
    """
    rows, ranks = replica_rows(plan, stage), len(stage.devices) // stage.dp
    most = dict[int, int]()
    for replica, samples in enumerate(rows):
        among = stage.devices[replica * ranks : (replica + 1) * ranks]
        capacity = min(cluster.device(device).memory_bytes for device in among)
        most[capacity] = max(most.get(capacity, 0), samples)
    found: list[tuple[int, int]] = []
    for capacity, samples in sorted(most.items()):
        if not found or samples > found[-1][1]:
            found.append((capacity, samples))
    return found


def with_share(cluster: Cluster, share: float) -> Cluster:
    """The cluster with devices that have this share of what they have besides what libraries take."""

    def memory(device: Device) -> int:
        overhead = overhead_bytes(device.kind)
        return int(overhead + share * (device.memory_bytes - overhead))

    return cluster.with_memory(memory)


def with_capacities(plan: Plan, cluster: Cluster, share: float) -> Plan:
    """The plan, made for this share of the memory, as one of the cluster."""
    less = with_share(cluster, share)

    def capacity(stage: StagePlan, stages: int) -> int:
        planned = stage.capacity_bytes * stages
        device = min(stage.devices, key=lambda device: abs(less.device(device).memory_bytes - planned))
        return cluster.device(device).memory_bytes // stages

    stages = (
        replace(stage, capacity_bytes=capacity(stage, plan.places.count(place)))
        for place, stage in zip(plan.places, plan.stages, strict=True)
    )
    return replace(plan, stages=tuple(stages), cluster=str(cluster))
