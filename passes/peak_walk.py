"""The walk over a rank's graph of a stage, back, that allocates and frees as autograd does.

What it says is described in :mod:`autopart.passes.peak`, how it goes forward in :mod:`autopart.passes.peak_forward`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Self

from torch import fx

from autopart.passes import graph as graphs
from autopart.passes.backward_memory import (
    PASSING,
    SHARING,
    form_copies,
    scales_second,
)
from autopart.passes.beside import weight_of
from autopart.passes.emit.segments import Segment
from autopart.passes.graph import Value
from autopart.passes.peak_conversion import transition_of
from autopart.passes.peak_forward import ForwardWalk
from autopart.passes.rules import is_differentiable
from autopart.passes.saved_recurrent import cell_weights
from autopart.passes.storage import op_name


@dataclass(slots=True)
class _Viewed:
    """A tensor that the gradients of these values are, or are parts of.

    aside: W needs one of them. expanded: they are larger than it.
    """

    size: float
    owners: set[Value]
    aside: bool = False
    expanded: bool = False


@dataclass(slots=True)
class Walk(ForwardWalk):
    """summing: gradients are in messages, as the last microbatch's are.

    pending: gradients of values that wait for their op, by owner. held: of parameters, that wait for further readers.
    readers, keepers: how many ops are still to come that read a parameter, or keep a value; arrivals: that hand a
    gradient to what was received. merging: new gradients of
    parameters that have some, which are added to these when all of an op's are made.
    """

    summing: bool = False
    gradients: float = 0.0
    in_backward: float = 0.0  # of these, before W
    pending: dict[Value, float] = field(default_factory=dict)
    held: dict[fx.Node, float] = field(default_factory=dict)
    merging: float = 0.0
    readers: Counter[fx.Node] = field(default_factory=Counter)
    keepers: Counter[Value] = field(default_factory=Counter)
    arrivals: Counter[Value] = field(default_factory=Counter)
    given: dict[Value, float] = field(default_factory=dict)  # gradients of results, by the value whose each is now
    views: dict[Value, _Viewed] = field(default_factory=dict)  # gradients that are not alone in a tensor
    final: set[str] = field(default_factory=set)  # parameters whose gradients are
    started: int = 0  # messages of summed gradients
    left: float = 0.0
    left_received: float = 0.0

    def back(self, there: Set[str], summing: bool) -> Self:
        """A walk that goes back from here."""
        other = type(self)(self.code, self.now, self.now, there, summing=summing)
        other.live = dict(self.live)
        other.holding.backward = True
        return other

    def backward(self, reached: set[fx.Node], roots: Sequence[fx.Node]) -> float:
        """The most bytes. reached: by gradients, which enter at the roots."""
        code = self.code
        self.holding.await_gradients(reached)
        for node in reached:
            if not self.code.facts.passes_memory(node):
                read = [self.code.facts.parameter_read(value, node) for value in self.code.facts.operands(node)]
                self.readers.update({found[0] for found in read if found is not None})
                self.arrivals.update(self.entered(node))
        for segment in code.segments:
            if segment.path:
                self.keepers.update(self.code.entering(segment))
            else:
                self.keep(segment)
        for root in roots:
            value = self.code.facts.carrier(graphs.value_of(root))
            self.pending[value] = self.given[value] = code.gradient_size(value)
            self.add(self.pending[value])
        for value in code.results:  # nothing else holds the ends
            if not self.keepers[value]:
                self.free(value)
        self.most = self.now
        for segment in reversed(code.segments):
            made: list[Value] = []
            if segment.path:
                made = self.run_again(segment)
                self.keep(segment)
            for node in reversed(segment.nodes):
                if graphs.is_op(node) and not graphs.is_getitem(node):
                    self.step_back(node, reached)
                    if node in reached and not self.code.facts.passes_memory(node):
                        self.complete(node)
            if segment.path:
                for value in made:
                    self.free(value)
                for value in self.code.entering(segment):
                    self.drop(value)
        self.holding.end()
        self.gradients += self.holding.gradients
        return self.most

    def keep(self, segment: Segment) -> None:
        for node in segment.nodes:
            self.keepers.update(self.code.saved(node))

    def drop(self, value: Value) -> None:
        """One that kept a value is done with it."""
        self.keepers[value] -= 1
        if self.keepers[value] <= 0 and value.node.op != "placeholder":
            self.free(value)

    def weights(self) -> float:
        """The most bytes in W, which has nothing to do here."""
        return 0.0

    def run_again(self, segment: Segment) -> list[Value]:
        before = set(self.live)
        self.holding.enter_again(segment.nodes)
        kept = {value for node in segment.nodes for value in self.code.saved(node)}
        self.run_forward(self.repeated(segment.nodes), kept, again=False)
        for value in set(self.live) - before - kept:
            self.free(value)
        return [value for value in self.live if value not in before]

    def repeated(self, nodes: Sequence[fx.Node]) -> Sequence[fx.Node]:
        """Those of a segment's ops that run again: torch.utils.checkpoint stops as the last tensor is saved, which ops
        do with their operands before they compute anything.
        """
        for index in reversed(range(len(nodes))):
            node = nodes[index]
            saved = self.code.saved(node)
            if saved or self.code.inside(node):
                made = any(self.code.facts.owner_of(value) in saved for value in self.code.facts.made(node))
                computes = made or self.code.inside(node) or node in self.code.put_off_to or "forms" in node.meta
                return nodes[: index + bool(computes)]
        return ()

    def step_back(self, node: fx.Node, reached: set[fx.Node]) -> None:
        coming = [value for value in self.code.facts.made(node) if value in self.pending]
        if not self.code.stretches(node):
            self.holding.need(node)
        waiting = node in reached and coming and node in self.code.put_off_to
        if node in self.code.begun:
            self.land(node, back=True)
            self.make_put_off(node)
            self.merge()
        elif node in reached and coming:
            if transition_of(node) is None:
                self.pass_back(node, coming)
            else:
                self.convert_back(node)
            self.merge()
            if not waiting:
                self.let_go_of(coming)
        if not waiting:
            for value in self.code.saved(node):
                self.drop(value)
        self.now -= self.code.inside(node) if transition_of(node) is None else 0.0
        self.start_messages()
        for source in self.code.landing.get(node, ()):  # its gradient is complete
            if source in reached and Value(source) in self.pending:
                self.convert_back(source)
                self.merge()
                self.let_go_of([Value(source)])

    def entered(self, node: fx.Node) -> set[Value]:
        """What an op reads of what the stage received."""
        return {self.code.facts.carrier(value) for value in self.code.facts.operands(node)}.intersection(
            self.code.received
        )

    def complete(self, node: fx.Node) -> None:
        """Gradients of what was received are complete with an op's; one that is a view is copied to be sent."""
        for owner in self.entered(node):
            self.arrivals[owner] -= 1
            if not self.arrivals[owner] and owner in self.views:
                self.pending[owner] = self.code.gradient_size(owner)
                self.add(self.pending[owner])
                self.release(owner)

    def let_go_of(self, gradients: Iterable[Value]) -> None:
        """The gradients of these values are used."""
        for value in gradients:
            self.now -= self.pending.pop(value) - self.given.pop(value, 0.0)
            self.release(value)

    def convert_back(self, node: fx.Node) -> None:
        """Allocates the gradient of what a transition converts; gradients of weights are made meanwhile."""
        coming, owner = Value(node), self.code.facts.carrier(self.code.facts.operands(node)[0])
        way, size = self.code.way(node, back=True), self.code.gradient_size(self.code.facts.operands(node)[0])
        weight = self.code.facts.parameter_read(self.code.facts.operands(node)[0], node)
        if weight is not None:
            self.add(0.0, size + self.begin(node, back=True) if way.makes else 0.0)
            if not way.makes:  # the same tensor goes on
                self.now -= self.pending[coming]
                self.pending[coming] = 0.0
            self.weight_gradient(*weight)
            return
        if not way.makes:
            self.pass_on(coming, [owner])
            return
        self.add(size, self.begin(node, back=True))
        if node not in self.code.begun and node in self.code.put_off:
            self.now += way.flying
            self.make_put_off(node)
            self.now -= way.flying
        self.receive(owner, size)

    def make_put_off(self, node: fx.Node) -> None:
        """Weights' gradients beside a transition's backward; all of what they are made from is there until the end."""
        products = [product for product in self.code.put_off.get(node, ()) if Value(product) in self.pending]
        for product in products:
            source = weight_of(product)
            weight = self.code.facts.parameter_read(Value(source), product)
            narrow = 0.0
            if weight is None:  # a cast
                narrow = self.code.gradient_size(Value(source))
                weight = self.code.facts.parameter_read(self.code.facts.operands(source)[0], source)
                self.add(narrow)
            assert weight is not None
            self.weight_gradient(*weight)
            self.now -= narrow
        for product in products:
            self.let_go_of([Value(product)])
            for value in self.code.saved(product):
                self.drop(value)

    def receive(self, owner: Value, size: float) -> None:
        """A gradient of a value that has been allocated is added to those before."""
        if self.given.pop(owner, 0.0):
            self.pending[owner] = size  # the sum is where this one is
        elif owner in self.views:
            self.pending[owner] = size  # a view is added to nowhere but in a tensor of its own
            self.release(owner)
        elif owner in self.pending:
            self.now -= size  # added to what is there
        else:
            self.pending[owner] = size

    def pass_back(self, node: fx.Node, coming: Sequence[Value]) -> None:
        """Allocates the gradients of a node's operands."""
        given = sum(self.code.gradient_size(value) for value in coming)
        same: list[Value] = []
        name = op_name(node)
        put_off = weight_of(node) if node in self.code.put_off_to else None
        more: list[tuple[Value, float]] = []
        freed = self.pass_back_layers(node)
        operands = self.code.facts.operands(node)
        scaled = operands[-1] if len(operands) > 1 and scales_second(node) else None
        pieces = self.code.stretches(node)
        gone = {value for piece in pieces[1:] for value in piece.weights}
        wanted = [
            value
            for value in dict.fromkeys(operands)
            if value not in gone and is_differentiable(value) and not self.skips(value) and value.node is not put_off
        ]
        expanded = frozenset(value for value in coming if value in self.views and self.views[value].expanded)
        besides = 0.0 if name in (*SHARING, *PASSING) else self.code.passing_back(node, wanted, coming, expanded)
        self.now += min(0.0, besides)  # let go before all gradients are there
        last = [value for value in cell_weights(node) if value in wanted]
        for value in [*(value for value in wanted if value not in last), *last]:
            if last and value == last[0]:
                self.merge()
            weight = self.code.facts.parameter_read(value, node)
            if weight is not None:
                self.weight_gradient(*weight)
                continue
            owner, size = self.code.facts.carrier(value), self.code.gradient_size(value)
            if name in PASSING and abs(size - given) < 0.5 and value != scaled:
                same.append(owner)
                continue
            more.append((owner, size))
        self.pass_on(coming[0], same)
        if name in SHARING:
            self.share(coming[0], more, name == "sum")
            return
        beside = pieces[0].beside * max((size for _, size in more), default=0.0) if pieces else 0.0
        if "forms" in node.meta:
            beside += form_copies(node, self.code.gradient_size(self.code.facts.operands(node)[0]))[1]
        for _, size in more:
            self.add(size, beside)
        self.add(0.0, max(0.0, besides))
        self.now += freed - min(0.0, besides)
        for owner, size in more:
            self.receive(owner, size)

    def pass_back_layers(self, node: fx.Node) -> float:
        """Goes back through all layers of an op but the first; bytes inside of it that are let go by then."""
        pieces, freed = self.code.stretches(node), 0.0
        share = self.code.inside(node) / max(1, sum(piece.kept for piece in pieces))
        between = self.code.size(Value(node))  # as much as the gradient of what enters a layer but the first
        for piece in reversed(pieces):
            self.holding.need(node, piece.weights)
            if piece is pieces[0]:
                break
            for value in piece.weights:
                if is_differentiable(value) and not self.skips(value):
                    weight = self.code.facts.parameter_read(value, node)
                    if weight is not None:
                        self.weight_gradient(*weight)
                    else:
                        self.add(self.code.gradient_size(value))
                        self.receive(self.code.facts.carrier(value), self.code.gradient_size(value))
            entering = between if piece.layer else self.code.gradient_size(self.code.facts.operands(node)[0])
            self.add(0.0, entering * (1 + piece.beside))
            self.merge()
            if self.frees_inside:
                self.now -= piece.kept * share
                freed += piece.kept * share
        return freed

    @property
    def frees_inside(self) -> bool:
        """Whether a backward lets go of what ops keep inside."""
        return True

    def pass_on(self, coming: Value, owners: Sequence[Value]) -> None:
        """A result's gradient is that of these values too: the same tensor, or added in place to what they have."""
        size, new = self.code.gradient_size(coming), list[Value]()
        for owner in owners:
            if owner in self.given or owner in self.views:
                self.add(size)
                self.receive(owner, size)
            elif owner not in self.pending:
                new.append(owner)
        if not new:
            return
        group = self.views.get(coming)
        if coming in self.given:
            self.given.update(dict.fromkeys(new, self.given.pop(coming)))
            self.pending.update(dict.fromkeys(new, size))
        elif group is None and len(new) == 1:
            self.pending[new[0]] = self.pending[coming]
        else:
            group = group or _Viewed(self.pending[coming], set())
            group.owners.update(new)
            self.views.update(dict.fromkeys(new, group))
            self.pending.update(dict.fromkeys(new, 0.0))
        self.pending[coming] = 0.0

    def share(self, whole: Value, parts: Sequence[tuple[Value, float]], expanded: bool) -> None:
        """The gradients of these values are views of one tensor, which stays until the last has been used."""
        new: list[Value] = []
        for owner, size in parts:
            if owner in self.given or owner in self.views:
                self.add(size)
                self.receive(owner, size)
            elif owner not in self.pending:
                new.append(owner)
        if not new:
            return
        self.release(whole)
        held = self.given.get(whole, 0.0)
        group = _Viewed(self.pending[whole] - held, set(new), expanded=expanded)
        self.pending.update(dict.fromkeys(new, 0.0))
        self.views.update(dict.fromkeys(new, group))
        self.pending[whole] = held

    def release(self, value: Value) -> None:
        """The gradient of a value is used: if it is the last view of a tensor, that is freed."""
        group = self.views.pop(value, None)
        if group is not None:
            group.owners.discard(value)
            self.now -= 0.0 if group.owners or group.aside else group.size

    def skips(self, value: Value) -> bool:
        """Whether an operand's gradient is not made now."""
        return False

    def weight_gradient(self, node: fx.Node, reader: fx.Node) -> None:
        size = self.code.size(Value(node))
        if self.holding.gradient(node, reader, size):
            return
        divided = self.code.divided.level(node) == 2
        added = node.meta["name"] in self.there
        self.readers[node] -= 1
        self.add(size)
        if node in self.held:
            self.merging += size
        else:
            self.held[node] = size
            self.gradients += 0.0 if divided or added else size
        if self.readers[node] > 0:
            return
        if added and not divided:
            self.merging += self.held[node]
        self.final.add(node.meta["name"])

    def merge(self) -> None:
        """An op is through with its backward: gradients that there were before take its own in."""
        self.now -= self.merging
        self.merging = 0.0

    def start_messages(self) -> None:
        """Of gradients that are final; what the op that made the last of them had is freed by then."""
        self.holding.scatter(self.final, self.held)
        while self.summing and self.started < len(self.code.messages):
            message = self.code.messages[self.started]
            if not message.names <= self.final:
                return
            self.started += 1
            self.most = max(self.most, self.now + message.most)
            self.now += message.size - message.replaces
