"""Least seconds of one stage of a pipeline, by the blocks that lie in it, and of the end of its step.

They are those of the program of :mod:`autopart.solver.pipeline_floor` for one stage; or, where there are no strategies
to price, of pieces of which each is run in one way (:mod:`autopart.solver.whole_runs`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from autopart.solver.pipeline_floor import least_step_seconds
from autopart.solver.pipeline_pieces import Family, Piece, Pipeline, Price, Way
from autopart.solver.pipeline_row import Row
from autopart.solver.whole_runs import WholeRuns, ways_of

_MOST_WHOLE = 16
"""Pieces of a stage with several ways to run them, up to which each is run in one, where no strategies are priced."""
_ALIKE = 1e-5
"""Seconds that differ by a smaller part are not told apart."""

Array = NDArray[np.float64]
_Content = tuple[tuple[int, ...], tuple[tuple[int, int], ...], tuple[int, ...], tuple[int, ...]]
"""Of a stage: by family the layers that lie in it, pieces of others, pieces of the rest, and what is tied to blocks
before it."""


@dataclass(slots=True)
class StageFloors:
    """What stages of a row take at least, in seconds, kept for all that hold the same. programs: how many were solved.

    counts: microbatches of the first stage that follow each other up to the end of its step: one, those that (2) of
    :mod:`autopart.solver.stages_floor` counts, and all.
    """

    families: Sequence[Family]
    rest: Sequence[Piece]
    row: Row
    pipeline: Pipeline
    counts: tuple[int, int, int] = field(init=False)
    programs: int = 0
    _ending: tuple[list[Family], list[Piece]] = field(init=False)  # what arrives before is there by then
    _endless: tuple[list[Family], list[Piece]] = field(init=False)
    _contents: dict[tuple[int, int], _Content] = field(default_factory=dict)
    _kinds: dict[tuple[_Content, float], int] = field(default_factory=dict)  # stages of the same content and room
    _kind_at: dict[float, NDArray[np.int64]] = field(default_factory=dict)  # by capacity; [first, last], or -1
    _owns: list[dict[int, float]] = field(default_factory=list)  # of a kind, by microbatches in flight
    _least_own: dict[int, Array] = field(default_factory=dict)  # by microbatches in flight; [kind], 0 for the unknown
    _ends: dict[int, dict[int, float]] = field(default_factory=dict)  # by boundary behind the first stage, and count
    _whole: WholeRuns = field(default_factory=WholeRuns)
    _tight: dict[tuple[int, int], set[Price]] = field(default_factory=dict)  # by family and piece, of programs before

    def __post_init__(self) -> None:
        m = self.pipeline.microbatches
        self.counts = 1, 1 + m - min(self.pipeline.in_flight[0], m), m
        self._ending, self._endless = (
            (
                [replace(item, whole=of(item.whole), pieces=tuple(map(of, item.pieces))) for item in self.families],
                [of(piece) for piece in self.rest],
            )
            for of in (_ending, _endless)
        )

    def price(self, stage: int, first: int, last: int) -> None:
        """Solves the programs that :meth:`known` and :meth:`ends` answer from, of the blocks between two boundaries.

        The fewer microbatches are in flight, the fewer seconds.
        """
        content = self._content(first, last)
        room, flying = self._room(stage, first, last), self.pipeline.in_flight[stage]
        kind = self._kind(stage, first, last)
        known = self._owns[kind]
        for held in (min(self.pipeline.in_flight), flying):
            fewer = max((own for w, own in known.items() if w < held), default=0.0)
            more = min((own for w, own in known.items() if w > held), default=math.inf)
            if held not in known:
                alike = more <= fewer * (1 + _ALIKE)
                known[held] = fewer if alike else max(fewer, self._least(content, room, held, 1, ends=False))
                for more_held, least in self._least_own.items():
                    if held <= more_held and kind < len(least):
                        least[kind] = max(least[kind], known[held])
        if not stage and last not in self._ends:
            counts = dict.fromkeys((*self.counts, 2))  # of two, as seconds that a short end costs weigh little there
            self._ends[last] = {count: self._least(content, room, flying, count, ends=True) for count in counts}

    def known(self, stage: int, first: NDArray[np.int64], last: NDArray[np.int64]) -> Array:
        """Seconds of a microbatch in a stage, at least, between pairs of boundaries: infinite where it does not fit, 0
        where no program was solved for it.
        """
        size, capacity = len(self.row.boundaries), self.pipeline.capacity_bytes[stage]
        if capacity not in self._kind_at:
            self._kind_at[capacity] = np.full((size, size), -1)
        kinds = self._kind_at[capacity]
        new = kinds[first, last] < 0
        for start, stop in zip(first[new].tolist(), last[new].tolist(), strict=True):
            kinds[start, stop] = self._kind(stage, start, stop)
        return self._own_at(self.pipeline.in_flight[stage])[kinds[first, last]]

    def _own_at(self, flying: int) -> Array:
        """By kind, the most that is known of as many microbatches in flight, or fewer."""
        known = self._least_own.get(flying, np.zeros(0))
        if len(known) < len(self._owns):
            more = [max((own for held, own in owns.items() if held <= flying), default=0.0) for owns in self._owns]
            known = self._least_own[flying] = np.array(more)
        return known

    def _kind(self, stage: int, first: int, last: int) -> int:
        key = self._content(first, last), self._room(stage, first, last)
        if key not in self._kinds:
            self._kinds[key] = len(self._owns)
            self._owns.append({})
        return self._kinds[key]

    def ends(self, last: int, own: float, behind: float, seconds: float) -> list[float]:
        """Of a first stage up to a boundary, what its microbatches and the end of its step take beyond ``own`` seconds
        for each of :attr:`counts`, where a step takes fewer than ``seconds``; 0 where no program was solved for it.

        Its microbatches take no more than the step leaves them, which is less the longer the end. behind: seconds of a
        microbatch in the stages behind, at least.
        """
        (_, some, m), end, least = self.counts, 0.0, self._ends.get(last)
        if least is None or not math.isfinite(own):
            return [0.0] * len(self.counts)
        for _ in range(2):
            cap = (seconds - end) / m
            if some > 1:
                cap = min(cap, (seconds - end - 2 * behind) / some)
            end = max(end, *(found - count * cap for count, found in least.items()))
        return [max(end, least[count] - count * own) for count in self.counts]

    def _content(self, first: int, last: int) -> _Content:
        if (first, last) not in self._contents:
            self._contents[first, last] = self._gather(first, last)
        return self._contents[first, last]

    def _gather(self, first: int, last: int) -> _Content:
        boundaries = self.row.boundaries
        whole, cut, rest = [0] * len(self.families), list[tuple[int, int]](), []
        layers: dict[tuple[int, int], list[int]] = {}
        start, stop = boundaries[first].blocks, boundaries[last].blocks
        for place in self.row.places[start:stop]:
            if place.family < 0:
                rest.append(place.piece)
            else:
                layers.setdefault((place.family, place.layer), []).append(place.piece)
        for (family, _), pieces in layers.items():
            if len(pieces) == len(self.families[family].pieces):
                whole[family] += 1
            else:
                cut += [(family, piece) for piece in pieces]
        tied = (number for number, item in enumerate(self.row.tied) if item.is_more(start, stop))
        return tuple(whole), tuple(sorted(cut)), tuple(rest), tuple(tied)

    def _room(self, stage: int, first: int, last: int) -> float:
        boundaries = self.row.boundaries
        return self.pipeline.capacity_bytes[stage] - boundaries[first].behind_bytes - boundaries[last].before_bytes

    def _least(self, content: _Content, room: float, flying: int, microbatches: int, *, ends: bool) -> float:
        """Seconds of one stage at least. ends: with the end of the step."""
        whole, cut, rest, tied = content
        of, others = self._ending if ends else self._endless
        families = [replace(of[number], count=count) for number, count in enumerate(whole) if count]
        families += [of[family].alone(piece, count) for (family, piece), count in Counter(cut).items()]
        pieces = [others[piece] for piece in rest]
        pieces += [(_ending if ends else _endless)(self.row.tied[number].piece) for number in tied]
        if room <= 0:
            return math.inf
        self.programs += 1
        if not ends and not any(item.prices for item in families):
            counts = Counter(pieces)
            for item in families:
                counts[item.whole] += item.count
            several = (count for piece, count in counts.items() if len(piece.runs) > 1)
            if all(map(ways_of, counts)) and sum(several) <= _MOST_WHOLE:
                return self._whole.least_seconds(counts, flying, room)
        kinds = [(number, -1) for number, count in enumerate(whole) if count] + list(dict.fromkeys(cut))
        tight = [self._tight.setdefault(kind, set()) for kind in kinds]
        return least_step_seconds(families, pieces, Pipeline(microbatches, (flying,), (room,)), tight=tight)


def _ending(piece: Piece) -> Piece:
    def of(way: Way) -> Way:
        return replace(way, arriving_s=0.0)

    return _with(piece, of)


def _endless(piece: Piece) -> Piece:
    def of(way: Way) -> Way:
        return replace(way, end_s=0.0, sum_s=0.0, late_s=0.0, arriving_s=0.0, awaited_s=0.0)

    return _with(piece, of)


def _with(piece: Piece, of: Callable[[Way], Way]) -> Piece:
    """With other levels of its weights."""
    return replace(piece, weights=tuple(replace(own, levels=tuple(map(of, own.levels))) for own in piece.weights))
