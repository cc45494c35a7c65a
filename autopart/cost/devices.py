"""Devices and links: their types, and those that ``devices.toml`` knows by name."""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from typing import Any

from autopart.runtime.errors import ClusterError

GIB = 2**30
LARGE_BYTES = 32 * 2**20
"""Of a tensor on the CPU whose memory is mapped anew each time: the most that glibc's M_MMAP_THRESHOLD becomes."""
DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, or a CPU process's share of its host.

    kind: "cpu" or "cuda". memory_bytes: of its own memory. peak_flops: FLOP/s of dense contractions by dtype name.
    memory_bandwidth: bytes/s. launch_s: seconds that a kernel takes at least, from the start of one small op to that of
    the next where neither waits for the host. host_s: of the host, to start one; a GPU computes meanwhile, and waits
    where that takes longer (0: ops are computed by the host itself).
    processors: streaming multiprocessors, over which a matrix product's tiles are dealt (0: no tiles, as on a CPU).
    contraction, memory: shares of the peaks that large matrix products and streaming kernels reach. attention: share
    of the peak FLOP/s that fused attention reaches on long sequences with heads of 128 and nothing masked, forward and
    backward together; contraction_by, attention_by: by dtype name, where types differ in it. unaligned: share of the
    rate that products of 16-bit numbers reach whose rows do not start at multiples of 16 bytes.
    function_s, random_s: of CPUs, seconds of an element's exponential on all of its threads, and of a random number
    (:mod:`autopart.passes.arithmetic`); GPUs hide both behind what they read and write. mapped_s: of CPUs, seconds per
    byte of a new tensor of LARGE_BYTES or more, which the operating system maps page by page.
    attention_back_by: by dtype name, where the backward of attention reaches another share than both together.
    alone: times as fast while no other device of its host computes, for CPUs that share fewer cores. measured: with how
    many ranks at once ``autopart calibrate`` measured the speeds (0: not at all, they are of datasheets).
    """

    name: str
    kind: str
    memory_bytes: int
    peak_flops: Mapping[str, float] = field(hash=False)
    memory_bandwidth: float
    launch_s: float
    processors: int = 0
    contraction: float = 0.65
    memory: float = 0.8
    attention: float = 0.5
    alone: float = 1.0
    measured: int = 0
    contraction_by: Mapping[str, float] = field(default_factory=dict, hash=False)
    attention_by: Mapping[str, float] = field(default_factory=dict, hash=False)
    host_s: float = 0.0
    unaligned: float = 1.0
    function_s: float = 0.0
    random_s: float = 0.0
    mapped_s: float = 0.0
    attention_back_by: Mapping[str, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.kind not in ("cpu", "cuda"):
            raise ClusterError(f"device {self.name}: kind is {self.kind!r}, expected cpu or cuda")
        seconds = (self.launch_s, self.host_s, self.function_s, self.random_s, self.mapped_s)
        if self.memory_bytes <= 0 or self.memory_bandwidth <= 0 or min(seconds) < 0:
            raise ClusterError(
                f"device {self.name}: memory and bandwidth are above zero, launch_s, host_s, function_s, random_s and "
                "mapped_s are not below"
            )
        if "float32" not in self.peak_flops or min(self.peak_flops.values()) <= 0:
            raise ClusterError(f"device {self.name}: peak_flops has rates above zero, float32 among them")
        by_dtype = (*self.contraction_by.values(), *self.attention_by.values(), *self.attention_back_by.values())
        shares = (self.contraction, self.memory, self.attention, self.unaligned, *by_dtype)
        if self.alone < 1:
            raise ClusterError(f"device {self.name}: alone is at least 1, as other devices make none faster")
        if min(self.processors, self.measured) < 0 or not all(0 < share <= 1 for share in shares):
            raise ClusterError(
                f"device {self.name}: contraction, memory, attention and unaligned are above 0 and at most 1, "
                "processors and measured are not negative"
            )

    def peak(self, dtype: str) -> float:
        """FLOP/s in a dtype ("bfloat16"); float32's rate for dtypes that are not listed."""
        return self.peak_flops.get(dtype, self.peak_flops["float32"])

    def product_rate(self, dtype: str) -> float:
        """FLOP/s of large matrix products in a dtype."""
        return self.peak(dtype) * self.contraction_by.get(dtype, self.contraction)

    def attention_rate(self, dtype: str, back: bool = False) -> float:
        """FLOP/s of fused attention in a dtype. back: of its backward."""
        share = self.attention_by.get(dtype, self.attention)
        return self.peak(dtype) * (self.attention_back_by.get(dtype, share) if back else share)


@dataclass(frozen=True, slots=True)
class Link:
    """What joins devices.

    bandwidth: bytes/s of one device in one direction. latency_s: seconds of one step; sum_latency_s: of one step of an
    all-reduce, for which libraries have shorter ways (0: as long). switch_sums: share of the bandwidth at which the
    switch adds up what all send it (0: it does not).
    rings: how many devices of each node send between nodes at once, which ring collectives profit from.
    efficiency: share of the bandwidth that is payload. direct: bytes/s between two neighbours where devices are wired
    to each other instead of to a switch (0: a switch, every pair has the whole bandwidth).
    scatter_rounds: times that a reduce-scatter goes around the ring (:meth:`of_gloo`).
    """

    name: str
    bandwidth: float
    latency_s: float
    rings: float = 1.0
    efficiency: float = 0.8
    direct: float = 0.0
    scatter_rounds: float = 1.0
    sum_latency_s: float = 0.0
    switch_sums: float = 0.0

    def __post_init__(self) -> None:
        if self.bandwidth <= 0 or self.latency_s < 0 or self.rings < 1:
            raise ClusterError(f"link {self.name}: bandwidth is above zero, latency not below, rings at least 1")
        if not 0 < self.efficiency <= 1 or self.direct < 0:
            raise ClusterError(f"link {self.name}: efficiency is above 0 and at most 1, direct is not negative")
        if self.sum_latency_s < 0 or not 0 <= self.switch_sums <= 1:
            raise ClusterError(f"link {self.name}: sum_latency_s is not below zero, switch_sums from 0 to 1")
        if not 1 <= self.scatter_rounds <= 2:
            raise ClusterError(f"link {self.name}: scatter_rounds is from 1 to 2, not {self.scatter_rounds!r}")

    def among(self, devices: int) -> Link:
        """The link as a group of that many neighbours has it: without a switch each adds the wires to one more."""
        if not self.direct or devices < 2:
            return self
        return replace(self, bandwidth=min(self.bandwidth, self.direct * (devices - 1)), direct=0.0)

    def of_gloo(self) -> Link:
        """The link as gloo uses it: its reduce-scatter sums whole tensors and keeps a share (ProcessGroupGloo.cpp)."""
        return replace(self, scatter_rounds=2.0)

    @property
    def sum_step_s(self) -> float:
        """Seconds of one step of an all-reduce."""
        return self.sum_latency_s or self.latency_s

    @property
    def ring_bandwidth(self) -> float:
        """Bytes/s that a ring collective moves through the group's narrowest cut."""
        return self.bandwidth * self.rings

    @property
    def payload_rate(self) -> float:
        """Bytes/s of payload among these, by which links of unlike kinds compare."""
        return self.ring_bandwidth * self.efficiency


@dataclass(frozen=True, slots=True)
class Defaults:
    """The links that a device usually has, and network ports per device."""

    inside: Link
    between: Link
    ports_per_device: float


_PLAIN_GPU = "RTX-4090"
"""Joined by the host's PCIe."""
LINK_OPTIONS = ("efficiency", "direct", "scatter_rounds", "sum_latency_s", "switch_sums")
_OPTIONAL = ("contraction", "memory", "attention", "alone", "host_s", "unaligned", "function_s", "random_s", "mapped_s")


def device_from_table(name: str, table: Mapping[str, Any]) -> Device:
    """A device from a TOML table with the keys of ``devices.toml``. Raises KeyError, TypeError or ValueError."""
    return Device(
        name,
        str(table["kind"]),
        round(number(table["memory_gib"]) * GIB),
        _by_dtype(table["peak_flops"]),
        number(table["memory_bandwidth"]),
        number(table["launch_s"]),
        **{key: number(table[key]) for key in _OPTIONAL if key in table},
        processors=round(number(table.get("processors", 0))),
        measured=round(number(table.get("measured", 0))),
        contraction_by=_by_dtype(table.get("contraction_by", {})),
        attention_by=_by_dtype(table.get("attention_by", {})),
        attention_back_by=_by_dtype(table.get("attention_back_by", {})),
    )


def _by_dtype(table: Mapping[str, Any]) -> dict[str, float]:
    return {str(dtype): number(value) for dtype, value in table.items()}


def link_from_table(name: str, table: Mapping[str, Any]) -> Link:
    """A link from a TOML table with the keys of ``devices.toml``. Raises KeyError, TypeError or ValueError."""
    more = {key: number(table[key]) for key in LINK_OPTIONS if key in table}
    return Link(name, number(table["bandwidth"]), number(table["latency_s"]), **more)


def number(value: object) -> float:
    """The value, where it is a finite number. Raises TypeError or ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"expected a number, found {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"expected a finite number, found {value!r}")
    return float(value)


@cache
def _tables() -> dict[str, Any]:
    return tomllib.loads(resources.files("autopart.cost").joinpath("devices.toml").read_text())


@cache
def devices() -> dict[str, Device]:
    """All preset devices by name."""
    return {name: device_from_table(name, table) for name, table in _tables()["devices"].items()}


@cache
def links() -> dict[str, Link]:
    """All preset links by name."""
    return {name: link_from_table(name, table) for name, table in _tables()["links"].items()}


def device(name: str) -> Device:
    """The preset of that name (case does not matter). Raises ClusterError with near names and all presets."""
    return devices()[_lookup(name, devices(), "device")]


def link(name: str) -> Link:
    """The preset link of that name (case does not matter). Raises ClusterError with near names and all presets."""
    return links()[_lookup(name, links(), "link")]


def defaults(name: str, kind: str) -> Defaults:
    """The usual links of a preset device; of one that is no preset, a GPU's without links of its own, or a CPU's."""
    tables = _tables()["devices"]
    table = tables.get(name) or tables["CPU" if kind == "cpu" else _PLAIN_GPU]
    return Defaults(links()[table["inside"]], links()[table["between"]], float(table["ports_per_device"]))


def from_cuda_name(name: str) -> Device:
    """The preset for the name that the CUDA driver reports ("NVIDIA A100-SXM4-80GB"). Raises ClusterError."""
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    fitting = [preset for preset in devices() if set(preset.lower().split("-")) <= words]
    if not fitting:
        raise ClusterError(
            f"no preset fits the GPU {name!r} (presets: {', '.join(devices())}); run 'autopart calibrate' here, "
            "or describe the GPU in a cluster.toml and use Cluster.load"
        )
    return devices()[max(fitting, key=len)]


def _lookup(name: str, known: Iterable[str], what: str) -> str:
    names = {preset.lower(): preset for preset in known}
    if name.lower() in names:
        return names[name.lower()]
    # what was begun goes before what looks alike: of "A100" both sizes, and not an H100
    begun = [key for key in names if name and key.startswith(name.lower())]
    near = begun or difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(names[key] for key in near)}? " if near else ""
    raise ClusterError(
        f"unknown {what} {name!r}; {hint}known: {', '.join(names.values())}; describe others in a cluster.toml"
    )
