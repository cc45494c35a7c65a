"""The walk over a rank's graph of a stage, forward and back, that allocates and frees as the emitted code does.

What it says is described in :mod:`autopart.passes.peak`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Self

from torch import fx

from autopart.passes import graph as graphs
from autopart.passes.amounts import stored_bytes, value_bytes
from autopart.passes.conversion import Axes
from autopart.passes.emit.layers import Run
from autopart.passes.emit.segments import Segment, segments_of
from autopart.passes.graph import Value
from autopart.passes.kept import entering, inside_bytes, kept_values, owner_of, share_of_rank, shares_memory
from autopart.passes.program import Role
from autopart.passes.rules import is_differentiable
from autopart.passes.saved import saved_tensors
from autopart.passes.storage import is_view, op_name
from autopart.runtime.buckets import messages_of

# Tensors of an operand's size that the backward of an op makes on its way.
_BACKWARD_COPIES = {"cross_entropy_loss": 1, "pow": 2}
# Views whose backward makes a tensor of the operand's size; that of the others is a view.
_MAKING = {
    *("split", "split_with_sizes", "chunk", "unbind", "select", "slice", "narrow", "tensor_split"),
    *("expand", "expand_as", "broadcast_tensors"),
}
# Ops whose operands' gradients are parts of the result's.
_CONCATENATING = ("cat", "concat", "concatenate")
# Ops whose backward hands the result's gradient on as it is, where shapes agree.
_PASSING = ("add", "sub", "clone", "contiguous", "alias")


def backward_copies(node: fx.Node) -> int:
    """Tensors of its largest operand's size that an op's backward makes besides gradients."""
    return _BACKWARD_COPIES.get(op_name(node), 0)


def passes_memory(node: fx.Node) -> bool:
    """Whether neither the op nor its backward makes a tensor."""
    return is_view(node) and op_name(node) not in _MAKING


@dataclass(slots=True)
class _Viewed:
    """A tensor of which the gradients of these values are parts."""

    size: float
    owners: set[Value]


@dataclass(slots=True)
class Walk:
    graph: fx.Graph
    axes: Axes
    batch: int
    recompute: set[str]
    inlined: set[fx.Node]
    kind: str
    summed: tuple[str, ...] = ()
    now: float = 0.0
    most: float = 0.0
    gradients: float = 0.0
    live: dict[Value, float] = field(default_factory=dict)
    runs: list[tuple[Run, bool, list[Segment]]] = field(init=False)
    stays: set[Value] = field(init=False)
    given: dict[Value, float] = field(init=False)  # gradients of results, by the value whose gradient each is now
    views: dict[Value, _Viewed] = field(default_factory=dict)  # gradients that are parts of a larger tensor
    summing: bool = False
    final: set[str] = field(default_factory=set)  # parameters whose gradients are
    started: int = 0  # messages of summed gradients
    state: tuple[dict[Value, float], dict[fx.Node, float], Counter[fx.Node], Counter[Value]] = field(init=False)
    left: float = 0.0
    left_received: float = 0.0

    def __post_init__(self) -> None:
        self.runs = segments_of(self.graph, self.recompute)
        results = {owner_of(graphs.value_of(node)) for node in graphs.results(self.graph)}
        self.stays = {*kept_values(self.graph, self.recompute, self.kind), *results}
        self.given = {}

    def copy(self) -> Self:
        own = self.graph, self.axes, self.batch, self.recompute, self.inlined, self.kind, self.summed
        other = type(self)(*own, self.now, self.most)
        other.live = dict(self.live)
        return other

    def size(self, value: Value) -> float:
        return stored_bytes(value.fake).at(self.batch) * share_of_rank(value.node, self.axes, value.index)

    def gradient_size(self, value: Value) -> float:
        return value_bytes(value).at(self.batch) * share_of_rank(value.node, self.axes, value.index)

    def add(self, size: float, passing: float = 0.0) -> None:
        """Allocates; passing: what is freed again at once."""
        self.now += size
        self.most = max(self.most, self.now + passing)

    def allocate(self, value: Value) -> None:
        if value not in self.live:
            self.live[value] = self.size(value)
            self.add(self.live[value])

    def free(self, value: Value) -> None:
        self.now -= self.live.pop(value, 0.0)

    # -- forward --------------------------------------------------------------------------------------------------

    def forward(self) -> None:
        for node in self.graph.nodes:
            if node.op == "placeholder" and node.meta.get("role") is Role.RECEIVED:
                self.allocate(Value(node))
                self.stays.add(Value(node))
        outside: list[fx.Node] = []
        for run, is_layer, own in self.runs:
            for segment in own:
                again = bool(segment.path)
                stays = {*self.stays, *entering(segment)} if again else {*self.stays}
                self.run_forward(segment.nodes, stays, again)
                if again and len(own) > 1:
                    self.leave(segment.nodes)
            if is_layer:
                self.leave(run.nodes)
            else:
                outside += run.nodes
        self.leave(outside, last=True)

    def let_go(self, sends: int) -> None:
        """Frees the results after the first ``sends``, where the backward does not need them."""
        results = [owner_of(graphs.value_of(node)) for node in graphs.results(self.graph)]
        kept = {*kept_values(self.graph, self.recompute, self.kind), *results[:sends]}
        for value in results[sends:]:
            if value not in kept and value.node.op == "call_function":
                self.free(value)

    def run_forward(self, nodes: Iterable[fx.Node], stays: set[Value], again: bool) -> None:
        """again: nothing but what enters and leaves stays."""
        for node in nodes:
            if graphs.is_getitem(node) or not graphs.is_op(node):
                continue
            if not is_view(node) and not shares_memory(node):
                for value in graphs.outputs(node):
                    self.allocate(value)
                if not again:
                    self.add(inside_bytes(node, self.axes, self.batch, self.kind))
            for value in graphs.inputs(node):
                owner = owner_of(value)
                if owner.node in self.inlined and owner not in stays and self.done(owner, node):
                    self.free(owner)

    def done(self, owner: Value, node: fx.Node) -> bool:
        """Whether all readers of an unnamed value, which are nested in one statement, are at or before ``node``."""
        waiting = [user for user in owner.node.users if user is not node]
        return all(is_view(user) and user in self.inlined for user in waiting)

    def leave(self, nodes: Sequence[fx.Node], last: bool = False) -> None:
        """The function with these ops returns: what is neither kept nor read elsewhere is freed."""
        inside = set(nodes)
        for node in nodes:
            for value in graphs.outputs(node) if graphs.is_op(node) else ():
                if value in self.live and value not in self.stays and (last or not self.escapes(node, inside)):
                    self.free(value)

    def escapes(self, node: fx.Node, inside: set[fx.Node]) -> bool:
        for user in node.users:
            if user not in inside:
                return True
            if (is_view(user) or graphs.is_getitem(user)) and self.escapes(user, inside):
                return True
        return False

    # -- backward -------------------------------------------------------------------------------------------------

    def backward(self, reached: set[fx.Node], roots: Sequence[fx.Node], adding: bool) -> float:
        """The most bytes. adding: the parameters' gradients are there already, and not counted."""
        pending: dict[Value, float] = {}  # gradients of values, by owner, that wait for their op
        readers: Counter[fx.Node] = Counter()
        for node in reached:
            for source in set(node.all_input_nodes):
                if source.op == "placeholder" and source.meta.get("role") is Role.PARAMETER:
                    readers[source] += 1
        keepers: Counter[Value] = Counter()
        segments = [segment for _, _, own in self.runs for segment in own]
        for segment in segments:
            if segment.path:
                keepers.update(entering(segment))
            else:
                for node in segment.nodes:
                    keepers.update(set(map(owner_of, saved_tensors(node, self.kind))))
        held: dict[fx.Node, float] = {}  # gradients of parameters that wait for further readers
        self.state = pending, held, readers, keepers
        self.given = {}
        for root in roots:
            value = _carrier(graphs.value_of(root))
            pending[value] = self.given[value] = self.gradient_size(value)
            self.add(pending[value])
        for node in graphs.results(self.graph):  # nothing else holds the ends
            value = owner_of(graphs.value_of(node))
            if not keepers[value]:
                self.free(value)
        self.most = self.now
        for segment in reversed(segments):
            made: list[Value] = []
            if segment.path:
                made = self.run_again(segment)
                for node in segment.nodes:
                    keepers.update(set(map(owner_of, saved_tensors(node, self.kind))))
            for node in reversed(segment.nodes):
                if graphs.is_op(node) and not graphs.is_getitem(node):
                    self.step_back(node, reached, pending, held, readers, keepers, adding)
            if segment.path:
                for value in made:
                    self.free(value)
                for value in entering(segment):
                    keepers[value] -= 1
                    if keepers[value] <= 0 and value.node.op != "placeholder":
                        self.free(value)
        return self.most

    def weights(self, adding: bool) -> float:
        """The most bytes in W, which has nothing to do here."""
        return 0.0

    def run_again(self, segment: Segment) -> list[Value]:
        before = set(self.live)
        kept = {owner_of(value) for node in segment.nodes for value in saved_tensors(node, self.kind)}
        self.run_forward(segment.nodes, kept, again=False)
        for value in set(self.live) - before - kept:
            self.free(value)
        return [value for value in self.live if value not in before]

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
        coming = [value for value in graphs.outputs(node) if value in pending]
        if node in reached and coming:
            self.pass_back(node, coming, pending, held, readers, adding)
            for value in coming:
                self.now -= pending.pop(value) - self.given.pop(value, 0.0)
                self.release(value)
        saved = set(map(owner_of, saved_tensors(node, self.kind)))
        for value in saved:
            keepers[value] -= 1
            if keepers[value] <= 0 and value.node.op != "placeholder":
                self.free(value)
        inside = inside_bytes(node, self.axes, self.batch, self.kind)
        self.now -= inside if inside and "transition" not in node.meta else 0.0

    def pass_back(
        self,
        node: fx.Node,
        coming: Sequence[Value],
        pending: dict[Value, float],
        held: dict[fx.Node, float],
        readers: Counter[fx.Node],
        adding: bool,
    ) -> None:
        """Allocates the gradients of a node's operands."""
        given = sum(pending[value] for value in coming)
        passed = False
        name = op_name(node)
        more: list[tuple[Value, float]] = []
        for value in dict.fromkeys(graphs.inputs(node)):
            if not is_differentiable(value) or self.skips(value):
                continue
            if value.node.op == "placeholder" and value.node.meta.get("role") is Role.PARAMETER:
                self.weight_gradient(value.node, held, readers, adding)
                continue
            owner, size = _carrier(value), self.gradient_size(value)
            if name in _PASSING and not passed and abs(size - given) < 0.5 and owner not in pending:
                passed = True  # the same tensor goes on
                pending[owner], pending[coming[0]] = size, 0.0
                if coming[0] in self.given:
                    self.given[owner] = self.given.pop(coming[0])
                continue
            more.append((owner, size))
        if name in _CONCATENATING and coming[0] not in self.given:
            self.share(coming[0], [owner for owner, _ in more if owner not in pending], pending)
            return
        copies = backward_copies(node)
        largest = max((size for _, size in more), default=0.0)
        for _, size in more:
            self.add(size, copies * largest)
        for owner, size in more:
            if self.given.pop(owner, 0.0):
                pending[owner] = size  # the sum is where this one is
            elif owner in self.views:
                pending[owner] = size  # a view is added to nowhere but in a tensor of its own
                self.release(owner)
            elif owner in pending:
                self.now -= size  # added to what is there
            else:
                pending[owner] = size

    def share(self, whole: Value, owners: Sequence[Value], pending: dict[Value, float]) -> None:
        """The gradients of what is concatenated are views of one tensor, which stays until the last has been used."""
        self.release(whole)
        group = _Viewed(pending[whole], set(owners))
        pending.update(dict.fromkeys(owners, 0.0))
        self.views.update(dict.fromkeys(owners, group))
        pending[whole] = 0.0 if owners else pending[whole]

    def release(self, value: Value) -> None:
        """The gradient of a value is used: if it is the last view of a tensor, that is freed."""
        group = self.views.pop(value, None)
        if group is not None:
            group.owners.discard(value)
            self.now -= 0.0 if group.owners else group.size

    def skips(self, value: Value) -> bool:
        """Whether an operand's gradient is not made now."""
        return False

    def weight_gradient(
        self, node: fx.Node, held: dict[fx.Node, float], readers: Counter[fx.Node], adding: bool
    ) -> None:
        size = self.size(Value(node))
        readers[node] -= 1
        self.add(size)
        if node in held:
            self.now -= size
        else:
            held[node] = size
            self.gradients += size
        if readers[node] > 0:
            return
        if adding:
            self.now -= held[node]
        self.final.add(node.meta["name"])
        while self.summing and self.started < len(self.messages):
            names, size = self.messages[self.started]
            if not names <= self.final:
                return
            self.started += 1
            self.add(0.0, size)  # the message, before the gradients that it takes the place of are freed

    @property
    def messages(self) -> list[tuple[set[str], float]]:
        """The names of each message's gradients, and its bytes where they are copied."""
        there = [node for node in self.graph.nodes if node.op == "placeholder" and node.meta.get("trainable")]
        sizes = {node.meta["name"]: self.size(Value(node)) for node in there}
        types = {node.meta["name"]: node.meta["val"].dtype for node in there}
        runs = messages_of([(name, types[name], sizes[name]) for name in self.summed if name in sizes])
        return [(set(names), sum(sizes[name] for name in names) if len(names) > 1 else 0.0) for names, _ in runs]


def _carrier(value: Value) -> Value:
    """The value whose gradient the value's gradient is a view of."""
    while passes_memory(value.node) or shares_memory(value.node):
        value = graphs.inputs(value.node)[0]
    return value
