"""Where collectives of a rank's graph begin and where they are waited for: what lies between goes on meanwhile.

A transition begins as soon as what it converts is made, and ops that read its result wait while a product that does not
need them can be computed. Products keep their order, and everything stays in the function (layer, or the stage's own)
in which it is written, so that little more is in memory at once. Backward the order is the opposite one, and with it
the collectives of gradients go on beside the gradients of the same ops.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence

from torch import fx

from autopart.passes import graph as graphs
from autopart.passes.annotate import is_contraction
from autopart.passes.emit.layers import Run, runs_of
from autopart.passes.emit.segments import segments_of, spans_of
from autopart.passes.kept import rerun
from autopart.passes.storage import is_view

_PRODUCTS = 2
"""How many products a collective goes on beside, at most: its result is in memory meanwhile."""


def reorder(graph: fx.Graph) -> None:
    """Moves, in place, transitions ahead and what reads them back."""
    for run, _ in runs_of(graph):
        new = _postponed(_hoisted(run.nodes))
        # modules that could run again by themselves still can
        if new != run.nodes and spans_of(run).keys() == spans_of(Run(run.path, new)).keys():
            _place(graph, run.nodes, new)


def begun(graph: fx.Graph, recompute: Collection[str] = ()) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """By transition that is begun and waited for later the ops that are computed meanwhile, in order.

    recompute: paths of layers and of modules in them, which are functions of their own.
    """
    again = rerun(graph, recompute)
    found = {}
    for _, _, own in segments_of(graph, recompute):
        for segment in own:
            numbers = {node: number for number, node in enumerate(segment.nodes)}
            for node, number in numbers.items():
                if not _sends(node):
                    continue
                readers = [numbers[user] for user in node.users if user in numbers]
                end = min(readers, default=len(segment.nodes))
                meanwhile = tuple(other for other in segment.nodes[number + 1 : end] if _computes(other))
                # a layer that runs again stops behind what it keeps last, which may lie between the two
                landed = segment.nodes[end] in again if end < len(segment.nodes) else False
                if meanwhile and (not segment.path or landed):
                    found[node] = meanwhile
    return found


def _sends(node: fx.Node) -> bool:
    if "transition" not in node.meta:
        return False
    step = node.meta["transition"][1]
    return step.forward is not None or (step.backward is not None and bool(node.meta.get("differentiable")))


def _is_product(node: fx.Node) -> bool:
    """Whether an op is a sum of products, or exchanges something itself."""
    return is_contraction(node) or "forms" in node.meta


def _computes(node: fx.Node) -> bool:
    return graphs.is_op(node) and "transition" not in node.meta and not is_view(node)


def _hoisted(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Transitions right behind what they convert, or no more than so many products ahead."""
    found: list[fx.Node] = []
    for node in nodes:
        at = len(found)
        if _sends(node):
            sources = set(graphs.tensors_read(node))
            products = 0
            while at and found[at - 1] not in sources and products < _PRODUCTS:
                products += _is_product(found[at - 1])
                at -= 1
            if not any(map(_computes, found[at:])):
                at = len(found)
            while at < len(found) and (graphs.is_getitem(found[at]) or _sends(found[at])):
                at += 1  # an op's results stay together, and what was first is sent first
        found.insert(at, node)
    return found


def _postponed(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Ops that read what is on its way stand back while products follow that do not wait for them."""
    found: list[fx.Node] = []
    rest = list(nodes)
    flying: dict[fx.Node, None] = {}  # in the order in which they begin
    while rest:
        node = rest.pop(0)
        landing = set(graphs.tensors_read(node)) & flying.keys()
        if landing:
            early = set(list(flying)[: min(map(list(flying).index, landing))])
            ahead = _independent(node, rest, flying.keys() - early)
            landing |= early.intersection(source for other in ahead for source in graphs.tensors_read(other))
            flying = {other: None for other in (*flying, *filter(_sends, ahead)) if other not in landing}
            found += ahead
            taken = set(ahead)
            rest = [other for other in rest if other not in taken] if taken else rest
        if _sends(node):
            flying[node] = None
        found.append(node)
    return found


def _independent(node: fx.Node, rest: Sequence[fx.Node], flying: Collection[fx.Node]) -> list[fx.Node]:
    """What of the rest can be computed before ``node``, up to the last product of these; products keep their order.

    flying: what is on its way, and may be so for longer.
    """
    if _is_product(node):
        return []
    waiting, found = {node, *flying}, list[fx.Node]()
    last = products = 0
    for other in rest:
        waits = not waiting.isdisjoint(graphs.tensors_read(other))
        if waits and _is_product(other):
            break
        if waits:
            waiting.add(other)
            continue
        if products == _PRODUCTS and not graphs.is_getitem(other):
            break
        found.append(other)
        if _sends(other):
            waiting.add(other)
        if _is_product(other):
            products += 1
        if _is_product(other) or (graphs.is_getitem(other) and last == len(found) - 1):
            last = len(found)
    return found[:last]


def _place(graph: fx.Graph, old: Sequence[fx.Node], new: Sequence[fx.Node]) -> None:
    """Puts nodes in another order, where the first of them stands, with the sizes that they need."""
    cursor = old[0].prev
    moving, placed = set(old), set[fx.Node]()
    before = set(itertools.takewhile(lambda node: node is not old[0], graph.nodes))

    def put(node: fx.Node) -> None:
        nonlocal cursor
        if node in placed:
            return
        placed.add(node)
        for source in _sizes(node):
            if source not in moving and source not in before:
                put(source)
        if cursor is not node:
            cursor.append(node)
        cursor = node

    for node in new:
        put(node)


def _sizes(node: fx.Node) -> Iterable[fx.Node]:
    return (
        source
        for source in node.all_input_nodes
        if source.op == "call_function" and not graphs.is_tensor(source) and not graphs.is_op(source)
    )
