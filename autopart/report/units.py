"""Numbers for people: a few digits and a unit."""

from __future__ import annotations

import math

_BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_COUNTS = (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3))
_FLOPS = (("T", 1e12), ("G", 1e9), ("M", 1e6))
_SECONDS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))
_ONE = 0.9995
"""Of a unit, what is one of it in three digits."""


def format_bytes(number: float) -> str:
    """``1536`` as ``1.5 KiB``."""
    size, unit = float(number), 0
    while abs(size) >= 1023.5 and unit < len(_BYTES) - 1:
        size, unit = size / 1024, unit + 1
    return f"{int(number)} B" if unit == 0 else f"{_digits(size)} {_BYTES[unit]}"


def format_enough(number: float) -> str:
    """Bytes of which there are not fewer than ``number``: ``2.01 GiB`` for one byte more than 2 GiB."""
    size, unit = math.ceil(number), 0
    while size >= 1024 ** (unit + 1) and unit < len(_BYTES) - 1:
        unit += 1
    whole = 1024**unit
    steps = next(steps for steps in (100, 10, 1) if steps == 1 or size < 1000 * whole // steps)
    size = -(-size * steps // whole)
    return f"{size / steps:.3f}".rstrip("0").rstrip(".") + f" {_BYTES[unit]}"


def format_count(number: float) -> str:
    """``124439808`` as ``124M``; B is 10^9, as parameters are counted."""
    for suffix, size in _COUNTS:
        if abs(number) >= _ONE * size:
            return f"{_digits(number / size)}{suffix}"
    return _digits(number)


def format_flops(number: float) -> str:
    """FLOP/s: ``55.2e9`` as ``55.2 GFLOP/s``."""
    unit, size = next(((unit, size) for unit, size in _FLOPS if number >= _ONE * size), _FLOPS[-1])
    return f"{_digits(number / size)} {unit}FLOP/s"


def counted(number: int, thing: str) -> str:
    """``4 microbatches``, ``1 microbatch``; thing: one of them."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}{'es' if thing.endswith(('ch', 's')) else 's'}"


def format_seconds(number: float) -> str:
    """``0.0123`` as ``12.3 ms``; minutes and hours from 100 s on."""
    if abs(number) >= 99.95:
        minutes, seconds = divmod(round(number), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s"
    for unit, size in _SECONDS:
        if abs(number) >= _ONE * size:
            return f"{_digits(number / size)} {unit}"
    return "0 s" if number == 0 else f"{number:.1e} s"


def format_apart(first: float, second: float) -> tuple[str, str]:
    """Seconds beside each other, with as many digits as it takes to tell them apart: ``5.547 ms`` and ``5.551 ms``."""
    texts = format_seconds(first), format_seconds(second)
    largest = max(abs(first), abs(second))
    if texts[0] != texts[1] or first == second or not largest:
        return texts
    unit, size = next(((unit, size) for unit, size in _SECONDS if largest >= size), _SECONDS[-1])
    numbers = first / size, second / size
    for digits in range(4, 16):
        shown = [f"{number:#.{digits}g}".rstrip(".") for number in numbers]
        if shown[0] != shown[1]:
            break
    return f"{shown[0]} {unit}", f"{shown[1]} {unit}"


def format_share(number: float) -> str:
    """``0.0123`` as ``1.2%``."""
    return f"{number * 100:.1f}%"


def _digits(number: float) -> str:
    """Three digits, but no exponent."""
    return f"{number:.0f}" if abs(number) >= 100 else f"{number:.3g}"
