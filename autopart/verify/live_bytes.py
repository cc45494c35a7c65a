"""Counts the bytes of tensors that are alive in a step, with those of sums that gloo scatters.

What a backend of torch.distributed allocates for itself is not seen. Gloo does that where it scatters sums: it sums a
copy of the whole message, which it holds until the result is waited for. :func:`scattering_in_sight` does the same
where it is seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from autopart.passes.live_bytes import LiveBytes
from autopart.runtime import collectives

__all__ = ["LiveBytes", "scattering_in_sight"]


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
