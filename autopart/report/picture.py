"""Curves as SVG, written by hand so that a picture needs no library."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT = 640, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 24, 40, 56
_TICKS = 6
_COLORS = ("#1f6fb4", "#c2410c", "#2f8f4e", "#7c3aed")
_NICE = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class Curve:
    """points: (x, y). labels: a tooltip for each point. stairs: between two points nothing is better than the one at
    less x, as on a frontier.
    """

    name: str
    points: tuple[tuple[float, float], ...]
    labels: tuple[str, ...] = ()
    stairs: bool = False


def svg(
    title: str,
    curves: Sequence[Curve],
    x_title: str,
    y_title: str,
    x_text: Callable[[float], str] = str,
    y_text: Callable[[float], str] = str,
) -> str:
    """A picture with both axes from zero. Raises ValueError where there is no point."""
    points = [point for curve in curves for point in curve.points]
    if not points:
        raise ValueError("a picture needs at least one point")
    x_ticks, y_ticks = ticks(max(x for x, _ in points)), ticks(max(y for _, y in points))

    def place(x: float, y: float) -> tuple[float, float]:
        across = _LEFT + (_WIDTH - _LEFT - _RIGHT) * x / x_ticks[-1]
        return round(across, 1), round(_HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * y / y_ticks[-1], 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _text(_WIDTH / 2, 20, title, size=13),
        _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 12, x_title),
        f'<g transform="rotate(-90 16 {_HEIGHT / 2})">{_text(16, _HEIGHT / 2, y_title)}</g>',
    ]
    for tick in x_ticks:
        x, y = place(tick, 0)
        parts += [_line(x, y, x, _TOP, "#dddddd"), _text(x, y + 16, x_text(tick))]
    for tick in y_ticks:
        x, y = place(0, tick)
        parts += [_line(x, y, _WIDTH - _RIGHT, y, "#dddddd"), _text(x - 6, y + 4, y_text(tick), "end")]
    for index, curve in enumerate(curves):
        color = _COLORS[index % len(_COLORS)]
        placed = [place(*point) for point in sorted(curve.points)]
        parts.append(f'<path d="{_path(placed, curve.stairs)}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        for number, point in enumerate(curve.points):
            x, y = place(*point)
            label = curve.labels[number] if curve.labels else ""
            tooltip = f"<title>{escape(label)}</title>" if label else ""
            parts.append(f'<circle cx="{x}" cy="{y}" r="3.5" fill="{color}">{tooltip}</circle>')
        if len(curves) > 1:
            parts.append(_text(_WIDTH - _RIGHT - 8, _TOP + 14 * (index + 1), curve.name, "end", color=color))
    return "\n".join([*parts, "</svg>"]) + "\n"


def ticks(largest: float) -> list[float]:
    """Round numbers from 0 to at least the largest, about six."""
    if largest <= 0:
        return [0.0, 1.0]
    rough = largest / (_TICKS - 1)
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * nice for nice in _NICE if unit * nice >= rough * (1 - 1e-9))
    return [step * index for index in range(math.ceil(largest / step - 1e-9) + 1)]


def _path(points: Sequence[tuple[float, float]], stairs: bool) -> str:
    (x, y), *others = points
    steps = [f"M{x} {y}"]
    for x, y in others:
        steps.append(f"H{x} V{y}" if stairs else f"L{x} {y}")
    return " ".join(steps)


def _text(x: float, y: float, text: str, anchor: str = "middle", size: int = 11, color: str = "#222222") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}" fill="{color}">{escape(text)}</text>'


def _line(x: float, y: float, to_x: float, to_y: float, color: str) -> str:
    return f'<line x1="{x}" y1="{y}" x2="{to_x}" y2="{to_y}" stroke="{color}"/>'
