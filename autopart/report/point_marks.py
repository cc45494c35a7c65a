"""Short texts beside the points of a picture: where each stands so that none hides another, and lines of long texts."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH_OF_LETTER = 0.62
"""Of a letter over the size of its font, at most on the mean: fonts differ, and none is asked."""
_AROUND = (7, 1, 3, 5, 0, 2, 4, 6)
"""Eighths of a turn at which a mark is tried, from the right and then up: corners first, as lines are often level."""
_FAR = (10.0, 16.0, 24.0, 34.0, 46.0, 60.0, 80.0, 110.0, 150.0, 200.0)
"""Pixels between a point and its mark, the nearest first."""
_LED = 20.0
"""Pixels from which a line leads from a point to its mark."""
_STEP = 3.0
"""Pixels of a line that are looked at together."""
_POINT = 4.5
_PIECES = re.compile(r"[^ ,&?/]*[ ,&?/]*")

Place = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle of pixels, y downwards."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: Box) -> bool:
        apart = self.right <= other.left or other.right <= self.left
        return not (apart or self.bottom <= other.top or other.bottom <= self.top)

    def holds(self, other: Box) -> bool:
        across = self.left <= other.left and other.right <= self.right
        return across and self.top <= other.top and other.bottom <= self.bottom


@dataclass(frozen=True, slots=True)
class Mark:
    """A text centred in a box. led: whether it is so far from its point that a line has to lead there."""

    text: str
    box: Box
    led: bool


def width_of(text: str, size: float) -> float:
    """Pixels that a text takes, at most in usual fonts."""
    return WIDTH_OF_LETTER * size * len(text)


def wrapped(text: str, width: float, size: float) -> list[str]:
    """The text in lines of at most so many pixels: parted behind what parts words or keys, else anywhere."""
    most = max(1, int(width / (WIDTH_OF_LETTER * size)))
    lines = [""]
    for piece in _PIECES.findall(text):
        for start in range(0, len(piece), most):
            part = piece[start : start + most]
            if len(lines[-1]) + len(part.rstrip()) > most:
                lines.append("")
            lines[-1] += part
    return [line.rstrip() for line in lines]


def marks(
    texts: Sequence[str], points: Sequence[Place], lines: Sequence[Sequence[Place]], inside: Box, size: float
) -> list[Mark | None]:
    """A mark for each point, inside of a box, that meets no point and no other mark, and where it can no line.

    lines: corners of what is drawn. size: of the font. None where a point has no text, or no place is left.
    """
    dots = [Box(x - _POINT, y - _POINT, x + _POINT, y + _POINT) for x, y in points]
    drawn = [dot for line in lines for dot in _dotted(line)]
    found: list[Mark | None] = []
    for text, point in zip(texts, points, strict=True):
        taken = [*dots, *(mark.box for mark in found if mark is not None)]
        free = [
            mark
            for mark in (_at(text, point, far, eighth, size) for far in _FAR for eighth in _AROUND)
            if text and inside.holds(mark.box) and not any(mark.box.meets(other) for other in taken)
        ]
        clear = (mark for mark in free if not any(mark.box.meets(dot) for dot in drawn))
        found.append(next(clear, free[0] if free else None))
    return found


def _at(text: str, point: Place, far: float, eighth: int, size: float) -> Mark:
    """The mark at a distance from its point to its own edge."""
    across, down = math.cos(eighth * math.pi / 4), -math.sin(eighth * math.pi / 4)
    half, height = width_of(text, size) / 2 + 2, size / 2 + 1
    x, y = point[0] + across * (far * 0.8 + half), point[1] + down * (far * 0.5 + height)
    return Mark(text, Box(x - half, y - height, x + half, y + height), far >= _LED)


def _dotted(line: Sequence[Place]) -> list[Box]:
    boxes = []
    for (x, y), (to_x, to_y) in itertools.pairwise(line):
        count = max(1, math.ceil(max(abs(to_x - x), abs(to_y - y)) / _STEP))
        for step in range(count + 1):
            at_x, at_y = x + (to_x - x) * step / count, y + (to_y - y) * step / count
            boxes.append(Box(at_x - 1, at_y - 1, at_x + 1, at_y + 1))
    return boxes
