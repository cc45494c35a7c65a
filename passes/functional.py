"""In-place ops made functional: who shares storage with whom, and what a write changes.

Every tensor of the new graph is a *base* or a chain of view ops on one. A write to a view makes a new base by
scattering the written piece back through the chain; views of that base that were taken before are taken again from
the new base when they are next used.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopart.passes import graph as graphs
from autopart.passes.exported import module_name, origin
from autopart.runtime.errors import CaptureError

aten = torch.ops.aten

Emit = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], fx.Node]


_OTHERS = {
    aten.zero_.default: aten.zeros_like.default,
    aten.bernoulli_.float: aten.bernoulli.p,
    aten.normal_.default: aten.normal_functional.default,
}


def functional_overload(node: fx.Node, target: torch._ops.OpOverload) -> torch._ops.OpOverload:
    """``aten.add.Tensor`` for ``aten.add_.Tensor`` or ``aten.add.out``, which an exported node calls.

    Raises CaptureError when there is no op that returns the new value instead.
    """
    namespace, name = target._schema.name.split("::")
    packet = getattr(aten, name[:-1], None) if name.endswith("_") and namespace == "aten" else None
    overload: torch._ops.OpOverload | None = getattr(packet, target._overloadname, None) or _OTHERS.get(target)
    if writes_out(target):
        overload = _without_out(target)
    if overload is None:
        path, source = origin(node)
        raise CaptureError(
            f"{target} writes into a tensor and has no functional form (module {module_name(path)}, {source}); "
            "use the op that returns a new tensor"
        )
    return overload


def writes_out(target: torch._ops.OpOverload) -> bool:
    """Whether an op writes its one result into its argument ``out``."""
    return [item.name for item in target._schema.arguments if item.is_out] == ["out"]


def _without_out(target: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The overload of the same op that returns what this one writes into ``out``."""
    given = [(item.name, str(item.type)) for item in target._schema.arguments if not item.is_out]
    packet = target.overloadpacket
    for name in packet.overloads():
        overload: torch._ops.OpOverload = getattr(packet, name)
        if [(item.name, str(item.type)) for item in overload._schema.arguments] == given:
            return overload
    return None


@dataclass(slots=True)
class _View:
    """How a node was taken: ``target(source, *rest)``, from which base, and at which version of that base."""

    base: fx.Node
    source: fx.Node
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    version: int


class Aliases:
    """Storage of a graph under construction."""

    def __init__(self) -> None:
        self._views: dict[fx.Node, _View] = {}
        self._root: dict[fx.Node, fx.Node] = {}
        self._now: dict[fx.Node, fx.Node] = {}
        self._version: dict[fx.Node, int] = {}
        self._retaken: dict[tuple[fx.Node, int], fx.Node] = {}

    def is_view(self, node: fx.Node) -> bool:
        return node in self._views

    def is_detached(self, node: fx.Node) -> bool:
        """Whether the node sees its base through ``detach``."""
        while node in self._views:
            if self._views[node].target is aten.detach.default:
                return True
            node = self._views[node].source
        return False

    def base(self, node: fx.Node) -> fx.Node:
        """The node that owns the storage, as it was before any write."""
        if node in self._views:
            return self._views[node].base
        return self._root.get(node, node)

    def view(
        self, node: fx.Node, source: fx.Node, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Records that ``node`` may share storage with ``source``."""
        base = self.base(source)
        self._views[node] = _View(base, source, target, args, kwargs, self._version.get(base, 0))

    def current(self, node: fx.Node, emit: Emit) -> fx.Node:
        """What the node's storage holds now: itself, or the view taken again after a write."""
        record = self._views.get(node)
        if record is None:
            return self._now.get(self._root.get(node, node), node)
        version = self._version.get(record.base, 0)
        if record.version == version:
            return node
        key = (node, version)
        if key not in self._retaken:
            args = (self.current(record.source, emit), *record.args[1:])
            again = emit(record.target, args, record.kwargs)
            self._retaken[key] = again
            self._views[again] = _View(record.base, args[0], record.target, args, record.kwargs, version)
        return self._retaken[key]

    def write(self, written: fx.Node, new: fx.Node, emit: Emit) -> fx.Node:
        """Records that the storage of ``written`` now holds ``new``; returns the node to use in its place."""
        record = self._views.get(written)
        if record is None:
            root = self._root.get(written, written)
            self._root[new] = root
            self._now[root] = new
            self._version[root] = self._version.get(root, 0) + 1
            return new
        parent = self._views[record.source].source if record.target is operator.getitem else record.source
        whole = _scatter(record, self.current(parent, emit), new, emit)
        self.write(parent, whole, emit)
        return written

    def updates(self) -> dict[fx.Node, fx.Node]:
        """Placeholders whose storage was written, with their final values."""
        return {node: new for node, new in self._now.items() if node.op == "placeholder"}


def _with_piece(
    target: Callable[..., Any],
    source: fx.Node,
    piece: fx.Node,
    rest: Sequence[Any],
    kwargs: Mapping[str, Any],
    emit: Emit,
) -> fx.Node:
    """A copy of ``source`` with ``piece`` in a part of a dim. Of complex numbers torch has no derivative: as pairs."""
    value = source.meta["val"]
    if not value.is_complex():
        return emit(target, (source, piece, *rest), dict(kwargs))
    given = dict(kwargs)
    dim = (rest[0] if rest else given.pop("dim", 0)) % value.dim()
    pairs = [emit(aten.view_as_real.default, (node,), {}) for node in (source, piece)]
    return emit(aten.view_as_complex.default, (emit(target, (*pairs, dim, *rest[1:]), given),), {})


def _scatter(record: _View, source: fx.Node, piece: fx.Node, emit: Emit) -> fx.Node:
    """The source of a view with ``piece`` in place of what the view showed."""
    target, rest = record.target, record.args[1:]
    if target is aten.slice.Tensor:
        return _with_piece(aten.slice_scatter.default, source, piece, rest, record.kwargs, emit)
    if target is aten.select.int:
        return _with_piece(aten.select_scatter.default, source, piece, rest, record.kwargs, emit)
    if target is aten.transpose.int:
        return emit(aten.transpose.int, (piece, *rest), {})
    if target is aten.permute.default:
        order = list(rest[0])
        return emit(aten.permute.default, (piece, [order.index(dim) for dim in range(len(order))]), {})
    if target is aten.unsqueeze.default:
        return emit(aten.squeeze.dim, (piece, rest[0]), {})
    if target is aten.detach.default:
        return piece
    if target in (aten.reshape.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default):
        return emit(aten.reshape.default, (piece, list(source.meta["val"].shape)), {})
    if target is aten.diagonal.default:
        return emit(aten.diagonal_scatter.default, (source, piece, *rest), record.kwargs)
    if target is operator.getitem and record.source.target is aten.unbind.int:
        taken = record.source
        dim = taken.args[1] if len(taken.args) > 1 else taken.kwargs.get("dim", 0)
        return _with_piece(aten.select_scatter.default, source, piece, (dim, rest[0]), {}, emit)
    if target is operator.getitem and record.source.target is aten.split_with_sizes.default:
        split = record.source
        _, sizes, dim = graphs.arguments(split)
        start = sum(sizes[: rest[0]])
        return _with_piece(aten.slice_scatter.default, source, piece, (dim, start, start + sizes[rest[0]]), {}, emit)
    raise CaptureError(
        f"a tensor is written through {target} (module {module_name(source.meta.get('path', ''))}, "
        f"{source.meta.get('source')}); write into a copy and use that instead"
    )
