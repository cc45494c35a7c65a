"""Pictures of curves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopart.report.drawing import Dot, Drawing, Line, Text
from autopart.report.point_marks import Box, Place, marks, width_of, wrapped

_WIDTH, _PLOT = 640, 324
"""Pixels of the picture across, and of the plot down; titles and lists of marks add to it."""
_LEFT, _RIGHT, _TOP, _EDGE = 80, 36, 18, 16
_SIZE, _TITLE_SIZE, _LINE = 11, 13, 15
_TICKS = 6
_COLORS = ("#1f6fb4", "#c2410c", "#2f8f4e", "#7c3aed")
_NICE = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class Curve:
    """points: (x, y), which a line joins in this order. labels: of each point a tooltip. marks: of each a short text
    that stands beside it, and below the picture with its label. stairs: a line from the left on which between two
    points nothing is better than the one at less x, as on a frontier.
    """

    name: str
    points: tuple[tuple[float, float], ...]
    labels: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    stairs: bool = False


def picture(
    title: str,
    curves: Sequence[Curve],
    x_title: str,
    y_title: str,
    x_text: Callable[[float], str] = str,
    y_text: Callable[[float], str] = str,
) -> Drawing:
    """Both axes begin at zero; it is as high as its title and marks ask. Raises ValueError where there is no point."""
    points = [point for curve in curves for point in curve.points]
    if not points:
        raise ValueError("a picture needs at least one point")
    x_ticks, y_ticks = ticks(max(x for x, _ in points)), ticks(max(y for _, y in points))
    titles = wrapped(title, _WIDTH - 2 * _EDGE, _TITLE_SIZE)
    top = _TOP + len(titles) * (_LINE + 2)
    foot = top + _PLOT

    def place(x: float, y: float) -> Place:
        across = _LEFT + (_WIDTH - _LEFT - _RIGHT) * x / x_ticks[-1]
        return round(across, 1), round(foot - _PLOT * y / y_ticks[-1], 1)

    parts: list[Text | Line | Dot] = [
        Text(_WIDTH / 2, 20 + (_LINE + 2) * row, line, size=_TITLE_SIZE) for row, line in enumerate(titles)
    ]
    parts.append(Text((_LEFT + _WIDTH - _RIGHT) / 2, foot + 38, x_title))
    parts.append(Text(16, (top + foot) / 2, y_title, turned=True))
    for tick in x_ticks:
        x, y = place(tick, 0)
        parts += [Line(((x, y), (x, top)), "#dddddd"), Text(x, y + 16, x_text(tick))]
    for tick in y_ticks:
        x, y = place(0, tick)
        parts += [Line(((x, y), (_WIDTH - _RIGHT, y)), "#dddddd"), Text(x - 6, y + 4, y_text(tick), "end")]
    below: list[tuple[str, str]] = []
    for index, curve in enumerate(curves):
        color = _COLORS[index % len(_COLORS)]
        placed = [place(*point) for point in curve.points]
        in_order = sorted(curve.points) if curve.stairs else curve.points
        corners = _corners([place(*point) for point in in_order], curve.stairs)
        parts.append(Line(tuple(corners), color, 1.5))
        labels = curve.labels or ("",) * len(placed)
        parts += [Dot(x, y, 3.5, color, label) for (x, y), label in zip(placed, labels, strict=True)]
        if curve.marks:
            parts += _marks(curve.marks, placed, corners, Box(_LEFT, top, _WIDTH - 2, foot))
            below += zip(curve.marks, curve.labels or curve.marks, strict=True)
        if len(curves) > 1:
            parts.append(Text(_WIDTH - _RIGHT - 8, top + 14 * (index + 1), curve.name, "end", color=color))
    listed, height = _listed(below, foot + 38 + _LINE) if below else ([], foot + 50.0)
    return Drawing(_WIDTH, height, (*parts, *listed))


def _marks(texts: Sequence[str], points: Sequence[Place], corners: Sequence[Place], inside: Box) -> list[Text | Line]:
    """Texts beside points, with lines to those that stand far from theirs."""
    parts: list[Text | Line] = []
    for mark, (x, y) in zip(marks(texts, points, [corners], inside, _SIZE), points, strict=True):
        if mark is None:
            continue  # the list below has it, and the tooltip
        box = mark.box
        middle, level = round((box.left + box.right) / 2, 1), (box.top + box.bottom) / 2
        if mark.led:
            end = box.bottom if box.bottom < y else box.top if box.top > y else level
            near = min(max(x, box.left), box.right)
            parts.append(Line(((x, y), (round(near, 1), round(end, 1))), "#999999"))
        parts.append(Text(middle, round(level + _SIZE * 0.35, 1), mark.text))
    return parts


def _listed(rows: Sequence[tuple[str, str]], at: float) -> tuple[list[Text], float]:
    """Marks with their labels as lines from a height on, and where these end."""
    column = _EDGE + max(width_of(mark, _SIZE) for mark, _ in rows)
    parts = []
    for mark, label in rows:
        at += 4
        for number, line in enumerate(wrapped(label, _WIDTH - column - 8 - _EDGE, _SIZE)):
            at += _LINE
            if not number:
                parts.append(Text(round(column, 1), at, mark, "end"))
            parts.append(Text(round(column + 8, 1), at, line, "start"))
    return parts, at + _EDGE


def ticks(largest: float) -> list[float]:
    """Round numbers from 0 to at least the largest, about six."""
    if largest <= 0:
        return [0.0, 1.0]
    rough = largest / (_TICKS - 1)
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * nice for nice in _NICE if unit * nice >= rough * (1 - 1e-9))
    return [step * index for index in range(math.ceil(largest / step - 1e-9) + 1)]


def _corners(points: Sequence[Place], stairs: bool) -> list[Place]:
    corners = list(points[:1])
    for x, y in points[1:]:
        corners += [(x, corners[-1][1]), (x, y)] if stairs else [(x, y)]
    return corners
