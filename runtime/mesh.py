"""Where a rank stands: its stage, its coordinates on the stage's mesh, and the process group of each axis."""

from __future__ import annotations

import atexit
import inspect
import math
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopart.runtime.errors import ClusterError, PlanError
from autopart.runtime.invariant import Draw, Share
from autopart.runtime.manifest import Manifest
from autopart.runtime.placement import Placement
from autopart.runtime.restarts import restartable, store_of_this_start
from autopart.runtime.rng import derive_seed, seeded
from autopart.runtime.ties import Copies, tied_copies
from autopart.runtime.traffic import Traffic

if TYPE_CHECKING:
    from autopart.runtime.data_weights import Weights

# torch 2.13 renamed this; 2.11 knows the old name alone.
gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# Groups number their ranks in rising order unless this says otherwise, which torch 2.11 knows nothing of.
_KEEPS_ORDER = "sort_ranks" in inspect.signature(dist.new_group).parameters

DATA_AXIS = "dp"
STAGE_AXIS = "stage"
DEFAULT_TIMEOUT = timedelta(minutes=10)


class Pending(Protocol):
    """Something begun; the tensors belong to it until it was waited for."""

    def wait(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Axis:
    """One mesh axis as a rank sees it: ``index`` of ``size``; ``group`` connects the ranks along the axis.

    A group is there whenever the size is above one. Collectives on the axis are counted in ``traffic``.
    """

    name: str
    size: int = 1
    index: int = 0
    group: dist.ProcessGroup | None = None
    traffic: Traffic = field(default_factory=Traffic, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert 0 <= self.index < self.size, f"index {self.index} on an axis of {self.size}"

    @property
    def parts(self) -> tuple[Axis, ...]:
        """The axes along which a sum goes, one after the other."""
        return (self,)

    def all_reduce(self, x: torch.Tensor, maximum: bool = False) -> None:
        """Replaces a contiguous tensor by the sum (or the maximum) over the axis; not counted."""
        dist.all_reduce(x, dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM, group=self.group)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's tensor, stacked in front, ``[size, *x.shape]``; not counted."""
        gathered = x.new_empty((self.size, *x.shape))
        gather_single(gathered.flatten(), x.contiguous().flatten(), group=self.group)
        return gathered

    def broadcast(self, x: torch.Tensor, source: int) -> Pending:
        """Begins to replace a contiguous tensor by that of rank ``source`` of the axis; not counted."""
        work = dist.broadcast(x, group=self.group, group_src=source, async_op=True)
        assert work is not None
        return work

    def reduce(self, x: torch.Tensor, target: int) -> Pending:
        """Begins to sum a contiguous tensor into that of rank ``target``; what the others hold is lost; not counted."""
        work = dist.reduce(x, group=self.group, group_dst=target, async_op=True)
        assert work is not None
        return work


@dataclass(frozen=True)
class JoinedAxis(Axis):
    """Several axes as one, for sums alone: each of ``joined`` cuts the shards of the axis before it.

    It has no group of its own: what goes over it goes along each of them.
    """

    joined: tuple[Axis, ...] = ()

    @property
    def parts(self) -> tuple[Axis, ...]:
        return self.joined

    def all_reduce(self, x: torch.Tensor, maximum: bool = False) -> None:
        for axis in self.joined:
            if axis.size > 1:
                axis.all_reduce(x, maximum)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        raise self._only_sums()

    def broadcast(self, x: torch.Tensor, source: int) -> Pending:
        raise self._only_sums()

    def reduce(self, x: torch.Tensor, target: int) -> Pending:
        raise self._only_sums()

    def _only_sums(self) -> TypeError:
        # its group is none of theirs: torch.distributed would take all ranks of the job for it
        return TypeError(f"{self.name} is several axes as one, which only sums go along")


def joined(*axes: Axis) -> JoinedAxis:
    """The axes as one, the first the outermost."""
    index = 0
    for axis in axes:
        index = index * axis.size + axis.index
    name = "x".join(axis.name for axis in axes)
    return JoinedAxis(name, math.prod(axis.size for axis in axes), index, joined=axes)


def job_size() -> int:
    """The number of processes in this job: of the process group, or as torchrun announces it."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def pick_device() -> torch.device:
    """This process's GPU (LOCAL_RANK, as torchrun sets it), or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def connect(device: torch.device, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
    """Initialises torch.distributed from torchrun's environment, unless the script did it or there is one process."""
    if job_size() == 1 or dist.is_initialized():
        return
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # gloo beside NCCL: tensors that live on the CPU, such as gathered checkpoints, can then be exchanged as well.
        backend = "cpu:gloo,cuda:nccl"
    if restartable():
        store, rank = store_of_this_start(timeout), int(os.environ["RANK"])
        dist.init_process_group(backend, store=store, rank=rank, world_size=job_size(), timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout)
    atexit.register(_disconnect)


def _disconnect() -> None:
    # After an uncaught exception (the interpreter has set sys.last_type) peers may be stuck in a collective; waiting
    # for them here would keep torchrun from seeing this process fail.
    if dist.is_initialized() and not hasattr(sys, "last_type"):
        dist.destroy_process_group()


class Mesh:
    """A rank's place in the job. ``mesh["tp"]`` is an :class:`Axis`; axes of one rank have no process group.

    stages: the stages that this rank runs, ascending; ``place_of[stage]``: the rank of the pipeline (a group of
    devices) that runs it. axes: name -> Axis, in mesh order. data: the data axis. tensor_axes: the others, of
    ``tensor_sizes`` ranks. pipeline: the axis that joins the same coordinates of all ranks of the pipeline.
    step, microbatch, share: what is being computed; set by the executor, read by :meth:`random` and :meth:`draw`.
    weights: those that are divided over the data axis; set by the module, read by :meth:`gather`.

    Built on every rank of the job, in the same order among other process groups. Raises ClusterError when the job
    has another size than the plan, PlanError when the stages do not share the ranks evenly, or share a part of them.
    """

    def __init__(self, manifest: Manifest, device: torch.device | None = None, seed: int | None = None) -> None:
        check_job_size(manifest.world_size)
        self.world_size = manifest.world_size
        self.device = pick_device() if device is None else device
        connect(self.device)
        self.rank = dist.get_rank() if self.world_size > 1 else 0
        self.traffic = Traffic()
        self.microbatches = manifest.microbatches
        self.step = 0
        self.microbatch = 0
        self.share = Share()
        self.place_of = places_of(manifest)
        self._layouts = _layouts(manifest, self.place_of)
        place = next(index for index, layout in enumerate(self._layouts) if (layout == self.rank).any())
        self.stages = tuple(stage for stage, at in enumerate(self.place_of) if at == place)
        self.coordinates: tuple[int, ...] = tuple((self._layouts[place] == self.rank).nonzero()[0].tolist())
        shape = self._layouts[place].shape
        self._peers = {
            other: int(layout[self.coordinates]) for other, layout in enumerate(self._layouts) if layout.shape == shape
        }
        self.seed = self._agree(torch.initial_seed() if seed is None else seed)
        names = tuple(name for name, _ in manifest.stages[self.stages[0]].mesh)
        self._alike = len({stage.mesh for stage in manifest.stages}) == 1
        axes = self._uniform_axes(names) if self._alike else self._own_axes(names)
        self.pipeline = axes[0]
        # All ranks, where no two stages' ranks correspond.
        group = dist.group.WORLD if self.world_size > 1 else None
        self.everyone = None if self._alike else Axis(STAGE_AXIS, self.world_size, self.rank, group, self.traffic)
        self.axes: dict[str, Axis] = {axis.name: axis for axis in axes[1:]}
        self.data = self.axes.get(DATA_AXIS, Axis(DATA_AXIS, traffic=self.traffic))
        self.tensor_axes = tuple(axis for axis in self.axes.values() if axis.name != DATA_AXIS)
        self.tensor_sizes = tuple(axis.size for axis in self.tensor_axes)
        self._ties = self._tie_groups(manifest)
        self.weights: Weights

    def _uniform_axes(self, names: Sequence[str]) -> list[Axis]:
        """The pipeline's axis and the stages', of one mesh."""
        names = (STAGE_AXIS, *names)
        layout = torch.stack(self._layouts)
        position = (self.place_of[self.stages[0]], *self.coordinates)
        groups: dict[int, dist.ProcessGroup] = {}
        if any((layout.diff(dim=dim) < 0).any() for dim in range(layout.dim())):  # DeviceMesh would sort each group
            groups = self._groups_in(layout)
        elif self.world_size > 1:
            mesh = DeviceMesh(self.device.type, layout, mesh_dim_names=names)
            groups = {dim: mesh.get_group(name) for dim, name in enumerate(names) if layout.size(dim) > 1}
        return [
            Axis(name, size, index, groups.get(dim), self.traffic)
            for dim, (name, size, index) in enumerate(zip(names, layout.shape, position, strict=True))
        ]

    def _groups_in(self, layout: torch.Tensor) -> dict[int, dist.ProcessGroup]:
        """This rank's groups by dim, if it is in there. Every rank makes every group, in the same order."""
        groups: dict[int, dist.ProcessGroup] = {}
        for dim, size in enumerate(layout.shape):
            for ranks in layout.movedim(dim, -1).reshape(-1, size).tolist() if size > 1 else ():
                group = _group_of(ranks)
                if self.rank in ranks:
                    groups[dim] = group
        return groups

    def _own_axes(self, names: Sequence[str]) -> list[Axis]:
        """The same for stages of unlike meshes; no rank corresponds to one of another stage."""
        axes = [Axis(STAGE_AXIS, len(self._layouts), self.place_of[self.stages[0]], None, self.traffic)]
        groups: dict[int, dist.ProcessGroup] = {}
        for layout in self._layouts:
            groups |= self._groups_in(layout)
        shape = self._layouts[axes[0].index].shape
        for dim, (name, size, index) in enumerate(zip(names, shape, self.coordinates, strict=True)):
            axes.append(Axis(name, size, index, groups.get(dim), self.traffic))
        return axes

    def __getitem__(self, name: str) -> Axis:
        return self.axes[name]

    def __repr__(self) -> str:
        where = ", ".join(f"{axis.name} {axis.index}/{axis.size}" for axis in self.axes.values())
        return f"Mesh(rank {self.rank}, {self.title}, {where})"

    @property
    def title(self) -> str:
        """What this rank runs, for messages: ``stage 1`` or ``stages 1, 5``."""
        return f"stage{'s' if len(self.stages) > 1 else ''} {', '.join(map(str, self.stages))}"

    def peer(self, stage: int) -> int:
        """The rank that has this rank's coordinates in another stage, of an equal mesh."""
        return self._peers[self.place_of[stage]]

    def route_from(self, stage: int) -> tuple[Axis, int]:
        """The axis, and the index on it, from which all ranks get what the ranks of a stage have alike."""
        place = self.place_of[stage]
        return (self.pipeline, place) if self.everyone is None else (self.everyone, self.ranks_of(place)[0])

    def ranks_of(self, place: int) -> tuple[int, ...]:
        """The job's ranks that are one rank of the pipeline, row-major over its mesh."""
        return tuple(self._layouts[place].flatten().tolist())

    def tie(self, stages: tuple[int, ...]) -> Axis | None:
        """The axis that joins this rank with its peers in ``stages``, over which a tied parameter is summed.

        None when this rank runs none of them, or all.
        """
        return self._ties.get(self._places(stages))

    def copies(self, stages: tuple[int, ...]) -> Axis:
        """The axis of this rank's peers in its own stage that have equal sums of a parameter tied over ``stages``, as
        each of the other stages has on as many ranks: replicas, or all ranks where meshes are unlike. Of one rank
        where stages have unlike numbers of ranks.
        """
        if self.tie(stages) is None:
            return Axis(DATA_AXIS)
        found = self._copies_over(self._places(stages))
        if found is Copies.REPLICAS:
            return self.data
        return self._own_ranks if found is Copies.RANKS else Axis(DATA_AXIS)

    def _places(self, stages: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted({self.place_of[stage] for stage in stages}))

    def random(
        self, path: str, key: int, over: tuple[str, ...] = (), training: bool = True
    ) -> AbstractContextManager[None]:
        """A block in which torch's random functions draw what belongs to this rank's share.

        path, key: the module and the number of the call, so that no two calls draw alike. over: the axes on which the
        value is sharded, coordinates on which change the numbers; ranks that differ on other axes draw the same, and
        so do replicas that compute the same samples. The numbers also change with the step and the microbatch, and
        come back when a microbatch is recomputed.

        On one process with one microbatch nothing is touched: the numbers are those of the original model.
        """
        if not training or (self.world_size == 1 and self.microbatches == 1):
            return nullcontext()
        alike = DATA_AXIS if self.share.in_copies else None
        coordinates = tuple(0 if name == alike else self.axes[name].index for name in over if name in self.axes)
        return seeded(self.device, derive_seed(self.seed, self.step, self.microbatch, path, key, coordinates))

    def draw(self, path: str, key: int, placements: str = "", samples: str = "") -> Draw:
        """The random numbers of a call that are the same under every plan, for this rank's part of the value.

        path, key: the module and the number of its call. placements: of the value, one per tensor axis, with commas.
        samples: the placement that shards the batch; '' if the value does not hold it.
        """
        return Draw(
            derive_seed(self.seed, self.step, path, key),
            tuple(map(Placement.parse, placements.split(","))) if placements else (),
            tuple(axis.size for axis in self.tensor_axes if axis.size > 1),
            tuple(axis.index for axis in self.tensor_axes if axis.size > 1),
            Placement.parse(samples) if samples else None,
            self.share,
        )

    def gather(self, *shares: torch.nn.Parameter) -> Any:
        """The whole weights of parameters that are divided over the data axis: one, or a tuple of several."""
        return self.weights.gather(*shares)

    def _agree(self, seed: int) -> int:
        """Rank 0's seed, on all ranks."""
        if self.world_size == 1:
            return seed
        # Seeds are unsigned 64-bit numbers; tensors hold signed ones.
        shared = torch.tensor([seed % 2**63], dtype=torch.int64, device=self.device)
        dist.broadcast(shared, 0)
        return int(shared.item())

    def _tie_groups(self, manifest: Manifest) -> dict[tuple[int, ...], Axis]:
        """One axis per set of pipeline ranks that share a parameter. All ranks make every group, in the same order."""
        shared = (self._places(spec.stages) for spec in manifest.parameters if not spec.buffer)
        ties: dict[tuple[int, ...], Axis] = {}
        ties_over = list(dict.fromkeys(places for places in shared if len(places) > 1))
        self._own_ranks = self._ranks_axis(ties_over)
        for places in ties_over:
            if self._alike and len(places) == self.pipeline.size:
                ties[places] = self.pipeline
                continue
            for ranks in self._tied_ranks(places):
                group = dist.new_group(ranks)
                if self.rank in ranks:
                    ties[places] = Axis(STAGE_AXIS, len(ranks), ranks.index(self.rank), group, self.traffic)
        return ties

    def _ranks_axis(self, ties: Sequence[tuple[int, ...]]) -> Axis:
        """All ranks of this rank's stage, where copies on unlike meshes of as many ranks are summed."""
        found = Axis(DATA_AXIS)
        alike = (places for places in ties if self._copies_over(places) is Copies.RANKS)
        for place in sorted({place for places in alike for place in places}):
            ranks = list(self.ranks_of(place))
            group = _group_of(ranks) if len(ranks) > 1 else None
            if self.rank in ranks:
                found = Axis(DATA_AXIS, len(ranks), ranks.index(self.rank), group, self.traffic)
        return found

    def _copies_over(self, places: Sequence[int]) -> Copies:
        return tied_copies([tuple(self._layouts[place].shape) for place in places])

    def _tied_ranks(self, places: tuple[int, ...]) -> list[list[int]]:
        """Ranks that add up a parameter: those at equal places in their meshes, or all where these have unlike
        numbers of ranks.
        """
        layouts = [self._layouts[place] for place in places]
        if self._copies_over(places) is not Copies.NONE:
            return [list(column) for column in zip(*(layout.flatten().tolist() for layout in layouts), strict=True)]
        return [[rank for place in places for rank in self.ranks_of(place)]]

    def counts_in(self, stages: tuple[int, ...]) -> bool:
        """Whether this rank's gradient of a parameter tied over these stages is one of those to be added.

        Of the equal copies on all ranks of meshes of unlike sizes the first counts.
        """
        return self._copies_over(self._places(stages)) is not Copies.NONE or not any(self.coordinates)


def _group_of(ranks: list[int]) -> dist.ProcessGroup:
    """A group in which ranks are numbered in this order, as gathers lay out what they have and broadcasts name them."""
    if ranks == sorted(ranks):
        return dist.new_group(ranks)
    if _KEEPS_ORDER:
        return dist.new_group(ranks, sort_ranks=False)
    return dist.new_group([_Placed(rank, place) for place, rank in enumerate(ranks)])


class _Placed(int):
    """A rank that is sorted by its place in a group, for a torch that sorts them."""

    place: int

    def __new__(cls, rank: int, place: int) -> _Placed:
        made = super().__new__(cls, rank)
        made.place = place
        return made

    def __lt__(self, other: int) -> bool:
        return self.place < other.place if isinstance(other, _Placed) else int(self) < other


def check_job_size(planned: int) -> None:
    """Raises ClusterError when the job does not have as many processes as the plan."""
    found = job_size()
    if found != planned:
        raise ClusterError(
            f"the plan is for {planned} ranks, but this job has {found}; "
            f"start it with 'torchrun --nproc-per-node={planned} ...' (in all {planned} processes over the nodes), "
            f"or plan again for {found}"
        )


def places_of(manifest: Manifest) -> tuple[int, ...]:
    """The rank of the pipeline that runs each stage: stages on the same devices are on one, numbered as they appear."""
    groups = list(dict.fromkeys(stage.devices for stage in manifest.stages))
    return tuple(groups.index(stage.devices) for stage in manifest.stages)


def _layouts(manifest: Manifest, places: Sequence[int]) -> list[torch.Tensor]:
    """The ranks of each rank of the pipeline in the shape of its mesh. Raises PlanError if these overlap."""
    layouts: dict[int, torch.Tensor] = {}
    for index, (stage, place) in enumerate(zip(manifest.stages, places, strict=True)):
        sizes = [size for _, size in stage.mesh]
        if len(stage.devices) != math.prod(sizes):
            raise PlanError(f"stage {index} has {len(stage.devices)} devices for a mesh of {math.prod(sizes)}")
        layouts[place] = torch.tensor(stage.devices, dtype=torch.int).reshape(sizes)
    ranks = [rank for layout in layouts.values() for rank in layout.flatten().tolist()]
    if sorted(ranks) != list(range(manifest.world_size)):
        raise PlanError(
            f"the stages' devices {ranks} are not the ranks 0..{manifest.world_size - 1}, each once; stages share all "
            "of their devices, in the same order, or none"
        )
    return [layouts[place] for place in sorted(layouts)]
