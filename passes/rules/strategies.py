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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from autopart.passes import graph as graphs
from autopart.passes.graph import Value
from autopart.passes.rules import matching
from autopart.passes.rules.applied import Strategy, local_arguments, sharding_name
from autopart.passes.rules.book import RuleBook
from autopart.passes.rules.matching import Sharding, is_differentiable
from autopart.passes.rules.notation import Dims, Rule
from autopart.passes.rules.table import RULES
from autopart.passes.sizes import ONE, Extent, extents
from autopart.runtime.placement import BROADCAST, REPLICATE, Placement

_MOST_BLOCKS = 8
"""Numbers of outer blocks offered per factor (for each product of other axes' sizes): real models need one or two, and
each costs the solver a choice."""


def divides(rule: Rule, sharding: Sharding, parts: int, batch: bool, pieces: Sequence[Extent] = (ONE,)) -> bool:
    """Whether a factor may be sharded that many ways. Batched factors are taken to divide; the caller sees to it.

    pieces: how many other axes may make of it.
    """
    factor, outer = sharding
    size = rule.sizes[factor]
    inner = None if size is None or factor in rule.frozen else size.over(outer)
    if inner is None or inner.batched != batch:
        return False
    form = rule.forms.get(factor)
    if form is not None and outer not in (pieces if form.several else (ONE,)):
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
        self.divided: list[tuple[Rule, Sharding, bool]] = []
        # by rule, which equal ops share, and by identity, as hashing one costs more than placing
        self._placed: dict[tuple[int, Sharding], tuple[Placement | None, ...] | None] = {}
        self._matched: dict[tuple[int, int, Placement], Sharding | None] = {}

    def placed(self, rule: Rule, sharding: Sharding) -> tuple[Placement | None, ...] | None:
        """Where a sharding puts the inputs and outputs of an op; None where it does not divide."""
        key = id(rule), sharding
        if key not in self._placed:
            divided = divides(rule, sharding, self.parts, self.batch, self.coarser)
            self.divided.append((rule, sharding, divided))
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
        placed, most = self.placed(rule, sharding), _MOST_BLOCKS * len(self.coarser)
        if placed is None or (len(found) >= most and sum(name == sharding[0] for name, _ in found) >= most):
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
        if key not in kept and local_arguments(node, [(strategy, parts)], rules, rule) is not None:
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
    bound = bound_rules(graph, rules) if bound is None else bound
    return Strategies(graph, rules, batch, bound, first or {}).on(parts, others)


@dataclass(frozen=True, slots=True)
class _Propagated:
    """What holds for all axes that divide the same sizes. divided: what was asked for, and whether it is; pieces: what
    other axes may make of it. ops: one of those that are equal and have the same candidates, with these. nodes: for an
    op its number in ``ops``, for another tensor its candidates.
    """

    divided: tuple[tuple[Rule, Sharding, bool], ...]
    pieces: tuple[Extent, ...]
    ops: tuple[tuple[fx.Node, Rule | None, tuple[Sharding, ...]], ...]
    nodes: Mapping[fx.Node, int | tuple[Placement, ...]]

    def holds(self, parts: int, batch: bool) -> bool:
        return all(divides(rule, item, parts, batch, self.pieces) == divided for rule, item, divided in self.divided)


@dataclass(slots=True)
class Strategies:
    """Those of one graph on axes of any size, as :func:`strategies` takes it; what they share is found once."""

    graph: fx.Graph
    rules: RuleBook
    batch: bool
    bound: Mapping[fx.Node, Rule | None]
    first: Mapping[fx.Node, fx.Node]
    _known: dict[tuple[int, ...], list[_Propagated]] = field(default_factory=dict)  # by sizes of other axes

    def on(self, parts: int, others: Sequence[int] = ()) -> dict[fx.Node, tuple[Strategy, ...]]:
        known = self._known.setdefault(tuple(others), [])
        found = next((item for item in known if item.holds(parts, self.batch)), None)
        if found is None:
            found = self._propagated(parts, others)
            known.append(found)
        ops = [_distinct(op[0], op[1], parts, _op_strategies(*op), self.rules) for op in found.ops]
        return {
            node: ops[own] if isinstance(own, int) else _source_strategies(node, own)
            for node, own in found.nodes.items()
        }

    def _propagated(self, parts: int, others: Sequence[int]) -> _Propagated:
        candidates = _Candidates(self.bound, parts, self.batch, others)
        candidates.propagate()
        numbers = dict[tuple[fx.Node, tuple[Sharding, ...]], int]()
        ops = list[tuple[fx.Node, Rule | None, tuple[Sharding, ...]]]()
        nodes = dict[fx.Node, int | tuple[Placement, ...]]()
        for node in self.graph.nodes:
            if graphs.is_op(node):
                shardings = tuple(candidates.shardings[node])
                alike = self.first.get(node, node), shardings
                if alike not in numbers:
                    numbers[alike] = len(ops)
                    ops.append((node, candidates.rules[node], shardings))
                nodes[node] = numbers[alike]
            elif _tensors(node):
                nodes[node] = tuple(candidates.placements.get(Value(node), ()))
        return _Propagated(tuple(candidates.divided), candidates.coarser, tuple(ops), nodes)


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
    if not divides(rule, sharding, parts, batch=False, pieces=(sharding[1],)):
        return None
    return next((item for item in op_strategies(node, parts, [sharding], rules) if item.name == name), None)
