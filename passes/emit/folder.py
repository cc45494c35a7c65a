"""The folder of an emitted program: complete or absent, and no other files lost."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autopart.runtime.errors import PlanError
from autopart.runtime.files import named
from autopart.runtime.manifest import FILE_NAME


@contextmanager
def program_folder(directory: Path) -> Iterator[Path]:
    """A folder to write a program into, which takes the place of ``directory`` once the block has ended well.

    Raises PlanError when something other than a program is there.
    """
    if directory.exists() and (not directory.is_dir() or _holds_others(directory)):
        what = "holds other files" if directory.is_dir() else "is no folder"
        raise PlanError(f"{directory} {what}; choose an empty or new folder for the emitted program")
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        with named(directory):
            yield temporary
        temporary.chmod(0o755)
        if directory.exists():
            shutil.rmtree(directory)
        os.replace(temporary, directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _holds_others(directory: Path) -> bool:
    return not (directory / FILE_NAME).exists() and any(directory.iterdir())
