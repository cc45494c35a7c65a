"""Captured programs on disk, so that planning the same ``hf:`` model again neither builds nor traces it.

An entry's name is a hash of everything that the program follows from: the model's name and dtype, autopart's sources,
torch, what is installed, the files of transformers (their sizes and times, as a working copy's version stands still)
and its environment variables. Models of a ``file.py:function`` are captured each time: nobody knows what a function
reads. Programs that no JSON object says (:mod:`autopart.passes.program_json`) are too.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from autopart import cache
from autopart.cache_key import installed, sources

if TYPE_CHECKING:
    from autopart.passes.program import Program

FOLDER = "captured"
VERSION = 1
_ENVIRONMENT = ("TRANSFORMERS", "HF_", "USE_", "TORCH", "PYTORCH")


def captured(spec: str, dtype: torch.dtype | None, capture: Callable[[], Program]) -> Program:
    """What ``capture`` gives for planning the model of that name on meta, from the cache where it is there.

    Raises what ``capture`` does.
    """
    folder = cache.answers(FOLDER) if spec.startswith("hf:") else None
    if folder is None:
        return capture()
    from autopart.passes import program_json

    name = key(spec, dtype)
    path = folder / name[:2] / f"{name}.json"
    known = _read(path)
    if known is not None:
        return known
    program = capture()
    with contextlib.suppress(OSError, program_json.NotWritten):  # a full disk costs the next run its time, no more
        cache.keep(path, program_json.written(program))
    return program


def key(spec: str, dtype: torch.dtype | None) -> str:
    """The hash by which a program is found."""
    digest = hashlib.sha256()
    versions = (VERSION, sys.version, torch.__version__, torch.version.git_version, torch.get_default_dtype())
    for part in (spec, dtype, *versions, *sources(), *installed(), *_transformers(), *_environment()):
        digest.update(f"{part!r}\n".encode())
    return digest.hexdigest()


def _read(path: Path) -> Program | None:
    data = cache.kept(path)
    if data is None:
        return None
    from autopart.passes import program_json

    try:
        return program_json.read(data)
    except Exception:  # whatever the file holds: it is captured again, and written over
        return None


@functools.cache
def _transformers() -> tuple[str, ...]:
    """Of its Python files path, size and time of the last change; it is not imported for that."""
    states = []
    found = importlib.util.find_spec("transformers")
    for top in (found and found.submodule_search_locations) or ():
        for folder, _, names in sorted(os.walk(top)):
            for name in sorted(names):
                if name.endswith(".py"):
                    state = os.stat(os.path.join(folder, name))
                    states.append(f"{folder}/{name} {state.st_size} {state.st_mtime_ns}")
    return tuple(states)


def _environment() -> Iterator[str]:
    yield from sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(_ENVIRONMENT))
