"""Devices that share their host's cores: those that compute while others wait are faster.

A CPU's device is priced as if all n devices of its host computed. Where these are more than the c cores, each has c / n
of a core; while only B of them compute, each has min(1, c / B), and is min(n / c, n / B) times as fast (processor
sharing, Kleinrock 1967). What time an action takes then depends on what the other ranks do meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from autopart.cluster import Cluster
from autopart.runtime.schedule import Schedule, Work
from autopart.runtime.schedule.actions import SEND_OF
from autopart.simulate import Durations, StageTimes, Transfer

_SAME_TIME = 1e-12
"""Relative: what ends within so little ends at once."""


@dataclass(frozen=True, slots=True)
class SharedHosts:
    """size: devices of each host, which are numbered host by host. alone: times as fast as priced, while no other
    device of the host computes.
    """

    size: int
    alone: float

    @staticmethod
    def of(cluster: Cluster) -> SharedHosts | None:
        """None where devices have cores of their own, or hosts are unlike: these are taken to compute all the time."""
        node = cluster.nodes[0]
        if node.device.alone == 1 or len(set(cluster.nodes)) > 1:
            return None
        return SharedHosts(node.count, node.device.alone)

    def durations(self, devices: Sequence[Sequence[int]]) -> Durations:
        """What a rank's actions take that compute, as far as a schedule gets; exchanges take no core.

        devices: of each rank of the pipeline.
        """
        return lambda schedule, times, transfer: _Run(self, schedule, times, transfer, devices).durations


class _Run:
    """The event-driven run of a schedule: from one end of an action, or arrival, to the next."""

    def __init__(
        self,
        hosts: SharedHosts,
        schedule: Schedule,
        times: Sequence[StageTimes],
        transfer: Transfer,
        devices: Sequence[Sequence[int]],
    ) -> None:
        self.schedule, self.times, self.transfer, self.hosts = schedule, times, transfer, hosts
        self.rank_of = schedule.rank_of
        self.splits = {a.stage for actions in schedule.ranks for a in actions if a.work is Work.WEIGHT}
        self.on = [Counter(device // hosts.size for device in own) for own in devices]
        count = len(schedule.ranks)
        self.durations: list[list[float]] = [[] for _ in range(count)]
        self.at = [0] * count
        self.now = 0.0
        self.left: dict[int, float] = {}  # by rank: seconds of the action at hand that are to come, as priced
        self.started = [0.0] * count
        self.arrivals: dict[tuple[Work, int, int, int | None], float] = {}
        self.channel: dict[tuple[int, int], float] = {}
        self.waits: dict[int, float] = {}  # by rank: until when
        self.run()

    def run(self) -> None:
        while True:
            while any(self.go_on(rank) for rank in range(len(self.at)) if rank not in self.left):
                pass
            speeds = self.speeds()
            ends = {rank: self.now + left / speeds[rank] for rank, left in self.left.items()}
            then = min((*ends.values(), *self.waits.values()), default=None)
            if then is None:
                return
            for rank, end in ends.items():
                if end <= then * (1 + _SAME_TIME):
                    del self.left[rank]
                    self.durations[rank].append(then - self.started[rank])
                    self.at[rank] += 1
                else:
                    self.left[rank] -= (then - self.now) * speeds[rank]
            self.now = then
            self.waits = {rank: until for rank, until in self.waits.items() if until > then}

    def speeds(self) -> dict[int, float]:
        """Of the ranks that compute: a rank is as fast as its slowest device."""
        busy: Counter[int] = Counter()
        for rank in self.left:
            busy.update(self.on[rank])
        size, alone = self.hosts.size, self.hosts.alone
        return {rank: min(alone, *(size / busy[host] for host in self.on[rank])) for rank in self.left}

    def go_on(self, rank: int) -> bool:
        """Does what takes no time, until the rank computes or waits; whether anything was done."""
        actions, before = self.schedule.ranks[rank], self.at[rank]
        while self.at[rank] < len(actions):
            action = actions[self.at[rank]]
            stage, peer = action.stage, action.peer
            if peer is None:
                seconds = self.times[stage].seconds(action.work, stage in self.splits)
                if seconds:
                    self.left[rank], self.started[rank] = seconds, self.now
                    return True
                self.durations[rank].append(0.0)
            elif action.work.is_receive:
                arrival = self.arrivals.get((SEND_OF[action.work], peer, stage, action.microbatch))
                if arrival is None:
                    break
                if arrival > self.now:
                    self.waits[rank] = arrival
                    break
            else:
                to, ends = self.rank_of[peer], self.now
                if to != rank:
                    ends = max(ends, self.channel.get((rank, to), 0.0)) + self.transfer(action)
                    self.channel[rank, to] = ends
                self.arrivals[action.work, stage, peer, action.microbatch] = ends
            self.at[rank] += 1
        return self.at[rank] > before
