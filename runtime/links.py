"""Exchanges of a rank with the same coordinates of stages on other ranks."""

from __future__ import annotations

from collections import deque
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from autopart.runtime.errors import PlanError
from autopart.runtime.manifest import Manifest, ValueSpec, size_of
from autopart.runtime.mesh import STAGE_AXIS, Mesh
from autopart.runtime.traffic import Phase, payload

_PHASES: Final[tuple[Phase, Phase]] = ("forward", "backward")


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
        # (source stage, target stage) -> what crosses
        self.values: dict[tuple[int, int], list[ValueSpec]] = {}
        for value in manifest.values:
            for target in value.targets:
                self.values.setdefault((value.source, target), []).append(value)
        # NCCL knows no tags and runs what passes between two ranks of one group in one queue. A group per direction
        # keeps an activation that waits for its receiver from holding up a gradient that comes the other way; where
        # stages of one rank send to and receive from one other rank, these two have groups of their own as well.
        self._groups: dict[tuple[Phase, bool], dist.ProcessGroup] = {}
        self._tagged = mesh.world_size == 1 or mesh.device.type != "cuda"
        if not self._tagged:
            edges = [edge for edge in edges_of(manifest)[0] if mesh.place_of[edge[0]] != mesh.place_of[edge[1]]]
            for phase in _PHASES:
                for ascends in (True, False):
                    if any(self._ascends(edge, phase) == ascends for edge in edges):
                        self._groups[phase, ascends] = dist.new_group()
            self._open(edges)

    def check(self, value: ValueSpec, tensor: Tensor, batch: int) -> None:
        """Raises PlanError when a tensor is not what the manifest promises: the receiver counts on it."""
        expected = tuple(size_of(size, batch) for size in value.shape)
        if tuple(tensor.shape) != expected or tensor.dtype != dtype_of(value.dtype):
            raise PlanError(
                f"stage {value.source} sends {value.name!r} as {tensor.dtype} {list(tensor.shape)}, the manifest "
                f"says {value.dtype} {list(expected)}; emit the program again, or mend the edited stage"
            )

    def send(
        self, value: ValueSpec, tensor: Tensor, edge: tuple[int, int], microbatch: int, batch: int, phase: Phase
    ) -> None:
        """Starts sending a value along an edge (phase "forward"), or its gradient against it ("backward").

        Raises PlanError when the tensor is not what the manifest promises.
        """
        self.check(value, tensor, batch)
        tensor = tensor.detach().contiguous()
        self._mesh.traffic.add("send", STAGE_AXIS, phase, payload(tensor))
        work = dist.isend(
            tensor,
            self._mesh.peer(edge[phase == "forward"]),
            group=self._groups.get((phase, self._ascends(edge, phase))),
            tag=self._tag(value, microbatch, phase),
        )
        assert work is not None
        self._sending.append((work, tensor))
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()

    def receive(
        self, value: ValueSpec, edge: tuple[int, int], microbatch: int, batch: int, phase: Phase
    ) -> tuple[Tensor, dist.Work]:
        """Starts receiving what :meth:`send` sends; the tensor holds it once the work has been waited for."""
        shape = [size_of(size, batch) for size in value.shape]
        tensor = torch.empty(shape, dtype=dtype_of(value.dtype), device=self._mesh.device)
        work = dist.irecv(
            tensor,
            self._mesh.peer(edge[phase == "backward"]),
            group=self._groups.get((phase, self._ascends(edge, phase))),
            tag=self._tag(value, microbatch, phase),
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

    def _ascends(self, edge: tuple[int, int], phase: Phase) -> bool:
        """Whether a message goes to a higher rank of the pipeline."""
        source, target = (self._mesh.place_of[stage] for stage in edge)
        return (source < target) == (phase == "forward")

    def _open(self, edges: list[tuple[int, int]]) -> None:
        """One exchange per edge and direction: NCCL connects two ranks at their first, and blocks the host for it."""
        token = torch.zeros(1, device=self._mesh.device)
        for source, target in edges:
            for phase in _PHASES:
                sender, receiver = (source, target) if phase == "forward" else (target, source)
                group = self._groups[phase, self._ascends((source, target), phase)]
                if sender in self._mesh.stages:
                    dist.send(token, self._mesh.peer(receiver), group=group)
                elif receiver in self._mesh.stages:
                    dist.recv(token, self._mesh.peer(sender), group=group)
