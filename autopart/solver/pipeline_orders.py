r"""Chains of computations in orders other than 1F1B's and GPipe's, for :mod:`autopart.solver.pipeline_floor`.

A rank runs several stages, or leaves a part W_s <= B_s / 2 of a backward of B_s seconds for later. Before the first
forward of stage s come those of the stages before; m microbatches of it, and of the later stages S_s on its rank,
follow; and then the end of the step, or the way of the last gradient back through the stages before and the end of the
first rank's step. With R_k the seconds of a stage's end that its last backward does not hide, a step of T seconds has
for every stage s, on rank r,

    T >= F_{<s} + m sum_{S_s} (F_k + B_k) + sum_r R_k
    T >= F_{<s} + m sum_{S_s} (F_k + B_k - W_k) + (B - W)_{<s} + sum_0 R_k

Where batches follow each other without a gap nothing hides the ends, and a rank has its own work alone,
T >= m sum_r (F_k + B_k) + sum_r R_k.
These are the first chains of :mod:`autopart.solver.stages_least`. Of neighbouring ranks the mean is taken, whose stages
join in groups as those of :mod:`autopart.solver.pipeline_groups` do: the k-th of n stages counts m v_k of its own and
v_j for each stage behind it, where the weights v add up to 1, and the sum over the group as often as the least does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopart.solver.pipeline_groups import ALIKE, Group, Grouping

_FINENESS = {Grouping.FINE: 64, Grouping.COARSE: 8}
"""Microbatches for each rank that joins another: a mean over n loses some (n - 1) / 2 of m passes."""


@dataclass(frozen=True, slots=True)
class Order:
    """places: the rank of each stage; the first p stages are the first of theirs. splits: whether W is apart. steady:
    whether batches follow each other without a gap.
    """

    places: tuple[int, ...]
    splits: bool = False
    steady: bool = False


@dataclass(frozen=True, slots=True)
class RankChain:
    """The mean over neighbouring ranks, from one of their stages on. groups: of these stages, and of their later ones.
    first: how often the forwards of the first group count, and its backwards where gradients go back from there; own:
    all else of these groups. ends: the groups of all stages of these ranks, whose ends count ``end`` times. there_s,
    back_s: transfers inside the first group.
    """

    groups: tuple[int, ...]
    ends: tuple[int, ...]
    first: float
    own: float
    end: float
    there_s: float
    back_s: float


def ordered_groups(
    microbatches: int,
    in_flight: Sequence[int],
    capacity_bytes: Sequence[float],
    there: Sequence[float],
    back: Sequence[float],
    order: Order,
    grouping: Grouping = Grouping.FINE,
) -> tuple[tuple[Group, ...], tuple[RankChain, ...]]:
    """The stages of a pipeline in groups, in order, and the chains of the ranks that run them, the first rank's first.

    there, back: by cut, seconds.
    """
    stages_of: dict[int, list[int]] = {}
    for stage, place in enumerate(order.places):
        stages_of.setdefault(place, []).append(stage)
    count = len(stages_of)
    assert all(stages_of[rank][0] == rank for rank in range(count)), "ranks are numbered by their first stages"
    most = 1 if grouping is Grouping.EACH else max(1, microbatches // _FINENESS[grouping])
    runs: list[list[int]] = []
    for rank in range(count):
        first = runs[-1][0] if runs else 0
        apart = rank in (0, 1, count - 1) or len(runs[-1]) >= most
        pairs = zip(stages_of[first], stages_of[rank], strict=True)
        if apart or any(abs(in_flight[a] - in_flight[b]) >= in_flight[a] / ALIKE[grouping] for a, b in pairs):
            runs.append([rank])
        else:
            runs[-1].append(rank)
    run_of = {rank: number for number, run in enumerate(runs) for rank in run}
    groups, numbers = list[list[int]](), [list[int]() for _ in runs]
    for stage, place in enumerate(order.places):
        joined = groups and run_of[place] == run_of[order.places[groups[-1][-1]]]
        if not joined or any(order.places[other] == place for other in groups[-1]):
            numbers[run_of[place]].append(len(groups))
            groups.append([])
        groups[-1].append(stage)
    found = tuple(
        Group(len(own), min(in_flight[at] for at in own), math.fsum(capacity_bytes[at] for at in own), (), ())
        for own in groups
    )
    chains = []
    for own in numbers:
        for chunk, first in enumerate(own):
            inside = slice(groups[first][0], groups[first][-1])  # cuts inside the group
            chains.append(_chain(own[chunk:], own, microbatches, there[inside], back[inside]))
    return found, tuple(chains)


def _chain(
    groups: Sequence[int], ends: Sequence[int], microbatches: int, there: Sequence[float], back: Sequence[float]
) -> RankChain:
    """there, back: by cut inside the first group."""
    count = len(there) + 1
    # with one stage on each rank all may count equally often: v_k m + v_{k+1} + .. = v_{k+1} m + ..
    ratio = microbatches / (microbatches - 1) if len(ends) == 1 and microbatches > 1 else 1.0
    weights = [ratio**place for place in range(count)]
    weights = [weight / math.fsum(weights) for weight in weights]
    behind = [math.fsum(weights[place + 1 :]) for place in range(count)]
    first = min(weight * microbatches + after for weight, after in zip(weights, behind, strict=True))
    sent = [math.fsum(after * own for after, own in zip(behind[:-1], cuts, strict=True)) for cuts in (there, back)]
    least = min(weights)
    return RankChain(tuple(groups), tuple(ends), first, least * microbatches, least, *sent)
