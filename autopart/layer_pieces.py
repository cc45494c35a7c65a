"""Blocks and layers as :mod:`autopart.solver.pipeline_floor` takes them: what each of tp ranks has of them at least.

Seconds, parameters and what is kept for the backward are shared perfectly, as in :mod:`autopart.memory_bound`. Of a
layer that lies in one stage as a whole the sets of modules that may run again are known
(:mod:`autopart.layer_frontier`): what each frees, and which ops run again for it. Of a block of a layer that is cut
those of its own ops are; what comes from the layer's other blocks is free where all of the block runs again.

Of transients only those of single ops are known. Send buffers, and copies of tensors in several placements, are left
out.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import fx

from autopart.data_prices import DataPrices
from autopart.memory_bound import BlockFacts, Kind, MemoryBound, Parameters
from autopart.passes.amounts import Amount
from autopart.passes.emit.layers import Run
from autopart.passes.emit.segments import spans_of
from autopart.passes.graph import Value
from autopart.prices import Prices
from autopart.solver.pipeline_floor import Piece, Way, Weights
from autopart.solver.tensor_hull import corners

# Sets of modules of a layer beyond which only those of whole layers are known.
_MOST_SETS = 4096

# Where sets of modules are parted, besides at the corners of their hull: parts of the whole layer's seconds.
_PARTS = np.array([0.05, 0.15, 0.3, 0.5])

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PieceSetting:
    """Where pieces are priced. seconds: of an op, forward and backward, at least. transient: bytes that it takes while
    it runs, at least. share: of bytes on a rank. levels: of ZeRO. recompute: "none", "full" or "auto". alike: equal
    where prices of ops are.
    """

    prices: Prices
    seconds: Callable[[fx.Node], tuple[float, float]]
    transient: Callable[[fx.Node], float]
    alike: Hashable
    data: DataPrices
    share: float
    levels: tuple[int, ...]
    recompute: str


@dataclass(frozen=True, slots=True)
class _Sets:
    """The sets of modules of a layer that may run again.

    ops: equal ones, in order. kept: the tensors that the layer keeps, or the ops of what they keep besides; sizes: of
    these. again: [set, op] whether it runs again. freed: [set, tensor] whether it is not kept then.
    """

    ops: tuple[fx.Node, ...]
    kept: tuple[Value | fx.Node, ...]
    sizes: tuple[Amount, ...]
    again: Array
    freed: Array


_Module = tuple[set[int], set[int], set[Value]]
"""Its ops, those of them that run again, and what enters."""


@dataclass(slots=True)
class LayerPieces:
    """Of one program. memory: what blocks hold."""

    memory: MemoryBound
    _sets: dict[tuple[BlockFacts, ...], _Sets | None] = field(default_factory=dict)
    _runs: dict[tuple[tuple[BlockFacts, ...], Hashable], tuple[Way, ...]] = field(default_factory=dict)

    def block(self, number: int, setting: PieceSetting, priced: Kind | None = None) -> Piece:
        """One block by itself, or of a layer that is cut."""
        facts, layer = self.memory.row[number], self.memory.analysis.layers[number]
        forward, backward = self._seconds([facts], setting)
        runs = self._alone([facts], setting)
        if setting.recompute == "full" and layer:
            runs = (Way(forward, 0.0, runs[-1].kept_bytes),)
        elif setting.recompute == "auto" and layer:
            runs = self._again((facts,), (number,), setting)
        else:
            runs = runs[:1]
        return Piece(forward, backward, self._weights([facts], setting, priced), runs, _transient([facts], setting))

    def _alone(self, own: Sequence[BlockFacts], setting: PieceSetting) -> tuple[Way, ...]:
        """The ways to run blocks, where only the op that makes a tensor runs again."""
        batch, share = setting.prices.batch, setting.share
        kept = sum(amount.at(batch) for facts in own for amount in facts.kept) * share
        made = [
            (setting.seconds(node)[0], sum(amount.at(batch) for amount in amounts) * share)
            for facts in own
            for node, amounts in facts.made
        ]
        runs = [Way(0.0, 0.0, kept + math.fsum(size for _, size in made))]
        for seconds, size in sorted(made, key=lambda item: item[0] / max(item[1], 1e-9)):
            last = runs[-1]
            runs.append(Way(last.seconds + seconds, 0.0, max(kept, last.kept_bytes - size)))
        return tuple(runs)

    def layer(
        self, own: tuple[BlockFacts, ...], blocks: Sequence[int], setting: PieceSetting, priced: Kind | None = None
    ) -> Piece:
        """A layer that lies in one stage."""
        forward, backward = self._seconds(own, setting)
        runs = self._alone(own, setting)
        if setting.recompute == "auto":
            runs = self._again(own, blocks, setting)
        else:
            runs = (Way(forward, 0.0, runs[-1].kept_bytes),) if setting.recompute == "full" else runs[:1]
        return Piece(forward, backward, self._weights(own, setting, priced), runs, _transient(own, setting))

    def _seconds(self, own: Sequence[BlockFacts], setting: PieceSetting) -> tuple[float, float]:
        seconds = [setting.seconds(node) for facts in own for node in facts.ops]
        return math.fsum(forward for forward, _ in seconds), math.fsum(backward for _, backward in seconds)

    def _weights(self, own: Sequence[BlockFacts], setting: PieceSetting, priced: Kind | None) -> tuple[Weights, ...]:
        found: dict[object, list[Parameters]] = defaultdict(list)
        for facts in own:
            for item in facts.parameters:
                if item.weight:
                    found[item.kind].append(item)
        return tuple(
            Weights(sum(item.weight for item in items) * setting.share, levels_of(items[0], setting), kind == priced)
            for kind, items in found.items()
        )

    def _again(self, own: tuple[BlockFacts, ...], blocks: Sequence[int], setting: PieceSetting) -> tuple[Way, ...]:
        """The ways to run a layer, or a part of one, of which none lies above a mix of others; nothing again first."""
        if own not in self._sets:
            self._sets[own] = self._modules(blocks)
        sets = self._sets[own]
        if sets is None:
            return self._alone(own, setting)
        key = own, setting.alike
        if key not in self._runs:
            seconds = sets.again @ np.array([setting.seconds(node)[0] for node in sets.ops])
            sizes = np.array([amount.at(setting.prices.batch) for amount in sets.sizes]) * setting.share
            always = sum(amount.at(setting.prices.batch) for facts in own for amount in facts.kept) * setting.share
            kept = always + np.maximum(sizes.sum() - sets.freed @ sizes, 0.0)
            points = corners(list(zip(seconds.tolist(), kept.tolist(), strict=True)), lambda point: point)
            self._runs[key] = tuple(Way(more, 0.0, size) for more, size in points)
        return self._runs[key]

    def parts(
        self, own: tuple[BlockFacts, ...], blocks: Sequence[int], setting: PieceSetting
    ) -> list[tuple[float, frozenset[Value | fx.Node]]]:
        """All sets of modules of a layer, but the empty one, parted by their seconds.

        Of each part the seconds of its fastest, and what is kept whichever of the sets runs again.
        """
        if own not in self._sets:
            self._sets[own] = self._modules(blocks)
        sets = self._sets[own]
        if sets is None:
            return [(0.0, frozenset())]
        seconds = sets.again @ np.array([setting.seconds(node)[0] for node in sets.ops])
        some = sets.again.any(axis=1)
        limits = sorted({*(way.seconds for way in self._again(own, blocks, setting)[1:-1]), *(seconds.max() * _PARTS)})
        found: list[tuple[float, frozenset[Value | fx.Node]]] = []
        for low, high in itertools.pairwise((-1.0, *limits, math.inf)):
            inside = some & (seconds > low) & (seconds <= high)
            if inside.any():
                freed = sets.freed[some & (seconds <= high)].any(axis=0)
                left = frozenset(item for item, gone in zip(sets.kept, freed, strict=True) if not gone)
                if found and found[-1][1] == left:
                    continue
                found.append((float(seconds[inside].min()), left))
        return found

    def _modules(self, numbers: Sequence[int]) -> _Sets | None:
        """Of the layer with these blocks; None where they are too many."""
        analysis, costs = self.memory.analysis, self.memory.block_costs
        ops = [node for number in numbers for node in analysis.blocks[number].nodes if node in analysis.block_of]
        place = {node: index for index, node in enumerate(ops)}
        made = {owner: size for number in numbers for owner, size in self.memory.made_in[number].items()}
        keepers: dict[Value, set[int]] = defaultdict(set)
        for node in ops:
            for owner, _ in costs.kept_by(node):
                if owner in made:
                    keepers[owner].add(place[node])
        inside = [node for node in ops if costs.inside(node)]
        modules: list[_Module] = []
        for nodes in spans_of(Run(analysis.layers[numbers[0]], ops)).values():
            own = [node for node in nodes if node in place]
            last = max((at for at, node in enumerate(own) if costs.keeps(node)), default=-1)
            if last < 0:
                continue
            among = set(nodes)
            entering = {owner for node in own for value, owner in costs.reads(node) if value.node not in among}
            modules.append(({place[node] for node in own}, {place[node] for node in own[: last + 1]}, entering))
        again, freed = [], []
        for chosen in _apart(modules):
            covered = set[int]().union(*(module[0] for module in chosen))
            run = set[int]().union(*(module[1] for module in chosen))
            entering = set[Value]().union(*(module[2] for module in chosen))
            again.append([at in run for at in range(len(ops))])
            free = [own <= covered and owner not in entering for owner, own in keepers.items()]
            freed.append([*free, *(place[node] in covered for node in inside)])
            if len(again) > _MOST_SETS:
                return None
        # as a whole, up to the last that keeps something: of a block, with others of its layer
        last = max((at for at, node in enumerate(ops) if costs.keeps(node)), default=-1)
        again.append([at <= last for at in range(len(ops))])
        freed.append([True] * (len(keepers) + len(inside)))
        return _Sets(
            tuple(analysis.first.get(node, node) for node in ops),
            (*keepers, *inside),
            (*(made[owner] for owner in keepers), *map(costs.inside, inside)),
            np.array(again, dtype=float).reshape(-1, len(ops)),
            np.array(freed, dtype=float).reshape(len(again), -1),
        )


def _transient(own: Sequence[BlockFacts], setting: PieceSetting) -> float:
    return max((setting.transient(node) for facts in own for node in facts.ops), default=0.0)


def levels_of(own: Parameters, setting: PieceSetting) -> tuple[Way, ...]:
    """The ways to hold one byte of such weights."""
    data, size = setting.data, own.weight * setting.share
    found = []
    for level in setting.levels if own.divides else (0,):
        seconds = sum(data.microbatch_seconds(size, level, own.trained, own.again, 0.0))
        end = sums = 0.0
        if own.trained:
            seconds += data.adding_seconds(size, level)
            end = data.step_end_seconds(size, level)
            sums = data.sum_seconds(size, level) if data.replicas > 1 else 0.0
        found.append(Way(seconds / size, own.held(level, data.replicas) / own.weight, 0.0, end / size, sums / size))
    return tuple(found)


def _apart(modules: Sequence[_Module]) -> Iterator[tuple[_Module, ...]]:
    """All sets of modules whose ops lie one behind the other, the empty one first."""
    yield ()
    for index, module in enumerate(modules):
        low, high = min(module[0]), max(module[0])
        others = [other for other in modules[index + 1 :] if high < min(other[0]) or max(other[0]) < low]
        for rest in _apart(others):
            yield (module, *rest)
