"""The folder of what is worth keeping between runs: calibrations, captured programs, solved problems, plans.

It is ``AUTOPART_CACHE``; without that ``$XDG_CACHE_HOME/autopart``, else ``~/.cache/autopart``. ``AUTOPART_CACHE=off``
keeps nothing and reads nothing. Files are written whole or not at all, and what cannot be read counts as absent.
Programs and problems are answers, which computing them again would give too, and which :func:`used` turns off alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

VARIABLE = "AUTOPART_CACHE"
OFF = "off"
_USED: ContextVar[bool] = ContextVar("answers are kept", default=True)


def folder(name: str) -> Path | None:
    """The part of the cache for one purpose, whether it exists or not; None where the cache is off."""
    wanted = os.environ.get(VARIABLE, "")
    if wanted.lower() == OFF:
        return None
    if wanted:
        return Path(wanted) / name
    home = os.environ.get("XDG_CACHE_HOME", "")
    if home:
        return Path(home) / "autopart" / name
    try:
        return Path.home() / ".cache" / "autopart" / name
    except RuntimeError:  # a user without a home
        return None


def answers(name: str) -> Path | None:
    """The folder of answers of one kind; None where the cache is off, or answers are not used."""
    return folder(name) if _USED.get() else None


@contextlib.contextmanager
def used(whether: bool) -> Iterator[None]:
    """Inside, answers are kept and looked up, or not."""
    token = _USED.set(whether)
    try:
        yield
    finally:
        _USED.reset(token)


def write(path: Path, text: str) -> None:
    """Writes a file and its folders; a reader finds the old text or the whole new one. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def read_object(path: Path) -> dict[str, Any] | None:
    """A file's JSON object; None where there is no file, or something else is in it."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):  # the last where lists lie in lists by the thousands
        return None
    return found if isinstance(found, dict) else None
