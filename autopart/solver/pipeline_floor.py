r"""Least seconds of a step, its end and the stages' memory included: a linear program.

Stage k of p runs a microbatch in F_k + B_k seconds, holds w_k of m microbatches in flight and has C_k bytes. E_k are
the seconds of its step's end, of which its last backward hides H_k <= B_k, and no more than the sums c_k in it. As
:mod:`autopart.solver.stages_floor` says, for every stage k and each of the bodies body_k there,

    T >= F_{<k} + body_k + E_k - H_k        T >= F_{<k} + B_{<k} + body_k + E_0 - H_0

under 1F1B and GPipe, where F_{<k} + F_k of the first forward is no less than a_k, what arrives when a step begins
(of one stage, and what is computed behind the last of that); for other orders :mod:`autopart.solver.pipeline_orders`
says the like.

What a stage has are pieces, of each the shares y_k over all stages add up to 1. With it come, at least:

- a piece's seconds, forward and backward, and its parameters: bytes of weights on a rank, at levels of ZeRO, each with
  seconds that it adds to a microbatch, bytes held, seconds of the step's end and of sums in it, and seconds x in which
  replicas exchange it for a microbatch, of which g lie in the forward and h in the backward. All of that passes one
  after another, and computing waits for it: F_k >= g_k, B_k >= h_k, F_k + B_k >= x_k, and T >= m x_k + c_k + a_k;
- the ways to run it, mixed as one likes: seconds more in the backward for bytes less that a microbatch keeps.

One stage of a family of n layers holds besides, while one of them runs, what this takes r_o under its way o and divided
weights q while they are whole; the largest of all pieces, so no less than the mean, of which Q are the weights' of all:

    r  >=  sum_o r_o y_o  +  Q / n

How fast strategies are depends on what they hold. Of a *family*, such as equal layers, it is known that whatever their
strategies are, their seconds t, bytes of weights v and bytes a that a microbatch keeps obey, for a few prices,

    t + mu v + nu a >= D(mu, nu)        t + f + mu v + nu a >= D'(mu, nu)

for each layer that lies in one stage, where t has what runs again and a what is kept then, and f are the seconds of the
forward, which hides no sums. A stage's layers obey them together. Each of p - 1 cuts parts a layer, or, where pieces
are in no row, a few of them: the pieces of these lie in any stages, and obey prices of t with nu = 0 over all stages.

Prices are used as far as an answer violates them. Of a family whose prices are unknown all is shared perfectly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autopart.solver.linear import LinearModel
from autopart.solver.pipeline_groups import Grouping, groups
from autopart.solver.pipeline_orders import RankChain, ordered_groups
from autopart.solver.pipeline_pieces import Family, Piece, Pipeline, Price, Way

_ROUNDING = 1e-6
_ROUNDS, _LEAST_ROUNDS, _STAGE_ROUNDS = 25, 4, 160
"""In which violated prices join: fewer where stages are many, so that stages times rounds are no more than the last."""
_MANY, _GAINED = 20, 1e-5
"""Of so many stages, or coarse groups, no further round is worth its time where one gained no more than that share."""
_COARSE_FIRST = 8
"""Stages from which coarse groups of them are asked first, where seconds of interest are known."""
_VIOLATED = 1e-4
"""Of a family's seconds: prices that an answer violates by less are left out."""


_Terms = dict[int, float]


def least_step_seconds(
    families: Sequence[Family],
    rest: Sequence[Piece],
    pipeline: Pipeline,
    below: float = math.inf,
    grouping: Grouping = Grouping.FINE,
    tight: Sequence[set[Price]] = (),
) -> float:
    """Seconds of a step at least; infinite where nothing fits. below: seconds from which more are of no interest.

    One stage has every piece, and beside all that it holds the largest transient. grouping: of stages, at the finest
    (:mod:`autopart.solver.pipeline_groups`); where coarse ones reach ``below``, that is all. tight: by family, prices
    to begin with, which alike programs needed; those that this one needs join them.
    """
    tight = tight or [set() for _ in families]
    if pipeline.stages == 1:
        families = [replace(item, whole=item.whole.in_one) for item in families]
        rest = [piece.in_one for piece in rest]
    coarse = 0.0
    if grouping is Grouping.FINE and pipeline.stages >= _COARSE_FIRST and below < math.inf:
        coarse = _Program(families, rest, pipeline, Grouping.COARSE).solve(below, tight)
        if coarse >= below:
            return coarse
    return max(coarse, _Program(families, rest, pipeline, grouping).solve(below, tight))


@dataclass(slots=True)
class _Stage:
    """What a stage's amounts are made of. extra: work that is computed again, or exchanges weights."""

    forward: _Terms = field(default_factory=dict)
    backward: _Terms = field(default_factory=dict)
    work: _Terms = field(default_factory=dict)
    extra: _Terms = field(default_factory=dict)
    memory: _Terms = field(default_factory=dict)
    end: _Terms = field(default_factory=dict)
    sums: _Terms = field(default_factory=dict)
    arriving: _Terms = field(default_factory=dict)  # when a step begins; and what the first forward waits for
    awaited: _Terms = field(default_factory=dict)
    sent: _Terms = field(default_factory=dict)  # of a step; of a microbatch all, in the forward, and again
    exchanged: tuple[_Terms, _Terms, _Terms] = field(default_factory=lambda: ({}, {}, {}))


@dataclass(slots=True)
class _Layers:
    """Variables of layers that obey prices together: seconds, those of the forward beyond the least, bytes of weights
    and kept ones, and how many they are. least_forward: seconds of a share.
    """

    seconds: list[int] = field(default_factory=list)
    forward: list[int] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    shares: list[int] = field(default_factory=list)
    count: float = 0.0  # layers of a share
    least_forward: float = 0.0
    prices: frozenset[Price] = frozenset()


class _Program:
    def __init__(
        self, families: Sequence[Family], rest: Sequence[Piece], pipeline: Pipeline, grouping: Grouping
    ) -> None:
        self.pipeline, self.model = pipeline, LinearModel()
        alone = [_seconds(item.whole) * item.count for item in families]
        self.unit_s = max(pipeline.work, math.fsum(alone), math.fsum(map(_seconds, rest))) or 1.0
        self.unit_bytes = max(*pipeline.capacity_bytes, 1.0)
        self.step = self.model.add_variable(1.0, upper=math.inf)
        self.largest: int | None = None  # transient of the only stage
        there, back = pipeline.transfers(self.unit_s)
        laid = pipeline.microbatches, pipeline.in_flight, pipeline.capacity_bytes, there, back
        self.chains: tuple[RankChain, ...] = ()
        if pipeline.order is None:
            self.groups = groups(*laid, grouping)
        else:
            self.groups, self.chains = ordered_groups(*laid, pipeline.order, grouping)
        self.stages = [_Stage() for _ in self.groups]
        if pipeline.stages == 1:
            self.largest = self._amount()
            self.stages[0].memory[self.largest] = 1.0
        self.hasty = grouping is Grouping.COARSE or len(self.groups) >= _MANY
        for piece in rest:
            self._add(piece, self._shares(piece))
        self.layers: list[tuple[Family, list[_Layers]]] = []
        for item in families:
            cut = min(item.count, item.parted * (pipeline.stages - 1))
            found = [*self._whole(item, item.count - cut), *self._cut(item, cut)]
            self.layers.append((item, found))
        self._time()

    def solve(self, below: float, tight: Sequence[set[Price]]) -> float:
        found, used = 0.0, set[tuple[int, Price]]()
        new = {
            (number, price)
            for number, (item, _) in enumerate(self.layers)
            for price in item.prices
            if price in tight[number] or (not price.kept and not price.forward)
        }
        for _ in range(max(_LEAST_ROUNDS, min(_ROUNDS, _STAGE_ROUNDS // len(self.stages)))):
            for number, price in new:
                for own in self.layers[number][1]:
                    self._charge(own, price)
            used |= new
            try:
                answer = self.model.relax(primal=len(self.stages) > 1, preprocess=False)
            except TimeoutError:
                break
            if answer is None:
                return math.inf
            idle = self.hasty and answer.objective <= found * (1 + _GAINED)
            found = max(found, answer.objective)
            new = self._violated(answer.values) - used
            if not new or idle or found * self.unit_s >= below:
                self._keep(answer.values, used, tight)
                break
        return found * self.unit_s * (1 - _ROUNDING)

    def _row(self, terms: _Terms, lower: float = -math.inf, upper: float = math.inf) -> None:
        self.model.add_row(list(terms), list(terms.values()), lower=lower, upper=upper)

    def _amount(self) -> int:
        return self.model.add_variable(upper=math.inf)

    # -- what stages have -----------------------------------------------------------------------------------------

    def _shares(self, piece: Piece) -> list[int]:
        """By stage the share of a piece, with its seconds."""
        shares = [self.model.add_variable() for _ in self.stages]
        self._row(dict.fromkeys(shares, 1.0), lower=1.0, upper=1.0)
        for stage, share in zip(self.stages, shares, strict=True):
            stage.forward[share] = piece.forward_s / self.unit_s
            stage.backward[share] = piece.backward_s / self.unit_s
        return shares

    def _add(self, piece: Piece, shares: Sequence[int], family: bool = False) -> list[list[int]]:
        """A piece that stages share as they like. family: whose work is counted elsewhere; its weights by stage."""
        found = []
        for number, share in enumerate(shares):
            if not family:
                self.stages[number].work[share] = _seconds(piece) / self.unit_s
            ways = [share] if len(piece.runs) == 1 else [self.model.add_variable() for _ in piece.runs]
            if len(ways) > 1:
                self._row({share: -1.0, **dict.fromkeys(ways, 1.0)}, lower=0.0, upper=0.0)
            for way, run in zip(ways, piece.runs, strict=True):
                self._run(number, way, run)
            found.append(self._weights(number, piece, [share], ways))
        return found

    def _run(self, number: int, variable: int, run: Way) -> None:
        stage = self.stages[number]
        stage.memory[variable] = self._bytes(number, run) / self.unit_bytes
        if run.seconds:
            stage.backward[variable] = stage.backward.get(variable, 0.0) + run.seconds / self.unit_s
            stage.extra[variable] = run.seconds / self.unit_s

    def _bytes(self, number: int, way: Way) -> float:
        return way.state_bytes + self.groups[number].in_flight * way.kept_bytes

    def _weights(
        self, number: int, piece: Piece, shares: Sequence[int], ways: Sequence[int], count: float = 1.0
    ) -> list[int]:
        """Variables for the bytes of the weights that are priced, by level.

        ways: to run the piece, by variable. count: of how many equal pieces this one is the sum.
        """
        stage, priced = self.stages[number], list[int]()
        transient = {at: run.transient_bytes / self.unit_bytes for at, run in zip(ways, piece.runs, strict=True)}
        per_byte = self.unit_bytes / self.unit_s
        for own in piece.weights:
            levels = [self._amount() for _ in own.levels]
            self._row({**dict.fromkeys(levels, 1.0), **dict.fromkeys(shares, -own.bytes / self.unit_bytes)}, lower=0.0)
            for level, way in zip(levels, own.levels, strict=True):
                stage.memory[level] = self._bytes(number, way)
                stage.extra[level] = way.seconds * per_byte
                stage.end[level], stage.sums[level] = way.end_s * per_byte, (way.sum_s - way.late_s) * per_byte
                stage.arriving[level], stage.awaited[level] = way.arriving_s * per_byte, way.awaited_s * per_byte
                once = way.sum_s + way.arriving_s
                stage.sent[level] = (self.pipeline.microbatches * way.sent_s + once) * per_byte
                for terms, seconds in zip(stage.exchanged, (way.sent_s, way.gathered_s, way.again_s), strict=True):
                    terms[level] = seconds * per_byte
                transient[level] = way.transient_bytes / count
            priced += levels if own.priced else []
        if self.largest is not None:
            self._row({self.largest: 1.0, **_minus(transient)}, lower=piece.transient_bytes / self.unit_bytes)
        return priced

    def _whole(self, family: Family, count: int) -> list[_Layers]:
        """Layers that lie in one stage each."""
        if not count:
            return []
        piece, found, prices = family.whole.times(count), [], frozenset(family.prices)
        for number, share in enumerate(self._shares(piece)):
            stage, ways = self.stages[number], [self.model.add_variable() for _ in piece.runs]
            self._row({share: -1.0, **dict.fromkeys(ways, 1.0)}, lower=0.0, upper=0.0)
            # seconds of strategies, beside those of what runs again
            once, again, kept = self._amount(), self._amount(), self._amount()
            weights = self._weights(number, piece, [share], ways, count)
            forward = self._amount()
            stage.forward[forward] = 1.0
            least_forward = piece.forward_s / self.unit_s
            found.append(_Layers([once, again], [forward], weights, [kept], [share], count, least_forward, prices))
            stage.work[once] = stage.extra[again] = 1.0
            self._row({once: 1.0, share: -_seconds(piece) / self.unit_s}, lower=0.0)
            runs = list(zip(ways, piece.runs, strict=True))
            self._row({again: 1.0, **{way: -run.seconds / self.unit_s for way, run in runs}}, lower=0.0)
            self._row({kept: 1.0, **{way: -run.kept_bytes / self.unit_bytes for way, run in runs}}, lower=0.0)
            stage.memory[kept] = float(self.groups[number].in_flight)
            for way, run in runs:
                stage.memory[way] = run.state_bytes / self.unit_bytes
                if run.seconds:
                    stage.backward[way] = run.seconds / self.unit_s
        return found

    def _cut(self, family: Family, count: int) -> list[_Layers]:
        """Layers whose pieces lie in any stages."""
        if not count:
            return []
        bare = frozenset(price for price in family.prices if not price.kept and not price.forward)
        mine, least = _Layers(count=count, prices=bare), [_Terms() for _ in self.stages]
        for piece in (piece.times(count) for piece in family.pieces):
            shares = self._shares(piece)
            for terms, share in zip(least, shares, strict=True):
                terms[share] = -_seconds(piece) / self.unit_s
            for weights in self._add(piece, shares, family=True):
                mine.weights += weights
        for stage, terms in zip(self.stages, least, strict=True):
            seconds = self._amount()
            stage.work[seconds] = 1.0
            self._row({seconds: 1.0, **terms}, lower=0.0)
            mine.seconds.append(seconds)
        mine.shares = [self.model.add_variable()]
        self._row({mine.shares[0]: 1.0}, lower=1.0)
        return [mine]

    # -- strategies -----------------------------------------------------------------------------------------------

    def _charge(self, layers: _Layers, price: Price) -> None:
        if price in layers.prices:
            self._row(self._charged(layers, price), lower=0.0)

    def _charged(self, layers: _Layers, price: Price) -> _Terms:
        """What is not below zero."""
        per_byte = self.unit_bytes / self.unit_s
        return {
            **dict.fromkeys(layers.seconds, 1.0),
            **dict.fromkeys(layers.forward, price.forward),
            **dict.fromkeys(layers.weights, price.weights * per_byte),
            **dict.fromkeys(layers.kept, price.kept * per_byte),
            **dict.fromkeys(
                layers.shares,
                price.forward * layers.least_forward - price.seconds * layers.count / self.unit_s,
            ),
        }

    def _violated(self, values: Sequence[float]) -> set[tuple[int, Price]]:
        """The prices that layers violate most."""
        found = set[tuple[int, Price]]()
        for number, (_, parts) in enumerate(self.layers):
            for layers in parts:
                seconds, forward, weights, kept, shares = (
                    math.fsum(values[at] for at in own)
                    for own in (layers.seconds, layers.forward, layers.weights, layers.kept, layers.shares)
                )
                if shares <= _VIOLATED:
                    continue
                weights, kept = (amount * self.unit_bytes / self.unit_s for amount in (weights, kept))
                forward += shares * layers.least_forward
                shares *= layers.count / self.unit_s
                least, worst = [_VIOLATED, _VIOLATED], list[Price | None]((None, None))
                for price in layers.prices:
                    short = shares * price.seconds - seconds - price.weights * weights - price.kept * kept
                    short -= price.forward * forward
                    kind = price.forward > 0
                    if short > least[kind]:
                        least[kind], worst[kind] = short, price
                found |= {(number, price) for price in worst if price is not None}
        return found

    def _keep(self, values: Sequence[float], used: set[tuple[int, Price]], tight: Sequence[set[Price]]) -> None:
        """Of the prices that were used those that some layers just obey."""
        for number, price in used:
            for layers in self.layers[number][1] if price not in tight[number] else ():
                if price in layers.prices:
                    beyond = sum(by * values[at] for at, by in self._charged(layers, price).items())
                    if beyond < _ROUNDING:
                        tight[number].add(price)

    # -- time -----------------------------------------------------------------------------------------------------

    def _time(self) -> None:
        """What stages take, what they hold, and the work of all."""
        forward, backward, end = ([self._amount() for _ in self.stages] for _ in range(3))
        for f, b, e, stage, group in zip(forward, backward, end, self.stages, self.groups, strict=True):
            self._row({f: 1.0, **_minus(stage.forward)}, lower=0.0)
            self._row({b: 1.0, **_minus(stage.backward)}, lower=0.0)
            self._row({f: 1.0, b: 1.0, **_minus(stage.work), **_minus(stage.extra)}, lower=0.0)
            self._row(stage.memory, upper=group.capacity_bytes / self.unit_bytes)
            if any(stage.sent.values()):
                self._row({self.step: float(group.stages), **_minus(stage.sent)}, lower=0.0)
            for passes, terms in zip(({f: 1.0, b: 1.0}, {f: 1.0}, {b: 1.0}), stage.exchanged, strict=True):
                if any(terms.values()):
                    self._row({**passes, **_minus(terms)}, lower=0.0)
            if not any(stage.end.values()):
                continue
            if self.pipeline.order is not None and self.pipeline.order.steady:
                self._row({e: 1.0, **_minus(stage.end)}, lower=0.0)
                continue
            self._row({e: 1.0, b: 1.0, **_minus(stage.end)}, lower=0.0)
            hidden = {at: by - stage.sums.get(at, 0.0) for at, by in stage.end.items()}
            self._row({e: 1.0, **_minus(hidden)}, lower=0.0)
        if self.chains:
            self._ordered(forward, backward, end)
        else:
            self._in_turn(forward, backward, end)
        work = {at: by for stage in self.stages for at, by in stage.work.items()}
        self._row(work, lower=self.pipeline.work / self.unit_s)

    def _ahead(self, seconds: Sequence[_Terms], transfers: Sequence[float]) -> list[int]:
        """By group, of one pass through all before it. seconds: of each. transfers: by cut."""
        found, first = [self._amount() for _ in seconds], 0
        for number in range(1, len(found)):
            cuts = slice(first, first + self.groups[number - 1].stages)  # behind the group before
            terms = {found[number]: 1.0, found[number - 1]: -1.0, **_minus(seconds[number - 1])}
            self._row(terms, lower=math.fsum(transfers[cuts]))
            first = cuts.stop
        return found

    def _starts(self, forward: Sequence[int], transfers: Sequence[float]) -> list[int]:
        """By group, of the first forwards through all before it, and until its own waits no more for what arrives."""
        found, after = self._ahead([{f: 1.0} for f in forward], transfers), self.pipeline.after_s / self.unit_s
        for start, f, stage, group in zip(found, forward, self.stages, self.groups, strict=True):
            if group.stages == 1 and any(stage.arriving.values()):
                self._row({start: 1.0, f: 1.0, **_minus(stage.arriving)}, lower=after)
                self._row({start: 1.0, **_minus(stage.awaited)}, lower=0.0)
        return found

    def _in_turn(self, forward: Sequence[int], backward: Sequence[int], end: Sequence[int]) -> None:
        """Chains of 1F1B and GPipe."""
        there, back = self.pipeline.transfers(self.unit_s)
        both = [one + two for one, two in zip(there, back, strict=True)]
        starts, ahead_b = self._starts(forward, there), self._ahead([{b: 1.0} for b in backward], back)
        behind, first = [self._amount() for _ in forward], 0
        for number, group in enumerate(self.groups):
            f, b, e = forward[number], backward[number], end[number]
            if number:
                after = {behind[number]: -1.0, f: -1.0, b: -1.0}
                inside = both[first - 1 : first + group.stages - 1]  # before each stage of this one
                self._row({behind[number - 1]: 1.0, **after}, lower=math.fsum(inside))
            for chain in group.own:
                own = {f: -chain.forward, b: -chain.backward, behind[number]: -chain.behind}
                self._row({self.step: 1.0, starts[number]: -1.0, e: -chain.end, **own}, lower=chain.sent)
            for chain in group.first if number else ():
                own = {f: -chain.forward, b: -chain.backward, behind[number]: -chain.behind}
                own |= {starts[number]: -1.0, ahead_b[number]: -1.0, end[0]: -1.0}
                self._row({self.step: 1.0, **own}, lower=chain.sent)
            first += group.stages

    def _ordered(self, forward: Sequence[int], backward: Sequence[int], end: Sequence[int]) -> None:
        """Chains of :mod:`autopart.solver.pipeline_orders`."""
        assert self.pipeline.order is not None
        there, back = self.pipeline.transfers(self.unit_s)
        inputs = [_Terms({b: 1.0}) for b in backward]  # the part of backwards that others wait for
        for terms, b in zip(inputs, backward, strict=True) if self.pipeline.order.splits else ():
            later = self._amount()
            terms[later] = -1.0
            self._row({later: 2.0, b: -1.0}, upper=0.0)
        starts, ahead_b = self._starts(forward, there), self._ahead(inputs, back)
        for chain in self.chains:
            first, *others = chain.groups
            if self.pipeline.order.steady:
                own = {at[group]: -chain.own for at in (forward, backward) for group in chain.groups}
                self._row({self.step: 1.0, **own, **{end[group]: -chain.end for group in chain.ends}}, lower=0.0)
                continue
            own = {self.step: 1.0, starts[first]: -1.0, forward[first]: -chain.first}
            own |= {forward[group]: -chain.own for group in others}
            alone = own | {backward[group]: -chain.own for group in chain.groups}
            self._row(alone | {end[group]: -chain.end for group in chain.ends}, lower=chain.there_s)
            if first:
                own |= {ahead_b[first]: -1.0, **{end[group]: -1.0 for group in self.chains[0].ends}}
                for group in chain.groups:
                    times = chain.first if group == first else chain.own
                    own |= {at: -by * times for at, by in inputs[group].items()}
                self._row(own, lower=chain.there_s + chain.back_s)


def _seconds(piece: Piece) -> float:
    return piece.forward_s + piece.backward_s


def _minus(terms: _Terms) -> _Terms:
    return {at: -by for at, by in terms.items()}
