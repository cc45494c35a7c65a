"""Exchanges of a rank with the same coordinates of stages on other ranks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from autopart.runtime.errors import PlanError
from autopart.runtime.manifest import Manifest, ValueSpec, size_of
from autopart.runtime.mesh import STAGE_AXIS, Mesh
from autopart.runtime.placement import Placement
from autopart.runtime.resharding import Message, Side, Slices, backward_messages, forward_messages, local_shape, rows_of
from autopart.runtime.schedule import Action, Work
from autopart.runtime.traffic import Phase, payload

# Pieces of one value that have tags of their own; those that share one are told apart by their order.
_MOST_PIECES: Final = 256
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


class Arrival:
    """A tensor on its way from the ranks ``senders``, in one message."""

    def __init__(self, senders: Collection[int], works: Sequence[dist.Work]) -> None:
        self.senders = frozenset(senders)
        self._works = works

    def wait(self) -> None:
        """Returns once all is there."""
        for work in self._works:
            work.wait()


class Pieces(Arrival):
    """A tensor that comes in pieces, which are put in their places and added up where they overlap."""

    def __init__(self, tensor: Tensor, parts: Sequence[tuple[int, dist.Work, Tensor, Slices]]) -> None:
        super().__init__([sender for sender, *_ in parts], [work for _, work, *_ in parts])
        # not the tensor itself, which autograd may know as a leaf by then
        self._tensor = tensor.detach()
        self._parts = [(piece, where) for *_, piece, where in parts]

    def wait(self) -> None:
        super().wait()
        for piece, where in self._parts:
            self._tensor[where] += piece
        self._parts = []


def _differ(manifest: Manifest, value: ValueSpec, target: int, arrival: Sequence[str]) -> bool:
    source, other = manifest.stages[value.source], manifest.stages[target]
    alike = source.mesh == other.mesh and source.replica_shares == other.replica_shares
    return not alike or tuple(arrival) != value.placements


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples in a microbatch: on this rank, and over all replicas. in_copies: each replica of every stage has all."""

    rank: int
    whole: int
    in_copies: bool = False


# A send of a batch: the action, and a number of the batch that no other one has while its sends are kept.
Sent = tuple[Action, int]


class Links:
    """Sends and receives the values that cross between stages. Neither blocks.

    What is sent is kept until it has left. NCCL says when; gloo does not, but by waiting, so that sends are kept until
    :meth:`let_go` names them or :meth:`flush` waits.
    beside: links of the same stages for inputs of other sizes, whose process groups these use too.
    """

    def __init__(self, manifest: Manifest, mesh: Mesh, beside: Links | None = None) -> None:
        self._mesh = mesh
        self._index = {value.name: index for index, value in enumerate(manifest.values)}
        self._sending: dict[Sent, list[tuple[int, dist.Work, Tensor]]] = {}  # with the rank that it goes to
        # (source stage, target stage) -> what crosses
        self.values: dict[tuple[int, int], list[ValueSpec]] = {}
        for value in manifest.values:
            for target in value.targets:
                self.values.setdefault((value.source, target), []).append(value)
        self._manifest = manifest
        self._unlike = {
            (value.name, target)
            for value in manifest.values
            for target, arrival in zip(value.targets, value.arrivals, strict=False)
            if _differ(manifest, value, target, arrival)
        }
        self._messages: dict[tuple[str, int, int, bool, Phase], list[tuple[int, Message]]] = {}
        # NCCL knows no tags and runs what passes between two ranks of one group in one queue. A group per direction
        # keeps an activation that waits for its receiver from holding up a gradient that comes the other way; where
        # stages of one rank send to and receive from one other rank, these two have groups of their own as well.
        self._groups: dict[tuple[Phase, bool], dist.ProcessGroup] = {} if beside is None else beside._groups
        self._tagged = mesh.world_size == 1 or mesh.device.type != "cuda"
        if not self._tagged and beside is None:
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

    def send(self, value: ValueSpec, tensor: Tensor, action: Action, samples: Samples, batch: int) -> None:
        """Starts sending a value, or its gradient, as the action says.

        batch: see :data:`Sent`. Raises PlanError when the tensor is not what the manifest promises.
        """
        edge, phase = action.edge, _phase(action)
        unlike = (value.name, edge[1]) in self._unlike
        if phase == "forward" or not unlike:
            self.check(value, tensor, samples.rank)
        tensor = tensor.detach()
        if unlike:
            for number, message in self._exchange(value, edge, samples, phase):
                if message.source == self._mesh.rank:
                    self._start(value, tensor[message.take], action, message.target, (action, batch), number)
        else:
            self._start(value, tensor, action, self._mesh.peer(edge[phase == "forward"]), (action, batch))
        if not self._tagged:
            self._drop_completed()

    def _start(self, value: ValueSpec, piece: Tensor, action: Action, target: int, sent: Sent, number: int = 0) -> None:
        phase = _phase(action)
        piece = piece.contiguous()
        self._mesh.traffic.add("send", STAGE_AXIS, phase, payload(piece))
        work = dist.isend(
            piece,
            target,
            group=self._groups.get((phase, self._ascends(action.edge, phase))),
            tag=self._tag(value, action, number),
        )
        assert work is not None
        self._sending.setdefault(sent, []).append((target, work, piece))

    def receive(self, value: ValueSpec, action: Action, samples: Samples) -> tuple[Tensor, Arrival]:
        """Starts receiving what :meth:`send` sends; the tensor holds it once the arrival has been waited for."""
        edge, phase = action.edge, _phase(action)
        dtype, device = dtype_of(value.dtype), self._mesh.device
        if (value.name, edge[1]) not in self._unlike:
            tensor = torch.empty([size_of(size, samples.rank) for size in value.shape], dtype=dtype, device=device)
            source = self._mesh.peer(edge[phase == "backward"])
            return tensor, Arrival([source], [self._post(value, tensor, action, source)])
        here = self._side(value, edge[phase == "forward"], samples)
        tensor = torch.zeros(local_shape(value.whole, here, self._mesh.rank), dtype=dtype, device=device)
        parts = []
        for number, message in self._exchange(value, edge, samples, phase):
            if message.target == self._mesh.rank:
                piece = torch.empty(message.shape, dtype=dtype, device=device)
                work = self._post(value, piece, action, message.source, number)
                parts.append((message.source, work, piece, message.put))
        return tensor, Pieces(tensor, parts)

    def _post(self, value: ValueSpec, tensor: Tensor, action: Action, source: int, number: int = 0) -> dist.Work:
        phase = _phase(action)
        group = self._groups.get((phase, self._ascends(action.edge, phase)))
        work = dist.irecv(tensor, source, group=group, tag=self._tag(value, action, number))
        assert work is not None
        return work

    def _exchange(
        self, value: ValueSpec, edge: tuple[int, int], samples: Samples, phase: Phase
    ) -> list[tuple[int, Message]]:
        """The messages of one microbatch that this rank sends or receives, numbered alike on both sides.

        Where each replica has all samples, it has a copy of the value and a part of the gradient, as of a value that
        does not depend on them.
        """
        key = value.name, edge[1], samples.whole, samples.in_copies, phase
        if key not in self._messages:
            make = forward_messages if phase == "forward" else backward_messages
            source, target = (self._side(value, stage, samples) for stage in edge)
            found = make(value.whole, None if samples.in_copies else value.batch_dim, source, target)
            mine = enumerate(found)
            self._messages[key] = [item for item in mine if self._mesh.rank in (item[1].source, item[1].target)]
        return self._messages[key]

    def _side(self, value: ValueSpec, stage: int, samples: Samples) -> Side:
        """How a value of this many samples lies in a stage."""
        spec = self._manifest.stages[stage]
        shares = spec.replica_shares
        rows = (samples.whole,) * len(shares) if samples.in_copies else rows_of(samples.whole, shares)
        placements = value.placements if stage == value.source else value.arrivals[value.targets.index(stage)]
        return Side(
            spec.devices,
            rows,
            tuple(size for _, size in spec.mesh[1:]),
            tuple(map(Placement.parse, placements)),
        )

    def let_go(self, sent: Sent, targets: Collection[int] | None = None) -> None:
        """Waits for sends to these ranks (None: to all), and frees what was sent; others than pending are no matter.

        To be called once they are known to have arrived, or where waiting for their receivers cannot block these.
        """
        kept = []
        for target, work, piece in self._sending.pop(sent, ()):
            if targets is None or target in targets:
                work.wait()
            else:
                kept.append((target, work, piece))
        if kept:
            self._sending[sent] = kept

    def flush(self) -> None:
        """Waits until everything that was sent has left."""
        for sent in list(self._sending):
            self.let_go(sent)

    def _drop_completed(self) -> None:
        for sent, parts in list(self._sending.items()):
            left = [part for part in parts if not part[1].is_completed()]
            if left:
                self._sending[sent] = left
            else:
                del self._sending[sent]

    def _tag(self, value: ValueSpec, action: Action, piece: int = 0) -> int:
        if not self._tagged:
            return 0
        assert action.microbatch is not None
        number = (action.microbatch * len(self._index) + self._index[value.name]) * 2 + (_phase(action) == "backward")
        return number * _MOST_PIECES + piece % _MOST_PIECES

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
                for here, there in self._pairs(sender, receiver):
                    if here == self._mesh.rank:
                        dist.send(token, there, group=group)
                    elif there == self._mesh.rank:
                        dist.recv(token, here, group=group)

    def _pairs(self, sender: int, receiver: int) -> list[tuple[int, int]]:
        """Ranks of two stages that may exchange something, in one order for all."""
        source, target = self._manifest.stages[sender], self._manifest.stages[receiver]
        if source.mesh == target.mesh and not self._unlike:
            return list(zip(source.devices, target.devices, strict=True))
        return [(here, there) for here in source.devices for there in target.devices]


def _phase(action: Action) -> Phase:
    return "forward" if action.work in (Work.SEND_ACTIVATION, Work.RECV_ACTIVATION) else "backward"
