"""The peak of a stage whose weights' gradients are left for W (:mod:`autopart.runtime.weight_split`).

An op that meets a weight is cut out: B makes the gradients of what depends on received values, and leaves for W what
the op saved and the gradients of its results. What depends on weights alone, W goes through by itself. A layer that is
computed again makes all its gradients in B; so does a stage that receives nothing that has a gradient. Of weights that
replicas divide, B makes the gradients of levels 2 and 3, which are summed there.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Self

from torch import fx

from autopart.passes import graph as graphs
from autopart.passes.backward_memory import is_parameter
from autopart.passes.graph import Value
from autopart.passes.peak_code import StageCode
from autopart.passes.peak_walk import Walk
from autopart.passes.rules import is_differentiable

_CUT, _WEIGHTS = "cut", "weights"


def sides(code: StageCode) -> dict[fx.Node, str]:
    """The ops that W has something to do for."""
    outer = {value.node for value in code.received if is_differentiable(value)}
    found: dict[fx.Node, str] = {}
    if not outer:
        return found
    again = {node for segment in code.segments if segment.path for node in segment.nodes}
    weights: set[fx.Node] = set()
    for node in code.graph.nodes:
        if is_parameter(node) and node.meta.get("trainable") and code.divided.level(node) < 2:
            weights.add(node)
        if not graphs.is_op(node) and not graphs.is_getitem(node):
            continue
        sources = [value.node for value in graphs.inputs(node) if is_differentiable(value)]
        meets = any(source in weights for source in sources)
        if node in again or any(source in outer for source in sources):
            outer.add(node)
            if meets and node not in again:
                found[node] = _CUT
        elif meets:
            weights.add(node)
            found[node] = _WEIGHTS
    return found


@dataclass(slots=True)
class SplitWalk(Walk):
    """sides: those of its ops."""

    sides: Mapping[fx.Node, str] = field(default_factory=dict)
    aside: float = 0.0  # gradients of results of ops that are cut out
    cutting: bool = False

    def back(self, there: Set[str], summing: bool) -> Self:
        other = Walk.back(self, there, summing)
        other.sides = self.sides
        return other

    def step_back(self, node: fx.Node, reached: set[fx.Node]) -> None:
        side = self.sides.get(node)
        if side is None:
            Walk.step_back(self, node, reached)
            return
        self.holding.need(node)
        coming = [value for value in self.code.facts.made(node) if value in self.pending]
        if side == _CUT and node in reached and coming:
            self.cutting = True
            self.pass_back(node, coming)
            self.cutting = False
            for value in coming:
                self.put_aside(value)

    @property
    def frees_inside(self) -> bool:
        return not self.cutting

    def put_aside(self, value: Value) -> None:
        """The gradient of a value is left for W, and with a part of a tensor all of it."""
        passed = self.pending.pop(value) == 0.0
        self.given.pop(value, None)
        group = self.views.pop(value, None)
        if group is None:
            size = self.code.gradient_size(value)
            self.aside += size
            self.now += size if passed else 0.0
        elif not group.aside:
            group.aside = True  # its owners stay
            self.aside += group.size

    def skips(self, value: Value) -> bool:
        """In B, what is a weight or depends on weights alone."""
        return self.cutting and (is_parameter(value.node) or self.sides.get(value.node) == _WEIGHTS)

    def weights(self) -> float:
        """The most bytes in W; says what it was left."""
        if not self.sides:
            return 0.0
        nodes = [node for node in reversed(list(self.code.graph.nodes)) if node in self.sides]
        saved = {value for node in nodes for value in self.code.saved(node)}
        there = {value: self.live[value] for value in saved if value in self.live}
        self.left_received = sum(size for value, size in there.items() if value.node.op == "placeholder")
        self.left = self.aside + sum(there.values()) - self.left_received
        self.left += sum(self.pending.get(value, 0.0) for node in nodes for value in self.code.facts.made(node))
        self.left += sum(map(self.code.inside, nodes))
        self.now = self.most = self.left + self.left_received
        for node in nodes:
            wanted: list[Value] = []
            for value in () if self.code.facts.passes_memory(node) else dict.fromkeys(self.code.facts.operands(node)):
                weight = self.code.facts.parameter_read(value, node)
                if weight is not None and self.readers[weight[0]] > 0 and is_differentiable(Value(weight[0])):
                    self.weight_gradient(*weight)
                    wanted.append(value)
            if wanted:
                self.add(0.0, max(0.0, self.code.passing_back(node, wanted, self.code.facts.made(node), ())))
            self.merge()
            for value in self.code.saved(node):
                self.drop(value)
            self.start_messages()
        return self.most
