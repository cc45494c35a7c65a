"""Small questions that every pass asks of an fx graph.

An op may return several tensors (split, topk); a :class:`Value` is one of them. The ``operator.getitem`` nodes that
pick them are names, not ops: :func:`value_of` looks through them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import fx

from autopart.passes.sizes import Extent, extent

RECURRENT = tuple(f"aten.{name}.input" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"))
"""Ops that are all layers of a recurrent module, called with ``(sequence, states, weights, has_biases, num_layers,
dropout, train, bidirectional, batch_first)``."""


# tuples, as a union of types is made anew wherever it is written, in functions that are called a million times
_NESTED, _RESULTS = (tuple, list, dict), (torch.Tensor, tuple, list)


class Value(NamedTuple):
    """Output number ``index`` of an op (0 for the ops with one output). A tuple: many are made and looked up."""

    node: fx.Node
    index: int = 0  # type: ignore[assignment]  # not the method of tuples

    @property
    def fake(self) -> torch.Tensor:
        """The fake tensor that stands for it: shape (batch size symbolic), dtype."""
        val = self.node.meta["val"]
        return val if isinstance(val, torch.Tensor) else val[self.index]


def may_have_gradient(dtype: torch.dtype) -> bool:
    """Whether autograd differentiates tensors of this type."""
    return dtype.is_floating_point or dtype.is_complex


def is_getitem(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is operator.getitem


def value_of(node: fx.Node) -> Value:
    """The value that a node names, seen through ``getitem``."""
    if is_getitem(node):
        source, index = node.args
        assert isinstance(source, fx.Node) and isinstance(index, int)
        return Value(source, index)
    return Value(node)


def is_tensor(node: fx.Node) -> bool:
    """Whether the node is one tensor (sizes and tuples are not)."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def batch_size(graph: fx.Graph) -> fx.Node:
    """The number of samples ``b``: the first placeholder, as an input of the model may be called ``b`` too."""
    return next(iter(graph.nodes))


def is_op(node: fx.Node) -> bool:
    """Whether the node computes tensors: not a placeholder, a size, a ``getitem`` or the output."""
    if node.op != "call_function" or is_getitem(node):
        return False
    val = node.meta.get("val")
    return isinstance(val, _RESULTS)


def _add_nodes(arguments: Iterable[object], found: list[fx.Node]) -> None:
    for argument in arguments:
        if isinstance(argument, fx.Node):
            found.append(argument)
        elif isinstance(argument, _NESTED):
            _add_nodes(argument.values() if isinstance(argument, dict) else argument, found)


def input_nodes(node: fx.Node) -> list[fx.Node]:
    """The tensor arguments of an op in order, args before kwargs, lists flattened, repeats kept."""
    found: list[fx.Node] = []
    _add_nodes(node.args, found)
    if node.kwargs:
        _add_nodes(node.kwargs.values(), found)
    return [argument for argument in found if isinstance(argument.meta.get("val"), torch.Tensor)]


def inputs(node: fx.Node) -> list[Value]:
    """The values of :func:`input_nodes`, in the same order."""
    return [value_of(argument) for argument in input_nodes(node)]


def outputs(node: fx.Node) -> list[Value]:
    """The tensors that an op returns, in order."""
    val = node.meta.get("val")
    if isinstance(val, torch.Tensor):
        return [Value(node)]
    assert isinstance(val, tuple | list), node
    return [Value(node, index) for index, item in enumerate(val) if isinstance(item, torch.Tensor)]


def arguments(node: fx.Node) -> tuple[Any, ...]:
    """The positional arguments, untyped: an op's schema says what they are."""
    return node.args


def called(node: fx.Node) -> Callable[..., Any]:
    """What a ``call_function`` node calls."""
    assert callable(node.target), node
    return node.target


def results(graph: fx.Graph) -> tuple[fx.Node, ...]:
    """The nodes that a graph returns, in order."""
    found = next(node for node in reversed(graph.nodes) if node.op == "output").args[0]
    assert isinstance(found, tuple | list)
    return tuple(item for item in found if isinstance(item, fx.Node))


def tensors_read(node: fx.Node) -> Iterator[fx.Node]:
    """The tensors that a node reads, also through sizes; of an op with several, the ``getitem`` nodes."""
    for source in node.all_input_nodes:
        if is_tensor(source) or is_op(source):
            yield source
        else:
            yield from tensors_read(source)


def module_path(node: fx.Node) -> str:
    """The qualified name of the module that the op was written in, '' for the model itself."""
    path: str = node.meta.get("path", "")
    return path


def source_line(node: fx.Node) -> str:
    """``file:line`` of the user's or library's code that produced the op, '' when unknown."""
    line: str = node.meta.get("source", "")
    return line


def updates_statistics(node: fx.Node) -> bool:
    """Whether the op writes into running statistics, and so has to stay even if nothing reads its result."""
    return node.op == "call_function" and is_batch_norm(node.target)


@functools.lru_cache(maxsize=4096)  # an op's name is put together every time it is asked for
def is_batch_norm(target: object) -> bool:
    """Whether what a node calls is a batch norm."""
    return "batch_norm" in str(target)


def least_samples(graph: fx.Graph) -> int:
    """Samples with which each batch norm in training has two values of each channel, without which torch refuses."""
    for node in graph.nodes:
        if updates_statistics(node) and node.args[5]:
            samples, _, *places = Value(node.args[0]).fake.shape
            if extent(samples) == Extent(1, batched=True) and all(place == 1 for place in places):
                return 2
    return 1


def prune(graph: fx.Graph, keep: Collection[fx.Node] = ()) -> None:
    """Drops, in place, what nothing reads; placeholders, ``keep`` and batch norm stay."""
    for node in reversed(list(graph.nodes)):
        stays = node.users or node in keep or node.op in ("placeholder", "output") or updates_statistics(node)
        if not stays:
            graph.erase_node(node)
