"""The peak of a stage whose weights' gradients are left for W (:mod:`autopart.runtime.weight_split`).

An op that meets a weight is cut out: B makes the gradients of what depends on received values, and leaves for W what
the op saved and the gradients of its results. What depends on weights alone, W goes through by itself. A layer that is
computed again makes all its gradients in B; so does a stage that receives nothing that has a gradient.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from torch import fx

from autopart.passes import graph as graphs
from autopart.passes.graph import Value
from autopart.passes.kept import inside_bytes, owner_of
from autopart.passes.peak_walk import Walk
from autopart.passes.program import Role
from autopart.passes.rules import is_differentiable
from autopart.passes.saved import saved_tensors

_CUT, _WEIGHTS = "cut", "weights"


@dataclass(slots=True)
class SplitWalk(Walk):
    sides: dict[fx.Node, str] = field(default_factory=dict)  # of the ops that W has something to do for
    aside: float = 0.0  # gradients of results of ops that are cut out
    cutting: bool = False

    def __post_init__(self) -> None:
        Walk.__post_init__(self)
        outer = {
            node
            for node in self.graph.nodes
            if node.op == "placeholder" and node.meta.get("role") is Role.RECEIVED and is_differentiable(Value(node))
        }
        if not outer:
            return
        again = {node for _, _, own in self.runs for segment in own if segment.path for node in segment.nodes}
        weights: set[fx.Node] = set()
        for node in self.graph.nodes:
            if node.op == "placeholder" and node.meta.get("role") is Role.PARAMETER and node.meta.get("trainable"):
                weights.add(node)
            if not graphs.is_op(node) and not graphs.is_getitem(node):
                continue
            sources = [value.node for value in graphs.inputs(node) if is_differentiable(value)]
            meets = any(source in weights for source in sources)
            if node in again or any(source in outer for source in sources):
                outer.add(node)
                if meets and node not in again:
                    self.sides[node] = _CUT
            elif meets:
                weights.add(node)
                self.sides[node] = _WEIGHTS

    def step_back(
        self,
        node: fx.Node,
        reached: set[fx.Node],
        pending: dict[Value, float],
        held: dict[fx.Node, float],
        readers: Counter[fx.Node],
        keepers: Counter[Value],
        adding: bool,
    ) -> None:
        side = self.sides.get(node)
        if side is None:
            Walk.step_back(self, node, reached, pending, held, readers, keepers, adding)
            return
        coming = [value for value in graphs.outputs(node) if value in pending]
        if side == _CUT and node in reached and coming:
            self.cutting = True
            self.pass_back(node, coming, pending, held, readers, adding)
            self.cutting = False
            for value in coming:
                self.aside += self.gradient_size(value)
                self.now += self.gradient_size(value) if pending.pop(value) == 0.0 else 0.0
                self.given.pop(value, None)
                self.release(value)

    def skips(self, value: Value) -> bool:
        """In B, what is a weight or depends on weights alone."""
        if not self.cutting:
            return False
        is_weight = value.node.op == "placeholder" and value.node.meta.get("role") is Role.PARAMETER
        return is_weight or self.sides.get(value.node) == _WEIGHTS

    def weights(self, adding: bool) -> float:
        """The most bytes in W; says what it was left."""
        if not self.sides:
            return 0.0
        pending, held, readers, keepers = self.state
        nodes = [node for node in reversed(list(self.graph.nodes)) if node in self.sides]
        saved = {owner_of(value) for node in nodes for value in saved_tensors(node, self.kind)}
        there = {value: self.live[value] for value in saved if value in self.live}
        self.left_received = sum(size for value, size in there.items() if value.node.op == "placeholder")
        self.left = self.aside + sum(there.values()) - self.left_received
        self.left += sum(pending.get(value, 0.0) for node in nodes for value in graphs.outputs(node))
        self.left += sum(inside_bytes(node, self.axes, self.batch, self.kind) for node in nodes)
        self.now = self.most = self.left + self.left_received
        for node in nodes:
            weights = [
                value.node
                for value in dict.fromkeys(graphs.inputs(node))
                if value.node.op == "placeholder" and value.node.meta.get("role") is Role.PARAMETER
            ]
            for weight in weights:
                if readers[weight] > 0 and is_differentiable(Value(weight)):
                    self.weight_gradient(weight, held, readers, adding)
            for value in set(map(owner_of, saved_tensors(node, self.kind))):
                keepers[value] -= 1
                if keepers[value] <= 0 and value.node.op != "placeholder":
                    self.free(value)
        return self.most
