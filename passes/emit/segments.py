"""Parts of a layer that are computed again in the backward by themselves: the ops of one module inside the layer.

A layer's ops are an order of statements. Those of a module inside it, ``h.3.mlp`` of the layer ``h.3``, are a *span*
where they can be called as one function. What stands between them and is of other modules has to wait for none of them,
and moves before the call. Collectives that only read what is made before do so too; those that read a value of the span
belong to it. So a span is given values as its ops read them, and collectives before and behind it run once.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import fx

from autopart.passes import graph as graphs
from autopart.passes.emit.layers import Run, is_recomputable, runs_of


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive statements of a stage. path: of the layer, or the module in it, that is computed again; else ''."""

    nodes: tuple[fx.Node, ...]
    path: str = ""


def segments(run: Run, is_layer: bool, recompute: Collection[str]) -> list[Segment]:
    """A run's statements, those that are computed again apart. recompute: paths of layers and of modules in them.

    A module is left as it is where its ops are no span.
    """
    if not is_layer or not recompute:
        return [Segment(tuple(run.nodes))]
    if run.path in recompute:
        return [Segment(tuple(run.nodes), run.path)]
    found: list[Segment] = []
    rest: Sequence[fx.Node] = run.nodes
    for path in _in_order(run, recompute):
        parted = part(rest, path)
        if parted is not None:
            before, own, rest = parted
            found += [Segment(tuple(before))] if before else []
            found.append(Segment(tuple(own), path))
    return [*found, Segment(tuple(rest))] if rest else found


def segments_of(graph: fx.Graph, recompute: Collection[str]) -> list[tuple[Run, bool, list[Segment]]]:
    """The runs of a stage's graph, whether each is written as a layer, and its segments."""
    return [(run, is_layer, segments(run, is_layer, recompute)) for run, is_layer in runs_of(graph)]


def part(nodes: Sequence[fx.Node], path: str) -> tuple[list[fx.Node], list[fx.Node], list[fx.Node]] | None:
    """Statements before a module's ops, these, and those behind them; None where they are no span."""
    inner = f"{path}."
    numbers = [
        index
        for index, node in enumerate(nodes)
        if ((at := graphs.module_path(node)) == path or at.startswith(inner)) and _is_op(node)
    ]
    if not numbers:
        return None
    before, own = list(nodes[: numbers[0]]), list[fx.Node]()
    inside: set[fx.Node] = set()
    end = numbers[-1] + 1
    while end < len(nodes) and graphs.is_getitem(nodes[end]) and nodes[end].args[0] is nodes[numbers[-1]]:
        end += 1
    for node in nodes[numbers[0] : end]:
        reads = not inside.isdisjoint(graphs.tensors_read(node))
        if _is_op(node):
            belongs = is_inside(graphs.module_path(node), path)
            if reads and not belongs:
                return None
        else:
            belongs = reads
        (own if belongs else before).append(node)
        inside.update([node] if belongs else [])
    return before, own, list(nodes[end:])


def spans_of(run: Run) -> dict[str, tuple[fx.Node, ...]]:
    """The modules inside a layer that can be computed again by themselves, with their ops.

    Of several with the same ops the outermost; none with all of the layer's.
    """
    nodes = run.nodes
    paths: dict[str, None] = {}
    for node in nodes:
        paths.update(dict.fromkeys(_modules_between(graphs.module_path(node), run.path)))
    found: dict[str, tuple[fx.Node, ...]] = {}
    for path in sorted(paths, key=lambda item: item.count(".")):
        parted = part(nodes, path)
        if parted is None or not is_recomputable(Run(path, parted[1])):
            continue
        own = tuple(parted[1])
        if len(own) < len(nodes) and own not in found.values():
            found[path] = own
    return found


def recomputable(graph: fx.Graph) -> tuple[str, ...]:
    """The layers of a stage's graph and the modules inside them that can be computed again, layer by layer."""
    return tuple(layer_of_each(graph))


def layer_of_each(graph: fx.Graph) -> dict[str, str]:
    """The same, each with the layer whose ops it has: one layer's path may lie in another's, but none of its ops do."""
    found: dict[str, str] = {}
    for run, is_layer in runs_of(graph):
        if is_layer:
            found |= dict.fromkeys((*([run.path] if is_recomputable(run) else []), *spans_of(run)), run.path)
    return found


def is_inside(path: str, module: str) -> bool:
    """Whether a module's path is that of ``module`` or of one inside it."""
    return path == module or path.startswith(f"{module}.")


def around(path: str) -> list[str]:
    """A module's path and those of the modules around it, the outermost first."""
    names = path.split(".")
    return [".".join(names[: index + 1]) for index in range(len(names))]


def _is_op(node: fx.Node) -> bool:
    """Whether a statement is an op of the model: no collective, and no item of what an op returns."""
    return not graphs.is_getitem(node) and "transition" not in node.meta


@functools.lru_cache(maxsize=65536)  # every op of a module asks
def _modules_between(path: str, layer: str) -> tuple[str, ...]:
    """The module and those around it, inside the layer."""
    return tuple(found for found in around(path) if found.startswith(f"{layer}.")) if is_inside(path, layer) else ()


def _in_order(run: Run, recompute: Collection[str]) -> list[str]:
    """The modules inside a layer that are computed again, as their first ops come; gathers may be begun long before."""
    order: dict[str, None] = {}
    for node in filter(_is_op, run.nodes):
        found = [path for path in _modules_between(graphs.module_path(node), run.path) if path in recompute]
        order.update(dict.fromkeys(found[:1]))
    return list(order)
