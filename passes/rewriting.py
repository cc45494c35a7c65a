"""A graph that is written anew from an exported one: its nodes, sizes, fake values, and how these lie in memory."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch.utils import _pytree as pytree

from autopart.passes.exported import fakes, origin
from autopart.passes.functional import Aliases
from autopart.passes.last_states import lstm_values
from autopart.passes.sizes import extent, keep_symbols

aten = torch.ops.aten

# Ops whose results may lie otherwise in memory than exported: some are left out, and fused kernels follow the query.
_LAYS_OUT = {aten.contiguous.default, aten.scaled_dot_product_attention.default}


class Rewriting:
    """graph: the new one, whose first placeholder is the batch size. env: by exported node its value here."""

    def __init__(self, root: fx.GraphModule, batch_symbol: torch.SymInt | None):
        self.graph = fx.Graph()
        self.batch = self.graph.placeholder("b")
        self.batch.meta["val"] = batch_symbol
        self.env: dict[fx.Node, Any] = {}
        # Exported node -> its value as the op at hand takes it under autocast.
        self.cast: dict[fx.Node, fx.Node] = {}
        self.aliases = Aliases()
        self.sizes: dict[int, fx.Node] = {}
        # By op and operands, of which nodes keep the fake values alive that they are told apart by.
        self.values: dict[str, Any] = {}
        self.fake_mode = next(
            node.meta["val"].fake_mode for node in root.graph.nodes if hasattr(node.meta.get("val"), "fake_mode")
        )
        keep_symbols(self.fake_mode.shape_env)
        # Exported nodes whose values have other strides here: what is left out was made contiguous there.
        self.moved: set[fx.Node] = set()
        self.region_meta: dict[str, Any] = {}

    def size(self, value: Any, original: Any = None) -> Any:
        """A size as the new graph writes it: a number, ``b``, or a multiple of it."""
        if isinstance(value, int):
            return value
        found = extent(value)
        if found is None:
            if isinstance(original, fx.Node):
                return self.look(original)
            return -1
        if not found.batched:
            return found.coefficient
        if found.coefficient == 1:
            return self.batch
        if found.coefficient not in self.sizes:
            with self.graph.inserting_after(self.batch):
                node = self.graph.call_function(operator.mul, (found.coefficient, self.batch))
            node.meta["val"] = value
            self.sizes[found.coefficient] = node
        return self.sizes[found.coefficient]

    def look(self, argument: Any) -> Any:
        """The new graph's counterpart of an argument, views of written tensors taken again."""
        if isinstance(argument, fx.Node):
            new = self.cast[argument] if argument in self.cast else self.env[argument]
            return self.aliases.current(new, self.replay) if isinstance(new, fx.Node) else new
        if isinstance(argument, tuple | list):
            return type(argument)(self.look(item) for item in argument)
        if isinstance(argument, dict):
            return {key: self.look(item) for key, item in argument.items()}
        if isinstance(argument, torch.SymInt):
            return self.size(argument)
        return argument

    def emit(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        like: fx.Node,
        known: bool = False,
    ) -> fx.Node:
        """Adds an op; its fake value is computed unless it is ``known`` to be the exported node's own."""
        node = self.graph.call_function(target, args, kwargs)
        self.describe(node, like)
        known = (known or target is like.target) and self.moved.isdisjoint(like.all_input_nodes)
        node.meta["val"] = like.meta.get("val") if known else self.value(target, args, kwargs)
        if target is aten.lstm.input:
            node.meta["val"] = lstm_values(like, fakes(args[1]))
        if target is aten.scaled_dot_product_attention.default and node.meta["val"].shape == fakes(args[0]).shape:
            # fused kernels write their result with its dims in memory in the order of the query's
            node.meta["val"] = self.value(torch.empty_like, args[:1], {})
        return node

    def value(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An op's fake value; computed once for operands with the same ones, as copied layers have."""
        named = fx.node.map_aggregate(
            (args, kwargs), lambda item: f"value {id(item.meta['val'])}" if isinstance(item, fx.Node) else item
        )
        key = f"{target}{named}"
        if key not in self.values:
            # torch's own way where sizes are symbols: some ops, as bilinear, have no other
            with self.fake_mode, torch.no_grad(), enable_python_dispatcher():
                args, kwargs = _on_one_device((fakes(args), fakes(kwargs)))
                self.values[key] = target(*args, **kwargs)
        return self.values[key]

    def replay(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        """Adds an op that the model does not have: a view taken again, a piece put back into its whole."""
        args = fx.node.map_aggregate(args, lambda item: self.size(item) if isinstance(item, torch.SymInt) else item)
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = self.value(target, args, kwargs)
        source = next(argument for argument in args if isinstance(argument, fx.Node))
        node.meta["path"] = source.meta.get("path", "")
        node.meta["source"] = source.meta.get("source", "")
        return node

    def describe(self, node: fx.Node, like: fx.Node) -> None:
        node.meta["path"], node.meta["source"] = origin(like)
        if not node.meta["path"] and self.region_meta:
            node.meta.update(self.region_meta)

    def note_layout(self, node: fx.Node) -> None:
        """Whether what has become of an exported node lies otherwise in memory, by which what reads it may too."""
        if node.target in _LAYS_OUT or not self.moved.isdisjoint(node.all_input_nodes):
            found = self.env[node]
            if isinstance(found, fx.Node) and _strides(found.meta.get("val")) != _strides(node.meta.get("val")):
                self.moved.add(node)


def _on_one_device(operands: Any) -> Any:
    """A model on meta has constants that are made of numbers on the CPU, which not every op takes beside others."""
    tensors = [leaf for leaf in pytree.tree_leaves(operands) if isinstance(leaf, torch.Tensor)]
    if len({tensor.device for tensor in tensors}) < 2 or not any(tensor.is_meta for tensor in tensors):
        return operands
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), operands)


def _strides(value: Any) -> list[Any]:
    """Of a fake tensor, or of each of several."""
    if isinstance(value, tuple | list):
        return [_strides(item) for item in value]
    return list(map(extent, value.stride())) if isinstance(value, torch.Tensor) else []
