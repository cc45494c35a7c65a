"""What strategies of a layer, and sets of its modules that run again, take at least, for many prices at once.

With seconds t of ops and conversions, those that run again twice, bytes v of weights and bytes a that are kept of a
microbatch, an elimination for each set finds the least of t + mu v + nu a, or t + f + mu v + nu a with the seconds f of
the forward. Sets that surely have more than others are left out: with U a set that frees what any frees and runs
nothing again, and a, r what set S keeps beyond U, and runs again, at least, whatever the strategies,

    least_S >= least_U + nu a + r

What is found is kept on disk, as the same layer is asked for under any number of microbatches and stages.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopart.solver import cache
from autopart.solver.tensor_sums import Eliminator

Array = NDArray[np.float64]
_AT_ONCE = 2**18
"""Sums that are found at once, times choices: more take gigabytes where sets are many, and longer."""


@dataclass(frozen=True, slots=True)
class LayerSums:
    """A layer's problem. Of the choices of all ops in a row: seconds, the same with the forward twice, bytes of
    weights, and [choice, set] bytes kept where a set of modules runs again, and seconds of what runs again. The last
    set is none that may run again: it frees what any does, and runs nothing again. constant: by set, bytes kept
    whatever the strategies. times: [conversion that runs again, set] whether it does. first: choice of each op.
    """

    eliminator: Eliminator
    seconds: Array
    twice: Array
    weights: Array
    kept: Array
    again: Array
    constant: Array
    times: Array
    first: NDArray[np.intp]

    def least(self, mu: Array, nu: Array, twice: NDArray[np.bool_]) -> Array:
        """By pair of prices the least over all strategies and sets. twice: where the forward counts so."""
        content = (*(getattr(self, name) for name in self.__slots__[1:]), self.eliminator.content, mu, nu, twice)
        return np.array(cache.numbers(content, len(mu), lambda: self._least(mu, nu, twice).tolist()))

    def _least(self, mu: Array, nu: Array, twice: NDArray[np.bool_]) -> Array:
        count, columns = len(self.constant) - 1, np.arange(len(mu))
        if count == 1:
            return self._sums(np.zeros(len(mu), dtype=np.intp), columns, mu, nu, twice)
        free = self._sums(np.full(len(mu), count), columns, mu, nu, twice)
        more = self.constant - self.constant[-1]
        more = more + np.minimum.reduceat(self.kept - self.kept[:, -1:], self.first, axis=0).sum(axis=0)
        ran = np.minimum.reduceat(self.again, self.first, axis=0).sum(axis=0)
        # where nothing is free of what is kept, it costs nothing to keep it
        bounds = np.where(nu > 0, free + nu * more[:count, None] + ran[:count, None], np.inf)
        bounds[0] = free + nu * more[0]
        found = np.full(len(mu), np.inf)
        first = np.argmin(bounds, axis=0)
        found = np.minimum(found, self._sums(first, columns, mu, nu, twice))
        bounds[first, columns] = np.inf
        which, column = np.nonzero(bounds < found)
        most = max(1, _AT_ONCE // len(self.seconds))
        for start in range(0, len(which), most):
            now = slice(start, start + most)
            np.minimum.at(found, column[now], self._sums(which[now], column[now], mu, nu, twice))
        return found

    def _sums(
        self, sets: NDArray[np.intp], columns: NDArray[np.intp], mu: Array, nu: Array, twice: NDArray[np.bool_]
    ) -> Array:
        """With one set and the prices of one of these columns each, the least over all strategies."""
        if not len(sets):
            return np.zeros(0)
        mu, nu, twice = mu[columns], nu[columns], twice[columns]
        costs = np.where(twice, self.twice[:, None], self.seconds[:, None]) + self.weights[:, None] * mu
        kept, again, times = (np.take(own, sets, axis=1) for own in (self.kept, self.again, self.times))
        return self.eliminator.totals(costs + kept * nu + again, twice, times) + self.constant[sets] * nu
