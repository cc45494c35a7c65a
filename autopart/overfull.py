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
from autopart.plan import Plan
from autopart.rank_peaks import rank_peaks
from autopart.report.units import format_bytes

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
    kind = cluster.device(0).kind
    overhead = overhead_bytes(kind)
    rooms = {stage: room - overhead for stage, room in enumerate(_capacities(plan, cluster))}
    held = dict.fromkeys(plan.places, -overhead)
    for place, stage in zip(plan.places, plan.stages, strict=True):
        held[place] += stage.memory_bytes
    near = any(held[place] > SURELY * rooms[index] for index, place in enumerate(plan.places))
    if not near or len(analysis.block_of) > MOST_OPS:
        return None
    found = [Overfull(peak.stages[0], peak.total, rooms[peak.stages[0]]) for peak in rank_peaks(plan, analysis, kind)]
    over = [item for item in found if item.held_bytes > item.room_bytes]
    return min(over, key=lambda item: item.share, default=None)


def with_share(cluster: Cluster, share: float) -> Cluster:
    """The cluster with devices that have this share of what they have besides what libraries take."""

    def memory(device: Device) -> int:
        overhead = overhead_bytes(device.kind)
        return int(overhead + share * (device.memory_bytes - overhead))

    return cluster.with_memory(memory)


def with_capacities(plan: Plan, cluster: Cluster) -> Plan:
    """The plan, made for less memory, as one of the cluster."""
    shared = [plan.places.count(place) for place in plan.places]
    stages = [
        replace(stage, capacity_bytes=capacity // count)
        for stage, capacity, count in zip(plan.stages, _capacities(plan, cluster), shared, strict=True)
    ]
    return replace(plan, stages=tuple(stages), cluster=str(cluster))


def _capacities(plan: Plan, cluster: Cluster) -> list[int]:
    """Of each stage the bytes of its smallest device."""
    nodes = [{cluster.node_of(device) for device in stage.devices} for stage in plan.stages]
    return [min(cluster.nodes[node].device.memory_bytes for node in among) for among in nodes]
