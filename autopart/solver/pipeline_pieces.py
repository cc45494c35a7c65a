"""What :mod:`autopart.solver.pipeline_floor` bounds: pieces of a program, equal layers, and the pipeline."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields, replace

from autopart.solver.pipeline_orders import Order


@dataclass(frozen=True, slots=True)
class Way:
    """A way to hold or to run something: seconds more per microbatch, bytes for good and per microbatch in flight, and
    seconds at the end of the step. sum_s: of these what is summed once the last backward has made it; late_s: of that
    what is made when it is over. sent_s: seconds that replicas exchange something per microbatch, beside all else, but
    one message after another; of these gathered_s lie in the forward and again_s in the backward, the rest after it has
    begun. transient_bytes: beside all that, while it is used, beyond what a piece takes whatever its ways. arriving_s:
    of a step, exchanged like that when it begins; awaited_s: of that what the first forward waits for before it begins.
    """

    seconds: float = 0.0
    state_bytes: float = 0.0
    kept_bytes: float = 0.0
    end_s: float = 0.0
    sum_s: float = 0.0
    sent_s: float = 0.0
    gathered_s: float = 0.0
    again_s: float = 0.0
    transient_bytes: float = 0.0
    late_s: float = 0.0
    arriving_s: float = 0.0
    awaited_s: float = 0.0

    def times(self, count: float) -> Way:
        """Of so many, of which one is used at a time."""
        scaled = {name: getattr(self, name) * count for name in _SCALED}
        return replace(self, **scaled)


_SCALED = [entry.name for entry in fields(Way) if entry.name != "transient_bytes"]


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes on a rank, at least. levels: the ways to hold one byte. priced: whether a family's prices are for them."""

    bytes: float
    levels: tuple[Way, ...]
    priced: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """A way to run something as a whole: seconds more, bytes kept per microbatch in flight, and beside what is held
    while it runs.
    """

    seconds: float
    kept_bytes: float
    transient_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Piece:
    """Seconds forward and backward, weights, and the ways to run it, mixed: nothing computed again is the first.

    transient_bytes: beside what is held, while it runs, at least. wholes: if known, the ways of which it is run in one.
    """

    forward_s: float
    backward_s: float
    weights: tuple[Weights, ...] = ()
    runs: tuple[Way, ...] = (Way(),)
    transient_bytes: float = 0.0
    wholes: tuple[Run, ...] = ()

    def times(self, count: float) -> Piece:
        weights = tuple(replace(own, bytes=own.bytes * count) for own in self.weights)
        runs = tuple(way.times(count) for way in self.runs)
        return Piece(self.forward_s * count, self.backward_s * count, weights, runs, self.transient_bytes)

    @property
    def in_one(self) -> Piece:
        """Of which the ways are mixed in which it is run in one, where they are known."""
        if not self.wholes:
            return self
        runs = (
            Way(run.seconds, 0.0, run.kept_bytes, transient_bytes=run.transient_bytes - self.transient_bytes)
            for run in self.wholes
        )
        return replace(self, runs=tuple(runs))


@dataclass(frozen=True, slots=True)
class Price:
    """Strategies of a layer take no fewer ``seconds`` than these, each byte of weights and of what is kept counted as
    so many seconds, and each second of the forward as ``forward`` more.
    """

    weights: float
    kept: float
    seconds: float
    forward: float = 0.0


@dataclass(frozen=True, slots=True)
class Family:
    """``count`` equal layers. whole: one that lies in one stage. pieces: of one that is cut. prices: of strategies and
    the ways to run them. piece_prices: the same of each piece by itself, if known. parted: layers that one cut parts,
    at most.
    """

    count: int
    whole: Piece
    pieces: tuple[Piece, ...]
    prices: tuple[Price, ...] = ()
    piece_prices: tuple[tuple[Price, ...], ...] = ()
    parted: int = 1

    def alone(self, piece: int, count: int) -> Family:
        """So many of a piece, as if each was a layer."""
        prices = self.piece_prices[piece] if self.piece_prices else ()
        return Family(count, self.pieces[piece], (), prices)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """in_flight, capacity_bytes: by stage, w_k and C_k. work: seconds of a microbatch in all stages together, at least,
    nothing computed again or exchanged for parameters. there, back: by cut, of a transfer between neighbours; none: 0.
    order: None: of 1F1B or GPipe, with a stage on each rank. after_s: of one stage, seconds of a forward from the op on
    that is the last to read a parameter for the first time.
    """

    microbatches: int
    in_flight: tuple[int, ...]
    capacity_bytes: tuple[float, ...]
    work: float = 0.0
    there: tuple[float, ...] = ()
    back: tuple[float, ...] = ()
    order: Order | None = None
    after_s: float = 0.0

    @property
    def stages(self) -> int:
        return len(self.in_flight)

    def transfers(self, unit_s: float) -> tuple[list[float], list[float]]:
        """There and back, by cut."""
        none = (0.0,) * (self.stages - 1)
        found = [[seconds / unit_s for seconds in given or none] for given in (self.there, self.back)]
        if self.order is not None:  # stages of one rank exchange nothing
            apart = [one != two for one, two in itertools.pairwise(self.order.places)]
            found = [[seconds * away for seconds, away in zip(own, apart, strict=True)] for own in found]
        return found[0], found[1]
