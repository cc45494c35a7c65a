"""Blocks: the pieces of a graph that pipeline stages are made of, and which of them repeat.

Values that depend on no parameter and on no chance (masks, position ids, rotary tables) are *free*: every stage that
uses one computes it itself (RaNNC's cloning, arXiv 2103.16063, section III-A). The other ops form a chain in an order
of the graph, branch by branch; any run of it is convex, since the order is topological, and for the same reason blocks
depend on earlier ones alone. The chain is cut where few values cross: where their number is at a local minimum, as
between sublayers, at the position with the fewest bytes; and where a layer begins or ends, unless more cross there than
on both sides; never where a value crosses whose size follows from values. Blocks are the nodes of a graph
(:func:`block_edges`), which need be no chain. Blocks with equal text, up to the names of what they read, repeat and are
folded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from autopart.passes import graph as graphs
from autopart.passes.emit.layers import MOST_INLINE, find_runs, is_recomputable
from autopart.passes.graph import Value
from autopart.passes.program import MODE_ARGUMENTS, Role
from autopart.passes.sizes import extent
from autopart.passes.storage import op_name

_FEWER = 0.9
"""Ops are taken out of their order in the graph if that leaves less than this share of the values alive."""
_MOST_SHARE = 1 / 12
"""A block that holds more than this share of the work is cut further, where the fewest bytes cross."""


@dataclass(frozen=True, slots=True)
class Block:
    """A run of the chain. nodes: its ops in order. signature: equal for blocks that compute the same, with gradients
    of the same."""

    index: int
    nodes: tuple[fx.Node, ...]
    signature: str


def free_nodes(graph: fx.Graph, updated_buffers: Sequence[str] = ()) -> set[fx.Node]:
    """The nodes that depend on no parameter, no updated buffer and no random number; sizes included."""
    free: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            role = node.meta["role"]
            if role is Role.PARAMETER or role is Role.RECEIVED:
                continue
            if role is Role.BUFFER and node.meta["name"] in updated_buffers:
                continue
            free.add(node)
        elif node.op == "call_function" and not (is_random(node) or updates_buffers(node)):
            free.update({node} if all(source in free for source in node.all_input_nodes) else ())
    return free


def is_random(node: fx.Node) -> bool:
    """Whether the op draws random numbers in training; of a local form, whether the op in whose place it runs does."""
    if "forms" in node.meta:
        node = node.meta["origin"]
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    name = str(node.target)
    if torch.Tag.nondeterministic_seeded not in node.target.tags and "dropout" not in name:
        return False
    if "scaled_dot_product_attention" in name:
        probability = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
        return bool(probability != 0.0)
    if "dropout" in name:
        return bool(node.args[1] != 0.0 and node.args[2])
    if name in graphs.RECURRENT:
        return bool(node.args[5] != 0.0 and node.args[6])
    return True


def is_training(node: fx.Node) -> bool:
    """Whether the op was captured in training mode: it drops numbers, or normalizes by the batch what it has statistics
    of.
    """
    if str(node.target) not in MODE_ARGUMENTS:
        return False
    if graphs.is_batch_norm(node.target):
        return bool(node.args[5]) and node.args[3] is not None
    return is_random(node)


def updates_buffers(node: fx.Node) -> bool:
    """Whether the op writes into running statistics."""
    return graphs.updates_statistics(node)


def chain(graph: fx.Graph, free: set[fx.Node]) -> list[fx.Node]:
    """The ops that are not free, in order (``getitem`` and sizes belong to the op that they read).

    What makes a buffer's new value of buffers alone, as a counter's, follows the first op that reads one of these, or
    the next one of the graph where none does. Branches that the model computes in turns come one after the other, if
    fewer values are alive that way.
    """
    found = [node for node in graph.nodes if graphs.is_op(node) and node not in free]
    behind = _counting(found, free)
    ops = [node for node in found if node not in behind]
    apart = _branch_by_branch(ops)
    own, other = (sum(map(len, crossing(order))) for order in (ops, apart))
    counted: dict[fx.Node, list[fx.Node]] = {}
    for node, anchor in behind.items():
        counted.setdefault(anchor, []).append(node)
    return [one for node in (apart if other < _FEWER * own else ops) for one in (node, *counted.get(node, ()))]


def _counting(ops: Sequence[fx.Node], free: set[fx.Node]) -> dict[fx.Node, fx.Node]:
    """The ops that read buffers alone, and lead to their new values alone, in order, and the op that each follows: the
    first other one that reads one of these buffers, as they are on one stage (:mod:`autopart.passes.written`), or the
    next one of the graph.
    """
    buffers = {
        source
        for node in ops
        for source in graphs.input_nodes(node)
        if source.op == "placeholder" and source.meta["role"] is Role.BUFFER and source not in free
    }
    from_buffers = set[fx.Node]()
    for node in ops:
        known = (source in free or source in buffers or source in from_buffers for source in node.all_input_nodes)
        if not is_random(node) and all(known):
            from_buffers.add(node)
    counting = set[fx.Node]()
    for node in reversed(ops):
        if node in from_buffers and all(user.op == "output" or user in counting for user in node.users):
            counting.add(node)
    others = [node for node in ops if node not in counting]
    first: dict[fx.Node, int] = {}  # of these, by what they read
    for at, node in enumerate(others):
        for source in node.all_input_nodes:
            first.setdefault(source, at)
    places: dict[fx.Node, int] = {}
    before = 0
    for node in ops:
        if node not in counting:
            before += 1
            continue
        sources = [source for source in node.all_input_nodes if source not in free]
        known_places = [places[source] if source in places else first.get(source) for source in sources]
        read = [place for place in known_places if place is not None]
        places[node] = max(read, default=min(before, len(others) - 1))
    return {node: others[place] for node, place in places.items()} if others else {}


def _branch_by_branch(ops: Sequence[fx.Node]) -> list[fx.Node]:
    """An order of the graph that follows each op by one that reads it, as long as there is one that can be next."""
    inside = set(ops)
    sources = {node: {v.node for v in graphs.inputs(node) if v.node in inside} for node in ops}
    readers: dict[fx.Node, list[fx.Node]] = {}
    for node in ops:
        for source in sources[node]:
            readers.setdefault(source, []).append(node)
    missing = {node: len(found) for node, found in sources.items()}
    ready = [node for node in reversed(ops) if not missing[node]]
    found: list[fx.Node] = []
    while ready:
        node = ready.pop()
        found.append(node)
        for reader in reversed(readers.get(node, ())):
            missing[reader] -= 1
            if not missing[reader]:
                ready.append(reader)
    return found


def value_bytes(value: Value, batch: int) -> int:
    """Bytes of a value for a batch of that many samples. Its sizes must not follow from values."""
    fake = value.fake
    total = fake.element_size()
    for size in fake.shape:
        found = extent(size)
        total *= found.at(batch) if found is not None else int(size)
    return total


def _of_unknown_size(value: Value) -> bool:
    """Whether values decide how many elements it has, as in ``h[mask]``."""
    return any(free_unbacked_symbols(size) for size in value.fake.shape)


def crossing(ops: Sequence[fx.Node]) -> list[tuple[Value, ...]]:
    """For every position of the chain (before op ``i``; the last is its end) the values that live across it."""
    position = {node: index for index, node in enumerate(ops)}
    last: dict[Value, int] = {}
    for index, node in enumerate(ops):
        for value in graphs.inputs(node):
            if value.node in position:
                last[value] = index
    starts: dict[int, list[Value]] = {}
    for value in last:
        starts.setdefault(position[value.node] + 1, []).append(value)
    live: dict[Value, None] = {}
    result: list[tuple[Value, ...]] = []
    for cut in range(len(ops) + 1):
        for value in starts.get(cut, ()):
            live[value] = None
        for value in [value for value in live if last[value] < cut]:
            del live[value]
        result.append(tuple(live))
    return result


def cut_positions(
    ops: Sequence[fx.Node],
    weight: Callable[[fx.Node], float],
    batch: int,
    uncut: Sequence[Sequence[fx.Node]] = (),
) -> list[int]:
    """Where the chain may be cut into stages, both ends included. uncut: as of :func:`find_blocks`."""
    lives = crossing(ops)
    position_of = {node: position for position, node in enumerate(ops)}
    spans = [[position_of[node] for node in group] for group in uncut]
    closed = {position for span in spans for position in range(min(span) + 1, max(span) + 1)}
    # A receiver has to know how large what it gets is.
    closed |= {position for position, live in enumerate(lives) if any(map(_of_unknown_size, live))}
    counts = [len(live) for live in lives]
    ends = _ends_of_layers(ops)
    cuts, start = {0, len(ops)}, 1
    while start < len(ops):
        stop = next((other for other in range(start + 1, len(ops)) if counts[other] != counts[start]), len(ops))
        alike = [position for position in range(start, stop) if position not in closed]
        falls, rises = start == 1 or counts[start] < counts[start - 1], counts[start] < counts[stop]
        if falls or rises:
            cuts.update(ends.intersection(alike))
        if falls and rises and alike:
            sizes = {position: sum(value_bytes(value, batch) for value in lives[position]) for position in alike}
            cuts.add(min(alike, key=lambda position: (sizes[position], -position)))
        start = stop
    total = sum(weight(node) for node in ops) or 1.0
    refined = [0]
    for start, end in pairwise(sorted(cuts)):
        refined.extend(_refine(ops, lives, weight, batch, start, end, total * _MOST_SHARE, closed))
        refined.append(end)
    return sorted(set(refined))


def cuts_of_tables(ops: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Ops of a :func:`chain` that take a part of a parameter or buffer, each with the op right after it that reads it.

    Where inputs have other sizes the part may be everything, which leaves no op, and the reader alone has the tensor.
    """
    return [
        [node, reader]
        for node, reader in pairwise(ops)
        if op_name(node) == "slice"
        and reader in node.users
        and all(item.op == "placeholder" for item in node.all_input_nodes)
    ]


def _ends_of_layers(ops: Sequence[fx.Node]) -> set[int]:
    """Where layers that may be computed again begin and end."""
    found, at = set[int](), 0
    for run in find_runs(ops):
        if run.path and len(run.nodes) > MOST_INLINE and is_recomputable(run):
            found |= {at, at + len(run.nodes)}
        at += len(run.nodes)
    return found


def _refine(
    ops: Sequence[fx.Node],
    lives: Sequence[tuple[Value, ...]],
    weight: Callable[[fx.Node], float],
    batch: int,
    start: int,
    end: int,
    limit: float,
    closed: Collection[int],
) -> list[int]:
    """Further cuts inside a heavy block: both parts keep a fifth of its work, and the fewest bytes cross."""
    weights = [weight(node) for node in ops[start:end]]
    whole = sum(weights)
    if end - start < 2 or whole <= limit:
        return []
    choices: list[tuple[int, int]] = []
    before = 0.0
    for position in range(start + 1, end):
        before += weights[position - start - 1]
        if 0.2 * whole <= before <= 0.8 * whole and position not in closed:
            choices.append((sum(value_bytes(value, batch) for value in lives[position]), position))
    if not choices:
        return []
    _, cut = min(choices)
    return [
        *_refine(ops, lives, weight, batch, start, cut, limit, closed),
        cut,
        *_refine(ops, lives, weight, batch, cut, end, limit, closed),
    ]


def block_edges(blocks: Sequence[Block]) -> tuple[tuple[int, int], ...]:
    """(block, block that reads a value of it), each pair once, from lower to higher numbers."""
    home = {node: block.index for block in blocks for node in block.nodes}
    pairs = {
        (home[value.node], index)
        for node, index in home.items()
        for value in graphs.inputs(node)
        if home.get(value.node, index) != index
    }
    return tuple(sorted(pairs))


def find_blocks(
    ops: Sequence[fx.Node],
    weight: Callable[[fx.Node], float],
    batch: int,
    uncut: Sequence[Sequence[fx.Node]] = (),
) -> list[Block]:
    """The blocks of a :func:`chain` in order. weight: seconds or FLOPs of an op; batch: samples, to weigh what crosses.

    uncut: groups of ops, each of which stays in one block.
    """
    parts = [tuple(ops[start:end]) for start, end in pairwise(cut_positions(ops, weight, batch, uncut))]
    shared = _shared(parts)
    return [Block(index, own, _signature(own, shared)) for index, own in enumerate(parts)]


def _shared(parts: Sequence[Sequence[fx.Node]]) -> dict[fx.Node, str]:
    """Parameters and buffers that several blocks read, with a label: what the first of these blocks does, and where in
    it they are read.

    It tells them from those of one block and from each other, and is the same in layers that share alike within
    themselves, and for all blocks that read one.
    """
    found: dict[fx.Node, tuple[int, int, int]] = {}
    several: set[fx.Node] = set()
    for index, nodes in enumerate(parts):
        for position, node in enumerate(nodes):
            for operand, value in enumerate(graphs.inputs(node)):
                if value.node.op == "placeholder":
                    block, *_ = found.setdefault(value.node, (index, position, operand))
                    if block != index:
                        several.add(value.node)
    first = {index: _signature(parts[index], {}) for index in {found[node][0] for node in several}}
    return {node: f"{first[found[node][0]]} {found[node][1:]}" for node in several}


def _signature(nodes: Sequence[fx.Node], shared: Mapping[fx.Node, str]) -> str:
    numbers: dict[Value, str] = {}
    outside: dict[fx.Node, str] = {}

    def describe(value: Value) -> str:
        shape = [str(extent(size) or size) for size in value.fake.shape]
        # Layers that are run without gradient too are other blocks there: their gradients are not summed.
        constant = "" if value.node.meta.get("differentiable", True) else " constant"
        return f"{value.fake.dtype}{shape}{constant}"

    def name(node: fx.Node) -> str:
        if not graphs.is_tensor(node):
            return f"size {node.meta['val']}" if "val" in node.meta else str(node)
        value = graphs.value_of(node)
        if value in numbers:
            return numbers[value]
        if value.node not in outside:
            kind = value.node.meta["role"].value if value.node.op == "placeholder" else "value"
            first = f" shared from {shared[value.node]}" if value.node in shared else ""
            outside[value.node] = f"{kind} {len(outside)}{first} {describe(value)}"
        return f"{outside[value.node]}.{value.index}"

    def text(argument: Any) -> str:
        if isinstance(argument, fx.Node):
            return name(argument)
        if isinstance(argument, tuple | list):
            return f"[{', '.join(text(item) for item in argument)}]"
        if isinstance(argument, dict):
            return f"{{{', '.join(f'{key}: {text(item)}' for key, item in argument.items() if key != 'device')}}}"
        return repr(argument)

    lines = []
    for index, node in enumerate(nodes):
        lines.append(f"{node.target}{text(node.args)}{text(node.kwargs)}")
        for value in graphs.outputs(node):
            numbers[value] = f"%{index}.{value.index}"
            lines.append(describe(value))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
