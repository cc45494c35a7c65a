"""Sums of gradients over ranks that a stage's last backward hides, as plain data.

The runtime starts a message (:mod:`autopart.runtime.buckets`) when the last microbatch's backward has made all of its
gradients and the messages before it have started; messages pass one after the other. With u_k the unit (block, or part
of a layer) that makes the last gradient of message k, b_u the seconds of a unit's backward, which goes from the last
unit to the first, and c_k those of the message::

    end_k  = max(end_{k-1}, sum_{u >= u_k} b_u) + c_k + a
    hidden = sum_k c_k - max(0, end_last - sum_u b_u)

where a are the seconds that a message takes besides its bytes. Where little is hidden, these may be more.

No contention of messages and computation is counted.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopart.runtime.buckets import messages_of
from autopart.solver.stages_runs import Runs


@dataclass(frozen=True, slots=True)
class GradientSum:
    """A gradient whose sum over ranks starts during the last backward.

    blocks: those that add to it. bytes: by which messages are filled. seconds: its part of the message's, and of what
    its blocks have at the end of a step. kind: equal for gradients that may share a message. call_s: what a message
    takes besides.
    """

    blocks: tuple[int, ...]
    bytes: float
    seconds: float
    kind: Hashable = None
    call_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.blocks:
            raise ValueError("a summed gradient has no blocks")
        if not all(math.isfinite(value) and value >= 0 for value in (self.bytes, self.seconds)):
            raise ValueError(f"a sum of {self.bytes} bytes in {self.seconds} seconds: both are finite, not negative")


def hidden_seconds(sums: Sequence[GradientSum], units: Sequence[tuple[Sequence[int], float]], limit: float) -> float:
    """What of a stage's sums passes before its last backward is over; see the module. Less than nothing where messages
    take longer by themselves than they hide.

    sums: of all blocks, in the order in which messages take them. units: of the stage, in the order of its forward,
    with the seconds of their backwards. limit: bytes that fill a message.
    """
    made_at: dict[int, float] = {}
    now = 0.0
    for blocks, backward_s in reversed(units):
        now += backward_s
        made_at.update(dict.fromkeys(blocks, now))
    own = [(item, item.kind, item.bytes) for item in sums if not made_at.keys().isdisjoint(item.blocks)]
    end = total = calls = 0.0
    for message, _ in messages_of(own, limit):
        seconds = math.fsum(item.seconds for item in message)
        call = max(item.call_s for item in message)
        ready = max(made_at[block] for item in message for block in item.blocks if block in made_at)
        end, total, calls = max(end, ready) + seconds + call, total + seconds, calls + call
    return max(-calls, total - max(0.0, end - now))


def sums_between(sums: Sequence[GradientSum], member: NDArray[np.bool_], runs: Runs) -> NDArray[np.float64]:
    """Seconds of all sums of the blocks of each run. member: [position, block]."""
    alone, shared = np.zeros(member.shape[1]), dict[frozenset[int], float]()
    for item in sums:
        if len(blocks := frozenset(item.blocks)) == 1:
            alone[item.blocks[0]] += item.seconds
        else:
            shared[blocks] = shared.get(blocks, 0.0) + item.seconds
    found = runs.between(member @ alone)
    for blocks, seconds in shared.items():
        found += seconds * (runs.between(member[:, list(blocks)].sum(axis=1)) > 0)
    return found


def late_between(
    sums: Sequence[GradientSum], member: NDArray[np.bool_], runs: Runs, hiding: Sequence[float]
) -> NDArray[np.float64]:
    """By run, seconds by which its sums pass the end of its last backward, at least.

    Once a block's gradients are there, backwards of the blocks before it hide its sums and those of these blocks. With
    h the seconds of backwards, ``hiding``, and c those of sums, a gradient that several blocks add to with the first of
    these, max_b sum_{i <= b} c_i - sum_{i < b} h_i over the blocks b of the run. 0 where blocks are in no row.
    """
    sizes = member.sum(axis=1)
    found = np.zeros(len(runs))
    if not sums or not all(row[:size].all() for row, size in zip(member, sizes.tolist(), strict=True)):
        return found
    own, several = np.zeros(member.shape[1]), list[tuple[tuple[int, ...], float]]()
    for item in sums:
        blocks = tuple(sorted(set(item.blocks)))
        if len(blocks) == 1:
            own[blocks[0]] += item.seconds
        else:
            several.append((blocks, item.seconds))
    for first in np.unique(runs.first):
        start = int(sizes[first])
        made = own.copy()
        for blocks, seconds in several:
            inside = [block for block in blocks if block >= start]
            if inside:
                made[inside[0]] += seconds
        passing = np.cumsum(made[start:]) - np.concatenate([[0.0], np.cumsum(hiding[start:-1])])
        mine = runs.first == first
        found[mine] = np.maximum.accumulate(passing)[sizes[runs.last[mine]] - start - 1]
    return np.maximum(found, 0.0)
