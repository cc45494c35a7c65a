"""Between placements of a tensor's dims and factors of a rule.

A dim made of factors ``f1 … fm`` and sharded inside ``O`` outer blocks is the factor ``fk`` sharded inside ``o``
blocks, if the factors outside ``fk`` have ``p`` elements, ``O = p o``, and ``fk`` holds ``o`` blocks of more than one.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from autopart.passes import graph
from autopart.passes.graph import Value, may_have_gradient
from autopart.passes.rules.notation import Dims, Rule
from autopart.passes.sizes import ONE, Extent
from autopart.runtime.placement import BROADCAST, PARTIAL, REPLICATE, Kind, Placement, shard

Sharding = tuple[str, Extent]
"""A factor, and the number of blocks in it outside the sharded part."""
Sides = tuple[tuple[Placement, ...], tuple[Placement, ...]]
"""Placements of the operands and of the outputs."""


def is_differentiable(value: Value) -> bool:
    """Whether a gradient may flow through the value: by its type, and not known to be free of parameters."""
    return bool(value.node.meta.get("differentiable", True)) and may_have_gradient(value.fake.dtype)


def settle(placement: Placement, value: Value) -> Placement:
    """B is R for a value without a gradient."""
    return REPLICATE if placement == BROADCAST and not is_differentiable(value) else placement


def match(rule: Rule, dims: Dims, placement: Placement) -> Sharding | None:
    """The factor and its blocks that a sharded placement of a tensor with these dims means; None if it is not one."""
    if not placement.is_shard or placement.dim >= len(dims):
        return None
    blocks = Extent(placement.outer, placement.batched)
    outside = ONE
    for name in dims[placement.dim]:
        size = rule.sizes[name]
        outer = blocks.over(outside)
        if size is None or outer is None:
            return None
        rest = size.over(outer)
        if rest is not None and rest != ONE:
            form = rule.forms.get(name)
            fits = name not in rule.frozen and (form is None or form.several or outer == ONE)
            return (name, outer) if fits else None
        total = outside.times(size)
        if total is None:
            return None
        outside = total
    return None


def factor_of(rule: Rule, operand_index: int, placement: Placement) -> Sharding | None:
    """The factor that a sharded placement of that operand shards; None for other placements and frozen factors."""
    return match(rule, rule.inputs[operand_index], placement)


def placed(rule: Rule, dims: Dims, sharding: Sharding) -> Placement | None:
    """The placement of a tensor with these dims when a factor is sharded; None if the tensor lacks the factor."""
    factor, outer = sharding
    for index, dim in enumerate(dims):
        if factor not in dim:
            continue
        blocks: Extent | None = outer
        for name in dim[: dim.index(factor)]:
            blocks = None if blocks is None else blocks.times(rule.size(name))
        assert blocks is not None, "the batch size would stand twice in one dim"
        return shard(index, blocks.coefficient, blocks.batched)
    return None


def summed(rule: Rule, factor: str) -> bool:
    """Whether sharding the factor makes partial sums: some operand has it, some output lacks it."""
    taken = any(factor in dim for dims in rule.inputs for dim in dims)
    return taken and not all(any(factor in dim for dim in dims) for dims in rule.outputs)


def sharded(rule: Rule, node: fx.Node, sharding: Sharding) -> Sides:
    """Placements of all operands and outputs when a factor is sharded.

    Operands without the factor are replicated, and each rank has a part of their gradient (B); operands that are added
    to partial sums are partial sums themselves. Outputs without the factor are partial sums, or whole where the
    factor's local form makes them so.
    """
    partial = summed(rule, sharding[0])
    found: list[Placement] = []
    for index, (dims, value) in enumerate(zip(rule.inputs, graph.inputs(node), strict=True)):
        lacking = PARTIAL if partial and index in rule.affine else settle(BROADCAST, value)
        found.append(placed(rule, dims, sharding) or lacking)
    form = rule.forms.get(sharding[0])
    lacking = REPLICATE if form is not None and form.whole else PARTIAL
    outputs = tuple(placed(rule, dims, sharding) or lacking for dims in rule.outputs)
    return tuple(found), outputs


def partial_sums(
    rule: Rule, node: fx.Node, group: Sequence[int]
) -> tuple[tuple[Placement, ...], tuple[Placement, ...]]:
    """Placements when the operands of one linear group are partial sums: every output is one, the others are B."""
    values = graph.inputs(node)
    inputs = tuple(PARTIAL if index in group else settle(BROADCAST, value) for index, value in enumerate(values))
    return inputs, tuple(PARTIAL for _ in rule.outputs)


def follow(rule: Rule, node: fx.Node, input_placements: Sequence[Placement]) -> tuple[Placement, ...] | None:
    """The outputs' placements that follow from the operands'; None if the op cannot run on these.

    R and B are the same value forward, so either is taken where the other is meant: the caller inserts the
    transition of the gradient. What comes out of replicated operands is R.
    """
    outputs = graph.outputs(node)
    kinds = {placement.kind for placement in input_placements}
    if Kind.SHARD in kinds:
        first = next(index for index, placement in enumerate(input_placements) if placement.is_shard)
        sharding = factor_of(rule, first, input_placements[first])
        if sharding is None:
            return None
        inputs, results = sharded(rule, node, sharding)
    elif Kind.PARTIAL in kinds:
        group = tuple(index for index, placement in enumerate(input_placements) if placement.kind is Kind.PARTIAL)
        if group not in [tuple(sorted(item)) for item in rule.linear]:
            return None
        inputs, results = partial_sums(rule, node, group)
    elif kinds == {Kind.BROADCAST}:
        return tuple(settle(BROADCAST, value) for value in outputs)
    else:
        return tuple(REPLICATE for _ in outputs)
    whole = (REPLICATE, BROADCAST)
    agree = all(
        wanted == given or (wanted in whole and given in whole)
        for wanted, given in zip(inputs, input_placements, strict=True)
    )
    return results if agree else None
