"""What memory asks of a candidate at least: seconds of recomputation, and of exchanges of divided parameters.

A bound for :mod:`autopart.solver.memory_floor`, whatever the strategies: each of tp ranks holds at least its share of
every parameter and of every tensor that is kept for the backward.

- A parameter can be at each level of ZeRO that replicas may use, with the seconds that this adds to a microbatch.
- A tensor that only ops of one layer keep, and an op of this layer makes, need not be kept: but then at least the op
  that makes it runs again. All others are always kept, as are all where nothing is computed again.

Transients, send buffers, and copies of tensors in several placements are left out.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopart.analysis import Analysis
from autopart.block_costs import BlockCosts
from autopart.data_prices import DataPrices
from autopart.passes.amounts import Amount
from autopart.passes.annotate import ParameterBytes, parameter_bytes
from autopart.passes.graph import Value
from autopart.prices import Prices
from autopart.solver.memory_floor import AddedSeconds, Held, Way, added_seconds
from autopart.solver.stages_floor import least_step, most_behind

# Of the seconds that memory adds to a microbatch: more than so many times its work are not told apart.
_MOST_ADDED, _BISECTIONS = 2.0, 8


def least_added(
    blocks: Sequence[Held], rooms: Sequence[float], in_flight: tuple[int, ...], microbatches: int, work: float
) -> float:
    """Seconds that memory adds to a microbatch that takes ``work``, at least, up to twice as many.

    rooms: bytes of each stage. microbatches: of 1F1B or GPipe; 1 under other schedules. What may be behind a stage
    follows from the seconds of the step, so these are sought: no step takes less than what its own seconds ask for, and
    longer ones ask for less.
    """
    if microbatches == 1 or len(rooms) == 1:
        found = added_seconds(blocks, (min(in_flight),) * len(rooms), rooms, (math.inf,) * len(rooms))
        return min(found, _MOST_ADDED * work)
    behind, even = most_behind(microbatches, in_flight)[1:], least_step(microbatches, in_flight)
    added = AddedSeconds(blocks, in_flight, rooms)

    def asked(seconds: float) -> float:
        """Added to the work, where a step takes so long."""
        return min(added.at([part * (seconds - work) for part in behind]), _MOST_ADDED * work)

    least, most = work * even, work * even * (1 + _MOST_ADDED)
    if not asked(least):
        return 0.0
    for _ in range(_BISECTIONS):
        middle = (least + most) / 2
        least, most = (middle, most) if (work + asked(middle)) * even > middle else (least, middle)
    return max(least / even - work, asked(most))


Kind = tuple[bool, bool, bool, torch.dtype]
"""Of parameters: trained, divided over replicas, gathered again, and their type."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """Of one block, summed: those of a type and a shape that are trained or not, are divided over replicas or never,
    and gathered again.
    """

    weight: int
    gradient: int
    optimizer: int
    trained: bool
    divides: bool
    again: bool
    dtype: torch.dtype
    shape: tuple[int, ...] = ()

    @property
    def kind(self) -> Kind:
        return self.trained, self.divides, self.again, self.dtype

    def held(self, level: int, replicas: int) -> float:
        """Bytes on one of the replicas, at a level of ZeRO."""
        return math.fsum(
            size / replicas if level >= least else size
            for size, least in ((self.weight, 3), (self.gradient, 2), (self.optimizer, 1))
        )


def summed(parameters: Sequence[Parameters], replicas: int) -> list[tuple[Kind, Parameters]]:
    """Over shapes, by kind and whether so many replicas may divide them: only where one of their sizes divides."""
    found: dict[tuple[Kind, bool], list[Parameters]] = defaultdict(list)
    for item in parameters:
        divides = item.divides and any(size and size % replicas == 0 for size in item.shape)
        found[item.kind, divides].append(item)
    return [
        (
            kind,
            Parameters(
                sum(item.weight for item in own),
                sum(item.gradient for item in own),
                sum(item.optimizer for item in own),
                *(own[0].trained, divides, own[0].again, own[0].dtype),
            ),
        )
        for (kind, divides), own in found.items()
    ]


@dataclass(frozen=True, slots=True)
class BlockFacts:
    """Of a block. ops: an equal one for each. kept: always. made: the op that has to run again, and what that frees.
    leaving: the numbers of ops of whose results ops outside of the block's layer read some. modules: those that its ops
    are of, as :class:`autopart.analysis.Analysis` says.
    """

    ops: tuple[fx.Node, ...]
    parameters: tuple[Parameters, ...]
    kept: tuple[Amount, ...]
    made: tuple[tuple[fx.Node, tuple[Amount, ...]], ...]
    leaving: tuple[int, ...] = ()
    modules: str = ""


@dataclass(slots=True)
class MemoryBound:
    """Of one program, whose facts are gathered at the first use. readers: the blocks that read each parameter."""

    analysis: Analysis
    block_costs: BlockCosts
    readers: Mapping[fx.Node, tuple[int, ...]]
    optimizer: str
    made_in: list[dict[Value, Amount]] = field(default_factory=list)
    """By block, what is kept that its layer alone makes and keeps, once the facts are gathered."""
    leaving: set[Value] = field(default_factory=set)
    """What ops of other layers, or of none, read than make it, by who owns the memory, once the facts are gathered."""
    _row: list[BlockFacts] = field(default_factory=list)
    _kinds: Counter[BlockFacts] = field(default_factory=Counter)

    @property
    def row(self) -> Sequence[BlockFacts]:
        """By block."""
        if not self._row:
            self._row = self._gather()
        return self._row

    @property
    def _counted(self) -> Counter[BlockFacts]:
        """How many blocks are alike."""
        if not self._kinds:
            self._kinds = Counter(self.row)
        return self._kinds

    @property
    def tied(self) -> dict[tuple[int, ...], tuple[Parameters, ...]]:
        """What several blocks read, by these: each stage that has one holds it. In the row it is with the first."""
        nodes: dict[tuple[int, ...], list[fx.Node]] = defaultdict(list)
        for node, blocks in self.readers.items():
            if len(blocks) > 1:
                nodes[blocks].append(node)
        return {blocks: self._parameters(own) for blocks, own in nodes.items()}

    def blocks(
        self, prices: Prices, share: float, data: DataPrices, levels: Sequence[int], recompute: str
    ) -> list[Held]:
        """The blocks as each of ``1 / share`` ranks holds them at least."""
        return [
            Held(
                count,
                sum(sum(prices.shared_seconds(node, share, share)) for node in facts.ops),
                tuple(self._parts(facts, prices, share, data, levels, recompute)),
            )
            for facts, count in self._counted.items()
        ]

    def _parts(
        self, facts: BlockFacts, prices: Prices, share: float, data: DataPrices, levels: Sequence[int], recompute: str
    ) -> list[tuple[Way, ...]]:
        batch, parts = prices.batch, []
        for _, own in summed(facts.parameters, data.replicas):
            ways = []
            for level in levels if own.divides else (0,):
                size = own.weight * share
                seconds = sum(data.moving_seconds(size, level, own.trained, own.again))
                if own.trained:  # beyond what CandidateFloors.besides_seconds has of it
                    seconds = max(0.0, seconds - data.least_moving_seconds(size, levels))
                ways.append(Way(seconds, own.held(level, data.replicas) * share))
            parts.append(tuple(ways))
        fixed = float(sum(amount.at(batch) for amount in facts.kept))
        for node, amounts in facts.made:
            size = sum(amount.at(batch) for amount in amounts)
            if recompute == "none":
                fixed += size
            elif recompute == "auto":
                again = prices.shared_seconds(node, share, share)[0]
                parts.append((Way(0.0, 0.0, size * share), Way(again, 0.0)))
        return [*parts, (Way(0.0, 0.0, fixed * share),)]

    def _gather(self) -> list[BlockFacts]:
        analysis, layers = self.analysis, self.analysis.layers
        keepers: dict[Value, dict[int, Amount]] = defaultdict(dict)
        for node, index in analysis.block_of.items():
            for owner, amount in self.block_costs.kept_by(node):
                keepers[owner][index] = amount
        kept: list[list[Amount]] = [[] for _ in layers]
        made: list[dict[fx.Node, list[Amount]]] = [defaultdict(list) for _ in layers]
        self.made_in = [{} for _ in layers]
        for owner, held in keepers.items():
            index, amount = next(iter(held.items()))
            at = analysis.block_of.get(owner.node)
            inside = {layers[block] for block in (*held, *(() if at is None else (at,)))}
            if len(inside) == 1 and inside != {""}:
                made[index][owner.node].append(amount)
                self.made_in[index][owner] = amount
            else:
                kept[index].append(amount)
        for node, index in analysis.block_of.items():
            if (amount := self.block_costs.inside(node)) and layers[index]:
                made[index][node].append(amount)
            elif amount:
                kept[index].append(amount)
        self.leaving = {
            owner
            for node, index in analysis.block_of.items()
            for _, owner in self.block_costs.reads(node)
            if (made_at := analysis.block_of.get(owner.node)) is not None and layers[made_at] != layers[index]
        }
        left = {owner.node for owner in self.leaving}
        first = analysis.first | _free_alike(node for own in made for node in own if node not in analysis.block_of)
        parameters: list[list[fx.Node]] = [[] for _ in layers]
        for node, blocks in self.readers.items():
            parameters[blocks[0]].append(node)
        return [
            BlockFacts(
                tuple(analysis.first.get(node, node) for node in block.nodes),
                self._parameters(own),
                tuple(kept[index]),
                tuple((first.get(node, node), tuple(amounts)) for node, amounts in made[index].items()),
                tuple(at for at, node in enumerate(block.nodes) if node in left),
                analysis.kinds[index][1],
            )
            for index, (block, own) in enumerate(zip(analysis.blocks, parameters, strict=True))
        ]

    def _parameters(self, nodes: Sequence[fx.Node]) -> tuple[Parameters, ...]:
        """Of parameters and buffers, those that are treated alike together."""
        sizes = Counter[tuple[bool, bool, bool, torch.dtype, tuple[int, ...], str]]()
        for node in nodes:
            info = self.analysis.program.tensors[node.meta["name"]]
            own: ParameterBytes = parameter_bytes(info.shape, info.dtype, self.optimizer, info.trainable)
            again = self.block_costs.gathering(node)[0]
            kind = bool(info.trainable), not info.buffer, again, info.dtype, tuple(info.shape)
            for name in ("weight", "gradient", "optimizer"):
                sizes[*kind, name] += getattr(own, name)
        return tuple(
            Parameters(sizes[*kind, "weight"], sizes[*kind, "gradient"], sizes[*kind, "optimizer"], *kind)
            for kind in dict.fromkeys(key[:-1] for key in sizes)
        )


def _free_alike(nodes: Iterable[fx.Node]) -> dict[fx.Node, fx.Node]:
    """For every free op, such as each layer's own mask, the first that is the same of operands of the same sizes."""
    seen: dict[object, fx.Node] = {}
    return {node: seen.setdefault(_kind_of(node), node) for node in nodes}


def _kind_of(node: fx.Node) -> str:
    def written(operand: fx.Node) -> Any:
        found = operand.meta.get("val")
        return str((found.dtype, found.shape)) if isinstance(found, torch.Tensor) else str(found)

    return f"{node.target} {fx.map_arg((node.args, node.kwargs), written)}"
