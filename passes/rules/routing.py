"""Rows sorted by group, multiplied group by group, and put back: how a mixture routes tokens to its experts.

A routing is recognised by what flows where, whatever module wrote it::

    keys, numbers = sort(group of every row)       rows in the order of their groups, and which row each was
    rows = x[numbers // k]                         each of x's rows went to k groups
    ends = cumsum(counts of keys)
    y = grouped product(rows, weights, ends)       and ops on each row by itself, before and after
    y[places], places[numbers] = arange            back in the order in which the rows came

All of it may run on a shard of the rows as it does on the whole: a shard's rows are sorted, counted and put back by
themselves. What lies between the sort and the end is no shard of what the whole routing would compute, so it has
placements of its own (:mod:`autopart.runtime.placement`), and :mod:`routed` makes the ops' strategies.

The same facts, for the batch instead of a tensor axis, are followed in :mod:`autopart.passes.batch_rows`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from autopart.passes import graph as graphs
from autopart.passes.graph import Value
from autopart.passes.rules.arguments import argument
from autopart.passes.rules.book import RuleBook, name_of
from autopart.passes.rules.matching import summed
from autopart.passes.rules.notation import Rule
from autopart.passes.sizes import Extent, extent

aten = torch.ops.aten

_SORTS = (aten.sort.default, aten.sort.stable, aten.argsort.default, aten.argsort.stable)
_BLANKS = (aten.empty_like.default, aten.zeros_like.default)
_PRODUCTS = ("grouped_mm",)


class Step(enum.Enum):
    """What an op of a routing does."""

    SORT = enum.auto()
    PICK = enum.auto()
    """rows of a tensor in its own order, by their numbers"""
    LOOK_UP = enum.auto()
    """what a whole tensor has for each row's group, such as a bias"""
    COUNT = enum.auto()
    """counts of rows by group, from the sorted keys"""
    COUNTED = enum.auto()
    """something made of counts alone"""
    ROWS = enum.auto()
    """each row by itself"""
    PRODUCT = enum.auto()
    """rows by their group's matrix"""
    INVERT = enum.auto()
    """where each row went, from the numbers and an ``arange``, which is whole"""
    RETURN = enum.auto()
    """rows in the order in which they came"""


class _What(enum.Enum):
    ROWS = enum.auto()
    KEYS = enum.auto()
    NUMBERS = enum.auto()
    COUNTS = enum.auto()
    ENDS = enum.auto()
    PLACES = enum.auto()


@dataclass(frozen=True, slots=True)
class RoutedOp:
    """An op of a routing. rule: with ``rows``, the factor that its rows are; where it is needed."""

    node: fx.Node
    step: Step
    rule: Rule | None = None
    rows: str = ""


@dataclass(frozen=True, slots=True)
class Routing:
    """The ops between a sort by group and the return of its rows, in the graph's order.

    keys: the groups of all rows, which the sort reads. lengths: the numbers of rows and of what they are picked from;
    a shard has to hold a part of each.
    """

    keys: Value
    lengths: tuple[Extent, ...]
    ops: tuple[RoutedOp, ...]

    @property
    def products(self) -> tuple[RoutedOp, ...]:
        return tuple(op for op in self.ops if op.step is Step.PRODUCT)


def find_routings(graph: fx.Graph, rules: RuleBook) -> tuple[Routing, ...]:
    """All routings of a graph. A sort whose rows meet anything else is none."""
    nodes = list(graph.nodes)
    found = []
    for position, node in enumerate(nodes):
        if node.op == "call_function" and node.target in _SORTS:
            found.append(_Follower(rules).follow(nodes[position:]))
    return tuple(item for item in found if item is not None)


class _NoRouting(Exception):
    pass


@dataclass(slots=True)
class _Follower:
    """Follows one sort's rows through the ops behind it."""

    rules: RuleBook
    whats: dict[Value, _What] = field(default_factory=dict)
    counted: dict[Value, Extent] = field(default_factory=dict)
    """How many rows a value's row numbers number."""
    lengths: dict[Extent, None] = field(default_factory=dict)
    ops: list[RoutedOp] = field(default_factory=list)
    returned: bool = False

    def follow(self, nodes: Sequence[fx.Node]) -> Routing | None:
        sort = nodes[0]
        (keys,) = graphs.inputs(sort)
        rows = extent(keys.fake.shape[0]) if keys.fake.dim() == 1 else None
        wide = keys.fake.dtype.is_floating_point
        if rows is None or wide or argument(sort, 2, "descending", False) or argument(sort, 3, "descending", False):
            return None
        self.lengths[rows] = None
        outputs = graphs.outputs(sort)
        self.whats[outputs[-1]] = _What.NUMBERS
        self.counted[outputs[-1]] = rows
        if len(outputs) == 2:
            self.whats[outputs[0]] = _What.KEYS
        self.ops.append(RoutedOp(sort, Step.SORT))
        try:
            for node in nodes[1:]:
                self.visit(node, rows)
        except _NoRouting:
            return None
        if not self.returned or not any(op.step is Step.PRODUCT for op in self.ops):
            return None
        return Routing(keys, tuple(self.lengths), tuple(self.ops))

    def visit(self, node: fx.Node, rows: Extent) -> None:
        if graphs.is_getitem(node):
            return
        read = [source for source in node.all_input_nodes if graphs.is_tensor(source)]
        if not any(graphs.value_of(source) in self.whats for source in read):
            return
        if not graphs.is_op(node):
            raise _NoRouting
        values = graphs.inputs(node)
        whats = [self.whats.get(value) for value in values]
        if node.target is aten.index.Tensor:
            self.index(node, values, whats)
        elif node.target in (aten.index_put.default, aten.scatter.src):
            self.write(node, rows)
        elif node.target in _SORTS and whats == [_What.NUMBERS]:
            # sorted again, numbers say where each row went
            places = graphs.outputs(node)[-1]
            if len(graphs.outputs(node)) == 2 and any(
                graphs.value_of(user).index == 0 for user in node.users if graphs.is_getitem(user)
            ):
                raise _NoRouting
            self.put(node, Step.ROWS, _What.ROWS)
            self.whats[places] = _What.PLACES
        elif whats == [_What.KEYS] and _counts_groups(node):
            self.put(node, Step.COUNT, _What.COUNTS)
        elif whats == [_What.COUNTS] and node.target is aten.cumsum.default and argument(node, 1, "dim") == 0:
            self.put(node, Step.COUNTED, _What.ENDS)
        elif whats in ([_What.COUNTS], [_What.ENDS]) and node.target is aten.to.dtype:
            self.put(node, Step.COUNTED, self.whats[values[0]])
        elif whats == [_What.NUMBERS]:
            self.number(node, values[0])
        elif any(part in name_of(node) for part in _PRODUCTS):
            if whats != [_What.ROWS, None, _What.ENDS]:
                raise _NoRouting
            self.put(node, Step.PRODUCT, _What.ROWS, self.rules.rule(node))
        elif node.target in _BLANKS:
            self.put(node, Step.ROWS, _What.ROWS)
        else:
            self.rowwise(node, values, whats)

    def put(self, node: fx.Node, step: Step, what: _What | None, rule: Rule | None = None, rows: str = "") -> None:
        self.ops.append(RoutedOp(node, step, rule, rows))
        if what is not None:
            self.whats.update(dict.fromkeys(graphs.outputs(node), what))

    def number(self, node: fx.Node, numbers: Value) -> None:
        """Ops on row numbers: a number of k times as many rows is divided by k."""
        what, of = _What.NUMBERS, self.counted[numbers]
        if node.target in _BLANKS:
            what = _What.ROWS
        elif node.target is aten.floor_divide.default or (
            node.target is aten.div.Tensor_mode and node.kwargs.get("rounding_mode") in ("floor", "trunc")
        ):
            divisor = node.args[1]
            quotient = of.over(Extent(divisor)) if isinstance(divisor, int) and divisor > 0 else None
            if quotient is None:
                raise _NoRouting
            of = quotient
        elif node.target is not aten.to.dtype or node.meta["val"].dtype.is_floating_point:
            raise _NoRouting
        self.put(node, Step.ROWS, what)
        self.counted[Value(node)] = of

    def index(self, node: fx.Node, values: Sequence[Value], whats: Sequence[_What | None]) -> None:
        """Rows picked by their numbers or groups, or put back by their places."""
        if len(values) != 2 or len(argument(node, 1, "indices")) != 1:
            raise _NoRouting
        source, pointer = values
        if whats == [None, _What.NUMBERS]:
            of = self.counted[pointer]
            if extent(source.fake.shape[0]) != of:
                raise _NoRouting
            self.lengths[of] = None
            self.put(node, Step.PICK, _What.ROWS)
        elif whats == [None, _What.KEYS]:
            self.put(node, Step.LOOK_UP, _What.ROWS)
        elif whats == [_What.ROWS, _What.PLACES]:
            self.put(node, Step.RETURN, None)
            self.returned = True
        else:
            raise _NoRouting

    def write(self, node: fx.Node, rows: Extent) -> None:
        """Written to the sort's own numbers, all of them: rows are put back, an ``arange`` becomes their places."""
        if node.target is aten.index_put.default:
            base, listed, values = argument(node, 0, "self"), argument(node, 1, "indices"), argument(node, 2, "values")
            index = listed[0] if len(listed) == 1 and not argument(node, 3, "accumulate", False) else None
        else:
            base, index, values = argument(node, 0, "self"), argument(node, 2, "index"), argument(node, 3, "src")
            index = index if argument(node, 1, "dim") == 0 and base.meta["val"].dim() == 1 else None
        if index is None:
            raise _NoRouting
        known = [self.whats.get(graphs.value_of(item)) for item in (base, index)]
        if known != [_What.ROWS, _What.NUMBERS] or self.counted[graphs.value_of(index)] != rows:
            raise _NoRouting
        if graphs.value_of(values) in self.whats:
            if self.whats[graphs.value_of(values)] is not _What.ROWS:
                raise _NoRouting
            self.put(node, Step.RETURN, None)
            self.returned = True
        elif values.target is aten.arange.default and extent(values.meta["val"].shape[0]) == rows:
            self.put(node, Step.INVERT, _What.PLACES)
        else:
            raise _NoRouting

    def rowwise(self, node: fx.Node, values: Sequence[Value], whats: Sequence[_What | None]) -> None:
        """An op whose rule keeps rows apart: all operands that have rows are routed, and so is every result."""
        rule = self.rules.rule(node)
        if rule is None or rule.random:
            raise _NoRouting
        row = {dims[0] for dims, what in zip(rule.inputs, whats, strict=True) if what is not None}
        factors = row.pop() if len(row) == 1 else ()
        if len(factors) != 1 or any(what not in (None, _What.ROWS, _What.KEYS) for what in whats):
            raise _NoRouting
        (factor,) = factors
        having = [any(factor in dim for dim in dims) for dims in rule.inputs]
        whole = factor in rule.frozen or factor in rule.forms or summed(rule, factor)
        if whole or having != [what is not None for what in whats] or any(d[:1] != (factors,) for d in rule.outputs):
            raise _NoRouting
        kept = whats == [_What.KEYS] and node.target is aten.to.dtype
        self.put(node, Step.ROWS, _What.KEYS if kept else _What.ROWS, rule, factor)


def _counts_groups(node: fx.Node) -> bool:
    """One bin for each group number from 0 on."""
    if node.target is aten.bincount.default:
        return len(graphs.inputs(node)) == 1
    if node.target is not aten.histc.default:
        return False
    bins = argument(node, 1, "bins", 100)
    return (argument(node, 2, "min", 0), argument(node, 3, "max", 0)) == (0, bins - 1)
