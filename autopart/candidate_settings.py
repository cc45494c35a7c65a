"""Where configurations (pp, dp, tp, microbatches, schedule, recomputation) of one program on one cluster are priced."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Self

from torch import fx

from autopart.analysis import Analysis
from autopart.block_costs import BlockCosts
from autopart.bucket_size import bucket_bytes
from autopart.cluster import Cluster
from autopart.conversion_prices import ConversionPrices, TensorAxis
from autopart.cost.devices import Device
from autopart.data_prices import DataPrices, exposed
from autopart.device_layout import DeviceLayout
from autopart.folding import FoldedGraph, fold_graph
from autopart.offers import Offers
from autopart.passes import graph as graphs
from autopart.passes.amounts import value_bytes
from autopart.passes.graph import Value
from autopart.passes.program import Role
from autopart.pins import Pins
from autopart.positions import Positions
from autopart.prices import Prices
from autopart.runtime.links import dtype_of
from autopart.runtime.schedule import SPLIT_SCHEDULES, deeper_warmup
from autopart.shared_hosts import SharedHosts
from autopart.solver.degrees import Degrees
from autopart.tensor_scheme import TensorScheme
from autopart.tensor_setting import Setting, Shared

# What a CUDA process needs besides its tensors: context, libraries' workspaces, communication buffers.
CUDA_OVERHEAD_BYTES = 2 * 2**30


def overhead_bytes(kind: str) -> int:
    """What a process on a device takes besides its tensors. kind: "cuda" or "cpu"."""
    return CUDA_OVERHEAD_BYTES if kind == "cuda" else 0


def same_but_for_memory(one: Device, other: Device) -> bool:
    """Whether devices differ in their memory's size alone."""
    return replace(one, memory_bytes=other.memory_bytes) == other


def _slowest_device(cluster: Cluster, dtype: str) -> Device:
    """Stages are alike, so the slowest device sets the pace of all.

    Which that is may differ from op to op (an A100 has more bandwidth than a consumer device, and fewer float32
    FLOP/s), so that it has the least of each rate that any has. dtype: that products compute in.
    """
    kinds = list(dict.fromkeys(node.device for node in cluster.nodes))
    if len(kinds) == 1:
        return kinds[0]
    slowest = min(kinds, key=lambda device: (device.product_rate(dtype), device.memory_bandwidth))
    names = dict.fromkeys(name for device in kinds for name in device.peak_flops)
    peaks = {name: min(device.peak(name) for device in kinds) for name in names}
    return replace(
        slowest,
        name=" or ".join(dict.fromkeys(device.name for device in kinds)),
        peak_flops=peaks,
        memory_bandwidth=min(device.memory_bandwidth for device in kinds),
        memory=min(device.memory for device in kinds),
        launch_s=max(device.launch_s for device in kinds),
        host_s=max(device.host_s for device in kinds),
        unaligned=min(device.unaligned for device in kinds),
        function_s=max(device.function_s for device in kinds),
        random_s=max(device.random_s for device in kinds),
        mapped_s=max(device.mapped_s for device in kinds),
        contraction_by={
            name: min(device.product_rate(name) for device in kinds) / peak for name, peak in peaks.items()
        },
        attention_by={
            name: min(device.attention_rate(name) for device in kinds) / peak for name, peak in peaks.items()
        },
        attention_back_by={
            name: min(device.attention_rate(name, back=True) for device in kinds) / peak for name, peak in peaks.items()
        },
    )


@dataclass(slots=True)
class CandidateSettings:
    """One program on one cluster for a global batch: devices, prices of ops, and what strategies are chosen by."""

    analysis: Analysis
    cluster: Cluster
    batch: int
    optimizer: str
    time_limit_s: float = 60.0
    warmup: int | tuple[int, ...] | None = None  # of 1F1B: for all stages, or the depth of deeper_warmup
    pins: Pins | None = None
    zero: int | None = 0  # the level of all parameters; None: 0 where that fits, else chosen for each
    scheme: TensorScheme = TensorScheme.AUTO
    whole: frozenset[str] = frozenset()  # parameters that neither tensor axes nor replicas divide
    partial: bool = False  # one stage of several, whatever the configurations say
    bucket: int | None = None  # bytes that fill a message of gradients; None: by what these take to sum
    device: Device = field(init=False)
    layout: DeviceLayout = field(init=False)
    shared: SharedHosts | None = field(init=False)
    positions: Positions = field(init=False)
    readers: dict[fx.Node, tuple[int, ...]] = field(init=False)  # blocks that read a parameter or buffer
    units: int = field(init=False)  # statements that gather parameters, at most: a layer has one
    trained_bytes: int = field(init=False)  # of all parameters that have gradients
    least_samples: int = field(init=False)  # in a microbatch on one replica
    _prices: dict[int, Prices] = field(default_factory=dict)
    _conversions: dict[tuple[TensorAxis, ...], ConversionPrices] = field(default_factory=dict)
    _offers: dict[tuple[int, ...], Offers] = field(default_factory=dict)
    _shared: dict[tuple[int, tuple[TensorAxis, ...], bool], Shared] = field(default_factory=dict)
    _block_costs: BlockCosts = field(init=False)
    _folded: FoldedGraph = field(init=False)

    def __post_init__(self) -> None:
        self.layout, self.shared = DeviceLayout(self.cluster), SharedHosts.of(self.cluster)
        self.device = _slowest_device(self.cluster, self.analysis.products_in)
        self.positions = Positions.of(self.analysis, self.pins.together if self.pins else ())
        self.least_samples = graphs.least_samples(self.analysis.program.graph)
        self._block_costs = BlockCosts(self.analysis, self.device.kind)
        self._folded = fold_graph(self.analysis)
        self.units = len({layer or index for index, layer in enumerate(self.analysis.layers)})
        readers: dict[fx.Node, set[int]] = {}
        for node, index in self.analysis.block_of.items():
            for value in graphs.inputs(node):
                if value.node.op == "placeholder" and value.node.meta["role"] in (Role.PARAMETER, Role.BUFFER):
                    readers.setdefault(value.node, set()).add(index)
        self.readers = {node: tuple(sorted(found)) for node, found in readers.items()}
        self.trained_bytes = sum(value_bytes(Value(node)).at(1) for node in readers if node.meta.get("trainable"))

    def on(self, cluster: Cluster, device: Device, batch: int, whole: frozenset[str] = frozenset()) -> Self:
        """One stage of the same program on other devices, priced on ``device``; facts about the program are shared.

        Parameters are whole on every replica (``zero`` is 0), those of ``whole`` on every rank. No pins, no warm-up.
        """
        found = self._with(cluster, device, whole)
        found.batch, found.zero, found.warmup, found.pins = batch, 0, None, None
        found.partial = True
        return found

    def has_one_stage(self, config: Degrees) -> bool:
        """Whether a rank has all blocks."""
        return config.stages == 1 and not self.partial

    def elsewhere(self, cluster: Cluster) -> Self:
        """The same candidates on another cluster."""
        found = self._with(cluster, _slowest_device(cluster, self.analysis.products_in), self.whole)
        found.shared = SharedHosts.of(cluster)
        return found

    def with_messages(self, size: int) -> Self:
        """The same candidates with messages of gradients of so many bytes, for problems and seconds, not for bounds."""
        found = copy.copy(self)
        found.bucket = size
        return found

    def warmed(self, depth: int) -> Self:
        """The same candidates with a warm-up of 1F1B in which each stage runs so many forwards ahead of the next."""
        found = self._with(self.cluster, self.device, self.whole)
        found.warmup = depth
        return found

    def _with(self, cluster: Cluster, device: Device, whole: frozenset[str]) -> Self:
        """A copy that shares what does not depend on where it differs; a device's memory is in no price."""
        found = copy.copy(self)
        found.cluster, found.device, found.whole = cluster, device, whole
        found.layout = DeviceLayout(cluster)
        other = not same_but_for_memory(device, self.device)
        if other or whole != self.whole:  # else by axes with their links
            found._conversions, found._shared = {}, {}
        if other:
            found._prices = {}
        if device.kind != self.device.kind:
            found._block_costs = BlockCosts(self.analysis, device.kind)
        if whole != self.whole:
            found._offers = {}
        return found

    def prices(self, config: Degrees) -> Prices:
        samples = self.samples(config)
        if samples not in self._prices:
            costs = self.analysis.costs(self.device.kind)
            self._prices[samples] = Prices(self.device, costs, samples, self.analysis.first, self.optimizer)
        return self._prices[samples]

    def samples(self, config: Degrees) -> int:
        """Samples in one microbatch on one replica."""
        return self.batch // (config.dp * config.microbatches)

    def warmup_of(self, config: Degrees) -> tuple[int, ...]:
        """Forwards of each stage before its first pair; empty: the least."""
        if self.warmup is None or config.schedule != "1f1b":
            return ()
        found = deeper_warmup(config.pp, self.warmup) if isinstance(self.warmup, int) else self.warmup
        return () if found == deeper_warmup(config.pp, 1) else found

    @property
    def summed(self) -> float:
        """Bytes in the type that ranks add gradients up in, for each byte of a gradient."""
        dtype = self.analysis.program.reduce_dtype
        return dtype_of(dtype).itemsize / self.analysis.dtype.itemsize if dtype else 1.0

    def setting(self, config: Degrees) -> Setting:
        axes = self.layout.tensor_axes(config)
        conversions = self._conversions.setdefault(axes, ConversionPrices(axes, self.device))
        offers = self._offers.setdefault(config.axes, Offers(self.analysis, config.axes, self.scheme, self.whole))
        beside = config.schedule not in SPLIT_SCHEDULES
        shared = self._shared.setdefault((self.samples(config), axes, beside), Shared())
        data = self.layout.data_link(config)
        prices, dp, microbatches = self.prices(config), config.dp, config.microbatches
        return Setting(prices, conversions, offers, dp, data, microbatches, shared, self.summed, beside)

    def data(self, config: Degrees) -> DataPrices:
        """That of :meth:`setting`, which bounds of many configurations ask for alone."""
        link = self.layout.data_link(config)
        return DataPrices(self.prices(config), link, config.dp, self.summed, config.microbatches)

    def bucket_bytes(self, config: Degrees) -> int:
        """What fills a message of gradients."""
        if self.bucket is not None:
            return self.bucket
        gradients = self.trained_bytes / (config.tp * config.pp)
        return bucket_bytes(gradients, self.summed, config.dp, self.layout.data_link(config))

    def exposed(self, config: Degrees, exchanged: float, computed: float, late: float = 0.0) -> float:
        """As :func:`autopart.data_prices.exposed`, where a stage has its part of the statements that gather."""
        return exposed(exchanged, computed, max(1.0, self.units / config.stages), late)

    def _rooms(self, config: Degrees) -> list[float]:
        """Bytes of each stage for what it holds."""
        overhead = self.overhead_bytes / config.virtual
        return [capacity - overhead for capacity in self.layout.capacities(config)]

    @property
    def overhead_bytes(self) -> float:
        """What a process on the device takes besides its tensors."""
        return float(overhead_bytes(self.device.kind))
