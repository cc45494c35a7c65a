"""Written buffers that gather what the samples give, such as a router's counts of the tokens that each expert gets.

Every share of the samples writes what it makes of the old value and its own samples. Where its part is *added* to the
old value, which every share has, the whole batch's value is the old one and all parts, to the last digit, which also
whole numbers allow; where the new value is a *sum* over samples, as in an average that moves by the batch's mean, the
shares' values add up. Ops that add into a tensor by position are taken apart for this, into their sums and an addition.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import fx

from autopart.passes import graph as graphs
from autopart.passes.batch_state import SUMMED, WHOLE, BatchState, Mixes
from autopart.passes.program import Program, Role
from autopart.passes.rules.arguments import argument
from autopart.runtime.placement import PARTIAL

if TYPE_CHECKING:
    from autopart.passes.batch import Splitter

aten = torch.ops.aten

_ADDITIONS = (aten.add.Tensor, aten.sub.Tensor)
_INTO_PLACES = {
    aten.index_add.default,
    aten.scatter_add.default,
    aten.index_put.default,
    aten.scatter_reduce.two,
}


def additions_to_buffers(program: Program) -> set[fx.Node]:
    """Ops that add to a written buffer's old value to make its new one, which nothing else reads."""
    names, results = program.updated_buffers, graphs.results(program.graph)
    found: set[fx.Node] = set()
    for name, result in zip(names, results[len(results) - len(names) :], strict=True):
        chain: list[fx.Node] = []
        node: fx.Node | None = result
        while node is not None and node.op != "placeholder":
            chain.append(node)
            node = _old_of(node, name)
        inside = {*chain, program.graph.output_node()}
        if node is not None and node.meta.get("name") == name and all(inside.issuperset(item.users) for item in chain):
            found.update(chain)
    return found


def _old_of(node: fx.Node, name: str) -> fx.Node | None:
    """The operand to which the op adds the others; of two, that which is the buffer or an addition to it."""
    sources = graphs.input_nodes(node)
    if _adds_into_places(node):
        return sources[0]
    if node.target not in _ADDITIONS or len(sources) != 2:
        return None
    if node.target is aten.add.Tensor and "alpha" not in node.kwargs and _leads_to(sources[1], name):
        return sources[1]
    return sources[0]


def _leads_to(node: fx.Node | None, name: str) -> bool:
    while node is not None and node.op != "placeholder":
        node = _old_of(node, name)
    return node is not None and node.meta["role"] is Role.BUFFER and bool(node.meta["name"] == name)


def accumulated(splitter: Splitter, node: fx.Node) -> fx.Node | None:
    """Ops that add a sum over samples to a tensor which every share has; None for others."""
    sources = graphs.input_nodes(node)
    states = [splitter.state(item) for item in sources]
    if all(state.whole for state in states):
        return None
    if _adds_into_places(node):
        return _added_in_places(splitter, node, states[0])
    if node.target in _ADDITIONS and len(sources) == 2:
        for old, part in (sources, sources[::-1]):
            if splitter.state(part) == SUMMED and _is_written(splitter, old):
                if splitter.state(old).whole and splitter.env[part] not in splitter.bound:
                    # a count of the inputs alone is known before the step
                    total = splitter.completed(splitter.env[part])
                    return splitter.put(splitter.copy(node, {part: total}), WHOLE)
                if node in splitter.additions:
                    return splitter.put(splitter.copy(node), _with_part(splitter, old))
    if node.target is aten.to.dtype and states[0].placement == PARTIAL and _widens(sources[0], node):
        return splitter.put(splitter.copy(node), SUMMED)
    return None


def how_written(name: str, state: BatchState) -> str:
    """How the shares' new values of a buffer combine. Raises Mixes where they do not."""
    if state.whole:
        return ""
    if state.placement != PARTIAL or (state.onto is not None and state.onto.meta["name"] != name):
        raise Mixes(f"updates the buffer {name!r} by what depends on the samples and is no sum over them")
    return "sum" if state.onto is None else "added"


def _is_written(splitter: Splitter, node: fx.Node) -> bool:
    """Whether it is a written buffer as it was, or with sums added to it already."""
    new = splitter.env[node]
    if splitter.states[new].onto is not None:
        return True
    is_buffer = new.op == "placeholder" and new.meta["role"] is Role.BUFFER
    return is_buffer and new.meta["name"] in splitter.program.updated_buffers


def _with_part(splitter: Splitter, old: fx.Node) -> BatchState:
    new = splitter.env[old]
    return BatchState(PARTIAL, onto=splitter.states[new].onto or new)


def _added_in_places(splitter: Splitter, node: fx.Node, state: BatchState) -> fx.Node | None:
    """The sums by position of zeros, and the addition of what was there."""
    sources = graphs.input_nodes(node)
    adds = node in splitter.additions and _is_written(splitter, sources[0])
    if not adds and (
        not state.whole or splitter.followed(node, [splitter.state(item).placement for item in sources])[1] is not None
    ):
        return None
    old = splitter.env[sources[0]]
    zeros = splitter.put(splitter.call(aten.zeros_like.default, old), SUMMED)
    part = splitter.by_rule(node, {sources[0]: zeros})
    if splitter.states[part] != SUMMED:
        raise Mixes("combines different samples")
    if adds:
        return splitter.put(splitter.call(aten.add.Tensor, old, part), _with_part(splitter, sources[0]))
    if not (part.meta["val"].is_floating_point() or part.meta["val"].is_complex()):
        raise Mixes("adds samples to whole numbers that every share of them would have")
    return splitter.put(splitter.call(aten.add.Tensor, splitter.scaled(old, part.meta["val"].dtype), part), SUMMED)


def _adds_into_places(node: fx.Node) -> bool:
    if node.target is aten.index_put.default:
        return bool(argument(node, 3, "accumulate", False))
    if node.target is aten.scatter_reduce.two:
        how = node.kwargs.get("reduce", argument(node, 4, "reduce"))
        return how in ("sum", "add") and bool(node.kwargs.get("include_self", True))
    return node.target in _INTO_PLACES


def _widens(source: fx.Node, node: fx.Node) -> bool:
    """Whether a sum of whole numbers becomes one of a type that has fractions too."""
    before, after = source.meta["val"].dtype, node.meta["val"].dtype
    whole = not (before.is_floating_point or before.is_complex or before is torch.bool)
    return whole and bool(after.is_floating_point or after.is_complex)
