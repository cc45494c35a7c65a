"""``as_strided``: views by steps in memory, which only mean something for one layout of the operand.

A graph says nothing of layouts: they follow from devices, placements and collectives. So the operand is written out as
the one row of numbers that it was in the captured model's memory, and the view is taken of that.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch import fx

from autopart.passes import graph as graphs
from autopart.passes.exported import fakes, origin
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
            f"as_strided in module {path or '(root)'} ({line}) reads the memory of a tensor that does not fill it, or "
            "beyond it, or has sizes that are no multiple of the batch; call contiguous() on the tensor, or use unfold"
        )
    found: list[tuple[Any, tuple[Any, ...]]] = []
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


def _hint(size: Size) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) else size
