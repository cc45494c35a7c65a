r"""Least seconds of a step of a pipeline whose blocks lie in a row and cannot be cut: which stage has which of them.

:mod:`autopart.solver.pipeline_floor` divides layers as it likes. Here a stage is a run of blocks between two of the
row's boundaries. What it takes for a microbatch at least, within its memory and beside the largest transient of its
blocks, is the program of that module for one stage: pieces of layers that lie in it as a whole obey their prices, those
of cut layers theirs, if there are any. What their strategies take together beyond that is charged to the stages before,
or behind, once all of such a layer is there. Where there are no strategies to price, each layer of a stage of few is
run in one way (:mod:`autopart.solver.whole_runs`), not in a mix. Parameters that several blocks read are in every stage
that has one of these.

That no division takes less than T seconds is proved for a given T: of all arcs (stage, first, last boundary) those
are left out that :mod:`autopart.solver.stages_floor` says to take longer, with the least seconds of ways before and
behind them over the arcs left, and with what the first stage has to do at the end of a step. The least before and
behind a stage may be of different divisions: where the shortest way left takes T by itself, the arcs are parted in two
by where a stage ends, and each part is looked at by itself. Where no way through all stages is left, T is proved. T is
sought between what is known and what is of interest.

Stages that share parameters sum their gradients at the end of a step, besides all this, in s seconds. So every division
takes T if without that all of them take T - s, and those take T that have all readers in one stage.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopart.solver.pipeline_pieces import Family, Piece, Pipeline, Price
from autopart.solver.pipeline_row import Place, Row, Tied
from autopart.solver.pipeline_stage import StageFloors
from autopart.solver.stages_floor import NEIGHBOURS, body_seconds

_NEAR = 5e-4
"""How near to the best that it proves a bound is sought, in parts of what is of interest."""
_LEAST_GAIN = 0.1
"""Of the way to that: where not so much of it is proved, nothing more is sought."""
_MOST_PARTS = 20
"""Ways that are looked at by themselves in one proof."""
_MOST_TIED = 2
"""Of the parameters that several blocks read, those whose sums take the longest."""

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Effort:
    """Linear programs of one stage, of all proofs together, and arcs, beyond which no more is proved."""

    programs: int
    arcs: int


SHORT, LONG = Effort(400, 20_000), Effort(1_500, 200_000)
"""To rule out a configuration, and for the bound that is reported."""


@dataclass(slots=True)
class _Arcs:
    """Of one stage. first, last: boundaries. own: seconds of a microbatch, at least. ends: of the first stage, what as
    many microbatches as the stages' ``counts`` say and the end of its step take together beyond these, else 0.
    """

    first: NDArray[np.int64]
    last: NDArray[np.int64]
    own: Array
    ends: Array

    def left(self, which: NDArray[np.bool_]) -> _Arcs:
        return _Arcs(self.first[which], self.last[which], self.own[which], self.ends[which])


@dataclass(slots=True)
class Divisions:
    """All ways to divide a row of blocks into a pipeline's stages. Kept is what its stages are found to take."""

    families: Sequence[Family]
    rest: Sequence[Piece]
    row: Row
    pipeline: Pipeline
    forward: Array = field(init=False)  # seconds of the blocks before each boundary
    backward: Array = field(init=False)
    least: Array = field(init=False)  # and with what their parameters exchange at least
    missing: Array = field(init=False)  # of those with all of their layer before it, what strategies take besides
    begun: Array = field(init=False)  # the same of layers of which a part lies before it
    _stages: StageFloors = field(init=False)
    _transfers: dict[int, Array] = field(default_factory=dict)
    _crossings: dict[int, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        pieces = [self._piece(place) for place in self.row.places]
        at = [boundary.blocks for boundary in self.row.boundaries]
        self.forward, self.backward, self.least = (
            np.concatenate([[0.0], np.cumsum(seconds)])[at]
            for seconds in (
                [piece.forward_s for piece in pieces],
                [piece.backward_s for piece in pieces],
                [
                    _least(piece) + (self._more(place) if place.family >= 0 else 0.0)
                    for place, piece in zip(self.row.places, pieces, strict=True)
                ],
            )
        )
        ended, begun = np.zeros(len(pieces) + 1), np.zeros(len(pieces) + 1)
        layers: dict[tuple[int, int], list[int]] = {}
        for number, place in enumerate(self.row.places):
            if place.family >= 0:
                layers.setdefault((place.family, place.layer), []).append(number)
        for (family, _), blocks in layers.items():
            family_, cut = self.families[family], math.fsum(self._more(self.row.places[block]) for block in blocks)
            more = max(0.0, _missing(family_.whole, family_.prices) - cut)
            ended[blocks[-1] + 1] += more
            begun[blocks[0] + 1] += more
        self.missing, self.begun = np.cumsum(ended)[at], np.cumsum(begun)[at]
        self._stages = StageFloors(self.families, self.rest, self.row, self.pipeline)

    def least_seconds(self, known: float, below: float, effort: Effort = SHORT) -> float:
        """Of a step, at least. known: that it takes at least. below: seconds from which more are of no interest."""
        if self.pipeline.stages == 1 or not math.isfinite(below) or below <= known:
            return known
        low, high = known, below
        if self.take(high, effort):
            return high
        if not self.take(low + _LEAST_GAIN * (high - low), effort):
            return low
        while high - low > _NEAR * below:
            middle = (low + high) / 2
            if self.take(middle, effort):
                low = middle
            else:
                high = middle
        return low

    def take(self, seconds: float, effort: Effort = SHORT) -> bool:
        """Whether every division takes so many seconds, as far as this proves it."""
        tied = sorted((own for own in self.row.tied if own.seconds), key=lambda own: -own.seconds)
        return self._take(seconds, effort, tied[:_MOST_TIED], ())

    def _take(self, seconds: float, effort: Effort, tied: Sequence[Tied], held: Sequence[tuple[int, Tied]]) -> bool:
        """The same of divisions in which stages have all readers of what they are said to hold."""
        if not tied:
            return self._proved(seconds, effort, held)
        own, *rest = tied
        if not self._take(seconds - own.seconds, effort, rest, held):
            return False
        first, last = self._around(own)
        if self.pipeline.microbatches * float(self.least[last] - self.least[first]) >= seconds:
            return True
        return all(self._take(seconds, effort, rest, (*held, (stage, own))) for stage in range(self.pipeline.stages))

    def _around(self, tied: Tied) -> tuple[int, int]:
        """The nearest boundaries that have all readers between them."""
        at = [boundary.blocks for boundary in self.row.boundaries]
        return bisect_right(at, tied.blocks[0]) - 1, bisect_right(at, tied.blocks[-1])

    def _proved(self, seconds: float, effort: Effort, held: Sequence[tuple[int, Tied]]) -> bool:
        """The same, whatever the stages' sums of what they share take."""
        arcs = self._arcs(seconds, effort.arcs)
        if arcs is None:
            return False
        for stage, tied in held:
            first, last = self._around(tied)
            arcs[stage] = arcs[stage].left((arcs[stage].first <= first) & (arcs[stage].last >= last))
        parts, seen = [arcs], 0
        while parts:
            arcs, way = self._shorter(parts.pop(), seconds)
            if way is None:
                continue
            if self._stages.programs > effort.programs or seen > _MOST_PARTS:
                return False
            # programs only for what may be part of a division that takes less
            before = self._stages.programs
            for stage, (first, last) in enumerate(way):
                self._stages.price(stage, first, last)
            self._raise(arcs, seconds)
            alone = [own.left((own.first == arc[0]) & (own.last == arc[1])) for own, arc in zip(arcs, way, strict=True)]
            if self._shorter(alone, seconds)[1] is not None:
                return False
            if self._stages.programs > before:
                parts.append(arcs)
            else:
                seen += 1
                parts += _parted(arcs, way)
        return True

    def _shorter(self, arcs: list[_Arcs], seconds: float) -> tuple[list[_Arcs], list[tuple[int, int]] | None]:
        """The arcs that may be part of a division that takes less, and of these the way of the least seconds."""
        while True:
            before, behind = self._through(arcs)
            if not math.isfinite(before[-1][-1]):
                return arcs, None
            ways = self._ways(arcs)
            found = [
                own.left(before[stage][own.first] + self._body(stage, own, behind[stage + 1], ways[stage]) < seconds)
                for stage, own in enumerate(arcs)
            ]
            if sum(len(own.own) for own in found) == sum(len(own.own) for own in arcs):
                break
            arcs = found
        way, at = list[tuple[int, int]](), 0
        for stage, own in enumerate(arcs):
            here = np.flatnonzero(own.first == at)
            left = self._taken(stage, own)[here] + behind[stage + 1][own.last[here]]
            at = int(own.last[here[int(np.argmin(left))]])
            way.append((int(own.first[here[0]]), at))
        return arcs, way

    def _raise(self, arcs: list[_Arcs], seconds: float) -> None:
        """To what programs found, in place."""
        total = self.least[-1] + self.missing[-1]
        for stage, own in enumerate(arcs):
            own.own[:] = np.maximum(own.own, self._stages.known(stage, own.first, own.last))
        for number, last in enumerate(arcs[0].last.tolist()):
            behind = float(total - self.least[last] - self.begun[last])
            arcs[0].ends[number] = self._stages.ends(last, float(arcs[0].own[number]), behind, seconds)

    def _arcs(self, seconds: float, most: int) -> list[_Arcs] | None:
        """All that may be part of a division that takes less, as far as blocks alone say it; None: too many.

        most: arcs.
        """
        count, m, last = self.pipeline.stages, self.pipeline.microbatches, len(self.row.boundaries) - 1
        total = self.least + self.missing
        cheapest = min((item.there + item.back for item in self.row.boundaries[1:-1]), default=math.inf)
        found, reached = [], np.array([0])
        share = seconds / m
        for stage in range(count):
            stops = np.arange(1, last + 1) if stage < count - 1 else np.array([last])
            first, stop = (item.ravel() for item in np.meshgrid(reached, stops, indexing="ij"))
            kept = stop > first
            first, stop = first[kept], stop[kept]
            kept = (self.least[stop] - self.least[first] <= share) & (
                self.least[-1] - self.least[stop] <= share * (count - 1 - stage)
            )
            first, stop = first[kept], stop[kept]
            own = self.least[stop] - self.least[first] + self._inside(first, stop)
            arcs = _Arcs(first, stop, own, np.zeros((len(own), len(self._stages.counts))))
            behind = total[-1] - self.least[:] - self.begun + cheapest * max(0, count - 2 - stage)
            behind = np.where(np.arange(last + 1) == last, 0.0, behind)
            before = total[first] + cheapest * stage
            arcs = arcs.left(before + self._body(stage, arcs, behind) < seconds)
            found.append(arcs)
            reached = np.unique(arcs.last)
            if sum(len(item.own) for item in found) > most:
                return None
        self._raise(found, seconds)
        return found

    def _inside(self, first: NDArray[np.int64], last: NDArray[np.int64]) -> Array:
        """What strategies of the layers that begin and end between two boundaries take besides."""
        return np.maximum(0.0, self.missing[last] - self.begun[first])

    def _taken(self, stage: int, arcs: _Arcs) -> Array:
        """Seconds of a stage and of the cut behind it, and what strategies take besides of layers begun in it."""
        opened = self.begun[arcs.last] - self.begun[arcs.first] - self._inside(arcs.first, arcs.last)
        return arcs.own + opened + self._crossing(stage)[arcs.last]

    def _crossing(self, stage: int) -> Array:
        """Seconds of a microbatch at each boundary, of the cut behind a stage."""
        if stage not in self._crossings:
            self._crossings[stage] = self._sent(stage).sum(axis=1)
            self._crossings[stage][-1] = 0.0
        return self._crossings[stage]

    def _sent(self, stage: int) -> Array:
        """[boundary, there or back]"""
        if stage not in self._transfers:
            self._transfers[stage] = np.array(self.row.sent(stage))
        return self._transfers[stage]

    def _through(self, arcs: Sequence[_Arcs]) -> tuple[list[Array], list[Array]]:
        """By stage and boundary the least seconds of a microbatch in the stages before, and in those from it on.

        With transfers, those of the cut before a stage among the first, and there with the first stage's end.
        """
        size = len(self.row.boundaries)
        before, behind = [np.full(size, math.inf)], [np.full(size, math.inf)]
        before[0][0] = behind[0][-1] = 0.0
        for stage, own in enumerate(arcs):
            more, crossing = np.full(size, math.inf), self._crossing(stage)
            closed = self.missing[own.last] - self.missing[own.first] - self._inside(own.first, own.last)
            seconds = own.own + closed + crossing[own.last] + own.ends[:, 0]
            np.minimum.at(more, own.last, before[-1][own.first] + seconds)
            before.append(more)
        for stage in reversed(range(len(arcs))):
            own, more = arcs[stage], np.full(size, math.inf)
            np.minimum.at(more, own.first, behind[-1][own.last] + self._taken(stage, own))
            behind.append(more)
        return before, behind[::-1]

    def _ways(self, arcs: Sequence[_Arcs]) -> list[list[tuple[int, Array]]]:
        """By stage, of its arcs, the least seconds of the stages behind that they wait for."""
        flying, size = self.pipeline.in_flight, len(self.row.boundaries)
        found, least = list[list[tuple[int, Array]]](), list[Array]()  # from a boundary through so many stages
        for stage in reversed(range(len(arcs))):
            own, crossed = arcs[stage], self._crossing(stage)
            further = (flying[stage] - held + 1 for held in flying[stage + 1 :])
            found.append(
                [
                    (later, (crossed + through)[own.last])
                    for later, through in zip(further, least, strict=False)
                    if later >= 1
                ]
            )
            more = []
            for through in (None, *least[: NEIGHBOURS - 1]):
                here = np.full(size, math.inf)
                np.minimum.at(here, own.first, own.own if through is None else own.own + (crossed + through)[own.last])
                more.append(here)
            least = more
        return found[::-1]

    def _body(self, stage: int, arcs: _Arcs, behind: Array, ways: Sequence[tuple[int, Array]] = ()) -> Array:
        """Seconds of a stage from its first forward to its last backward, of the first one to the end of its step.

        behind: without the cut behind the stage.
        """
        flying, m = self.pipeline.in_flight, self.pipeline.microbatches
        there, back = self._sent(stage)[arcs.last].T
        if stage == self.pipeline.stages - 1:
            there = back = np.zeros(len(arcs.last))
        drained, after = flying[-1] >= m, behind[arcs.last] + there + back
        found = body_seconds(
            *(m, flying[stage], drained, arcs.own),
            *(self.forward[arcs.last] - self.forward[arcs.first], self.backward[arcs.last] - self.backward[arcs.first]),
            *(after, np.maximum(there, back)),
            ways,
        )
        if not stage:  # whatever it waits for, at least one microbatch comes with its end; in two cases more do
            one, some, all_ = arcs.ends.T
            found = np.maximum(found + one, m * arcs.own + all_ + (after if drained else 0.0))
            if flying[0] < m:
                found = np.maximum(found, self._stages.counts[1] * arcs.own + some + 2 * after)
        return found

    def _more(self, place: Place) -> float:
        """What strategies of a piece of a layer take besides its seconds."""
        family = self.families[place.family]
        return _missing(family.pieces[place.piece], family.piece_prices[place.piece]) if family.piece_prices else 0.0

    def _piece(self, place: Place) -> Piece:
        return self.rest[place.piece] if place.family < 0 else self.families[place.family].pieces[place.piece]


def _parted(arcs: Sequence[_Arcs], way: Sequence[tuple[int, int]]) -> list[list[_Arcs]]:
    """The divisions that arcs allow in two parts, by where the stage ends that has the most boundaries to end at; none
    where there is no other than this one.
    """
    ends = [np.unique(own.last) for own in arcs]
    stage = max(range(len(arcs)), key=lambda number: len(ends[number]))
    if len(ends[stage]) < 2:
        return []
    before = arcs[stage].last <= min(way[stage][1], int(ends[stage][-2]))
    return [
        [own.left(which) if number == stage else own for number, own in enumerate(arcs)] for which in (~before, before)
    ]


def _least(piece: Piece) -> float:
    """Seconds of a microbatch, whatever a stage's memory."""
    exchanged = (own.bytes * min(level.seconds for level in own.levels) for own in piece.weights)
    return _computed(piece) + math.fsum(exchanged)


def _computed(piece: Piece) -> float:
    """With what always runs again."""
    return piece.forward_s + piece.backward_s + min(way.seconds for way in piece.runs)


def _missing(piece: Piece, prices: Sequence[Price]) -> float:
    """What strategies take besides the seconds of a layer or a piece."""
    bare = (price.seconds for price in prices if not price.weights and not price.kept and not price.forward)
    return max(0.0, max(bare, default=0.0) - _computed(piece))
