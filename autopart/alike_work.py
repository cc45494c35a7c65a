"""How fast strategies run a layer, and what they hold for it: prices for :mod:`autopart.solver.pipeline_floor`.

Of layers that are alike, all strategies of one are weighed at once, together with the sets of its modules that may run
again (:mod:`autopart.module_sets`): with seconds t of its ops and conversions, those that run again twice, bytes v of
its parameters on a rank and bytes a that it keeps of a microbatch, :mod:`autopart.solver.layer_sums` finds the least of

    t + mu v + nu a        t + f + mu v + nu a

for a grid of prices mu, nu, the second, with the seconds f of the forward, for a coarse one.

What comes in lies as the layer before makes it, which has the same strategies. Of what else comes in, and of what
others read too, conversions are left out. What ops keep, and what of it is kept twice, :mod:`autopart.kept_in_layers`
says.

What lies before, between and behind layers is weighed alike, by itself: it does not run again, and no conversion of
what comes in is known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import fx

from autopart.analysis import Analysis
from autopart.folding import FoldedGraph, FoldedPart, FoldedValue, fold_part, is_stored
from autopart.kept_in_layers import Held
from autopart.memory_bound import BlockFacts, Kind, MemoryBound
from autopart.module_sets import ModuleSet
from autopart.passes.graph import Value
from autopart.prices import Chosen, share_of
from autopart.solver.layer_sums import LayerSums
from autopart.solver.pipeline_pieces import Price
from autopart.solver.tensor_problem import CostTable, Edge, Op, TensorProblem
from autopart.solver.tensor_sums import Eliminator
from autopart.tensor_choice import Builder, stored_as

LEAST_LAYERS = 4
"""Layers that are alike, from which on they are bounded together."""
_WEIGHTS = (0.0, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64)
_KEPT = (0.0, 0.02, 0.05, 0.1, 0.14, 0.2, 0.28, 0.4, 0.56, 0.8)
"""Prices of a layer's bytes, in parts of its least seconds: of all that a rank holds where it is shared perfectly."""
_FORWARD_WEIGHTS, _FORWARD_KEPT = (0.0, 0.01, 0.04, 0.16), (0.0, 0.1, 0.4)
"""The same where a second of the forward counts twice."""

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class AlikeLayers:
    """Layers of the same ops between the same layers. blocks: of each, in order. part: of the first. facts: of each.

    keeps: of the memory that is counted in the first layer, by who owns it, the ops of the layer that keep it, in
    order; none of what only modules that run again may keep. priced: the parameters that prices are for. layer: whether
    it is one, which may run again, and behind which others like it may lie.
    """

    blocks: tuple[tuple[int, ...], ...]
    part: FoldedPart
    facts: tuple[BlockFacts, ...]
    keeps: Mapping[Value, tuple[fx.Node, ...]]
    priced: Kind
    layer: bool = True


def alike_layers(folded: FoldedGraph, parts: Mapping[str, FoldedPart], memory: MemoryBound) -> tuple[AlikeLayers, ...]:
    """Layers that lie in a row of blocks, those that are alike together. parts: by layer."""
    analysis = memory.analysis
    blocks: dict[str, list[int]] = {}
    for number, layer in enumerate(analysis.layers):
        if layer:
            blocks.setdefault(layer, []).append(number)
    groups: dict[object, list[str]] = {}
    for layer, own in blocks.items():
        part, facts = parts[layer], tuple(memory.row[number] for number in own)
        if own[-1] - own[0] == len(own) - 1:
            groups.setdefault((part.signature, _entering(part, analysis.classes), facts), []).append(layer)
    keepers = _keepers(memory)
    found = (
        _alike(memory, [tuple(blocks[name]) for name in layers], parts[layers[0]], keepers)
        for layers in groups.values()
    )
    return tuple(item for item in found if item is not None)


def beside_layers(
    folded: FoldedGraph, runs: Sequence[Sequence[int]], memory: MemoryBound
) -> tuple[AlikeLayers, ...] | None:
    """Runs of blocks that lie in no layers, as if each was a layer that does not run again; None where one has no
    parameters.
    """
    analysis, keepers, found = memory.analysis, _keepers(memory), []
    for own in runs:
        nodes = [node for number in own for node in analysis.blocks[number].nodes if node in analysis.block_of]
        item = _alike(memory, [tuple(own)], fold_part(analysis, folded, nodes), keepers)
        if item is None:
            return None
        found.append(replace(item, layer=False))
    return tuple(found)


def _keepers(memory: MemoryBound) -> dict[Value, list[fx.Node]]:
    """By who owns memory, the ops that keep it, in order."""
    found: dict[Value, list[fx.Node]] = {}
    for node in memory.analysis.block_of:
        for owner, _ in memory.block_costs.kept_by(node):
            found.setdefault(owner, []).append(node)
    return found


def _alike(
    memory: MemoryBound,
    blocks: Sequence[tuple[int, ...]],
    part: FoldedPart,
    keepers: Mapping[Value, Sequence[fx.Node]],
) -> AlikeLayers | None:
    """blocks: of each; part: of the first. None where no parameters of theirs alone are trained."""
    facts = tuple(memory.row[number] for number in blocks[0])
    bytes_: Counter[Kind] = Counter()
    for item in (item for own in facts for item in own.parameters if item.trained):
        bytes_[item.kind] += item.weight
    if not bytes_:
        return None
    inside = {node for nodes in part.classes for node in nodes}
    keeps = {
        owner: tuple(node for node in nodes if node in inside) for owner, nodes in keepers.items() if nodes[0] in inside
    }
    read = {owner for node in inside if not is_stored(node) for _, owner in memory.block_costs.reads(node)}
    keeps |= {owner: () for owner in read if owner.node in inside and owner not in keepers}
    return AlikeLayers(tuple(blocks), part, facts, keeps, max(bytes_, key=lambda kind: bytes_[kind]))


def strategy_prices(
    builder: Builder, layers: AlikeLayers, sets: Sequence[ModuleSet], weights: float, kept: float, seconds: float
) -> tuple[Price, ...]:
    """What strategies and what runs again take together at least. sets: that may run again.

    weights, kept: bytes, and seconds, of one of the layers where all is shared perfectly.
    Raises PlanError where a layer's graph is too wide.
    """
    grids = [
        [grid.ravel() for grid in np.meshgrid(np.array(own_weights), np.array(own_kept), indexing="ij")]
        for own_weights, own_kept in ((_WEIGHTS, _KEPT), (_FORWARD_WEIGHTS, _FORWARD_KEPT))
    ]
    parts_of_weights, parts_of_kept = (np.concatenate(parts) for parts in zip(*grids, strict=True))
    mu, nu = parts_of_weights * seconds / max(weights, 1.0), parts_of_kept * seconds / max(kept, 1.0)
    twice = np.repeat([False, True], [len(own) for own, _ in grids])
    least = _work(builder, layers, sets).least(mu, nu, twice)
    columns = (mu.tolist(), nu.tolist(), least.tolist(), twice.astype(np.float64).tolist())
    return tuple(Price(*price) for price in zip(*columns, strict=True))


def least_seconds(builder: Builder, layers: AlikeLayers) -> float:
    """Of the ops and conversions of one layer, forward and backward, under any strategies."""
    found = list(_ops(builder, layers))
    ops, seconds = [op for _, _, op in found], np.concatenate([seconds for _, seconds, _ in found])
    edges = tuple(edge for _, edge, _ in _edges(builder, layers, ops))
    eliminator = Eliminator(TensorProblem(tuple(ops), edges))
    return float(eliminator.totals(seconds[:, None], np.array([False]), np.zeros((0, 1)))[0])


def kept_by_choice(builder: Builder, layers: AlikeLayers) -> dict[tuple[str, ...], Array]:
    """By class of a layer's ops, the bytes that one op keeps under each of its choices, where nothing runs again and a
    tensor that several ops keep counts as :mod:`autopart.kept_in_layers` says.
    """
    analysis = builder.analysis
    held = Held.of(builder, layers.keeps, [ModuleSet()], _places(analysis, layers))
    ways = {
        node: [chosen for chosen, _ in builder.ways(nodes[0])]
        for nodes in layers.part.classes
        if not is_stored(nodes[0])
        for node in nodes
    }

    sizes = {node: held.bytes(node, own)[:, 0] for node, own in ways.items()}
    return {
        analysis.classes[nodes[0]]: sum((sizes[node] for node in nodes), np.zeros(len(ways[nodes[0]]))) / len(nodes)
        for nodes in layers.part.classes
        if not is_stored(nodes[0])
    }


def pieces_of(layers: AlikeLayers, folded: FoldedGraph, memory: MemoryBound) -> tuple[AlikeLayers, ...]:
    """The blocks of layers, as if each was a layer."""
    analysis, found = memory.analysis, []
    for place, number in enumerate(layers.blocks[0]):
        own = [node for node in analysis.blocks[number].nodes if node in analysis.block_of]
        keeps = {
            owner: tuple(node for node in nodes if node in own)
            for owner, nodes in layers.keeps.items()
            if (nodes[0] if nodes else owner.node) in own
        }
        blocks = tuple((others[place],) for others in layers.blocks)
        part, facts = fold_part(analysis, folded, own), (layers.facts[place],)
        found.append(AlikeLayers(blocks, part, facts, keeps, layers.priced, layers.layer))
    return tuple(found)


def _places(analysis: Analysis, layers: AlikeLayers) -> dict[fx.Node, int]:
    """The ops of the first layer's blocks, numbered in order."""
    nodes = (node for number in layers.blocks[0] for node in analysis.blocks[number].nodes)
    return {node: place for place, node in enumerate(node for node in nodes if node in analysis.block_of)}


def _entering(part: FoldedPart, classes: Mapping[fx.Node, tuple[str, ...]]) -> tuple[object, ...]:
    """Of what makes the values that enter the classes, where these are the layer's own."""
    own = {classes[nodes[0]] for nodes in part.classes}
    return tuple(classes[node] if classes[node] in own else None for node in part.outside)


def _work(builder: Builder, layers: AlikeLayers, sets: Sequence[ModuleSet]) -> LayerSums:
    """The problem of one of the layers. sets: that may run again."""
    part, analysis, setting = layers.part, builder.analysis, builder.setting
    place, every = _places(analysis, layers), (*sets, ModuleSet())
    held = Held.of(builder, layers.keeps, sets, place)
    ops, seconds, forward, weights, kept, again = [], *(list[Array]() for _ in range(5))
    for nodes, (first, taken, op) in zip(part.classes, _ops(builder, layers), strict=True):
        ways = [chosen for chosen, _ in builder.ways(first)]
        none, nothing = np.zeros(len(ways)), np.zeros((len(ways), len(every)))
        ops.append(op)
        seconds.append(taken)
        if is_stored(nodes[0]):
            info = analysis.program.tensors[nodes[0].meta["name"]]
            size = builder.block_costs.size(Value(nodes[0])).at(1) * len(nodes)
            priced = (bool(info.trainable), not info.buffer, info.dtype) == (*layers.priced[:2], layers.priced[3])
            shares = [size * share_of(stored_as(chosen), setting.sizes) if priced else 0.0 for chosen in ways]
            for own, found in zip(
                (forward, weights, kept, again), (none, np.array(shares), nothing, nothing), strict=True
            ):
                own.append(found)
            continue
        forward.append(len(nodes) * _forward_seconds(builder, nodes[0], ways))
        weights.append(none)
        kept.append(sum((held.bytes(node, ways) for node in nodes), nothing))
        times = np.array([sum(place[node] in item.run for node in nodes) for item in every])
        if times.any():
            run = [setting.prices.op_seconds(nodes[0], chosen, setting.sizes)[0] for chosen in ways]
            nothing = np.array(run)[:, None] * times
        again.append(nothing)
    edges, doubled, repeated = _conversions(builder, layers, ops, place, every)
    once = np.concatenate(seconds)
    return LayerSums(
        Eliminator(TensorProblem(tuple(ops), tuple(edges)), others=doubled, more=[item for item, _ in repeated]),
        once,
        once + np.concatenate(forward),
        np.concatenate(weights),
        np.concatenate(kept),
        np.concatenate(again),
        held.constant,
        np.array([times for _, times in repeated]).reshape(-1, len(every)),
        np.cumsum([0, *(len(op.choices) for op in ops)])[:-1],
    )


def _ops(builder: Builder, layers: AlikeLayers) -> Iterator[tuple[fx.Node, Array, Op]]:
    """By class of a layer's ops the first op of its class in the model, seconds of those in the layer by choice, which
    what is stored takes none of, and the class in the model.
    """
    classes, folded = builder.analysis.classes, builder.folded.classes
    numbers = {classes[nodes[0]]: index for index, nodes in enumerate(folded)}
    for nodes in layers.part.classes:
        every = folded[numbers[classes[nodes[0]]]]
        op = builder.op(every)
        part = 0.0 if is_stored(nodes[0]) else len(nodes) / len(every)
        yield every[0], np.array([choice.cost * part for choice in op.choices]), op


def _edges(builder: Builder, layers: AlikeLayers, ops: Sequence[Op]) -> Iterator[tuple[FoldedValue, Edge, bool]]:
    """Conversions of a layer's values, and whether the layer before makes them."""
    part, analysis = layers.part, builder.analysis
    classes = {analysis.classes[nodes[0]]: index for index, nodes in enumerate(part.classes)}
    inside = {node for nodes in part.classes for node in nodes}
    placements = list(builder.setting.shared.ids)
    for value in part.values:
        source = value.source
        if outside := source >= len(part.classes):
            maker = part.outside[source - len(part.classes)]
            readers = builder.folded.readers[value.example]
            apart = not layers.layer or analysis.classes[maker] not in classes
            if apart or any(node not in inside for node, _ in readers):
                continue
            source = classes[analysis.classes[maker]]
        yield value, builder.edge(replace(value, source=source), ops, placements), outside


def _conversions(
    builder: Builder, layers: AlikeLayers, ops: Sequence[Op], place: Mapping[fx.Node, int], sets: Sequence[ModuleSet]
) -> tuple[list[Edge], list[Edge], list[tuple[tuple[int, Edge], Array]]]:
    """Of a layer's values: once, with the forward twice, and of the forward those that run again, with their numbers
    and by set whether they do.
    """
    part = layers.part
    inside = {node for nodes in part.classes for node in nodes}
    edges, doubled, repeated = [], [], []
    for value, edge, outside in _edges(builder, layers, ops):
        edges.append(edge)
        if not isinstance(edge.cost, CostTable):
            doubled.append(edge)
            continue
        there = forward_table(builder, edge.cost, value.example)
        both = CostTable(there.rows, there.columns, edge.cost.seconds + there.seconds)
        doubled.append(replace(edge, cost=both))
        if outside or is_stored(part.classes[value.source][0]):
            continue
        if not (np.isfinite(there.seconds) & (there.seconds > 0.0)).any():
            continue
        made_and_read = [
            (place[own.node], [place[node] for node, _ in builder.folded.readers[own] if node in inside])
            for own in value.members
        ]
        # of the values, each of which has a part of the edge's seconds
        times = np.array([sum(_repeats(item, *places) for places in made_and_read) for item in sets])
        times = times / len(made_and_read)
        if times.any():
            repeated.append(((len(edges) - 1, replace(edge, cost=there)), times))
    return edges, doubled, repeated


def _forward_seconds(builder: Builder, node: fx.Node, ways: Sequence[Chosen]) -> Array:
    """Of an op under each of its choices, with what its local forms exchange."""
    prices, setting = builder.setting.prices, builder.setting
    found = []
    for chosen in ways:
        exchanged = prices.form_seconds(node, chosen, setting.axes, setting.beside)
        found.append(prices.op_seconds(node, chosen, setting.sizes)[0] + exchanged.forward_s)
    return np.array(found)


def forward_table(builder: Builder, table: CostTable, value: Value) -> CostTable:
    """Of a conversion without the gradient's."""
    setting = builder.setting
    size = builder.block_costs.size(value).at(setting.prices.batch)
    known, key = setting.shared.forward, (size, table.rows, table.columns)
    if key not in known:
        placements = list(setting.shared.ids)
        rows, columns = ([placements[at] for at in found] for found in key[1:])
        known[key] = CostTable(*key[1:], setting.conversions.table(rows, columns, size, False))
    return known[key]


def _repeats(item: ModuleSet, maker: int, readers: Sequence[int]) -> bool:
    """Whether a conversion of what an op makes for others runs again."""
    return item.run.issuperset(readers) and any(
        maker in module and module.issuperset(readers) for module in item.modules
    )
