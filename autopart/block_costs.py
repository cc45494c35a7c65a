"""Seconds and bytes of every block under given strategies, without building a rank's graph.

Works on the whole graph: an op's share follows from its strategy, a collective from every value's placement and the
placements in which its users want it, once per value and target (as :mod:`autopart.passes.shard` will insert it).
A collective, and a tensor kept for the backward by several blocks, belong to the first block that needs them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from autopart.analysis import Analysis
from autopart.cost.communication import transition
from autopart.cost.devices import Link
from autopart.passes import graph as graphs
from autopart.passes.amounts import Amount, stored_bytes, value_bytes
from autopart.passes.graph import Value
from autopart.passes.program import Role
from autopart.passes.rules import Strategy, is_differentiable
from autopart.passes.saved import saved_inside, saved_tensors
from autopart.passes.storage import storage_of
from autopart.prices import Prices
from autopart.runtime.placement import REPLICATE, Placement


@dataclass(slots=True)
class BlockCost:
    """One block on one rank, one microbatch.

    saved_bytes: kept from its forward to its backward. transient_bytes: operands and results of its largest op, with
    as much again for their gradients.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    saved_bytes: float = 0.0
    transient_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class _Kept:
    """A tensor that an op keeps for its backward: who owns the memory, and as which operand or result it is read."""

    owner: Value
    size: Amount
    operand: int  # index into the op's inputs, or -1 - index into its outputs


@dataclass(frozen=True, slots=True)
class _OpFacts:
    """What pricing needs of an op, independent of the batch size and of strategies."""

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    sizes: tuple[Amount, ...]  # of inputs then outputs; parameters count nothing
    kept: tuple[_Kept, ...]
    inside: Amount

    def position(self, item: _Kept) -> int:
        """Where a kept tensor stands among inputs and outputs."""
        return item.operand if item.operand >= 0 else len(self.inputs) - 1 - item.operand


@dataclass(slots=True)
class BlockCosts:
    """Prices blocks of one program on devices of one kind; facts about the graph are gathered once."""

    analysis: Analysis
    kind: str
    _facts: dict[fx.Node, _OpFacts] = field(default_factory=dict)
    _bytes: dict[Value, Amount] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for node in [*self.analysis.block_of, *self.analysis.free_block]:
            self._facts[node] = self._gather(node)

    def size(self, value: Value) -> Amount:
        if value not in self._bytes:
            self._bytes[value] = value_bytes(value)
        return self._bytes[value]

    def _gather(self, node: fx.Node) -> _OpFacts:
        inputs, outputs = tuple(graphs.inputs(node)), tuple(graphs.outputs(node))
        held = [*inputs, *outputs]
        kept = []
        for value in saved_tensors(node, self.kind):
            owner = storage_of(value)
            if owner.node.op == "placeholder" and owner.node.meta["role"] is not Role.PARAMETER:
                continue
            operand = inputs.index(value) if value in inputs else -1 - outputs.index(value)
            kept.append(_Kept(owner, stored_bytes(owner.fake), operand))
        return _OpFacts(
            inputs,
            outputs,
            tuple(Amount() if value.node.op == "placeholder" else self.size(value) for value in held),
            tuple(kept),
            saved_inside(node, self.kind),
        )

    def kept_bytes(self, node: fx.Node, strategy: Strategy, parts: int, batch: int) -> float:
        """Bytes that one op by itself keeps for its backward on one rank."""
        facts = self._facts[node]
        placements = [*strategy.inputs, *strategy.outputs]
        total = 0.0
        for item in facts.kept:
            sharded = placements[facts.position(item)].is_shard
            if item.owner.node.op != "placeholder":
                total += item.size.at(batch) / (parts if sharded else 1)
        inside = facts.inside.at(batch) if facts.inside else 0
        return total + inside / (parts if _divided(strategy) else 1)

    def costs(
        self,
        prices: Prices,
        strategies: Mapping[fx.Node, tuple[Strategy, ...]],
        storage: Mapping[str, Placement],
        parts: int,
        link: Link | None,
    ) -> list[BlockCost]:
        """One entry per block. strategies: one per op on the tensor axis of ``parts`` ranks; absent: replicated."""
        blocks = [BlockCost() for _ in self.analysis.blocks]
        batch = prices.batch
        kept: set[tuple[Value, Placement]] = set()
        converted: set[tuple[Value, Placement]] = set()
        for node, index in [*self.analysis.free_block.items(), *self.analysis.block_of.items()]:
            block, facts = blocks[index], self._facts[node]
            chosen = strategies.get(node)
            strategy = chosen[0] if chosen else None
            forward, backward = prices.op_seconds(node, strategy, parts)
            if link is not None:
                sent, returned = prices.form_seconds(node, strategy, parts, link)
                forward, backward = forward + sent, backward + returned
            block.forward_s += forward
            block.backward_s += backward
            placements = [*strategy.inputs, *strategy.outputs] if strategy else [REPLICATE] * len(facts.sizes)
            held = sum(
                size.at(batch) / parts if placement.is_shard else size.at(batch)
                for size, placement in zip(facts.sizes, placements, strict=True)
            )
            block.transient_bytes = max(block.transient_bytes, 2.0 * held)
            for item in facts.kept:
                placement = placements[facts.position(item)]
                stored = item.owner.node.op == "placeholder"
                if stored and self._placement(item.owner, strategies, storage) == placement:
                    continue  # the parameter itself, in memory anyway; else a copy made for this use
                if (item.owner, placement) not in kept:
                    kept.add((item.owner, placement))
                    block.saved_bytes += item.size.at(batch) / (parts if placement.is_shard else 1)
            if facts.inside:
                share = parts if strategy is not None and _divided(strategy) else 1
                block.saved_bytes += facts.inside.at(batch) / share
            if strategy is None or link is None:
                continue
            for value, wanted in zip(facts.inputs, strategy.inputs, strict=True):
                have = self._placement(value, strategies, storage)
                if have == wanted or (value, wanted) in converted:
                    continue
                converted.add((value, wanted))
                step = transition(
                    have, wanted, self.size(value).at(batch), parts, link, prices.device, is_differentiable(value)
                )
                block.forward_s += step.forward_s
                block.backward_s += step.backward_s
        return blocks

    def _placement(
        self, value: Value, strategies: Mapping[fx.Node, tuple[Strategy, ...]], storage: Mapping[str, Placement]
    ) -> Placement:
        if value.node.op == "placeholder":
            if value.node.meta["role"] in (Role.PARAMETER, Role.BUFFER):
                return storage.get(value.node.meta["name"], REPLICATE)
            return REPLICATE
        chosen = strategies.get(value.node)
        return chosen[0].outputs[value.index] if chosen else REPLICATE


def _divided(strategy: Strategy) -> bool:
    """Whether each rank has a part of what an op keeps inside: shards of the result, or a shard run by a local form."""
    return strategy.outputs[0].is_shard or strategy.form is not None
