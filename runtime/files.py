"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: str | Path, text: str) -> None:
    """Writes a file in UTF-8; a reader finds the old text or the whole new one, never a part.

    A link's target is written. What is no file, such as /dev/stdout, is written to as it is. Raises OSError that names
    the path.
    """
    given = Path(path)
    if given.exists() and not given.is_file():
        given.write_text(text, encoding="utf-8")
        return
    target = given.resolve()
    temporary = target.with_name(f".{target.name[:200]}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, target)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)
