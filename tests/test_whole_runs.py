"""Stages whose pieces are each run in one way: the fastest that fit, against trying all."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from autopart.solver import whole_runs
from autopart.solver.pipeline_pieces import Piece, Run, Way, Weights
from autopart.solver.whole_runs import WholeRuns


def random_pieces(rng: random.Random, levels: int) -> dict[Piece, int]:
    found: dict[Piece, int] = {}
    for _ in range(rng.randint(1, 3)):
        transient = rng.random()
        runs = [Run(0.0, 1.0 + rng.random(), transient)]
        runs += [Run(rng.random(), 2 * rng.random(), transient + rng.random()) for _ in range(rng.randint(0, 3))]
        passing = rng.choice([0.0, rng.random()])
        ways = [
            Way(*((rng.random(), 0.5) if number else (0.0, 1.0)), transient_bytes=passing * number)
            for number in range(levels)
        ]
        weights = (Weights(rng.random(), tuple(ways)),) if levels else ()
        mixed = tuple(Way(run.seconds, 0.0, run.kept_bytes) for run in runs)
        found[Piece(rng.random(), rng.random(), weights, mixed, transient, tuple(runs))] = rng.randint(1, 3)
    return found


def tried(pieces: dict[Piece, int], in_flight: int, room: float, shares: int) -> float:
    """The fewest seconds over all ways, and over weights at two levels in so many equal shares."""
    each = [piece for piece, count in pieces.items() for _ in range(count)]
    found = math.inf
    for ways in itertools.product(*(piece.wholes for piece in each)):
        kept = in_flight * sum(run.kept_bytes for run in ways)
        seconds = sum(piece.forward_s + piece.backward_s for piece in each) + sum(run.seconds for run in ways)
        weights = [own for piece in each for own in piece.weights]
        for parts in itertools.product(range(shares + 1), repeat=len(weights) if shares else 0):
            more = [
                [
                    own.bytes
                    * sum(share * getattr(level, name) for share, level in zip(taken, own.levels, strict=True))
                    for name in ("seconds", "state_bytes", "transient_bytes")
                ]
                for own, taken in zip(
                    weights, ((part / shares, 1 - part / shares) for part in parts), strict=bool(parts)
                )
            ] or [[0.0] * 3] * len(each)
            largest = max(run.transient_bytes + passing for run, (*_, passing) in zip(ways, more, strict=True))
            if kept + sum(state for _, state, _ in more) + largest <= room:
                found = min(found, seconds + sum(own for own, *_ in more))
    return found


@pytest.mark.parametrize("seed", range(60))
def test_no_ways_that_fit_are_faster(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    pieces, flying, room = random_pieces(rng, 0), rng.randint(1, 3), rng.uniform(2, 15)
    least = tried(pieces, flying, room, 0)
    assert WholeRuns().least_seconds(pieces, flying, room) == pytest.approx(least, rel=1e-9)
    monkeypatch.setattr(whole_runs, "MOST_SUMS", 3)
    fewer = WholeRuns().least_seconds(pieces, flying, room)
    assert fewer <= least * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(30))
def test_weights_are_divided_where_ways_leave_too_little(seed: int) -> None:
    """Of weights in halves none take less; what they take in fractions is near."""
    rng = random.Random(seed)
    pieces = dict.fromkeys(random_pieces(rng, 2), 1)
    flying, room = rng.randint(1, 3), rng.uniform(2, 12)
    found, least = WholeRuns().least_seconds(pieces, flying, room), tried(pieces, flying, room, 8)
    assert found <= least * (1 + 1e-9)
    if math.isfinite(least):
        assert least <= found + sum(own.bytes * own.levels[1].seconds / 8 for p in pieces for own in p.weights) + 1e-9


def test_modules_count_what_they_hold_while_they_run() -> None:
    """Two layers of 4 bytes in a room of 7: one frees 2 for a second, but holds 2 then; as a whole it frees 3 for 5."""
    runs = Run(0.0, 4.0), Run(1.0, 2.0, 2.0), Run(5.0, 1.0, 1.0)
    layer = Piece(1.0, 2.0, (), tuple(Way(run.seconds, 0.0, run.kept_bytes) for run in runs), 0.0, runs)
    least = WholeRuns().least_seconds
    assert [least({layer: 2}, 1, room) for room in (8.0, 7.0, 6.0, 5.0, 3.0)] == [6.0, 8.0, 8.0, 12.0, 16.0]
    assert least({layer: 2}, 1, 2.0) == math.inf
