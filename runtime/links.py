"""Exchanges of a rank with the same coordinates of other stages."""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from autopart.runtime.errors import PlanError
from autopart.runtime.manifest import Manifest, ValueSpec, size_of
from autopart.runtime.mesh import STAGE_AXIS, Mesh
from autopart.runtime.traffic import Phase, payload


def dtype_of(text: str) -> torch.dtype:
    """The dtype called ``float32`` or ``torch.float32``. Raises PlanError."""
    found = getattr(torch, text.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise PlanError(f"the manifest names an unknown dtype: {text!r}")
    return found


def edges_of(manifest: Manifest) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The (source, target) pairs of stages that exchange values, and those whose values have gradients."""
    edges = {(value.source, target) for value in manifest.values for target in value.targets}
    back = {(value.source, target) for value in manifest.values for target in value.targets if value.needs_grad}
    return sorted(edges), sorted(back)


class Links:
    """Sends and receives the values that cross between stages. Neither blocks; sends are kept until they are done."""

    def __init__(self, manifest: Manifest, mesh: Mesh) -> None:
        self._mesh = mesh
        self._index = {value.name: index for index, value in enumerate(manifest.values)}
        self._sending: deque[tuple[dist.Work, Tensor]] = deque()
        me = mesh.stage
        self.outgoing = {
            stage: [v for v in manifest.values if v.source == me and stage in v.targets]
            for stage in range(len(manifest.stages))
        }
        self.incoming = {
            stage: [v for v in manifest.values if v.source == stage and me in v.targets]
            for stage in range(len(manifest.stages))
        }
        # NCCL knows no tags and runs what passes between two ranks of one group in one queue. A group per direction
        # keeps an activation that waits for its receiver from holding up a gradient that comes the other way.
        self._groups: dict[str, dist.ProcessGroup | None] = {"forward": None, "backward": None}
        self._tagged = True
        if mesh.world_size > 1 and mesh.device.type == "cuda" and manifest.values:
            self._tagged = False
            self._groups = {direction: dist.new_group() for direction in ("forward", "backward")}
            self._open(edges_of(manifest)[0])

    def send(self, value: ValueSpec, tensor: Tensor, stage: int, microbatch: int, batch: int, phase: Phase) -> None:
        """Starts sending a value (phase "forward") or its gradient ("backward") to ``stage``.

        Raises PlanError when the tensor is not what the manifest promises: the receiver counts on it.
        """
        expected = tuple(size_of(size, batch) for size in value.shape)
        if tuple(tensor.shape) != expected or tensor.dtype != dtype_of(value.dtype):
            raise PlanError(
                f"stage {self._mesh.stage} sends {value.name!r} as {tensor.dtype} {list(tensor.shape)}, the manifest "
                f"says {value.dtype} {list(expected)}; emit the program again, or mend the edited stage"
            )
        tensor = tensor.detach().contiguous()
        self._mesh.traffic.add("send", STAGE_AXIS, phase, payload(tensor))
        work = dist.isend(
            tensor, self._mesh.peer(stage), group=self._groups[phase], tag=self._tag(value, microbatch, phase)
        )
        assert work is not None
        self._sending.append((work, tensor))
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()

    def receive(
        self, value: ValueSpec, stage: int, microbatch: int, batch: int, phase: Phase
    ) -> tuple[Tensor, dist.Work]:
        """Starts receiving from ``stage``; the tensor holds the value once the work has been waited for."""
        shape = [size_of(size, batch) for size in value.shape]
        tensor = torch.empty(shape, dtype=dtype_of(value.dtype), device=self._mesh.device)
        work = dist.irecv(
            tensor, self._mesh.peer(stage), group=self._groups[phase], tag=self._tag(value, microbatch, phase)
        )
        assert work is not None
        return tensor, work

    def flush(self) -> None:
        """Waits until everything that was sent has left."""
        while self._sending:
            self._sending.popleft()[0].wait()

    def _tag(self, value: ValueSpec, microbatch: int, phase: Phase) -> int:
        if not self._tagged:
            return 0
        return (microbatch * len(self._index) + self._index[value.name]) * 2 + (phase == "backward")

    def _open(self, edges: list[tuple[int, int]]) -> None:
        """One exchange per edge and direction: NCCL connects two ranks at their first, and blocks the host for it."""
        token = torch.zeros(1, device=self._mesh.device)
        for source, target in edges:
            for phase, sender, receiver in (("forward", source, target), ("backward", target, source)):
                if self._mesh.stage == sender:
                    dist.send(token, self._mesh.peer(receiver), group=self._groups[phase])
                elif self._mesh.stage == receiver:
                    dist.recv(token, self._mesh.peer(sender), group=self._groups[phase])
