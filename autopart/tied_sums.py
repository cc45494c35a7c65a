"""Seconds of adding up the gradients of a parameter that several stages read, over these.

Of S stages with c copies each (:mod:`autopart.runtime.ties`) a rank sums a share with its peers, and all gather::

    seconds = 2 (S-1)/S (size / c) / W + (c-1)/c size / V

W is the payload rate of the link to the peers, of which c share it, V that of the stage's ranks among each other.
"""

from __future__ import annotations

from autopart.cost.communication import all_gather_seconds, bucketed_all_reduce_seconds
from autopart.cost.devices import Link


def tied_seconds(size: float, stages: int, between: Link, copies: int, among: Link) -> float:
    """size: bytes that one rank has of the gradient. between: the link to the peers in the other stages. among: of the
    ranks with copies; of one copy there are none.
    """
    return bucketed_all_reduce_seconds(size / copies, stages, between) + gathered_seconds(size, copies, among)


def gathered_seconds(size: float, copies: int, among: Link) -> float:
    """Of gathering shares alone, without a call's latency."""
    return all_gather_seconds(size, copies, among) - all_gather_seconds(0, copies, among)
