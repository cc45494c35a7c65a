"""What a layer's ops keep under each of their strategies, where sets of its modules run again.

A tensor that several ops keep counts where the first of them does that does not run again; one that enters a module
that runs again, as it is read there. But an op that keeps what it makes, and another that reads it as a larger part,
hold it twice: with bytes k of the first's way i and l of the other's way j, together at least

    h_ij = k_i + l_j  where j's part is larger,  max(k_i, l_j)  otherwise

of which the other counts g_j = l_j where some way makes a smaller part, else 0, and the first min over j of h_ij - g_j.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import fx

from autopart.module_sets import ModuleSet
from autopart.passes import graph as graphs
from autopart.passes.graph import Value
from autopart.prices import Chosen, value_shares
from autopart.tensor_choice import Builder

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Keeping:
    """An op's part in a tensor that it keeps: alone, or with another op, of which the first makes it."""

    owner: Value
    other: fx.Node | None = None
    first: bool = True


@dataclass(frozen=True, slots=True)
class Held:
    """What a layer's ops keep where sets of modules run again.

    places: by op, the sets for which it is the same: what it keeps, whose memory is kept as it reads it, and whether
    what it keeps inside stays. constant: by set, bytes kept whatever the strategies. The last set, after those given,
    frees what any of them does and runs nothing again.
    """

    builder: Builder
    places: Mapping[fx.Node, Mapping[tuple[frozenset[Keeping], frozenset[Value], bool], Sequence[int]]]
    constant: Array

    @staticmethod
    def of(
        builder: Builder,
        keeps: Mapping[Value, Sequence[fx.Node]],
        sets: Sequence[ModuleSet],
        place: Mapping[fx.Node, int],
    ) -> Held:
        """keeps: of the memory that is counted, by who owns it, the ops that keep it, in order. place: of ops."""
        costs, setting = builder.block_costs, builder.setting
        ops, count = list(place), len(sets)
        share = 1 / math.prod(setting.sizes)
        constant = np.zeros(count + 1)
        kept: list[dict[fx.Node, set[Keeping]]] = [defaultdict(set) for _ in range(count + 1)]
        read: list[dict[fx.Node, set[Value]]] = [defaultdict(set) for _ in range(count + 1)]
        always = frozenset[int]().union(*(item.covered for item in sets))
        for number, item in enumerate((*sets, None)):
            for owner, keepers in keeps.items():
                covered = always if item is None else item.covered
                outside = [node for node in keepers if place[node] not in covered]
                if len(outside) > 1 and outside[0] is owner.node:
                    kept[number][outside[0]].add(Keeping(owner, outside[1]))
                    kept[number][outside[1]].add(Keeping(owner, outside[0], first=False))
                elif outside:
                    kept[number][outside[0]].add(Keeping(owner))
                elif item is not None and owner in item.entering:
                    read[number][ops[item.entering[owner]]].add(owner)
                elif owner.node not in place:  # of another layer, which keeps what it makes by itself
                    constant[number] += costs.stored(owner).at(setting.prices.batch) * share
        places: dict[fx.Node, dict[tuple[frozenset[Keeping], frozenset[Value], bool], list[int]]] = {}
        for node in ops:
            found = places[node] = {}
            for number, item in enumerate((*sets, None)):
                stays = place[node] not in (always if item is None else item.covered)
                key = frozenset(kept[number].get(node, ())), frozenset(read[number].get(node, ())), stays
                found.setdefault(key, []).append(number)
        return Held(builder, places, constant)

    def bytes(self, node: fx.Node, ways: Sequence[Chosen]) -> Array:
        """[choice, set]"""
        places = self.places[node]
        found = np.zeros((len(ways), len(self.constant)))
        for (kept, read, inside), sets in places.items():
            alone = {item.owner for item in kept if item.other is None}
            own = np.array([self._kept(node, chosen, alone, read, inside) for chosen in ways])
            for item in kept:
                own += self._twice(node, ways, item)
            found[:, sets] = own[:, None]
        return found

    def _twice(self, node: fx.Node, ways: Sequence[Chosen], item: Keeping) -> Array:
        """By choice, an op's count of a tensor that another op keeps too."""
        if item.other is None:
            return np.zeros(len(ways))
        others = [chosen for chosen, _ in self.builder.ways(item.other)]
        if item.first:
            made, read = self._parts(node, ways, item.owner, max), self._parts(item.other, others, item.owner, min)
        else:
            made, read = self._parts(item.other, others, item.owner, max), self._parts(node, ways, item.owner, min)
        copies = np.where(read[1] > made[1].min(), read[0], 0.0)
        if not item.first:
            return copies
        larger = read[1] > made[1][:, None]
        both = np.where(larger, made[0][:, None] + read[0], np.maximum(made[0][:, None], read[0]))
        return (both - copies).min(axis=1)

    def _parts(self, node: fx.Node, ways: Sequence[Chosen], owner: Value, of_several: Callable[..., float]) -> Array:
        """[0 and 1, choice]: bytes that an op keeps of a tensor, and which part of it that is."""
        costs, setting = self.builder.block_costs, self.builder.setting
        sizes, batch = setting.sizes, setting.prices.batch
        kept = (costs.least_kept(node, chosen, sizes, batch, {owner}, False) for chosen in ways)
        shares = (of_several(costs.kept_shares(node, chosen, sizes, owner) or [1.0]) for chosen in ways)
        return np.array([list(kept), list(shares)])

    def _kept(
        self, node: fx.Node, chosen: Chosen, kept: Collection[Value], read: Collection[Value], inside: bool
    ) -> float:
        costs, setting = self.builder.block_costs, self.builder.setting
        batch = setting.prices.batch
        total = costs.least_kept(node, chosen, setting.sizes, batch, kept, inside)
        if read:
            shares, seen = value_shares(node, chosen, setting.sizes), set[Value]()
            positions = {value: at for at, value in enumerate(graphs.inputs(node))}
            for value, owner in costs.reads(node):
                if owner in read and owner not in seen:
                    seen.add(owner)
                    size = min(costs.size(value).at(batch), costs.stored(owner).at(batch))
                    total += size * shares[positions[value]]
        return total
