"""Values of a graph that follow from the number of samples alone, computed on the CPU.

What has an element for each pair of positions is large where sequences are long, and is mostly made of what is small,
by ops of which each element follows from those at its place. Of such a value a block can be had by itself: some rows
and columns of its last two dims. And bounds of a block follow from those of its operands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from autopart.passes import graph as graphs
from autopart.passes.storage import argument, concrete, op_name

aten = torch.ops.aten

_MOST_BYTES = 1 << 28
_FACTORIES = {aten.full.default, aten.ones.default, aten.zeros.default}
_TRIANGLES = {aten.tril.default, aten.triu.default}
_RESHAPES = {aten.unsqueeze.default, aten.reshape.default}
# Besides the ops that torch says this of.
_BY_ELEMENT = {aten.to.dtype, aten.detach.default}


class NotComputed(Exception):
    """A value has an unknown size, or more than 256 MiB as a whole; or its op fails."""


class Block(NamedTuple):
    """Rows from ``top`` to before ``bottom``, columns from ``left`` to before ``right``."""

    top: int
    bottom: int
    left: int
    right: int


class Bounds(NamedTuple):
    """No element is below ``low`` or above ``high``."""

    low: Any
    high: Any

    def truth(self) -> Bounds:
        """Of whether an element is not zero."""
        return Bounds(self.low > 0 or self.high < 0, self.low != 0 or self.high != 0)


def _at_most(a: Bounds, b: Bounds) -> Bounds:
    return Bounds(a.high <= b.low, a.low <= b.high)


def _below(a: Bounds, b: Bounds) -> Bounds:
    return Bounds(a.high < b.low, a.low < b.high)


def _equal(a: Bounds, b: Bounds) -> Bounds:
    return Bounds(a.low == a.high == b.low == b.high, a.low <= b.high and b.low <= a.high)


def _not(a: Bounds) -> Bounds:
    low, high = a.truth()
    return Bounds(not high, not low)


def _and(a: Bounds, b: Bounds) -> Bounds:
    (a_low, a_high), (b_low, b_high) = a.truth(), b.truth()
    return Bounds(a_low and b_low, a_high and b_high)


def _or(a: Bounds, b: Bounds) -> Bounds:
    return _not(_and(_not(a), _not(b)))


# Where ops make booleans: from the bounds of their operands.
_RULES: dict[str, Callable[..., Bounds]] = {
    "le": _at_most,
    "lt": _below,
    "ge": lambda a, b: _at_most(b, a),
    "gt": lambda a, b: _below(b, a),
    "eq": _equal,
    "ne": lambda a, b: _not(_equal(a, b)),
    **{f"{kind}_not": _not for kind in ("logical", "bitwise")},
    **{f"{kind}_and": _and for kind in ("logical", "bitwise")},
    **{f"{kind}_or": _or for kind in ("logical", "bitwise")},
    "to": lambda a, _: a.truth(),
}


class Computed:
    """The values for so many samples, of a graph whose one placeholder is that number. Methods raise NotComputed."""

    def __init__(self, samples: int):
        self.samples = samples
        self._known: dict[fx.Node, Any] = {}

    def shape(self, value: Tensor) -> list[int]:
        """Of a fake tensor."""
        found = concrete(value.shape, self.samples)
        if found is None:
            raise NotComputed
        return found

    def block(self, node: fx.Node, at: Block) -> Tensor:
        """A value's elements there, and those that it has for all rows or columns."""
        shape = self.shape(node.meta["val"])
        if not _is_of_pairs(shape):
            return _cut(self._whole(node), at)
        sizes = [*shape[:-2], at.bottom - at.top, at.right - at.left]
        sources = graphs.input_nodes(node)
        if node.target in _FACTORIES:
            return self._run(node, (sizes, *node.args[1:]))
        if node.target in _TRIANGLES:
            return self._run(node, (self.block(sources[0], at), _diagonal(node) + at.top - at.left))
        if node.target is aten.expand.default:
            return self.block(sources[0], at).expand(sizes)
        if self._adds_dims(node):
            return self.block(sources[0], at).reshape(sizes)
        if node.target in _BY_ELEMENT or torch.Tag.pointwise in getattr(node.target, "tags", ()):
            return self._run(node, node.args, {source: self.block(source, at) for source in sources})
        return _cut(self._whole(node), at)

    def bounds(self, node: fx.Node, at: Block) -> Bounds:
        """Of a value's elements there; infinite where they are not known."""
        sources = graphs.input_nodes(node)
        if not _is_of_pairs(self.shape(node.meta["val"])):
            return _extremes(_cut(self._whole(node), at))
        if node.target in _FACTORIES:
            return _extremes(self._run(node, ([], *node.args[1:])))
        if node.target in _TRIANGLES:
            return self._triangle(node, at)
        if node.target is aten.expand.default or self._adds_dims(node):
            return self.bounds(sources[0], at)
        rule = _RULES.get(op_name(node))
        if rule is None or node.meta["val"].dtype != torch.bool or node.kwargs:
            return _UNKNOWN
        return rule(*(self._operand(item, at) for item in node.args))

    def _operand(self, item: Any, at: Block) -> Bounds:
        if isinstance(item, fx.Node) and graphs.is_tensor(item):
            return self.bounds(item, at)
        number = self._whole(item) if isinstance(item, fx.Node) else item
        return Bounds(number, number)

    def _triangle(self, node: fx.Node, at: Block) -> Bounds:
        diagonal, upper = _diagonal(node), node.target is aten.triu.default
        # how far columns are behind rows, and whether what is least or most that way is kept
        least, most = at.left - (at.bottom - 1), at.right - 1 - at.top
        first, last = ((offset >= diagonal) if upper else (offset <= diagonal) for offset in (least, most))
        if not first and not last:
            return Bounds(0, 0)
        low, high = self.bounds(graphs.input_nodes(node)[0], at)
        return Bounds(low, high) if first and last else Bounds(min(low, 0), max(high, 0))

    def _adds_dims(self, node: fx.Node) -> bool:
        """Whether a value is its operand with other dims before the last two."""
        if node.target not in _RESHAPES:
            return False
        shapes = [self.shape(value.meta["val"]) for value in (node, graphs.input_nodes(node)[0])]
        return shapes[0][-2:] == shapes[1][-2:]

    def _whole(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return self.samples
        if node not in self._known:
            made = [value.fake for value in graphs.outputs(node)] if graphs.is_op(node) else []
            if sum(math.prod(self.shape(value)) * value.element_size() for value in made) > _MOST_BYTES:
                raise NotComputed
            self._known[node] = self._run(node, node.args)
        return self._known[node]

    def _run(self, node: fx.Node, args: tuple[Any, ...], parts: Mapping[fx.Node, Tensor] | None = None) -> Any:
        """The op on these arguments. parts: of values that they name, in place of the whole."""

        def given(item: Any) -> Any:
            if isinstance(item, torch.device):
                return torch.device("cpu")
            if isinstance(item, fx.Node):
                return parts[item] if parts and item in parts else self._whole(item)
            return item

        positional, named = fx.node.map_aggregate((args, dict(node.kwargs)), given)
        try:
            return graphs.called(node)(*positional, **named)
        except (RuntimeError, IndexError):
            raise NotComputed from None


_UNKNOWN = Bounds(-math.inf, math.inf)


def _is_of_pairs(shape: Sequence[int]) -> bool:
    return len(shape) >= 2 and shape[-2] > 1 and shape[-1] > 1


def _cut(value: Tensor, at: Block) -> Tensor:
    """A value's elements in a block, of dims that have more than one."""
    if value.dim() >= 2 and value.size(-2) > 1:
        value = value[..., at.top : at.bottom, :]
    return value[..., at.left : at.right] if value.dim() and value.size(-1) > 1 else value


def _extremes(value: Tensor) -> Bounds:
    if value.is_complex() or not value.numel():
        return _UNKNOWN
    low, high = (item.item() for item in value.aminmax())
    return Bounds(low, high) if low <= high else _UNKNOWN  # NaNs are in no order


def _diagonal(node: fx.Node) -> int:
    found: int = argument(node, 1, "diagonal", 0)
    return found
