"""Strategies in which two mesh axes act together: products panel by panel (SUMMA) on a square of ranks.

With ``rows`` and ``columns`` of q ranks each, the rows of the left operand and of the result lie on ``rows``, the
factor that is summed over lies on ``columns`` in the left operand and on ``rows`` in the right one, and the columns of
the right operand and of the result lie on ``columns``. Every operand and the result is held as 1/q^2::

    linear       *b k, n k, n -> *b n
    rows         S    S1    B    S         sharded on a factor of *b; what is added lacks it, its gradient is partial
    columns      S k  S n   S n  S n

On one axis alone either makes no sense, so such strategies come as whole tuples. What the other axes do is up to them:
rows sharded on a third axis with weights replicated there is the 2.5-D scheme (Wang et al., arXiv 2110.14883).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Literal

from torch import fx

from autopart.passes import graph as graphs
from autopart.passes.rules import matching
from autopart.passes.rules.applied import JOINT, Strategy, compatible, sharding_name, sharding_of
from autopart.passes.rules.book import RuleBook
from autopart.passes.rules.matching import Sharding, is_differentiable, settle
from autopart.passes.rules.notation import LocalForm, Message, Panels, Rule
from autopart.passes.rules.strategies import divides
from autopart.passes.rules.table import RULES
from autopart.passes.sizes import ONE, Extent
from autopart.runtime.placement import BROADCAST, Placement
from autopart.runtime.traffic import Operation


def joint_strategies(
    node: fx.Node,
    alone: Sequence[Sequence[Strategy]],
    beside: Sequence[Sequence[Strategy]],
    sizes: Sequence[int],
    rules: RuleBook = RULES,
    rule: Rule | None = None,
) -> tuple[tuple[Strategy, ...], ...]:
    """All tuples, one strategy per axis of ``sizes`` ranks, in which two axes of one size act together.

    alone: the op's strategies on each axis, as if it was the only one: in their numbers of blocks the two axes shard
    factors. beside: those on each axis beside the others, which are what the remaining axes may do; partial sums are
    left out, as nothing makes such operands. Names are those of the sharded factors after ``summa_``:
    ``summa_m/b, summa_n/3``. rule: the op's, if it is known.
    """
    rule = rule or rules.rule(node)
    if rule is None or rule.panels is None:
        return ()
    factors = _factors(rule, rule.panels)
    if factors is None:
        return ()
    inner, columns = factors
    found: list[tuple[Strategy, ...]] = []
    for first, second in itertools.permutations(range(len(sizes)), 2):
        parts = sizes[first]
        if parts == 1 or sizes[second] != parts or not divides(rule, (inner, ONE), parts, batch=False):
            continue
        rest = [[item for item in items if item.form is None and item.name[0] != "P"] for items in beside]
        for down, across in itertools.product(_shardings(rule, alone[first]), _shardings(rule, alone[second])):
            if across[0] != columns or down[0] in factors:
                continue
            rows, wide = _pair(rule, node, down, inner, across, parts)
            pair = {first: [rows], second: [wide]}
            tuples = itertools.product(*(pair.get(axis, items) for axis, items in enumerate(rest)))
            found.extend(chosen for chosen in tuples if compatible(node, chosen, sizes, rules, rule))
    return tuple(found)


def _factors(rule: Rule, panels: Panels) -> tuple[str, str] | None:
    """The factor that is summed over and the columns; None if the operands are not made as the form needs them."""
    left, right = rule.inputs[panels.left], rule.inputs[panels.right]
    if len(right) != 2 or any(len(dim) != 1 for dim in right) or len(rule.outputs) != 1:
        return None
    if any(rule.sizes[name] is None for dim in (*left, *right) for name in dim):
        return None
    names = [dim[0] for dim in right]
    inner = [name for name in names if (name,) == left[-1]]
    columns = [name for name in names if (name,) == rule.outputs[0][-1]]
    return (inner[0], columns[0]) if len(inner) == len(columns) == 1 and inner != columns else None


def _shardings(rule: Rule, strategies: Sequence[Strategy]) -> Iterator[Sharding]:
    for strategy in strategies:
        sharding = sharding_of(rule, strategy)
        if sharding is not None:
            yield sharding


def _pair(
    rule: Rule, node: fx.Node, down: Sharding, inner: str, across: Sharding, parts: int
) -> tuple[Strategy, Strategy]:
    """The strategies of the axes ``rows`` and ``columns`` of ``parts`` ranks."""
    panels = rule.panels
    assert panels is not None
    values = graphs.inputs(node)

    def placements(left: Sharding, right: Sharding, added: Sharding) -> tuple[Placement, ...]:
        found = []
        for index, (dims, value) in enumerate(zip(rule.inputs, values, strict=True)):
            sharding = {panels.left: left, panels.right: right}.get(index, added)
            found.append(matching.placed(rule, dims, sharding) or settle(BROADCAST, value))
        return tuple(found)

    def messages(sent: int) -> tuple[Message, ...]:
        """On an axis along which the shares of one operand are sent, and their gradients summed. The share that the
        axis itself makes is taken here, that of the other axes where they are known.
        """
        names = tuple(name for dim in rule.inputs[sent] for name in dim)
        sizes = [rule.size(name) for name in names]
        whole = math.prod(size.coefficient for size in sizes)
        elements = Extent(whole // parts, any(size.batched for size in sizes))
        sent_bytes = values[sent].fake.element_size()
        other = panels.left + panels.right - sent
        found: list[tuple[Operation, Literal["forward", "backward"]]] = [("broadcast", "forward")]
        if is_differentiable(values[other]):
            found.append(("broadcast", "backward"))  # the other operand's gradient is made of this one's shares
        if is_differentiable(values[sent]):
            found.append(("reduce", "backward"))
        calls = [item for item in found for _ in range(parts)]
        return tuple(Message(operation, phase, names, sent_bytes, elements) for operation, phase in calls)

    def strategy(role: str, sharding: Sharding, inputs: tuple[Placement, ...], sent: int) -> Strategy:
        output = matching.placed(rule, rule.outputs[0], sharding)
        assert output is not None
        form = LocalForm(panels.function, messages=messages(sent), role=role)
        return Strategy(f"{JOINT}{sharding_name(sharding)}", inputs, (output,), form)

    return (
        strategy("rows", down, placements(down, (inner, ONE), down), panels.right),
        strategy("columns", across, placements((inner, ONE), across, across), panels.left),
    )
