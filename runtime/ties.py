"""Which ranks of a stage have equal sums of a parameter's gradient, when stages that are tied by it add theirs up.

Replicas have, once they have summed over themselves, and where meshes are unlike tied parameters are whole on all
ranks. As many in each stage each sum a share with their peers and gather the rest at home: of what all of them would
send through the ports of their nodes one part in so many is left.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence


class Copies(enum.Enum):
    """Ranks of one stage with equal gradients of a tied parameter."""

    NONE = "none that each of the other stages has as many of"
    REPLICAS = "replicas"
    RANKS = "all ranks"


def tied_copies(meshes: Sequence[Sequence[int]]) -> Copies:
    """meshes: sizes of the axes of each stage that is tied, data axis first."""
    if len({tuple(sizes) for sizes in meshes}) == 1:
        return Copies.REPLICAS
    return Copies.RANKS if len({math.prod(sizes) for sizes in meshes}) == 1 else Copies.NONE


def copies_in(meshes: Sequence[Sequence[int]]) -> int:
    """How many a stage has."""
    return {Copies.NONE: 1, Copies.REPLICAS: meshes[0][0], Copies.RANKS: math.prod(meshes[0])}[tied_copies(meshes)]
