"""Where a plan's step time and memory go, stage by stage, and what sets the pace.

For every stage of a plan with m microbatches, or all stages of one rank of the pipeline where it runs several::

    c m (forward + backward) + arrival = compute + sum over kinds of collectives + replicas' exchange
    compute + collectives + replicas' exchange + step end + transfers + idle + tied = step time

with c = 1, but where devices share their host's cores: there a rank is faster while others wait
(:mod:`autopart.shared_hosts`), and c is what the simulated step has it compute over what the plan prices.

Collectives are priced from the plan's own counts, which is exact, since their seconds are linear in calls and bytes,
less what passes beside ops that are computed meanwhile (``StagePlan.hidden_s``). Those by kind are on tensor axes;
what replicas exchange in every microbatch (ZeRO from level 2 on), and what the first forward waits for weights that
they update in shares, is a part of its own.
Recomputation, collectives that it repeats included, counts as compute. A stage waits for others and for transfers
between them: transfers are what the step takes longer than one whose transfers take no time, idle is the rest (the
bubble).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from autopart.cluster import Cluster
from autopart.cost.communication import counted_seconds
from autopart.cost.devices import Link
from autopart.device_layout import slowest
from autopart.passes.annotate import parameter_bytes
from autopart.plan import Plan, StagePlan
from autopart.predict import simulate_plan
from autopart.runtime.manifest import MIXED

COMPUTE, IDLE, STEP_END, TIED = "compute", "idle", "step end", "tied gradients"
REPLICAS, TRANSFERS = "replicas' exchange", "transfers"
_DUST = 1e-9
"""Of a time: less than that is what rounding leaves."""


@dataclass(frozen=True, slots=True)
class StageBreakdown:
    """Seconds of one step, and bytes.

    stages: numbers of the stages, one unless a rank runs several. collectives_s: on tensor axes by kind, unless hidden;
    replicas_s: between replicas, for parameters that they divide; both None where links are unknown, or where the plan
    does not tell by axis what it counts: then they are within compute. hidden_s: of collectives beside products, no
    part of the step. transfers_s: of waiting, what transfers between stages add; idle_s: the rest.
    state_bytes: parameters, gradients and optimizer state, of a plan that does not tell them as if each device held
    those of its parameters whole.
    working_bytes: the rest, activations, temporary tensors and what the libraries take.
    """

    stages: tuple[int, ...]
    compute_s: float
    collectives_s: Mapping[str, float] | None = field(hash=False)
    replicas_s: float | None
    hidden_s: float
    step_end_s: float
    transfers_s: float
    idle_s: float
    tied_s: float
    state_bytes: int
    working_bytes: int
    capacity_bytes: int

    @property
    def seconds(self) -> dict[str, float]:
        """All parts of the step by name, in the order of the docstring above."""
        return {
            COMPUTE: self.compute_s,
            **(self.collectives_s or {}),
            REPLICAS: self.replicas_s or 0.0,
            STEP_END: self.step_end_s,
            TRANSFERS: self.transfers_s,
            IDLE: self.idle_s,
            TIED: self.tied_s,
        }

    @property
    def memory_share(self) -> float:
        """Used over capacity; 0 where the plan does not know the capacity."""
        return (self.state_bytes + self.working_bytes) / self.capacity_bytes if self.capacity_bytes else 0.0


@dataclass(frozen=True, slots=True)
class SlowestTransfer:
    """Of those between stages. there_s, back_s: of one microbatch's values, and of their gradients or None where none
    go back. link: the name of what joins them; empty: not known.
    """

    source: int
    target: int
    there_s: float
    back_s: float | None
    link: str


@dataclass(frozen=True, slots=True)
class Breakdown:
    """stages: an entry per rank of the pipeline. slowest: the entry that is busy longest. binds: the part of its step
    that takes most. fullest: the entry whose devices are fullest. transfer: the slowest; None where none takes time.
    """

    stages: tuple[StageBreakdown, ...]
    slowest: int
    binds: str
    fullest: int
    transfer: SlowestTransfer | None = None

    def to_json_object(self) -> dict[str, Any]:
        return {
            "slowest": self.slowest,
            "binds": self.binds,
            "fullest": self.fullest,
            "slowest_transfer": None if self.transfer is None else asdict(self.transfer),
            "stages": [
                {
                    "stages": list(stage.stages),
                    "compute_s": stage.compute_s,
                    "collectives_s": None if stage.collectives_s is None else dict(stage.collectives_s),
                    "replicas_s": stage.replicas_s,
                    "hidden_s": stage.hidden_s,
                    "step_end_s": stage.step_end_s,
                    "transfers_s": stage.transfers_s,
                    "idle_s": stage.idle_s,
                    "tied_s": stage.tied_s,
                    "state_bytes": stage.state_bytes,
                    "working_bytes": stage.working_bytes,
                    "capacity_bytes": stage.capacity_bytes,
                }
                for stage in self.stages
            ],
        }


def break_down(plan: Plan, cluster: Cluster | None) -> Breakdown:
    """cluster: that of the plan; None where it is not known."""
    found, transfer = simulate_plan(plan), _slowest_transfer(plan, cluster)
    waited = 0.0 if transfer is None else rest_of(found.makespan_s, simulate_plan(_at_once(plan)).makespan_s)
    stages = []
    for place in range(plan.pp):
        numbers = tuple(index for index, its in enumerate(plan.places) if its == place)
        own = [plan.stages[index] for index in numbers]
        arrival = sum(stage.arrival_s for stage in own)
        computed = found.busy_s[place] - found.reducing_s[place] - arrival
        priced = plan.microbatches * sum(stage.forward_s + stage.backward_s for stage in own)
        # on a host that is shared, a rank is faster while others wait, with all that it does in a microbatch
        share = computed / priced if plan.shared_host and priced else 1.0
        sent = [_sent(stage, share * plan.microbatches, cluster) for stage in own]
        known = [item for item in sent if item is not None]
        collectives = _joined([kinds for kinds, _ in known]) if len(known) == len(sent) else None
        replicas = arrival + sum(seconds for _, seconds in known) if len(known) == len(sent) else None
        idle = rest_of(found.makespan_s, found.busy_s[place])
        transfers = min(idle, waited)
        used = sum(stage.memory_bytes for stage in own)
        state = min(used, sum(_state_bytes(stage, plan.dtype, plan.optimizer) for stage in own))
        stages.append(
            StageBreakdown(
                numbers,
                rest_of(computed + arrival, sum((collectives or {}).values()) + (replicas or 0.0)),
                collectives,
                replicas,
                share * plan.microbatches * sum(sum(stage.hidden_s.values()) for stage in own),
                found.reducing_s[place],
                transfers,
                rest_of(idle, transfers),
                plan.tied_s,
                state,
                used - state,
                sum(stage.capacity_bytes for stage in own),  # of which each has a share
            )
        )
    busiest = max(range(len(stages)), key=lambda index: found.busy_s[index])
    fullest = max(range(len(stages)), key=lambda index: stages[index].memory_share)
    parts = stages[busiest].seconds
    return Breakdown(tuple(stages), busiest, max(parts, key=lambda name: parts[name]), fullest, transfer)


def _at_once(plan: Plan) -> Plan:
    """The plan with transfers between stages that take no time."""
    transfers = ((source, target, 0.0, None if back is None else 0.0) for source, target, _, back in plan.transfers)
    return replace(plan, transfers=tuple(transfers))


def _slowest_transfer(plan: Plan, cluster: Cluster | None) -> SlowestTransfer | None:
    """By what a microbatch takes both ways."""
    known = [item for item in plan.transfers if item[2] + (item[3] or 0.0) > 0]
    if not known:
        return None
    source, target, there, back = max(known, key=lambda item: item[2] + (item[3] or 0.0))
    first, second = plan.stages[source].devices, plan.stages[target].devices
    if cluster is None or max(*first, *second) >= cluster.device_count or first == second:
        return SlowestTransfer(source, target, there, back, "")
    size = max(len(first), len(second))
    pairs = ((first[at * len(first) // size], second[at * len(second) // size]) for at in range(size))
    link = slowest([cluster.link(one, other, size) for one, other in pairs])
    return SlowestTransfer(source, target, there, back, link.name)


def rest_of(whole: float, part: float) -> float:
    """The whole less a part of it; nothing where that is what rounding leaves."""
    found = whole - part
    return found if found > _DUST * whole else 0.0


def tensor_axes(stage: StagePlan) -> tuple[tuple[str, int], ...]:
    """The stage's tensor axes of more than one device."""
    return tuple(axis for axis in stage.mesh[1:] if axis[1] > 1)


def axis_link(cluster: Cluster, stage: StagePlan, axis: str) -> Link:
    """The slowest link of the stage's groups along an axis; devices are row-major over the mesh."""
    names = [name for name, _ in stage.mesh]
    sizes = [size for _, size in stage.mesh]
    stride = 1
    for size in sizes[names.index(axis) + 1 :]:
        stride *= size
    count = sizes[names.index(axis)]
    starts = (start for start in range(len(stage.devices)) if start // stride % count == 0)
    groups = ([stage.devices[start + stride * step] for step in range(count)] for start in starts)
    return slowest(list(map(cluster.group_link, groups)))


def _sent(stage: StagePlan, times: float, cluster: Cluster | None) -> tuple[dict[str, float], float] | None:
    """Seconds of a step's collectives on tensor axes by kind, and between replicas; None where they are not known.

    times: a microbatch's that a step has.
    """
    if not stage.collectives:
        return {}, 0.0
    counts = stage.axis_collectives
    if not counts:  # of one axis there is nothing to tell apart
        axes = [name for name, size in stage.mesh if size > 1]
        counts = {axes[0]: stage.collectives} if len(axes) == 1 else {}
    if cluster is None or not counts or max(stage.devices) >= cluster.device_count:
        return None
    sizes, data = dict(stage.mesh), stage.mesh[0][0]
    seconds = {axis: counted_seconds(own, sizes[axis], axis_link(cluster, stage, axis)) for axis, own in counts.items()}
    replicas = sum(seconds.pop(data, {}).values())
    kinds = {
        kind: times * rest_of(whole, stage.hidden_s.get(kind, 0.0))
        for kind, whole in _joined(list(seconds.values())).items()
    }
    return kinds, times * rest_of(replicas, stage.hidden_s.get(data, 0.0))


def _joined(found: Sequence[dict[str, float]]) -> dict[str, float]:
    """Sums by kind."""
    total: dict[str, float] = {}
    for item in found:
        for kind, seconds in item.items():
            total[kind] = total.get(kind, 0.0) + seconds
    return total


def _state_bytes(stage: StagePlan, dtype: str, optimizer: str) -> int:
    kept = torch.float32 if dtype in MIXED else getattr(torch, dtype)
    return stage.state_bytes or parameter_bytes((stage.parameters,), kept, optimizer).total


def columns(stages: Iterable[StageBreakdown]) -> list[str]:
    """The names of all parts that some stage has, in a common order; those that are nothing everywhere left out."""
    kinds: dict[str, float] = {}
    ends = dict.fromkeys((REPLICAS, STEP_END, TRANSFERS, IDLE, TIED), 0.0)
    for stage in stages:
        for kind, seconds in (stage.collectives_s or {}).items():
            kinds[kind] = kinds.get(kind, 0.0) + seconds
        for name in ends:
            ends[name] += stage.seconds[name]
    return [name for name, seconds in {COMPUTE: 1.0, **kinds, **ends}.items() if seconds]
