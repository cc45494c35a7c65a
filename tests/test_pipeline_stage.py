"""Least seconds of one stage of a row of blocks."""

from __future__ import annotations

import pytest

from autopart.solver.pipeline_pieces import Piece, Pipeline, Way, Weights
from autopart.solver.pipeline_row import Boundary, Place, Row
from autopart.solver.pipeline_stage import StageFloors


@pytest.mark.parametrize("arriving_s", [0.0, 100.0])
def test_what_arrives_when_a_step_begins_is_there_when_it_ends(arriving_s: float) -> None:
    """Seconds of the last microbatches of a first stage, with its end, know nothing of it."""
    weights = Weights(1.0, (Way(end_s=0.5, arriving_s=arriving_s),))
    rest = [Piece(1.0, 2.0, (weights,)), Piece(1.0, 2.0, (weights,))]
    row = Row((Place(-1, -1, 0), Place(-1, -1, 1)), tuple(Boundary(blocks) for blocks in range(3)), ((),), ())
    floors = StageFloors([], rest, row, Pipeline(8, (2, 1), (10.0, 10.0), 6.0))
    floors.price(0, 0, 1)
    ends = floors.ends(1, 3.0, 3.0, 1000.0)
    assert floors.counts == (1, 7, 8) and ends == pytest.approx([0.5, 0.5, 0.5], rel=1e-4)
