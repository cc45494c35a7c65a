"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Writes a file, text in UTF-8; a reader finds what was there or the whole of the new, never a part.

    A link's target is written. What is no file, such as /dev/stdout, is written to as it is. Raises OSError that names
    the path.
    """
    given, data = Path(path), content.encode() if isinstance(content, str) else content
    if str(path).endswith(os.sep):  # which Path leaves out
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if given.exists() and not given.is_file():
        with named(path):
            given.write_bytes(data)
        return
    target = given.resolve()
    temporary = target.with_name(f".{target.name[:200]}.{os.getpid()}")
    try:
        with named(path, but=(temporary,)):
            temporary.write_bytes(data)
            os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def named(path: str | Path, but: tuple[Path, ...] = ()) -> Iterator[None]:
    """Inside, an error of the system that names no file, such as that of a full disk, is raised with this path.

    but: temporary files, whose names nobody knows; this path is named instead.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename not in (None, *but, *map(str, but)):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
