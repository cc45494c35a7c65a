"""Which tuples of strategies, one per tensor axis, cut dims tightly: each cut of what the coarser one leaves, no finer.

A factor may be cut in as many blocks as other axes make pieces of it, so that most tuples of several axes' strategies
leave out pieces, or differ from others in the order of cuts alone. Such as are tight, with partial sums passed on along
one axis at most, are few.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import fx

from autopart.analysis import Analysis
from autopart.passes.rules import Strategy
from autopart.passes.rules.applied import sharding_of
from autopart.passes.rules.matching import Sharding
from autopart.passes.sizes import Extent
from autopart.prices import Chosen


@dataclass(slots=True)
class CutOrder:
    """Of strategies on tensor axes of ``sizes`` ranks, outermost first."""

    analysis: Analysis
    sizes: tuple[int, ...]
    _shardings: dict[tuple[fx.Node, int], Sharding | None] = field(default_factory=dict)
    _alone: dict[tuple[fx.Node, int], list[Sharding | None]] = field(default_factory=dict)

    def outer_first(self, node: fx.Node, chosen: Chosen) -> bool:
        """Whether an op's factors are cut tightly, by their outer axes first."""
        return self._passes_on_one(chosen) and all(
            self._tight(node, cuts) for cuts in self._cuts(node, chosen).values()
        )

    def tight(self, node: fx.Node, chosen: Chosen) -> bool:
        """Whether an op's factors are cut tightly, in any order of the axes."""
        return self._passes_on_one(chosen) and all(
            any(self._tight(node, order) for order in itertools.permutations(cuts))
            for cuts in self._cuts(node, chosen).values()
        )

    def stored(self, node: fx.Node, chosen: Chosen) -> bool:
        """Whether a stored tensor is cut tightly, in any order of the axes."""
        cuts = [(strategy.outputs[0], axis) for axis, strategy in enumerate(chosen) if strategy.outputs[0].is_shard]
        cuts.sort(key=lambda cut: cut[0].outer)
        pieces: dict[int, int] = {}
        for placement, axis in cuts:
            if placement.dim not in pieces:
                alone = self.analysis.strategies(self.sizes[axis])[node]
                if placement not in [strategy.outputs[0] for strategy in alone]:
                    return False
            elif placement.outer != pieces[placement.dim]:
                return False
            pieces[placement.dim] = placement.outer * self.sizes[axis]
        return True

    @staticmethod
    def _passes_on_one(chosen: Chosen) -> bool:
        return sum(strategy.name[0] == "P" for strategy in chosen) <= 1

    def _cuts(self, node: fx.Node, chosen: Chosen) -> dict[str, list[tuple[int, Sharding]]]:
        """By factor the axes that cut it; none where the op has no rule."""
        found: dict[str, list[tuple[int, Sharding]]] = {}
        if self.analysis.bound[node] is not None:
            for axis, strategy in enumerate(chosen):
                sharding = self._sharding(node, strategy)
                if sharding is not None:
                    found.setdefault(sharding[0], []).append((axis, sharding))
        return found

    def _tight(self, node: fx.Node, cuts: Sequence[tuple[int, Sharding]]) -> bool:
        """Whether cuts of one factor, one after the other, are each of the pieces before."""
        pieces: Extent | None = None
        for axis, sharding in cuts:
            outer = sharding[1]
            if pieces is None and sharding not in self._offered_alone(node, axis):
                return False
            if pieces not in (None, outer):
                return False
            pieces = outer.times(Extent(self.sizes[axis]))
            assert pieces is not None
        return True

    def _offered_alone(self, node: fx.Node, axis: int) -> list[Sharding | None]:
        """What is offered without other axes."""
        key = (node, self.sizes[axis])
        if key not in self._alone:
            alone = self.analysis.strategies(self.sizes[axis])[node]
            self._alone[key] = [self._sharding(node, item) for item in alone]
        return self._alone[key]

    def _sharding(self, node: fx.Node, strategy: Strategy) -> Sharding | None:
        # by identity: strategies are made once per axis size and kept
        key = (node, id(strategy))
        if key not in self._shardings:
            rule = self.analysis.bound[node]
            assert rule is not None
            self._shardings[key] = sharding_of(rule, strategy)
        return self._shardings[key]


def is_sharded(strategy: Strategy) -> bool:
    """Whether an op shares its work on an axis."""
    return any(item.is_shard for item in (*strategy.inputs, *strategy.outputs))
