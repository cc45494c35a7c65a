"""Clusters as they would be with other hardware: factors on links, arithmetic and memory."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace

from autopart.cluster import Cluster, Node
from autopart.cost.devices import GIB, Device
from autopart.runtime.errors import ClusterError

_CHANGED = re.compile(r"(.+) \(([^()]+)\)")
_MEMORY = re.compile(r"([0-9.]+)\s*(G|GB|GiB|T|TB|TiB)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Change:
    """Factors on bandwidths and rates. network: of the nodes' ports; inside: of the links within nodes; flops: of all
    types; bandwidth: of the devices' memory. memory: a factor, or bytes as a whole number.
    """

    network: float = 1.0
    inside: float = 1.0
    flops: float = 1.0
    bandwidth: float = 1.0
    memory: float | int = 1.0

    def applied(self, cluster: Cluster) -> Cluster:
        """The cluster with the change. Latencies and launches stay."""
        changed: dict[Node, Node] = {}
        for node in cluster.nodes:
            if node not in changed:
                changed[node] = replace(
                    node,
                    device=self._device(node.device),
                    inside=replace(
                        node.inside,
                        bandwidth=node.inside.bandwidth * self.inside,
                        direct=node.inside.direct * self.inside,
                    ),
                    port=replace(node.port, bandwidth=node.port.bandwidth * self.network),
                )
        return Cluster(tuple(changed[node] for node in cluster.nodes))

    def _device(self, device: Device) -> Device:
        memory = self.memory if isinstance(self.memory, int) else round(device.memory_bytes * self.memory)
        return replace(
            device,
            memory_bytes=memory,
            peak_flops={name: rate * self.flops for name, rate in device.peak_flops.items()},
            memory_bandwidth=device.memory_bandwidth * self.bandwidth,
        )

    def __str__(self) -> str:
        factors = [("network", self.network), ("inside", self.inside), ("flops", self.flops)]
        factors += [("bandwidth", self.bandwidth)]
        texts = [f"{name} {factor:g}x" for name, factor in factors if factor != 1]
        if isinstance(self.memory, int):
            texts.append(f"memory {self.memory / GIB:g} GiB")
        elif self.memory != 1:
            texts.append(f"memory {self.memory:g}x")
        return ", ".join(texts)


def cluster_named(name: str, given: Cluster | None = None) -> Cluster | None:
    """The cluster that a plan calls so: the given one if that is its name, without one by its description.

    ``4xH100 (memory 2x)`` is the changed one, as a plan made under a :class:`Change` calls its cluster. None where
    ``given`` has another name, or the name is no description.
    """
    try:
        described = Cluster.parse(name)
    except (ClusterError, ValueError):  # of a name that a file gave
        described = None
    if given is None and described is not None:
        return described
    if given is not None and str(given) in (name, str(described)):
        return given
    found = _CHANGED.fullmatch(name)
    change = read_change(found[2]) if found is not None else None
    base = cluster_named(found[1], given) if found is not None and change is not None else None
    return None if base is None or change is None else change.applied(base)


def changed_as(name: str, base: Cluster) -> Cluster:
    """A cluster with the changes that a plan's name for its own tells, such as ``4xH100 (memory 2x)``."""
    found = _CHANGED.fullmatch(name)
    change = read_change(found[2]) if found is not None else None
    return base if found is None or change is None else change.applied(changed_as(found[1], base))


def read_change(text: str) -> Change | None:
    """What ``str`` of a change gives; None for another text."""
    names = {item.name for item in fields(Change)}
    values: dict[str, float | int] = {}
    for part in text.split(", "):
        name, _, value = part.partition(" ")
        if name not in names or name in values:
            return None
        try:
            values[name] = read_memory(value) if name == "memory" else read_factor(value)
        except ClusterError:
            return None
    return Change(**values)


def read_factor(text: str) -> float:
    """``2x``, ``0.5x``, from a millionth to a million. Raises ClusterError."""
    try:
        value = float(text[:-1]) if text.endswith("x") else 0.0
    except ValueError:
        value = 0.0
    if not 1e-6 <= value <= 1e6:
        raise ClusterError(f"{text!r} is no factor such as 2x or 0.5x, from 0.000001x to 1000000x")
    return value


def read_memory(text: str) -> float | int:
    """``80GB`` (2^30 bytes each, as presets count), ``1.5TB``, or a factor ``2x``. Raises ClusterError."""
    found = _MEMORY.fullmatch(text.strip())
    if found is None:
        if text.endswith("x"):
            return read_factor(text)
        raise ClusterError(f"{text!r} is neither a size such as 80GB nor a factor such as 2x")
    unit = GIB if found[2][0] in "gG" else 1024 * GIB
    try:
        size = round(float(found[1]) * unit)
    except ValueError as error:
        raise ClusterError(f"{text!r} is no size such as 80GB") from error
    if not 1 <= size <= 2**20 * GIB:
        raise ClusterError(f"a device has some memory, and no more than 1024 TB, not {text}")
    return size
