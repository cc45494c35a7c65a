"""What a picture is drawn of, and its two files: SVG, and PNG by Pillow."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from autopart.report.point_marks import Place

if TYPE_CHECKING:
    from PIL.Image import Image

_SCALE, _FINER = 2, 3
"""Pixels of a PNG for one of the picture, and how much finer lines are drawn before they are smoothed."""
_ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}


@dataclass(frozen=True, slots=True)
class Text:
    """anchor: "start", "middle" or "end" of the baseline, which is what the place is of. turned: upwards around it."""

    x: float
    y: float
    text: str
    anchor: str = "middle"
    size: int = 11
    color: str = "#222222"
    turned: bool = False

    def __post_init__(self) -> None:
        if self.anchor not in _ANCHORS:
            raise ValueError(f"an anchor is one of {', '.join(_ANCHORS)}, not {self.anchor!r}")

    def svg(self) -> str:
        turn = f' transform="rotate(-90 {self.x} {self.y})"' if self.turned else ""
        return (
            f'<text x="{self.x}" y="{self.y}" text-anchor="{self.anchor}" font-size="{self.size}" '
            f'fill="{self.color}"{turn}>{escape(self.text)}</text>'
        )


@dataclass(frozen=True, slots=True)
class Line:
    """Through places, with corners between them."""

    places: tuple[Place, ...]
    color: str
    width: float = 1.0

    def svg(self) -> str:
        if len(self.places) == 2:
            (x, y), (to_x, to_y) = self.places
            where = f'x1="{x}" y1="{y}" x2="{to_x}" y2="{to_y}"'
            return f'<line {where} stroke="{self.color}" stroke-width="{self.width:g}"/>'
        path = " ".join(f"{'L' if number else 'M'}{x} {y}" for number, (x, y) in enumerate(self.places))
        return f'<path d="{path}" fill="none" stroke="{self.color}" stroke-width="{self.width:g}"/>'


@dataclass(frozen=True, slots=True)
class Dot:
    """tooltip: shown where a file can; ``""``: none."""

    x: float
    y: float
    radius: float
    color: str
    tooltip: str = ""

    def svg(self) -> str:
        inside = f"<title>{escape(self.tooltip)}</title>" if self.tooltip else ""
        return f'<circle cx="{self.x}" cy="{self.y}" r="{self.radius}" fill="{self.color}">{inside}</circle>'


@dataclass(frozen=True, slots=True)
class Drawing:
    """Parts on white, later ones over those before. width, height: pixels; y downwards."""

    width: float
    height: float
    parts: tuple[Text | Line | Dot, ...]

    def svg(self) -> str:
        head = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}" '
            f'width="{self.width:g}" height="{self.height:g}" font-family="sans-serif">',
            f'<rect width="{self.width:g}" height="{self.height:g}" fill="white"/>',
        ]
        return "\n".join([*head, *(part.svg() for part in self.parts), "</svg>"]) + "\n"

    def png(self) -> bytes:
        """Twice as many pixels each way, without tooltips."""
        from PIL import Image, ImageDraw

        fine = _SCALE * _FINER
        image = Image.new("RGB", (round(self.width * fine), round(self.height * fine)), "white")
        draw = ImageDraw.Draw(image)
        for part in self.parts:
            if isinstance(part, Line):
                places = [(x * fine, y * fine) for x, y in part.places]
                draw.line(places, part.color, round(part.width * fine), "curve")
            elif isinstance(part, Dot):
                draw.circle((part.x * fine, part.y * fine), part.radius * fine, part.color)
        image = image.resize((image.width // _FINER, image.height // _FINER), Image.Resampling.BOX)
        for part in self.parts:
            if isinstance(part, Text):
                _write(image, part)
        file = io.BytesIO()
        image.save(file, "PNG", optimize=True)
        return file.getvalue()


def _write(image: Image, text: Text) -> None:
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(text.size * _SCALE)
    at, anchor = (text.x * _SCALE, text.y * _SCALE), _ANCHORS[text.anchor]
    if not text.turned:
        ImageDraw.Draw(image).text(at, text.text, text.color, font, anchor)
        return
    side = 2 * math.ceil(font.getlength(text.text) + text.size * _SCALE)  # with room for it whatever its anchor
    ink = Image.new("L", (side, side))
    ImageDraw.Draw(ink).text((side // 2, side // 2), text.text, 255, font, anchor)
    corner = round(at[0]) - side // 2, round(at[1]) - side // 2
    image.paste(text.color, corner, ink.transpose(Image.Transpose.ROTATE_90))
