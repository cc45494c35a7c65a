"""Curves as SVG, written by hand so that a picture needs no library."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

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


def svg(
    title: str,
    curves: Sequence[Curve],
    x_title: str,
    y_title: str,
    x_text: Callable[[float], str] = str,
    y_text: Callable[[float], str] = str,
) -> str:
    """A picture with both axes from zero, as high as its title and marks ask. Raises ValueError where there is no
    point.
    """
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

    parts = [_text(_WIDTH / 2, 20 + (_LINE + 2) * row, line, size=_TITLE_SIZE) for row, line in enumerate(titles)]
    parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, foot + 38, x_title))
    middle = (top + foot) / 2
    parts.append(f'<g transform="rotate(-90 16 {middle})">{_text(16, middle, y_title)}</g>')
    for tick in x_ticks:
        x, y = place(tick, 0)
        parts += [_line(x, y, x, top, "#dddddd"), _text(x, y + 16, x_text(tick))]
    for tick in y_ticks:
        x, y = place(0, tick)
        parts += [_line(x, y, _WIDTH - _RIGHT, y, "#dddddd"), _text(x - 6, y + 4, y_text(tick), "end")]
    below: list[tuple[str, str]] = []
    for index, curve in enumerate(curves):
        color = _COLORS[index % len(_COLORS)]
        placed = [place(*point) for point in curve.points]
        in_order = sorted(curve.points) if curve.stairs else curve.points
        corners = _corners([place(*point) for point in in_order], curve.stairs)
        path = " ".join(f"{'L' if number else 'M'}{x} {y}" for number, (x, y) in enumerate(corners))
        parts.append(f'<path d="{path}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        for (x, y), label in zip(placed, curve.labels or ("",) * len(placed), strict=True):
            tooltip = f"<title>{escape(label)}</title>" if label else ""
            parts.append(f'<circle cx="{x}" cy="{y}" r="3.5" fill="{color}">{tooltip}</circle>')
        if curve.marks:
            parts += _marks(curve.marks, placed, corners, Box(_LEFT, top, _WIDTH - 2, foot))
            below += zip(curve.marks, curve.labels or curve.marks, strict=True)
        if len(curves) > 1:
            parts.append(_text(_WIDTH - _RIGHT - 8, top + 14 * (index + 1), curve.name, "end", color=color))
    listed, height = _listed(below, foot + 38 + _LINE) if below else ([], foot + 50.0)
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:g}" width="{_WIDTH}" '
        f'height="{height:g}" font-family="sans-serif" font-size="{_SIZE}">',
        f'<rect width="{_WIDTH}" height="{height:g}" fill="white"/>',
    ]
    return "\n".join([*head, *parts, *listed, "</svg>"]) + "\n"


def _marks(texts: Sequence[str], points: Sequence[Place], corners: Sequence[Place], inside: Box) -> list[str]:
    """Texts beside points, with lines to those that stand far from theirs."""
    parts = []
    for mark, (x, y) in zip(marks(texts, points, [corners], inside, _SIZE), points, strict=True):
        if mark is None:
            continue  # the list below has it, and the tooltip
        box = mark.box
        middle, level = round((box.left + box.right) / 2, 1), (box.top + box.bottom) / 2
        if mark.led:
            end = box.bottom if box.bottom < y else box.top if box.top > y else level
            near = min(max(x, box.left), box.right)
            parts.append(_line(x, y, round(near, 1), round(end, 1), "#999999"))
        parts.append(_text(middle, round(level + _SIZE * 0.35, 1), mark.text))
    return parts


def _listed(rows: Sequence[tuple[str, str]], at: float) -> tuple[list[str], float]:
    """Marks with their labels as lines from a height on, and where these end."""
    column = _EDGE + max(width_of(mark, _SIZE) for mark, _ in rows)
    parts = []
    for mark, label in rows:
        at += 4
        for number, line in enumerate(wrapped(label, _WIDTH - column - 8 - _EDGE, _SIZE)):
            at += _LINE
            if not number:
                parts.append(_text(round(column, 1), at, mark, "end"))
            parts.append(_text(round(column + 8, 1), at, line, "start"))
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


def _text(x: float, y: float, text: str, anchor: str = "middle", size: int = 11, color: str = "#222222") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}" fill="{color}">{escape(text)}</text>'


def _line(x: float, y: float, to_x: float, to_y: float, color: str) -> str:
    return f'<line x1="{x}" y1="{y}" x2="{to_x}" y2="{to_y}" stroke="{color}"/>'
