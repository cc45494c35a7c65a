"""Blocks and layers as :mod:`autopart.solver.pipeline_floor` takes them: what each of tp ranks has of them at least.

Seconds, parameters and what is kept for the backward are shared perfectly, as in :mod:`autopart.memory_bound`. Of a
layer that lies in one stage as a whole the sets of modules that may run again are known
(:mod:`autopart.module_sets`): what each frees, and which ops run again for it. Of a block of a layer that is cut
those of its own ops are; what comes from the layer's other blocks is free where all of the block runs again.

Of transients those of single ops are known, what a module holds while it runs back
(:attr:`~autopart.solver.pipeline_pieces.Piece.wholes`), and divided weights while they are whole. Send buffers, and
copies of tensors in several placements, are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch import fx

from autopart.data_prices import LAYER_COPIES, DataPrices
from autopart.memory_bound import BlockFacts, Kind, MemoryBound, Parameters, summed
from autopart.module_sets import ModuleSets
from autopart.passes.emit.layers import MOST_INLINE
from autopart.prices import Prices
from autopart.solver.pipeline_pieces import Piece, Run, Way, Weights
from autopart.solver.tensor_hull import corners


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


@dataclass(slots=True)
class LayerPieces:
    """Of one program. memory: what blocks hold."""

    memory: MemoryBound
    _sets: dict[tuple[BlockFacts, ...], ModuleSets | None] = field(default_factory=dict)
    _runs: dict[tuple[tuple[BlockFacts, ...], Hashable], tuple[Run, ...]] = field(default_factory=dict)

    def block(self, number: int, setting: PieceSetting, priced: Kind | None = None) -> Piece:
        """One block by itself, or of a layer that is cut."""
        facts, layer = self.memory.row[number], self.memory.analysis.layers[number]
        return self._piece((facts,), (number,), setting, priced, bool(layer))

    def first(self, setting: PieceSetting) -> Piece:
        """The first block, which lies in no layer: a step ends with sums of what it reads, beside no backward, and a
        forward begins with the gather of what of that is divided, at level 3 each, beside this block's ops alone.
        """
        found, facts = self.block(0, setting), self.memory.row[0]
        parameters = [item for item in facts.parameters if item.weight]
        largest = max(parameters, key=lambda item: item.weight, default=None)
        weights = []
        for item in parameters:
            (_, own), size = summed([item], setting.data.replicas)[0], item.weight * setting.share
            gathered = setting.data.microbatch_seconds(size, 3, False, False, 0.0)[0]
            alone = item is largest and item.weight == math.prod(item.shape) * item.dtype.itemsize
            waits = max(0.0, 1 - found.forward_s / gathered) if alone and gathered else 0.0
            ways = tuple(_first_way(own, level, setting, waits) for level in _levels(own, setting))
            weights.append(Weights(size, ways))
        return replace(found, weights=tuple(weights))

    def tied(self, setting: PieceSetting) -> list[tuple[tuple[int, ...], Piece]]:
        """What several blocks read, by these."""
        found = ((blocks, BlockFacts((), own, (), ())) for blocks, own in self.memory.tied.items())
        return [(blocks, Piece(0.0, 0.0, self._weights([facts], setting, None))) for blocks, facts in found]

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
        self,
        own: tuple[BlockFacts, ...],
        blocks: Sequence[int],
        setting: PieceSetting,
        priced: Kind | None = None,
        layer: bool = True,
    ) -> Piece:
        """A layer that lies in one stage. layer: or blocks that lie in none."""
        return self._piece(own, blocks, setting, priced, layer)

    def _piece(
        self,
        own: tuple[BlockFacts, ...],
        blocks: Sequence[int],
        setting: PieceSetting,
        priced: Kind | None,
        layer: bool,
    ) -> Piece:
        forward, backward = self._seconds(own, setting)
        transient, wholes = _transient(own, setting), tuple[Run, ...]()
        runs = self._alone(own, setting)
        again = layer and sum(len(facts.ops) for facts in own) > MOST_INLINE
        if setting.recompute == "full" and again:
            runs = (Way(self._again_seconds(blocks, setting), 0.0, runs[-1].kept_bytes),)
        elif setting.recompute == "auto" and layer:
            if found := self._again(own, blocks, setting):
                wholes = tuple(replace(run, transient_bytes=transient + run.transient_bytes) for run in found)
                points = corners(found, lambda run: (run.seconds, run.kept_bytes))
                runs = tuple(Way(run.seconds, 0.0, run.kept_bytes) for run in points)
        else:
            runs = runs[:1]
        weights = self._weights(own, setting, priced, 0 if layer else len(own))
        return Piece(forward, backward, weights, runs, transient, wholes)

    def _again_seconds(self, blocks: Sequence[int], setting: PieceSetting) -> float:
        """Of all that surely runs again of blocks."""
        analysis = self.memory.analysis
        nodes = [node for number in blocks for node in analysis.blocks[number].nodes if node in analysis.block_of]
        again = self.memory.block_costs.again(nodes)
        return math.fsum(setting.seconds(analysis.first.get(node, node))[0] for node in again)

    def _seconds(self, own: Sequence[BlockFacts], setting: PieceSetting) -> tuple[float, float]:
        seconds = [setting.seconds(node) for facts in own for node in facts.ops]
        return math.fsum(forward for forward, _ in seconds), math.fsum(backward for _, backward in seconds)

    def _weights(
        self, own: Sequence[BlockFacts], setting: PieceSetting, priced: Kind | None, parts: int = 1
    ) -> tuple[Weights, ...]:
        """parts: blocks outside of layers, each of which gathers its weights by itself; 0: a layer."""
        parameters = [item for facts in own for item in facts.parameters if item.weight]
        return tuple(
            Weights(item.weight * setting.share, levels_of(item, setting, parts), kind == priced)
            for kind, item in summed(parameters, setting.data.replicas)
        )

    def _again(self, own: tuple[BlockFacts, ...], blocks: Sequence[int], setting: PieceSetting) -> tuple[Run, ...]:
        """The ways to run a layer, or a part of one, none of which another undercuts; nothing again first. Empty where
        they are too many.
        """
        sets = self.module_sets(own, blocks)
        if sets is None:
            return ()
        key = own, setting.alike
        if key not in self._runs:
            batch, share = setting.prices.batch, setting.share
            seconds = sets.again @ np.array([setting.seconds(node)[0] for node in sets.ops])
            always = sum(amount.at(batch) for facts in own for amount in facts.kept)
            kept, held = share * (always + sets.kept_bytes(batch)), share * sets.held_bytes(batch)
            found = list[Run]()
            for point in sorted(zip(seconds.tolist(), kept.tolist(), held.tolist(), strict=True)):
                if not any(o.kept_bytes <= point[1] and o.transient_bytes <= point[2] for o in found):
                    found.append(Run(*point))
            self._runs[key] = tuple(found)
        return self._runs[key]

    def module_sets(self, own: tuple[BlockFacts, ...], blocks: Sequence[int]) -> ModuleSets | None:
        """Of a layer with these blocks, or of a part of one; None where they are too many. own: facts of the blocks."""
        if own not in self._sets:
            self._sets[own] = ModuleSets.of(self.memory, blocks)
        return self._sets[own]


def _transient(own: Sequence[BlockFacts], setting: PieceSetting) -> float:
    return max((setting.transient(node) for facts in own for node in facts.ops), default=0.0)


def levels_of(own: Parameters, setting: PieceSetting, parts: int) -> tuple[Way, ...]:
    """The ways to hold one byte of such weights. parts: as of :meth:`LayerPieces._weights`."""
    return tuple(_way(own, level, setting, parts) for level in _levels(own, setting))


def _levels(own: Parameters, setting: PieceSetting) -> tuple[int, ...]:
    return setting.levels if own.divides else (0,)


def _way(own: Parameters, level: int, setting: PieceSetting, parts: int) -> Way:
    data, size = setting.data, own.weight * setting.share
    there, back = data.microbatch_seconds(size, level, own.trained, own.again, 0.0)
    seconds, end, sums = sum(data.moving_seconds(size, level, own.trained, own.again)), 0.0, 0.0
    arriving = 0.0
    if own.trained:
        end = data.step_end_seconds(size, level)
        if data.replicas > 1:
            arriving = data.arriving_seconds(size, level)
            sums = data.sum_seconds(size, level)
    held = own.held(level, data.replicas) / own.weight
    copies = (1.0 / parts if own.again else 0.0) if parts else LAYER_COPIES
    way = Way(
        seconds,
        held * size,
        0.0,
        end,
        sums,
        sent_s=there + back,
        gathered_s=there,
        again_s=there if own.again else 0.0,
        transient_bytes=copies if level == 3 else 0.0,  # on the mean of the parts
        arriving_s=arriving,
    )
    return way.times(1 / size)


def _first_way(own: Parameters, level: int, setting: PieceSetting, waits: float) -> Way:
    """The same of what the first block reads, whose last sum hides nothing. waits: for which part of a gather the
    forward does.
    """
    found, trained = _way(own, level, setting, 1), setting.data.replicas > 1 and own.trained
    scattered = found.sent_s - found.gathered_s - found.again_s if trained else 0.0
    return replace(
        found,
        seconds=found.seconds + waits * found.gathered_s,
        end_s=found.end_s + scattered,
        late_s=found.sum_s,
        awaited_s=waits * found.arriving_s,
    )
