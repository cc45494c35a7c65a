"""A folder of checkpoints on disk: complete or absent, never half.

    directory/
      latest                      the name of the newest: "step-00000010"
      step-00000005/  step-00000010/    complete ones
      .step-00000015.partial/     being written, or left by a job that was killed

A checkpoint is written into its hidden folder, everything in it is synced, and one rename makes it visible. Then the
pointer is replaced by another rename. Whatever is killed in between, what ``latest`` names is complete.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from autopart.runtime.errors import CheckpointError
from autopart.runtime.files import named

POINTER = "latest"
COMMON = "common.pt"
METADATA = ".metadata"
_PARTIAL = ".partial"


def prepare(directory: Path, step: int) -> tuple[Path, Path]:
    """Makes the hidden folder for a step; returns it and its final path. Clears what killed jobs left behind."""
    directory.mkdir(parents=True, exist_ok=True)
    for left in directory.glob(f".*{_PARTIAL}"):
        shutil.rmtree(left, ignore_errors=True)
    name = f"step-{step:08d}"
    # The same step saved once more gets a name of its own: replacing a folder takes two renames.
    names = (name, *(f"{name}-{count}" for count in range(2, 10_000)))
    final = next(directory / n for n in names if not (directory / n).exists())
    partial = directory / f".{final.name}{_PARTIAL}"
    partial.mkdir()
    return partial, final


def commit(partial: Path, final: Path, common: bytes, keep: int) -> None:
    """Makes what was written visible, and removes all but the ``keep`` newest."""
    _write(partial / COMMON, common)
    _sync(partial)
    os.rename(partial, final)
    _sync(final.parent)
    pointer = final.parent / f".{POINTER}{_PARTIAL}"
    _write(pointer, final.name.encode())
    os.replace(pointer, final.parent / POINTER)
    _sync(final.parent)
    old = sorted((f for f in complete(final.parent) if f != final), key=_age)
    for folder in old[: max(0, len(old) + 1 - keep)]:
        hidden = folder.with_name(f".{folder.name}{_PARTIAL}")
        os.rename(folder, hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def complete(directory: Path) -> list[Path]:
    """All checkpoints in a directory."""
    return [folder for folder in directory.glob("step-*") if is_checkpoint(folder)]


def is_checkpoint(folder: Path) -> bool:
    return (folder / METADATA).is_file() and (folder / COMMON).is_file()


def find(directory: Path) -> Path | None:
    """The checkpoint that the pointer names, else the newest complete one, else None."""
    try:
        pointed = directory / (directory / POINTER).read_text().strip()
    except OSError:
        pointed = None
    if pointed is not None and pointed.parent == directory and is_checkpoint(pointed):
        return pointed
    return max(complete(directory), key=_age, default=None)


def resolve(path: Path) -> Path:
    """The checkpoint at this path: itself, or the latest in the directory. Raises CheckpointError if there is none."""
    found = path if is_checkpoint(path) else find(path)
    if found is None:
        raise CheckpointError(f"no complete checkpoint in {path}; expected is a folder that checkpoint.save wrote")
    return found


def _age(folder: Path) -> int:
    return (folder / COMMON).stat().st_mtime_ns


def _write(path: Path, content: bytes) -> None:
    with named(path), path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Makes the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
