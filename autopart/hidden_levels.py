"""Levels of ZeRO whose exchange is hidden: in every microbatch it passes beside ops, so that memory costs little.

All parameters that can be are at level 1 at least, whose exchange is at the step's end. With F and B the seconds of a
microbatch's forward and backward, g_p and s_p those in which parameter p's replicas gather it and sum its gradient,

    level 2 of parameters P:   sum over P of s_p  <=  B
    level 3 of parameters Q:   sum over Q of g_p  <=  F,   sum over P + Q of s_p + sum over Q of g_p  <=  B

Equal parameters have equal levels. Classes of them are taken in the order of the bytes that they free for the seconds,
level 2 first, as long as they pass; what frees next to nothing is left, as a message takes a while by itself. Left is
too what frees bytes for more seconds of a microbatch than these are worth: a byte has the least price at which what all
parameters hold and all layers keep fits (:func:`least_price`), where these are as it asks for.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

from torch import fx

from autopart.solver.tensor_hull import corners

_LEAST = 0.01
"""Of all bytes that a level could free: a class that frees less is left."""
Exchange = Callable[[fx.Node, int], tuple[float, float]]
"""Seconds in which replicas exchange a parameter at a level in a microbatch's forward and backward."""
Held = Callable[[Sequence[fx.Node], int], tuple[float, float]]
"""Seconds of a microbatch and bytes that a class of parameters takes at a level, exchange aside."""


def hidden_levels(
    classes: Sequence[Sequence[fx.Node]],
    exchange: Exchange,
    held: Held,
    forward_s: float,
    backward_s: float,
    price: float = math.inf,
) -> dict[str, int]:
    """By parameter, from 1 on.

    classes: of equal parameters that may be at all levels. forward_s, backward_s: of a microbatch's ops, in seconds,
    that hide an exchange. price: of a byte, in seconds.
    """
    levels = {node.meta["name"]: 1 for nodes in classes for node in nodes}
    left = [forward_s, backward_s]
    for level in (2, 3):
        found = []
        for nodes in classes:
            own, before = (
                [sum(seconds) for seconds in zip(*(exchange(node, at) for node in nodes), strict=True)]
                for at in (level, level - 1)
            )
            more = [there - known for there, known in zip(own, before, strict=True)]
            (seconds, size), (known, larger) = held(nodes, level), held(nodes, level - 1)
            found.append((larger - size, seconds - known, more, nodes))
        least = _LEAST * sum(freed for freed, *_ in found)
        for freed, seconds, more, nodes in sorted(found, key=lambda item: -item[0] / (sum(item[2]) or 1.0)):
            passes = all(sent <= room for sent, room in zip(more, left, strict=True))
            if levels[nodes[0].meta["name"]] == level - 1 and freed >= least and passes and seconds <= price * freed:
                left = [room - sent for sent, room in zip(more, left, strict=True)]
                levels.update({node.meta["name"]: level for node in nodes})
    return levels


def least_price(ways: Sequence[Sequence[tuple[float, float]]], room: float) -> float:
    """Of a byte, in seconds, at which the best way of each of some things leaves all of them within the room; infinite
    where none does. ways: seconds and bytes.
    """
    hulls = [corners(own, lambda way: way) for own in ways]
    held, price = math.fsum(hull[0][1] for hull in hulls), 0.0
    steps = [
        ((slower[0] - faster[0]) / (faster[1] - slower[1]), faster[1] - slower[1])
        for hull in hulls
        for faster, slower in itertools.pairwise(hull)
    ]
    for cost, freed in sorted(steps):
        if held <= room:
            return price
        held, price = held - freed, cost
    return price if held <= room else math.inf
