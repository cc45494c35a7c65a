"""The walk over a rank's graph of a stage, forward, that allocates and frees as the emitted code does.

What it says is described in :mod:`autopart.passes.peak`; how it goes back is in :mod:`autopart.passes.peak_walk`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field

from torch import fx

from autopart.passes import graph as graphs
from autopart.passes.backward_memory import form_copies
from autopart.passes.graph import Value
from autopart.passes.peak_code import StageCode
from autopart.passes.peak_conversion import Way, transition_of
from autopart.passes.peak_weights import Holding


@dataclass(slots=True)
class ForwardWalk:
    """now, most: bytes. there: parameters that have gradients already, which are not counted. live: by who owns memory,
    what is held. stays: what is not freed. flying: transitions that were begun.
    """

    code: StageCode
    now: float = 0.0
    most: float = 0.0
    there: Set[str] = frozenset()
    live: dict[Value, float] = field(default_factory=dict)
    stays: set[Value] = field(init=False)
    flying: dict[fx.Node, Way] = field(default_factory=dict)
    holding: Holding = field(init=False)

    def __post_init__(self) -> None:
        self.stays = {*self.code.kept, *self.code.results}
        self.holding = Holding(
            self.code.divided, self.add, lambda: self.most, self.code.kind == "cpu", there=set(self.there)
        )

    def add(self, size: float, passing: float = 0.0) -> None:
        """Allocates; passing: what is freed again at once."""
        self.now += size
        self.most = max(self.most, self.now + passing)

    def allocate(self, value: Value, passing: float = 0.0) -> None:
        if value not in self.live:
            self.live[value] = self.code.size(value)
            self.add(self.live[value], passing)

    def free(self, value: Value) -> None:
        self.now -= self.live.pop(value, 0.0)

    def forward(self, arriving: bool = False) -> None:
        """arriving: the first of a call, which has just sent for divided weights."""
        if arriving:
            self.holding.begin_call()
        for value in self.code.received:
            self.allocate(value)
            self.stays.add(value)
        for run, is_layer, own in self.code.runs:
            if is_layer:
                self.holding.enter_layer(run.nodes)
            for segment in own:
                again = bool(segment.path)
                stays = {*self.stays, *self.code.entering(segment)} if again else self.stays
                self.run_forward(segment.nodes, stays, again)
                if again and len(own) > 1:
                    self.leave(segment.nodes)
            if is_layer:
                self.leave(run.nodes)
        self.leave([node for run, *_ in self.code.runs for node in run.nodes], last=True)
        self.holding.end()

    def let_go(self, sends: int) -> None:
        """Frees the results after the first ``sends``, where the backward does not need them."""
        kept = {*self.code.kept, *self.code.results[:sends]}
        for value in self.code.results[sends:]:
            if value not in kept and value.node.op == "call_function":
                self.free(value)

    def run_forward(self, nodes: Iterable[fx.Node], stays: set[Value], again: bool) -> None:
        """again: nothing but what enters and leaves stays."""
        for node in nodes:
            if graphs.is_getitem(node) or not graphs.is_op(node):
                continue
            self.holding.enter_op(node)
            self.land(node, back=False)
            if transition_of(node) is not None and not self.code.facts.makes_nothing(node):
                self.allocate(Value(node), self.begin(node, back=False))
            elif not self.code.facts.makes_nothing(node):
                for value in self.code.facts.made(node):
                    self.allocate(value)
                if "forms" in node.meta:
                    self.add(0.0, form_copies(node, self.code.gradient_size(self.code.facts.operands(node)[0]))[0])
                if not again:
                    self.add(self.code.inside(node))
                self.add(0.0, self.code.passing_forward(node))
            self.holding.leave_op()
            for owner in self.code.lifetimes.freed.get(node, ()):
                if owner not in stays and owner not in self.stays:
                    self.free(owner)
            if self.code.facts.makes_nothing(node):
                continue
            for value in self.code.facts.operands(node):
                owner = self.code.facts.owner_of(value)
                if owner.node in self.code.lifetimes.inlined and owner not in stays and self.done(owner, node):
                    self.free(owner)

    def begin(self, node: fx.Node, back: bool) -> float:
        """A transition begins; bytes besides its result for a moment, where it is waited for at once."""
        way = self.code.way(node, back)
        if node not in self.code.begun:
            return way.besides
        self.flying[node] = way
        self.add(way.flying)
        return 0.0

    def land(self, node: fx.Node, back: bool) -> None:
        """What an op reads first, or back what a transition began, is waited for."""
        for source in (node,) if back else self.code.landing.get(node, ()):
            way = self.flying.pop(source, None)
            if way is not None:
                self.add(0.0, way.landing - way.flying)
                self.now -= way.flying

    def done(self, owner: Value, node: fx.Node) -> bool:
        """Whether all readers of an unnamed value are at or before ``node``: views of it have no names either, so that
        they are nested in one statement.
        """
        return all(self.unnamed_until(user, node) for user in owner.node.users)

    def unnamed_until(self, user: fx.Node, node: fx.Node) -> bool:
        if user is node:
            return True
        if not self.code.facts.makes_nothing(user) or user not in self.code.lifetimes.inlined:
            return False
        return all(self.unnamed_until(other, node) for other in user.users)

    def leave(self, nodes: Sequence[fx.Node], last: bool = False) -> None:
        """The function with these ops returns: what is neither kept nor read elsewhere is freed."""
        inside = set(nodes)
        for node in nodes:
            for value in self.code.facts.made(node) if graphs.is_op(node) else ():
                if value in self.live and value not in self.stays and (last or not self.escapes(node, inside)):
                    self.free(value)

    def escapes(self, node: fx.Node, inside: set[fx.Node]) -> bool:
        for user in node.users:
            if user not in inside:
                return True
            if (self.code.facts.makes_nothing(user) or graphs.is_getitem(user)) and self.escapes(user, inside):
                return True
        return False
