"""Which modules of a layer to compute again: seconds against bytes.

For a set S of disjoint modules of a layer's part (:func:`autopart.passes.emit.segments.spans_of`):

    seconds       sum over S of their ops' forward, up to the last that keeps something, with the collectives between
    activations   what the ops outside of S keep, and what enters the modules of S; each tensor once
    transient     the part's largest op's, and the most that the ops of one module of S keep

:func:`frontier` tries all sets and returns those that no other undercuts in all three. Where there are more than
MOST_SETS, modules are left out, those that keep the fewest bytes first, until there are not; and of more than
MOST_POINTS points those are taken that free the most bytes for their seconds (the lower convex hull of seconds and
activations, then those next to it).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import fx

from autopart.analysis import Analysis
from autopart.block_costs import BlockCost, PricedOp
from autopart.passes.emit.layers import Run
from autopart.passes.emit.segments import spans_of
from autopart.passes.graph import Value
from autopart.prices import Chosen
from autopart.rank_memory import Kept
from autopart.recomputation import Activations
from autopart.solver.stages_parts import Choice, Family

MOST_SETS = 128
MOST_POINTS = 8
_ALIKE = 0.01
"""Of what is kept where nothing runs again: points that free less beyond others are alike these."""

Reads = Callable[[PricedOp], Iterable[tuple[Value, Kept, float]]]
"""What an op reads besides inputs, parameters and buffers: value, tensor in memory, bytes."""
KnownFrontiers = dict[object, tuple[Family, Sequence[Chosen]]]
"""Frontiers, with the strategies by whose identity they are known, which have to live as long."""
Spans = Mapping[str, Sequence[fx.Node]]
"""The modules of a part of a layer that can run again by themselves, by path from the layer on, with their ops."""


@dataclass(frozen=True, slots=True)
class _Module:
    """A module as it may be computed again. path: from the layer on. numbers: of its ops in the part, from first to
    last.

    seconds: of running it again. held: bytes that its ops keep. entering: what is kept instead.
    """

    path: str
    numbers: tuple[int, ...]
    first: int
    last: int
    seconds: float
    held: float
    entering: Mapping[Kept, float]


@dataclass(frozen=True, slots=True)
class Frontiers:
    """The frontiers of a candidate's layers, as :func:`autopart.recomputation.layers` asks for them.

    known: those found before where ops are priced alike, by what they follow from besides; parts of layers that cost
    the same share one, also under strategies that differ elsewhere. spans: those of parts, once found. gathered:
    weights that are whole while they are used alone, which a module that runs again by itself would be given, and keep.
    """

    analysis: Analysis
    costs: Sequence[BlockCost]
    held: Activations
    reads: Reads
    known: KnownFrontiers
    spans: dict[tuple[int, ...], Spans]
    gathered: Collection[fx.Node] = ()

    def __call__(self, layer: str, part: Sequence[int], keep: Choice) -> Family:
        """Of a layer's blocks in one stage, beside ``keep``, in which nothing is computed again."""
        held, blocks = self.held, [self.costs[index] for index in part]
        ops = [op for block in blocks for op in block.ops if op.node in self.analysis.block_of]
        # sizes without those that are counted elsewhere
        sizes = [
            counted.get(item)
            for index, block in zip(part, blocks, strict=True)
            for counted, items in ((held.kept[index], block.kept), (held.entering[index], block.entering))
            for item in items
        ]
        priced = [(id(op.chosen), *[seconds for _, seconds in op.converting_s]) for op in ops]
        kinds, spans = tuple(self.analysis.kinds[index] for index in part), self._spans(layer, tuple(part), ops)
        alike = kinds, tuple(sizes), tuple(priced), keep.activation_bytes, *(spans if self.gathered else ())
        if alike not in self.known:
            beyond = frontier(spans, ops, self.reads, held.shared, keep.activation_bytes)
            self.known[alike] = beyond, [op.chosen for op in ops]
        return tuple(
            replace(
                keep,
                backward_s=keep.backward_s + other.backward_s,
                activation_bytes=other.activation_bytes,
                transient_bytes=keep.transient_bytes + other.transient_bytes,
                name=other.name,
            )
            for other in self.known[alike][0]
        )

    def _spans(self, layer: str, part: tuple[int, ...], ops: Sequence[PricedOp]) -> Spans:
        if part not in self.spans:
            found = spans_of(Run(layer, [op.node for op in ops]))
            self.spans[part] = {path.removeprefix(f"{layer}."): nodes for path, nodes in found.items()}
        if not self.gathered:
            return self.spans[part]
        return {
            path: nodes
            for path, nodes in self.spans[part].items()
            if not any(source in self.gathered for node in nodes for source in node.all_input_nodes)
        }


def frontier(spans: Spans, ops: Sequence[PricedOp], reads: Reads, shared: Collection[Kept], all_bytes: float) -> Family:
    """The undominated ways to compute modules of a layer's part again, without the one in which all is kept.

    Of seconds and of transients what they take beyond that one. ops: of the part, in order. shared: tensors that are
    counted elsewhere. all_bytes: where nothing is computed again.
    """
    modules = _modules(spans, ops, reads, shared)
    while _count(modules) > MOST_SETS:
        modules.remove(min(modules, key=lambda module: module.held))
    sets = [chosen for chosen in _disjoint(modules) if chosen]
    keep = Choice(0.0, 0.0, 0.0, all_bytes, 0.0)
    kept = [(0.0, all_bytes, 0.0)]
    found: list[Choice] = []
    amounts = zip(
        (math.fsum(module.seconds for module in chosen) for chosen in sets),
        _kept_bytes(modules, sets, ops, shared),
        (max(module.held for module in chosen) for chosen in sets),
        strict=True,
    )
    for point, chosen in sorted(zip(amounts, sets, strict=True), key=lambda item: item[0]):
        if not any(all(a <= b for a, b in zip(other, point, strict=True)) for other in kept):
            kept.append(point)
            name = ",".join(module.path for module in sorted(chosen, key=lambda module: module.first))
            found.append(Choice(0.0, point[0], 0.0, *point[1:], name))
    return tuple(_few(keep, found))


def paths(layer: str, name: str) -> list[str]:
    """The modules that a choice of :func:`frontier` computes again."""
    return [f"{layer}.{path}" for path in name.split(",")] if name else []


def _modules(spans: Spans, ops: Sequence[PricedOp], reads: Reads, shared: Collection[Kept]) -> list[_Module]:
    number = {op.node: index for index, op in enumerate(ops)}
    read = [tuple(reads(op)) for op in ops] if spans else []
    found = []
    for path, nodes in spans.items():
        inside, numbers = set(nodes), [number[node] for node in nodes if node in number]
        own = [ops[index] for index in numbers]
        held = {item: size for op in own for item, size in op.kept.items() if item not in shared}
        last = max((index for index, op in enumerate(own) if op.keeps), default=-1)
        size = math.fsum(held.values()) + math.fsum(op.inside_bytes for op in own)
        if last < 0 or not size:
            continue
        seconds = math.fsum(op.forward_s for op in own[: last + 1])
        seconds += math.fsum(s for op in own[: last + 1] for value, s in op.converting_s if value.node in inside)
        entering = {
            item: bytes_
            for index in numbers
            for value, item, bytes_ in read[index]
            if value.node not in inside and item not in shared
        }
        found.append(_Module(path, tuple(numbers), min(numbers), max(numbers), seconds, size, entering))
    return found


def _kept_bytes(
    modules: Sequence[_Module], sets: Sequence[Sequence[_Module]], ops: Sequence[PricedOp], shared: Collection[Kept]
) -> list[float]:
    """Of sets of modules that run again: what the other ops keep, and what enters the modules, each tensor once."""
    places: dict[Kept, int] = {}
    sizes: list[float] = []

    def incidence(rows: Sequence[Mapping[Kept, float]]) -> list[list[int]]:
        for row in rows:
            for item, size in row.items():
                if item not in shared and places.setdefault(item, len(sizes)) == len(sizes):
                    sizes.append(size)
        return [[places[item] for item in row if item not in shared] for row in rows]

    held, entering = incidence([op.kept for op in ops]), incidence([module.entering for module in modules])
    by_op, by_module = (np.zeros((len(rows), len(sizes))) for rows in (held, entering))
    for matrix, rows in ((by_op, held), (by_module, entering)):
        for row, own in enumerate(rows):
            matrix[row, own] = 1.0
    ran, taken = np.zeros((len(modules), len(ops))), np.zeros((len(sets), len(modules)))
    row_of = {id(module): row for row, module in enumerate(modules)}
    for row, module in enumerate(modules):
        ran[row, list(module.numbers)] = 1.0
    for row, chosen in enumerate(sets):
        taken[row, [row_of[id(module)] for module in chosen]] = 1.0
    stays = 1.0 - taken @ ran
    tensors = (stays @ by_op + taken @ by_module > 0) @ np.array(sizes, dtype=float)
    found: list[float] = (tensors + stays @ np.array([op.inside_bytes for op in ops], dtype=float)).tolist()
    return found


def _count(modules: Sequence[_Module]) -> int:
    """How many sets of disjoint modules there are, with the empty one."""
    order = sorted(modules, key=lambda module: module.first)
    counts = [1] * (len(order) + 1)
    for index in range(len(order) - 1, -1, -1):
        after = next((at for at in range(index + 1, len(order)) if order[at].first > order[index].last), len(order))
        counts[index] = counts[index + 1] + counts[after]
    return counts[0]


def _disjoint(modules: Sequence[_Module]) -> Iterator[tuple[_Module, ...]]:
    """All sets of modules whose ops lie one behind the other, the empty one first."""
    yield ()
    for index, module in enumerate(modules):
        for rest in _disjoint([other for other in modules[index + 1 :] if _apart(module, other)]):
            yield (module, *rest)


def _apart(one: _Module, other: _Module) -> bool:
    return one.last < other.first or other.last < one.first


def _few(keep: Choice, points: Sequence[Choice]) -> list[Choice]:
    """At most MOST_POINTS of the points."""
    if len(points) <= MOST_POINTS:
        return list(points)
    hull: list[Choice] = [keep]
    for point in points:
        if point.activation_bytes >= hull[-1].activation_bytes:
            continue
        while len(hull) > 1 and _price(hull[-2], point) <= _price(hull[-2], hull[-1]):
            hull.pop()
        hull.append(point)
    found = hull[1 : MOST_POINTS + 1]
    rest, freed = list[Choice](), keep.activation_bytes * _ALIKE
    for point in sorted((*hull, *points), key=lambda item: item.seconds):
        if all(other.activation_bytes - point.activation_bytes > freed for other in rest if other is not point):
            rest.append(point)
    near = sorted((point for point in rest if point not in hull), key=lambda item: _above(hull, item))
    found += near[: MOST_POINTS - len(found)]
    return sorted(found, key=lambda item: item.seconds)


def _above(hull: Sequence[Choice], point: Choice) -> float:
    """Seconds beyond those of the mix of its neighbours on the hull that keeps as much."""
    after = next(number for number, corner in enumerate(hull) if corner.activation_bytes <= point.activation_bytes)
    one, other = hull[after - 1], hull[after]
    return point.seconds - one.seconds - _price(one, other) * (one.activation_bytes - point.activation_bytes)


def _price(one: Choice, other: Choice) -> float:
    """Seconds per byte that the other keeps less."""
    return (other.seconds - one.seconds) / (one.activation_bytes - other.activation_bytes)
