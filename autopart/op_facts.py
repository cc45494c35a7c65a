"""What pricing needs of an op by itself, and the bytes that follow from it under a choice of strategies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopart.passes.amounts import Amount
from autopart.passes.graph import Value
from autopart.passes.saved import WHOLE_INSIDE
from autopart.prices import Chosen
from autopart.runtime.placement import Placements


@dataclass(frozen=True, slots=True)
class KeptTensor:
    """A tensor that an op keeps for its backward: who owns the memory, and as which operand or result it is read.

    Owners are those of the whole graph, where every view is one.
    """

    owner: Value
    size: Amount
    operand: int  # index into the op's inputs, or -1 - index into its outputs


@dataclass(frozen=True, slots=True)
class OpFacts:
    """What pricing needs of an op, independent of the batch size and of strategies."""

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    owners: tuple[Value, ...]  # of the memory of the inputs
    sizes: tuple[Amount, ...]  # of inputs then outputs; parameters count nothing
    kept: tuple[KeptTensor, ...]
    inside: Amount  # what the op keeps besides
    copied: tuple[tuple[int, Amount], ...]  # of that copies of inputs, which follow their sharding: which, and bytes
    learned: tuple[tuple[int, Amount], ...]  # parameters with a gradient: which input, and bytes
    multiplied: int  # which input is multiplied with a trained weight; -1: none
    passing: bool  # neither the op nor its backward makes a tensor
    copies: float  # of its largest tensor, that it makes on its way beside gradients

    def position(self, item: KeptTensor) -> int:
        """Where a kept tensor stands among inputs and outputs."""
        return item.operand if item.operand >= 0 else len(self.inputs) - 1 - item.operand


def transient_bytes_of(facts: OpFacts, shares: Sequence[float], batch: int) -> tuple[float, float]:
    """Operands and results, or their gradients, and what the backward makes on its way; those of parameters."""
    if facts.passing:
        return 0.0, 0.0
    held = [size.at(batch) * share for size, share in zip(facts.sizes, shares, strict=True)]
    learned = sum(size.at(1) * shares[position] for position, size in facts.learned)
    return sum(held) + facts.copies * max(held, default=0.0), learned


def placements_of(chosen: Chosen, position: int) -> Placements:
    """How an op has its input, or, past these, its output of that position."""
    inputs = len(chosen[0].inputs)
    if position < inputs:
        return tuple(strategy.inputs[position] for strategy in chosen)
    return tuple(strategy.outputs[position - inputs] for strategy in chosen)


def inside_bytes_of(facts: OpFacts, chosen: Chosen, sizes: Sequence[int], shares: Sequence[float], batch: int) -> float:
    """A rank's part of what an op keeps besides. shares: of inputs then outputs."""
    if not facts.inside:
        return 0.0
    total, apart = facts.inside.at(batch), 0.0
    for position, size in facts.copied:
        total -= size.at(batch)
        apart += size.at(batch) * shares[position]
    return total * _inside_share(chosen, sizes) + apart


def _inside_share(chosen: Chosen, sizes: Sequence[int]) -> float:
    """Each rank's part of what an op keeps inside: shards of the result, or of what is summed, or a shard run by a
    local form.
    """
    share = 1.0
    for strategy, parts in zip(chosen, sizes, strict=True):
        formed = strategy.form is not None and strategy.form.function not in WHOLE_INSIDE
        shared = strategy.outputs[0].divides or strategy.inputs[0].divides
        if formed or (strategy.form is None and shared):
            share /= parts
    return share
