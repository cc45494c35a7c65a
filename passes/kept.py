"""What one rank of a stage keeps of a microbatch from its forward to its backward, with what is computed again there.

Of a layer, or a module in one, that is computed again only what enters it is kept; of everything else what autograd
saves (:mod:`autopart.passes.saved`), each storage once. ``recompute``: the paths of these layers and modules.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

from torch import fx

from autopart.passes import graph as graphs
from autopart.passes.amounts import Amount, stored_bytes, value_bytes
from autopart.passes.conversion import Axes
from autopart.passes.emit.segments import Segment, segments_of
from autopart.passes.graph import Value
from autopart.passes.program import Role
from autopart.passes.saved import WHOLE_INSIDE, copied_inside, saved_inside, saved_tensors
from autopart.passes.saved_recurrent import is_known, recurrent_bytes
from autopart.passes.storage import shares_memory, storage_of
from autopart.runtime.placement import Placements


def owner_of(value: Value) -> Value:
    """The value of a rank's graph whose memory a value is."""
    owner = storage_of(value)
    while shares_memory(owner.node):
        owner = storage_of(graphs.inputs(owner.node)[0])
    return owner


def held_bytes(value: Value) -> Amount:
    """Bytes of a value's memory; what a collective makes is dense, also of a tensor that is seen in more dims."""
    return value_bytes(value) if "transition" in value.node.meta else stored_bytes(value.fake)


def share_of_rank(node: fx.Node, axes: Axes, index: int = 0) -> float:
    """The part of a node's whole value (number ``index`` of several) that a rank has."""
    placements = node.meta.get("placements", ())
    if placements and isinstance(placements[0], tuple):
        placements = placements[index]
    own: Placements = placements
    return math.prod(1 / parts for placement, (_, parts) in zip(own, axes, strict=False) if placement.divides)


def entering(segment: Segment, kind: str = "cuda") -> list[Value]:
    """The tensors that a layer or module which runs again is given, and which stay for it: owners of memory, once each.

    Parameters of its own are not given. Nothing stays for one in which no op keeps anything: torch.utils.checkpoint
    holds what it was given by what autograd saves inside.
    """
    if not _keeping(segment, kind):
        return []
    inside = set(segment.nodes)
    found: dict[Value, None] = {}
    for node in segment.nodes:
        for value in graphs.inputs(node):
            if value.node not in inside:
                found[owner_of(value)] = None
    return list(found)


def rerun(graph: fx.Graph, recompute: Collection[str], kind: str = "cuda") -> set[fx.Node]:
    """The nodes that run forward again in the backward: of each layer or module up to the last that keeps something.

    torch.utils.checkpoint stops there, so that a collective behind it is not repeated.
    """
    found: set[fx.Node] = set()
    if not recompute:
        return found
    for segment in _segments(graph, recompute):
        if segment.path and (keeping := _keeping(segment, kind)):
            found.update(segment.nodes[: segment.nodes.index(keeping[-1]) + 1])
    return found


def _keeping(segment: Segment, kind: str) -> list[fx.Node]:
    """The ops of a segment that keep something for their backward."""
    own = [node for node in segment.nodes if "transition" not in node.meta]
    return [node for node in own if saved_tensors(node, kind) or saved_inside(node, kind)]


def kept_values(graph: fx.Graph, recompute: Collection[str] = (), kind: str = "cuda") -> list[Value]:
    """Owners of the memory that is kept. kind: "cuda" or "cpu".

    Parameters, buffers and inputs of the model are in memory anyway and left out; what a stage receives is not.
    """
    found: dict[Value, None] = {}
    for segment in _segments(graph, recompute):
        if segment.path:
            found.update(dict.fromkeys(entering(segment, kind)))
            continue
        for node in segment.nodes:
            if "transition" not in node.meta:
                found.update(dict.fromkeys(owner_of(value) for value in saved_tensors(node, kind)))
    return [
        value for value in found if value.node.op == "call_function" or value.node.meta.get("role") is Role.RECEIVED
    ]


def kept_bytes(graph: fx.Graph, axes: Axes, batch: int, recompute: Collection[str] = (), kind: str = "cuda") -> float:
    """Bytes that a rank keeps of one microbatch of ``batch`` samples."""
    total = 0.0
    for value in kept_values(graph, recompute, kind):
        total += held_bytes(value).at(batch) * share_of_rank(value.node, axes, value.index)
    for segment in _segments(graph, recompute):
        if not segment.path:
            total += sum(inside_bytes(node, axes, batch, kind) for node in segment.nodes)
    return total


def _segments(graph: fx.Graph, recompute: Collection[str]) -> Iterator[Segment]:
    for _, _, own in segments_of(graph, recompute):
        yield from own


def inside_bytes(node: fx.Node, axes: Axes, batch: int, kind: str) -> float:
    """Bytes that an op keeps besides its operands and results: copies as the operands are sharded, the rest as the
    result is, or what it is of where the result is a sum, or as a local form has it.
    """
    if "transition" in node.meta:
        return 0.0
    size = recurrent_bytes(node, kind, batch) if is_known(node, kind) else saved_inside(node, kind).at(batch)
    if not size:
        return 0.0
    share = min(share_of_rank(node, axes), share_of_rank(graphs.inputs(node)[0].node, axes))
    apart = 0.0
    for value, amount in copied_inside(node, kind):
        size -= amount.at(batch)
        apart += amount.at(batch) * share_of_rank(value.node, axes, value.index)
    for axis, form in node.meta.get("forms", ()):
        first = node.meta["placements"][0]
        own = first if isinstance(first, tuple) else node.meta["placements"]
        index = [name for name, _ in axes].index(axis)
        whole = form.function in WHOLE_INSIDE
        if own[index].divides and whole:
            share *= axes[index][1]
        elif not own[index].divides and not whole:
            share /= axes[index][1]
    return size * share + apart
