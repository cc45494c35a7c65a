"""Pieces of a dim that holds all samples several times, as of two views joined by ``torch.cat([x, y])``.

Torch takes them by position. How many pieces ``chunk`` gives is asked of the batch's size, which would fix it, and
what lies between two positions is no sample's own. So in a trace such pieces are taken from the dim in two, that of
the copies and that of the samples: views with the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopart.passes.sizes import extent


class BatchPieces(TorchFunctionMode):
    """Inside, ``chunk``, ``split``, ``tensor_split``, ``narrow`` and slices give such pieces as views of copies."""

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        taken = _TAKEN.get(function)
        pieces = taken(*args, **(kwargs or {})) if taken is not None else None
        return function(*args, **(kwargs or {})) if pieces is None else pieces


def _blocks(size: Any) -> int | None:
    """How many times a size is the number of samples, 0 included; None where it is no such multiple."""
    found = extent(size) if isinstance(size, int | torch.SymInt) else None
    return found.coefficient if found is not None and (found.batched or found.coefficient == 0) else None


def _dim(x: Any, dim: Any) -> tuple[int, int] | None:
    """The dim from the front, and how many times it holds all samples, if more than once."""
    if not isinstance(x, Tensor) or not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
        return None
    dim %= x.dim()
    blocks = _blocks(x.shape[dim])
    return (dim, blocks) if blocks is not None and blocks > 1 else None


def _piece(x: Tensor, dim: int, blocks: int, first: int, last: int) -> Tensor | None:
    """Copies first to last of a dim with so many; None where no view has them, or they are all or none."""
    width = last - first
    if not 0 < width < blocks or first < 0 or last > blocks:
        return None
    size = x.shape[dim]
    if blocks % width == 0 and first % width == 0:
        parts = blocks // width
        return x.unflatten(dim, (parts, size // parts)).select(dim, first // width)
    if not x.is_contiguous() or dim:
        return None
    return x.unflatten(dim, (blocks, size // blocks)).narrow(dim, first, width).flatten(dim, dim + 1)


def _pieces(x: Tensor, dim: int, blocks: int, widths: Sequence[int | None]) -> tuple[Tensor, ...] | None:
    found, first = [], 0
    for width in widths:
        piece = None if width is None else _piece(x, dim, blocks, first, first + width)
        if piece is None or width is None:
            return None
        found.append(piece)
        first += width
    return tuple(found) if first == blocks else None


def _chunk(input: Any, chunks: Any = None, dim: Any = 0, **_: Any) -> tuple[Tensor, ...] | None:
    found = _dim(input, dim)
    if found is None or not isinstance(chunks, int) or chunks < 2 or found[1] % chunks:
        return None
    return _pieces(input, *found, [found[1] // chunks] * chunks)


def _split(tensor: Any, split_size_or_sections: Any = None, dim: Any = 0, **given: Any) -> Any:
    sizes, found = given.get("split_size", split_size_or_sections), _dim(tensor, dim)
    if found is None:
        return None
    if isinstance(sizes, list | tuple):
        return _pieces(tensor, *found, [_blocks(size) for size in sizes])
    width = _blocks(sizes)
    return _pieces(tensor, *found, [width] * (found[1] // width)) if width else None


def _narrow(input: Any, dim: Any, start: Any, length: Any) -> Tensor | None:
    found, first, width = _dim(input, dim), _blocks(start), _blocks(length)
    if found is None or first is None or width is None:
        return None
    return _piece(input, *found, first, first + width)


def _rows(x: Tensor, rows: Any) -> Tensor | None:
    """``x[:n]`` and ``x[n:]``, and every copy of samples that are repeated one by one, as ``x[::2]``."""
    found = _dim(x, 0) if isinstance(rows, slice) and x.dim() else None
    if found is None:
        return None
    blocks, step = found[1], 1 if rows.step is None else rows.step
    if step == 1:
        first = 0 if rows.start is None else _blocks(rows.start)
        last = blocks if rows.stop is None else _blocks(rows.stop)
        if first is None or last is None:
            return None
        return _piece(x, 0, blocks, first + blocks * (first < 0), last + blocks * (last < 0))
    start = rows.start or 0
    if rows.stop is not None or not (isinstance(start, int) and isinstance(step, int)) or not 0 <= start < step:
        return None
    return x.unflatten(0, (x.shape[0] // step, step)).select(1, start) if blocks % step == 0 else None


def _first(index: Any) -> tuple[Any, tuple[Any, ...]]:
    """What an index says of the first dim, and the rest."""
    return (index[0], (slice(None), *index[1:])) if isinstance(index, tuple) and index else (index, ())


def _item(x: Tensor, index: Any) -> Any:
    rows, rest = _first(index)
    piece = _rows(x, rows)
    return piece[rest] if piece is not None and rest else piece


def _set_item(x: Tensor, index: Any, value: Any) -> Any:
    rows, rest = _first(index)
    piece = _rows(x, rows)
    if piece is not None:
        piece[rest or ...] = value
    return piece


_TAKEN: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((torch.chunk, Tensor.chunk, torch.tensor_split, Tensor.tensor_split), _chunk),
    **dict.fromkeys((torch.split, Tensor.split), _split),
    **dict.fromkeys((torch.narrow, Tensor.narrow), _narrow),
    Tensor.__getitem__: _item,
    Tensor.__setitem__: _set_item,
}
