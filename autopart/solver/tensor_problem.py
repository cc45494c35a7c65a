"""The choice of one strategy per op as plain data: ops, what each choice requires and yields, conversions between.

A placement is an integer id whose meaning belongs to the caller; costs are seconds with all repeats included, memory
is bytes per device.

A value is converted once per (edge, target placement), and all uses that want that target share the result. A
conversion does not start from another conversion: ``cost`` has to hold the cheapest way from one placement to another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IMPOSSIBLE = math.inf


@dataclass(frozen=True, slots=True)
class Choice:
    """One strategy of an op.

    cost: seconds. outputs: a placement id per output value. inputs: a placement id per input value, by which the op
    wants to read it. memory: bytes held on a device when this strategy is chosen. transient: bytes beside those, while
    the op runs.
    """

    name: str
    cost: float
    outputs: tuple[int, ...]
    inputs: tuple[int, ...] = ()
    memory: float = 0.0
    transient: float = 0.0

    def __post_init__(self) -> None:
        for unit, value in (("seconds", self.cost), ("bytes", self.memory), ("transient bytes", self.transient)):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"choice {self.name!r}: {unit} have to be finite and not negative, not {value}")


@dataclass(frozen=True, slots=True)
class Op:
    """An op, or a class of equal ops, with the strategies that it can run by."""

    name: str
    choices: tuple[Choice, ...]

    def __post_init__(self) -> None:
        if not self.choices:
            raise ValueError(f"op {self.name!r} has no choices")
        if len({(len(choice.outputs), len(choice.inputs)) for choice in self.choices}) > 1:
            raise ValueError(f"the choices of op {self.name!r} differ in their number of outputs or inputs")


class CostTable(Mapping[tuple[int, int], float]):
    """Seconds by (produced, wanted) placement id as a matrix: for values with many placements.

    rows, columns: the ids, each once. Raises ValueError where a cost is negative or not a number.
    """

    def __init__(self, rows: Sequence[int], columns: Sequence[int], seconds: NDArray[np.float64]) -> None:
        if seconds.shape != (len(rows), len(columns)) or not (seconds >= 0).all():
            raise ValueError("the cost of a conversion is not negative, one for each row and column")
        self._rows = {placement: index for index, placement in enumerate(rows)}
        self._columns = {placement: index for index, placement in enumerate(columns)}
        self._seconds = seconds

    def __getitem__(self, pair: tuple[int, int]) -> float:
        return float(self._seconds[self._rows[pair[0]], self._columns[pair[1]]])

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return ((row, column) for row in self._rows for column in self._columns)

    def __len__(self) -> int:
        return int(self._seconds.size)

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(self._rows)

    @property
    def columns(self) -> tuple[int, ...]:
        return tuple(self._columns)

    @property
    def seconds(self) -> NDArray[np.float64]:
        """[rows, columns]."""
        return self._seconds

    def part(self, produced: Sequence[int], wanted: Sequence[int]) -> NDArray[np.float64]:
        """Seconds of these ids alone; all have to be there."""
        rows, columns = [self._rows[have] for have in produced], [self._columns[want] for want in wanted]
        found: NDArray[np.float64] = self._seconds[np.ix_(rows, columns)]
        return found


@dataclass(frozen=True, slots=True)
class Edge:
    """One value: output ``output`` of op ``source``, read by ``uses``, pairs of (op index, input index).

    cost: seconds of converting the value by (produced, wanted) placement id. A pair that is missing costs nothing
    where both are the same and is impossible where they differ; so is IMPOSSIBLE (infinity).
    weight: how many times the conversion is paid, for an edge that stands for several equal ones.
    """

    source: int
    output: int
    uses: tuple[tuple[int, int], ...]
    cost: Mapping[tuple[int, int], float]
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight >= 0):
            raise ValueError(f"the weight of an edge has to be finite and not negative, not {self.weight}")
        if not self.uses:
            raise ValueError("an edge has at least one use")
        if not isinstance(self.cost, CostTable) and any(not seconds >= 0 for seconds in self.cost.values()):
            raise ValueError("the cost of a conversion is not negative")

    def seconds(self, produced: int, wanted: int) -> float:
        """Seconds of one conversion, times the weight; IMPOSSIBLE where there is none."""
        seconds = self.cost.get((produced, wanted), 0.0 if produced == wanted else IMPOSSIBLE)
        return seconds if seconds == IMPOSSIBLE else self.weight * seconds

    def table(self, produced: Sequence[int], wanted: Sequence[int]) -> NDArray[np.float64]:
        """:meth:`seconds` of every pair: [produced, wanted]."""
        if isinstance(self.cost, CostTable):
            seconds = self.cost.part(produced, wanted)
            return np.where(np.isinf(seconds), seconds, seconds * self.weight)
        return np.array([[self.seconds(have, want) for want in wanted] for have in produced], dtype=np.float64)


@dataclass(frozen=True, slots=True)
class TensorProblem:
    """Ops and the values between them. memory_limit: bytes that the chosen strategies may hold together, or None.

    transients: how many times the largest transient counts in that; where it does,
    :mod:`autopart.solver.tensor_transient` solves the problem.
    """

    ops: tuple[Op, ...]
    edges: tuple[Edge, ...] = ()
    memory_limit: float | None = None
    transients: int = 0

    def __post_init__(self) -> None:
        if self.transients < 0:
            raise ValueError(f"transients count at least 0 times, not {self.transients}")
        if self.memory_limit is not None and math.isnan(self.memory_limit):
            raise ValueError("the memory limit is not a number")
        for number, edge in enumerate(self.edges):
            for op, slot, side in ((edge.source, edge.output, "output"), *((*use, "input") for use in edge.uses)):
                if not 0 <= op < len(self.ops):
                    raise ValueError(f"edge {number} names op {op}, but there are {len(self.ops)} ops")
                choice = self.ops[op].choices[0]
                slots = len(choice.outputs if side == "output" else choice.inputs)
                if not 0 <= slot < slots:
                    raise ValueError(f"edge {number}: op {self.ops[op].name!r} has {slots} {side}s, no {side} {slot}")

    def conversions(self, choices: Sequence[int]) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Per edge the (produced, wanted) pairs that ``choices`` need, each once, those that stay as they are left out.

        choices: the index of the chosen strategy of each op.
        """
        chosen = [op.choices[index] for op, index in zip(self.ops, choices, strict=True)]
        produced = [chosen[edge.source].outputs[edge.output] for edge in self.edges]
        wanted = [sorted({chosen[op].inputs[slot] for op, slot in edge.uses}) for edge in self.edges]
        return tuple(
            tuple((have, want) for want in wants if want != have) for have, wants in zip(produced, wanted, strict=True)
        )

    def objective(self, choices: Sequence[int]) -> float:
        """Seconds of the chosen strategies and their conversions; IMPOSSIBLE where one does not exist."""
        chosen = [op.choices[index] for op, index in zip(self.ops, choices, strict=True)]
        return math.fsum(choice.cost for choice in chosen) + math.fsum(
            edge.seconds(chosen[edge.source].outputs[edge.output], want)
            for edge in self.edges
            for want in {chosen[op].inputs[slot] for op, slot in edge.uses}
        )

    def memory(self, choices: Sequence[int]) -> float:
        """Bytes that the chosen strategies hold together, the largest transient as often as it counts."""
        held = math.fsum(op.choices[index].memory for op, index in zip(self.ops, choices, strict=True))
        return held + self.transients * self.transient(choices) if self.transients else held

    def transient(self, choices: Sequence[int]) -> float:
        """Bytes of the largest transient of the chosen strategies."""
        return max(op.choices[index].transient for op, index in zip(self.ops, choices, strict=True))

    def fits(self, choices: Sequence[int]) -> bool:
        return self.memory_limit is None or self.memory(choices) <= self.memory_limit


@dataclass(frozen=True, slots=True)
class TensorSolution:
    """The strategies found, and how good they are at least.

    choices: an index into each op's choices. objective: seconds. bound: no assignment takes fewer seconds.
    gap: (objective - bound) / objective. seconds: spent solving. conversions: see TensorProblem.conversions.
    method: "presolve", "lp" (the relaxation was integral), "lp rounded" (rounding met its bound) or "mip".
    """

    choices: tuple[int, ...]
    objective: float
    bound: float
    gap: float
    seconds: float
    method: str
    conversions: tuple[tuple[tuple[int, int], ...], ...]


def relative_gap(objective: float, bound: float) -> float:
    """How far ``bound`` lies below ``objective``, as a share of it: 0 where they meet."""
    return 0.0 if objective <= bound else (objective - bound) / objective
