"""The folder of an emitted program: complete or absent, and no other files lost."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autopart.runtime.errors import PlanError
from autopart.runtime.files import named
from autopart.runtime.manifest import FILE_NAME

_UNFINISHED = ".emitting-"
_OWN = re.compile(
    rf"stage_\d+\.py|totals\.py|assumptions\.py|constants\.pt|plan\.(json|txt)|{FILE_NAME}|__pycache__|{_UNFINISHED}.*"
)


@contextmanager
def program_folder(directory: Path) -> Iterator[Path]:
    """A folder to write a program into, whose files are in ``directory`` once the block has ended well.

    A folder that is there stays the same one, as it may be a link, a mount, or where somebody works; without a manifest
    it holds no program, so that comes last. Raises PlanError when something other than a program is there, OSError that
    names the directory.
    """
    check_program_folder(directory)
    there = directory.is_dir()
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=directory if there else directory.parent))
    except OSError as error:  # whose own name is that of a folder that nobody knows
        raise OSError(error.errno, error.strerror, str(directory)) from error
    try:
        with named(directory):
            yield temporary
        temporary.chmod(0o755)
        if there:
            _replace(directory, temporary)
        else:
            os.replace(temporary, directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_program_folder(directory: Path) -> None:
    """Raises PlanError when something other than a program is there."""
    if directory.exists() and not directory.is_dir():
        raise PlanError(f"{directory} is no folder; choose an empty or new folder for the emitted program")
    others = _others(directory) if directory.exists() else []
    if others:
        raise PlanError(
            f"{directory} holds other files ({', '.join(others[:3])}{', …' if len(others) > 3 else ''}); "
            "choose an empty or new folder for the emitted program"
        )


def _others(directory: Path) -> list[str]:
    """What is in a folder and in no program's."""
    names = sorted(path.name for path in directory.iterdir())
    return [name for name in names if not _OWN.fullmatch(name) or (name == FILE_NAME and not _is_ours(directory))]


def _is_ours(directory: Path) -> bool:
    """Whether the manifest is a program's: many things have a file of that name."""
    try:
        data = json.loads((directory / FILE_NAME).read_text())
    except (OSError, ValueError):
        return False
    return isinstance(data, dict) and {"version", "fingerprint", "stages"} <= data.keys()


def _replace(directory: Path, new: Path) -> None:
    """Puts the files of ``new`` in place of all that are in the directory, but what others are writing."""
    (directory / FILE_NAME).unlink(missing_ok=True)
    for path in directory.iterdir():
        if path.name.startswith(_UNFINISHED):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    for path in sorted(new.iterdir(), key=lambda item: item.name == FILE_NAME):
        os.replace(path, directory / path.name)
