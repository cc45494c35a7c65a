"""Which tensor in a rank's memory a value is under given strategies, as in the graph that is emitted.

A value that an op reads in other placements than it is made in is a tensor of its own, which collectives make (each
value and target once); a view of one shares its memory. So tensors are followed back through the views of the whole
graph, as far as every view reads its operand as that was made::

    x (S)  ->  view (S)         both are x's memory
    x (S)  ->  view (R)         the view is of x gathered, a second tensor beside x
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from autopart.passes import graph as graphs
from autopart.passes.amounts import Amount, stored_bytes
from autopart.passes.graph import Value
from autopart.passes.program import Role
from autopart.passes.storage import viewed
from autopart.prices import Chosen, share_of
from autopart.runtime.placement import BROADCAST, REPLICATE, Placement, Placements

Kept = tuple[Value, Placements]
"""A tensor in memory: the value that it is, and the placements in which a rank has it."""

_AS_IS = {REPLICATE, BROADCAST}
"""Transitions between these hand over their argument's own memory."""


@dataclass(slots=True)
class Views:
    """Facts of a graph that no strategy changes: of values what they are views of, and bytes; found when asked for."""

    _viewed: dict[Value, tuple[Value, int] | None] = field(default_factory=dict)
    _bytes: dict[Value, Amount] = field(default_factory=dict)

    def source(self, value: Value) -> tuple[Value, int] | None:
        """What a value is a view of, and which input of its op that is; None for one with memory of its own."""
        if value not in self._viewed:
            source = viewed(value)
            at = None if source is None else graphs.inputs(value.node).index(source)
            self._viewed[value] = None if source is None or at is None else (source, at)
        return self._viewed[value]

    def stored(self, value: Value) -> Amount:
        """Bytes of a value's memory."""
        if value not in self._bytes:
            self._bytes[value] = stored_bytes(value.fake)
        return self._bytes[value]


@dataclass(slots=True)
class RankMemory:
    """strategies: per op one for each axis; absent: replicated. storage: of parameters and buffers, by name.

    sizes: of the axes. batch: samples of a microbatch.
    """

    views: Views
    strategies: Mapping[fx.Node, Chosen]
    storage: Mapping[str, Placements]
    sizes: Sequence[int]
    batch: int
    _lies: dict[Value, Placements] = field(default_factory=dict)
    _owners: dict[Kept, Kept] = field(default_factory=dict)
    _held: dict[Kept, float] = field(default_factory=dict)

    @property
    def replicated(self) -> Placements:
        return (REPLICATE,) * len(self.sizes)

    def lies(self, value: Value) -> Placements:
        """How a value is made, or stored."""
        found = self._lies.get(value)
        if found is None:
            found = self._lies[value] = self._made(value)
        return found

    def used(self, node: fx.Node, position: int) -> Placements:
        """How an op has its input of that position."""
        chosen = self.strategies.get(node)
        return tuple(strategy.inputs[position] for strategy in chosen) if chosen else self.replicated

    def owner(self, value: Value, placements: Placements) -> Kept:
        """The tensor in memory by which a rank has a value in some placements."""
        key = value, placements
        found = self._owners.get(key)
        if found is None:
            found = self._owners[key] = self._owner(value, placements)
        return found

    def bytes(self, tensor: Kept) -> float:
        found = self._held.get(tensor)
        if found is None:
            value, placements = tensor
            found = self._held[tensor] = self.views.stored(value).at(self.batch) * share_of(placements, self.sizes)
        return found

    def is_stored(self, tensor: Kept) -> bool:
        """Whether a tensor is a parameter, a buffer or an input as it lies, which is in memory anyway."""
        value, placements = tensor
        return value.node.op == "placeholder" and self.lies(value) == placements

    def _made(self, value: Value) -> Placements:
        if value.node.op == "placeholder":
            if value.node.meta["role"] in (Role.PARAMETER, Role.BUFFER):
                return self.storage.get(value.node.meta["name"], self.replicated)
            return self.replicated
        chosen = self.strategies.get(value.node)
        return tuple(strategy.outputs[value.index] for strategy in chosen) if chosen else self.replicated

    def _owner(self, value: Value, placements: Placements) -> Kept:
        while True:
            made = self.lies(value)
            if made is not placements and not all(map(_same_memory, made, placements)):
                return value, placements
            source = self.views.source(value)
            if source is None:
                return value, made
            node = value.node
            value, position = source
            placements = self.used(node, position)


def _same_memory(made: Placement, wanted: Placement) -> bool:
    return made == wanted or (made in _AS_IS and wanted in _AS_IS)
