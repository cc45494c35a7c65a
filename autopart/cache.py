"""The folder of what is worth keeping between runs: calibrations, captured programs, solved problems, plans.

It is ``AUTOPART_CACHE``; without that ``$XDG_CACHE_HOME/autopart``, else ``~/.cache/autopart``. ``AUTOPART_CACHE=off``
keeps nothing and reads nothing. Files are written whole or not at all, and what cannot be read counts as absent.
Programs, problems and plans are answers, which computing them again would give too, and which :func:`used` turns off
alone; each has a checksum, as an entry that a disk or a copy damaged may still be a program, and another one.
"""

from __future__ import annotations

import contextlib
import hashlib
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


def keep(path: Path, answer: dict[str, Any]) -> None:
    """Writes an answer with its checksum. Raises OSError."""
    write(path, signed(answer))


def kept(path: Path) -> dict[str, Any] | None:
    """An answer that :func:`keep` wrote; None where there is none, or something else is in the file."""
    try:
        text = path.read_text()
    except (OSError, ValueError):
        return None
    if text[:_HEAD] != _head(text[_HEAD:]):
        return None
    found: dict[str, Any] = json.loads(text)
    del found[_CHECKSUM]
    return found


def signed(answer: dict[str, Any]) -> str:
    """A JSON object of what the answer has, the checksum of the text that follows first."""
    rest = json.dumps(answer)[1:]
    return _head(rest) + rest


def _head(rest: str) -> str:
    return f'{{"{_CHECKSUM}": "{hashlib.sha256(rest.encode()).hexdigest()}", '


_CHECKSUM = "checksum"
_HEAD = len(_head(""))
