"""How fast strategies run a layer, and what they hold for it: prices for :mod:`autopart.solver.pipeline_floor`.

Of layers that are alike, all strategies of one are weighed at once: with seconds t of its ops and conversions, bytes v
of its parameters on a rank and bytes a that it keeps of a microbatch, an elimination finds the least of

    t + mu v + nu a

for a grid of prices mu, nu. What comes in lies as the layer before makes it, which has the same strategies. Of what
else comes in, and of what others read too, conversions are left out. A tensor that several ops keep counts where the
first of them does.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import fx

from autopart.folding import FoldedGraph, FoldedPart, is_stored
from autopart.memory_bound import BlockFacts, Kind, MemoryBound
from autopart.passes.graph import Value
from autopart.prices import Chosen, share_of
from autopart.solver.pipeline_floor import Price
from autopart.solver.tensor_hull import least_sums
from autopart.solver.tensor_problem import TensorProblem
from autopart.tensor_choice import Builder, stored_as

LEAST_LAYERS = 4
"""Layers that are alike, from which on they are bounded together."""
_WEIGHTS = (0.0, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64)
_KEPT = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
_FEW_WEIGHTS = (0.0, 0.01, 0.04, 0.16)
_FEW_KEPT = (0.02, 0.05, 0.1, 0.2, 0.4)
"""Prices of a layer's bytes, in parts of its least seconds: of all that a rank holds where it is shared perfectly. Few:
where something runs again.
"""

Left = Collection[Value | fx.Node]
"""What is kept: tensors by who owns their memory, and the ops of what these keep besides."""


@dataclass(frozen=True, slots=True)
class AlikeLayers:
    """Layers of the same ops between the same layers. blocks: of each, in order. part: of the first. facts: of each.

    keeps: by op of ``part`` the owners of memory that are counted there. made: of these what a layer makes and keeps
    alone, and need not keep. priced: the parameters that prices are for.
    """

    blocks: tuple[tuple[int, ...], ...]
    part: FoldedPart
    facts: tuple[BlockFacts, ...]
    keeps: Mapping[fx.Node, frozenset[Value]]
    made: frozenset[Value]
    priced: Kind


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
    first: dict[Value, fx.Node] = {}
    for node in analysis.block_of:
        for owner, _ in memory.block_costs.kept_by(node):
            first.setdefault(owner, node)
    counted: dict[fx.Node, set[Value]] = {}
    for owner, node in first.items():
        counted.setdefault(node, set()).add(owner)
    found = []
    for layers in groups.values():
        part = parts[layers[0]]
        facts = tuple(memory.row[number] for number in blocks[layers[0]])
        bytes_: Counter[Kind] = Counter()
        for item in (item for own in facts for item in own.parameters if item.trained):
            bytes_[item.kind] += item.weight
        if not bytes_:
            continue
        keeps = {
            node: frozenset(counted.get(node, ())) for nodes in part.classes for node in nodes if not is_stored(node)
        }
        made = frozenset(owner for number in blocks[layers[0]] for owner in memory.made_in[number])
        priced = max(bytes_, key=lambda kind: bytes_[kind])
        found.append(AlikeLayers(tuple(tuple(blocks[name]) for name in layers), part, facts, keeps, made, priced))
    return tuple(found)


def strategy_prices(
    builder: Builder, layers: AlikeLayers, left: Sequence[Left | None], weights: float, kept: float, seconds: float
) -> list[tuple[Price, ...]]:
    """For each of ``left`` the prices of what is kept when that is all that is; None: when nothing runs again.

    weights, kept: bytes, and seconds, of one of the layers where all is shared perfectly.
    Raises PlanError where a layer's graph is too wide.
    """
    problem, amounts = _problem(builder, layers, left)
    rows, prices = [], []
    for number in range(len(left)):
        for mu in _WEIGHTS if not number else _FEW_WEIGHTS:
            for nu in _KEPT if not number else _FEW_KEPT:
                price = mu * seconds / max(weights, 1.0), nu * seconds / max(kept, 1.0)
                rows.append([1.0, price[0], *(price[1] if at == number else 0.0 for at in range(len(left)))])
                prices.append((number, *price))
    sums = least_sums(problem, amounts, np.array(rows)).tolist()
    found: list[list[Price]] = [[] for _ in left]
    for (number, mu, nu), least in zip(prices, sums, strict=True):
        if math.isfinite(least):
            found[number].append(Price(mu, nu, least))
    return [tuple(own) for own in found]


def least_layer_seconds(builder: Builder, layers: AlikeLayers) -> float:
    """The fewest seconds of a layer under any strategies. Raises PlanError where its graph is too wide."""
    problem, amounts = _problem(builder, layers, ())
    return float(least_sums(problem, amounts, np.array([[1.0, 0.0]]))[0])


def _entering(part: FoldedPart, classes: Mapping[fx.Node, tuple[str, ...]]) -> tuple[object, ...]:
    """Of what makes the values that enter the classes, where these are the layer's own."""
    own = {classes[nodes[0]] for nodes in part.classes}
    return tuple(classes[node] if classes[node] in own else None for node in part.outside)


def _problem(
    builder: Builder, layers: AlikeLayers, left: Sequence[Left | None]
) -> tuple[TensorProblem, list[np.ndarray]]:
    """A layer's problem, with seconds, bytes of parameters, and for each of ``left`` bytes kept, of each choice."""
    part, analysis, setting = layers.part, builder.analysis, builder.setting
    numbers = {analysis.classes[nodes[0]]: index for index, nodes in enumerate(builder.folded.classes)}
    ops, amounts = [], []
    for nodes in part.classes:
        folded = builder.folded.classes[numbers[analysis.classes[nodes[0]]]]
        if is_stored(nodes[0]):
            op = builder.op(folded)
            info = analysis.program.tensors[nodes[0].meta["name"]]
            size = builder.block_costs.size(Value(nodes[0])).at(1)
            priced = (bool(info.trainable), not info.buffer, info.dtype) == (*layers.priced[:2], layers.priced[3])
            held = [
                (
                    0.0,
                    len(nodes) * size * share_of(stored_as(chosen), setting.sizes) if priced else 0.0,
                    *(0.0 for _ in left),
                )
                for chosen, _ in builder.ways(folded[0])
            ]
        else:
            op, share = builder.op(folded), len(nodes) / len(folded)
            held = [
                (
                    choice.cost * share,
                    0.0,
                    *(sum(_kept(builder, layers, node, chosen, own) for node in nodes) for own in left),
                )
                for choice, (chosen, _) in zip(op.choices, builder.ways(folded[0]), strict=True)
            ]
        ops.append(op)
        amounts.append(np.array(held))
    classes = {analysis.classes[nodes[0]]: index for index, nodes in enumerate(part.classes)}
    inside = {node for nodes in part.classes for node in nodes}
    placements = list(setting.shared.ids)
    edges = []
    for value in part.values:
        source = value.source
        if source >= len(part.classes):
            maker = part.outside[source - len(part.classes)]
            readers = builder.folded.readers[value.example]
            if analysis.classes[maker] not in classes or any(node not in inside for node, _ in readers):
                continue
            source = classes[analysis.classes[maker]]
        edges.append(builder.edge(replace(value, source=source), ops, placements))
    return TensorProblem(tuple(ops), tuple(edges)), amounts


def _kept(builder: Builder, layers: AlikeLayers, node: fx.Node, chosen: Chosen, left: Left | None) -> float:
    owners = layers.keeps[node]
    if left is not None:  # and what others keep, too
        owners = frozenset(owner for owner in owners if owner in left or owner not in layers.made)
    batch, sizes = builder.setting.prices.batch, builder.setting.sizes
    return builder.block_costs.least_kept(node, chosen, sizes, batch, owners, left is None or node in left)
