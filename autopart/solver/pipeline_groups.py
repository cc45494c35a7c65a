r"""Neighbouring stages in one: what :mod:`autopart.solver.pipeline_floor` asks of stages, of sums over groups of them.

Most of what a stage obeys is linear and the same for all stages, so that sums over a group obey it: shares, ways,
weights, prices, and ends of the step. Of memory sums obey it with the fewest microbatches in flight and the bytes of
all. Of time, with c_k F_k + d_k B_k + l_k L_k a body of stage k, L_k being the work behind it, sums obey any mean of

    T >= F_{<k} + body_k + E_k - H_k        T >= F_{<k} + B_{<k} + body_k + E_0 - H_0

over the group, with each F_k, B_k and E_k - H_k counted as often as the least of them is. By weights v of the mean with

    v_{k+1} (c_{k+1} - 1) = v_k (c_k - l_k)

all count equally often in the second, so that nothing is lost there.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass


class Grouping(enum.Enum):
    """Which neighbouring stages are taken together: none; those with nearly as many microbatches in flight; or those
    with a quarter as many too, which takes down to a tenth of the time to solve, and loses more where memory is tight.
    """

    EACH = enum.auto()
    FINE = enum.auto()
    COARSE = enum.auto()


ALIKE = {Grouping.FINE: 8.0, Grouping.COARSE: 1.3}
"""Microbatches in flight in a group differ by less than that part of them: with as many, a stage is by itself."""
_LONGEST = {Grouping.FINE: 5, Grouping.COARSE: 1}
"""Stages by themselves, of those with microbatches in flight between two powers of two, as their rounds take long."""


@dataclass(frozen=True, slots=True)
class Chain:
    """How often the forwards, the backwards and the ends of a group's stages count, and what is behind them; seconds of
    transfers.
    """

    forward: float
    backward: float
    behind: float
    end: float
    sent: float


@dataclass(frozen=True, slots=True)
class Group:
    """``stages`` neighbours. in_flight: the fewest of them; capacity_bytes: of all. own: chains that end with a stage
    of the group, first: that end with the first stage of all.
    """

    stages: int
    in_flight: int
    capacity_bytes: float
    own: tuple[Chain, ...]
    first: tuple[Chain, ...]


def groups(
    microbatches: int,
    in_flight: Sequence[int],
    capacity_bytes: Sequence[float],
    there: Sequence[float],
    back: Sequence[float],
    grouping: Grouping = Grouping.FINE,
) -> tuple[Group, ...]:
    """The stages of a pipeline in order. there, back: by cut, seconds of a transfer.

    The first and the last stage are by themselves.
    """
    count = len(in_flight)
    bodies = [_bodies(microbatches, in_flight, number) for number in range(count)]
    if grouping is Grouping.EACH:
        alone = set(range(count))
    else:
        alone = {0, count - 1, *_longest(microbatches, in_flight, _LONGEST[grouping])}
    found: list[list[int]] = []
    for number, flying in enumerate(in_flight):
        first = found[-1][0] if found else 0
        apart = first in alone or number in alone or len(bodies[first]) != len(bodies[number])
        if apart or abs(in_flight[first] - flying) >= in_flight[first] / ALIKE[grouping]:
            found.append([number])
        else:
            found[-1].append(number)
    result = []
    for own in found:
        kinds = list(zip(*(bodies[number] for number in own), strict=True))
        result.append(
            Group(
                len(own),
                min(in_flight[number] for number in own),
                math.fsum(capacity_bytes[number] for number in own),
                *(
                    tuple(_chain(kind, there[own[0] :], back[own[0] :], whole) for kind in kinds)
                    for whole in (False, True)
                ),
            )
        )
    return tuple(result)


@dataclass(frozen=True, slots=True)
class _Body:
    """How often a stage's forward, its backward, and the work behind it count. sent: transfers, of the slower kind."""

    forward: float
    backward: float
    behind: float
    sent: int = 0


def _bodies(microbatches: int, in_flight: Sequence[int], number: int) -> list[_Body]:
    """Of one stage; those of others are alike, where they are as many."""
    m, flying = float(microbatches), in_flight[number]
    found = [_Body(m, m, 1.0 if in_flight[-1] >= microbatches else 0.0)]
    if flying < microbatches:
        found.append(_Body(1 + m - flying, 1 + m - flying, 2.0))
    rounds, others = _rounds(microbatches, flying)
    found.append(_Body(rounds + others, rounds, rounds))
    found.append(_Body(rounds, rounds + others, rounds))
    if number + 1 < len(in_flight):  # transfers of one cut follow each other
        found.append(_Body(1.0, 1.0, 1.0, microbatches - 1))
    return found


def _rounds(microbatches: int, flying: int) -> tuple[int, int]:
    """In which a stage runs its microbatches, no more than are in flight in one; and the others of the last."""
    held = min(max(flying, 1), microbatches)
    rounds = -(-microbatches // held)
    return rounds, microbatches - 1 - (rounds - 1) * held


def _longest(microbatches: int, in_flight: Sequence[int], most: int) -> set[int]:
    """Stages whose round trips take the longest, as the last round is as full as the others: ``most`` of a kind."""
    found: dict[int, list[tuple[int, int]]] = {}
    for number, flying in enumerate(in_flight):
        if ALIKE[Grouping.FINE] < flying < microbatches:
            found.setdefault(flying.bit_length(), []).append((_rounds(microbatches, flying)[1] - flying, number))
    return {number for own in found.values() for _, number in sorted(own)[:most]}


def _chain(bodies: Sequence[_Body], there: Sequence[float], back: Sequence[float], whole: bool) -> Chain:
    """The mean of a body over a group's stages. there, back: behind each of these. whole: with the backwards of the
    stages ahead of each.
    """
    weights = _weights(bodies)
    forward, backward, before, after = [], [], 0.0, 1.0  # of what is behind the stages before, ahead of those after
    sent = 0.0
    for place, (weight, body) in enumerate(zip(weights, bodies, strict=True)):
        after -= weight
        forward.append(before + weight * body.forward + after)
        backward.append(before + weight * body.backward + (after if whole else 0.0))
        before += weight * body.behind
        inside = len(bodies) - 1
        sent += weight * body.behind * (math.fsum(there[place:inside]) + math.fsum(back[place:inside]))
        sent += weight * (math.fsum(there[:place]) + (math.fsum(back[:place]) if whole else 0.0))
        sent += weight * body.sent * max((*there[place : place + 1], *back[place : place + 1]), default=0.0)
    return Chain(min(forward), min(backward), before, min(weights), sent)


def _weights(bodies: Sequence[_Body]) -> list[float]:
    found = [1.0]
    for one, two in itertools.pairwise(bodies):
        factor, next_factor = (one.forward + one.backward) / 2 - one.behind, (two.forward + two.backward) / 2 - 1
        found.append(found[-1] * (factor / next_factor if factor > 0 and next_factor > 0 else 1.0))
    total = math.fsum(found)
    return [weight / total for weight in found]
