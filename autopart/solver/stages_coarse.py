"""Coarser graphs of blocks, where a graph has too many sets of blocks between which stages could lie.

Multilevel coarsening as RaNNC's block phase has it (Tanaka et al. 2021, arXiv 2103.16063, section III-B): neighbours
are merged, the lightest pair first, so that pieces stay even, and of equally light pairs the one that exchanges most
bytes, so that cuts stay small. A pair a -> b is merged only if no other way leads from a to b: every piece is then
convex, and the pieces' graph has no cycle. The phase that moves blocks back between pieces is left to the stage solver:
positions of fine orders join those of the coarse graph (:func:`autopart.solver.stages_order.positions`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def coarsen(
    pieces: Sequence[int],
    needs: Sequence[int],
    weights: Sequence[float],
    sent: Mapping[tuple[int, int], float],
    most: int,
) -> list[int]:
    """At most ``most`` pieces, as bits of blocks, in an order of the graph; more where none can be merged further.

    pieces: to begin with, convex and in an order of the graph. needs: by block the blocks it depends on directly, as
    bits. weights: by block. sent: bytes from block to block.
    """
    found = list(pieces)
    while len(found) > most:
        home = {block: index for index, piece in enumerate(found) for block in bits_of(piece)}
        after = _after(found, needs, home)
        beyond = [0] * len(found)  # pieces that a piece leads to, itself not included
        for index in reversed(range(len(found))):
            for target in bits_of(after[index]):
                beyond[index] |= 1 << target | beyond[target]
        weight = [sum(weights[block] for block in bits_of(piece)) for piece in found]
        traffic: dict[tuple[int, int], float] = {}
        for (source, target), size in sent.items():
            pair = home[source], home[target]
            traffic[pair] = traffic.get(pair, 0.0) + size
        pairs = sorted(
            (weight[a] + weight[b], -traffic.get((a, b), 0.0), a, b)
            for a in range(len(found))
            for b in bits_of(after[a])
            if not any(beyond[other] >> b & 1 for other in bits_of(after[a]))
        )
        if not pairs:
            break
        _, _, a, b = pairs[0]
        found = _ordered([*(p for i, p in enumerate(found) if i not in (a, b)), found[a] | found[b]], needs)
    return found


def _after(pieces: Sequence[int], needs: Sequence[int], home: Mapping[int, int]) -> list[int]:
    """By piece the pieces that read from it, as bits."""
    after = [0] * len(pieces)
    for index, piece in enumerate(pieces):
        for block in bits_of(piece):
            for source in bits_of(needs[block] & ~piece):
                after[home[source]] |= 1 << index
    return after


def _ordered(pieces: Sequence[int], needs: Sequence[int]) -> list[int]:
    """The pieces in an order of their graph, those with the lowest blocks first."""
    left = sorted(pieces, key=lambda piece: piece & -piece)
    wanted = {piece: _needs_of(piece, needs) for piece in left}
    done, found = 0, []
    while left:
        ready = next((piece for piece in left if not wanted[piece] & ~done), None)
        assert ready is not None, "pieces in a cycle"
        left.remove(ready)
        done |= ready
        found.append(ready)
    return found


def _needs_of(piece: int, needs: Sequence[int]) -> int:
    found = 0
    for block in bits_of(piece):
        found |= needs[block]
    return found & ~piece


def bits_of(mask: int) -> list[int]:
    """Numbers of the bits that are set, rising."""
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found
