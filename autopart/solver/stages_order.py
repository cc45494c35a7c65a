"""Positions of a graph of blocks: the sets between which convex stages lie.

A stage is convex, and stages follow each other in one order, exactly if each begins and ends at an *ideal*: a set of
blocks that holds all that its members depend on (Tarnawski et al., arXiv 2006.16423, section 4, for pipelines). A chain
of n blocks has n + 1 ideals, a graph with branches more. Where they are too many, those of some topological orders are
taken, and all of a coarser graph (:mod:`autopart.solver.stages_coarse`), so that halves of long branches can share a
stage: divisions that cut neither are then not considered.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence

from autopart.solver.stages_coarse import bits_of, coarsen, pieces_needs

MOST_POSITIONS = 300


def positions(
    count: int,
    edges: Iterable[tuple[int, int]],
    together: Sequence[Sequence[int]] = (),
    most: int = MOST_POSITIONS,
    weights: Sequence[float] = (),
    sent: Mapping[tuple[int, int], float] | None = None,
) -> tuple[tuple[int, ...], bool]:
    """Positions of ``count`` blocks as bits, small ones first, and whether these are all.

    edges: (block, block that depends on it), from lower to higher numbers, so that the blocks' own order is one of the
    graph. together: blocks that no position may part. most: positions of which all are taken, in a chain those of
    any length. weights: of the blocks, sent: bytes from block to block, by which a larger graph is coarsened.
    """
    needs = [0] * count
    for source, target in edges:
        assert source < target, f"blocks are numbered in an order of the graph: {source} -> {target}"
        needs[target] |= 1 << source
    # of a chain there are as many as blocks and one; where two short branches lie in each layer, half as many more
    found = _ideals(needs, max(most, count * 3 // 2))
    complete = found is not None
    if found is None:
        found = _coarse(needs, weights or [1.0] * count, sent or {}, most // 2)
        for order in _orders(needs):
            mask = 0
            found.add(mask)
            for block in order:
                mask |= 1 << block
                found.add(mask)
    groups = [sum(1 << block for block in set(group)) for group in together]
    kept = [mask for mask in found if all(mask & group in (0, group) for group in groups)]
    return tuple(sorted(kept, key=lambda mask: (mask.bit_count(), mask))), complete


def _coarse(
    needs: Sequence[int], weights: Sequence[float], sent: Mapping[tuple[int, int], float], most: int
) -> set[int]:
    """All positions of the finest coarser graph tried that has at most ``most`` of them."""
    pieces = [1 << block for block in range(len(needs))]
    while len(pieces) > 1:
        fewer = coarsen(pieces, needs, weights, sent, len(pieces) * 7 // 8)
        if len(fewer) == len(pieces):
            break
        pieces = fewer
        inside = pieces_needs(pieces, needs)
        found = _ideals(inside, most)
        if found is not None:
            return {sum(piece for index, piece in enumerate(pieces) if mask >> index & 1) for mask in found}
    return set()


def chain_positions(count: int, together: Sequence[Sequence[int]] = ()) -> tuple[int, ...]:
    """Positions of a chain of ``count`` blocks, as numbers of blocks before them, that part no group of ``together``.

    A group's blocks are one stage's, and so is all that lies between them.
    """
    parted = {end for group in together for end in range(min(group) + 1, max(group) + 1)}
    return tuple(end for end in range(count + 1) if end not in parted)


def _ideals(needs: Sequence[int], most: int) -> set[int] | None:
    """All sets that hold what their members need; None where there are more than ``most``."""
    found, layer = {0}, {0}
    while layer:
        layer = {
            mask | 1 << block
            for mask in layer
            for block, need in enumerate(needs)
            if not mask >> block & 1 and need & ~mask == 0
        }
        found |= layer
        if len(found) > most:
            return None
    return found


def _orders(needs: Sequence[int]) -> list[list[int]]:
    """Topological orders: as numbered, the deepest branch first, and level by level."""
    count, sources = len(needs), [bits_of(need) for need in needs]
    depth, height = [0] * count, [0] * count
    for block in range(count):
        depth[block] = max((depth[other] + 1 for other in sources[block]), default=0)
    for block in reversed(range(count)):
        for other in sources[block]:
            height[other] = max(height[other], height[block] + 1)
    ranks: list[Callable[[int], tuple[int, int]]] = [
        lambda block: (0, block),
        lambda block: (-height[block], block),
        lambda block: (depth[block], block),
        lambda block: (depth[block], -block),
    ]
    return [_order(sources, rank) for rank in ranks]


def _order(sources: Sequence[Sequence[int]], rank: Callable[[int], tuple[int, int]]) -> list[int]:
    """All blocks, of those whose sources are there the one of the lowest rank first. sources: by block."""
    targets: list[list[int]] = [[] for _ in sources]
    for block, own in enumerate(sources):
        for source in own:
            targets[source].append(block)
    waits = [len(own) for own in sources]
    ready = [(rank(block), block) for block, left in enumerate(waits) if not left]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        _, block = heapq.heappop(ready)
        order.append(block)
        for target in targets[block]:
            waits[target] -= 1
            if not waits[target]:
                heapq.heappush(ready, (rank(target), target))
    return order
