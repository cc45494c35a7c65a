"""Where strategies are chosen: the prices on the tensor axes of a configuration, and what its step repeats."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from torch import fx

from autopart.conversion_prices import ConversionPrices, TensorAxis
from autopart.cost.communication import bucketed_all_reduce_seconds
from autopart.cost.devices import Link
from autopart.data_prices import DataPrices
from autopart.offers import Offers
from autopart.passes.conversion import Axes
from autopart.prices import Prices, share_of
from autopart.runtime.placement import BROADCAST, Placements
from autopart.solver.tensor_problem import CostTable, Op

_Ids = tuple[int, ...]


@dataclass(slots=True)
class Shared:
    """What problems of equal prices, axes and offers have in common, whatever replicas and microbatches are.

    ids: numbers of placements. ops: by class, all but parameters and buffers. tables: of conversions, by all that they
    depend on: bytes, whether there is a gradient, products whose weights' gradients hide it, and numbers of placements;
    forward: the same without the gradient's.
    """

    ids: dict[Placements, int] = field(default_factory=dict)
    ops: dict[fx.Node, Op] = field(default_factory=dict)
    tables: dict[tuple[float, bool, tuple[fx.Node, ...], _Ids, _Ids], CostTable] = field(default_factory=dict)
    forward: dict[tuple[float, _Ids, _Ids], CostTable] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Setting:
    """Where strategies are chosen: the prices of ops and conversions on the tensor axes, and what a step repeats.

    dp: replicas, on ``data_link``. microbatches: of each replica, in one step. summed: bytes in the type that gradients
    are added up in, for each byte of a gradient. beside: whether weights' gradients are computed beside collectives of
    the backward, which a split backward leaves for later. exposed: the part of what replicas exchange in a microbatch
    for divided parameters that does not pass beside ops, as far as strategies are chosen by it; exposed_beyond: the
    part of what they exchange besides where tensor axes do not divide a parameter. tied: by name, seconds of a step in
    which stages sum a parameter's gradient if ranks have it whole, where that counts; sent: by class and output of ops,
    those of a microbatch in which stages send and receive what they make, if ranks have it whole. ends: how many times
    what a step ends with counts.
    """

    prices: Prices
    conversions: ConversionPrices
    offers: Offers
    dp: int
    data_link: Link
    microbatches: int
    shared: Shared = field(default_factory=Shared)
    summed: float = 1.0
    beside: bool = True
    exposed: float = 1.0
    exposed_beyond: float = 1.0
    tied: Mapping[str, float] = field(default_factory=dict)
    sent: Mapping[Hashable, float] = field(default_factory=dict)
    ends: float = 1.0

    @property
    def axes(self) -> tuple[TensorAxis, ...]:
        return self.conversions.axes

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(axis.parts for axis in self.axes)

    @property
    def named_sizes(self) -> Axes:
        return tuple((axis.name, axis.parts) for axis in self.axes)

    @property
    def data(self) -> DataPrices:
        return DataPrices(self.prices, self.data_link, self.dp, self.summed, self.microbatches)

    def step_end_seconds(self, whole_bytes: float, placements: Placements, level: int = 0) -> float:
        """Seconds of a trained parameter's step end: sums of its gradient over replicas and axes, the optimizer.

        Without what arrives when the next step begins.
        """
        held = whole_bytes * share_of(placements, self.sizes)
        seconds = self.data.step_end_seconds(held, level)
        for placement, axis in zip(placements, self.axes, strict=True):
            if placement == BROADCAST:
                sent = (held / self.dp if level else held) * self.summed
                seconds += bucketed_all_reduce_seconds(sent, axis.parts, axis.link)
        return seconds
