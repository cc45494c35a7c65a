"""What a program has in common with itself for inputs of other sizes, such as longer sequences."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator

import torch
from torch import fx

from autopart.passes import graph as graphs
from autopart.passes.blocks import free_nodes
from autopart.passes.storage import op_name


def own_ops(graph: fx.Graph, free: Collection[fx.Node]) -> list[fx.Node]:
    """The ops that stages are made of, in the graph's order. free: those that every stage computes for itself."""
    return [node for node in graph.nodes if graphs.is_op(node) and node not in free]


def outline(graph: fx.Graph, free: Collection[fx.Node]) -> tuple[str, ...]:
    """Module path and op of each of :func:`own_ops`: the same whatever the sizes, but for what may come and go."""
    return tuple(f"{graphs.module_path(node)}:{op_name(node)}" for node in own_ops(graph, free))


def comes_and_goes(text: str) -> bool:
    """Whether an op of an outline may be there for some sizes only: a slice of everything leaves none, and no copy."""
    return text.rpartition(":")[2] in ("slice", "expand", "contiguous")


def outline_digest(graph: fx.Graph, updated_buffers: Collection[str]) -> str:
    """Changes with the ops and their arguments, but not with whole numbers, which sizes are among, nor with how
    attention is masked: by a window that some sequences exceed, and causally where they do not. Nor with what may come
    and go.
    """
    free = free_nodes(graph, tuple(updated_buffers))
    digest = hashlib.sha256()
    for node, text in zip(own_ops(graph, free), outline(graph, free), strict=True):
        if not comes_and_goes(text):
            digest.update(f"{text}{list(_told(_unmasked(node)))}{list(_told(node.kwargs))}".encode())
    return digest.hexdigest()[:16]


def _unmasked(node: fx.Node) -> tuple[object, ...]:
    """The arguments by place; of attention the tensors, and its dropout if it has any."""
    if node.target is not torch.ops.aten.scaled_dot_product_attention.default:
        return node.args
    return (*node.args[:3], *(rest for rest in node.args[4:5] if rest))


def _told(argument: object) -> Iterator[str]:
    if isinstance(argument, dict):
        argument = [argument[key] for key in sorted(argument)]
    if isinstance(argument, tuple | list):
        for item in argument:
            yield from _told(item)
    elif isinstance(argument, bool | float | str | torch.dtype):
        yield str(argument)
