"""Reading and replacing the arguments of an op, whether they were passed by position or by name."""

from __future__ import annotations

from typing import Any

from torch import fx

from autopart.passes import graph


def argument(node: fx.Node, index: int, name: str, default: Any = None) -> Any:
    """The argument at that position of the op's schema, or by that name."""
    if index < len(node.args):
        return node.args[index]
    return node.kwargs.get(name, default)


def replaced(node: fx.Node, index: int, name: str, value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The node's arguments with one of them replaced."""
    if index < len(node.args):
        return (*node.args[:index], value, *node.args[index + 1 :]), dict(node.kwargs)
    return tuple(node.args), {**node.kwargs, name: value}


def rank_of(node: fx.Node, operand: int = 0) -> int:
    """The number of dims of a tensor operand."""
    return graph.inputs(node)[operand].fake.dim()


def operands(node: fx.Node) -> int:
    """The number of tensor operands."""
    return len(graph.inputs(node))


def wide_bytes(node: fx.Node) -> int:
    """Bytes per element of what a local form computes from the first operand: half precision is widened to float32."""
    return max(graph.inputs(node)[0].fake.dtype.itemsize, 4)


def positive(dim: int, rank: int) -> int:
    """A dim counted from the left."""
    return dim % rank if rank else 0


def dims_of(node: fx.Node, index: int, name: str) -> list[int]:
    """A ``dim`` argument as a list counted from the left; absent or empty means all dims."""
    rank = rank_of(node)
    dims = argument(node, index, name)
    if isinstance(dims, int):
        dims = [dims]
    return [positive(dim, rank) for dim in dims] if dims else list(range(rank))


def names(rank: int, prefix: str = "d") -> list[str]:
    """One factor name per dim: ``d0 d1 …``."""
    return [f"{prefix}{index}" for index in range(rank)]


def words(text: str) -> list[str]:
    """A list of op names written as running text."""
    return text.split()
