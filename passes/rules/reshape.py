"""The factors of a reshape, from the shapes before and after.

Both shapes are read from the outermost dim as mixed-radix digits of the same index. Where the digits agree they are
one factor: ``[b, 6, h] -> [6b, h]`` is ``b s h -> (b s) h``, and ``[12] -> [3, 4]`` is ``(m n) -> m n``. Where they do
not (``[2, 3] -> [3, 2]``) the dims involved are frozen, up to where both shapes have gone through the same number
of elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

from autopart.passes.rules.notation import Annotation
from autopart.passes.sizes import ONE, Extent


class _Digits:
    """One shape's dims, taken from the left piece by piece."""

    def __init__(self, shape: Sequence[Extent]) -> None:
        self.shape = shape
        self.dim = 0
        self.rest = shape[0] if shape else ONE
        self.terms: list[list[str]] = [[] for _ in shape]

    def settle(self) -> bool:
        """Moves to a dim with something left; False at the end of the shape."""
        while self.rest == ONE:
            if self.dim + 1 >= len(self.shape):
                return False
            self.dim += 1
            self.rest = self.shape[self.dim]
        return True

    def take(self, name: str, size: Extent) -> None:
        rest = self.rest.over(size)
        assert rest is not None
        self.terms[self.dim].append(name)
        self.rest = rest


def _common(first: Extent, second: Extent) -> Extent:
    """The largest extent that divides both."""
    return Extent(gcd(first.coefficient, second.coefficient), first.batched and second.batched)


def _text(shape: _Digits) -> str:
    terms = ["1" if not names else names[0] if len(names) == 1 else f"({' '.join(names)})" for names in shape.terms]
    return " ".join(terms)


def reshape_annotation(before: Sequence[Extent | None], after: Sequence[Extent | None]) -> Annotation | None:
    """The annotation of a reshape; None if a size is unknown or zero."""
    known = [[size for size in shape if size is not None] for shape in (before, after)]
    if len(known[0]) < len(before) or len(known[1]) < len(after):
        return None
    if any(size.coefficient == 0 for shape in known for size in shape):
        return None
    left, right = _Digits(known[0]), _Digits(known[1])
    sizes: dict[str, Extent] = {}

    def fresh(size: Extent) -> str:
        name = f"f{len(sizes)}"
        sizes[name] = size
        return name

    frozen: set[str] = set()
    while left.settle() and right.settle():
        size = _common(left.rest, right.rest)
        if size != ONE:
            name = fresh(size)
            left.take(name, size)
            right.take(name, size)
        elif not _freeze(left, right, fresh, frozen):
            return None
    text = f"{_text(left)} -> {_text(right)}"
    for name in sorted(frozen, key=len, reverse=True):
        text = _mark(text, name)
    return Annotation(text, linear=((0,),), sizes=sizes)


def _freeze(left: _Digits, right: _Digits, fresh: object, frozen: set[str]) -> bool:
    """Takes what is left of the dims on both sides as frozen factors until as many elements are behind either."""
    assert callable(fresh)
    taken = [ONE, ONE]
    sides = [left, right]
    turn = 0
    while True:
        side = sides[turn]
        if not side.settle():
            return False
        total = taken[turn].times(side.rest)
        if total is None:
            return False
        taken[turn] = total
        name = fresh(side.rest)
        frozen.add(name)
        side.take(name, side.rest)
        if taken[0] == taken[1]:
            return True
        # The side that is behind goes on; with the batch size on one side only, the other one must reach it.
        ahead = taken[0].coefficient > taken[1].coefficient or (taken[0].batched and not taken[1].batched)
        turn = 1 if ahead else 0


def _mark(text: str, name: str) -> str:
    import re

    return re.sub(rf"(?<![\w^]){name}\b", f"^{name}", text)
