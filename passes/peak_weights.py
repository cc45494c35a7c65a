"""What a rank has in memory of weights that replicas divide (ZeRO), beside shares, while a walk goes over its code.

As :mod:`autopart.runtime.data_weights` and :mod:`autopart.runtime.gradients` do it. Level 3: a statement of the code
gathers a *unit*; the next one is on its way meanwhile. Each is let go when the next is used, in the backward when its
gradients have been put into a message. Levels 1 and 2: whole weights arrive at the start of a call, some messages on
their way at once, each beside the weights that it is copied into when the first of them is read. Gradients of levels 2
and 3 are scattered in every backward; what arrives is added up when the next message of level 3 is started, of level 2
when there is no room beside it. At the first of a backward all that is of the one before is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from torch import fx

from autopart.passes.conversion import Axes
from autopart.passes.data_axis import DataCut, Gathering, gatherings, kept_of, read_bytes
from autopart.passes.emit.layers import Run
from autopart.passes.graph import Value
from autopart.passes.kept import owner_of
from autopart.runtime.buckets import (
    gradient_buckets,
    home_of,
    kept_buckets,
    learning_at,
    summed_bytes,
    summed_over,
    tensor_bytes,
)
from autopart.runtime.data_weights import sent_ahead, summed_beside
from autopart.runtime.manifest import ParameterSpec


@dataclass(frozen=True, slots=True)
class Unit:
    """Shares that are gathered in one message: bytes of it, of the shares put together, and of whole weights beside it.

    trained: some of them.
    """

    names: tuple[str, ...]
    message: float
    joined: float
    copied: float
    trained: bool

    @property
    def coming(self) -> float:
        """Bytes while it is on its way."""
        return self.joined + self.message

    @property
    def whole(self) -> float:
        """Bytes once it is there."""
        return self.copied or self.message


@dataclass(frozen=True, slots=True)
class Scattered:
    """Gradients that are summed and divided in one message.

    names: of the parameters. whole: bytes of the gradients. shares: of those of their parts that a replica has.
    alone: the message is the only one itself. converted: bytes of the message in the type of the sum, 0 where that is
    the gradients'. own: of what arrives. last: of the gradient that is made last, which autograd holds until the
    message is on its way.
    """

    names: frozenset[str]
    whole: float
    shares: float
    alone: bool
    converted: float
    own: float
    last: float

    @property
    def sent(self) -> float:
        """Bytes of the message."""
        return self.converted or self.whole


def scattered(specs: Sequence[ParameterSpec], sizes: Sequence[int], replicas: int) -> Scattered:
    """specs: in the order in which a backward completes them. sizes: of the tensor axes."""
    whole = sum(tensor_bytes(spec, sizes) for spec in specs)
    summed = sum(summed_bytes(spec, tensor_bytes(spec, sizes)) for spec in specs)
    alone = len(specs) == 1 and specs[0].data_dim == 0
    names = frozenset(spec.name for spec in specs)
    converted = 0 if summed == whole else summed
    return Scattered(
        names, whole, whole / replicas, alone, converted, summed / replicas, tensor_bytes(specs[-1], sizes)
    )


@dataclass(slots=True)
class Divided:
    """A stage's divided weights: what never changes.

    layers: statements at the start of a layer, by its first node; ops: those before an op outside of layers. units: of
    level 3; read: by reader and parameter where these are gathered. kept: messages of levels 1 and 2, in which whole
    weights arrive at the start of a call; window: bytes of them on their way at once. buckets: of level 2's gradients,
    in their order. sizes: of the tensor axes. bucket_bytes: of a message.
    """

    specs: Mapping[str, ParameterSpec] = field(default_factory=dict)
    cuts: Mapping[str, DataCut] = field(default_factory=dict)
    sizes: Sequence[int] = ()
    replicas: int = 1
    bucket_bytes: int = 0
    buckets: Sequence[Scattered] = ()
    kept: Sequence[Unit] = ()
    window: float = 0.0
    layers: dict[fx.Node, list[Gathering]] = field(default_factory=dict)
    ops: dict[fx.Node, list[Gathering]] = field(default_factory=dict)
    read: dict[fx.Node, dict[fx.Node, Gathering]] = field(default_factory=dict)
    units: dict[Gathering, Unit] = field(default_factory=dict)

    def arrange(self, runs: Iterable[tuple[Run, bool]]) -> None:
        """Finds the statements of a stage's runs."""
        for run, is_layer in runs:
            for statement in gatherings([(run, is_layer)], self.cuts, ()):
                if is_layer:
                    self.layers.setdefault(run.nodes[0], []).append(statement)
                else:
                    self.ops.setdefault(statement.readers[0], []).append(statement)
                names = [node.meta["name"] for node in statement.parameters]
                if self.cuts[names[0]].level < 3:
                    self.window = max(self.window, self.bucket_bytes + read_bytes(statement, self.specs, self.sizes))
                else:
                    self.units[statement] = self.unit([self.specs[name] for name in names], 3)
                    for reader in statement.readers:
                        for node in reader.all_input_nodes:
                            if node in statement.parameters:
                                self.read.setdefault(reader, {})[node] = statement

    def gathers(self, weight: fx.Node, reader: fx.Node) -> bool:
        """Whether an op outside of layers gathers a weight for itself; such gradients are not put off."""
        return any(weight in statement.parameters for statement in self.ops.get(reader, ()))

    def unit(self, specs: Sequence[ParameterSpec], level: int) -> Unit:
        """One message that gathers these parameters' shares."""
        whole = sum(tensor_bytes(spec, self.sizes) for spec in specs)
        alone = len(specs) == 1
        in_place = alone and specs[0].data_dim == 0
        # the shares of levels 1 and 2 are parts of the whole weights
        joined = 0.0 if in_place or (alone and level == 3) else whole / self.replicas
        copied = 0.0 if in_place or level < 3 else whole
        return Unit(tuple(spec.name for spec in specs), whole, joined, copied, any(spec.trainable for spec in specs))

    def lingering(self, stage: int) -> float:
        """Bytes of level 3's gradients that stay when tensor axes have summed them in messages of their own.

        The gradients of a unit are views of the message in which they arrived first, which stays while one of them is
        not summed so.
        """
        found, seen = 0.0, set[str]()
        for unit in reversed(self.units.values()):
            new = [spec for name in unit.names if name not in seen and (spec := self.specs[name]).learns(stage)]
            seen.update(spec.name for spec in new)
            again = [spec for spec in new if summed_over(spec, self.sizes)]
            if len(again) < len(new):
                found += sum(tensor_bytes(spec, self.sizes) // self.replicas for spec in again)
        return found

    def level(self, node: fx.Node) -> int:
        """Of a parameter's placeholder."""
        cut = self.cuts.get(node.meta["name"])
        return cut.level if cut else 0


def divided_weights(
    specs: Sequence[ParameterSpec],
    stage: int,
    stages: Sequence[int],
    replicas: int,
    axes: Axes,
    bucket_bytes: int,
    cuts: Mapping[str, DataCut],
) -> Divided:
    """Of a stage, one of a rank's ``stages``.

    specs: all parameters of the program, as the stage stores them, in the model's order. bucket_bytes: of gradients, or
    of weights, that share a message.
    """
    if replicas == 1:
        return Divided()
    by_name = {spec.name: spec for spec in specs if stage in spec.stages and spec.zero}
    sizes = [size for _, size in axes]
    home = [spec for spec in by_name.values() if home_of(spec, stages) == stage]
    buckets = [
        scattered(bucket.specs, sizes, replicas)
        for bucket in gradient_buckets(learning_at(specs, stage, stages), replicas, sizes, bucket_bytes)
        if bucket.zero == 2
    ]
    own = {name: cut for name, cut in cuts.items() if name in by_name}
    found = Divided(by_name, own, sizes, replicas, bucket_bytes, buckets)
    found.kept = [found.unit(run, 2) for run in kept_buckets(home, sizes, bucket_bytes)]
    return found


@dataclass(slots=True)
class Holding:
    """A walk's divided weights: what of them is in memory.

    A message that is sent is held until its shares have arrived. add: allocates bytes, or frees them. most: bytes so
    far. copies: a copy of it is (gloo). there: parameters whose shares have gradients, which are not counted where they
    had them before the pass. expected: units in the order of such a pass.
    """

    code: Divided
    add: Callable[[float], None]
    most: Callable[[], float]
    copies: bool
    backward: bool = False
    there: set[str] = field(default_factory=set)
    expected: Sequence[Unit] = ()
    seen: list[Unit] = field(default_factory=list)
    held: dict[Unit, bool] = field(default_factory=dict)  # True while gradients are awaited
    coming: set[Unit] = field(default_factory=set)  # of level 3
    reading: set[Unit] = field(default_factory=set)  # by the op at hand
    passed: list[float] = field(default_factory=list)  # bytes of those that are let go behind it
    kept: list[Unit] = field(default_factory=list)  # whose messages have not been sent; and those on their way
    flying: list[Unit] = field(default_factory=list)
    begun: float = 0.0  # bytes that were on their way at once when the call began
    left: Counter[Gathering] = field(default_factory=Counter)  # gradients to come
    made: dict[Gathering, dict[fx.Node, float]] = field(default_factory=dict)
    started: int = 0  # buckets of level 2
    unsettled: dict[int, list[Scattered]] = field(default_factory=dict)  # by level, what is on its way
    carried: set[int] = field(default_factory=set)  # levels of which it is of the backward before
    unsettled_most: float | None = None  # bytes, before the first time that what is on its way is settled
    gradients: float = 0.0  # of shares, new ones

    # -- weights --------------------------------------------------------------------------------------------------

    def begin_call(self) -> None:
        """A call sends for the first whole weights of levels 1 and 2."""
        self.kept = list(self.code.kept)
        self.send_ahead()
        self.begun = sum(unit.coming for unit in self.flying)

    def send_ahead(self) -> None:
        while self.kept and sent_ahead([unit.message for unit in self.flying], self.kept[0].message, self.code.window):
            self.send_for(self.kept[0])

    def send_for(self, unit: Unit) -> None:
        self.kept.remove(unit)
        self.flying.append(unit)
        self.add(unit.coming)

    def enter_layer(self, nodes: Sequence[fx.Node]) -> None:
        """The forward of a layer with these ops begins."""
        self.enter(self.code.layers.get(nodes[0], ()))

    def enter_op(self, node: fx.Node) -> None:
        """What an op outside of layers reads is gathered, each for itself, and is there until it is done."""
        statements = self.code.ops.get(node, ())
        self.reading = {self.code.units[item] for item in statements if item in self.code.units}
        self.enter(statements)

    def leave_op(self) -> None:
        self.reading = set()
        for size in self.passed:
            self.add(-size)
        self.passed = []

    def enter_again(self, nodes: Iterable[fx.Node]) -> None:
        """Ops of a layer are computed again, with the weights that they read."""
        self.enter(dict.fromkeys(at for node in nodes for at in self.code.read.get(node, {}).values()))

    def need(self, node: fx.Node, part: Collection[Value] | None = None) -> None:
        """An op's backward takes what it kept. part: of its weights, those of the layer that goes back."""
        read = self.code.read.get(node, {})
        for value in kept_of(node) if read else ():
            if owner_of(value).node in read and (part is None or value in part):
                self.ensure(self.code.units[read[owner_of(value).node]])

    def enter(self, statements: Iterable[Gathering]) -> None:
        for statement in statements:
            if statement in self.code.units:
                self.ensure(self.code.units[statement])
            else:
                self.arrive({node.meta["name"] for node in statement.parameters})

    def arrive(self, names: Set[str]) -> None:
        """Whole weights of levels 1 and 2 are read."""
        for unit in [unit for unit in self.kept if not names.isdisjoint(unit.names)]:
            self.send_for(unit)
        for unit in [unit for unit in self.flying if not names.isdisjoint(unit.names)]:
            self.flying.remove(unit)
            self.add(-unit.coming)
            self.send_ahead()

    def ensure(self, unit: Unit) -> None:
        for other in [other for other, awaited in self.held.items() if other != unit and not awaited]:
            self.free(other)
        if unit in self.held:
            return
        if unit not in self.coming:
            self.start(unit)
        self.coming.discard(unit)
        self.add(unit.copied)
        self.add(-unit.joined - (unit.message if unit.copied else 0.0))
        self.held[unit] = self.backward and unit.trained
        place = len(self.seen)
        self.seen.append(unit)
        if place + 1 < len(self.expected) and self.expected[place] == unit:
            following = self.expected[place + 1]
            if following not in self.held and following not in self.coming:
                self.start(following)

    def start(self, unit: Unit) -> None:
        self.coming.add(unit)
        self.add(unit.coming)

    def free(self, unit: Unit) -> None:
        if unit in self.held:
            del self.held[unit]
            if unit in self.reading:
                self.passed.append(unit.whole)
            else:
                self.add(-unit.whole)

    def end(self) -> None:
        """No whole weight outlives the pass. In a backward the last messages of a level stay on their way."""
        self.gradients += sum(message.shares for message in self.flying_sums if self.is_new(message))
        for unit in list(self.held):
            self.free(unit)
        for unit in (*self.coming, *self.flying):
            self.add(-unit.coming)
        self.coming.clear()
        self.flying.clear()

    @property
    def tail(self) -> float:
        """Bytes on their way after a backward, beside gradients."""
        return sum(map(self.on_its_way, self.flying_sums))

    @property
    def flying_sums(self) -> list[Scattered]:
        """Messages of gradients that are on their way."""
        return [message for messages in self.unsettled.values() for message in messages]

    def is_new(self, message: Scattered) -> bool:
        """Whether some of its shares have no gradients yet: what arrives becomes these, in one tensor."""
        return not message.names <= self.there

    def on_its_way(self, message: Scattered) -> float:
        """Bytes of a message until it has arrived, beside what counts as its shares' gradients."""
        return message.sent + message.own - (message.shares if self.is_new(message) else 0.0)

    # -- gradients ------------------------------------------------------------------------------------------------

    def await_gradients(self, reached: Collection[fx.Node]) -> None:
        """Gradients come from these ops."""
        self.left = Counter(
            statement
            for reader, own in self.code.read.items()
            for node, statement in own.items()
            if reader in reached and node.meta.get("trainable")
        )

    def gradient(self, node: fx.Node, reader: fx.Node, size: float) -> bool:
        """A whole gradient of level 3 is made; False where the parameter is of another level."""
        statement = self.code.read.get(reader, {}).get(node)
        if statement is None:
            return False
        made = self.made.setdefault(statement, {})
        self.add(size)
        if node in made:
            self.add(-size)
        made[node] = size
        self.left[statement] -= 1
        return True

    def scatter(self, final: Set[str], whole: Mapping[fx.Node, float]) -> None:
        """Starts the messages whose gradients are all there. final, whole: those of level 2, and their bytes."""
        # of several, autograd first ends what was gathered last
        for statement in reversed([statement for statement in self.made if self.left[statement] <= 0]):
            made = self.made.pop(statement)
            self.free(self.code.units[statement])
            self.settle(3)
            specs = [self.code.specs[node.meta["name"]] for node in statement.parameters if node in made]
            self.send(scattered(specs, self.code.sizes, self.code.replicas), sum(made.values()), 3)
        while self.started < len(self.code.buckets) and self.code.buckets[self.started].names <= final:
            message = self.code.buckets[self.started]
            self.started += 1
            self.send(message, sum(size for node, size in whole.items() if node.meta["name"] in message.names), 2)

    def send(self, message: Scattered, gradients: float, level: int) -> None:
        """gradients: their bytes, which autograd holds at level 3 until the message is on its way."""
        used = level == 3
        if not used:
            self.make_room(message)
        self.add(0.0 if message.alone else message.whole)
        if message.converted:
            self.add(message.converted)
            self.add(0.0 if message.alone else -message.whole)
        same = message.alone and not message.converted
        if not used:
            self.add(0.0 if same else message.last - gradients)
        self.add(message.own)
        if self.copies:
            self.add(message.sent)
            self.add(-message.sent)
        if not same:
            self.add(-gradients if used else -message.last)
        self.unsettled.setdefault(level, []).append(message)

    def carry(self, messages: Mapping[int, Sequence[Scattered]]) -> None:
        """Messages of the backward before are on their way, by level."""
        self.unsettled, self.carried = {level: list(own) for level, own in messages.items()}, set(messages)
        self.add(self.tail)

    def make_room(self, message: Scattered) -> None:
        """For one of level 2."""
        if self.unsettled_most is None or 2 in self.carried:
            self.settle(2)
        flying = self.unsettled.get(2, [])
        while flying and not summed_beside([own.sent for own in flying], message.sent, self.code.bucket_bytes):
            self.settle_first(2)

    def settle(self, level: int) -> None:
        """All that is on its way is waited for."""
        if self.unsettled_most is None:
            self.unsettled_most = self.most()
        while self.unsettled.get(level):
            self.settle_first(level)
        self.carried.discard(level)

    def settle_first(self, level: int) -> None:
        """What has arrived becomes the shares' gradients, or is added to them."""
        message = self.unsettled[level].pop(0)
        self.add(-message.sent)
        if message.converted:
            self.add(message.shares)
            self.add(-message.own)
        if not self.is_new(message):
            self.add(-message.shares)
        elif level not in self.carried:
            self.gradients += message.shares
        self.there |= message.names
