"""Which configurations are tried under deeper warm-ups of 1F1B, after the search under the least.

With the least warm-up stage i of p has p - i microbatches in flight. A microbatch's way through all stages and back is
then done for p of them at once, so that what passes between stages is waited for: of each microbatch about as long as
one transfer there and back takes. A deeper warm-up hides these, all but those of the first and the last microbatch, and
lets stages be less even. Tried are the best plan's configuration, and those whose seconds under the least, less what
may be hidden, are fewer than the best plan's, on each mesh the best of them with the next fewer and more microbatches,
and others while these are few; and unlike meshes of a few devices that were not evaluated, as their bounds under the
least warm-up told that they take longer, where those under a deeper one do not.

What is not tried is not in a plan's bound, nor is what is: bounds are of the least warm-up.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from autopart.candidates import Candidates
from autopart.estimates import Estimates
from autopart.solver.degrees import Config, Degrees
from autopart.solver.search_outcomes import WORTH
from autopart.solver.stages_problem import StageProblem, Way

DEPTHS = (2, 3)
"""Forwards that each stage runs ahead of the next, which stages are cut for."""
_MOST, _MOST_LEFT_OUT = 6, 4
"""Configurations that are tried, and how many more of those that bounds ruled out under the least warm-up."""


@dataclass(slots=True)
class DeeperWarmups:
    """What became of configurations under the least warm-up: seconds of a step, and of it those that may be hidden."""

    candidates: Candidates
    _taken: dict[Config, tuple[float, float]] = field(default_factory=dict)
    _under: dict[int, Candidates] = field(default_factory=dict)

    def was_solved(self, config: Config, seconds: float, problem: StageProblem, way: Way) -> None:
        """Takes what an evaluation gave."""
        if self.has_others(config):
            longest = max(problem.crossing_seconds(*steps) for steps in itertools.pairwise(way))
            self._taken[config] = seconds, config.microbatches * longest

    def was_stopped(self, config: Degrees, seconds: float, estimates: Estimates) -> None:
        """Takes what is expected of a configuration that took no less than the best."""
        if self.has_others(config):
            self._taken[config] = seconds, estimates.passed_seconds(config)

    def promising(self, best: Config, best_seconds: float, configs: Iterable[Config]) -> list[Config]:
        """Those to try after the best plan was found, the most promising first. configs: all that were searched."""
        least = WORTH * best_seconds
        order = {
            config: seconds - hidden
            for config, (seconds, hidden) in self._taken.items()
            if hidden > least and seconds - hidden < best_seconds - least
        }
        if self._taken.get(best, (0.0, 0.0))[1] > least:
            order[best] = -math.inf
        rows: dict[Config, list[Config]] = {}
        for config in sorted({*configs, *order}, key=lambda item: item.microbatches):
            rows.setdefault(replace(config, microbatches=1), []).append(config)
        found: dict[Config, None] = {}
        for config in sorted(order, key=order.__getitem__):
            row = rows.pop(replace(config, microbatches=1), None)
            if row is not None and len(found) < _MOST:
                at = row.index(config)
                found |= dict.fromkeys([config, *row[max(0, at - 1) : at], *row[at + 1 : at + 2]])
        # Where there are few meshes, numbers of microbatches farther from the best on each, as they promise.
        found |= dict.fromkeys(sorted(order, key=order.__getitem__))
        return [*found][:_MOST]

    def left_out(self, best_seconds: float, tried: Iterable[Config], bounds: Mapping[Config, float]) -> list[Config]:
        """Those that bounds left out of the search under the least warm-up, and do not under a deeper one.

        bounds: seconds of these under a deeper one. tried: configurations that need not be among them.
        """
        known = {*tried, *self._taken}
        most = (1 - WORTH) * best_seconds
        found = [config for config, seconds in bounds.items() if config not in known and seconds < most]
        return sorted(found, key=bounds.__getitem__)[:_MOST_LEFT_OUT]

    def under(self, depth: int) -> Candidates:
        """The candidates with a warm-up of so many forwards ahead; 0: as they are."""
        if depth not in self._under:
            self._under[depth] = self.candidates.warmed(depth) if depth else self.candidates
        return self._under[depth]

    def has_others(self, config: Config) -> bool:
        """Whether deeper warm-ups of it are others."""
        return (
            self.candidates.warmup is None and config.schedule == "1f1b" and config.pp > 1 and config.microbatches > 1
        )
