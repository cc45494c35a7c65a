"""What the solver may choose from: for every op and stored tensor the tuples of strategies, one per tensor axis.

On three axes those that nest are thousands for an op, and pricing conversions between all of them takes minutes. There
only such are offered as cut tightly (:mod:`autopart.cut_order`), and where a gradient flows are sharded on all axes but
one at least.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import fx

from autopart.analysis import Analysis
from autopart.cut_order import CutOrder, is_sharded
from autopart.folding import is_stored
from autopart.passes.rules import compatible
from autopart.prices import Chosen
from autopart.runtime.placement import nested
from autopart.scheme_choices import SchemeChoices
from autopart.tensor_scheme import TensorScheme

# Axes on which all tuples that nest are offered.
_ALL_TUPLES = 2


@dataclass(slots=True)
class Offers:
    """The choices on tensor axes of ``sizes`` ranks, outermost first, that fit a scheme.

    whole: names of parameters that are stored whole, on replicas too.
    """

    analysis: Analysis
    sizes: tuple[int, ...]
    scheme: TensorScheme = TensorScheme.AUTO
    whole: frozenset[str] = frozenset()
    _found: dict[fx.Node, tuple[Chosen, ...]] = field(default_factory=dict)
    _choices: SchemeChoices = field(init=False)
    _order: CutOrder = field(init=False)

    def __post_init__(self) -> None:
        self._order = CutOrder(self.analysis, self.sizes)
        self._choices = SchemeChoices(self.scheme, self.analysis, self.sizes, self._order)

    def of(self, node: fx.Node) -> tuple[Chosen, ...]:
        """Tuples whose cuts nest; for a parameter or buffer the ways to store it."""
        if node not in self._found:
            found = self._tuples(node)
            free = self.scheme is TensorScheme.AUTO
            self._found[node] = tuple(found if free else self._choices.fitting(node, found))
        return self._found[node]

    @property
    def unfit(self) -> tuple[fx.Node, ...]:
        """Products with a weight that were asked for and have no choice that fits the scheme."""
        return tuple(self._choices.unfit)

    def _tuples(self, node: fx.Node) -> Sequence[Chosen]:
        single = [
            self.analysis.strategies(parts, [*self.sizes[:index], *self.sizes[index + 1 :]])[node]
            for index, parts in enumerate(self.sizes)
        ]
        tuples = itertools.product(*single)
        if is_stored(node):
            if node.meta["name"] in self.whole:
                return [item for item in tuples if not any(strategy.outputs[0].is_shard for strategy in item)]
            found = [item for item in tuples if nested([strategy.outputs[0] for strategy in item], self.sizes)]
            return [item for item in found if self._order.stored(node, item)] if self._many else found
        if self.scheme is not TensorScheme.AUTO:
            worth = self._choices.tuples(node, single)
        elif self._many:
            worth = (item for item in tuples if self._order.tight(node, item))
        else:
            worth = tuples
        rules, rule = self.analysis.rules, self.analysis.bound.get(node)
        found = [item for item in worth if compatible(node, item, self.sizes, rules, rule)]
        found += self.analysis.joint_strategies(self.sizes).get(node, ())
        if self._many and node.meta.get("differentiable"):
            shared = [item for item in found if sum(map(is_sharded, item)) >= len(self.sizes) - 1]
            return shared or found
        return found

    @property
    def _many(self) -> bool:
        """Whether only a part of all tuples is offered unasked, those that cut tightly and share their work."""
        return self.scheme is TensorScheme.AUTO and len(self.sizes) > _ALL_TUPLES
