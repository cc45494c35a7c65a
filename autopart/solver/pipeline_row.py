"""The blocks of a pipeline in a row, and the boundaries between which its stages lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopart.solver.pipeline_pieces import Piece


@dataclass(frozen=True, slots=True)
class Place:
    """A block of the row: a piece of a layer of a family, or, where this is -1, a piece of the rest."""

    family: int
    layer: int
    piece: int


@dataclass(frozen=True, slots=True)
class Boundary:
    """Where stages may begin and end. blocks: before it.

    there, back: seconds of a transfer. before_bytes, behind_bytes: buffers of a stage that ends there, and of one that
    begins there. All at least.
    """

    blocks: int
    there: float = 0.0
    back: float = 0.0
    before_bytes: float = 0.0
    behind_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Tied:
    """Parameters that several blocks read, by number from the first on: a stage with one of these holds them. piece: of
    a stage without the first block, which has them as its own. seconds: at the end of a step, where several stages hold
    them, at least.
    """

    blocks: tuple[int, ...]
    piece: Piece
    seconds: float = 0.0

    def is_more(self, start: int, stop: int) -> bool:
        """Whether a stage of these blocks has them besides its blocks' own."""
        return self.blocks[0] < start and any(start <= block < stop for block in self.blocks)


@dataclass(frozen=True, slots=True)
class Row:
    """The blocks in order, all layers' pieces in a row, and the boundaries, both ends among them.

    transfers: by cut, seconds there and back at each boundary, no less than the boundaries' own; none: these.
    tied: parameters that several blocks read.
    """

    places: tuple[Place, ...]
    boundaries: tuple[Boundary, ...]
    transfers: tuple[Sequence[tuple[float, float]], ...] = ()
    tied: tuple[Tied, ...] = ()

    def sent(self, stage: int) -> Sequence[tuple[float, float]]:
        """At each boundary, of the cut behind a stage."""
        if stage < len(self.transfers):
            return self.transfers[stage]
        return [(boundary.there, boundary.back) for boundary in self.boundaries]
