"""The runs of blocks that stages may have, as lists: what lies between two positions, one a part of the other.

A run has a number; what stages cost is kept in arrays [..., run], and dynamic programs take the least of all runs that
end, or begin, at a position. Of n positions there are fewer than n (n - 1) / 2 runs, and where it is known how long a
stage may take at most, about one in p of these for p stages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Numbers = NDArray[np.intp]
Bits = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Runs:
    """first, last: by run, the positions between which its blocks lie; ordered by last, then by first."""

    positions: int
    first: Numbers
    last: Numbers
    _ends: Numbers = field(init=False)  # the positions where runs end, and the number of the first one that does
    _end_starts: Numbers = field(init=False)
    _end_counts: Numbers = field(init=False)
    _by_first: Numbers = field(init=False)  # runs ordered by first
    _begins: Numbers = field(init=False)
    _begin_starts: Numbers = field(init=False)

    def __post_init__(self) -> None:
        by_first = np.argsort(self.first, kind="stable")
        ends, end_starts, end_counts = np.unique(self.last, return_index=True, return_counts=True)
        begins, begin_starts = np.unique(self.first[by_first], return_index=True)
        found = {"_ends": ends, "_end_starts": end_starts, "_end_counts": end_counts, "_by_first": by_first}
        for name, value in {**found, "_begins": begins, "_begin_starts": begin_starts}.items():
            object.__setattr__(self, name, value)

    @staticmethod
    def of(member: Bits) -> Runs:
        """All runs. member: [position, block], in an order that subsets precede."""
        size, counts = member.sum(axis=1), member.astype(np.float64)
        is_run = (counts @ counts.T == size[:, None]) & (size[:, None] < size[None, :])
        last, first = np.nonzero(is_run.T)
        return Runs(len(member), first, last)

    def __len__(self) -> int:
        return len(self.first)

    def where(self, wanted: Bits) -> Runs:
        """Some of the runs. wanted: by run."""
        return Runs(self.positions, self.first[wanted], self.last[wanted])

    def number(self, first: int, last: int) -> int:
        """The run between two positions, which is one of these."""
        begin, end = np.searchsorted(self.last, [last, last + 1])
        found = int(begin + np.searchsorted(self.first[begin:end], first))
        assert found < end and self.first[found] == first, "a run that no stage may have"
        return found

    def between(self, values: NDArray[Any]) -> Array:
        """Of what grows with positions, [..., position], the part of each run."""
        found: Array = values[..., self.last] - values[..., self.first]
        return found

    def least_to(self, values: Array) -> tuple[Array, Numbers]:
        """By position the least of values [..., run] of the runs that end there, and the first run that has it.

        Infinite, of any run, where there is none.
        """
        shape = *values.shape[:-1], self.positions
        least, which = np.full(shape, np.inf), np.zeros(shape, dtype=np.intp)
        if len(self):
            found = np.minimum.reduceat(values, self._end_starts, axis=-1)
            hits = np.flatnonzero(values == np.repeat(found, self._end_counts, axis=-1))
            rows = len(self) * np.arange(values.size // len(self)).reshape(*values.shape[:-1], 1)
            least[..., self._ends] = found
            which[..., self._ends] = hits[np.searchsorted(hits, rows + self._end_starts)] - rows
        return least, which

    def shortest(self, arcs: Array) -> Array:
        """By position the least sum of ``arcs`` [run] on runs that follow each other from the first position on."""
        found = np.full(self.positions, np.inf)
        found[0] = 0.0
        while len(self):
            least = np.minimum.reduceat(found[self.first] + arcs, self._end_starts)
            better = least < found[self._ends]
            if not better.any():
                break
            found[self._ends[better]] = least[better]
        return found

    def least_from(self, values: Array) -> Array:
        """By position the least value of the runs that begin there; infinite where there is none."""
        least = np.full(self.positions, np.inf)
        if len(values):
            least[self._begins] = np.minimum.reduceat(values[self._by_first], self._begin_starts)
        return least
