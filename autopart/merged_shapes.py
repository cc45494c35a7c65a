"""Unlike replicas beside each other as one shape of the stage solver.

They have the same blocks, and run them in the same ways; each has rows of its own, and a device of its own memory. A
stage takes as long as the slowest of them. With U_k the room of replica k's device, U the least of these, and B_k what
it holds, B_k <= U_k is (U / U_k) B_k <= U. What a stage holds is made of amounts (state, activations, transients) by
sums and maxima, so that it is no less than (U / U_k) B_k for every k where each amount is max_k (U / U_k) of that of k,
and the rest, as messages, is counted whole. It is held against U then. The room that arriving weights find beside a
block's forward is the least of any replica's, which says it of the stage where their transients are in proportion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopart.solver.stages_parts import AMOUNTS, Block, CrossingGroup, Cut, Family, KeptGroup, Layer, Shape


def in_common(shapes: Sequence[Shape]) -> tuple[Shape, ...]:
    """The replicas' shapes with the ways to run blocks and layers that all have, in the same order."""
    if len(shapes) == 1:
        return tuple(shapes)
    found = []
    for shape in shapes:
        blocks = []
        for number, block in enumerate(shape.blocks):
            own, *others = _common([other.blocks[number].choices for other in shapes], block.choices)
            amounts = {name: getattr(own, name) for name in AMOUNTS}
            blocks.append(Block(block.name, step_end_s=block.step_end_s, others=tuple(others), **amounts))
        layers = [
            Layer(
                layer.blocks,
                {
                    part: _common([other.layers[number].parts[part] for other in shapes], family)
                    for part, family in layer.parts.items()
                },
            )
            for number, layer in enumerate(shape.layers)
        ]
        found.append(replace(shape, blocks=tuple(blocks), layers=tuple(layers)))
    return tuple(found)


def merged(shapes: Sequence[Shape], factors: Sequence[float]) -> Shape:
    """Of replicas with ways :func:`in_common` what takes and holds the most on any of them.

    factors: of each, U / U_k.
    """
    if len(shapes) == 1:
        return shapes[0]
    blocks = []
    for every in zip(*(shape.blocks for shape in shapes), strict=True):
        own, *others = _widest([block.choices for block in every], factors)
        step_end = max(block.step_end_s for block in every)
        amounts = {name: getattr(own, name) for name in AMOUNTS}
        blocks.append(Block(every[0].name, step_end_s=step_end, others=tuple(others), **amounts))
    layers = [
        Layer(own[0].blocks, {part: _widest([layer.parts[part] for layer in own], factors) for part in own[0].parts})
        for own in zip(*(shape.layers for shape in shapes), strict=True)
    ]
    kept = [
        KeptGroup(own[0].blocks, _most([group.bytes for group in own], factors))
        for own in zip(*(shape.kept for shape in shapes), strict=True)
    ]
    sums = [
        replace(own[0], seconds=max(item.seconds for item in own))
        for own in zip(*(shape.sums for shape in shapes), strict=True)
    ]
    crossing = [
        CrossingGroup(
            own[0].blocks,
            tuple(sorted(set.intersection(*(set(group.keepers) for group in own)))),
            _most([group.bytes for group in own], factors),
        )
        for own in zip(*(shape.crossing for shape in shapes), strict=True)
    ]
    # what is left beside a forward is the least of any
    transients = tuple(
        max(
            ((forward * factor, most * factor) for (forward, most), factor in zip(own, factors, strict=True)),
            key=lambda sizes: sizes[0] - sizes[1],
        )
        for own in zip(*(shape.passing.transients for shape in shapes), strict=True)
    )
    return replace(
        shapes[0],
        blocks=tuple(blocks),
        layers=tuple(layers),
        kept=tuple(kept),
        crossing=tuple(crossing),
        sums=tuple(sums),
        passing=replace(shapes[0].passing, transients=transients),
    )


def most_of(cuts: Sequence[Cut], factors: Sequence[float]) -> Cut:
    """What stages of replicas with these cuts do there at most. factors: as of :func:`merged`."""
    if len(cuts) == 1:
        return cuts[0]
    return Cut(**{name: _most_amount(name, cuts, factors) for name in Cut.__slots__})


def _most_amount(name: str, items: Sequence[object], factors: Sequence[float]) -> float:
    return _most([getattr(item, name) for item in items], factors if name.endswith("_bytes") else [1.0] * len(items))


def _most(sizes: Sequence[float], factors: Sequence[float]) -> float:
    return max(size * factor for size, factor in zip(sizes, factors, strict=True))


def _widest(families: Sequence[Family], factors: Sequence[float]) -> Family:
    return tuple(
        replace(every[0], **{name: _most_amount(name, every, factors) for name in AMOUNTS})
        for every in zip(*families, strict=True)
    )


def _common(families: Sequence[Family], own: Family) -> Family:
    """The choices of ``own`` whose names all have, in the order of the first."""
    names = [{choice.name for choice in family} for family in families]
    mine = {choice.name: choice for choice in own}
    return tuple(mine[choice.name] for choice in families[0] if all(choice.name in found for found in names))
