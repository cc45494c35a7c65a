"""Examples of ops: calls on real tensors, and one call as a graph node to try rules on."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException

F64 = torch.float64


@dataclass(frozen=True)
class Case:
    """A call of one op on real tensors.

    minimum: strategies that must be on offer, so that a check is not empty.
    constant: tensors by index that have no gradient (running statistics, class weights).
    """

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    minimum: int = 1
    constant: tuple[int, ...] = ()

    def __str__(self) -> str:
        shapes = ["x".join(map(str, arg.shape)) for arg in self.args if isinstance(arg, Tensor)]
        return f"{self.op}-{'-'.join(shapes)}"


def f(*shape: int) -> Tensor:
    """Distinct floats in (0.1, 0.9)."""
    return torch.rand(shape, dtype=F64) * 0.8 + 0.1


def i(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape)


def m(*shape: int) -> Tensor:
    return torch.rand(shape) < 0.5


def signs(*shape: int) -> Tensor:
    """Of both kinds."""
    return m(*shape).to(F64) * 2 - 1


def overload(name: str) -> Any:
    """The op of that name. ImportError if the library that registers it is not installed, AttributeError if none is."""
    namespace, op, which = name.split(".")
    if namespace == "transformers":
        importlib.import_module("transformers.integrations.moe")
    return getattr(getattr(getattr(torch.ops, namespace), op), which)


def call(target: Any, *args: Any, **kwargs: Any) -> tuple[fx.Node, list[Tensor]]:
    """One call as a node of a graph of its own, and the tensors to run it on."""
    graph, mode = fx.Graph(), FakeTensorMode()
    tensors: list[Tensor] = []

    def lift(argument: Any) -> Any:
        if isinstance(argument, Tensor):
            node = graph.placeholder(f"x{len(tensors)}")
            node.meta["val"] = mode.from_tensor(argument)
            tensors.append(argument)
            return node
        if isinstance(argument, tuple | list):
            return type(argument)(lift(item) for item in argument)
        return argument

    lifted = tuple(lift(argument) for argument in args), {name: lift(item) for name, item in kwargs.items()}
    node = graph.call_function(target, *lifted)
    fakes = fx.map_arg(lifted, lambda argument: argument.meta["val"])
    try:
        with mode:
            node.meta["val"] = target(*fakes[0], **fakes[1])
    except DataDependentOutputException:  # it looks at the numbers
        node.meta["val"] = mode.from_tensor(target(*args, **kwargs))
    return node, tensors
