"""How values lie where they cross between stages with unlike meshes.

What crosses is replicated or sharded on each tensor axis, value and gradient alike: then shares are boxes of the whole,
and :mod:`autopart.runtime.resharding` sends their overlaps. A partial sum is added up before it leaves; of a replicated
value whose gradient would be a partial sum (B), the gradient is whole. At the other end it lies as that stage's own
strategies would have made it, under the same rule, so that a sharded value can arrive sharded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from autopart.passes.conversion import Axes
from autopart.passes.partition import Crossing
from autopart.passes.rules import Strategy
from autopart.passes.shard import value_placements
from autopart.runtime.placement import REPLICATE, Placements


@dataclass(frozen=True, slots=True)
class StageSetting:
    """How one stage is divided. dp: replicas; shares: their parts of each microbatch, empty: equal parts."""

    dp: int
    axes: Axes
    strategies: Mapping[fx.Node, tuple[Strategy, ...]]
    storage: Mapping[str, Placements]
    shares: tuple[int, ...] = ()


def crossing_placements(crossings: Sequence[Crossing], settings: Sequence[StageSetting]) -> list[dict[str, Placements]]:
    """For each stage the placements of what it sends and receives, by name, where they are not as it is made."""
    found: list[dict[str, Placements]] = [{} for _ in settings]
    for crossing in crossings:
        source = settings[crossing.source]
        made = value_placements(crossing.value, source.strategies, source.axes)
        others = [settings[target] for target in crossing.targets]
        if all(_alike(source, other) for other in others):
            for target in crossing.targets:
                found[target][crossing.name] = made
            continue
        leaving = plain(made)
        found[crossing.source][crossing.name] = leaving
        for target, other in zip(crossing.targets, others, strict=True):
            if _alike(source, other):
                found[target][crossing.name] = leaving
            else:
                found[target][crossing.name] = plain(value_placements(crossing.value, other.strategies, other.axes))
    return found


def _alike(source: StageSetting, target: StageSetting) -> bool:
    return (source.dp, source.axes, source.shares) == (target.dp, target.axes, target.shares)


def plain(placements: Placements) -> Placements:
    """How a value that is made like this leaves for an unlike mesh, or arrives from one."""
    return tuple(placement if placement.is_shard else REPLICATE for placement in placements)
