"""Numbers for calls that draw random numbers, the same under every plan."""

from __future__ import annotations

from torch import fx

from autopart.passes import graph as graphs
from autopart.passes.blocks import is_random


def number_draws(graph: fx.Graph) -> None:
    """``meta["draw"]`` of every random op, in place: which of its module's random calls it is, in the whole graph."""
    seen: dict[str, int] = {}
    for node in graph.nodes:
        if graphs.is_op(node) and is_random(node):
            path = graphs.module_path(node)
            node.meta["draw"] = seen.get(path, 0)
            seen[path] = node.meta["draw"] + 1
