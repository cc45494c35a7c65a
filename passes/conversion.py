"""From one tuple of placements to another: which transitions, on which axes, in which order.

A transition acts on one mesh axis while the others stay as they are, and the order matters: sharding on one axis
before gathering on another moves less than after, and on the way the cuts of each dim have to nest. The sharder
inserts, and pricing and counting charge, the steps that this one function gives.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from dataclasses import dataclass

from autopart.runtime.placement import REPLICATE, Placement, Placements, local_cut, nested
from autopart.runtime.transitions import Transition, exists, transition

Axes = tuple[tuple[str, int], ...]
"""Names and sizes of the tensor axes, outermost first."""
STEP_NUMBERS = 8


@dataclass(frozen=True, slots=True)
class Step:
    """One transition of a conversion.

    axis: the index of the mesh axis. before, after: placements on all axes, which differ on this axis alone.
    transition: the call, with blocks as a rank that has the other axes' shares counts them.
    """

    axis: int
    before: Placements
    transition: Transition
    after: Placements


@functools.cache
def conversion(source: Placements, target: Placements, axes: Axes) -> tuple[Step, ...] | None:
    """The steps that move the fewest bytes, forward and backward together; None where either end does not nest, or
    where routed rows would have to be converted.

    Each axis goes straight to its target, or first to R where the cuts on the way would not nest otherwise: a shortest
    path over at most 3 placements per axis. Of equal paths the one with the least :func:`step_number` at each step.
    """
    sizes = tuple(parts for _, parts in axes)
    if not nested(source, sizes) or not nested(target, sizes):
        return None
    # On an axis of one rank all placements are the same.
    source = tuple(have if parts > 1 else want for have, want, parts in zip(source, target, sizes, strict=True))
    if not all(itertools.starmap(exists, zip(source, target, strict=True))):
        return None
    queue: list[tuple[int, int, Placements, tuple[Step, ...]]] = [(0, 0, source, ())]
    done: set[Placements] = set()
    while queue:
        moved, path, current, steps = heapq.heappop(queue)
        if current == target:
            return steps
        if current in done:
            continue
        done.add(current)
        for index, (have, want) in enumerate(zip(current, target, strict=True)):
            for placement in dict.fromkeys((want, REPLICATE)):
                if not exists(have, placement):
                    continue
                after = (*current[:index], placement, *current[index + 1 :])
                if placement == have or have == want or after in done:
                    continue
                before_cut, after_cut = _local_cut(current, sizes, index), _local_cut(after, sizes, index)
                if after_cut is None:
                    continue
                assert before_cut is not None
                call = transition(before_cut, after_cut)
                assert call is not None
                step = Step(index, current, call, after)
                cost = moved + _moved(call, current, sizes, index)
                heapq.heappush(
                    queue, (cost, path * STEP_NUMBERS + step_number(index, placement == want), after, (*steps, step))
                )
    raise AssertionError(f"no way from {source} to {target} on axes of {sizes}")


@functools.cache
def _local_cut(placements: Placements, sizes: tuple[int, ...], index: int) -> Placement | None:
    """The axis' cut of what the coarser ones leave; None where the placements do not nest."""
    return local_cut(placements, sizes, index) if nested(placements, sizes) else None


def step_number(axis: int, arrives: bool) -> int:
    """Numbers the steps that may come next, to order paths that move equally much, as digits of base STEP_NUMBERS:
    fewer steps first, then the first axes first, then straight to the target (``arrives``) before R.
    """
    return 2 * axis + (1 if arrives else 2)


def _moved(call: Transition, current: Placements, sizes: tuple[int, ...], axis: int) -> int:
    """What a rank sends forward and backward, in the units of :func:`moved`."""
    held = moved(call, sizes, axis)
    for index, placement in enumerate(current):
        if index != axis and placement.divides:
            held //= sizes[index]
    return held


def moved(call: Transition, sizes: tuple[int, ...], axis: int) -> int:
    """What a rank sends forward and backward where no other axis cuts, in units of which the whole tensor has the
    sizes' product cubed, so that whatever the others cut divides. By rings: each part once, in a sum twice.
    """
    parts = sizes[axis]
    once = math.prod(sizes) ** 3 // parts * (parts - 1)
    sent = {None: 0, "all_reduce": 2 * once, "all_to_all": once // parts}
    return sent.get(call.forward, once) + sent.get(call.backward, once)
