"""What dividing parameters over replicas (ZeRO) saves in memory and costs in exchanges.

Of a parameter with W bytes of weight on a rank (after the tensor axes), G of gradients and O of optimizer state, on r
replicas and m microbatches, a rank holds, and a step exchanges, as :mod:`autopart.runtime.data_weights` runs it:

=====  ==================  ============================================================
level  bytes held          exchanged over the data axis
=====  ==================  ============================================================
0      W + G + O           all-reduce of G
1      W + G + O/r         reduce-scatter of G, all-gather of W
2      W + (G + O)/r       m reduce-scatters of G, all-gather of W
3      (W + G + O)/r       m reduce-scatters of G, m or 2m all-gathers of W
=====  ==================  ============================================================

A microbatch's gradients, or from level 2 on the shares of their sums, are added to those of the microbatches before.
The second gather of level 3 is the backward's. Whole weights that level 3 has for a while are transient
(:func:`whole_bytes`).

What is exchanged in every microbatch takes the memory's bandwidth from what is computed meanwhile: of n bytes that pass
on in a ring (Patarasuk and Yuan, Journal of Parallel and Distributed Computing 69(2), 2009) a gather writes and reads
each on a rank, and a sum reads one of the rank's own with it.

Sums of levels 0 and 1 start during the last backward, and what that hides is credited (:mod:`autopart.solver.overlap`).
Gathers of levels 1 and 2 pass beside the first forward, those of level 3 run a layer ahead, and sums of levels 2 and 3
beside each backward. Plans are timed so (:mod:`autopart.data_clock`); candidates are compared as if a layer's exchange
passed beside its own ops, those that run again among them, but for one layer of each stage, and bounds count only that
all of it passes one after another while the step lasts, and what the first block has to do with it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from autopart.cost.communication import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, collective_seconds
from autopart.cost.compute import copy_seconds
from autopart.cost.devices import Link
from autopart.passes.annotate import ParameterBytes
from autopart.passes.conversion import Axes
from autopart.passes.data_axis import LEVELS, data_dim
from autopart.passes.program import TensorInfo
from autopart.prices import Prices
from autopart.runtime.placement import Placements

LAYER_COPIES = 4
"""How often the divided weights of a layer are in memory at least, whole, beside what its ops take: see
:func:`whole_bytes`.
"""
_GATHERED_PASSES, _SUMMED_PASSES = 2, 3
"""Through a rank's memory, of each byte that it passes on."""


def whole_bytes(
    owners: Sequence[str],
    layers: Collection[str],
    whole: Mapping[str, Sequence[tuple[float, bool]]],
    replicas: int,
    summed: float,
    repeats: bool,
) -> list[float]:
    """Of each block the bytes that level 3 has for a while while it goes back, beside what its ops take.

    owners: by block, what gathers its weights: its layer, or the block itself, whose ops gather each for themselves.
    whole: by owner the bytes of its divided weights, and whether each is gathered again in the backward. summed: bytes
    in the type of sums for each byte of a gradient. repeats: a microbatch follows another on all blocks.

    A layer has its own weights and their gradients, what comes before it, which is gathered, and the message of what
    comes behind it with what arrives of that; the two are taken to be no less than its own. An op outside of layers has
    its gradient among what it takes, and its weight again if it kept that. Behind the last are ops, such as a loss,
    that run back beside what it has gathered; and there the first one's message of the microbatch before may be on its
    way.
    """
    units = [owner for owner in dict.fromkeys(owners) if owner in whole]
    sizes = [math.fsum(size for size, _ in whole[owner]) for owner in units]
    before = [0.0, *sizes[:-1]]
    behind = [summed * (1 + 1 / replicas) * size for size in (*sizes[1:], sizes[0] if repeats else 0.0)]
    found = dict[str, float]()
    for owner, own, gathered, flying in zip(units, sizes, before, behind, strict=True):
        if owner in layers:
            found[owner] = 2 * own + max(own, gathered) + max(own, flying)
        else:
            again = math.fsum(size for size, read in whole[owner] if read)
            found[owner] = again + own - max(size for size, _ in whole[owner]) + gathered + flying
    last = max(index for index, owner in enumerate(owners) if owner in whole)
    loss = sizes[-1] + behind[-1]
    return [found.get(owner, loss if index > last else 0.0) for index, owner in enumerate(owners)]


def offered_levels(
    info: TensorInfo, placements: Placements, axes: Axes, replicas: int, wanted: Sequence[int] = LEVELS
) -> tuple[int, ...]:
    """Of the wanted levels those that a tensor can have; only 0 for buffers and where no dim divides."""
    if info.buffer or replicas == 1 or data_dim(info, placements, axes, replicas) is None:
        return (0,)
    return tuple(wanted)


def held_bytes(whole: ParameterBytes, level: int, replicas: int) -> ParameterBytes:
    """What one of the replicas holds, where ``whole`` is what all hold at level 0."""
    return ParameterBytes(
        whole.weight // replicas if level == 3 else whole.weight,
        whole.gradient // replicas if level >= 2 else whole.gradient,
        whole.optimizer // replicas if level >= 1 else whole.optimizer,
    )


def exposed(exchanged: float, computed: float, units: float, late: float = 0.0) -> float:
    """Which part of a pass's exchange for divided parameters computing waits for, where both are spread over it evenly.

    exchanged, computed: seconds. units: that are exchanged one after another; one of them passes beside nothing. late:
    of the seconds, those of which even that one passes beside the next microbatch.
    """
    return min(1.0, max((1 - late / exchanged) / units, 1 - computed / exchanged)) if exchanged else 0.0


@dataclass(frozen=True, slots=True)
class DataPrices:
    """Seconds of parameters over ``replicas`` on ``link``.

    summed: bytes sent of a gradient for each of its own. microbatches: of each replica, in one step.
    """

    prices: Prices
    link: Link
    replicas: int
    summed: float = 1.0
    microbatches: int = 1

    def step_end_seconds(self, weight: float, level: int) -> float:
        """Once a step, for a trained parameter of ``weight`` bytes: sums in large buckets, optimizer."""
        return self.prices.optimizer_seconds(weight / self.replicas if level else weight) + self.sum_seconds(
            weight, level
        )

    def arriving_seconds(self, weight: float, level: int) -> float:
        """Of the gather of a trained parameter that is whole, but updated in shares, when a step begins."""
        return self._bytes_seconds(ALL_GATHER, weight) if level in (1, 2) else 0.0

    def sum_seconds(self, weight: float, level: int) -> float:
        """Of :meth:`step_end_seconds` what starts during the last backward."""
        kind = {0: ALL_REDUCE, 1: REDUCE_SCATTER}.get(level)
        return self._bytes_seconds(kind, weight * self.summed) if kind else 0.0

    def call_seconds(self, level: int) -> float:
        """Of a message in which such sums pass, besides its bytes."""
        kind = {0: ALL_REDUCE, 1: REDUCE_SCATTER}.get(level)
        return collective_seconds(kind, 0, self.replicas, self.link) if kind else 0.0

    def microbatch_seconds(
        self, weight: float, level: int, trained: bool, again: bool, messages: float
    ) -> tuple[float, float]:
        """What a parameter's replicas exchange in the forward and backward of one microbatch.

        again: the backward gathers as well. messages: the part of a message that is this parameter's, as several share
        one call's latency.
        """
        if level < 2 or self.replicas == 1:
            return 0.0, 0.0
        if level == 2:
            return 0.0, self._bytes_seconds(REDUCE_SCATTER, weight * self.summed) if trained else 0.0
        latency = messages * collective_seconds(ALL_GATHER, 0, self.replicas, self.link)
        gather = latency + self._bytes_seconds(ALL_GATHER, weight)
        scatter = latency + self._bytes_seconds(REDUCE_SCATTER, weight * self.summed)
        return gather, (gather if again else 0.0) + (scatter if trained else 0.0)

    def adding_seconds(self, weight: float, level: int) -> float:
        """Of one microbatch's backward: adding the gradient of so many bytes to those before."""
        return self.prices.adding_seconds(weight / self.replicas if level >= 2 else weight, self.microbatches)

    def passing_seconds(self, gathered: float, summed: float) -> float:
        """Of one microbatch, through a rank's memory, for what passes beside ops. gathered, summed: bytes of messages
        on each rank. Sums of the last microbatch are left aside, as those at levels 0 and 1 are.
        """
        passes = _GATHERED_PASSES * gathered + _SUMMED_PASSES * summed * (1 - 1 / self.microbatches)
        return copy_seconds(self.prices.device, passes * (1 - 1 / self.replicas))

    def moving_seconds(
        self, weight: float, level: int, trained: bool = True, again: bool = False
    ) -> tuple[float, float]:
        """In a microbatch's forward and backward: adding a parameter's gradient to those before, and what passes beside
        ops for it.

        again: as of :meth:`microbatch_seconds`.
        """
        gathered, summed = (weight if level == 3 else 0.0), (weight * self.summed if trained and level >= 2 else 0.0)
        adding = self.adding_seconds(weight, level) if trained else 0.0
        return self.passing_seconds(gathered, 0.0), adding + self.passing_seconds(gathered if again else 0.0, summed)

    def least_moving_seconds(self, weight: float, levels: Sequence[int]) -> float:
        """The same, both together, of trained parameters of so many bytes, at one of these levels at least."""
        return min(sum(self.moving_seconds(weight, level)) for level in levels)

    def _bytes_seconds(self, kind: str, size: float) -> float:
        """A part of a large message: its bytes, without the call's latency."""
        whole, empty = (collective_seconds(kind, item, self.replicas, self.link) for item in (size, 0))
        return whole - empty
