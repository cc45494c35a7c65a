"""Whether ranks that have to be given the same batch are: what each reads of another one would fit nothing.

Sizes are compared at every call (:mod:`autopart.runtime.variants`); a sampler that gives each rank its own part, or a
seed of each rank's own, gives batches of equal sizes. So numbers are compared too, at the first call and then ever more
seldom, since a device has to be waited for. They are compared roughly: what ranks compute for themselves, such as the
features of a frozen encoder, may differ in rounding.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from autopart.runtime.agreement import told_by_all
from autopart.runtime.errors import BatchError
from autopart.runtime.mesh import Mesh

_TOLERANCE = 1e-2
_MOST = 2**16
_GLOBAL = (
    "every rank has to pass the same whole batch, of which it takes its part: seed all ranks alike and leave out "
    'DistributedSampler, or give batch="local" and a sampler over model.data_world_size parts'
)
_LOCAL = (
    "ranks of one replica have to pass the same part of the batch: a sampler goes by model.data_rank and "
    "model.data_world_size, not by the process's rank"
)


class SameBatches:
    """Compares what the ranks of a program are given."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self._calls = mesh, 0

    def check(self, leaves: Mapping[str, Any], local: bool) -> None:
        """At calls 1, 2, 4, 8 and so on; all ranks call it.

        Raises BatchError where ranks that compute one sample together have unlike batches; warns where each computes
        samples by itself, which are then some of each rank's batch.
        """
        self._calls += 1
        if self._mesh.world_size == 1 or self._calls & (self._calls - 1):
            return
        names = [name for name, leaf in leaves.items() if isinstance(leaf, Tensor)]
        own = (self._mesh.data.index, [_number(leaves[name]) for name in names])
        found = told_by_all(own)
        alone = self._mesh.data.size == self._mesh.world_size
        if local and alone:
            return
        for rank, (replica, numbers) in enumerate(found):
            first = next(other for other, (index, _) in enumerate(found) if not local or index == replica)
            for name, number, wanted in zip(names, numbers, found[first][1], strict=True):
                if abs(number - wanted) <= _TOLERANCE * max(1.0, abs(wanted)):
                    continue
                advice = _LOCAL if local else _GLOBAL
                text = f"ranks {first} and {rank} were given unlike values of {name!r}; {advice}"
                if not alone:
                    raise BatchError(text)
                if self._calls == 1:
                    warnings.warn(text, stacklevel=2)
                return


def _number(tensor: Tensor) -> float:
    """Of some of its numbers a sum with changing signs over their size: other batches have another."""
    if tensor.is_meta or not tensor.numel():
        return 0.0
    some = tensor.detach().reshape(-1)[:: 1 + tensor.numel() // _MOST]
    some = torch.nan_to_num(
        (torch.view_as_real(some) if some.is_complex() else some).double().reshape(-1), 1.0, 2.0, 3.0
    )
    signs = torch.arange(len(some), dtype=torch.float64, device=some.device).mul(0.7).cos()
    length = float(some.norm())
    return float((some * signs).sum()) / length if length else 0.0
