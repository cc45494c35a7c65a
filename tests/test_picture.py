"""Pictures of points: what is drawn, and that every text can be read."""

from __future__ import annotations

import io
import itertools
import re
from xml.etree import ElementTree

import pytest
from PIL import Image, ImageColor

from autopart.report.drawing import Dot, Text
from autopart.report.picture import Curve, picture, ticks
from autopart.report.point_marks import Box, marks, width_of, wrapped

LONG = "hf:llama?" + "&".join(f"a_key_of_its_configuration_{number}=4096" for number in range(9))


def test_picture() -> None:
    text = picture("a < b", [Curve("c", ((1.0, 4.0), (3.0, 2.0)), ("one", "two & three"), stairs=True)], "x", "y").svg()
    root = ElementTree.fromstring(text)
    names = [item.tag.rpartition("}")[2] for item in root.iter()]
    assert names.count("circle") == 2 and names.count("title") == 2
    (path,) = [item.get("d") or "" for item in root.iter() if item.tag.endswith("path")]
    (x, y), corner, (to_x, to_y) = [tuple(map(float, pair.split())) for pair in re.split("[ML]", path)[1:]]
    assert x < to_x and y < to_y and corner == (to_x, y)
    assert "a < b" in [item.text for item in root.iter() if item.text]
    with pytest.raises(ValueError, match="point"):
        picture("", [], "x", "y")
    for largest in (0.013, 1.0, 7.3, 1e9):
        found = ticks(largest)
        assert found[0] == 0 and found[-2] < largest <= found[-1] * (1 + 1e-9) and 4 <= len(found) <= 8
    assert ticks(0.0) == [0.0, 1.0]


def test_a_png_shows_the_same() -> None:
    drawn = picture("", [Curve("c", ((1.0, 4.0), (3.0, 2.0)), stairs=True)], "x", "an axis")
    with Image.open(io.BytesIO(drawn.png())) as image:
        pixels = image.convert("RGB").load()
        assert image.format == "PNG" and image.size == (2 * drawn.width, 2 * drawn.height)
        assert pixels is not None
    for part in drawn.parts:
        if isinstance(part, Dot):
            assert pixels[round(2 * part.x), round(2 * part.y)] == ImageColor.getrgb(part.color)
        elif isinstance(part, Text) and part.text:
            across, down = (8, 60) if part.turned else (60, 8)  # pixels around the place in which it has ink
            x, y = round(2 * part.x), round(2 * part.y)
            for begin, end in ((y - down, y), (y, y + down)) if part.turned else ((y - down, y),):
                near = [pixels[i, j] for i in range(x - across, x + across) for j in range(begin, end)]
                assert any(sum(color) < 300 for color in near if isinstance(color, tuple)), part.text


def test_lines_join_points_in_their_order() -> None:
    text = picture("", [Curve("c", ((1.0, 4.0), (3.0, 3.0), (2.0, 1.0)))], "x", "y").svg()
    (path,) = [item.get("d") or "" for item in ElementTree.fromstring(text).iter() if item.tag.endswith("path")]
    first, second, third = [float(pair.split()[0]) for pair in re.split("[ML]", path)[1:]]
    assert first < third < second


def test_texts_stay_on_the_picture() -> None:
    layout = "pp 8, dp x tp by stage " + ", ".join(["2x4"] * 20) + ", 64 microbatches, zb-h1"
    text = picture(
        f"{LONG}: time", [Curve("c", ((1.0, 4.0), (3.0, 2.0)), (layout, "two"), ("8 devices", "2"))], "x", "y"
    ).svg()
    root = ElementTree.fromstring(text)
    width, height = float(root.get("width") or 0), float(root.get("height") or 0)
    texts = [item for item in root.iter() if item.tag.endswith("text")]
    for item in texts:
        anchor, wide = item.get("text-anchor"), width_of(item.text or "", float(item.get("font-size") or 0))
        left = float(item.get("x") or 0) - {"start": 0.0, "middle": wide / 2, "end": wide}[str(anchor)]
        assert (left >= 0 and left + wide <= width) or item.text == "y", item.text  # that one is turned
        assert 0 < float(item.get("y") or 0) < height
    whole = "".join(item.text or "" for item in texts)
    assert LONG in whole and layout.replace(" ", "") in whole.replace(" ", "")
    assert whole.count("8 devices") == 2, "beside its point, and in the list"


@pytest.mark.parametrize("texts", [("1", "2", "4", "8"), ("1 device", "2 devices", "4 devices", "1024 devices")])
def test_marks_hide_nothing(texts: tuple[str, ...]) -> None:
    inside = Box(80, 40, 638, 360)
    apart = [(100.0, 60.0), (120.0, 200.0), (300.0, 300.0), (600.0, 350.0)]
    near = [(616.0, 340.0), (614.0, 341.0), (616.0, 345.0), (612.0, 350.0)]
    for points in (apart, near, near[:1] * 4):
        found = [mark for mark in marks(texts, points, [points], inside, 11) if mark is not None]
        assert [mark.text for mark in found] == list(texts)
        boxes = [mark.box for mark in found]
        assert all(inside.holds(box) for box in boxes)
        assert not any(one.meets(other) for one, other in itertools.combinations(boxes, 2))
        assert not any(box.meets(Box(x - 3, y - 3, x + 3, y + 3)) for box in boxes for x, y in points)


def test_a_mark_without_a_place_is_left_out() -> None:
    assert marks(["a mark"], [(5.0, 5.0)], [], Box(0, 0, 10, 10), 11) == [None]


def test_wrapped() -> None:
    lines = wrapped(LONG, 300, 10)
    assert "".join(lines) == LONG and all(width_of(line, 10) <= 300 for line in lines)
    assert wrapped("a b", 300, 10) == ["a b"] and wrapped("", 300, 10) == [""]
    assert [len(line) for line in wrapped("x" * 100, 248, 10)] == [40, 40, 20]
