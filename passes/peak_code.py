"""A rank's code of a stage as :mod:`autopart.passes.peak_walk` goes through it, several times: what never changes."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from autopart.passes import graph as graphs
from autopart.passes.ahead import begun
from autopart.passes.amounts import value_bytes
from autopart.passes.backward_memory import backward_copies, broadcast, carrier, parameter_read, passes_memory
from autopart.passes.beside import products_beside, weight_of
from autopart.passes.conversion import Axes
from autopart.passes.emit.layers import Run
from autopart.passes.emit.releases import Lifetimes
from autopart.passes.emit.segments import Segment, segments_of
from autopart.passes.graph import Value
from autopart.passes.kept import entering, held_bytes, inside_bytes, kept_values, owner_of, share_of_rank
from autopart.passes.op_memory import Passing, passing
from autopart.passes.peak_conversion import Way, transition_of, way
from autopart.passes.peak_weights import Divided
from autopart.passes.program import Role
from autopart.passes.rules import is_differentiable
from autopart.passes.saved import saved_tensors
from autopart.passes.saved_recurrent import Stretch, stretches
from autopart.passes.storage import is_view, op_name, shares_memory

# Losses that are summed where each element's was: the number keeps all of that memory.
_SUMMED_IN_PLACE = ("mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss")


@dataclass(frozen=True, slots=True)
class Message:
    """Gradients that are summed together, in the order in which messages start.

    names: of their parameters. size: bytes that the message takes besides them, 0 where it is the only gradient itself.
    replaces: bytes of gradients that are freed when it has been made. most: bytes besides them while it is made.
    """

    names: frozenset[str]
    size: float
    replaces: float
    most: float


def _makes_nothing(node: fx.Node) -> bool:
    return is_view(node) or shares_memory(node)


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What walks over a graph ask of its nodes many times, each found once. The graph may not change meanwhile.

    operands, made: tensors that an op reads and makes. makes_nothing: whether a node's results are its operands'
    memory. owner_of: :func:`autopart.passes.kept.owner_of`. The others: of :mod:`autopart.passes.backward_memory`.
    """

    operands: Callable[[fx.Node], Sequence[Value]] = field(default_factory=lambda: functools.cache(graphs.inputs))
    made: Callable[[fx.Node], Sequence[Value]] = field(default_factory=lambda: functools.cache(graphs.outputs))
    makes_nothing: Callable[[fx.Node], bool] = field(default_factory=lambda: functools.cache(_makes_nothing))
    owner_of: Callable[[Value], Value] = field(default_factory=lambda: functools.cache(owner_of))
    passes_memory: Callable[[fx.Node], bool] = field(default_factory=lambda: functools.cache(passes_memory))
    carrier: Callable[[Value], Value] = field(default_factory=lambda: functools.cache(carrier))
    parameter_read: Callable[[Value, fx.Node], tuple[fx.Node, fx.Node] | None] = field(
        default_factory=lambda: functools.cache(parameter_read)
    )


@dataclass(slots=True)
class StageCode:
    """graph: of one rank, for microbatches of ``batch`` samples; see :func:`autopart.passes.peak.peak` for the rest."""

    graph: fx.Graph
    axes: Axes
    batch: int
    recompute: Collection[str]
    lifetimes: Lifetimes
    kind: str
    messages: Sequence[Message] = ()
    divided: Divided = field(default_factory=Divided)
    splits: bool = False
    runs: list[tuple[Run, bool, list[Segment]]] = field(init=False)
    results: list[Value] = field(init=False)  # owners
    kept: set[Value] = field(init=False)
    put_off: dict[fx.Node, tuple[fx.Node, ...]] = field(init=False)  # products, by the transition beside whose backward
    put_off_to: dict[fx.Node, fx.Node] = field(init=False)  # the transition, by product
    begun: set[fx.Node] = field(init=False)  # transitions that are begun and waited for later
    landing: dict[fx.Node, list[fx.Node]] = field(init=False)  # these, by what reads them first
    received: list[Value] = field(init=False)
    facts: NodeFacts = field(default_factory=NodeFacts)
    _saved: dict[fx.Node, tuple[Value, ...]] = field(default_factory=dict)
    _sizes: dict[Value, float] = field(default_factory=dict)
    _gradients: dict[Value, float] = field(default_factory=dict)
    _shares: dict[fx.Node, float] = field(default_factory=dict)
    _inside: dict[fx.Node, float] = field(default_factory=dict)
    _stretches: dict[fx.Node, list[Stretch]] = field(default_factory=dict)
    _measured: dict[object, Passing | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.runs = segments_of(self.graph, self.recompute)
        self.begun, self.landing = set(), {}
        flying = {} if self.splits else begun(self.graph, self.recompute)  # split backwards wait at once
        for segment in self.segments:
            for node in segment.nodes:
                for source in dict.fromkeys(graphs.tensors_read(node)):
                    if source in flying and flying[source] and source not in self.begun:
                        self.begun.add(source)
                        self.landing.setdefault(node, []).append(source)
        self.runs = [
            (run, is_layer, [replace(item, nodes=_executed(item.nodes, self.lifetimes.inlined)) for item in own])
            for run, is_layer, own in self.runs
        ]
        self.divided.arrange((run, is_layer) for run, is_layer, _ in self.runs)
        found = {} if self.splits else products_beside(self.graph, self.recompute)
        self.put_off = {
            node: products
            for node, products in found.items()
            if not any(self.divided.gathers(weight_of(product), product) for product in products)
        }
        self.put_off_to = {product: node for node, products in self.put_off.items() for product in products}
        self.results = [self.facts.owner_of(graphs.value_of(node)) for node in graphs.results(self.graph)]
        self.kept = set(kept_values(self.graph, self.recompute, self.kind))
        self.received = [
            Value(node)
            for node in self.graph.nodes
            if node.op == "placeholder" and node.meta.get("role") is Role.RECEIVED
        ]

    @property
    def segments(self) -> list[Segment]:
        return [segment for _, _, own in self.runs for segment in own]

    def entering(self, segment: Segment) -> list[Value]:
        """What stays for a segment that runs again."""
        return entering(segment, self.kind)

    def size(self, value: Value) -> float:
        """Bytes of a value on the rank."""
        if value not in self._sizes:
            share = share_of_rank(value.node, self.axes, value.index)
            held = held_bytes(value).at(self.batch) * share
            if op_name(value.node) in _SUMMED_IN_PLACE and not value.fake.dim():
                held = max(held, self.gradient_size(self.facts.operands(value.node)[0]))
            self._sizes[value] = held
        return self._sizes[value]

    def gradient_size(self, value: Value) -> float:
        """Bytes of a value's gradient on the rank."""
        if value not in self._gradients:
            share = share_of_rank(value.node, self.axes, value.index)
            self._gradients[value] = value_bytes(value).at(self.batch) * share
        return self._gradients[value]

    def inside(self, node: fx.Node) -> float:
        """Bytes that an op keeps besides its operands and results."""
        if node not in self._inside:
            self._inside[node] = inside_bytes(node, self.axes, self.batch, self.kind)
        return self._inside[node]

    def passing_forward(self, node: fx.Node) -> float:
        """Bytes that an op makes besides its results and what it keeps, at most."""
        found = self._passing(node, tuple(filter(is_differentiable, self.facts.operands(node))))
        return 0.0 if found is None else found.forward * self._share(node)

    def passing_back(
        self, node: fx.Node, wanted: Sequence[Value], coming: Sequence[Value], expanded: Collection[Value]
    ) -> float:
        """Bytes that an op's backward makes besides gradients, at most.

        wanted: the operands whose gradients are made. coming: the results that have gradients; expanded: those of these
        that are seen in more dims than they have in memory.
        """
        found = self._passing(node, tuple(wanted), tuple((value, value in expanded) for value in coming))
        if found is not None:
            return found.backward * self._share(node)
        largest = max((self.gradient_size(value) for value in wanted), default=0.0)
        wide = sum(
            max(0.0, self.gradient_size(Value(node)) - self.gradient_size(value))
            for value in wanted
            if broadcast(value, node)
        )
        several = Counter(self.facts.operands(node))  # one gradient of each, which are added up behind
        again = sum((several[value] - 1) * self.gradient_size(value) for value in wanted)
        return backward_copies(node) * largest + wide + again

    def _passing(
        self, node: fx.Node, wanted: tuple[Value, ...], coming: tuple[tuple[Value, bool], ...] = ()
    ) -> Passing | None:
        key = node, wanted, coming
        if key not in self._measured:
            self._measured[key] = passing(node, self.batch, wanted, coming)
        return self._measured[key]

    def _share(self, node: fx.Node) -> float:
        """The part that a rank has of the largest tensor of an op."""
        if node not in self._shares:
            values = [*self.facts.operands(node), *self.facts.made(node)]
            largest = max(values, key=lambda value: value_bytes(value).at(self.batch))
            self._shares[node] = share_of_rank(largest.node, self.axes, largest.index)
        return self._shares[node]

    def stretches(self, node: fx.Node) -> list[Stretch]:
        """What an op's backward goes through one by one, in the order of the forward; none where it is one piece."""
        if node not in self._stretches:
            self._stretches[node] = stretches(node, self.kind, self.batch)
        return self._stretches[node]

    def saved(self, node: fx.Node) -> tuple[Value, ...]:
        """The owners of what an op keeps for its backward, once each."""
        if node not in self._saved:
            saved = saved_tensors(node, self.kind) if transition_of(node) is None else ()
            self._saved[node] = tuple(dict.fromkeys(map(self.facts.owner_of, saved)))
        return self._saved[node]

    def way(self, node: fx.Node, back: bool = False) -> Way:
        """What a transition takes of memory, or back its gradient."""
        call = transition_of(node)
        assert call is not None
        (operand,) = self.facts.operands(node)
        given, made = self.gradient_size(operand), self.gradient_size(Value(node))
        if back:
            given, made = made, given
        return way(call, back, given, made, dict(self.axes)[node.meta["transition"][0]], self.kind == "cpu")


def _executed(nodes: Sequence[fx.Node], inlined: Collection[fx.Node]) -> tuple[fx.Node, ...]:
    """Nodes in the order in which the code runs them: what has no name runs where its only reader reads it, operands
    from left to right. So a scan's readouts run when all its states are there, if they are written into their stack.
    """
    inside, found = set(nodes), dict[fx.Node, None]()

    def run(node: fx.Node) -> None:
        for source in node.all_input_nodes:
            if source in inlined and source in inside:
                run(source)
        found[node] = None

    for node in nodes:
        if node not in inlined or inside.isdisjoint(node.users):
            run(node)
    return tuple(found)
