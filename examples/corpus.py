"""Byte-level text to train on that every machine already has: the source files of Python's standard library.

Every tenth file is kept for validation. Nothing is loaded ahead: each row of a batch reads through its own share of
the files, one file at a time. The same arguments give the same batches in every process.
"""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path

import torch
from torch import Tensor

VOCAB_SIZE = 256
VALIDATION_EVERY = 10
# What lies in the library's folder but is not part of it, and its tests, which some distributions leave out.
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


def split_files() -> tuple[list[Path], list[Path]]:
    """The files to train on and those to validate on, each sorted by path."""
    root = Path(sysconfig.get_path("stdlib"))
    found = sorted(
        path
        for path in root.rglob("*.py")
        if not SKIPPED.intersection(path.relative_to(root).parts) and path.stat().st_size > 0
    )
    validation = found[VALIDATION_EVERY - 1 :: VALIDATION_EVERY]
    if not validation:
        raise FileNotFoundError(f"fewer than {VALIDATION_EVERY} source files of the standard library in {root}")
    return [path for index, path in enumerate(found) if (index + 1) % VALIDATION_EVERY], validation


def training_batches(batch: int, seq: int, seed: int = 0) -> Iterator[Tensor]:
    """Endless batches of bytes, int64 [batch, seq]. Files come in an order drawn from ``seed``, over and over."""
    files, _ = split_files()
    random.Random(seed).shuffle(files)
    return _batches(files, batch, seq)


def validation_batches(batch: int, seq: int, count: int = 8) -> Iterator[Tensor]:
    """The same ``count`` batches, int64 [batch, seq], each time."""
    _, files = split_files()
    return islice(_batches(files, batch, seq), count)


def _batches(files: Sequence[Path], batch: int, seq: int) -> Iterator[Tensor]:
    rows = [_windows(files[index % len(files) :: batch], seq) for index in range(batch)]
    while True:
        yield torch.stack([next(row) for row in rows])


def _windows(files: Sequence[Path], seq: int) -> Iterator[Tensor]:
    """The files' bytes, one after the other and from the start again, cut into pieces of ``seq``."""
    rest = b""
    for path in cycle(files):
        with path.open("rb") as file:
            while piece := file.read(seq - len(rest)):
                rest += piece
                if len(rest) == seq:
                    yield torch.frombuffer(bytearray(rest), dtype=torch.uint8).long()
                    rest = b""
