"""Bytes and seconds of what crosses between two stages, by the messages that the runtime sends.

Between stages with equal meshes every rank sends its share to the rank with the same coordinates; between unlike ones
the overlapping pieces are sent (:mod:`autopart.runtime.resharding`). A rank's messages follow each other on its own
link, ranks work beside each other: so a crossing takes as long as the rank that sends or receives the most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from autopart.cost.communication import send_seconds
from autopart.cost.devices import Link
from autopart.passes.amounts import value_bytes
from autopart.passes.graph import Value
from autopart.passes.sizes import extent
from autopart.passes.unlike_meshes import plain
from autopart.runtime.manifest import Size
from autopart.runtime.placement import REPLICATE, Kind, Placement, Placements
from autopart.runtime.resharding import Side, elements_sent

Traffic = dict[tuple[int, int], float]
"""(sending, receiving device) -> bytes of one microbatch."""


@dataclass(frozen=True, slots=True)
class End:
    """A stage as its neighbours see it. rows: samples of a microbatch on each replica; devices row-major."""

    devices: tuple[int, ...]
    rows: tuple[int, ...]
    sizes: tuple[int, ...]

    def side(self, placements: Placements) -> Side:
        return Side(self.devices, self.rows, self.sizes, placements)


@dataclass(slots=True)
class PiecePrices:
    """What values send between stages; that of equal values is found once, and is the same object."""

    _elements: dict[tuple[object, ...], tuple[Mapping[tuple[int, int], int], ...]] = field(default_factory=dict)
    _found: dict[tuple[object, ...], tuple[Traffic, Traffic]] = field(default_factory=dict)

    def traffic(
        self, value: Value, source: End, target: End, made: Placements, wanted: Placements
    ) -> tuple[Traffic, Traffic]:
        """Forward and, of its gradient, backward. made, wanted: how the two stages have the value."""
        differentiable = bool(value.node.meta.get("differentiable")) and value.fake.is_floating_point()
        if (source.rows, source.sizes) == (target.rows, target.sizes):
            return self._straight(value, source, target, made, differentiable)
        shape, batch_dim, width = _shape_of(value), batch_dim_of(value), value.fake.element_size()
        key = (shape, batch_dim, differentiable, source, target, plain(made), plain(wanted))
        if (*key, width) not in self._found:
            if key not in self._elements:
                sides = source.side(plain(made)), target.side(plain(wanted))
                self._elements[key] = (
                    elements_sent(shape, batch_dim, *sides),
                    elements_sent(shape, batch_dim, *sides, back=True) if differentiable else {},
                )
            there, back = (
                {pair: float(count * width) for pair, count in found.items()} for found in self._elements[key]
            )
            self._found[*key, width] = there, back
        return self._found[*key, width]

    def _straight(
        self, value: Value, source: End, target: End, made: Placements, differentiable: bool
    ) -> tuple[Traffic, Traffic]:
        share = math.prod(1 / size for size, own in zip(source.sizes, made, strict=True) if own.is_shard)
        amount, width = value_bytes(value), math.prod(source.sizes)
        there: Traffic = {}
        for index, pair in enumerate(zip(source.devices, target.devices, strict=True)):
            there[pair] = amount.at(source.rows[index // width]) * share
        return there, {(b, a): size for (a, b), size in there.items()} if differentiable else {}


def add_traffic(total: Traffic, more: Traffic) -> None:
    for pair, size in more.items():
        total[pair] = total.get(pair, 0.0) + size


def crossing_seconds(traffic: Traffic, link: Callable[[int, int], Link]) -> float:
    """link: what joins two devices."""
    busy: dict[tuple[str, int], float] = {}
    for (source, target), size in traffic.items():
        if source == target:
            continue
        seconds = send_seconds(size, link(source, target))
        for rank in (("sends", source), ("receives", target)):
            busy[rank] = busy.get(rank, 0.0) + seconds
    return max(busy.values(), default=0.0)


def batch_dim_of(value: Value) -> int | None:
    """The dim with a value's samples; None where it does not depend on them, or is a sum over them."""
    state = batch_state(value)
    return state.dim if state.is_shard else None


def batch_state(value: Value) -> Placement:
    """How a value lies over shares of the batch."""
    state = value.node.meta.get("batch", REPLICATE)
    found = state[value.index] if isinstance(state, tuple) else state
    assert isinstance(found, Placement)
    return found


def crosses_unlike(value: Value) -> bool:
    """Whether a value may cross between stages with unlike replicas: no sum over samples, rows in one block."""
    state = batch_state(value)
    sized = all(extent(size) is not None for size in value.fake.shape)
    return sized and not (state.kind is Kind.PARTIAL or (state.is_shard and (state.outer != 1 or state.batched)))


def _shape_of(value: Value) -> tuple[Size, ...]:
    found = [extent(size) for size in value.fake.shape]
    return tuple(str(size) if size.batched else size.coefficient for size in found if size is not None)
