"""The decisions that plans take differently, as rows of a table."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autopart.report.table import format_collectives, format_devices, format_layers
from autopart.report.units import format_bytes

if TYPE_CHECKING:
    from autopart.explain import Difference

_WIDTH = 48
_PIECES = re.compile(r"[^ &,]*[ &,]*")
_BY_OP = re.compile(r"(stage \d+ )?(strategies|storage)( of .*)?")
_TELLING = (
    ":linear",
    ":addmm",
    ":matmul",
    ":mm",
    ":bmm",
    ":scaled_dot_product_attention",
    ":embedding",
    ":convolution",
)


def decision_rows(found: Sequence[Difference], most: int) -> tuple[list[tuple[str, ...]], int]:
    """A row for each difference: its name, and what each plan does; and how many strategies and storages are left out.

    most: rows on strategies and storage by op, of which there can be many: those of matrix products say most.
    """
    cells = [cell for item in found for cell in _cells(item.what, item.values)]
    by_op = [cell for cell in cells if _BY_OP.fullmatch(cell[0])]
    shown = set(sorted(by_op, key=lambda cell: not cell[0].endswith(_TELLING))[:most])
    left = set(by_op) - shown
    return [(what, *map(_folded, texts)) for what, *texts in cells if (what, *texts) not in left], len(left)


def _cells(what: str, values: Sequence[Any]) -> list[tuple[str, ...]]:
    """The rows of one difference: tables by op have one for each entry, and what is nothing in both plans has none."""
    name = what.split()[-1] if what.startswith("stage ") else what
    if name in ("strategies", "storage"):
        tables = [value or {} for value in values]
        keys = dict.fromkeys(key for table in tables for key in table)
        rows = [(f"{what} of {key}", [table.get(key) for table in tables]) for key in keys]
        return [cell for row, entries in rows for cell in _cells(row, entries)]
    texts = [_text(name, value) for value in values]
    if len(set(texts)) == 1 and name.endswith(("collectives", "bytes")):
        texts = [_exact(value) for value in values]
    return [(what, *texts)] if len(set(texts)) > 1 else []


def _text(name: str, value: Any) -> str:
    """A decision as the table of stages writes it."""
    if value is None or value in ([], {}):
        return "-"
    if name.endswith("collectives"):
        return format_collectives(value)
    if name.endswith("bytes"):
        return format_bytes(value)
    if name == "mesh":
        return " x ".join(f"{axis} {size}" for axis, size in value)
    if name == "blocks":
        return f"{value[0]}-{value[1] - 1}"
    if name in ("order", "devices"):
        return format_devices(value)
    if name == "shares":
        return ":".join(map(str, value))
    if name == "recompute" and not isinstance(value, str):
        return format_layers(value)
    if name == "together":
        return ", ".join(" and ".join(group) for group in value)
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _exact(value: Any) -> str:
    """Bytes to the last one, where rounded they look alike."""
    if isinstance(value, Mapping):
        return ", ".join(f"{count['calls']} {kind} {count['bytes']:,} B" for kind, count in value.items()) or "-"
    return "-" if value is None else f"{value:,} B"


def _folded(text: str) -> str:
    """Long texts on several lines, with nothing left out."""
    lines = [""]
    for piece in _PIECES.findall(text):
        if lines[-1] and len(lines[-1] + piece) > _WIDTH:
            lines.append("")
        lines[-1] += piece
    return "\n".join(line.rstrip() for line in lines)
