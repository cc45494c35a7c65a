"""Which choices belong to a scheme of tensor sharding; what it leaves open is the solver's.

What a scheme says is how *products with a weight* run and how their weights are stored. On each axis a strategy of such
a product has one of four roles::

    columns    the weight is sharded, the result too
    inner      the weight is sharded on what is summed over, the result is a partial sum
    rows       the result is sharded, the weight is whole
    panels     one of two axes that compute panel by panel (:mod:`autopart.passes.rules.joint`)

    1d, sp     columns or inner
    2d         panels, panels
    2.5d       panels, panels, rows
    3d         rows, then columns and inner in either order: q ranks gather each operand and scatter the result

Matrices are stored sharded on every axis; under 2.5d on the first two at least. A product that has no such strategy
keeps all of its choices.

Sequence shards are the values that follow from rows of a product. Under 1d nothing may be one. An op between products
that reads a vector of parameters and could be on the sequence (a norm) leaves the vector whole; under sp it has to be
sharded, which is then on the sequence, or on heads for a norm of each head. The ops around norms follow by cost.

On several axes the ops between products have hundreds of tuples, most of which cut dims in another order of axes, or
repeat work on several axes. Under a scheme an op's outer axis cuts first, which is how the products' results lie, and
what has a gradient is sharded on all axes but one at least, if it can be.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import fx

from autopart.analysis import Analysis
from autopart.cut_order import CutOrder, is_sharded
from autopart.folding import is_stored
from autopart.passes import graph as graphs
from autopart.passes.graph import Value
from autopart.passes.program import Role
from autopart.passes.rules import Strategy
from autopart.prices import Chosen
from autopart.runtime.placement import Kind, Placement
from autopart.tensor_scheme import TensorScheme

_ROLES: dict[TensorScheme, list[tuple[str, ...]]] = {
    TensorScheme.MEGATRON: [("columns",), ("inner",)],
    TensorScheme.SEQUENCE: [("columns",), ("inner",)],
    TensorScheme.SQUARE: [("panels", "panels")],
    TensorScheme.DEPTH: [("panels", "panels", "rows")],
    TensorScheme.CUBE: [("rows", "columns", "inner"), ("rows", "inner", "columns")],
}
Shards = set[tuple[Value, Placement]]


def weight_of(node: fx.Node) -> int | None:
    """Which operand of a contraction is a matrix of parameters, or made of one alone; None if there is none."""
    for index, value in enumerate(graphs.inputs(node)):
        source = value.node
        while graphs.is_op(source) and len(graphs.inputs(source)) == 1:
            source = graphs.inputs(source)[0].node
        if _is_parameter(source) and len(source.meta["val"].shape) > 1:
            return index
    return None


def _is_parameter(node: fx.Node) -> bool:
    return node.op == "placeholder" and node.meta["role"] is Role.PARAMETER


def role_of(strategy: Strategy, weight: int) -> str:
    """The role of a product's strategy on its axis; '' for none of the four."""
    if strategy.is_joint:
        return "panels"
    whole = not strategy.inputs[weight].is_shard
    if strategy.outputs[0].is_shard:
        return "rows" if whole else "columns"
    return "inner" if not whole and strategy.outputs[0].kind is Kind.PARTIAL else ""


@dataclass(slots=True)
class SchemeChoices:
    """The choices that fit a scheme on tensor axes of ``sizes`` ranks.

    unfit: products with a weight that have none, and so keep what they had.
    """

    scheme: TensorScheme
    analysis: Analysis
    sizes: tuple[int, ...]
    order: CutOrder
    unfit: list[fx.Node] = field(default_factory=list)
    _shards: Shards | None = None

    def fitting(self, node: fx.Node, tuples: Sequence[Chosen]) -> Sequence[Chosen]:
        """Of all choices for an op or stored tensor those that fit; all, where none does."""
        if is_stored(node):
            return self._stored(node, tuples) or tuples
        weight = self._weight(node)
        if weight is None:
            return self._between(node, tuples) or tuples
        found = [item for item in tuples if self._roles(item, weight) in _ROLES[self.scheme]]
        if len(self.sizes) > 1:
            found = [item for item in found if self.order.outer_first(node, item)]
        if not found:
            self.unfit.append(node)
        return found or self._between(node, tuples) or tuples

    def tuples(self, node: fx.Node, single: Sequence[Sequence[Strategy]]) -> Iterable[Chosen]:
        """Tuples of the axes' strategies that are worth a look: where roles are asked for, those of these roles."""
        weight = self._weight(node)
        if weight is not None:
            roles = {role for wanted in _ROLES[self.scheme] for role in wanted}
            kept = [[item for item in items if role_of(item, weight) in roles] for items in single]
            joint = "panels" in roles and node in self.analysis.joint_strategies(self.sizes)
            single = [()] * len(single) if joint else kept if all(kept) else single
        found = itertools.product(*single)
        return found if len(self.sizes) == 1 else (item for item in found if self.order.outer_first(node, item))

    def _weight(self, node: fx.Node) -> int | None:
        cost = self.analysis.costs("cuda").get(node) if graphs.is_op(node) else None
        return weight_of(node) if cost is not None and cost.contraction else None

    @staticmethod
    def _roles(chosen: Chosen, weight: int) -> tuple[str, ...]:
        return tuple(role_of(strategy, weight) for strategy in chosen)

    def _stored(self, node: fx.Node, tuples: Sequence[Chosen]) -> list[Chosen]:
        found = [item for item in tuples if self.order.stored(node, item)]
        if not _is_parameter(node) or len(node.meta["val"].shape) < 2:
            return found
        axes = 2 if self.scheme is TensorScheme.DEPTH else len(self.sizes)
        return [item for item in found if all(strategy.outputs[0].is_shard for strategy in item[:axes])]

    def _between(self, node: fx.Node, tuples: Sequence[Chosen]) -> list[Chosen]:
        if len(self.sizes) > 1:
            most = len(self.sizes) - 1
            shared = [item for item in tuples if sum(map(is_sharded, item)) >= most]
            return shared if node.meta.get("differentiable") else list(tuples)
        found = tuples if self.scheme is TensorScheme.SEQUENCE else self._whole_rows(node, tuples)
        vectors = [
            index
            for index, value in enumerate(graphs.inputs(node))
            if _is_parameter(value.node) and len(value.node.meta["val"].shape) == 1
        ]
        if not vectors or all(self._whole(node, strategy) for (strategy,) in tuples):
            return list(found)
        found = [(item,) for (item,) in found if not any(item.inputs[index].is_shard for index in vectors)]
        if self.scheme is TensorScheme.MEGATRON:
            return found
        return [(item,) for (item,) in found if item.outputs[0].is_shard]

    # -- sequence shards, on one axis -----------------------------------------------------------------------------

    def _whole_rows(self, node: fx.Node, tuples: Sequence[Chosen]) -> list[Chosen]:
        return [(strategy,) for (strategy,) in tuples if self._whole(node, strategy)]

    def _whole(self, node: fx.Node, strategy: Strategy) -> bool:
        """Whether a strategy has no sequence shard among its operands and results."""
        return self.shards.isdisjoint(_cut(node, strategy))

    @property
    def shards(self) -> Shards:
        """All placements that make a value a sequence shard."""
        if self._shards is None:
            offered = self.analysis.strategies(self.sizes[0])
            found: Shards = set()
            ops = [(node, self._weight(node)) for node in offered if graphs.is_op(node)]
            links = []
            for node, weight in ops:
                for strategy in offered[node]:
                    cut = _cut(node, strategy)
                    if weight is None:
                        links.append(cut)
                    elif role_of(strategy, weight) == "rows":
                        found |= cut
            while True:
                grown = found.union(*(cut for cut in links if not found.isdisjoint(cut)))
                if len(grown) == len(found):
                    break
                found = grown
            self._shards = found
        return self._shards


def _cut(node: fx.Node, strategy: Strategy) -> Shards:
    """The sharded values of a strategy, parameters aside."""
    sides: Iterable[tuple[Value, Placement]] = (
        *zip(graphs.inputs(node), strategy.inputs, strict=True),
        *zip(graphs.outputs(node), strategy.outputs, strict=True),
    )
    return {(value, item) for value, item in sides if item.is_shard and not _is_parameter(value.node)}
