"""Unlike replicas beside each other as one shape of the stage solver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopart.solver.stages_parts import AMOUNTS, Block, CrossingGroup, Family, KeptGroup, Layer, Shape


def merged(shapes: Sequence[Shape]) -> Shape:
    """Of unlike replicas, which go side by side: what takes and holds the most on any of them."""
    if len(shapes) == 1:
        return shapes[0]
    blocks = []
    for every in zip(*(shape.blocks for shape in shapes), strict=True):
        own, *others = _widest([block.choices for block in every])
        step_end = max(block.step_end_s for block in every)
        amounts = {name: getattr(own, name) for name in AMOUNTS}
        blocks.append(Block(every[0].name, step_end_s=step_end, others=tuple(others), **amounts))
    layers = [
        Layer(own[0].blocks, {part: _widest([layer.parts[part] for layer in own]) for part in own[0].parts})
        for own in zip(*(shape.layers for shape in shapes), strict=True)
    ]
    kept = [
        KeptGroup(own[0].blocks, max(group.bytes for group in own))
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
            max(group.bytes for group in own),
        )
        for own in zip(*(shape.crossing for shape in shapes), strict=True)
    ]
    # what is left beside a forward is the least of any
    transients = tuple(
        max(own, key=lambda sizes: sizes[0] - sizes[1])
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


def _widest(families: Sequence[Family]) -> Family:
    """The choices that all have, by name."""
    named = [{choice.name: choice for choice in family} for family in families]
    common = [name for name in named[0] if all(name in other for other in named)]
    return tuple(
        replace(named[0][name], **{item: max(getattr(other[name], item) for other in named) for item in AMOUNTS})
        for name in common
    )
