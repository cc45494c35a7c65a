"""Storages that autograd keeps for the backward."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class KeptStorages:
    """The distinct storages of the tensors that are packed, but those of ``outside``."""

    outside: set[int]
    kept: dict[int, torch.UntypedStorage] = field(default_factory=dict)

    @staticmethod
    def beside(tensors: Iterable[Tensor]) -> KeptStorages:
        """Those of other tensors are counted."""
        return KeptStorages({item.untyped_storage().data_ptr() for item in tensors})

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.outside:
            self.kept[storage.data_ptr()] = storage  # held, so that no address is used twice
        return tensor

    @property
    def nbytes(self) -> int:
        return sum(storage.nbytes() for storage in self.kept.values())
