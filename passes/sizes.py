"""Sizes of captured tensors: whole numbers, or whole multiples of the batch size.

Capture leaves one symbol in a graph, the number of samples ``b``; export writes sizes such as ``16*b`` for flattened
tokens. Everything downstream needs only the coefficient and whether ``b`` is a factor.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._sympy.symbol import SymT, symbol_is_type

if TYPE_CHECKING:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv


@dataclass(frozen=True, slots=True)
class Extent:
    """``coefficient``, times the batch size if ``batched``."""

    coefficient: int
    batched: bool = False

    def at(self, batch: int) -> int:
        return self.coefficient * batch if self.batched else self.coefficient

    def __str__(self) -> str:
        if not self.batched:
            return str(self.coefficient)
        return "b" if self.coefficient == 1 else f"{self.coefficient}b"

    def times(self, other: Extent) -> Extent | None:
        """The product; None when the batch size would appear squared."""
        if self.batched and other.batched:
            return None
        return Extent(self.coefficient * other.coefficient, self.batched or other.batched)

    def over(self, other: Extent) -> Extent | None:
        """The exact quotient; None when it is not a whole multiple."""
        if other.batched and not self.batched:
            return None
        if other.coefficient == 0 or self.coefficient % other.coefficient:
            return None
        return Extent(self.coefficient // other.coefficient, self.batched and not other.batched)


ONE = Extent(1)


def extent(size: int | torch.SymInt) -> Extent | None:
    """The extent of a dim of a fake tensor.

    None for sizes that are not a multiple of the batch size: ``b // 2``, or a number read off a tensor.
    """
    if isinstance(size, int):
        return Extent(size)
    return _extent_of(size.node.expr)


@lru_cache(maxsize=4096)
def _extent_of(expr: Any) -> Extent | None:
    """Of a size's expression, of which a graph has few."""
    symbols = expr.free_symbols
    if not symbols:
        return Extent(int(expr))
    if len(symbols) > 1:
        return None
    (symbol,) = symbols
    if not symbol_is_type(symbol, SymT.SIZE):
        return None
    coefficient = expr / symbol
    return Extent(int(coefficient), True) if coefficient.is_Integer else None


def extents(tensor: torch.Tensor) -> tuple[Extent, ...] | None:
    """The extents of all dims of a fake tensor; None if any is not a multiple of the batch size."""
    found = tuple(extent(size) for size in tensor.shape)
    return None if any(item is None for item in found) else tuple(item for item in found if item is not None)


def keep_symbols(sizes: ShapeEnv | None) -> None:
    """From now on, what ops ask of sizes is answered and not remembered.

    Else, where an example has as many samples as some dim has entries, an op that compares the two would make the
    batch's size that number for good: in all values, also those of ops before it.
    """
    if sizes is None:
        return
    ask = sizes.evaluate_expr

    def answer(*args: Any, **kwargs: Any) -> Any:
        with sizes.suppress_guards():
            return ask(*args, **kwargs)

    vars(sizes)["evaluate_expr"] = answer
