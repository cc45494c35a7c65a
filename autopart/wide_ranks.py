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
from dataclasses import replace

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


def repeated(
    estimates: Estimates, configs: Iterable[Degrees], cluster: Cluster, best_seconds: float
) -> tuple[Degrees, ...]:
    """The one on two axes, nodes and the ranks of each, of which one node by itself promises to be faster by FASTER.

    Its ranks share what the other nodes repeat, however slow the network is: one axis over all ranks has no such plan.
    configs: on one axis.
    """
    count, nodes, most = cluster.nodes[0].count, len(cluster.nodes), (1 - FASTER) * best_seconds
    if count == 1 or nodes == 1 or any(node.count != count for node in cluster.nodes):
        return ()
    promised = {
        replace(config, axes=(nodes, count)): estimates.promised(replace(config, axes=(count,)))
        for config in configs
        if len(config.axes) == 1 and config.tp == nodes * count and estimates.candidates.lower_bound(config) < most
    }
    best = min(promised, key=lambda config: promised[config], default=None)
    return () if best is None or promised[best] >= most else (best,)
