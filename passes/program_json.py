"""A captured program as one JSON object, and back: what planning reads of it, without the model.

    written(program) -> {"nodes": [[op, target, name, args, kwargs, meta], ...], "values": [...], ...}
    read(object) -> a program with the same nodes, names, arguments and fake tensors, in a fake mode of its own

Every fake tensor is its sizes, strides and offset, each a whole number or a multiple of the batch size, with its dtype
and device; tensors that several nodes share stay shared. Programs that hold anything else (real constants, conditions
on values, sizes that are no multiples, ops that no name finds) are not written: :class:`NotWritten`.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from autopart.passes.program import OutputInfo, Program, Role, TensorInfo
from autopart.passes.rules.examples import overload
from autopart.passes.sizes import Extent, extent, keep_symbols
from autopart.runtime.manifest import ArgumentSpec, InputSpec

_PLAIN = (bool, int, float, str, type(None))
_KINDS: dict[str, type] = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}
# Fields that are written by a rule of their own, and those that are not.
_OWN = {"graph", "tensors", "inputs", "arguments", "outputs"}
_ATTRIBUTES = {"set_attributes", "grad_mode_read"}  # of the model's code, not of the graph
_LEFT_OUT = {"constants", "check_evaluation", "assumptions", "conditions", "_fingerprint"} | _ATTRIBUTES
_REST = tuple(item.name for item in fields(Program) if item.name not in _OWN | _LEFT_OUT)


class NotWritten(Exception):
    """The program holds something that no JSON object says. Its text names that."""


def written(program: Program) -> dict[str, Any]:
    """A JSON object of the program. Raises NotWritten."""
    if program.constants or program.assumptions or program.conditions is not None:
        raise NotWritten("constants or conditions on values")
    return _Writer().program(program)


def content(program: Program) -> str:
    """A hash of all that planning reads of a program: constants' values and assumed branches it does not.

    Raises NotWritten.
    """
    return hashlib.sha256(json.dumps(_Writer().program(program)).encode()).hexdigest()


def read(data: dict[str, Any]) -> Program:
    """The program of an object that :func:`written` made. Raises KeyError, TypeError, ValueError or the like."""
    return _Reader(data).program()


class _Writer:
    def __init__(self) -> None:
        self.numbers: dict[fx.Node, int] = {}
        self.values: list[Any] = []
        self.known: dict[int, int] = {}
        self.hint: int | None = None

    def program(self, program: Program) -> dict[str, Any]:
        nodes: list[Any] = []
        for node in program.graph.nodes:
            args, kwargs = self.plain(tuple(node.args)), self.plain(dict(node.kwargs))
            self.numbers[node] = len(nodes)
            nodes.append([node.op, self.target(node), node.name, args, kwargs, self.plain(dict(node.meta))])
        users = {node: [self.numbers[user] for user in node.users] for node in program.graph.nodes}
        return {
            "nodes": nodes,
            "users": [[self.numbers[node], of] for node, of in users.items() if of != sorted(of)],
            "values": self.values,
            "tensors": [
                [self.plain(getattr(info, item.name)) for item in fields(info)] for info in program.tensors.values()
            ],
            "inputs": [self.row(info) for info in program.inputs],
            "arguments": [self.row(info) for info in program.arguments],
            "outputs": [self.row(info) for info in program.outputs],
            "rest": {name: self.plain(getattr(program, name)) for name in _REST},
            "hint": self.hint,
        }

    def row(self, info: TensorInfo | InputSpec | ArgumentSpec | OutputInfo) -> list[Any]:
        return [self.plain(getattr(info, item.name)) for item in fields(info)]

    def target(self, node: fx.Node) -> str:
        if node.op in ("placeholder", "output"):
            return str(node.target)
        target = node.target
        if node.op == "call_function" and isinstance(target, torch._ops.OpOverload):
            name = str(target)
        elif node.op == "call_function":
            name = f"{getattr(target, '__module__', '')}:{getattr(target, '__name__', '')}"
        else:
            raise NotWritten(f"a node {node.op}")
        try:
            found = _found(name)
        except (ImportError, AttributeError, ValueError):
            found = None
        if found is not target:
            raise NotWritten(f"the function {name}")
        return name

    def plain(self, item: Any) -> Any:
        if type(item) in _PLAIN:
            return item
        if isinstance(item, fx.Node):
            return {"node": self.numbers[item]}
        if isinstance(item, torch.Tensor):
            return {"value": self.value(item)}
        if isinstance(item, torch.SymInt):
            return {"batches": self.size(item)[0]}
        if isinstance(item, Role):
            return {"role": item.value}
        if isinstance(item, torch.device):
            return {"device": str(item)}
        if isinstance(item, tuple):
            return {"tuple": [self.plain(part) for part in item]}
        if isinstance(item, list):
            return [self.plain(part) for part in item]
        if isinstance(item, dict):
            return {"dict": [[self.plain(key), self.plain(part)] for key, part in item.items()]}
        if isinstance(item, slice):
            return {"slice": [self.plain(part) for part in (item.start, item.stop, item.step)]}
        for kind, known in _KINDS.items():
            if isinstance(item, known):
                return {kind: str(item).removeprefix("torch.")}
        raise NotWritten(f"a {type(item).__name__}")

    def value(self, tensor: torch.Tensor) -> int:
        if id(tensor) not in self.known:
            if tensor.layout is not torch.strided or type(tensor).__name__ != "FakeTensor" or tensor.is_quantized:
                raise NotWritten(f"a tensor of {type(tensor).__name__}, {tensor.layout}")
            sizes, strides = ([self.size(item) for item in items] for items in (tensor.shape, tensor.stride()))
            offset = self.size(tensor.storage_offset())
            dtype = str(tensor.dtype).removeprefix("torch.")
            self.values.append([sizes, strides, offset, dtype, str(tensor.device), tensor.requires_grad])
            self.known[id(tensor)] = len(self.values) - 1
        return self.known[id(tensor)]

    def size(self, size: int | torch.SymInt) -> Any:
        """A whole number, or in a list the multiple of the batch size."""
        found = extent(size)
        if found is None or (isinstance(size, torch.SymInt) and not found.batched):  # a symbol with one value by now
            raise NotWritten(f"the size {size}")
        if not found.batched:
            return found.coefficient
        assert isinstance(size, torch.SymInt)
        hint = int(size.node.hint)
        batch = hint // found.coefficient
        if batch < 2 or self.hint not in (None, batch):
            raise NotWritten(f"the size {size}, example {hint}")
        self.hint = batch
        return [found.coefficient]


class _Sizes(ShapeEnv):
    """Does not note whose code makes a size or asks for one: to tell that, torch imports its exporter and more."""

    def _get_user_frame(self) -> None:
        return None


class _Reader:
    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data
        self.graph, self.nodes = fx.Graph(), list[fx.Node]()
        self.mode = FakeTensorMode(shape_env=_Sizes(), allow_non_fake_inputs=True)
        keep_symbols(self.mode.shape_env)
        hint = data["hint"]
        self.batch = None if hint is None else self._symbol(int(hint))
        self.values = [self._value(*value) for value in data["values"]]

    def program(self) -> Program:
        data = self.data
        for op, target, name, args, kwargs, meta in data["nodes"]:
            function = _found(target) if op == "call_function" else target
            node = self.graph.create_node(op, function, self.plain(args), self.plain(kwargs), name=name)
            if node.name != name:
                raise ValueError(f"the name {name} became {node.name}")
            node.meta.update(self.plain(meta))
            self.nodes.append(node)
        for number, users in data["users"]:  # passes go over them in this order
            self.nodes[number].users = {self.nodes[user]: None for user in users}
        tensors = [TensorInfo(*map(self.plain, info)) for info in data["tensors"]]
        return Program(
            graph=self.graph,
            tensors={info.name: info for info in tensors},
            inputs=tuple(InputSpec(*map(self.plain, info)) for info in data["inputs"]),
            arguments=tuple(ArgumentSpec(*map(self.plain, info)) for info in data["arguments"]),
            outputs=tuple(OutputInfo(*map(self.plain, info)) for info in data["outputs"]),
            **{name: self.plain(data["rest"][name]) for name in _REST},
        )

    def plain(self, item: Any) -> Any:
        if type(item) in _PLAIN:
            return item
        if isinstance(item, list):
            return [self.plain(part) for part in item]
        ((kind, part),) = item.items()
        if kind == "node":
            return self.nodes[part]
        if kind == "value":
            return self.values[part]
        if kind == "batches":
            return self._size([part])
        if kind == "role":
            return Role(part)
        if kind == "device":
            return torch.device(part)
        if kind == "tuple":
            return tuple(self.plain(one) for one in part)
        if kind == "dict":
            return {self.plain(key): self.plain(one) for key, one in part}
        if kind == "slice":
            return slice(*(self.plain(one) for one in part))
        found = getattr(torch, part)
        if not isinstance(found, _KINDS[kind]):
            raise ValueError(f"{part} is no {kind}")
        return found

    def _symbol(self, hint: int) -> torch.SymInt:
        """The batch size: of one dim of a tensor that is dynamic there, since no public function makes a symbol."""
        context: StatelessSymbolicContext[Any, Any] = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
        size = self.mode.from_tensor(torch.empty(hint, device="meta"), symbolic_context=context).shape[0]
        if extent(size) != Extent(1, batched=True):
            raise ValueError(f"{size} is no symbol")
        assert isinstance(size, torch.SymInt)
        return size

    def _size(self, size: Any) -> Any:
        return size[0] * self.batch if isinstance(size, list) else size

    def _value(
        self, sizes: Sequence[Any], strides: Sequence[Any], offset: Any, dtype: str, device: str, gradient: bool
    ) -> torch.Tensor:
        shape, steps, start = [list(map(self._size, items)) for items in (sizes, strides, [offset])]
        with self.mode, torch.no_grad():
            kind = getattr(torch, dtype)
            if offset == 0:
                tensor = torch.empty_strided(shape, steps, dtype=kind, device=device)
            else:
                last = math.prod(shape) and sum((size - 1) * step for size, step in zip(shape, steps, strict=True))
                tensor = torch.empty(start[0] + last + 1, dtype=kind, device=device).as_strided(shape, steps, start[0])
        return tensor.requires_grad_() if gradient else tensor


def _found(name: str) -> Any:
    """The op or function of that name. Raises ImportError, AttributeError, ValueError."""
    module, colon, function = name.partition(":")
    return getattr(importlib.import_module(module), function) if colon else overload(name)
