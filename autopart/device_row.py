"""Runs of devices that a stage can have, where nodes may be unlike and their order is free.

A *place* lies between two stages. It says how many nodes of each kind are used up, and of a node that is not, its kind
and how many of its devices are. A *run* leads from one place to another: the rest of a node, then whole nodes, then the
beginning of one. Equal nodes are one kind, so that a way through the places is an order of unlike nodes and leaves open
only which of several equal ones is meant; :meth:`DeviceRow.devices` settles that.

On large clusters, and where nodes have a power of two of devices, runs are fewer: within a node, sizes that divide it,
at multiples of their own size; beyond a node, whole nodes. So does Alpa's inter-operator pass (arXiv 2201.12023,
section 5.2). On larger ones stages have whole nodes alone, and of many nodes of a kind several at once.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from autopart.cluster import Cluster, Link, Node

MOST_FREE, MOST_FREE_ALIKE = 8, 16
"""Devices of a cluster up to which every run is offered, where a node's devices are no power of two; of one kind."""
MOST_PARTED = 32
"""Devices of a cluster up to which a stage may have a part of a node."""
MOST_PLACES = 32
"""Between whole nodes, where stages have no parts of them: else nodes of a kind are taken several at once."""

Pieces = tuple[tuple[int, int], ...]
"""(kind of node, devices of one such node), in order."""


@dataclass(frozen=True, slots=True)
class Place:
    """used: nodes of each kind that are begun. kind, taken: of the node that is not used up, if any."""

    used: tuple[int, ...]
    kind: int = -1
    taken: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """Devices between two places, by their numbers in :attr:`DeviceRow.places`."""

    start: int
    stop: int
    pieces: Pieces

    @property
    def count(self) -> int:
        return sum(count for _, count in self.pieces)


@dataclass(frozen=True)
class DeviceRow:
    """The places and runs of a cluster. kinds: its unlike nodes, in the order in which they appear."""

    cluster: Cluster

    @cached_property
    def kinds(self) -> tuple[Node, ...]:
        return tuple(dict.fromkeys(self.cluster.nodes))

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Nodes of each kind."""
        found = Counter(self.cluster.nodes)
        return tuple(found[kind] for kind in self.kinds)

    @cached_property
    def units(self) -> tuple[int, ...]:
        """Nodes of each kind that are taken at once, or what is left of them."""
        for most in range(max(self.counts) if self.is_coarse else 0, 0, -1):
            units = tuple(-(-count // most) for count in self.counts)
            steps = (-(-count // unit) + 1 for count, unit in zip(self.counts, units, strict=True))
            if math.prod(steps) <= MOST_PLACES:
                return units
        return self.counts if self.is_coarse else (1,) * len(self.counts)

    @property
    def is_coarse(self) -> bool:
        """Whether stages have whole nodes alone."""
        return self.cluster.device_count > MOST_PARTED and len(self.cluster.nodes) > 1

    @property
    def places(self) -> tuple[Place, ...]:
        """The first has all devices before it, the last none."""
        return self._reached[0]

    @property
    def runs(self) -> tuple[Run, ...]:
        return self._reached[1]

    @property
    def end(self) -> int:
        """The place behind all devices."""
        return self.places.index(Place(self.counts))

    @cached_property
    def _reached(self) -> tuple[tuple[Place, ...], tuple[Run, ...]]:
        numbers = {Place((0,) * len(self.kinds)): 0}
        runs: list[Run] = []
        waiting = list(numbers)
        while waiting:
            place = waiting.pop(0)
            for pieces, stop in self._from(place):
                if stop not in numbers:
                    numbers[stop] = len(numbers)
                    waiting.append(stop)
                runs.append(Run(numbers[place], numbers[stop], pieces))
        return tuple(numbers), tuple(runs)

    def _from(self, place: Place) -> Iterator[tuple[Pieces, Place]]:
        """Every run that starts at a place."""
        odd = any(node.count & (node.count - 1) for node in self.kinds)
        free = odd and self.cluster.device_count <= (MOST_FREE_ALIKE if len(self.kinds) == 1 else MOST_FREE)
        if place.taken:
            left = self.kinds[place.kind].count - place.taken
            for size in range(1, left):
                if free or self._divides(place.kind, place.taken, size):
                    yield ((place.kind, size),), Place(place.used, place.kind, place.taken + size)
            rest: Pieces = ((place.kind, left),)
            if free or self._divides(place.kind, place.taken, left):
                yield rest, Place(place.used)
            if free:
                yield from self._onward(rest, place.used, 0, free)
            return
        yield from self._onward((), place.used, 0, free)

    def _divides(self, kind: int, taken: int, size: int) -> bool:
        return self.kinds[kind].count % size == 0 and taken % size == 0

    def _onward(self, pieces: Pieces, used: tuple[int, ...], least: int, free: bool) -> Iterator[tuple[Pieces, Place]]:
        """Runs that go on with whole nodes, kinds in order, and perhaps the beginning of one more."""
        for kind, node in enumerate(self.kinds):
            if used[kind] == self.counts[kind]:
                continue
            unit = min(self.units[kind], self.counts[kind] - used[kind])
            more = (*used[:kind], used[kind] + unit, *used[kind + 1 :])
            for size in range(1, 1 if self.is_coarse else node.count):
                if free or (not pieces and self._divides(kind, 0, size)):
                    yield (*pieces, (kind, size)), Place(more, kind, size)
            if kind >= least:
                whole = (*pieces, *[(kind, node.count)] * unit)
                yield whole, Place(more)
                yield from self._onward(whole, more, kind, free)

    def devices(self, run: Run) -> tuple[int, ...]:
        """The numbers of a run's devices; equal nodes are used in order."""
        ends = list(itertools.accumulate(node.count for node in self.cluster.nodes))
        place = self.places[run.start]
        used, taken, found = list(place.used), place.taken, list[int]()
        for kind, size in run.pieces:
            used[kind] += not taken
            nodes = [index for index, node in enumerate(self.cluster.nodes) if node == self.kinds[kind]]
            index = nodes[used[kind] - 1]
            start = ends[index] - self.cluster.nodes[index].count + taken
            found += range(start, start + size)
            taken = 0
        return tuple(found)

    def memory_bytes(self, pieces: Pieces) -> int:
        """Of the smallest of these devices."""
        return min(self.kinds[kind].device.memory_bytes for kind, _ in pieces)

    def part(self, pieces: Pieces) -> Cluster:
        """These devices by themselves, on the links that they have in the whole cluster."""
        nodes = []
        for kind, count in pieces:
            node = self.kinds[kind]
            # each device keeps its share of the ports
            port = node.port if count == node.count else _scaled(node, count)
            nodes.append(Node(node.device, count, node.inside, port, node.ports))
        return Cluster(tuple(nodes))


def _scaled(node: Node, count: int) -> Link:
    return replace(node.port, bandwidth=node.port.bandwidth * count / node.count)
