"""The graph of a program's totals: sums over the whole batch that are computed before a step, of the inputs alone."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autopart.passes.batch_state import Mixes
from autopart.passes.exported import fakes
from autopart.passes.program import Role
from autopart.passes.sizes import extents
from autopart.passes.storage import op_name

aten = torch.ops.aten

SHAPED_LIKE = {"ones_like": 1, "new_ones": 1, "zeros_like": 0, "new_zeros": 0, "full_like": None, "new_full": None}
"""Ops that take only the shape or the type of a tensor, and the number that they fill it with; None: an argument."""


def values_read(node: fx.Node) -> list[fx.Node]:
    """The operands of a node whose values it reads, each once."""
    if op_name(node) not in SHAPED_LIKE:
        return node.all_input_nodes
    found: dict[fx.Node, None] = {}
    fx.node.map_arg((node.args[1:], node.kwargs), found.setdefault)
    return list(found)


def totals_graph(graph: fx.Graph, results: Sequence[fx.Node]) -> fx.Graph:
    """A graph of its own that computes ``results``. Tensors of which a value has only the shape are not in it."""
    wanted: set[fx.Node] = set()
    stack = list(results)
    while stack:
        node = stack.pop()
        if node not in wanted:
            wanted.add(node)
            stack.extend(values_read(node))
    part = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node in wanted or (node.op == "placeholder" and node.meta["role"] in (Role.BATCH, Role.GLOBAL_BATCH)):
            if node.meta.get("role") is Role.TOTAL:
                raise Mixes("divides by a sum over the whole batch that itself depends on another")
            filled = op_name(node) in SHAPED_LIKE and node.args[0] not in wanted
            env[node] = _filled(node, part, env) if filled else part.node_copy(node, lambda argument: env[argument])
    part.output(tuple(env[node] for node in results))
    return part


def _filled(node: fx.Node, part: fx.Graph, env: dict[fx.Node, fx.Node]) -> fx.Node:
    """A tensor that is filled with a number, by its sizes alone."""
    value, sizes = node.meta["val"], extents(node.meta["val"])
    if sizes is None:
        raise Mixes("uses a sum over samples of unknown size")
    number: Any = SHAPED_LIKE[op_name(node)]
    if number is None:
        number = fx.node.map_arg(node.kwargs.get("fill_value", node.args[-1]), lambda item: env[item])
    batch = next(new for old, new in env.items() if old.meta.get("role") is Role.BATCH)
    listed = [
        _put(part, operator.mul, (size.coefficient, batch), node) if size.batched else size.coefficient
        for size in sizes
    ]
    # "cpu" is printed as the inputs' device
    return _put(part, aten.full.default, (listed, number), node, dtype=value.dtype, device=torch.device("cpu"))


def _put(part: fx.Graph, target: Any, args: tuple[Any, ...], like: fx.Node, **kwargs: Any) -> fx.Node:
    new = part.call_function(target, args, kwargs)
    value = like.meta["val"] if kwargs else target(*fakes(args))
    new.meta.update(val=value, path=like.meta.get("path", ""), source=like.meta.get("source", ""))
    return new
