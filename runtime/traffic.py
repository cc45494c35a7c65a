"""Counts calls and bytes of everything that a rank exchanges, so that predictions can be held against them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

# forward and backward: inside the stages, per microbatch; update: once a step for the parameters (sums of gradients,
# gathers of weights that the optimizer changed); step: once a step for the rest (losses, outputs, running statistics).
Phase = Literal["forward", "backward", "update", "step"]
Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send"]


@dataclass(frozen=True, slots=True)
class Count:
    """How often, and how many bytes in all."""

    calls: int
    bytes: int


class Traffic:
    """Calls and payload bytes per operation, mesh axis and phase, as this rank took part in them.

    Bytes of one call: all_reduce, broadcast, reduce and send: of the tensor; all_gather: of the gathered result;
    reduce_scatter: of the whole input; all_to_all: of the rank's own tensor. A send counts at the sender, on the axis
    "stage".
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str, str], list[int]] = {}

    def add(self, operation: Operation, axis: str, phase: Phase, payload: int) -> None:
        count = self._counts.setdefault((operation, axis, phase), [0, 0])
        count[0] += 1
        count[1] += payload

    def get(self, operation: Operation, axis: str, phase: Phase) -> Count:
        """What was counted so far; zero calls if nothing was."""
        return Count(*self._counts.get((operation, axis, phase), (0, 0)))

    def counts(self) -> dict[tuple[str, str, str], Count]:
        """A copy of all counts, by (operation, axis, phase)."""
        return {key: Count(*count) for key, count in self._counts.items()}

    def reset(self) -> None:
        self._counts.clear()


def payload(tensor: Tensor) -> int:
    """The tensor's size in bytes."""
    return tensor.numel() * tensor.element_size()
