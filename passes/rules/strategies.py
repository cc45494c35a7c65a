"""All ways to run each op of a graph on one mesh axis.

Every op can be replicated (R), or replicated with its gradients partial sums (B: a gradient is linear in what comes in,
so this holds for every op). Ops on tensors with a size that is data, or no multiple of the batch size, can only be R.
An op with a rule can also take partial sums in each group of operands it is linear in (P), and can shard each factor
that is not frozen. A factor may be sharded inside several outer blocks; which numbers of blocks are worth offering
follows from the ops around: a fused projection is sharded inside three blocks because the split that reads it is.
Candidate placements of every value are therefore propagated along the graph to a fixpoint.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopart.passes import graph as graphs
from autopart.passes.graph import Value
from autopart.passes.rules import matching
from autopart.passes.rules.book import Arguments, Local, RuleBook, name_of
from autopart.passes.rules.matching import Sharding, is_differentiable
from autopart.passes.rules.notation import Dims, Extents, LocalForm, Message, Rule, RuleError
from autopart.passes.rules.table import RULES
from autopart.passes.sizes import ONE, Extent, extents
from autopart.runtime import local_forms as functions
from autopart.runtime.placement import BROADCAST, REPLICATE, Kind, Placement, nested

_MOST_BLOCKS = 8
"""Numbers of outer blocks offered per factor (for each product of other axes' sizes): real models need one or two, and
each costs the solver a choice."""


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


def divides(rule: Rule, sharding: Sharding, parts: int, batch: bool) -> bool:
    """Whether a factor may be sharded that many ways. Batched factors are taken to divide; the caller sees to it."""
    factor, outer = sharding
    size = rule.sizes[factor]
    inner = None if size is None or factor in rule.frozen else size.over(outer)
    if inner is None or inner.batched != batch or (factor in rule.forms and outer != ONE):
        return False
    return batch or inner.coefficient % parts == 0


def _tensors(node: fx.Node) -> bool:
    return graphs.is_op(node) or (node.op in ("placeholder", "get_attr") and graphs.is_tensor(node))


class _Candidates:
    """Candidate sharded placements of every value, and the shardings of every op that they belong to."""

    def __init__(self, rules: Mapping[fx.Node, Rule | None], parts: int, batch: bool, others: Sequence[int]) -> None:
        self.parts, self.batch = parts, batch
        subsets = (some for count in range(len(others) + 1) for some in itertools.combinations(others, count))
        self.coarser = tuple(dict.fromkeys(Extent(math.prod(some)) for some in subsets))
        self.rules = rules
        self.placements: dict[Value, dict[Placement, None]] = {}
        self.shardings: dict[fx.Node, dict[Sharding, None]] = {node: {} for node in self.rules}
        self.readers: dict[Value, list[tuple[fx.Node, Dims]]] = {}
        self.values: dict[fx.Node, tuple[Value, ...]] = {}
        for node, rule in self.rules.items():
            if rule is not None:
                self.values[node] = (*graphs.inputs(node), *graphs.outputs(node))
                for value, dims in zip(self.values[node], (*rule.inputs, *rule.outputs), strict=True):
                    self.readers.setdefault(value, []).append((node, dims))
        self.pending: deque[tuple[Value, Placement]] = deque()
        # by rule, which equal ops share, and by identity, as hashing one costs more than placing
        self._placed: dict[tuple[int, Sharding], tuple[Placement | None, ...] | None] = {}
        self._matched: dict[tuple[int, int, Placement], Sharding | None] = {}

    def placed(self, rule: Rule, sharding: Sharding) -> tuple[Placement | None, ...] | None:
        """Where a sharding puts the inputs and outputs of an op; None where it does not divide."""
        key = id(rule), sharding
        if key not in self._placed:
            divided = divides(rule, sharding, self.parts, self.batch)
            every = (*rule.inputs, *rule.outputs)
            self._placed[key] = tuple(matching.placed(rule, dims, sharding) for dims in every) if divided else None
        return self._placed[key]

    def matched(self, rule: Rule, dims: Dims, placement: Placement) -> Sharding | None:
        """The sharding that a placement of a tensor with these dims means; None if it is not one."""
        key = id(rule), id(dims), placement
        if key not in self._matched:
            self._matched[key] = matching.match(rule, dims, placement)
        return self._matched[key]

    def offer(self, node: fx.Node, rule: Rule, sharding: Sharding) -> None:
        found = self.shardings[node]
        if sharding in found:
            return
        placed = self.placed(rule, sharding)
        if placed is None or sum(name == sharding[0] for name, _ in found) >= _MOST_BLOCKS * len(self.coarser):
            return
        found[sharding] = None
        for value, placement in zip(self.values[node], placed, strict=True):
            known = self.placements.setdefault(value, {})
            if placement is not None and placement not in known:
                known[placement] = None
                self.pending.append((value, placement))

    def propagate(self) -> None:
        """Every op starts from its factors in one block, and in the pieces that other axes may make of it; each new
        placement of a value is shown to all its users.
        """
        for outer in self.coarser:
            for node, rule in self.rules.items():
                for factor in rule.factors if rule is not None else ():
                    assert rule is not None
                    self.offer(node, rule, (factor, outer))
        while self.pending:
            value, placement = self.pending.popleft()
            for node, dims in self.readers.get(value, ()):
                rule = self.rules[node]
                assert rule is not None
                sharding = self.matched(rule, dims, placement)
                if sharding is not None and sharding not in self.shardings[node]:
                    self.offer(node, rule, sharding)


def _source_strategies(node: fx.Node, placements: Iterable[Placement]) -> tuple[Strategy, ...]:
    """A parameter, buffer or input: replicated, its gradient a partial sum, or stored sharded."""
    value = Value(node)
    whole = [REPLICATE, BROADCAST] if is_differentiable(value) else [REPLICATE]
    return tuple(Strategy(str(placement), (), (placement,)) for placement in [*whole, *placements])


def _op_strategies(node: fx.Node, rule: Rule | None, shardings: Iterable[Sharding]) -> Iterable[Strategy]:
    inputs, outputs = graphs.inputs(node), graphs.outputs(node)
    yield Strategy("R", (REPLICATE,) * len(inputs), (REPLICATE,) * len(outputs))
    if any(extents(value.fake) is None for value in [*inputs, *outputs]):
        return  # what would be sent of such a tensor cannot be counted
    if any(is_differentiable(value) for value in [*inputs, *outputs]):
        settle = matching.settle
        yield Strategy(
            "B",
            tuple(settle(BROADCAST, value) for value in inputs),
            tuple(settle(BROADCAST, value) for value in outputs),
        )
        for index, group in enumerate(rule.linear if rule is not None else ()):
            assert rule is not None
            if any(is_differentiable(inputs[operand]) for operand in group):
                name = "P" if len(rule.linear) == 1 else f"P{index}"
                yield Strategy(name, *matching.partial_sums(rule, node, group))
    for sharding in shardings:
        assert rule is not None
        yield Strategy(
            sharding_name(sharding), *matching.sharded(rule, node, sharding), form=rule.forms.get(sharding[0])
        )


def _distinct(
    node: fx.Node, rule: Rule | None, parts: int, found: Iterable[Strategy], rules: RuleBook
) -> tuple[Strategy, ...]:
    """Without repeats (B is R where nothing has a gradient) and without those whose sizes cannot be written down."""
    kept: dict[tuple[tuple[Placement, ...], tuple[Placement, ...]], Strategy] = {}
    for strategy in found:
        key = (strategy.inputs, strategy.outputs)
        if key not in kept and _localized(node, [(strategy, parts)], rules, rule) is not None:
            kept[key] = strategy
    return tuple(kept.values())


def bound_rules(
    graph: fx.Graph, rules: RuleBook = RULES, first: Mapping[fx.Node, fx.Node] | None = None
) -> dict[fx.Node, Rule | None]:
    """Every op's rule with the sizes of its operands; None where there is none. Raises RuleError as strategies do.

    first: as strategies take it; equal ops have one rule.
    """
    bound: dict[fx.Node, Rule | None] = {}
    for node in graph.nodes:
        if graphs.is_op(node):
            equal = node if first is None else first.get(node, node)
            bound[node] = bound[equal] if equal in bound else rules.rule(node)
    return bound


def strategies(
    graph: fx.Graph,
    parts: int,
    rules: RuleBook = RULES,
    batch: bool = False,
    others: Sequence[int] = (),
    bound: Mapping[fx.Node, Rule | None] | None = None,
    first: Mapping[fx.Node, fx.Node] | None = None,
) -> dict[fx.Node, tuple[Strategy, ...]]:
    """The strategies of every op, parameter, buffer and input on a mesh axis of ``parts`` ranks.

    ``batch``: consider only factors that hold the batch size, instead of only those that do not. ``others``: sizes of
    the other tensor axes. ``bound``: the ops' rules, where they are known (:func:`bound_rules`). ``first``: for an op
    another one that equals it in all but the tensors it reads. Sizes, ``getitem`` and the output are not in the result.
    Raises RuleError where a rule does not fit its op.
    """
    candidates = _Candidates(bound_rules(graph, rules) if bound is None else bound, parts, batch, others)
    candidates.propagate()
    result: dict[fx.Node, tuple[Strategy, ...]] = {}
    made: dict[tuple[fx.Node, tuple[Sharding, ...]], tuple[Strategy, ...]] = {}
    for node in graph.nodes:
        if not _tensors(node):
            continue
        if graphs.is_op(node):
            rule, shardings = candidates.rules[node], candidates.shardings[node]
            key = (node if first is None else first.get(node, node), tuple(shardings))
            if key not in made:
                made[key] = _distinct(node, rule, parts, _op_strategies(node, rule, shardings), rules)
            result[node] = made[key]
        else:
            result[node] = _source_strategies(node, candidates.placements.get(Value(node), ()))
    return result


def op_strategies(
    node: fx.Node, parts: int, shardings: Sequence[Sharding], rules: RuleBook = RULES
) -> tuple[Strategy, ...]:
    """The strategies of one op for shardings chosen by the caller."""
    rule = rules.rule(node)
    return _distinct(node, rule, parts, _op_strategies(node, rule, shardings), rules)


def strategy_named(node: fx.Node, name: str, parts: int, rules: RuleBook = RULES) -> Strategy | None:
    """The strategy that shards a factor, by its name, such as ``n/3``; None if the op has none.

    Also one that :func:`strategies` leaves out, because nothing around this op asks for so many blocks.
    """
    factor, _, blocks = name.partition("/")
    rule, number = rules.rule(node), re.fullmatch(r"(?!$)(\d*)(b?)", blocks or "1")
    if rule is None or factor not in rule.sizes or number is None:
        return None
    sharding = factor, Extent(int(number[1] or 1), bool(number[2]))
    if not divides(rule, sharding, parts, batch=False):
        return None
    return next((item for item in op_strategies(node, parts, [sharding], rules) if item.name == name), None)


def one_form(forms: Sequence[LocalForm]) -> bool:
    """Whether an op's forms on its axes are none, one on one axis, or the parts of one that spans two."""
    roles = sorted(form.role for form in forms)
    return roles in ([], ["axis"]) or (roles == ["columns", "rows"] and forms[0].function == forms[1].function)


def compatible(
    node: fx.Node,
    chosen: Sequence[Strategy],
    sizes: Sequence[int],
    rules: RuleBook = RULES,
    rule: Rule | None = None,
) -> bool:
    """Whether an op can run by these strategies, one per axis of these sizes, or a tensor be stored so.

    The cuts of each operand and output nest (then the sizes divide as well, since each strategy's do), the sizes can be
    written down, and there is at most one local form, on the axis or axes that it is for. rule: the op's, if known.
    """
    sides = [
        *zip(*(item.inputs for item in chosen), strict=True),
        *zip(*(item.outputs for item in chosen), strict=True),
    ]
    if not all(nested(side, sizes) for side in sides) or not one_form([item.form for item in chosen if item.form]):
        return False
    if not graphs.is_op(node):
        return True
    return _localized(node, list(zip(chosen, sizes, strict=True)), rules, rule or rules.rule(node)) is not None


def sharding_of(rule: Rule, strategy: Strategy) -> Sharding | None:
    """The factor that a strategy of an op with this rule shards; None for R, B and P."""
    sides = [*zip(rule.inputs, strategy.inputs, strict=True), *zip(rule.outputs, strategy.outputs, strict=True)]
    for dims, placement in sides:
        if placement.kind is Kind.SHARD:
            sharding = matching.match(rule, dims, placement)
            assert sharding is not None, f"{strategy} does not shard a factor of {rule}"
            return sharding
    return None


def _localized(
    node: fx.Node, applied: Sequence[tuple[Strategy, int]], rules: RuleBook, rule: Rule | None
) -> Arguments | None:
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
    found = _localized(node, applied, rules, rules.rule(node))
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

    axes: what a local form gets as its axes, one per strategy. Raises RuleError where two forms are wanted.
    """
    args, kwargs = localized(node, applied, rules)
    forms = [(strategy.form, axis) for (strategy, _), axis in zip(applied, axes, strict=True) if strategy.form]
    if not forms:
        return node.target, args, kwargs
    if not one_form([form for form, _ in forms]):
        raise RuleError(f"{name_of(node)} runs by one local form, not by {', '.join(f.function for f, _ in forms)}")
    form = forms[0][0]
    assert isinstance(node.target, torch._ops.OpOverload)
    defaults = {argument.name: argument.default_value for argument in node.target._schema.arguments}
    count = sum(1 for _ in itertools.takewhile(lambda value: isinstance(value, fx.Node), args))
    rest = {**dict(zip([*defaults][count:], args[count:], strict=False)), **kwargs}
    kept = {name: value for name, value in rest.items() if isinstance(value, fx.Node) or value != defaults.get(name)}
    return getattr(functions, form.function), args[:count], {**kept, **{form.role: axis for form, axis in forms}}
