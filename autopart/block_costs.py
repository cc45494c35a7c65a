"""Seconds and bytes of every block under given strategies, without building a rank's graph.

Works on the whole graph: an op's share follows from its strategy, a collective from every value's placement and the
placements in which its users want it, once per value and target (as :mod:`autopart.passes.shard` will insert it).
A collective belongs to the first block that needs it; a parameter's also to the first of each further stage
(:meth:`BlockCosts.converted_again`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from autopart.analysis import Analysis
from autopart.conversion_prices import ConversionPrices, TensorAxis
from autopart.op_facts import KeptTensor, OpFacts, inside_bytes_of, placements_of, transient_bytes_of
from autopart.passes import graph as graphs
from autopart.passes.amounts import Amount, value_bytes
from autopart.passes.backward_memory import backward_copies, copies_of_form, passes_memory
from autopart.passes.beside import is_cast, operand_of
from autopart.passes.emit.layers import runs_of
from autopart.passes.graph import Value
from autopart.passes.program import Role
from autopart.passes.rules import is_differentiable
from autopart.passes.saved import copied_inside, saved_inside, saved_tensors
from autopart.passes.storage import is_view, storage_of
from autopart.prices import Chosen, Prices, value_shares
from autopart.rank_memory import Kept, RankMemory, Views
from autopart.runtime.placement import Placements


@dataclass(slots=True)
class BlockCost:
    """One block on one rank, one microbatch.

    kept: bytes of the tensors that its ops keep from its forward to its backward; other blocks may keep them too.
    inside_bytes: what they keep besides. entering: bytes of the tensors that it reads of other blocks, parameters left
    out. transient_bytes: of the op that takes the most: operands and results, or their gradients, with those of its
    parameters and what its backward makes on its way; forward_bytes: without those of its parameters. waiting_s: of the
    backward, for an exchange that what runs again would hide as well. ops: one by one.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    inside_bytes: float = 0.0
    transient_bytes: float = 0.0
    forward_bytes: float = 0.0
    waiting_s: float = 0.0
    kept: dict[Kept, float] = field(default_factory=dict)
    entering: dict[Kept, float] = field(default_factory=dict)
    ops: list[PricedOp] = field(default_factory=list)

    @property
    def again_s(self) -> tuple[float, float | None]:
        """Seconds of running its forward again, and up to the last op that keeps something; None: none does."""
        last = max((at for at, op in enumerate(self.ops) if op.keeps), default=None)
        if last is None:
            return self.forward_s, None
        behind = (op.forward_s + math.fsum(seconds for _, seconds in op.converting_s) for op in self.ops[last + 1 :])
        return self.forward_s, max(0.0, self.forward_s - math.fsum(behind))


@dataclass(slots=True)
class PricedOp:
    """An op of a block under its strategies. memory: of the rank.

    keeps: whether it keeps anything, be it parameters. converting_s: seconds of the forward conversions that belong to
    it, with the values converted.
    """

    node: fx.Node
    chosen: Chosen
    forward_s: float
    inside_bytes: float
    memory: RankMemory
    keeps: bool = False
    kept: dict[Kept, float] = field(default_factory=dict)
    converting_s: list[tuple[Value, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Run:
    """An op under a choice. shares, used: of inputs then outputs, what each rank has and in which placements."""

    forward_s: float
    backward_s: float
    transient_bytes: float
    forward_bytes: float
    inside_bytes: float
    shares: tuple[float, ...]
    used: tuple[Placements, ...]


@dataclass(slots=True)
class BlockCosts:
    """Prices blocks of one program on devices of one kind; facts about the graph are gathered once."""

    analysis: Analysis
    kind: str
    _facts: dict[fx.Node, OpFacts] = field(default_factory=dict)
    _formed: dict[tuple[fx.Node, str], OpFacts] = field(default_factory=dict)  # of ops run by a local form
    _alike: dict[object, OpFacts] = field(default_factory=dict)  # the first of ops that differ in their values alone
    _bytes: dict[Value, Amount] = field(default_factory=dict)
    _views: Views = field(default_factory=Views)
    _gathering: dict[fx.Node, tuple[bool, float]] = field(default_factory=dict)
    _order: list[tuple[fx.Node, int]] = field(init=False)  # ops with their blocks, free ones first
    _entering: dict[fx.Node, tuple[Value, ...]] = field(default_factory=dict)  # what an op reads from outside its block
    _saved: set[fx.Node] = field(init=False)  # owners of memory that some op keeps for its backward
    _read_in: dict[str, int] = field(init=False)  # by layer, how many parameters it reads
    _function: dict[fx.Node, int] = field(init=False)  # which ops are written in one function of emitted code

    def __post_init__(self) -> None:
        free, block_of = self.analysis.free_block, self.analysis.block_of
        self._order = [*free.items(), *block_of.items()]
        for node, index in self._order:
            facts = self._facts[node] = self._gather(node)
            self._entering[node] = tuple(self._from_outside(facts.owners, index)) if node in block_of else ()
        self._saved = {item.owner.node for facts in self._facts.values() for item in facts.kept}
        read: dict[str, set[fx.Node]] = {}
        for node, block in self.analysis.block_of.items():
            read.setdefault(self.analysis.layers[block], set()).update(
                source for source in node.all_input_nodes if source.meta.get("role") is Role.PARAMETER
            )
        runs = runs_of(self.analysis.graph)
        self._function = {node: number for number, (run, _) in enumerate(runs) for node in run.nodes}
        self._read_in = {layer: len(found) for layer, found in read.items()}

    def size(self, value: Value) -> Amount:
        if value not in self._bytes:
            self._bytes[value] = value_bytes(value)
        return self._bytes[value]

    def stored(self, owner: Value) -> Amount:
        """Bytes of a value's memory, which views of it share."""
        return self._views.stored(owner)

    def _gather(self, node: fx.Node) -> OpFacts:
        inputs, outputs = tuple(graphs.inputs(node)), tuple(graphs.outputs(node))
        held, owners = [*inputs, *outputs], tuple(map(storage_of, inputs))
        # what an op reads from outside of its block may be made otherwise than for its first alike
        given = (
            value.node.meta.get("trainable", False) if value.node.op == "placeholder" else None for value in inputs
        )
        alike = self.analysis.first.get(node, node), is_view(node), tuple(given)
        known = self._alike.get(alike)
        if known is not None:  # the same but for which values these are
            kept = tuple(self._kept(held[known.position(item)], item.operand) for item in known.kept)
            return replace(known, inputs=inputs, outputs=outputs, owners=owners, kept=kept)
        found = self._alike[alike] = OpFacts(
            inputs,
            outputs,
            owners,
            tuple(Amount() if value.node.op == "placeholder" else self.size(value) for value in held),
            self._keeping(node, inputs, outputs, ""),
            saved_inside(node, self.kind),
            tuple((inputs.index(value), size) for value, size in copied_inside(node, self.kind)),
            tuple(
                (position, self.size(value))
                for position, value in enumerate(inputs)
                if value.node.op == "placeholder" and value.node.meta.get("trainable")
            ),
            -1 if (multiplied := operand_of(node)) is None else inputs.index(graphs.value_of(multiplied)),
            passes_memory(node),
            backward_copies(node),
        )
        return found

    def _keeping(
        self, node: fx.Node, inputs: Sequence[Value], outputs: Sequence[Value], form: str
    ) -> tuple[KeptTensor, ...]:
        return tuple(
            self._kept(value, inputs.index(value) if value in inputs else -1 - outputs.index(value))
            for value in saved_tensors(node, self.kind, form)
        )

    def _kept(self, value: Value, operand: int) -> KeptTensor:
        owner = storage_of(value)
        return KeptTensor(owner, self.stored(owner), operand)

    def _facts_of(self, node: fx.Node, chosen: Chosen) -> OpFacts:
        """With what is kept under a choice: a local form may keep something else than the op."""
        form = next((strategy.form.function for strategy in chosen if strategy.form is not None), "")
        if not form:
            return self._facts[node]
        if (node, form) not in self._formed:
            facts = self._facts[node]
            kept = self._keeping(node, facts.inputs, facts.outputs, form)
            inside, copied = saved_inside(node, self.kind, form), copied_inside(node, self.kind, form)
            found = tuple((facts.inputs.index(value), size) for value, size in copied)
            there, back = copies_of_form(node, form)
            copies = max(facts.copies, there - 1, back)  # forward there is no gradient
            self._formed[node, form] = replace(facts, kept=kept, inside=inside, copied=found, copies=copies)
        return self._formed[node, form]

    def gathering(self, node: fx.Node) -> tuple[bool, float]:
        """Of a parameter that is gathered at use: whether the backward needs it again, and its part of a message.

        A layer's parameters share one message, which comes again as a whole.
        """
        known = self._gathering.get(node)
        if known is None:
            block_of, layers = self.analysis.block_of, self.analysis.layers
            readers = {layers[block_of[user]] for user in node.users if user in block_of}
            layer = next(iter(readers), "") if len(readers) == 1 else ""
            known = (True, 1.0 / self._read_in[layer]) if layer else (node in self._saved, 1.0)
            self._gathering[node] = known
        return known

    def gathered_again(self, node: fx.Node, index: int) -> bool:
        """Whether a block's backward needs a parameter that is gathered at use: its layer does, or an op keeps it."""
        nodes = self.analysis.blocks[index].nodes
        ops = [] if self.analysis.layers[index] else [op for op in nodes if op in self.analysis.block_of]
        return not ops or any(item.owner.node is node for op in ops for item in self._facts[op].kept)

    def kept_by(self, node: fx.Node) -> Iterator[tuple[Value, Amount]]:
        """The tensors that an op keeps for its backward, by who owns their memory, with bytes; parameters left out."""
        for item in self._facts[node].kept:
            if item.owner.node.op != "placeholder":
                yield item.owner, item.size

    def reads(self, node: fx.Node) -> Iterator[tuple[Value, Value]]:
        """What an op reads besides inputs, parameters and buffers, and who owns the memory of each."""
        facts = self._facts[node]
        yield from (
            (v, owner) for v, owner in zip(facts.inputs, facts.owners, strict=True) if owner.node.op != "placeholder"
        )

    def keeps(self, node: fx.Node) -> bool:
        """Whether an op keeps anything for its backward."""
        return bool(self._facts[node].kept) or bool(self._facts[node].inside)

    def again(self, nodes: Sequence[fx.Node]) -> Sequence[fx.Node]:
        """Of ops that run again together those that do: up to the last that keeps something."""
        last = max((at for at, node in enumerate(nodes) if self.keeps(node)), default=-1)
        return nodes[: last + 1]

    def inside(self, node: fx.Node) -> Amount:
        """Bytes that an op keeps besides."""
        return self._facts[node].inside

    def held_bytes(self, node: fx.Node, chosen: Chosen, sizes: Sequence[int], batch: int) -> tuple[float, float]:
        """Bytes that one op by itself keeps for its backward on one rank, and those that it takes while it runs."""
        facts, shares = self._facts_of(node, chosen), value_shares(node, chosen, sizes)
        total = 0.0
        for item in facts.kept:
            if item.owner.node.op != "placeholder":
                total += item.size.at(batch) * shares[facts.position(item)]
        total += inside_bytes_of(facts, chosen, sizes, shares, batch)
        return total, sum(transient_bytes_of(facts, shares, batch))

    def least_kept(
        self,
        node: fx.Node,
        chosen: Chosen,
        sizes: Sequence[int],
        batch: int,
        owners: Collection[Value],
        inside: bool = True,
    ) -> float:
        """Bytes that one op keeps on one rank at least: of the tensors of these owners, and, inside, besides.

        Of several values of one owner the largest, unless they make it up.
        """
        facts, shares = self._facts_of(node, chosen), value_shares(node, chosen, sizes)
        parts: dict[Value, list[tuple[float, float]]] = {}
        for item in facts.kept:
            if item.owner in owners:
                value = facts.inputs[item.operand] if item.operand >= 0 else facts.outputs[-1 - item.operand]
                size = min(self.size(value).at(batch), item.size.at(batch))
                parts.setdefault(item.owner, []).append((size, size * shares[facts.position(item)]))
        total = inside_bytes_of(facts, chosen, sizes, shares, batch) if inside else 0.0
        for owner, own in parts.items():
            apart = sum(size for size, _ in own) == self.stored(owner).at(batch)
            total += (sum if apart else max)(size for _, size in own)
        return total

    def kept_shares(self, node: fx.Node, chosen: Chosen, sizes: Sequence[int], owner: Value) -> list[float]:
        """The parts that a rank has of the owner's tensors which an op keeps."""
        facts, shares = self._facts_of(node, chosen), value_shares(node, chosen, sizes)
        return [shares[facts.position(item)] for item in facts.kept if item.owner == owner]

    def memory(
        self,
        prices: Prices,
        strategies: Mapping[fx.Node, Chosen],
        storage: Mapping[str, Placements],
        sizes: Sequence[int],
    ) -> RankMemory:
        """Of a rank under these strategies. sizes: of the tensor axes."""
        return RankMemory(self._views, strategies, storage, sizes, prices.batch)

    def costs(
        self,
        prices: Prices,
        strategies: Mapping[fx.Node, Chosen],
        storage: Mapping[str, Placements],
        conversions: ConversionPrices,
        beside: bool = True,
    ) -> list[BlockCost]:
        """One entry per block. strategies: per op one for each axis of ``conversions``; absent: replicated.

        beside: whether weights' gradients are computed beside collectives of the backward
        (:mod:`autopart.passes.beside`).
        """
        blocks = [BlockCost() for _ in self.analysis.blocks]
        batch, axes, first = prices.batch, conversions.axes, self.analysis.first
        sizes = [axis.parts for axis in axes]
        memory = self.memory(prices, strategies, storage, sizes)
        replicated, lie = memory.replicated, memory.lies
        # Equal ops under one choice; choices by identity, as hashing them costs more than pricing.
        runs: dict[tuple[fx.Node, int], _Run] = {}
        converted: dict[tuple[Value, Placements], tuple[BlockCost, fx.Node]] = {}  # the first reader and its block
        hiding: dict[tuple[Value, Placements], float] = {}
        for node, index in self._order:
            chosen = strategies.get(node, ())
            block, facts = blocks[index], self._facts_of(node, chosen)
            alike = (first.get(node, node), id(chosen))
            run = runs.get(alike)
            if run is None:
                run = runs[alike] = self._run(node, facts, chosen, prices, axes, beside)
            block.forward_s += run.forward_s
            block.backward_s += run.backward_s
            block.transient_bytes = max(block.transient_bytes, run.transient_bytes)
            block.forward_bytes = max(block.forward_bytes, run.forward_bytes)
            op = PricedOp(node, chosen, run.forward_s, run.inside_bytes, memory, self.keeps(node))
            block.ops.append(op)
            for item in facts.kept:
                position = facts.position(item)
                value = facts.inputs[item.operand] if item.operand >= 0 else facts.outputs[-1 - item.operand]
                key = memory.owner(value, run.used[position] if chosen else replicated)
                if not memory.is_stored(key):
                    op.kept[key] = block.kept[key] = memory.bytes(key)
            block.inside_bytes += run.inside_bytes
            for owner in self._entering[node]:
                key = owner, lie(owner)
                block.entering[key] = memory.bytes(key)
            if not chosen:
                continue
            for value, wanted in zip(facts.inputs, run.used, strict=False):
                have = lie(value)
                if have == wanted or (value, wanted) in converted:
                    continue
                converted[value, wanted] = block, node
                there, back = conversions.seconds(have, wanted, self.size(value).at(batch), is_differentiable(value))
                op.converting_s.append((value, there))
                block.forward_s += there
                block.backward_s += back
            if not beside or facts.multiplied < 0:
                continue
            value, wanted = facts.inputs[facts.multiplied], run.used[facts.multiplied]
            while lie(value) == wanted and value.node in strategies and is_cast(value.node):
                wanted = placements_of(strategies[value.node], 0)
                value = self._facts[value.node].inputs[0]
            home = converted.get((value, wanted))
            if home is not None and is_differentiable(value) and self._function[home[1]] == self._function[node]:
                weight = prices.weight_seconds(node, chosen, sizes)
                hiding[value, wanted] = hiding.get((value, wanted), 0.0) + weight
        for (value, wanted), seconds in hiding.items():
            exchanged = conversions.beside(lie(value), wanted, self.size(value).at(batch))
            converted[value, wanted][0].backward_s -= min(exchanged, seconds)
        return blocks

    def converted_again(
        self,
        parameter: fx.Node,
        batch: int,
        strategies: Mapping[fx.Node, Chosen],
        stored: Placements,
        conversions: ConversionPrices,
        stages: int,
    ) -> Iterator[tuple[int, float, float]]:
        """Blocks that convert a parameter which an earlier block has converted in the same way, with the seconds of
        it forward and backward: those that begin a part of its readers, as many parts of equal size as there may be
        stages, each of which makes its own copy.
        """
        value, wanting = Value(parameter), dict[Placements, set[int]]()
        for node in parameter.users:
            chosen, block = strategies.get(node, ()), self.analysis.block_of.get(node)
            if chosen and block is not None:
                for position, given in enumerate(self._facts[node].inputs):
                    if given == value and (wanted := placements_of(chosen, position)) != stored:
                        wanting.setdefault(wanted, set()).add(block)
        for wanted, blocks in wanting.items():
            parts, ordered = min(stages, len(blocks)), sorted(blocks)
            there, back = conversions.seconds(stored, wanted, self.size(value).at(batch), is_differentiable(value))
            for part in range(1, parts):
                yield ordered[part * len(ordered) // parts], there, back

    def read(self, op: PricedOp) -> Iterator[tuple[Value, Kept, float]]:
        """What an op reads besides inputs, parameters and buffers: the value, as what it is in memory, and bytes."""
        facts = self._facts[op.node]
        for number, (value, owner) in enumerate(zip(facts.inputs, facts.owners, strict=True)):
            if owner.node.op != "placeholder":
                key = op.memory.owner(value, op.memory.used(op.node, number))
                yield value, key, op.memory.bytes(key)

    def _run(
        self, node: fx.Node, facts: OpFacts, chosen: Chosen, prices: Prices, axes: Sequence[TensorAxis], beside: bool
    ) -> _Run:
        used = axes if chosen else ()
        sizes = [axis.parts for axis in used]
        forward, backward = prices.op_seconds(node, chosen, sizes)
        exchanged = prices.form_seconds(node, chosen, used, beside)
        shares = value_shares(node, chosen, sizes)
        positions = range(len(facts.sizes)) if chosen else ()
        there, learned = transient_bytes_of(facts, shares, prices.batch)
        return _Run(
            forward + exchanged.forward_s,
            backward + exchanged.backward_s,
            there + learned,
            there,
            inside_bytes_of(facts, chosen, sizes, shares, prices.batch),
            tuple(shares),
            tuple(placements_of(chosen, position) for position in positions),
        )

    def _from_outside(self, owners: Iterable[Value], index: int) -> Iterator[Value]:
        """Of values that a block reads those that enter it: what is made by ops of its layer that lie in no block of
        the layer, such as free ops, is made again with the layer.
        """
        block_of, layers = self.analysis.block_of, self.analysis.layers
        for owner in owners:
            node = owner.node
            if node.op == "placeholder" or block_of.get(node) == index:
                continue
            made = block_of.get(node)
            if not layers[index] or node.meta.get("layer") != layers[index] or (made is not None and layers[made]):
                yield owner
            elif made is None:
                yield from self._from_outside([storage_of(value) for value in graphs.inputs(node)], index)
