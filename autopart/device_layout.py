"""Where the ranks of a configuration with equal meshes lie on a cluster, and the links that join them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from autopart.cluster import Cluster
from autopart.conversion_prices import TensorAxis
from autopart.cost.devices import Link
from autopart.passes.conversion import Axes
from autopart.runtime.schedule import places_of
from autopart.solver.degrees import Degrees

TENSOR_AXIS = "tp"
TENSOR_AXES = ("x", "y", "z")
"""Names of several tensor axes, outermost first."""


@dataclass(frozen=True, slots=True)
class DeviceLayout:
    """The devices of stages that follow each other on a cluster, each row-major over (dp, tensor axes)."""

    cluster: Cluster
    _links: dict[tuple[int, int, int], Link] = field(default_factory=dict)
    _stage_links: dict[tuple[int, int, int], Link] = field(default_factory=dict)
    _capacities: dict[tuple[tuple[int, ...], int, int], tuple[int, ...]] = field(default_factory=dict)

    def ranks(self, config: Degrees, stage: int) -> tuple[int, ...]:
        """The stage's devices: tensor ranks are neighbours."""
        count = config.dp * config.tp
        place = self.places(config)[stage]
        return tuple(range(place * count, (place + 1) * count))

    def places(self, config: Degrees) -> tuple[int, ...]:
        """The rank of the pipeline that runs each stage."""
        return places_of(config.schedule, config.stages, config.virtual)

    def capacity(self, config: Degrees, stage: int) -> int:
        """Bytes that the stage may take of its smallest device, which stages on one rank share evenly."""
        return self.capacities(config)[stage]

    def capacities(self, config: Degrees) -> tuple[int, ...]:
        """The same by stage."""
        places = self.places(config)
        key = places, config.dp * config.tp, config.virtual
        if key not in self._capacities:
            least = dict[int, int]()
            for place in set(places):
                ranks = range(place * key[1], (place + 1) * key[1])
                nodes = range(self.cluster.node_of(ranks[0]), self.cluster.node_of(ranks[-1]) + 1)
                least[place] = min(self.cluster.nodes[node].device.memory_bytes for node in nodes) // config.virtual
            self._capacities[key] = tuple(least[place] for place in places)
        return self._capacities[key]

    def tensor_axes(self, config: Degrees) -> tuple[TensorAxis, ...]:
        """The tensor axes, outermost first, each with the slowest link of any group along it."""
        names = (TENSOR_AXIS,) if len(config.axes) == 1 else TENSOR_AXES
        found, stride = [], config.tp
        for name, parts in zip(names, config.axes, strict=False):
            stride //= parts
            found.append(TensorAxis(name, parts, self._group_link(config.devices, parts, stride)))
        return tuple(found)

    def axes(self, config: Degrees) -> Axes:
        """The tensor axes by name and size."""
        return tuple((axis.name, axis.parts) for axis in self.tensor_axes(config))

    def data_link(self, config: Degrees) -> Link:
        """The slowest link of any group of replicas."""
        return self._group_link(config.devices, config.dp, config.tp)

    def stage_link(self, config: Degrees, first: int, second: int) -> Link:
        """The slowest link between ranks of equal coordinates in two stages, which all send at once."""
        places, count = self.places(config), config.dp * config.tp
        key = (places[first], places[second], count)
        if key not in self._stage_links:
            node_of, pairs = self.cluster.node_of, dict[tuple[int, int], tuple[int, int]]()
            for i, j in zip(self.ranks(config, first), self.ranks(config, second), strict=True):
                pairs.setdefault((node_of(i), node_of(j)), (i, j))  # others between these nodes have the same link
            self._stage_links[key] = slowest([self.cluster.link(i, j, count) for i, j in pairs.values()])
        return self._stage_links[key]

    def _group_link(self, devices: int, parts: int, stride: int) -> Link:
        """The slowest link of any group of ``parts`` ranks that lie ``stride`` apart."""
        key = (devices, parts, stride)
        if key not in self._links:
            nodes, span = self.cluster.nodes_of(devices), parts * stride
            starts = (base + offset for base in range(0, devices, span) for offset in range(stride))
            groups = {nodes[start : start + span : stride]: start for start in starts}
            # as many devices on equal nodes have equal links
            alike = {
                tuple((id(self.cluster.nodes[node]), count) for node, count in Counter(own).items()): start
                for own, start in groups.items()
            }
            links = [self.cluster.group_link(range(start, start + span, stride)) for start in alike.values()]
            self._links[key] = slowest(links)
        return self._links[key]


def slowest(links: Sequence[Link]) -> Link:
    """The link that moves the fewest bytes/s of payload, of several such the one of most latency."""
    return min(links, key=lambda link: (link.payload_rate, -link.latency_s))
