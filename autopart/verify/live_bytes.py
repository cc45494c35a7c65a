"""Counts the bytes of tensors that are alive, by watching every op that makes one."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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
