"""The best assignment of strategies found so far: every offer is made to fit, then improved one op at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from autopart.solver.tensor_arrays import EdgeArrays, Floats, ProblemArrays, incoming, outgoing

TOLERANCE = 1e-7
"""Objective and bound count as equal when they differ by less than this share of the objective."""


class Incumbent:
    """The best assignment so far, in the problem's own numbers of choices; before there is one, in infinite seconds."""

    def __init__(self, arrays: ProblemArrays, gap: float = TOLERANCE) -> None:
        self.gap = gap
        self.choices: list[int] | None = None
        self.objective = math.inf
        self._arrays = arrays
        self._number = [{choice: index for index, choice in enumerate(live)} for live in arrays.live]
        sources, readers = outgoing(arrays), incoming(arrays)
        # Per op its edges once each: the edge, whether the op makes it, the numbers of the uses by which it reads it.
        self._touching: list[list[tuple[EdgeArrays, bool, tuple[int, ...]]]] = []
        for op in range(len(arrays.cost)):
            edges = {id(edge): edge for edge in [*sources[op], *(edge for edge, _ in readers[op])]}
            self._touching.append(
                [
                    (edge, edge.source == op, tuple(n for n, use in enumerate(edge.uses) if use.op == op))
                    for edge in edges.values()
                ]
            )

    def meets(self, bound: float) -> bool:
        """Whether it is within the gap of a bound."""
        return self.choices is not None and self.objective - bound <= self.gap * self.objective

    def offer(self, choices: Iterable[int]) -> bool:
        """Keeps ``choices``, improved, if they are possible, fit and take fewer seconds than those kept so far.

        Choices that are not among the arrays' are replaced by the op's cheapest. Returns whether they were kept.
        """
        improved = [number.get(choice, 0) for number, choice in zip(self._number, choices, strict=True)]
        self._shrink(improved)
        self._descend(improved)
        objective = self._arrays.objective(improved)
        if objective < self.objective and self._arrays.fits(improved):
            self.choices, self.objective = self._arrays.original(improved), objective
            return True
        return False

    def _shrink(self, choices: list[int]) -> None:
        """Until it fits, changes the op that frees memory at the fewest seconds per byte."""
        arrays = self._arrays
        while not arrays.fits(choices):
            over = arrays.memory_of(choices) - (arrays.limit or 0.0)
            moves: list[tuple[float, int, int]] = []
            for op, memory in enumerate(arrays.memory):
                smaller = np.flatnonzero(memory < memory[choices[op]])
                if not len(smaller):
                    continue
                seconds = self._seconds_around(op, choices)
                freed = np.minimum(over, memory[choices[op]] - memory[smaller])
                with np.errstate(invalid="ignore"):
                    rise = (seconds[smaller] - seconds[choices[op]]) / freed
                rise = np.where(np.isnan(rise), np.inf, rise)
                best = int(rise.argmin())
                moves.append((float(rise[best]), op, int(smaller[best])))
            if not moves:
                return
            _, op, choice = min(moves)
            choices[op] = choice

    def _descend(self, choices: list[int]) -> None:
        arrays = self._arrays
        held = arrays.memory_of(choices)
        moved = True
        while moved:
            moved = False
            for op, memory in enumerate(arrays.memory):
                if len(memory) == 1:
                    continue
                seconds, before = self._seconds_around(op, choices), choices[op]
                others = held - memory[before]
                if arrays.limit is not None:
                    seconds = np.where(others + memory > max(arrays.limit, held), np.inf, seconds)
                best = int(seconds.argmin())
                if seconds[best] < seconds[before] * (1 - 1e-12) or (
                    np.isinf(seconds[before]) and not np.isinf(seconds[best])
                ):
                    choices[op], held, moved = best, float(others + memory[best]), True

    def _seconds_around(self, op: int, choices: Sequence[int]) -> Floats:
        """Per choice of an op its seconds and those of the conversions around it, the others staying as they are."""
        seconds = self._arrays.cost[op].copy()
        for edge, makes, reads in self._touching[op]:
            wanted = {int(use.wanted[choices[use.op]]) for n, use in enumerate(edge.uses) if n not in reads}
            if makes and reads:
                seconds += [self._self_read(edge, reads, wanted, choice) for choice in range(len(seconds))]
            elif makes:
                seconds += edge.seconds[:, sorted(wanted)].sum(axis=1)[edge.produced]
            else:
                row = edge.seconds[edge.produced[choices[edge.source]]]
                paid = row[sorted(wanted)].sum()
                row = row.copy()
                row[sorted(wanted)] = 0.0
                if len(reads) == 1:
                    seconds += paid + row[edge.uses[reads[0]].wanted]
                else:
                    columns = np.sort(np.stack([edge.uses[n].wanted for n in reads]), axis=0)
                    distinct = np.concatenate([np.ones((1, len(seconds)), bool), columns[1:] != columns[:-1]])
                    seconds += paid + np.where(distinct, row[columns], 0.0).sum(axis=0)
        return seconds

    @staticmethod
    def _self_read(edge: EdgeArrays, reads: Sequence[int], others: set[int], choice: int) -> float:
        """Conversions of a value that the op itself reads again, as the next layer does."""
        wanted = others | {int(edge.uses[n].wanted[choice]) for n in reads}
        return float(edge.seconds[edge.produced[choice], sorted(wanted)].sum())
