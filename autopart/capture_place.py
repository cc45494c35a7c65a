"""Where a capture is: which module's forward runs, and which line of the model's own code."""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopart import passes, runtime

_STANDARD = sysconfig.get_path("stdlib")
_PACKAGES = tuple(str(Path(folder)) + os.sep for package in (torch, passes, runtime) for folder in package.__path__)
_OWN = str(Path(__file__).parent) + os.sep  # passes and runtime lie elsewhere in a checkout


def own_frame(frames: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    """The innermost that is neither torch's, nor autopart's, nor the standard library's."""
    for frame in reversed(frames):
        standard = frame.filename.startswith(_STANDARD) and "-packages" not in frame.filename
        if not standard and not frame.filename.startswith((*_PACKAGES, _OWN, "<frozen ")):
            return frame
    return None


def own_place(frames: Sequence[traceback.FrameSummary]) -> str:
    """Its file and line."""
    frame = own_frame(frames)
    return f"{frame.filename}:{frame.lineno}" if frame else "unknown source line"


class Where:
    """Follows which module's forward is running, so that a failure can name it."""

    def __init__(self, root: nn.Module):
        self._names = {id(module): name for name, module in root.named_modules()}
        self._stack: list[str] = []
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        def enter(module: nn.Module, _inputs: Any) -> None:
            if id(module) in self._names:
                self._stack.append(self._names[id(module)])

        def leave(module: nn.Module, _inputs: Any, _output: Any) -> None:
            if id(module) in self._names and self._stack:
                self._stack.pop()

        self._handles = [
            nn.modules.module.register_module_forward_pre_hook(enter),
            nn.modules.module.register_module_forward_hook(leave),
        ]

    def __exit__(self, *_exc: object) -> None:
        for handle in self._handles:
            handle.remove()

    @property
    def path(self) -> str:
        names = [name.removeprefix("model").strip(".") for name in self._stack]
        return next((name for name in reversed(names) if name), "")
