"""Layers of candidates that are alike: their pieces, and prices of strategies and of modules that run again."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray
from torch import fx

from autopart.alike_work import (
    LEAST_LAYERS,
    AlikeLayers,
    alike_layers,
    beside_layers,
    kept_by_choice,
    least_seconds,
    pieces_of,
    strategy_prices,
)
from autopart.candidate_levels import CandidateLevels
from autopart.candidate_settings import same_but_for_memory
from autopart.cluster import Cluster
from autopart.conversion_prices import TensorAxis
from autopart.cost.devices import Device
from autopart.folding import FoldedPart, fold_part
from autopart.layer_pieces import LayerPieces, PieceSetting
from autopart.memory_bound import MemoryBound
from autopart.module_sets import ModuleSet, ModuleSets
from autopart.passes.emit.layers import MOST_INLINE
from autopart.runtime.errors import PlanError
from autopart.solver.degrees import Degrees
from autopart.solver.pipeline_pieces import Family, Piece, Price
from autopart.tensor_choice import Builder

_MOST_OTHERS = 4
"""Layers that few are alike to, and runs of blocks beside layers, up to which the strategies of each are known."""


@dataclass(slots=True)
class CandidateLayers(CandidateLevels):
    """What is found for the layers of one candidate is kept for those that share it."""

    _memory: MemoryBound = field(init=False)
    _priced_layers: dict[object, tuple[Price, ...]] = field(default_factory=dict)
    _least_op_seconds: dict[object, dict[fx.Node, tuple[float, float]]] = field(default_factory=dict)
    _least_transients: dict[object, dict[fx.Node, float]] = field(default_factory=dict)
    _alike_layers: list[AlikeLayers] | None = None
    _beside_layers: tuple[AlikeLayers, ...] | None = None
    _piece_layers: dict[tuple[int, ...], tuple[AlikeLayers, ...]] = field(default_factory=dict)
    _least_parts: dict[object, dict[tuple[int, ...], float]] = field(default_factory=dict)
    _module_sets: dict[tuple[int, ...], Sequence[ModuleSet]] = field(default_factory=dict)
    _kept_sizes: dict[object, dict[tuple[str, ...], NDArray[np.float64]]] = field(default_factory=dict)
    _surely_again: frozenset[fx.Node] | None = None
    _parts: dict[str, FoldedPart] = field(default_factory=dict)  # by layer
    _pieces: LayerPieces = field(init=False)

    def __post_init__(self) -> None:
        CandidateLevels.__post_init__(self)
        self._memory = MemoryBound(self.analysis, self._block_costs, self.readers, self.optimizer)
        self._pieces = LayerPieces(self._memory)

    def _with(self, cluster: Cluster, device: Device, whole: frozenset[str]) -> Self:
        found = CandidateLevels._with(self, cluster, device, whole)
        if not same_but_for_memory(device, self.device) or whole != self.whole:
            found._priced_layers, found._least_op_seconds, found._least_transients = {}, {}, {}
            found._least_parts = {}
        if device.kind != self.device.kind:
            found._memory = MemoryBound(self.analysis, found._block_costs, self.readers, self.optimizer)
            found._pieces, found._alike_layers, found._beside_layers = LayerPieces(found._memory), None, None
            found._module_sets, found._piece_layers, found._kept_sizes = {}, {}, {}
            found._surely_again = None
        return found

    def _strategies_key(self, config: Degrees) -> tuple[int, tuple[TensorAxis, ...], bool]:
        """Equal where strategies are the same, at the same prices."""
        setting = self.setting(config)
        return self.samples(config), setting.axes, setting.beside

    def _piece_setting(self, config: Degrees, transients: bool) -> PieceSetting:
        """transients: they are counted, as they are of one stage, or of stages that have whole blocks."""
        tensor = self.setting(config)
        alike = self.device, self.samples(config), tensor.axes
        levels = self.levels(config)
        transient = self._op_transient(config) if transients else _none
        return PieceSetting(
            *(tensor.prices, self._op_seconds(config), transient, alike, tensor.data, 1 / config.tp),
            *(levels, config.recompute),
        )

    def _op_seconds(self, config: Degrees) -> Callable[[fx.Node], tuple[float, float]]:
        """Of an op that stands for equal ones, the fewest seconds forward and backward on a rank."""
        prices, setting = self.prices(config), self.setting(config)
        if not config.axes:
            return prices.op_seconds
        known = self._least_op_seconds.setdefault((self.samples(config), setting.axes), {})

        def seconds(node: fx.Node) -> tuple[float, float]:
            if node not in known:
                every = [prices.op_seconds(node, chosen, setting.sizes) for chosen in setting.offers.of(node)]
                known[node] = min(forward for forward, _ in every), min(backward for _, backward in every)
            return known[node]

        return seconds

    def _op_transient(self, config: Degrees) -> Callable[[fx.Node], float]:
        """Of an op that stands for equal ones, the fewest bytes that it takes on a rank while it runs."""
        setting = self.setting(config)
        known = self._least_transients.setdefault((self.samples(config), setting.axes), {})

        def transient(node: fx.Node) -> float:
            if node not in known:
                every = setting.offers.of(node) if config.axes else [()]
                sizes, batch = setting.sizes, setting.prices.batch
                known[node] = min(self._block_costs.held_bytes(node, chosen, sizes, batch)[1] for chosen in every)
            return known[node]

        return transient

    def _family(self, config: Degrees, alike: AlikeLayers, setting: PieceSetting, priced: bool = True) -> Family:
        whole = self._pieces.layer(alike.facts, alike.blocks[0], setting, alike.priced, alike.layer)
        pieces = tuple(self._pieces.block(number, setting, alike.priced) for number in alike.blocks[0])
        prices = self._layer_prices(config, alike, whole) if priced else ()
        return Family(len(alike.blocks), whole, pieces, prices, parted=self._parted(alike))

    def _parted(self, alike: AlikeLayers) -> int:
        """Of these layers those that one cut parts, at most: of blocks in a row that is one."""
        if self.positions.in_row:
            return 1
        if not self.positions.complete:
            return len(alike.blocks)
        layers = [sum(1 << block for block in own) for own in alike.blocks]
        return max(sum(0 < mask & layer < layer for layer in layers) for mask in self.positions.sets)

    def _with_pieces(self, config: Degrees, alike: AlikeLayers, family: Family) -> Family:
        """With prices of what layers that are cut leave in a stage."""
        if len(family.pieces) == 1:
            return replace(family, piece_prices=(family.prices,))
        own = zip(self._pieces_of(alike), family.pieces, strict=True)
        return replace(family, piece_prices=tuple(self._layer_prices(config, *pair) for pair in own))

    def _pieces_of(self, alike: AlikeLayers) -> tuple[AlikeLayers, ...]:
        own = self._piece_layers.get(alike.blocks[0])
        if own is None:
            own = pieces_of(alike, self._folded, self._memory)
            self._piece_layers[alike.blocks[0]] = own
        return own

    def least_part_seconds(self, config: Degrees) -> dict[tuple[int, ...], float]:
        """Of ops in layers, in runs of blocks beside these, and in each of their blocks, there and back, under any
        strategies; where they are not too wide, nor too many alike to few.
        """
        key = self._strategies_key(config)
        if key not in self._least_parts:
            builder = Builder(
                self.analysis, self._folded, self.setting(config), self._block_costs, self.optimizer, (0,)
            )
            found: dict[tuple[int, ...], float] = {}
            for layers in (*self.alike_layers(), *self._other_layers(config)):
                for piece in (*self._pieces_of(layers), *([layers] if len(layers.blocks[0]) > 1 else [])):
                    with contextlib.suppress(PlanError):
                        found |= dict.fromkeys(piece.blocks, least_seconds(builder, piece))
            self._least_parts[key] = found
        return self._least_parts[key]

    def _layer_prices(self, config: Degrees, layers: AlikeLayers, whole: Piece) -> tuple[Price, ...]:
        """Of the strategies of alike layers and the modules that run again.

        None without tensor axes, and where a layer's graph is too wide.
        """
        if not config.axes:
            return ()
        tensor = self.setting(config)
        key = layers.blocks[0], self._strategies_key(config), config.recompute
        if key not in self._priced_layers:
            builder = Builder(self.analysis, self._folded, tensor, self._block_costs, self.optimizer, (0,))
            weights = math.fsum(own.bytes for own in whole.weights if own.priced)
            kept, seconds = whole.runs[0].kept_bytes, whole.forward_s + whole.backward_s
            sets = self._again_sets(layers, config.recompute)
            try:
                found = strategy_prices(builder, layers, sets, weights, kept, seconds)
            except PlanError:
                found = ()
            self._priced_layers[key] = found
        return self._priced_layers[key]

    def kept_sizes(self, config: Degrees) -> dict[tuple[str, ...], NDArray[np.float64]]:
        """By class of the ops of alike layers, what one keeps by choice, tensors that several keep counted once."""
        key = self.samples(config), config.axes
        if key not in self._kept_sizes:
            builder = Builder(
                self.analysis, self._folded, self.setting(config), self._block_costs, self.optimizer, (0,)
            )
            found = [kept_by_choice(builder, layers) for layers in self.alike_layers()]
            self._kept_sizes[key] = {name: sizes for own in found for name, sizes in own.items()}
        return self._kept_sizes[key]

    def runs_again(self, node: fx.Node) -> bool:
        """Whether an op surely does where all layers do: in whatever part of its layer a stage has."""
        if self._surely_again is None:
            found = set[fx.Node]()
            for layer, block in zip(self.analysis.layers, self.analysis.blocks, strict=True):
                if layer and len(block.nodes) > MOST_INLINE:
                    found.update(
                        self._block_costs.again([node for node in block.nodes if node in self.analysis.block_of])
                    )
            self._surely_again = frozenset(found)
        return node in self._surely_again

    def _again_sets(self, layers: AlikeLayers, recompute: str) -> Sequence[ModuleSet]:
        """The sets of a layer's modules that may run again."""
        if recompute == "none" or not layers.layer:
            return [ModuleSet()]
        blocks = layers.blocks[0]
        count = sum(len(self.analysis.blocks[number].nodes) for number in blocks)
        if recompute == "full" and count <= MOST_INLINE:
            return [ModuleSet()]
        if blocks not in self._module_sets:
            found = ModuleSets.of(self._memory, blocks)
            whole = ModuleSet((frozenset(range(count)),))  # frees all, and runs nothing again
            self._module_sets[blocks] = [ModuleSet(), whole] if found is None else found.undominated()
        sets = self._module_sets[blocks]
        return sets if recompute == "auto" else sets[-1:]

    def alike_layers(self) -> list[AlikeLayers]:
        """Of layers those that enough others are alike to."""
        return [item for item in self._layers() if len(item.blocks) >= LEAST_LAYERS]

    def _other_layers(self, config: Degrees) -> list[AlikeLayers]:
        """The others, where they are few, and where there are strategies, runs of blocks that lie in none."""
        others = [item for item in self._layers() if len(item.blocks) < LEAST_LAYERS]
        others = others if len(others) <= _MOST_OTHERS else []
        return [*others, *self._beside([*self.alike_layers(), *others])] if config.axes else others

    def _beside(self, layers: Sequence[AlikeLayers]) -> tuple[AlikeLayers, ...]:
        """Runs of blocks that lie in none of these layers, where they are few."""
        if self._beside_layers is None:
            runs = list[list[int]]()
            for number in self._apart(layers):
                if runs and runs[-1][-1] == number - 1:
                    runs[-1].append(number)
                else:
                    runs.append([number])
            found = beside_layers(self._folded, runs, self._memory) if len(runs) <= _MOST_OTHERS else None
            self._beside_layers = found or ()
        return self._beside_layers

    def _apart(self, layers: Sequence[AlikeLayers]) -> list[int]:
        """Blocks that lie in none of these layers."""
        inside = {at for item in layers for own in item.blocks for at in own}
        return [number for number in range(len(self.analysis.blocks)) if number not in inside]

    def _layers(self) -> list[AlikeLayers]:
        if self._alike_layers is None:
            self._alike_layers = list(alike_layers(self._folded, self.layer_parts(), self._memory))
        return self._alike_layers

    def layer_parts(self) -> dict[str, FoldedPart]:
        """By layer, its ops and tensors folded."""
        if not self._parts:
            nodes: dict[str, list[fx.Node]] = {}
            for block, layer in zip(self.analysis.blocks, self.analysis.layers, strict=True):
                if layer:
                    nodes.setdefault(layer, []).extend(block.nodes)
            self._parts.update({layer: fold_part(self.analysis, self._folded, own) for layer, own in nodes.items()})
        return self._parts


def _none(node: fx.Node) -> float:
    return 0.0
