"""Tensor ranks on more devices than a node has: which of these configurations are searched, after those within a node.

They are where the batch leaves too few samples for replicas and pipelines, where nothing else fits, or where a network
is about as fast as a node. A large cluster has many of them, and bounds that take a solver for each; what products with
weights exchange tells most apart. As in :mod:`autopart.axes_volume` a product moves its operand, its weight or its
result over the axis, whichever is least; here products that read one operand gather it once, so that a layer's sum is
about the least that it can be.

What is left out is not in a plan's bound.
"""

from __future__ import annotations

from collections.abc import Iterable

from autopart.cluster import Cluster
from autopart.estimates import Estimates
from autopart.given_limits import Limits
from autopart.solver.degrees import Degrees

FASTER = 0.05
"""Share of the best plan's seconds by which ranks on several nodes have to promise to be faster."""


def most_ranks(cluster: Cluster, limits: Limits) -> int | None:
    """Tensor ranks up to which configurations are searched first: those of a node; None: all."""
    return None if limits.tp or (limits.pp and limits.dp) else max(node.count for node in cluster.nodes)


def promising(estimates: Estimates, configs: Iterable[Degrees], best_seconds: float) -> tuple[Degrees, ...]:
    """Those that promise to take less than the best plan's seconds by the share FASTER."""
    most = (1 - FASTER) * best_seconds
    below = (config for config in configs if estimates.candidates.lower_bound(config) < most)
    return tuple(config for config in below if estimates.promised(config) < most)
