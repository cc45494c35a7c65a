"""Counts the bytes of tensors that are alive, by watching every op that makes one.

Where such a mode is on, autograd adds gradients up in new tensors, which it does in place otherwise. So the result of
such an addition counts from the next op on, when what was added to it is gone.
"""

from __future__ import annotations

import sys
import weakref
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_BETWEEN = ("_compile.py", "eval_frame.py")
"""Files of torch whose wrappers stand between its engine and a mode."""


class LiveBytes(TorchDispatchMode):
    """now, most: bytes of the distinct storages made inside; storages of ``known`` tensors are left out."""

    def __init__(self, known: Any = ()) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen: set[int] = set()
        for tensor in tree_leaves(known):
            if isinstance(tensor, torch.Tensor):
                self._watch(tensor.untyped_storage(), 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, torch.Tensor):
                self._watch(tensor.untyped_storage(), tensor.untyped_storage().nbytes())
        if not _adds_gradients(func):
            self.most = max(self.most, self.now)
        return results

    def _watch(self, storage: torch.UntypedStorage, size: int) -> None:
        key = storage._cdata
        if key in self._seen:
            return
        self._seen.add(key)
        self.now += size
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


def _adds_gradients(func: Any) -> bool:
    """Whether autograd itself calls an op, no Python code in between, to add up gradients of what several ops read."""
    if func is not torch.ops.aten.add.Tensor or torch._C._current_graph_task_id() == -1:
        return False
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.endswith(_BETWEEN):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"
