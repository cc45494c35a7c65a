"""Amounts (FLOPs, bytes) as functions of the batch size.

An op's FLOPs and bytes are polynomials in the number of samples ``b``: constant for what depends on parameters only,
linear for activations, quadratic where samples meet samples (contrastive logits).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest

import torch

from autopart.passes.graph import Value
from autopart.passes.sizes import extent


@dataclass(frozen=True, slots=True)
class Amount:
    """``coefficients[i]`` times ``b**i``, summed; no trailing zeros."""

    coefficients: tuple[int, ...] = ()

    def at(self, batch: int) -> int:
        """The amount for ``batch`` samples."""
        match self.coefficients:
            case ():
                return 0
            case (fixed,):
                return fixed
            case (fixed, each):
                return fixed + each * batch
        return sum(coefficient * batch**power for power, coefficient in enumerate(self.coefficients))

    def __add__(self, other: Amount) -> Amount:
        if not self.coefficients or not other.coefficients:
            return self if self.coefficients else other
        pairs = zip_longest(self.coefficients, other.coefficients, fillvalue=0)
        return _trimmed(first + second for first, second in pairs)

    def __mul__(self, other: Amount | int) -> Amount:
        if isinstance(other, int):
            return _trimmed(coefficient * other for coefficient in self.coefficients)
        product = [0] * (len(self.coefficients) + len(other.coefficients))
        for i, first in enumerate(self.coefficients):
            for j, second in enumerate(other.coefficients):
                product[i + j] += first * second
        return _trimmed(product)

    __rmul__ = __mul__

    def __floordiv__(self, divisor: int) -> Amount:
        return _trimmed(coefficient // divisor for coefficient in self.coefficients)

    def __bool__(self) -> bool:
        return bool(self.coefficients)

    def __str__(self) -> str:
        powers = ("", "*b", "*b**2", "*b**3")
        terms = [f"{item}{powers[i]}" for i, item in enumerate(self.coefficients) if item]
        return " + ".join(terms) or "0"


def _trimmed(coefficients: Iterable[int]) -> Amount:
    found = list(coefficients)
    while found and found[-1] == 0:
        found.pop()
    return Amount(tuple(found))


ZERO = Amount()
ONE = Amount((1,))


def constant(number: int) -> Amount:
    return _trimmed([number])


def total(amounts: Iterable[Amount]) -> Amount:
    result = ZERO
    for amount in amounts:
        result = result + amount
    return result


def size(value: int | torch.SymInt) -> Amount:
    """A dim's size. Sizes that are no multiple of ``b`` (``b // 2``) count as what they were at capture."""
    found = extent(value)
    if found is None:
        hint = value.node.hint if isinstance(value, torch.SymInt) else value
        return constant(int(hint or 1))
    return _trimmed([0, found.coefficient] if found.batched else [found.coefficient])


def product(sizes: Iterable[int | torch.SymInt]) -> Amount:
    result, number = ONE, 1
    for item in sizes:
        if isinstance(item, int):
            number *= item
        else:
            result = result * size(item)
    return result * number


def numel(tensor: torch.Tensor) -> Amount:
    """Elements of a fake tensor."""
    return product(tensor.shape)


def tensor_bytes(tensor: torch.Tensor) -> Amount:
    """Bytes of a fake tensor laid out contiguously."""
    return numel(tensor) * tensor.element_size()


def stored_bytes(tensor: torch.Tensor) -> Amount:
    """Bytes that a fake tensor touches: expanded dims (stride 0) count once."""
    kept = (item for item, stride in zip(tensor.shape, tensor.stride(), strict=True) if not _is_zero(stride))
    return product(kept) * tensor.element_size()


def value_bytes(value: Value) -> Amount:
    """Bytes of a value laid out contiguously."""
    return tensor_bytes(value.fake)


def _is_zero(stride: int | torch.SymInt) -> bool:
    return isinstance(stride, int) and stride == 0
