"""Which factorings of a stage's tensor ranks into two axes are searched beside one axis.

Several axes are planned only where one is seen to be short of something, as their problems are several times larger:

* nothing fits into memory: the configurations that hold least are tried on two axes;
* the plan on one axis repeats products on its ranks, because no size of theirs divides by all of them (heads that are
  fewer than ranks, or no multiple);
* what products exchange at least on one axis is more than on two or three (:mod:`autopart.axes_volume`), and the
  difference, taken off what one axis takes, makes a configuration the fastest.

Each factoring is tried in both orders: the inner axis joins neighbours, the outer one lies on the slower links.

What is not tried is not in a plan's bound. :func:`uncovered` says what that is, and bounds it as if all ranks shared
all work and exchanged nothing; no more is known of what any strategies on any axes have to exchange, since products may
share operands, add up partial results before they are summed, and repeat what is cheap.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from autopart.answers import Answer
from autopart.axes_volume import least_exchange_seconds
from autopart.candidates import Candidates
from autopart.solver.degrees import MOST_AXES, Degrees, factorizations
from autopart.solver.search_space import Evaluation

AXES = 2
"""Tensor axes that are tried where one is short of memory or sizes."""
FASTER = 0.05
"""Share of the best plan's seconds by which several axes have to promise to be faster."""
REPEATED = 0.05
"""Share of the ops' seconds in products that ranks repeat, from which two axes are tried."""
_MOST_UNFIT = 2
_MOST_FASTER = 2


def several_axes(
    candidates: Candidates,
    configs: Sequence[Degrees],
    best: Evaluation[Answer] | None,
    taken: Mapping[Degrees, float],
) -> tuple[Degrees, ...]:
    """Configurations on several axes to try after those on one.

    best: of these; None: none of them fits into memory. taken: seconds of those that were evaluated, as expected where
    that was stopped.
    """
    if best is not None:
        config = best.answer.config
        # where hosts bind, a step is no shorter by what devices compute
        short = len(config.axes) == 1 and not candidates.starts_bind(config) and _repeats(candidates, best.answer)
        return tuple(_factored(config)) if short else _faster(candidates, configs, best, taken)
    holding_least = sorted(configs, key=lambda item: (-item.tp, -item.microbatches, item.recompute == "none", item.dp))
    factored = [found for item in holding_least if (found := tuple(_factored(item)))]
    return tuple(item for items in factored[:_MOST_UNFIT] for item in items)


def uncovered(
    candidates: Candidates, configs: Iterable[Degrees], tried: Collection[Degrees], bound: float
) -> tuple[tuple[tuple[int, ...], ...], float]:
    """Factorings that were not searched and may be faster than ``bound``, with the seconds that they take at least.

    configs: on one axis. tried: those that the bound covers.
    """
    found: dict[tuple[int, ...], None] = {}
    least = math.inf
    for config in configs:
        if len(config.axes) != 1 or candidates.lower_bound(config) >= bound:
            continue
        left = [axes for axes in factorizations(config.tp, MOST_AXES)[1:] if replace(config, axes=axes) not in tried]
        if left and (floor := candidates.shared_floor(config)) < bound:
            found.update(dict.fromkeys(left))
            least = min(least, floor)
    return tuple(sorted(found, key=lambda axes: (math.prod(axes), len(axes), axes))), least


def _faster(
    candidates: Candidates, configs: Sequence[Degrees], best: Evaluation[Answer], taken: Mapping[Degrees, float]
) -> tuple[Degrees, ...]:
    """Those that promise most against the best plan, of all that several axes may make faster."""
    found: list[tuple[float, Degrees]] = []
    for config in configs:
        if len(config.axes) != 1 or candidates.lower_bound(config) >= (1 - FASTER) * best.objective:
            continue
        known = taken.get(config, candidates.known_floor(config))
        if known < best.objective:
            continue  # does not fit, or was left out
        one = least_exchange_seconds(candidates, config)
        if known - candidates.step_floor(one, config) >= (1 - FASTER) * best.objective:
            continue  # not even if nothing were exchanged
        for axes in factorizations(config.tp, MOST_AXES)[1:]:
            several = replace(config, axes=axes)
            saved = one - least_exchange_seconds(candidates, several)
            promised = max(known - candidates.step_floor(max(0.0, saved), config), candidates.lower_bound(config))
            if saved > 0 and promised < (1 - FASTER) * best.objective:
                found.append((promised, several))
    found.sort(key=lambda item: (item[0], len(item[1].axes)))
    return tuple(config for _, config in found[:_MOST_FASTER])


def _factored(config: Degrees) -> Iterator[Degrees]:
    if len(config.axes) == 1:
        for axes in factorizations(config.tp, AXES):
            if len(axes) > 1:
                yield replace(config, axes=axes)


def _repeats(candidates: Candidates, answer: Answer) -> bool:
    """Whether products that all ranks compute whole take a good part of the time."""
    prices, sizes = candidates.prices(answer.config), answer.config.axes
    costs = candidates.analysis.costs(candidates.device.kind)
    whole = repeated = 0.0
    for node, chosen in answer.choice.strategies.items():
        seconds = sum(prices.op_seconds(node, chosen, sizes))
        whole += seconds
        cost = costs.get(node)
        if cost is not None and cost.contraction and prices.shares(node, chosen, sizes)[0] == 1.0:
            repeated += seconds
    return repeated > REPEATED * whole
