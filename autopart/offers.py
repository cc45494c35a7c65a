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
from autopart.scheme_choices import SchemeChoices
from autopart.tensor_scheme import TensorScheme


@dataclass(slots=True)
class Offers:
    """The choices on tensor axes of ``sizes`` ranks, outermost first, that fit a scheme.

    whole: names of parameters that are stored whole.
    """

    analysis: Analysis
    sizes: tuple[int, ...]
    scheme: TensorScheme = TensorScheme.AUTO
    whole: frozenset[str] = frozenset()
    _found: dict[fx.Node, tuple[Chosen, ...]] = field(default_factory=dict)
    _choices: SchemeChoices = field(init=False)

    def __post_init__(self) -> None:
        self._choices = SchemeChoices(self.scheme, self.analysis, self.sizes)

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
        if is_stored(node):
            tuples = itertools.product(*single)
            if node.meta["name"] in self.whole:
                return [item for item in tuples if not any(strategy.outputs[0].is_shard for strategy in item)]
            return [item for item in tuples if nested([strategy.outputs[0] for strategy in item], self.sizes)]
        free = self.scheme is TensorScheme.AUTO
        worth = itertools.product(*single) if free else self._choices.tuples(node, single)
        rules, rule = self.analysis.rules, self.analysis.bound.get(node)
        found = [item for item in worth if compatible(node, item, self.sizes, rules, rule)]
        return [*found, *self.analysis.joint_strategies(self.sizes).get(node, ())]
