"""Strategies of routed rows: each rank its own rows, and rows sent to the ranks that have their groups' weights.

With the rows of a routing (:mod:`routing`) sharded on an axis, every op of it can run on a rank's own rows. A grouped
product whose weights are sharded by group then needs the rows of a rank's groups from all ranks: expert parallelism
(GShard, Lepikhin et al., arXiv 2006.16668, section 3). ``O``, ``C`` and ``E`` are the placements of routed rows::

    name         rows in  weights  rows out   sends, forward (and backward)
    own          O        B        O          -
    dispatch     O        S0       E          own rows to their groups (their gradients back)
    group        E        S0       E          -
    combine      E        S0       O          groups' rows back (their gradients there)
    exchange     O        S0       O          both

Ops on each row by itself are ``own`` (O to O) or ``group`` (E to E), so that between the two products of an expert
nothing is sent. How many rows go where depends on the data. A rank's own rows do not, and each of the four exchanges
has them at one end: they are what a plan counts and :mod:`autopart.runtime.traffic` sees. Prices take groups as equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from torch import fx

from autopart.passes import graph as graphs
from autopart.passes.rules.applied import Strategy, localized
from autopart.passes.rules.book import RuleBook
from autopart.passes.rules.matching import is_differentiable, settle, sharded
from autopart.passes.rules.notation import LocalForm, Message
from autopart.passes.rules.routing import RoutedOp, Routing, Step
from autopart.passes.sizes import Extent, extent
from autopart.runtime.placement import BROADCAST, REPLICATE, Kind, Placement, shard

_COUNT_BYTES = 8


def with_routings(
    routings: Sequence[Routing],
    offered: Mapping[fx.Node, tuple[Strategy, ...]],
    parts: int,
    rules: RuleBook,
) -> dict[fx.Node, tuple[Strategy, ...]]:
    """What is offered on an axis of ``parts`` ranks, and the strategies of routings besides.

    A routing runs on every shard that what makes its keys can give, if the shard holds as many whole rows of all that
    rows are picked from.
    """
    result = dict(offered)
    for routing in routings:
        source = routing.keys
        made = (item.outputs[source.index] for item in offered.get(source.node, ()))
        for placement in dict.fromkeys(item for item in made if item.is_shard and item.dim == 0):
            blocks = Extent(placement.outer, placement.batched)
            shares = [length.over(blocks) for length in routing.lengths]
            if any(item is None or item.batched or item.coefficient % parts for item in shares):
                continue
            for op in routing.ops:
                result[op.node] = (*result[op.node], *_strategies(op, routing, placement, parts, rules))
    return result


def _strategies(op: RoutedOp, routing: Routing, rows: Placement, parts: int, rules: RuleBook) -> Iterable[Strategy]:
    """An op's strategies for rows that come from shards placed as ``rows``."""
    node, own = op.node, replace(rows, kind=Kind.OWN_ROWS)
    counts, groups = replace(rows, kind=Kind.OWN_COUNTS), replace(rows, kind=Kind.GROUP_ROWS)
    blocks = str(rows).partition("/")[2]
    suffix = f"/{blocks}" if blocks else ""
    many, results = len(graphs.inputs(node)), len(graphs.outputs(node))
    if op.step is Step.PRODUCT:
        yield from _products(op, routing, (own, counts, groups), parts, suffix)
    elif op.step is Step.ROWS and op.rule is not None:
        yield from _by_row(op, (own, groups), parts, suffix, rules)
    elif op.step is Step.LOOK_UP:
        source = graphs.inputs(node)[0]
        yield Strategy(f"own{suffix}", (settle(BROADCAST, source), own), (own,))
        size, products = extent(source.fake.shape[0]), [item.rule for item in routing.products]
        alike = all(rule is not None and rule.forms and rule.size("e") == size for rule in products)
        if size is not None and alike and size.coefficient % parts == 0 and _together(routing):
            counted = LocalForm("group_look_up", messages=(_counted(size.coefficient, parts),))
            yield Strategy(f"group{suffix}", (shard(0), own), (groups,), counted)
    else:
        wanted: dict[Step, tuple[Placement, ...]] = {
            Step.SORT: (rows,),
            Step.PICK: (rows, own),
            Step.COUNT: (own,),
            Step.COUNTED: (counts,),
            Step.ROWS: (own,) * many,
            Step.INVERT: (own, own, REPLICATE),
            Step.RETURN: (own,) * many,
        }
        made = {Step.COUNT: counts, Step.COUNTED: counts, Step.RETURN: rows}.get(op.step, own)
        form = LocalForm("own_places") if op.step is Step.INVERT else None
        yield Strategy(f"own{suffix}", wanted[op.step], (made,) * results, form)


def _by_row(
    op: RoutedOp, kinds: tuple[Placement, Placement], parts: int, suffix: str, rules: RuleBook
) -> Iterable[Strategy]:
    """An op on each row by itself, if its arguments hold for any number of rows."""
    node, rule = op.node, op.rule
    assert rule is not None
    sharding = (op.rows, Extent(kinds[0].outer, kinds[0].batched))
    inputs, outputs = sharded(rule, node, sharding)
    if localized(node, [(Strategy("", inputs, outputs), parts)], rules) != (tuple(node.args), dict(node.kwargs)):
        return
    for name, kind in zip(("own", "group"), kinds, strict=True):

        def routed(placement: Placement, kind: Placement = kind) -> Placement:
            return kind if placement.is_shard else placement

        yield Strategy(f"{name}{suffix}", tuple(map(routed, inputs)), tuple(map(routed, outputs)))


def _products(
    op: RoutedOp, routing: Routing, kinds: tuple[Placement, Placement, Placement], parts: int, suffix: str
) -> Iterable[Strategy]:
    own, counts, groups = kinds
    rule, (x, weight, _) = op.rule, graphs.inputs(op.node)
    assert rule is not None
    yield Strategy(f"own{suffix}", (own, settle(BROADCAST, weight), counts), (own,))
    if not rule.forms or rule.size("e").coefficient % parts:
        return
    t, k, n = rule.inputs[0][0][0], rule.inputs[0][1][0], rule.outputs[0][1][0]
    size = x.fake.element_size()

    def moved(factors: tuple[str, str], back: bool, beside: bool = False) -> tuple[Message, ...]:
        elements = rule.size(factors[0]).times(rule.size(factors[1]))
        assert elements is not None
        there = Message("all_to_all", "forward", factors, size, elements)
        return (there, replace(there, phase="backward", beside=beside)) if back else (there,)

    counted = _counted(rule.size("e").coefficient, parts)
    there, back = moved((t, k), is_differentiable(x), beside=is_differentiable(weight)), moved((t, n), True)
    shares = shard(0)
    offered = [("exchange", own, own, (counted, *there, *back))]
    if _together(routing):
        offered += [
            ("dispatch", own, groups, (counted, *there)),
            ("group", groups, groups, ()),
            ("combine", groups, own, back),
        ]
    for name, given, made, messages in offered:
        form = LocalForm(f"{name}_experts_product", messages=messages)
        yield Strategy(f"{name}{suffix}", (given, shares, counts), (made,), form)


def _together(routing: Routing) -> bool:
    """Whether all products count rows alike: those that stay with their groups lie as the dispatch counted them."""
    return len({graphs.inputs(item.node)[2] for item in routing.products}) == 1


def _counted(groups: int, parts: int) -> Message:
    """Every rank tells every other how many rows of each of its groups will come."""
    return Message("all_to_all", "forward", (), _COUNT_BYTES, Extent(groups * parts))
