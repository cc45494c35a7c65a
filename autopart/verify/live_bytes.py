"""Counts the bytes of tensors that are alive, by watching every op that makes one.

Where such a mode is on, autograd adds gradients up in new tensors, which it does in place otherwise. So the result of
such an addition counts from the next op on, when what was added to it is gone.

What a backend of torch.distributed allocates for itself is not seen. Gloo does that where it scatters sums: it sums a
copy of the whole message, which it holds until the result is waited for. :func:`scattering_in_sight` does the same
where it is seen.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autopart.runtime import collectives

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


class _Scattering:
    """The sum of a message's copy that is on its way, whose own part is taken where it is waited for."""

    def __init__(self, own: torch.Tensor, message: torch.Tensor, group: Any) -> None:
        self._own, self._copy = own, message.clone()
        self._group = group
        self._work = dist.all_reduce(self._copy, group=group, async_op=True)

    def wait(self) -> None:
        assert self._work is not None
        self._work.wait()
        self._own.copy_(self._copy.view(-1, self._own.numel())[dist.get_rank(self._group)])
        del self._copy


@contextmanager
def scattering_in_sight() -> Iterator[None]:
    """Inside, sums that are divided on their way over gloo are tensors that :class:`LiveBytes` sees."""

    def scatter(
        own: torch.Tensor, message: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> _Scattering | None:
        work = _Scattering(own, message, group)
        if async_op:
            return work
        work.wait()
        return None

    with mock.patch.object(collectives, "_scatter_single", scatter):
        yield
