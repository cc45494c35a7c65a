"""SyncBatchNorm in a model that is traced: once a job has begun it exchanges statistics with all ranks of it.

No graph has that. It is captured as it computes in one process, with the statistics of the whole batch, and a program
keeps the batch whole for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def synced_norms_alone() -> Iterator[None]:
    """Inside, SyncBatchNorm computes as in one process. For all threads: the class is changed, and put back."""
    own = nn.SyncBatchNorm.forward
    setattr(nn.SyncBatchNorm, "forward", nn.BatchNorm1d.forward)  # noqa: B010 - of which type checkers know no other way
    try:
        yield
    finally:
        setattr(nn.SyncBatchNorm, "forward", own)  # noqa: B010


def synced_norms(model: nn.Module) -> tuple[str, ...]:
    """Their paths."""
    return tuple(path for path, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm))
