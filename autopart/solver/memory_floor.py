r"""Seconds that memory adds to every microbatch, at least, whichever blocks lie in whichever stage of a pipeline.

A block b is a set of parts, each with a few ways to hold it: in way o it adds q seconds to every microbatch, and takes
s bytes for good and a bytes for each microbatch in flight. Stage k holds w_k microbatches, w_0 >= w_1 >= ..., and has
C_k bytes. For any price of c_k seconds a byte, c_0 >= c_1 >= ... >= 0, with

    f_b(c, w) = sum over the parts of b of min_o (q + c (s + w a))

the seconds that are added are at least the sum over stages k of (the sum of f_b(c_k, w_k) over its blocks - c_k C_k):
what a stage's blocks take is at most C_k, so a ways' price less c_k C_k is at most the ways' seconds.

Which blocks a stage has is not known, but that the stages behind k take no more than R_k seconds of the blocks' work
u_b. As f_b falls along the stages, d_b^k = f_b(c_k, w_k) - f_b(c_{k+1}, w_{k+1}) >= 0, the sum over all blocks is

    sum_b f_b at the last stage  +  sum_{k < p-1} sum over the blocks of stages 0..k of d_b^k

and the inner sum is at least that of a set of blocks, in fractions, whose work is all less R_k: those with the smallest
d_b^k / u_b. The bound is the best over prices that are equal in the first stages and nothing behind them, c at one of
the values where some min changes its way, as the bound is concave in c and straight between these.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class Way:
    """A way to hold a part of a block: seconds that it adds per microbatch, bytes for good, and per one in flight."""

    seconds: float
    state_bytes: float
    kept_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Held:
    """``count`` equal blocks of ``work`` seconds per microbatch each. parts: the ways to hold each."""

    count: int
    work: float
    parts: tuple[tuple[Way, ...], ...]


def added_seconds(
    blocks: Sequence[Held], in_flight: Sequence[int], capacity_bytes: Sequence[float], behind: Sequence[float]
) -> float:
    """Of all stages together; infinite where nothing fits.

    in_flight, capacity_bytes: per stage. behind: the most work of the stages behind each.
    """
    return AddedSeconds(blocks, in_flight, capacity_bytes).at(behind)


@dataclass(frozen=True, slots=True)
class _Priced:
    """Prices that are equal in the first stages. always: by price, of all blocks at the last of these, less its room;
    the least bytes beyond it come last. rate: [block, stage, price], falls per work, in rising order; size: the work of
    each, ahead: of those before it. room: bytes.
    """

    always: Array
    rate: Array
    size: Array
    ahead: Array
    room: float

    def at(self, ahead: Array) -> Array:
        """ahead: work of the blocks that lie in a stage or ahead of it, at least."""
        stages = self.rate.shape[1]
        if not stages:
            return self.always
        taken = np.clip(ahead[None, :stages, None] - self.ahead, 0.0, self.size)
        return self.always + np.einsum("bsp,bsp->p", taken, self.rate)


class AddedSeconds:
    """:func:`added_seconds` of the same blocks and stages for any work behind these."""

    def __init__(self, blocks: Sequence[Held], in_flight: Sequence[int], capacity_bytes: Sequence[float]) -> None:
        stages = len(in_flight)
        flying = np.minimum.accumulate(np.array(in_flight, dtype=float))
        room = np.cumsum(capacity_bytes)
        work = np.array([block.work for block in blocks])
        count = np.array([float(block.count) for block in blocks])
        self._work = float(count @ work)
        prices = _breaks(blocks, {flying[0], flying[stages // 2], flying[-1]})
        held = _least(blocks, prices, flying)
        free = np.array([sum(min(way.seconds for way in part) for part in block.parts) for block in blocks])
        nothing = np.concatenate([np.repeat(free[:, None], len(prices), axis=1), np.zeros((len(blocks), 1))], axis=1)
        self._priced = list[_Priced]()
        for first in {stages, *(1 << power for power in range(stages.bit_length()) if 1 << power < stages)}:
            priced = held if first == stages else np.concatenate([held[:, :first], nothing[:, None, :]], axis=1)
            always = count @ priced[:, -1] - np.append(prices, 1.0) * room[first - 1]
            falls = priced[:, :-1] - priced[:, 1:]
            with np.errstate(divide="ignore", invalid="ignore"):
                rate = np.where(work[:, None, None] > 0, falls / work[:, None, None], 0.0)
            order = np.argsort(rate, axis=0)
            size = (work * count)[order]
            ahead = np.cumsum(size, axis=0) - size
            rate = np.take_along_axis(rate, order, axis=0)
            self._priced.append(_Priced(always, rate, size, ahead, float(room[first - 1])))

    def at(self, behind: Sequence[float]) -> float:
        ahead, most = self._work - np.array(behind), 0.0
        for priced in self._priced:
            found = priced.at(ahead)
            if found[-1] > _ROUNDING * priced.room:
                return math.inf
            most = max(most, float(found[:-1].max()))
        return most


def _least(blocks: Sequence[Held], prices: Array, flying: Array) -> Array:
    """f_b of the module, [block, stage, price]; in a last column the least bytes."""
    found = np.zeros((len(blocks), len(flying), len(prices) + 1))
    # the parts of each block one by one, with a part of no bytes where it has no more, and a way again for one fewer
    nothing, ways = (Way(0.0, 0.0),), max((len(part) for block in blocks for part in block.parts), default=1)
    for parts in itertools.zip_longest(*(block.parts for block in blocks), fillvalue=nothing):
        own = [[*part, *part[-1:] * (ways - len(part))] for part in parts]
        seconds, state, kept = (
            np.array([[getattr(way, name) for way in part] for part in own])[:, :, None]
            for name in ("seconds", "state_bytes", "kept_bytes")
        )
        bytes_ = state + flying * kept
        found[:, :, :-1] += (seconds[..., None] + bytes_[..., None] * prices).min(axis=1)
        found[:, :, -1] += bytes_.min(axis=1)
    return found


def _breaks(blocks: Sequence[Held], flying: Collection[float]) -> Array:
    """Prices at which the least of some part's ways changes where so many microbatches are in flight."""
    found = {0.0}
    for part in {part for block in blocks for part in block.parts}:
        for one, other in itertools.permutations(part, 2):
            for w in flying:
                bytes_ = one.state_bytes - other.state_bytes + w * (one.kept_bytes - other.kept_bytes)
                if bytes_ > 0 and other.seconds > one.seconds:
                    found.add((other.seconds - one.seconds) / bytes_)
    return np.array(sorted(found))
