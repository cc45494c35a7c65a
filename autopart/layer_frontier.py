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


@dataclass(frozen=True, slots=True)
class _Module:
    """A module as it may be computed again. path: from the layer on. numbers: of its ops in the part.

    seconds: of running it again. held: bytes that its ops keep. entering: what is kept instead.
    """

    path: str
    numbers: frozenset[int]
    seconds: float
    held: float
    entering: Mapping[Kept, float]


@dataclass(frozen=True, slots=True)
class Frontiers:
    """The frontiers of a candidate's layers, as :func:`autopart.recomputation.layers` asks for them.

    known: those found before where ops are priced alike, by what they follow from besides; parts of layers that cost
    the same share one, also under strategies that differ elsewhere. whole: layers whose modules do not run again by
    themselves.
    """

    analysis: Analysis
    costs: Sequence[BlockCost]
    held: Activations
    reads: Reads
    known: KnownFrontiers
    whole: Collection[str] = ()

    def __call__(self, layer: str, part: Sequence[int], keep: Choice) -> Family:
        """Of a layer's blocks in one stage, beside ``keep``, in which nothing is computed again."""
        if layer in self.whole:
            return ()
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
        kinds = tuple(self.analysis.kinds[index] for index in part)
        alike = kinds, tuple(sizes), tuple(priced), keep.activation_bytes
        if alike not in self.known:
            beyond = frontier(layer, ops, self.reads, held.shared, keep.activation_bytes)
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


def frontier(layer: str, ops: Sequence[PricedOp], reads: Reads, shared: Collection[Kept], all_bytes: float) -> Family:
    """The undominated ways to compute modules of a layer's part again, without the one in which all is kept.

    Of seconds and of transients what they take beyond that one. ops: of the part, in order. shared: tensors that are
    counted elsewhere. all_bytes: where nothing is computed again.
    """
    keep = Choice(0.0, 0.0, 0.0, all_bytes, 0.0)
    modules = _modules(layer, ops, reads, shared)
    while _sets(modules) > MOST_SETS:
        modules.remove(min(modules, key=lambda module: module.held))
    held = [[item for item in op.kept.items() if item[0] not in shared] for op in ops]
    points = [_choice(ops, held, chosen, keep) for chosen in _disjoint(modules) if chosen]
    kept: list[Choice] = []
    for point in sorted(points, key=lambda item: (item.seconds, item.activation_bytes, item.transient_bytes)):
        if not any(other.undercuts(point) for other in (keep, *kept)):
            kept.append(point)
    return tuple(_few(keep, kept))


def paths(layer: str, name: str) -> list[str]:
    """The modules that a choice of :func:`frontier` computes again."""
    return [f"{layer}.{path}" for path in name.split(",")] if name else []


def _modules(layer: str, ops: Sequence[PricedOp], reads: Reads, shared: Collection[Kept]) -> list[_Module]:
    number = {op.node: index for index, op in enumerate(ops)}
    found = []
    for path, nodes in spans_of(Run(layer, [op.node for op in ops])).items():
        inside = set(nodes)
        own = [ops[number[node]] for node in nodes if node in number]
        held = {item: size for op in own for item, size in op.kept.items() if item not in shared}
        last = max((index for index, op in enumerate(own) if op.kept or op.inside_bytes), default=-1)
        size = math.fsum(held.values()) + math.fsum(op.inside_bytes for op in own)
        if last < 0 or not size:
            continue
        seconds = math.fsum(op.forward_s for op in own[: last + 1])
        seconds += math.fsum(s for op in own[: last + 1] for value, s in op.converting_s if value.node in inside)
        entering = {
            item: bytes_
            for op in own
            for value, item, bytes_ in reads(op)
            if value.node not in inside and item not in shared
        }
        numbers = frozenset(number[op.node] for op in own)
        found.append(_Module(path.removeprefix(f"{layer}."), numbers, seconds, size, entering))
    return found


def _choice(
    ops: Sequence[PricedOp], held: Sequence[Sequence[tuple[Kept, float]]], chosen: Sequence[_Module], keep: Choice
) -> Choice:
    """The modules run again. held: by op the tensors that it keeps and that are counted here."""
    again = frozenset[int]().union(*(module.numbers for module in chosen))
    tensors: dict[Kept, float] = {}
    inside = 0.0
    for number, op in enumerate(ops):
        if number not in again:
            tensors.update(held[number])
            inside += op.inside_bytes
    for module in chosen:
        tensors.update(module.entering)
    return replace(
        keep,
        backward_s=math.fsum(module.seconds for module in chosen),
        activation_bytes=math.fsum(tensors.values()) + inside,
        transient_bytes=max(module.held for module in chosen),
        name=",".join(module.path for module in sorted(chosen, key=lambda module: min(module.numbers))),
    )


def _sets(modules: Sequence[_Module]) -> int:
    """How many sets of disjoint modules there are, counted up to beyond MOST_SETS."""
    count = 0
    for _ in _disjoint(modules):
        count += 1
        if count > MOST_SETS:
            break
    return count


def _disjoint(modules: Sequence[_Module]) -> Iterator[tuple[_Module, ...]]:
    """All sets of modules whose ops lie one behind the other, the empty one first."""
    yield ()
    for index, module in enumerate(modules):
        for rest in _disjoint([other for other in modules[index + 1 :] if _apart(module, other)]):
            yield (module, *rest)


def _apart(one: _Module, other: _Module) -> bool:
    return max(one.numbers) < min(other.numbers) or max(other.numbers) < min(one.numbers)


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
