"""The machines to plan for: devices, nodes, and two levels of links.

A cluster is a row of nodes; each node holds equal devices, nodes may differ from each other. Devices are numbered
through the cluster, node after node, as torchrun numbers its ranks. Two devices of one node are joined by the node's
``inside`` link, devices of two nodes by the slower of the nodes' shares of their network ports.

Descriptions: ``4x8xA100-80GB`` (4 nodes of 8), ``8xH100`` (one node), ``cpu:4``, several kinds joined with ``+``, and
network ports after ``@``: ``4x8xV100-16GB@Ethernet-25`` (one port a node), ``2x8xH100@4*InfiniBand-400`` (four).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, reduce
from pathlib import Path
from typing import Any

from autopart.cost import calibrated
from autopart.cost import devices as presets
from autopart.cost.calibration import Calibration
from autopart.cost.devices import Device, Link
from autopart.runtime.errors import ClusterError
from autopart.runtime.files import write_whole

__all__ = ["Cluster", "Device", "Link", "Node"]

MOST_DEVICES = 2**20
"""Of a cluster: more is a slip of the pen, of which not even the list of nodes would fit into memory."""

_COUNT = r"\d{1,12}"  # more digits are a slip of the pen too, and of thousands Python makes no number
_NODES = re.compile(rf"(?:({_COUNT})x)?({_COUNT})x([^@x][^@]*)(?:@(?:({_COUNT})\*)?([^@]+))?")


@dataclass(frozen=True, slots=True)
class Node:
    """``count`` equal devices and how they are joined.

    inside: the link of each device to its neighbours in the node.
    port: one network port of the node; ports: how many there are, shared evenly by the devices.
    """

    device: Device
    count: int
    inside: Link
    port: Link
    ports: int

    def __post_init__(self) -> None:
        if self.count < 1 or self.ports < 1:
            raise ClusterError(f"a node has at least one device and one network port: {self.count}, {self.ports}")

    @property
    def network(self) -> Link:
        """One device's share of the node's ports, when all devices send at once."""
        return _shared(self.port, self.ports / self.count)

    def network_among(self, senders: int) -> Link:
        """One device's share of the node's ports when so many of its devices send at once: at most one port."""
        return _shared(self.port, min(1.0, self.ports / min(senders, self.count)))

    @staticmethod
    def of(device: Device, count: int, port: Link | None = None, ports: int | None = None) -> Node:
        """A node with the device's usual links, or with ``ports`` (default 1) of the given network ports."""
        default = presets.defaults(device.name, device.kind)
        if port is None:
            return Node(device, count, default.inside, default.between, max(1, round(default.ports_per_device * count)))
        return Node(device, count, default.inside, port, 1 if ports is None else ports)

    @property
    def shares_host(self) -> bool:
        """Whether its devices are CPU processes that divide one host, rather than cores that are each its own."""
        return self.device.name == "CPU" and self.device != presets.device("CPU")

    @property
    def is_this_host(self) -> bool:
        """Whether it is made of the CPUs of the host that this runs on, as they are known now."""
        return self.shares_host and self == _host_node(self.count)

    def first(self, count: int) -> Node:
        """Its first devices by themselves, with their share of the ports.

        CPUs have to themselves what the others of their host had: this host's as they are where no more are planned for
        (see :meth:`Cluster.local`), those of a file what all had together. count: at least 1.
        """
        if count >= self.count:
            return self
        ports = max(1, self.ports * count // self.count)
        if not self.shares_host:
            return replace(self, count=count, ports=ports)
        if self.is_this_host:
            return _host_node(count)
        device, more = self.device, self.count / count
        alone = max(1.0, device.alone / more)
        device = replace(
            device,
            memory_bytes=int(device.memory_bytes * more),
            peak_flops={name: rate * more for name, rate in device.peak_flops.items()},
            memory_bandwidth=device.memory_bandwidth * more,
            launch_s=device.launch_s * alone / device.alone,  # fewer take turns on a core
            function_s=device.function_s / more,
            random_s=device.random_s * alone / device.alone,
            mapped_s=device.mapped_s / more,
            alone=alone,
        )
        return replace(self, device=device, count=count, ports=ports)

    def __str__(self) -> str:
        """A description that :meth:`Cluster.parse` reads; where that would give another node, one that it refuses."""
        text = self._text()
        try:
            (read,) = Cluster.parse(text).nodes
        except (ClusterError, ValueError):  # of a name that a file gave
            return text
        return text if self._is_like(read) else f"{text} (as described)"

    def _is_like(self, other: Node) -> bool:
        """Whether they are equal; a GPU's driver keeps a little of its memory."""
        memory = other.device.memory_bytes
        held = memory if 0.9 * memory <= self.device.memory_bytes <= memory else self.device.memory_bytes
        return replace(self, device=replace(self.device, memory_bytes=held)) == other

    def _text(self) -> str:
        text = f"{self.count}x{self.device.name}"
        if self.shares_host:
            text = f"cpu:{self.count}"
        usual = Node.of(self.device, self.count) if self.device.name in presets.devices() else None
        if usual is not None and (self.port.name, self.ports) == (usual.port.name, usual.ports):
            return text
        return f"{text}@{'' if self.ports == 1 else f'{self.ports}*'}{self.port.name}"


@dataclass(frozen=True, slots=True)
class Cluster:
    """A row of nodes. Devices are numbered from 0, node after node."""

    nodes: tuple[Node, ...]
    _node_of: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ClusterError("a cluster has at least one node")
        check_size(sum(node.count for node in self.nodes))
        node_of = tuple(index for index, node in enumerate(self.nodes) for _ in range(node.count))
        object.__setattr__(self, "_node_of", node_of)

    @property
    def device_count(self) -> int:
        return len(self._node_of)

    @property
    def devices(self) -> tuple[Device, ...]:
        return tuple(node.device for node in self.nodes for _ in range(node.count))

    def with_memory(self, memory_bytes: Callable[[Device], int]) -> Cluster:
        """The cluster whose devices have so many bytes of memory, and are otherwise as they are."""
        devices = [replace(node.device, memory_bytes=memory_bytes(node.device)) for node in self.nodes]
        return Cluster(tuple(replace(node, device=own) for node, own in zip(self.nodes, devices, strict=True)))

    def node_of(self, device: int) -> int:
        """The number of the node that holds the device. Raises ClusterError when there is no such device."""
        if not 0 <= device < self.device_count:
            raise ClusterError(f"there is no device {device} in {self}, which has {self.device_count} devices")
        return self._node_of[device]

    def nodes_of(self, count: int) -> tuple[int, ...]:
        """The numbers of the nodes that hold the first so many devices."""
        self.node_of(count - 1)
        return self._node_of[:count]

    @property
    def digest(self) -> str:
        """A short hash of all numbers of devices and links but their memory, of which drivers keep a little."""
        nodes = [(count, _numbers(asdict(node))) for node, count in _runs(self.nodes)]
        return hashlib.sha256(json.dumps(nodes, sort_keys=True).encode()).hexdigest()[:12]

    def device(self, index: int) -> Device:
        return self.nodes[self.node_of(index)].device

    def names(self, devices: Sequence[int]) -> str:
        """What these devices are: ``A100-80GB``, or with numbers ``2 A100-80GB + 1 V100-16GB`` where they differ."""
        counts: dict[str, int] = {}
        for index in devices:
            counts[self.device(index).name] = counts.get(self.device(index).name, 0) + 1
        return next(iter(counts)) if len(counts) == 1 else " + ".join(f"{n} {name}" for name, n in counts.items())

    def link(self, i: int, j: int, senders: int | None = None) -> Link:
        """What joins two different devices.

        senders: devices of each of their nodes that send to the other node at once, such as a stage's; None: all.
        """
        if i == j:
            raise ClusterError(f"device {i} needs no link to itself")
        first, second = self.nodes[self.node_of(i)], self.nodes[self.node_of(j)]
        if self.node_of(i) == self.node_of(j):
            return first.inside.among(2)
        if senders is None:
            return slower(first.network, second.network)
        return slower(first.network_among(senders), second.network_among(senders))

    def group_link(self, devices: Sequence[int]) -> Link:
        """The slowest level that a group of devices crosses; one device alone gets its node's inner link.

        Where a group has several devices on each node, as many rings cross the network at once as the node with the
        fewest has (NCCL gives each its own port), until the inner links become the narrow place: ``rings``. Inner
        links that are slower than one such ring are the group's link. Groups of CPUs use gloo.
        """
        members = Counter(map(self.node_of, set(devices)))
        if not members:
            raise ClusterError("a group has at least one device")
        link = self._narrowest(members)
        return link.of_gloo() if any(self.nodes[index].device.kind == "cpu" for index in members) else link

    def _narrowest(self, members: Mapping[int, int]) -> Link:
        """Of a group with so many devices of these nodes."""
        if len(members) == 1:
            ((index, count),) = members.items()
            return self.nodes[index].inside.among(count)
        nodes = {(id(self.nodes[index]), count): self.nodes[index] for index, count in members.items()}
        network = reduce(slower, (node.network for node in nodes.values()))
        # A ring's steps inside are on the nodes that hold several of its devices.
        inner = [node.inside.among(count) for (_, count), node in nodes.items() if count > 1]
        if not inner:
            return network
        inside = reduce(slower, inner)
        # A ring crosses the network once per node, its other steps stay inside (NCCL counts latency so).
        across = len(members) / sum(members.values())
        latency = across * network.latency_s + (1 - across) * inside.latency_s
        of_sums = across * network.sum_step_s + (1 - across) * inside.sum_step_s
        share = inside.payload_rate / network.payload_rate
        link = inside if share < 1 else replace(network, rings=min(float(min(members.values())), share))
        return replace(link, latency_s=latency, sum_latency_s=of_sums, switch_sums=0.0)

    def __str__(self) -> str:
        return "+".join(_group_text(str(node), count) for node, count in _runs(self.nodes))

    @staticmethod
    def parse(text: str) -> Cluster:
        """Reads a description. Raises ClusterError that says what was expected, and for unknown devices which exist."""
        if not isinstance(text, str):
            raise ClusterError(f"a description of a cluster is a text such as '8xH100', not {text!r}")
        nodes: list[Node] = []
        for part in text.replace(" ", "").split("+"):
            if part.lower().startswith("cpu:"):
                if not re.fullmatch(_COUNT, part[4:]) or int(part[4:]) < 1:
                    raise ClusterError(f"cannot read {part!r}: expected cpu:COUNT, such as cpu:4")
                check_size(int(part[4:]))
                nodes.append(_host_node(int(part[4:])))
                continue
            match = _NODES.fullmatch(part)
            if match is None or int(match[1] or 1) < 1 or int(match[2]) < 1:
                raise ClusterError(
                    f"cannot read the cluster {text!r} at {part!r}: expected NODESxDEVICESxNAME (4x8xA100-80GB), "
                    "DEVICESxNAME (8xH100) or cpu:COUNT, joined with '+', network ports after '@' (@Ethernet-25)"
                )
            check_size(sum(node.count for node in nodes) + int(match[1] or 1) * int(match[2]))
            device = presets.device(match[3])
            port = presets.link(match[5]) if match[5] else None
            node = Node.of(device, int(match[2]), port, int(match[4]) if match[4] else None)
            nodes += [node] * int(match[1] or 1)
        return Cluster(tuple(nodes))

    @staticmethod
    def read(text: str) -> Cluster:
        """Of a description, else of a file: what the command line takes. Raises ClusterError."""
        if isinstance(text, str) and text.endswith(".toml"):
            return Cluster.load(text)
        try:
            return Cluster.parse(text)
        except ClusterError:
            if isinstance(text, str) and os.path.isfile(text):  # whatever its name ends in
                return Cluster.load(text)
            raise

    @staticmethod
    def local(n: int | None = None, calibration: Calibration | None = None) -> Cluster:
        """This host's CUDA devices, or ``n`` CPU devices that share its memory and cores.

        Speeds are those that ``autopart calibrate`` measured here, with as many ranks or with the nearest number of
        them (see autopart.cost.calibration); presets where it was never run.
        n: devices of the whole job, default WORLD_SIZE, else those present. Under torchrun on several hosts
        (LOCAL_WORLD_SIZE below WORLD_SIZE) every host is taken to be like this one. calibration: of this host, in place
        of what is stored. Raises ClusterError when there are fewer devices than ranks, or when the GPU is not among
        the presets.
        """
        import torch

        if n is not None and (not isinstance(n, int) or isinstance(n, bool) or n < 1):
            raise ClusterError(f"a number of devices is a whole one of at least 1, not {n!r}")
        total = n if n is not None else int(os.environ.get("WORLD_SIZE", 0)) or None
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) if n is None else 0
        if not torch.cuda.is_available():
            count = per_node or total or 1
            nodes = 1 if total is None else max(1, total // count)
            return Cluster((_host_node(count, calibration),) * nodes)
        present = torch.cuda.device_count()
        count = per_node or total or present
        if count > present:
            raise ClusterError(
                f"{count} devices were asked for, this host has {present}; start fewer processes per host"
            )
        calibration = calibration or calibrated.find("cuda", count)
        if calibration is None:
            device = presets.from_cuda_name(torch.cuda.get_device_name(0))
        else:
            device = calibration.applied(calibrated.base_device("cuda"), count)
        memory = min(device.memory_bytes, torch.cuda.get_device_properties(0).total_memory)
        node = Node.of(replace(device, memory_bytes=memory), count)
        if calibration is not None and calibration.link is not None:
            node = replace(node, inside=calibration.link)
        return Cluster((node,) * (1 if total is None else max(1, total // count)))

    @staticmethod
    def load(path: str | Path) -> Cluster:
        """Reads a cluster file, see :meth:`save`. Raises ClusterError that names the file and the key."""
        from autopart.cost.cluster_file import read_nodes

        try:
            data = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))  # some editors begin with a mark
        except OSError as error:
            raise ClusterError(f"cannot read the cluster file {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ClusterError(f"{path} is not a text file; expected is a cluster file (.toml)") from error
        except tomllib.TOMLDecodeError as error:
            raise ClusterError(f"{path} is not valid TOML: {error}") from error
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, or lists in lists
            raise ClusterError(f"{path} is not readable as TOML: {str(error).partition(';')[0]}") from error
        rows = read_nodes(data, str(path))
        try:
            check_size(sum(repeat * count for repeat, _, count, _, _, _ in rows))
        except ClusterError as error:
            raise ClusterError(f"{path}: nodes: {error}") from error
        return Cluster(
            tuple(
                Node(device, count, inside, port, ports)
                for repeat, device, count, inside, port, ports in rows
                for _ in range(repeat)
            )
        )

    def save(self, path: str | Path) -> None:
        """Writes the cluster as TOML: its devices, its links, and the nodes that use them by name. Raises OSError."""
        from autopart.cost.cluster_file import write_nodes

        nodes = [
            (count, node.device, node.count, node.inside, node.port, node.ports) for node, count in _runs(self.nodes)
        ]
        write_whole(path, write_nodes(nodes))


def check_size(devices: int) -> None:
    """Raises ClusterError where no cluster has so many."""
    if devices > MOST_DEVICES:
        raise ClusterError(f"{devices:,} devices; a cluster has at most {MOST_DEVICES:,}: check count and devices")


def _numbers(value: Any) -> Any:
    """Numbers as floats, whatever a file wrote, and none of memory."""
    if isinstance(value, dict):
        return {name: _numbers(item) for name, item in value.items() if name != "memory_bytes"}
    return value if isinstance(value, str) else float(value)


# Planning asks for the links of all pairs of ranks, of which a cluster has few different ones.
@lru_cache(maxsize=1024)
def _shared(port: Link, share: float) -> Link:
    return replace(port, bandwidth=port.bandwidth * share)


@lru_cache(maxsize=1024)
def slower(first: Link, second: Link) -> Link:
    """The one that moves fewer bytes/s of payload, with the greater latency of the two."""
    if first == second:
        return first
    slow = min(first, second, key=lambda link: link.payload_rate)
    return replace(
        slow,
        latency_s=max(first.latency_s, second.latency_s),
        sum_latency_s=max(first.sum_step_s, second.sum_step_s),
    )


def _runs(nodes: Sequence[Node]) -> Iterator[tuple[Node, int]]:
    """Equal neighbours counted together."""
    start = 0
    for index in range(1, len(nodes) + 1):
        if index == len(nodes) or nodes[index] != nodes[start]:
            yield nodes[start], index - start
            start = index


def _group_text(node: str, count: int) -> str:
    if node.startswith("cpu:"):
        return "+".join([node] * count)
    return node if count == 1 else f"{count}x{node}"


def _host_node(count: int, calibration: Calibration | None = None) -> Node:
    """``count`` CPU devices that share this host's memory and cores, as fast as measured or as presets say.

    calibration: in place of what is stored.
    """
    core = presets.device("CPU")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    held = memory // count if memory else core.memory_bytes
    calibration = calibration or calibrated.find("cpu", count)
    if calibration is not None:
        node = Node.of(replace(calibration.applied(core, count), memory_bytes=held), count)
        return node if calibration.link is None else replace(node, inside=calibration.link)
    share = calibrated.host_cores() / count
    peaks: Mapping[str, float] = {name: rate * share for name, rate in core.peak_flops.items()}
    alone = max(1.0, 1 / share)
    device = replace(
        core,
        memory_bytes=held,
        peak_flops=peaks,
        memory_bandwidth=core.memory_bandwidth * share,
        launch_s=core.launch_s * alone,  # they take turns
        function_s=core.function_s / share,
        random_s=core.random_s * alone,
        mapped_s=core.mapped_s / share,
        alone=alone,
    )
    return Node.of(device, count)
