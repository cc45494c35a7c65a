"""A plan's JSON: dataclasses from objects, each field's type checked, and text that people can read and edit."""

from __future__ import annotations

import json
import math
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, TypeVar

from autopart.runtime.errors import PlanError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Built = TypeVar("Built", bound="DataclassInstance")


def build(kind: type[Built], data: object, where: str) -> Built:
    """A dataclass from a JSON object, each field's type checked."""
    if not isinstance(data, dict):
        raise PlanError(f"{where}: expected an object, found {_shown(data)}")
    known = {item.name: item for item in fields(kind)}
    for key in data:
        if key not in known:
            raise PlanError(f"{where}: {key}: unknown field; remove it (known: {', '.join(known)})")
    values = {key: _convert(str(known[key].type), value, f"{where}: {key}") for key, value in data.items()}
    for name, item in known.items():
        if name not in values and item.default is MISSING and item.default_factory is MISSING:
            raise PlanError(f"{where}: {name}: missing")
    try:
        return kind(**values)
    except PlanError as error:
        raise PlanError(f"{where}: {error}") from error


def _convert(kind: str, value: Any, where: str) -> Any:
    """A JSON value as the annotated type; ``kind`` is the annotation's text."""
    expected = _CHECKS[kind]
    if not expected[1](value):
        raise PlanError(f"{where}: expected {expected[0]}, found {_shown(value)}")
    if kind == "float":
        return float(value)
    if kind == "Mesh":
        return tuple((name, size) for name, size in value)
    if kind == "Transfers":
        return tuple((a, b, float(there), None if back is None else float(back)) for a, b, there, back in value)
    if kind == "tuple[tuple[str, ...], ...]":
        return tuple(map(tuple, value))
    return tuple(value) if kind.startswith("tuple") else value


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _is_number(value: object) -> bool:
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))


def _is_rows(value: object) -> bool:
    """Rows of a report: with a candidate's seconds, and words."""
    return isinstance(value, list) and all(
        isinstance(row, dict)
        and all(_is_number(cell) or cell is None if key == "seconds" else _is_cell(cell) for key, cell in row.items())
        for row in value
    )


def _is_cell(value: object) -> bool:
    return isinstance(value, str | bool) or value is None or _is_number(value)


def _is_mesh(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(axis, list) and len(axis) == 2 and isinstance(axis[0], str) and _is_int(axis[1]) for axis in value
    )


def _is_transfers(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, list)
        and len(item) == 4
        and all(map(_is_int, item[:2]))
        and _is_number(item[2])
        and (item[3] is None or _is_number(item[3]))
        for item in value
    )


def _is_strings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_collectives(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(count, dict) and set(count) == {"calls", "bytes"} and all(map(_is_int, count.values()))
        for count in value.values()
    )


# Annotation -> what to tell the user, and the check of the JSON value.
_CHECKS: dict[str, tuple[str, Any]] = {
    "str": ("a string", lambda value: isinstance(value, str)),
    "int": ("a whole number", _is_int),
    "float": ("a number", _is_number),
    "Mesh": ('a list of [axis name, size], such as [["dp", 2], ["tp", 4]]', _is_mesh),
    "Transfers": ("a list of [source stage, target stage, seconds, seconds back or null]", _is_transfers),
    "tuple[int, ...]": ("a list of whole numbers", lambda value: isinstance(value, list) and all(map(_is_int, value))),
    "tuple[int, int]": (
        "[first, end]",
        lambda value: isinstance(value, list) and len(value) == 2 and all(map(_is_int, value)),
    ),
    "tuple[str, ...]": ("a list of strings", _is_strings),
    "tuple[tuple[str, ...], ...]": (
        'a list of groups of strings, such as [["encoder.*", "embed"]]',
        lambda value: isinstance(value, list) and all(map(_is_strings, value)),
    ),
    "tuple[StagePlan, ...]": ("stages", lambda value: isinstance(value, tuple)),
    "tuple[Mapping[str, Any], ...]": (
        'a list of rows such as {"config": "pp=2 dp=1 tp=1", "status": "pruned", "seconds": 0.5}',
        _is_rows,
    ),
    "Mapping[str, str]": (
        "an object of strings",
        lambda value: isinstance(value, dict) and all(isinstance(item, str) for item in value.values()),
    ),
    "Mapping[str, int]": (
        "an object of whole numbers",
        lambda value: isinstance(value, dict) and all(map(_is_int, value.values())),
    ),
    "Mapping[str, int | str]": (
        'an object of whole numbers and words, such as {"pp": 2, "schedule": "auto"}',
        lambda value: (
            isinstance(value, dict) and all(_is_int(item) or isinstance(item, str) for item in value.values())
        ),
    ),
    "Mapping[str, float]": (
        "an object of numbers",
        lambda value: isinstance(value, dict) and all(map(_is_number, value.values())),
    ),
    "Mapping[str, Mapping[str, Mapping[str, int]]]": (
        'an object such as {"dp": {"all_reduce": {"calls": 4, "bytes": 64}}}',
        lambda value: isinstance(value, dict) and all(map(_is_collectives, value.values())),
    ),
    "Mapping[str, Mapping[str, int]]": ('an object such as {"all_reduce": {"calls": 4, "bytes": 64}}', _is_collectives),
}


def pretty(value: Any, indent: int = 0, width: int = 110) -> str:
    """JSON with whatever fits a line on one line."""
    flat = json.dumps(value)
    if len(flat) + indent <= width and not (isinstance(value, dict) and "stages" in value):
        return flat
    inner = " " * (indent + 2)
    if isinstance(value, dict):
        items = [f"{inner}{json.dumps(key)}: {pretty(item, indent + 2)}" for key, item in value.items()]
        return "{\n" + ",\n".join(items) + "\n" + " " * indent + "}"
    if isinstance(value, list | tuple):
        return "[\n" + ",\n".join(f"{inner}{pretty(item, indent + 2)}" for item in value) + "\n" + " " * indent + "]"
    return flat
