"""Buffers that a forward writes, as one process would: once a step, and read as they were before.

The model's code writes a counter, or an average of its weights, in each forward; but a stage's forward runs for each
microbatch, and its layers again in a backward that recomputes. So each finds these buffers as they were before the
batch. All write the same values, or, into sums over samples such as a router's counts of tokens, each its part, which
are added up over microbatches and replicas. What an op itself updates in place (batch norm's running statistics) is
not among them: it is that of each microbatch, and of replicas the mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autopart.runtime.collectives import sum_in_place
from autopart.runtime.flat import FlatShares
from autopart.runtime.loading import tensors_in
from autopart.runtime.manifest import Manifest
from autopart.runtime.mesh import Mesh

COPIES = 3
"""Of each of them, the most at once: one for the batch, one of the sums so far, one while a microbatch goes back."""


@dataclass(frozen=True, slots=True)
class WrittenOnce:
    """A buffer that a stage writes. combine: see :class:`autopart.runtime.manifest.ParameterSpec`."""

    tensor: Tensor
    combine: str


def written_once(modules: Mapping[int, nn.Module], manifest: Manifest) -> dict[int, list[WrittenOnce]]:
    """Of each stage that writes any in the mode it is in, its own. modules: the stages by number."""
    found: dict[int, list[WrittenOnce]] = {}
    specs = {spec.name: spec for spec in manifest.parameters if spec.once}
    for stage, module in modules.items():
        if specs:
            tensors = tensors_in([module], manifest).items()
            own = [
                WrittenOnce(tensor, specs[name].combine)
                for name, tensor in tensors
                if name in specs and (module.training or specs[name].evaluated)
            ]
            found.update({stage: own} if own else {})
    return found


class BeforeBatch:
    """A stage's buffers during one batch. Values are set behind autograd's back, as it keeps those of before."""

    def __init__(self, written: Sequence[WrittenOnce]) -> None:
        self._written = written
        self._buffers = [item.tensor for item in written]
        self._before: list[Tensor] | None = None
        self._sums: dict[int, Tensor] = {}  # by the buffer's number, over the microbatches so far

    def begin_forward(self) -> None:
        """Sets them to what they were when this was first called."""
        if self._before is None:
            self._before = [buffer.clone() for buffer in self._buffers]
        else:
            set_values(self._buffers, self._before)

    def end_forward(self) -> None:
        """Adds what a microbatch made to what those before it did."""
        assert self._before is not None
        with torch.no_grad():
            for index, (item, before) in enumerate(zip(self._written, self._before, strict=True)):
                if item.combine and index in self._sums:
                    own = item.tensor - before if item.combine == "added" else item.tensor
                    set_values([item.tensor], [self._sums[index].add_(own)])
                elif item.combine:
                    self._sums[index] = item.tensor.clone()

    def parts(self, mesh: Mesh) -> list[Tensor]:
        """Those to be summed over replicas, each with what is this one's part."""
        if self._before is None:
            return []
        found = []
        with torch.no_grad():
            for item, before in zip(self._written, self._before, strict=True):
                if item.combine == "added" and mesh.data.index:
                    set_values([item.tensor], [item.tensor - before])
                if item.combine:
                    found.append(item.tensor)
        return found

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


def average_statistics(manifest: Manifest, mesh: Mesh, buffers: Mapping[str, Tensor]) -> None:
    """Makes running statistics equal on all replicas: their mean over the data axis.

    A backward may be to come where the script computes the loss. It keeps these tensors, but does not use their values
    in training mode, so they are written behind autograd's back (``.data`` has a version of its own).
    """
    names = [s.name for s in manifest.parameters if s.buffer and s.mutated and not s.once and s.name in buffers]
    if mesh.data.size > 1:
        add_up([buffers[name] for name in names if buffers[name].is_floating_point()], mesh, mesh.data.size)


def add_up(tensors: Sequence[Tensor], mesh: Mesh, over: int = 1) -> None:
    """Sums each over the replicas, those of one type in one message. over: by what the sums are divided."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    for members in groups.values():
        layout = FlatShares([tensor.shape for tensor in members], [0] * len(members), 1)
        message = layout.message(members).clone()
        sum_in_place(message, mesh.data, "step")
        set_values(members, layout.shares(message if over == 1 else message / over))


def set_values(buffers: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """In place, without autograd noticing."""
    with torch.no_grad():
        for buffer, value in zip(buffers, values, strict=True):
            buffer.data.copy_(value)
