"""What every kept answer follows from besides its question: autopart's sources, and what is installed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from autopart import passes, runtime


def sources() -> Iterator[str]:
    """Of all files of autopart: a working copy's version stands still while they change."""
    for folder in (Path(__file__).parent, *(Path(path) for package in (passes, runtime) for path in package.__path__)):
        for path in sorted(folder.rglob("*.py")):
            yield f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}"


def installed() -> list[str]:
    """Names and versions of what is installed, as folders beside the packages say; autopart's sources are known."""
    found = set()
    for folder in sys.path:
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            found |= {entry.name for entry in entries if entry.name.endswith((".dist-info", ".egg-info"))}
    return sorted(name for name in found if not name.startswith("autopart"))
