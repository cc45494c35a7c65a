"""What the solver may choose from: for every op and stored tensor the tuples of strategies, one per tensor axis."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import fx

from autopart.analysis import Analysis
from autopart.folding import is_stored
from autopart.passes.rules import compatible
from autopart.prices import Chosen
from autopart.runtime.placement import nested


@dataclass(slots=True)
class Offers:
    """The choices on tensor axes of ``sizes`` ranks, outermost first."""

    analysis: Analysis
    sizes: tuple[int, ...]
    _found: dict[fx.Node, tuple[Chosen, ...]] = field(default_factory=dict)

    def of(self, node: fx.Node) -> tuple[Chosen, ...]:
        """Tuples whose cuts nest; for a parameter or buffer the ways to store it."""
        if node not in self._found:
            self._found[node] = tuple(self._tuples(node))
        return self._found[node]

    def _tuples(self, node: fx.Node) -> Sequence[Chosen]:
        single = [
            self.analysis.strategies(parts, [*self.sizes[:index], *self.sizes[index + 1 :]])[node]
            for index, parts in enumerate(self.sizes)
        ]
        tuples = itertools.product(*single)
        if is_stored(node):
            return [item for item in tuples if nested([strategy.outputs[0] for strategy in item], self.sizes)]
        return [item for item in tuples if compatible(node, item, self.sizes, self.analysis.rules)]
