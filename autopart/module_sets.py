"""The sets of modules of a layer that may run again in the backward, for bounds: what runs again, and what is freed.

As in :mod:`autopart.layer_frontier`: of disjoint modules each runs again up to the last of its ops that keeps
something, keeps what enters it, and nothing of what its ops keep. The last set is the layer as a whole, or, of a part
of it, with the others of its layer.

What a module's ops keep is there while it runs back. Of that, and of what enters modules and is kept for nothing else,
tensors that the layer alone makes and reads are told: others may count elsewhere.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import fx

from autopart.memory_bound import MemoryBound
from autopart.passes.amounts import Amount
from autopart.passes.emit.layers import Run
from autopart.passes.emit.segments import spans_of
from autopart.passes.graph import Value

MOST_SETS = 4096
"""Sets of modules of a layer beyond which only those of whole layers are known."""

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ModuleSet:
    """Ops by number in the layer. modules: those of each. run: those that run again. entering: memory by who owns it,
    with the op that reads it first; of the layer as a whole what enters is not told.
    """

    modules: tuple[frozenset[int], ...] = ()
    run: frozenset[int] = frozenset()
    entering: Mapping[Value, int] = field(default_factory=dict)
    covered: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "covered", frozenset[int]().union(*self.modules))


@dataclass(frozen=True, slots=True)
class ModuleSets:
    """Of one layer. ops: an equal one for each, in order. kept: who owns what the layer alone makes and keeps, and the
    ops of what is kept besides; sizes: of these. again: [set, op] whether it runs again. freed: [set, tensor] whether
    it is not kept then.

    entering: of what is kept only where it enters a module, sizes as it is read and as it lies in memory. entered:
    [set, tensor] whether it does. members: by set, numbers of its modules. held: [module, tensor of kept] whether its
    ops keep it.
    """

    ops: tuple[fx.Node, ...]
    kept: tuple[Value | fx.Node, ...]
    sizes: tuple[Amount, ...]
    sets: tuple[ModuleSet, ...]
    again: Array
    freed: Array
    entering: tuple[tuple[Amount, ...], ...]
    entered: Array
    members: tuple[tuple[int, ...], ...]
    held: Array

    @staticmethod
    def of(memory: MemoryBound, numbers: Sequence[int]) -> ModuleSets | None:
        """Of the layer, or a part of one, with these blocks; None where they are too many."""
        analysis, costs = memory.analysis, memory.block_costs
        nodes = [node for number in numbers for node in analysis.blocks[number].nodes if node in analysis.block_of]
        place = {node: index for index, node in enumerate(nodes)}
        made = {owner: size for number in numbers for owner, size in memory.made_in[number].items()}
        keepers: dict[Value, set[int]] = defaultdict(set)
        for node in nodes:
            for owner, _ in costs.kept_by(node):
                if owner in made:
                    keepers[owner].add(place[node])
        inside = [node for node in nodes if costs.inside(node)]
        modules: list[ModuleSet] = []
        for span in spans_of(Run(analysis.layers[numbers[0]], nodes)).values():
            own = [node for node in span if node in place]
            if not (repeated := costs.again(own)):
                continue
            among, entering = set(span), dict[Value, int]()
            for node in own:
                for value, owner in costs.reads(node):
                    if value.node not in among:
                        entering.setdefault(owner, place[node])
            ran, covered = frozenset(place[node] for node in repeated), frozenset(place[node] for node in own)
            # what keeps only what enters it frees nothing, in no set
            if any(owner not in entering and not covered.isdisjoint(keeps) for owner, keeps in keepers.items()) or any(
                place[node] in covered for node in inside
            ):
                modules.append(ModuleSet((covered,), ran, entering))
        sets = list[ModuleSet]()
        for chosen in _apart(modules):
            sets.append(_joined(chosen))
            if len(sets) > MOST_SETS:
                return None
        freed = [
            [
                *(own <= item.covered and owner not in item.entering for owner, own in keepers.items()),
                *(place[node] in item.covered for node in inside),
            ]
            for item in sets
        ]
        sets.append(ModuleSet((frozenset(range(len(nodes))),), frozenset(range(len(costs.again(nodes))))))
        freed.append([True] * (len(keepers) + len(inside)))
        again = [[at in item.run for at in range(len(nodes))] for item in sets]
        # what the layer alone makes and reads, and keeps only where it enters a module
        read: dict[Value, dict[Amount, None]] = {}
        for value, owner in (pair for node in nodes for pair in costs.reads(node)):
            if owner.node in place and owner not in keepers and owner not in memory.leaving:
                read.setdefault(owner, {costs.stored(owner): None})[costs.size(value)] = None
        entered = [[owner in item.entering for owner in read] for item in sets]
        rows = {covered: at for at, covered in enumerate(dict.fromkeys(own for item in sets for own in item.modules))}
        held = [
            [
                *(owner not in memory.leaving and not own.isdisjoint(covered) for owner, own in keepers.items()),
                *(place[node] in covered for node in inside),
            ]
            for covered in rows
        ]
        return ModuleSets(
            tuple(analysis.first.get(node, node) for node in nodes),
            (*keepers, *inside),
            (*(made[owner] for owner in keepers), *map(costs.inside, inside)),
            tuple(sets),
            np.array(again, dtype=float).reshape(-1, len(nodes)),
            np.array(freed, dtype=float).reshape(len(freed), -1),
            tuple(map(tuple, read.values())),
            np.array(entered, dtype=float).reshape(len(sets), -1),
            tuple(tuple(rows[own] for own in item.modules) for item in sets),
            np.array(held, dtype=float).reshape(len(rows), -1),
        )

    def kept_bytes(self, batch: int) -> Array:
        """By set, of what depends on it."""
        sizes = self._sizes(batch)
        entering = [min(size.at(batch) for size in own) for own in self.entering]
        return np.maximum(sizes.sum() - self.freed @ sizes, 0.0) + self.entered @ np.array(entering, dtype=float)

    def held_bytes(self, batch: int) -> Array:
        """By set, of what the ops of one of its modules keep, the most."""
        held = self.held @ self._sizes(batch)
        return np.array([max((held[at] for at in own), default=0.0) for own in self.members])

    def _sizes(self, batch: int) -> Array:
        return np.array([amount.at(batch) for amount in self.sizes], dtype=float)

    def undominated(self) -> list[ModuleSet]:
        """Of the sets those beside which no other frees as much while no more runs again, nothing is kept for it that
        was not, and no conversion inside a module runs again that did not. The empty one is first, the whole layer
        last.
        """
        again, freed, kept = _as_bits(self.again > 0), _as_bits(self.freed > 0), set(self.kept)
        found: list[int] = []
        for at in sorted(
            range(len(self.sets) - 1), key=lambda item: (again[item].bit_count(), -freed[item].bit_count())
        ):
            if not any(
                not again[other] & ~again[at]
                and not freed[at] & ~freed[other]
                and _within(self.sets[other], self.sets[at])
                and self.sets[other].entering.keys() - kept <= self.sets[at].entering.keys()
                for other in found
            ):
                found.append(at)
        return [*(self.sets[at] for at in found), self.sets[-1]]


def _as_bits(rows: NDArray[np.bool_]) -> list[int]:
    return [int.from_bytes(np.packbits(row).tobytes()) for row in rows]


def _within(one: ModuleSet, other: ModuleSet) -> bool:
    return all(any(own <= module for module in other.modules) for own in one.modules)


def _joined(chosen: Sequence[ModuleSet]) -> ModuleSet:
    entering: dict[Value, int] = {}
    for item in chosen:
        for owner, at in item.entering.items():
            entering[owner] = min(at, entering.get(owner, at))
    return ModuleSet(
        tuple(own for item in chosen for own in item.modules),
        frozenset[int]().union(*(item.run for item in chosen)),
        entering,
    )


def _apart(modules: Sequence[ModuleSet]) -> Iterator[tuple[ModuleSet, ...]]:
    """All sets of modules whose ops lie one behind the other, the empty one first."""
    yield ()
    for index, module in enumerate(modules):
        low, high = min(module.covered), max(module.covered)
        others = [other for other in modules[index + 1 :] if high < min(other.covered) or max(other.covered) < low]
        for rest in _apart(others):
            yield (module, *rest)
