"""``as_strided``: views by steps in memory, which only mean something for one layout of the operand.

A graph says nothing of layouts: they follow from devices, placements and collectives. So the operand is written out as
one row of numbers, and the view is taken of that. Where each step goes along one dim of the operand and no index leaves
its dim, the row is that of the dims in their own order, with steps that are the same there: samples then stay apart.
Otherwise it is the row that the captured model had in memory.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autopart.passes import graph as graphs
from autopart.passes.exported import fakes, module_name, origin
from autopart.passes.sizes import extent
from autopart.runtime.errors import CaptureError

aten = torch.ops.aten
Size = int | torch.SymInt


def memory_views(node: fx.Node) -> list[tuple[Any, tuple[Any, ...]]]:
    """What an exported ``as_strided`` does to its operand, of any layout: ops, and their arguments behind the first.

    Raises CaptureError where it reads other memory than the operand's, or has sizes that are no multiple of the batch.
    """
    operand, sizes, steps, *rest = fakes(graphs.arguments(node))
    start = (*rest, fakes(node.kwargs.get("storage_offset")))[0]
    order, first = _order(operand), 0 if start is None else _hint(start) - _hint(operand.storage_offset())
    last = first + sum((_hint(size) - 1) * _hint(step) for size, step in zip(sizes, steps, strict=True))
    whole = math.prod(map(_hint, operand.shape))
    if order is None or first < 0 or last >= whole or any(extent(size) is None for size in (*sizes, *steps)):
        path, line = origin(node)
        raise CaptureError(
            f"as_strided in module {module_name(path)} ({line}) reads the memory of a tensor that does not fill it, or "
            "beyond it, or has sizes that are no multiple of the batch; call contiguous() on the tensor, or use unfold"
        )
    found: list[tuple[Any, tuple[Any, ...]]] = []
    along = None if first else _steps_along_dims(operand, sizes, steps)
    if along is not None:
        order, steps = sorted(order), along
    if order != sorted(order):
        found.append((aten.permute.default, (order,)))
    found += [(aten.reshape.default, ([math.prod(operand.shape)],)), (aten.contiguous.default, ())]
    if first:
        found.append((aten.slice.Tensor, (0, first, sys.maxsize)))
    return [*found, (aten.as_strided.default, (list(sizes), list(steps)))]


def _order(operand: torch.Tensor) -> list[int] | None:
    """The dims of a tensor as they lie in memory, the slowest first; None where it does not fill its memory."""
    sizes, steps = [_hint(size) for size in operand.shape], [_hint(step) for step in operand.stride()]
    order = sorted(range(operand.dim()), key=lambda dim: (-steps[dim], dim))
    expected = 1
    for dim in reversed(order):
        if sizes[dim] != 1 and steps[dim] != expected:
            return None
        expected *= sizes[dim]
    return order


def _steps_along_dims(operand: torch.Tensor, sizes: Sequence[Size], steps: Sequence[Size]) -> list[Size] | None:
    """The steps of the same view where the operand's dims lie in their own order; None where there is no such view."""
    dims: list[tuple[Size, Size]] = []  # size and step in memory; dims that are one there and in order are one
    for length, own in zip(operand.shape, operand.stride(), strict=True):
        if _hint(length) == 1:
            continue
        if dims and _hint(dims[-1][1]) == _hint(length) * _hint(own):
            dims[-1] = (dims[-1][0] * length, own)
        else:
            dims.append((length, own))
    reached, found = [0] * len(dims), list[Size]()
    for size, step in zip(sizes, steps, strict=True):
        if _hint(size) == 1:
            found.append(1)
            continue
        fitting = [k for k, (_, behind) in enumerate(dims) if _hint(behind) <= _hint(step)]
        if not fitting:
            return None
        dim = max(fitting, key=lambda k: _hint(dims[k][1]))
        times, rest = divmod(_hint(step), _hint(dims[dim][1]))
        reached[dim] += (_hint(size) - 1) * times
        if rest:
            return None
        found.append(times * math.prod(behind for behind, _ in dims[dim + 1 :]))
    inside = all(reach < _hint(most) for reach, (most, _) in zip(reached, dims, strict=True))
    return found if inside else None


def _hint(size: Size) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) else size
