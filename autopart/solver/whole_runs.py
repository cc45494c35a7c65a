r"""Least seconds of one stage whose pieces are each run in one way, not in a mix of several.

For pieces i of s_i seconds with ways o of a[i,o] seconds more, k[i,o] bytes kept for each of w microbatches in flight,
and r[i,o] bytes beside these while they run, and bytes W_j of weights at levels l of ZeRO, of e[j,l] seconds and h[j,l]
bytes for each, in a room of R bytes:

    minimise  sum_i s_i + a[i,o_i]  +  sum_jl e[j,l] x[j,l]
    with      sum_jl h[j,l] x[j,l]  +  w sum_i k[i,o_i]  +  max_i r[i,o_i]  <=  R        sum_l x[j,l] = W_j

For every value of the maximum the ways of larger r are left out, and it is taken off R. What the others may take
together are the undominated sums (seconds, bytes) of one way of each; what a sum leaves of R the weights have, which
are divided in fractions, where a byte freed costs the fewest seconds. Divided weights are whole while they are used: of
n equal pieces the largest has no less than the mean, so that of the pieces with the most weights a byte at such a level
holds 1/n of that besides, where the maximum is at least what one of them takes while it runs.

Of more than MOST_SUMS undominated sums neighbours become one with the fewer seconds and bytes of both, so that it is
below what any ways take.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from autopart.solver.pipeline_pieces import Piece, Run, Weights
from autopart.solver.tensor_hull import corners

MOST_SUMS = 256
_ROUNDING = 1e-9

Array = NDArray[np.float64]
Sums = tuple[Array, Array]
"""Seconds, rising, and bytes, falling."""

_NONE: Sums = np.zeros(1), np.zeros(1)


def ways_of(piece: Piece) -> tuple[Run, ...]:
    """The ways of which a piece is run in one; empty where they are not known."""
    if piece.wholes or len(piece.runs) > 1:
        return piece.wholes
    return (Run(piece.runs[0].seconds, piece.runs[0].kept_bytes, piece.transient_bytes),)


@dataclass(slots=True)
class WholeRuns:
    """Finds them for many stages of the same pieces: sums are kept."""

    _sums: dict[tuple[tuple[Run, ...], float, int], Sums] = field(default_factory=dict)

    def least_seconds(self, pieces: Mapping[Piece, int], in_flight: int, room: float) -> float:
        """Of a microbatch; infinite where nothing fits. pieces: how often a stage has each; ends of the step are left
        aside. The ways of all are known.
        """
        ways = {piece: ways_of(piece) for piece in pieces}
        alone = math.fsum((piece.forward_s + piece.backward_s) * count for piece, count in pieces.items())
        weights = _Weights.of([(own, count) for piece, count in pieces.items() for own in piece.weights])
        passing, least = self._with_passing(pieces, ways)
        # whichever ways are taken; and the fastest of all
        always = max((min(run.transient_bytes for run in own) for own in ways.values()), default=0.0)
        fastest = math.fsum(min(run.seconds for run in ways[piece]) * count for piece, count in pieces.items())
        found = math.inf
        for most in sorted({always, *(run.transient_bytes for own in ways.values() for run in own)}):
            if most < always or most > room:
                continue
            sums = _NONE
            for piece, count in pieces.items():
                sums = _thinned(_added(sums, self._of(ways[piece], most, count)))
            more = weights.freeing(weights.bytes + in_flight * sums[1] + most - room)
            if passing is not None:
                more = np.maximum(more, passing.freeing(passing.bytes + in_flight * sums[1] + least - room))
            found = min(found, float((sums[0] + more).min()))
            if found <= fastest:
                break
        return alone + weights.seconds + found

    def _with_passing(
        self, pieces: Mapping[Piece, int], ways: Mapping[Piece, tuple[Run, ...]]
    ) -> tuple[_Weights | None, float]:
        """Weights, of which those of the pieces that have the most hold besides what is transient of them, on the mean;
        and the least that such a piece takes while it runs.
        """
        if not any(level.transient_bytes for piece in pieces for own in piece.weights for level in own.levels):
            return None, 0.0
        most = max(pieces, key=lambda piece: sum(own.bytes for own in piece.weights) * pieces[piece])
        found = []
        for piece, count in pieces.items():
            for own in piece.weights:
                parts = pieces[piece] if piece is most else math.inf
                levels = (
                    replace(level, state_bytes=level.state_bytes + level.transient_bytes / parts)
                    for level in own.levels
                )
                found.append((replace(own, levels=tuple(levels)), count))
        return _Weights.of(found), min(run.transient_bytes for run in ways[most])

    def _of(self, ways: tuple[Run, ...], most: float, count: int) -> Sums:
        """The sums of so many pieces of the same ways, of those that take no more than ``most`` while they run."""
        key = ways, most, count
        if key not in self._sums:
            if count > 1:
                one = self._of(ways, most, 1)
                self._sums[key] = _thinned(_added(self._of(ways, most, count - 1), one))
            else:
                allowed = [run for run in ways if run.transient_bytes <= most]
                points = np.array([(run.seconds, run.kept_bytes) for run in allowed]).T
                self._sums[key] = _undominated(points[0], points[1])
        return self._sums[key]


@dataclass(frozen=True, slots=True)
class _Weights:
    """At the fastest levels: seconds and bytes. steps: seconds for a byte freed, and bytes that it frees, the cheapest
    first.
    """

    seconds: float
    bytes: float
    steps: tuple[tuple[float, float], ...]

    @staticmethod
    def of(weights: Sequence[tuple[Weights, int]]) -> _Weights:
        seconds = bytes_ = 0.0
        steps = []
        for own, count in weights:
            size = own.bytes * count
            hull = corners([(level.seconds * size, level.state_bytes * size) for level in own.levels], lambda at: at)
            seconds, bytes_ = seconds + hull[0][0], bytes_ + hull[0][1]
            steps += [((b[0] - a[0]) / (a[1] - b[1]), a[1] - b[1]) for a, b in itertools.pairwise(hull)]
        return _Weights(seconds, bytes_, tuple(sorted(steps)))

    def freeing(self, bytes_: Array) -> Array:
        """Seconds for so many bytes less; infinite where these are not to be had."""
        seconds, left = np.zeros(bytes_.shape), bytes_
        for price, most in self.steps:
            taken = np.clip(left, 0.0, most)
            seconds, left = seconds + taken * price, left - taken
        return np.where(left <= _ROUNDING * np.maximum(np.abs(bytes_), self.bytes), seconds, np.inf)


def _added(one: Sums, other: Sums) -> Sums:
    """Every sum of one with every one of the other."""
    return _undominated(*((a[:, None] + b).ravel() for a, b in zip(one, other, strict=True)))


def _undominated(seconds: Array, bytes_: Array) -> Sums:
    order = np.lexsort((bytes_, seconds))
    seconds, bytes_ = seconds[order], bytes_[order]
    kept = np.ones(len(bytes_), dtype=bool)
    kept[1:] = bytes_[1:] < np.minimum.accumulate(bytes_)[:-1]
    return seconds[kept], bytes_[kept]


def _thinned(sums: Sums) -> Sums:
    seconds, bytes_ = sums
    while len(seconds) > MOST_SUMS:
        odd = len(seconds) % 2  # the first stays as it is
        seconds = np.concatenate([seconds[:odd], seconds[odd::2]])
        bytes_ = np.concatenate([bytes_[:odd], bytes_[odd + 1 :: 2]])
    return seconds, bytes_
