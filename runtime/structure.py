"""Takes nested inputs and outputs apart into named leaves, and puts them together again.

A leaf's name is the path to it: keys, fields and positions joined by dots (``logits``, ``batch.pixels``, ``pairs.0``);
a value that is a leaf itself is called ``output``. The structure is plain JSON, so that it can be stored in a manifest
and rebuilt on machines that never saw the original.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections import namedtuple
from collections.abc import Mapping
from typing import Any

from autopart.runtime.errors import PlanError

ROOT = "output"
Structure = dict[str, Any]


def flatten(value: Any, root: str = "") -> tuple[dict[str, Any], Structure]:
    """The leaves by name, in order, and the structure without them.

    Containers are dicts and other mappings, lists, tuples, namedtuples and dataclasses; None is part of the structure;
    everything else is a leaf. ``root`` is a prefix for all names.
    """
    leaves: dict[str, Any] = {}
    return leaves, _flatten(value, root, leaves)


def _flatten(value: Any, path: str, leaves: dict[str, Any]) -> Structure:
    if value is None:
        return {"type": "none"}
    kind = type(value)
    if isinstance(value, Mapping):
        # Subclasses of dict rebuild through their class; transformers' ModelOutput is one, and leaves out None fields.
        tag: Structure = {"type": "dict"} if kind is dict else {"type": "mapping", "class": _class_name(kind)}
        keys, items = list(value.keys()), list(value.values())
    elif isinstance(value, tuple) and hasattr(kind, "_fields"):
        tag = {"type": "namedtuple", "class": _class_name(kind)}
        keys, items = list(kind._fields), list(value)
    elif isinstance(value, (list, tuple)):
        tag = {"type": "list" if isinstance(value, list) else "tuple"}
        keys, items = list(range(len(value))), list(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        tag = {"type": "dataclass", "class": _class_name(kind)}
        keys = [field.name for field in dataclasses.fields(value) if field.init]
        items = [getattr(value, key) for key in keys]
    else:
        name = path or ROOT
        assert name not in leaves, f"two leaves are called {name!r}"
        leaves[name] = value
        return {"type": "leaf", "name": name}
    prefix = f"{path}." if path else ""
    tag["items"] = [_flatten(item, f"{prefix}{key}", leaves) for key, item in zip(keys, items, strict=True)]
    if tag["type"] not in ("list", "tuple"):
        tag["keys"] = keys
    return tag


def rebuild(structure: Structure, leaves: Mapping[str, Any]) -> Any:
    """The value with this structure; leaves that are not given are None.

    Raises PlanError when a class of the structure cannot be imported.
    """
    kind = structure["type"]
    if kind == "none":
        return None
    if kind == "leaf":
        return leaves.get(structure["name"])
    items = [rebuild(item, leaves) for item in structure["items"]]
    if kind == "list":
        return items
    if kind == "tuple":
        return tuple(items)
    members = dict(zip(structure["keys"], items, strict=True))
    if kind == "dict":
        return members
    if kind == "namedtuple":
        return _named_tuple(structure["class"], tuple(structure["keys"]))(*items)
    made = _find_class(structure["class"])
    if kind == "dataclass" or dataclasses.is_dataclass(made):
        return made(**members)
    return made(members)


def _class_name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _named_tuple(name: str, fields: tuple[str, ...]) -> Any:
    """The class; one that is made where a model returns, or is kept under another name, as its like."""
    try:
        found = _find_class(name)
    except PlanError:
        found = None
    return found if getattr(found, "_fields", None) == fields else _like(name.split(".")[-1].split(":")[-1], fields)


@functools.cache
def _like(name: str, fields: tuple[str, ...]) -> Any:
    return namedtuple(name, fields)


def _find_class(name: str) -> Any:
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise PlanError(
            f"the outputs' class {name} cannot be imported here ({error}); define it at the top level of an importable "
            "module, or return a dict or a tuple from the model"
        ) from error
    return found
