"""Buffers that a forward writes, as one process would: once a step, and read as they were before.

The model's code writes a counter, or an average of its weights, in each forward; but a stage's forward runs for each
microbatch, and its layers again in a backward that recomputes. So each finds these buffers as they were before the
batch, and all write the same values. What an op itself updates in place (batch norm's running statistics) is not among
them: it is that of each microbatch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from autopart.runtime.loading import tensors_in
from autopart.runtime.manifest import Manifest

COPIES = 2
"""Of each of them, the most at once: one for the batch, one while a microbatch goes back."""


def written_once(modules: Mapping[int, nn.Module], manifest: Manifest) -> dict[int, list[Tensor]]:
    """Of each stage in training mode that writes any, its own. modules: the stages by number."""
    found: dict[int, list[Tensor]] = {}
    names = {spec.name for spec in manifest.parameters if spec.once}
    for stage, module in modules.items():
        if names and module.training:
            own = [tensor for name, tensor in tensors_in([module], manifest).items() if name in names]
            found.update({stage: own} if own else {})
    return found


class BeforeBatch:
    """A stage's buffers during one batch. Values are set behind autograd's back, as it keeps those of before."""

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        self._buffers = buffers
        self._before: list[Tensor] | None = None

    def begin_forward(self) -> None:
        """Sets them to what they were when this was first called."""
        if self._before is None:
            self._before = [buffer.clone() for buffer in self._buffers]
        else:
            set_values(self._buffers, self._before)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Inside they are as before the batch, after it as they were: another batch may have gone forward since."""
        assert self._before is not None
        now = [buffer.clone() for buffer in self._buffers]
        set_values(self._buffers, self._before)
        try:
            yield
        finally:
            set_values(self._buffers, now)


def set_values(buffers: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """In place, without autograd noticing."""
    with torch.no_grad():
        for buffer, value in zip(buffers, values, strict=True):
            buffer.data.copy_(value)
