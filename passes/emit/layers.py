"""Which ops of a stage become a class of their own: runs of ops that were written in one repeated module.

A module path such as ``transformer.h.3.mlp.c_fc`` holds a number where a ModuleList or Sequential repeats; the path up
to that number is the op's *layer*. Consecutive ops of one layer make a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import fx

from autopart.passes import graph as graphs

MOST_INLINE = 2
"""Statements of a layer, or of what a stage has of it, that are written in place, and never run again by themselves."""


@dataclass(slots=True)
class Run:
    """Consecutive ops of one layer; ``path`` is '' for ops outside of any repeated module."""

    path: str
    nodes: list[fx.Node] = field(default_factory=list)


def prefixes(path: str) -> list[str]:
    """The prefixes of a module path that end in a number, shortest first."""
    parts = path.split(".")
    return [".".join(parts[: index + 1]) for index, part in enumerate(parts) if part.isdigit()]


def mark_layers(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    """Notes the layer of every op of a program, as ``meta["layer"]``, so that all its stages have the same layers.

    nodes: the ops by which it is told which modules repeat.
    """
    depth = _depths(nodes)
    for node in graph.nodes:
        if node.op == "call_function":
            node.meta["layer"] = _layer(graphs.module_path(node), depth)


def find_runs(nodes: Sequence[fx.Node]) -> list[Run]:
    """The ops of a stage in order, grouped. A layer that is entered a second time is not grouped then."""
    depth = _depths([node for node in nodes if "layer" not in node.meta])
    runs: list[Run] = []
    seen: set[str] = set()
    for node in nodes:
        path = node.meta["layer"] if "layer" in node.meta else _layer(graphs.module_path(node), depth)
        if graphs.is_getitem(node):
            path = runs[-1].path if runs else ""
        if runs and runs[-1].path == path:
            runs[-1].nodes.append(node)
            continue
        if path in seen:
            path = ""
        if runs and runs[-1].path == path == "":
            runs[-1].nodes.append(node)
            continue
        if path:
            seen.add(path)
        runs.append(Run(path, [node]))
    return runs


def runs_of(graph: fx.Graph) -> list[tuple[Run, bool]]:
    """The runs of a stage's graph, and whether each is written as a layer of its own."""
    statements = [node for node in graph.nodes if node.op == "call_function"]
    tensors = _with_items_behind(node for node in statements if graphs.is_tensor(node) or graphs.is_op(node))
    return [(run, bool(run.path) and len(run.nodes) > MOST_INLINE) for run in find_runs(tensors)]


def is_recomputable(run: Run) -> bool:
    """Whether a layer's forward may run again: not where that would update running statistics twice."""
    return not any(graphs.is_batch_norm(node.target) for node in run.nodes)


def recomputable_layers(graph: fx.Graph) -> tuple[str, ...]:
    """The layers of a stage's graph that can be computed again in the backward, in order."""
    return tuple(run.path for run, is_layer in runs_of(graph) if is_layer and is_recomputable(run))


def _with_items_behind(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """The nodes in order, the ``getitem`` nodes of an op directly behind it."""
    ordered: list[fx.Node] = []
    for node in nodes:
        if not graphs.is_getitem(node):
            ordered.append(node)
            ordered.extend(user for user in node.users if graphs.is_getitem(user))
    return ordered


def _layer(path: str, depth: dict[str, int]) -> str:
    found = prefixes(path)
    if not found:
        return ""
    parent = found[0].rpartition(".")[0]
    return found[min(depth.get(parent, 0), len(found) - 1)]


def _depths(nodes: Sequence[fx.Node]) -> dict[str, int]:
    """For every list of modules whether its items repeat (0), or only the items of lists inside them do (1)."""
    texts: dict[str, dict[str, list[str]]] = {}
    nested: dict[str, bool] = {}
    for node in nodes:
        found = prefixes(graphs.module_path(node))
        if found:
            parent = found[0].rpartition(".")[0]
            texts.setdefault(parent, {}).setdefault(found[0], []).append(str(node.target))
            nested[parent] = nested.get(parent, False) or len(found) > 1
    depth: dict[str, int] = {}
    for parent, items in texts.items():
        distinct = {tuple(item) for item in items.values()}
        repeats = len(distinct) < len(items) or len(items) == 1
        depth[parent] = 0 if repeats or not nested[parent] else 1
    return depth
