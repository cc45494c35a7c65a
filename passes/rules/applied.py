"""An op under chosen strategies, one per mesh axis: whether it can run so, and what one rank calls."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopart.passes import graph as graphs
from autopart.passes.rules import matching
from autopart.passes.rules.book import Arguments, Local, RuleBook, name_of
from autopart.passes.rules.matching import Sharding
from autopart.passes.rules.notation import Dims, Extents, LocalForm, Message, Rule, RuleError
from autopart.passes.rules.table import RULES
from autopart.passes.sizes import ONE, Extent
from autopart.runtime import local_forms as functions
from autopart.runtime.placement import Kind, Placement, nested

JOINT = "summa_"
"""What the names of strategies begin with that make sense beside their partner's on another axis only."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to run one op on one mesh axis.

    name: ``R``, ``B``, ``P`` (``P0``, ``P1`` … where the op is linear in several groups of operands), the sharded
        factor (``n``; ``n/3`` inside three blocks), the same after ``summa_`` where two axes act together
        (:mod:`autopart.passes.rules.joint`), or for a placeholder its placement.
    inputs, outputs: placements aligned with ``passes.graph.inputs`` and ``outputs`` of the node.
    form: what runs instead of the op, if that is not the op itself on the rank's part.
    """

    name: str
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    form: LocalForm | None = None

    @property
    def factor(self) -> str:
        """The sharded factor of an op; a name that is no factor's for the others."""
        return self.name.removeprefix(JOINT).partition("/")[0]

    @property
    def is_joint(self) -> bool:
        """Whether it acts together with the strategy of another axis."""
        return self.form is not None and self.form.role != "axis"

    def __str__(self) -> str:
        return f"{self.name}: {', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}"


def sharding_name(sharding: Sharding) -> str:
    factor, outer = sharding
    return factor if outer == ONE else f"{factor}/{outer}"


def sharding_of(rule: Rule, strategy: Strategy) -> Sharding | None:
    """The factor that a strategy of an op with this rule shards; None for R, B and P."""
    sides = [*zip(rule.inputs, strategy.inputs, strict=True), *zip(rule.outputs, strategy.outputs, strict=True)]
    for dims, placement in sides:
        if placement.kind is Kind.SHARD:
            sharding = matching.match(rule, dims, placement)
            assert sharding is not None, f"{strategy} does not shard a factor of {rule}"
            return sharding
    return None


def form_axes(applied: Sequence[tuple[Strategy, int]], rule: Rule | None) -> list[int] | None:
    """The axes on which an op runs by a local form, by position; None where it cannot run by these together.

    applied: the strategy and the number of ranks of every axis. A form is on one axis; it spans two by its roles; or it
    takes several as one, which shard one factor, each in the pieces that those before it leave: they are in this order.
    """
    with_form = [axis for axis, (strategy, _) in enumerate(applied) if strategy.form is not None]
    forms = [form for strategy, _ in applied if (form := strategy.form) is not None]
    if len({form.function for form in forms}) > 1:
        return None
    if len(forms) < 2 and not any(form.several for form in forms):
        return with_form
    if sorted(form.role for form in forms) == ["columns", "rows"]:
        return with_form
    if not all(form.several for form in forms) or len({applied[axis][0].factor for axis in with_form}) > 1:
        return None
    # also of one axis alone: the pieces of an axis that does something else are none
    assert rule is not None
    cuts = {axis: sharding_of(rule, applied[axis][0]) for axis in with_form}
    found: list[int] = []
    pieces: Extent | None = ONE
    while len(found) < len(with_form):
        following = [axis for axis, cut in cuts.items() if axis not in found and cut is not None and cut[1] == pieces]
        if len(following) != 1 or pieces is None:
            return None
        found += following
        pieces = pieces.times(Extent(applied[following[0]][1]))
    return found


def compatible(
    node: fx.Node,
    chosen: Sequence[Strategy],
    sizes: Sequence[int],
    rules: RuleBook = RULES,
    rule: Rule | None = None,
) -> bool:
    """Whether an op can run by these strategies, one per axis of these sizes, or a tensor be stored so.

    The cuts of each operand and output nest (then the sizes divide as well, since each strategy's do), the sizes can be
    written down, and there is at most one local form, on axes that it takes. rule: the op's, if known.
    """
    sides = [
        *zip(*(item.inputs for item in chosen), strict=True),
        *zip(*(item.outputs for item in chosen), strict=True),
    ]
    if not all(nested(side, sizes) for side in sides):
        return False
    if not graphs.is_op(node):
        return True
    applied, rule = list(zip(chosen, sizes, strict=True)), rule or rules.rule(node)
    return form_axes(applied, rule) is not None and local_arguments(node, applied, rules, rule) is not None


def local_arguments(
    node: fx.Node, applied: Sequence[tuple[Strategy, int]], rules: RuleBook, rule: Rule | None
) -> Arguments | None:
    """As :func:`localized`; None where sizes cannot be written down. rule: the op's, None if it has none."""
    unchanged = tuple(node.args), dict(node.kwargs)
    localizer = rules.local.get(name_of(node))
    if localizer is None or rule is None:
        return unchanged
    sizes = dict(rule.sizes)
    for strategy, parts in applied:
        sharding = sharding_of(rule, strategy)
        if sharding is None:
            continue
        factor, outer = sharding
        size = sizes[factor]
        assert size is not None
        inner = rule.size(factor).over(outer)
        # A shard of the batch has the batch size's multiples unchanged: the local batch size stands for b.
        if inner is not None and not inner.batched:
            share = size.over(Extent(parts))
            assert share is not None, f"{size} does not divide into {parts}"
            sizes[factor] = share
    if sizes == dict(rule.sizes):
        return unchanged

    def local_shape(dims: Dims) -> Extents:
        shape: list[Extent | None] = []
        for dim in dims:
            total: Extent | None = ONE
            for name in dim:
                size = sizes[name]
                total = None if total is None or size is None else total.times(size)
            shape.append(total)
        return tuple(shape)

    return localizer(node, Local(rule, sizes, tuple(local_shape(dims) for dims in rule.outputs)))


def localized(
    node: fx.Node, applied: Sequence[tuple[Strategy, int]], rules: RuleBook = RULES
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The op's arguments on one rank, with sizes divided where its strategies shard them.

    applied: the strategy and the number of ranks of every mesh axis. The strategies that :func:`strategies` returns
    can always be written down.
    """
    if name_of(node) not in rules.local:
        return tuple(node.args), dict(node.kwargs)
    found = local_arguments(node, applied, rules, rules.rule(node))
    assert found is not None, f"{node.name}: no local sizes for {[str(item) for item, _ in applied]}"
    return found


def local_forms(applied: Sequence[tuple[Strategy, int]]) -> list[LocalForm | None]:
    """The form of each axis' strategy, its messages the size that the other axes leave of them.

    applied: the strategy and the number of ranks of every mesh axis.
    """

    def reduced(own: int, message: Message) -> Message:
        shared = math.prod(
            parts for axis, (item, parts) in enumerate(applied) if axis != own and item.factor in message.factors
        )
        elements = message.elements.over(Extent(shared))
        assert elements is not None, f"{message} does not divide into {shared}"
        return replace(message, elements=elements)

    return [
        None if item.form is None else replace(item.form, messages=tuple(reduced(axis, m) for m in item.form.messages))
        for axis, (item, _) in enumerate(applied)
    ]


def called(
    node: fx.Node, applied: Sequence[tuple[Strategy, int]], axes: Sequence[object], rules: RuleBook = RULES
) -> tuple[Callable[..., Any] | str, tuple[Any, ...], dict[str, Any]]:
    """What one rank calls for an op: the op or its local form, with arguments as :func:`localized` makes them.

    axes: what a local form gets as its axes, one per strategy; a tuple of them where it takes several as one. Raises
    RuleError where two forms are wanted.
    """
    args, kwargs = localized(node, applied, rules)
    forms = [strategy.form for strategy, _ in applied if strategy.form]
    if not forms:
        return node.target, args, kwargs
    order = form_axes(applied, rules.rule(node))
    if order is None:
        raise RuleError(f"{name_of(node)} runs by one local form, not by {', '.join(form.function for form in forms)}")
    form = forms[0]
    taken: dict[str, tuple[object, ...]] = {}
    for axis in order:
        own = applied[axis][0].form
        assert own is not None
        taken[own.role] = (*taken.get(own.role, ()), axes[axis])
    roles: dict[str, Any] = {role: found if len(found) > 1 else found[0] for role, found in taken.items()}
    assert isinstance(node.target, torch._ops.OpOverload)
    defaults = {argument.name: argument.default_value for argument in node.target._schema.arguments}
    count = sum(1 for _ in itertools.takewhile(lambda value: isinstance(value, fx.Node), args))
    rest = {**dict(zip([*defaults][count:], args[count:], strict=False)), **kwargs}
    kept = {name: value for name, value in rest.items() if isinstance(value, fx.Node) or value != defaults.get(name)}
    return getattr(functions, form.function), args[:count], {**kept, **roles}
