"""Coarser graphs of blocks, where a graph has too many sets of blocks between which stages could lie.

Multilevel coarsening as RaNNC's block phase has it (Tanaka et al. 2021, arXiv 2103.16063, section III-B): neighbours
are merged, the lightest pair first, so that pieces stay even, and of equally light pairs the one that exchanges most
bytes, so that cuts stay small. A pair a -> b is merged only if no other way leads from a to b: every piece is then
convex, and the pieces' graph has no cycle. The phase that moves blocks back between pieces is left to the stage solver:
positions of fine orders join those of the coarse graph (:func:`autopart.solver.stages_order.positions`).
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

_Pair = tuple[float, float, int, int, int, int]
"""Weight of both, minus the bytes that they exchange, their numbers, and how often each had grown."""


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
    graph = _Pieces(pieces, needs, weights, sent)
    while len(graph.blocks) > most and graph.merge_lightest():
        pass
    return _ordered([sum(1 << block for block in own) for own in graph.blocks.values()], needs)


class _Pieces:
    """Pieces by a number each, the lowest of their blocks.

    blocks: of each, rising. before, after: the pieces it reads from, and that read from it. beyond: all that it leads
    to, itself not included, as bits; bits of pieces that are in others now stay and mean nothing. traffic: bytes
    between two, in whichever direction. grown: how often a piece was merged. pairs: a heap, with some that are no more.
    """

    def __init__(
        self,
        pieces: Sequence[int],
        needs: Sequence[int],
        weights: Sequence[float],
        sent: Mapping[tuple[int, int], float],
    ) -> None:
        self.weights = weights
        self.blocks = {own[0]: own for own in map(bits_of, pieces)}
        home = {block: piece for piece, own in self.blocks.items() for block in own}
        self.before: dict[int, set[int]] = {piece: set() for piece in self.blocks}
        self.after: dict[int, set[int]] = {piece: set() for piece in self.blocks}
        for block, target in home.items():
            for source in map(home.__getitem__, bits_of(needs[block])):
                if source != target:
                    self.before[target].add(source)
                    self.after[source].add(target)
        self.beyond = dict.fromkeys(self.blocks, 0)
        for piece in reversed(self.blocks):
            for target in self.after[piece]:
                self.beyond[piece] |= 1 << target | self.beyond[target]
        self.traffic: dict[int, dict[int, float]] = {piece: {} for piece in self.blocks}
        for (source, target), size in sent.items():
            if home[source] != home[target]:
                self._exchange(home[source], home[target], size)
        self.weight = {piece: self._weight(piece) for piece in self.blocks}
        self.grown = dict.fromkeys(self.blocks, 0)
        self.pairs = [self._pair(a, b) for a in self.blocks for b in self.after[a]]
        heapq.heapify(self.pairs)

    def merge_lightest(self) -> bool:
        """Merges a pair; whether there was one."""
        while self.pairs:
            *_, a, b, grown_a, grown_b = heapq.heappop(self.pairs)
            # a pair with another way between can be merged once that is in one of the two: it is then asked for anew
            if self.grown.get(a) == grown_a and self.grown.get(b) == grown_b and not self._other_way(a, b):
                self._merge(a, b)
                return True
        return False

    def _other_way(self, a: int, b: int) -> bool:
        return any(self.beyond[other] >> b & 1 for other in self.after[a])

    def _merge(self, a: int, b: int) -> None:
        piece, gone = min(a, b), max(a, b)
        before = (self.before[a] | self.before[b]) - {a, b}
        after = (self.after[a] | self.after[b]) - {a, b}
        for source in before:
            self.after[source] = self.after[source] - {a, b} | {piece}
        for target in after:
            self.before[target] = self.before[target] - {a, b} | {piece}
        either = 1 << a | 1 << b
        beyond = (self.beyond[a] | self.beyond[b]) & ~either
        for other, reached in self.beyond.items():
            if reached & either:
                self.beyond[other] = reached | beyond | 1 << piece
        self.blocks[piece] = sorted(self.blocks[a] + self.blocks[b])
        self.before[piece], self.after[piece], self.beyond[piece] = before, after, beyond
        for other, size in self.traffic[gone].items():
            del self.traffic[other][gone]
            if other != piece:
                self._exchange(piece, other, size)
        for kept in (self.blocks, self.before, self.after, self.beyond, self.grown, self.weight, self.traffic):
            del kept[gone]
        self.weight[piece] = self._weight(piece)
        self.grown[piece] += 1
        for source in before:
            heapq.heappush(self.pairs, self._pair(source, piece))
        for target in after:
            heapq.heappush(self.pairs, self._pair(piece, target))

    def _exchange(self, one: int, other: int, size: float) -> None:
        for here, there in ((one, other), (other, one)):
            self.traffic[here][there] = self.traffic[here].get(there, 0.0) + size

    def _weight(self, piece: int) -> float:
        return sum(self.weights[block] for block in self.blocks[piece])

    def _pair(self, a: int, b: int) -> _Pair:
        traffic = self.traffic[a].get(b, 0.0)
        return self.weight[a] + self.weight[b], -traffic, a, b, self.grown[a], self.grown[b]


def pieces_needs(pieces: Sequence[int], needs: Sequence[int]) -> list[int]:
    """By piece the pieces that it depends on directly, as bits of their indices."""
    home = {block: index for index, piece in enumerate(pieces) for block in bits_of(piece)}
    found = []
    for piece in pieces:
        wanted = 0
        for block in bits_of(_needs_of(piece, needs)):
            wanted |= 1 << home[block]
        found.append(wanted)
    return found


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
