"""How a value depends on the samples it was computed from."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from autopart.passes.sizes import Extent
from autopart.runtime.placement import PARTIAL, REPLICATE, Placement


@dataclass(frozen=True, slots=True)
class BatchState:
    """A value of one share of the samples.

    placement: R (the same for every share), S (the share's own part) or P (the shares' values add up).
    order: the sort node in whose order the rows stand; None: their own.
    points: the entries are row numbers, of rows in their own order ("rows") or in that of a sort node, or where
        bags of as many rows each begin ("bags"); "" otherwise.
    rows: how many rows such entries number. counter: entry i is the number i.
    grouped: a count of rows per group, rows in that sort's order.
    onto: a written buffer's old value, which every share has and adds its part (P) to; None: no such value.
    """

    placement: Placement = REPLICATE
    order: fx.Node | None = None
    points: fx.Node | str = ""
    rows: Extent | None = None
    counter: bool = False
    grouped: fx.Node | None = None
    onto: fx.Node | None = None

    @property
    def whole(self) -> bool:
        return self.placement == REPLICATE


WHOLE = BatchState()
SUMMED = BatchState(PARTIAL)


class Mixes(Exception):
    """An op combines samples in a way that splitting would change."""
