"""A plan: who runs what, how it is split, and what that is predicted to cost.

What the solver returns and what a user writes by hand are the same type. A plan is one JSON file; every key is a field
of :class:`Plan` or :class:`StagePlan`, and reading checks each and says where and what is wrong.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from autopart.cost.communication import KINDS
from autopart.plan_file import build, pretty
from autopart.report.units import counted
from autopart.runtime.buckets import BUCKET_BYTES
from autopart.runtime.errors import PlanError, ScheduleError
from autopart.runtime.files import write_whole
from autopart.runtime.manifest import MIXED
from autopart.runtime.placement import Placement
from autopart.runtime.schedule import NAMES, deeper_warmup, in_flight, make_schedule
from autopart.tensor_scheme import TensorScheme
from autopart.update_memory import OPTIMIZERS
from autopart.wishes import check_recorded

if TYPE_CHECKING:
    from autopart.passes.program import Program
    from autopart.runtime.pipelining import PipelineStages

VERSION = 1
SCHEDULES = NAMES
RECOMPUTE = ("none", "full", "some")
DROPOUT = ("torch", "invariant")
_MOST = 2**20
"""Of blocks and of microbatches: no more of a schedule would fit into memory."""

Mesh = tuple[tuple[str, int], ...]
Transfers = tuple[tuple[int, int, float, float | None], ...]


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One pipeline stage.

    devices: numbers in the cluster, row-major over the mesh; stages that run on the same devices (virtual stages) list
    them alike. mesh: (axis name, size), the data axis "dp" first, then
    tensor axes. blocks: half-open range of the model's block numbers. first_op, last_op: names of the ops at its ends.
    forward_s, backward_s: seconds of one microbatch with collectives; weight_s: of the backward, the weights' share
    that a zero-bubble schedule does apart. hidden_s: by kind, seconds of collectives that pass unseen beside ops that
    are computed meanwhile, in neither of them, and under "dp" what replicas exchange so for parameters that they
    divide. step_end_s: seconds once per step, for the optimizer and those of the gradients' sums that the last backward
    does not hide; arrival_s: those that the first forward waits for weights that replicas update in shares.
    memory_bytes, capacity_bytes: predicted peak and what a device has (an even share where it runs several stages), of
    the replica that holds the most.
    state_bytes: of the peak, parameters, gradients and optimizer state that one device holds; 0: not told.
    parameters: numbers held by one device. collectives: by kind, calls and payload bytes per microbatch, such as
    ``{"all_reduce": {"calls": 4, "bytes": 8388608}}``. axis_collectives: the same by axis of the mesh, of which "dp"
    has what ZeRO exchanges; empty: not told. shares: of each microbatch, the part of every replica, such as [3, 1]
    where one device is faster; empty: equal parts. strategies, storage: this stage's own, where its tensor axes
    are not those of other stages; empty: the plan's.
    step_collectives: of a step for the parameters, such as sums of gradients. recompute: where the plan recomputes
    "some", the layers of this stage, and modules in layers, of which only the inputs are kept for the backward, such as
    "transformer.h.3" or "transformer.h.4.mlp".
    device: what its devices are, such as "A100-80GB".
    """

    devices: tuple[int, ...]
    mesh: Mesh
    blocks: tuple[int, int]
    first_op: str = ""
    last_op: str = ""
    forward_s: float = 0.0
    backward_s: float = 0.0
    memory_bytes: int = 0
    capacity_bytes: int = 0
    parameters: int = 0
    collectives: Mapping[str, Mapping[str, int]] = field(default_factory=dict, hash=False)
    step_end_s: float = 0.0
    weight_s: float = 0.0
    shares: tuple[int, ...] = ()
    strategies: Mapping[str, str] = field(default_factory=dict, hash=False)
    storage: Mapping[str, str] = field(default_factory=dict, hash=False)
    step_collectives: Mapping[str, Mapping[str, int]] = field(default_factory=dict, hash=False)
    hidden_s: Mapping[str, float] = field(default_factory=dict, hash=False)
    recompute: tuple[str, ...] = ()
    device: str = ""
    state_bytes: int = 0
    axis_collectives: Mapping[str, Mapping[str, Mapping[str, int]]] = field(default_factory=dict, hash=False)
    arrival_s: float = 0.0

    def __post_init__(self) -> None:
        names = [name for name, _ in self.mesh]
        _require(bool(self.mesh) and names[0] == "dp", f"mesh: the first axis is 'dp', found {names}; write ['dp', 1]")
        _require(
            not self.shares or (len(self.shares) == self.mesh[0][1] and min(self.shares) >= 1),
            f"shares: a part of at least 1 for each replica, found {list(self.shares)}",
        )
        _require(len(set(names)) == len(names), f"mesh: two axes are both called one of {names}; rename one")
        _require(all(size >= 1 for _, size in self.mesh), "mesh: an axis has at least 1 device")
        _require(all(name.isidentifier() for name in names), f"mesh: axis names are identifiers, found {names}")
        size = math.prod(size for _, size in self.mesh)
        _require(
            size == len(self.devices), f"mesh: {size} positions for {len(self.devices)} devices; make the product equal"
        )
        _require(len(set(self.devices)) == len(self.devices), "devices: a device is named twice; each has one place")
        _require(all(device >= 0 for device in self.devices), "devices: numbers count from 0")
        other = next((axis for axis in self.axis_collectives if axis not in names), None)
        _require(other is None, f"axis_collectives: {other!r} is no axis of the mesh, which has {', '.join(names)}")
        for name, counts in (
            ("collectives", self.collectives),
            ("step_collectives", self.step_collectives),
            *((f"axis_collectives[{axis!r}]", counts) for axis, counts in self.axis_collectives.items()),
        ):
            unknown = next((kind for kind in counts if kind not in KINDS), None)
            _require(unknown is None, f"{name}: {unknown!r} is none of {', '.join(KINDS)}")
            least = min((number for count in counts.values() for number in count.values()), default=0)
            _require(least >= 0, f"{name}: calls and bytes are at least 0, found {least}")
        first, end = self.blocks
        _require(0 <= first < end <= _MOST, f"blocks: expected [first, end) with first < end, found [{first}, {end})")
        for name in (
            "forward_s",
            "backward_s",
            "step_end_s",
            "arrival_s",
            "weight_s",
            "memory_bytes",
            "capacity_bytes",
            "state_bytes",
            "parameters",
        ):
            value = getattr(self, name)
            _require(value >= 0 and math.isfinite(value), f"{name}: expected a number of at least 0, found {value}")

    @property
    def dp(self) -> int:
        return self.mesh[0][1]

    @property
    def tp(self) -> int:
        """The product of the tensor axes."""
        return math.prod(size for _, size in self.mesh[1:])


@dataclass(frozen=True, slots=True)
class Plan:
    """The whole program for one model on one cluster, and the account of how it was chosen.

    cluster_digest: of the numbers that the plan was made with, see Cluster.digest; empty: not told.
    batch: samples of a step over all replicas. dtype: of most parameters. strategies: by op pattern
    (``h.*.mlp.c_fc:addmm``, ``*`` for a layer's index) the strategy's name; what is not listed is replicated ("R").
    storage: by parameter pattern how it is stored, one Placement per tensor axis joined with a comma; not listed: as
    it is used. zero: by parameter pattern what its replicas divide between them: 1 the optimizer's state, 2 gradients
    too, 3 weights too; not listed: 0, nothing.
    recompute: layers whose activations are computed again in the backward: "none", "full" (all), or "some": layers and
    modules in them, which the stages list.
    warmup: forwards of each stage before its first backward's pair under 1f1b (runtime.schedule.one_f_one_b); empty:
    the least. transfers: (source stage, target stage, seconds of one microbatch's values, seconds of their gradients or
    null where none go back). tied_s: seconds of summing gradients over stages, once per step.
    step_time_s: predicted seconds of a step. bound_s: no plan of the searched space is faster, but by what collectives
    that are begun ahead may hide. gap:
    ``(step_time_s - bound_s) / step_time_s``. solve_s, total_s: seconds the solver and all of planning took.
    dropout: "torch", each rank's own numbers; or "invariant", the same masks under every plan (runtime.invariant).
    order: numbers of all blocks, stage after stage, where stages are no ranges of block numbers: their ``blocks`` are
    places in it then; empty: as numbered.
    pins, together: what the user asked for, module patterns and their stages, and groups of patterns on one stage; see
    :mod:`autopart.pins`. The stages follow them; nothing else reads them when the plan is run.
    shared_host: devices of each host, where these share its cores; 0: they have cores of their own. alone: how many
    times as fast as the stages' seconds say they are while no other device of the host computes.
    example_batch: samples of the inputs that the model was captured on, by which its blocks were found; 0: not told.
    tensor_scheme: that was asked for, see :mod:`autopart.tensor_scheme`; the strategies say what came of it. asked: the
    same of degrees and other limits, see :mod:`autopart.wishes`; nothing reads it when the plan is run.
    optimizer: by which memory is counted; any may be used. bucket_bytes: of gradients that share a message.
    tokens, flops: of one step; peak_flops: FLOP/s of all its devices in the type of most products; 0 when unknown.
    considered: other candidates, as rows for the report.
    """

    fingerprint: str
    model: str
    cluster: str
    batch: int
    dtype: str
    schedule: str
    microbatches: int
    stages: tuple[StagePlan, ...]
    recompute: str = "none"
    strategies: Mapping[str, str] = field(default_factory=dict, hash=False)
    storage: Mapping[str, str] = field(default_factory=dict, hash=False)
    zero: Mapping[str, int] = field(default_factory=dict, hash=False)
    step_time_s: float = 0.0
    bound_s: float = 0.0
    gap: float = 0.0
    solve_s: float = 0.0
    total_s: float = 0.0
    tokens: int = 0
    flops: float = 0.0
    peak_flops: float = 0.0
    notes: tuple[str, ...] = ()
    considered: tuple[Mapping[str, Any], ...] = field(default=(), hash=False)
    warmup: tuple[int, ...] = ()
    transfers: Transfers = ()
    tied_s: float = 0.0
    dropout: str = "torch"
    order: tuple[int, ...] = ()
    pins: Mapping[str, int] = field(default_factory=dict, hash=False)
    together: tuple[tuple[str, ...], ...] = ()
    shared_host: int = 0
    alone: float = 1.0
    optimizer: str = "adamw"
    bucket_bytes: int = BUCKET_BYTES
    tensor_scheme: str = TensorScheme.AUTO.value
    asked: Mapping[str, int | str] = field(default_factory=dict, hash=False)
    cluster_digest: str = ""
    example_batch: int = 0

    def __post_init__(self) -> None:
        _require(self.schedule in SCHEDULES, f"schedule: {self.schedule!r} is not one of {', '.join(SCHEDULES)}")
        _require(self.recompute in RECOMPUTE, f"recompute: {self.recompute!r} is not one of {', '.join(RECOMPUTE)}")
        _require(
            (self.recompute == "some") == any(stage.recompute for stage in self.stages),
            'recompute: "some" where stages list layers to recompute, and only there; '
            f"found {self.recompute!r} with {[list(stage.recompute) for stage in self.stages]}",
        )
        _require(self.dropout in DROPOUT, f"dropout: {self.dropout!r} is not one of {', '.join(DROPOUT)}")
        _require(self.batch >= 1 and self.microbatches >= 1, "batch and microbatches: at least 1")
        _require(self.example_batch >= 0, f"example_batch: at least 0, found {self.example_batch}")
        _require(self.bucket_bytes >= 1, f"bucket_bytes: at least 1, found {self.bucket_bytes}")
        _require(
            self.shared_host >= 0 and 1 <= self.alone <= _MOST,
            f"shared_host: at least 0, and alone: at least 1, found {self.shared_host} and {self.alone}",
        )
        _require(self.microbatches <= _MOST, f"microbatches: at most {_MOST}, found {self.microbatches}")
        _require(
            self.dtype in MIXED or isinstance(getattr(torch, self.dtype, None), torch.dtype),
            f"dtype: one of torch's, such as bfloat16, or {', '.join(MIXED)}, found {self.dtype!r}",
        )
        _require(bool(self.stages), "stages: a plan has at least one stage")
        if self.warmup:
            check_warmup(self.schedule, self.warmup, len(self.stages))
        for source, target, *seconds in self.transfers:
            _require(
                0 <= source < target < len(self.stages) and all(x is None or 0 <= x < math.inf for x in seconds),
                f"transfers: [{source}, {target}, ...]: expected source < target < {len(self.stages)} and seconds",
            )
        groups = {stage.devices: stage.mesh for stage in self.stages}
        used = [device for devices in groups for device in devices]
        _require(
            len(set(used)) == len(used),
            "stages: a device is in two stages; stages share all of their devices, in the same order, or none",
        )
        _require(
            all(stage.mesh == groups[stage.devices] for stage in self.stages),
            "stages: two stages share their devices but not their mesh; give them the same mesh",
        )
        try:
            chain = tuple((stage, stage + 1) for stage in range(len(self.stages) - 1))
            make_schedule(self.schedule, len(self.stages), self.microbatches, chain, places=self.places)
        except ScheduleError as error:
            raise PlanError(f"schedule: {error}") from error
        for index, (before, after) in enumerate(zip(self.stages, self.stages[1:], strict=False)):
            _require(
                before.blocks[1] == after.blocks[0],
                f"stages[{index + 1}].blocks: starts at {after.blocks[0]}, the stage before ends at {before.blocks[1]}",
            )
        _require(self.stages[0].blocks[0] == 0, "stages[0].blocks: the first stage starts at block 0")
        schemes = [scheme.value for scheme in TensorScheme]
        _require(
            self.tensor_scheme in schemes,
            f"tensor_scheme: one of {', '.join(schemes)}, not {self.tensor_scheme!r}",
        )
        _require(self.optimizer in OPTIMIZERS, f"optimizer: one of {', '.join(OPTIMIZERS)}, not {self.optimizer!r}")
        _require(
            not self.order or sorted(self.order) == list(range(self.stages[-1].blocks[1])),
            f"order: every block from 0 to {self.stages[-1].blocks[1] - 1} once, or nothing",
        )
        for index, stage in enumerate(self.stages):
            parts = sum(stage.shares) // math.gcd(*stage.shares) if stage.shares else stage.dp
            samples = self.microbatches * parts
            pieces, replicas = counted(self.microbatches, "microbatch"), counted(stage.dp, "replica")
            _require(
                self.batch % samples == 0,
                f"stages[{index}]: a batch of {self.batch} does not divide into {pieces} on "
                f"{replicas}{f' with the shares {list(stage.shares)}' if stage.shares else ''}; make batch a "
                f"multiple of {samples}",
            )
        for name in ("step_time_s", "bound_s", "gap", "solve_s", "total_s", "tokens", "flops", "peak_flops", "tied_s"):
            value = getattr(self, name)
            _require(value >= 0 and math.isfinite(value), f"{name}: expected a number of at least 0, found {value}")
        check_recorded(self.asked)
        for pattern, pinned in self.pins.items():
            _require(
                0 <= pinned < len(self.stages),
                f"pins[{pattern!r}]: stage {pinned}, but the plan's stages are 0 to {len(self.stages) - 1}",
            )
        for pattern, level in self.zero.items():
            _require(level in (0, 1, 2, 3), f"zero[{pattern!r}]: one of 0, 1, 2, 3, found {level}")
        for pattern, text in self.storage.items():
            for item in text.split(","):
                try:
                    Placement.parse(item.strip())
                except ValueError as error:
                    raise PlanError(f"storage[{pattern!r}]: {error}") from error

    @property
    def places(self) -> tuple[int, ...]:
        """The rank of the pipeline (a group of devices) that runs each stage, numbered as they appear."""
        groups = list(dict.fromkeys(stage.devices for stage in self.stages))
        return tuple(groups.index(stage.devices) for stage in self.stages)

    @property
    def pp(self) -> int:
        """Ranks of the pipeline; there are more stages where these run several."""
        return 1 + max(self.places)

    @property
    def dp(self) -> int:
        """Replicas, where all stages have equally many; else the most."""
        return max(stage.dp for stage in self.stages)

    @property
    def tp(self) -> int:
        """Devices that share one replica of a stage, where stages agree; else the most."""
        return max(stage.tp for stage in self.stages)

    @property
    def layout(self) -> str:
        """The meshes for people: ``pp 2 x dp 2 x tp 1``, or where stages differ what each has."""
        if self.is_uniform:
            return f"pp {self.pp} x dp {self.dp} x tp {self.tp}"
        return f"pp {self.pp}, dp x tp by stage {', '.join(f'{stage.dp}x{stage.tp}' for stage in self.stages)}"

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Most microbatches that each stage holds at once."""
        return in_flight(self.schedule, len(self.stages), self.microbatches, self.warmup, self.places)

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Where stages begin, as places in the order of blocks, and its end."""
        return (*(stage.blocks[0] for stage in self.stages), self.stages[-1].blocks[1])

    def blocks_of(self, stage: int) -> tuple[int, ...]:
        """Numbers of a stage's blocks."""
        places = range(*self.stages[stage].blocks)
        return tuple(self.order[place] for place in places) if self.order else tuple(places)

    @property
    def is_uniform(self) -> bool:
        """Whether all stages have one mesh, strategies of the plan, and replicas with equal parts of the batch."""
        own = any(stage.strategies or stage.storage or len(set(stage.shares)) > 1 for stage in self.stages)
        return len({stage.mesh for stage in self.stages}) == 1 and not own

    @property
    def device_count(self) -> int:
        return len({device for stage in self.stages for device in stage.devices})

    @property
    def fullest_bytes(self) -> int:
        """Bytes of the fullest device; one that runs several stages holds them all."""
        held: dict[tuple[int, ...], int] = {}
        for stage in self.stages:
            held[stage.devices] = held.get(stage.devices, 0) + stage.memory_bytes
        return max(held.values())

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_time_s if self.step_time_s else 0.0

    @property
    def throughput_unit(self) -> str:
        """What ``tokens`` are: those of a model that reads one sequence of numbers a sample, else samples."""
        return "samples" if self.tokens == self.batch else "tokens"

    @property
    def tflops_per_device(self) -> float:
        """10^12 model FLOPs per second and device (recomputation not counted)."""
        return self.flops / self.step_time_s / self.device_count / 1e12 if self.step_time_s else 0.0

    def to_pipeline_stages(self, program: Program, originals: Any = None, **options: Any) -> PipelineStages:
        """This rank's stage for the schedules of torch.distributed.pipelining, in a job of the plan's devices.

        Every rank calls it with the program that was planned; rank 0 emits it, and every rank loads its part.
        originals: the model, or its parameters and buffers by name; None: zeros. options: ``directory`` for the emitted
        program (default: a temporary folder), ``rules`` that the plan was made with, and those of
        :func:`autopart.load`.
        Raises PlanError where torch's schedules cannot run the plan, before anything is loaded: replicas, unlike
        meshes, several stages on a rank, values that skip a stage (see :mod:`autopart.runtime.pipelining`); and where
        the plan is another program's.
        """
        from autopart.api import to_pipeline_stages

        return to_pipeline_stages(self, program, originals, **options)

    def to_json_object(self) -> dict[str, Any]:
        """The summary that the command line prints with ``--json``: what is printed without it too."""
        return {
            "model": self.model,
            "cluster": self.cluster,
            "batch": self.batch,
            "dtype": self.dtype,
            "step_time_s": self.step_time_s,
            "bound_s": self.bound_s,
            "gap": self.gap,
            "solve_s": self.solve_s,
            "total_s": self.total_s,
            "schedule": self.schedule,
            "warmup": list(self.warmup),
            "microbatches": self.microbatches,
            "recompute": self.recompute,
            "asked": dict(self.asked),
            "pins": dict(self.pins),
            "together": [list(group) for group in self.together],
            "dp": self.dp,
            "tp": self.tp,
            "pp": self.pp,
            "tokens_per_s": self.tokens_per_s,
            "tflops_per_device": self.tflops_per_device,
            "notes": list(self.notes),
            "stages": [
                {
                    "devices": list(stage.devices),
                    "mesh": [list(axis) for axis in stage.mesh],
                    "shares": list(stage.shares),
                    "device": stage.device,
                    "blocks": list(stage.blocks),
                    "forward_s": stage.forward_s,
                    "backward_s": stage.backward_s,
                    "memory_bytes": stage.memory_bytes,
                    "capacity_bytes": stage.capacity_bytes,
                    "parameters": stage.parameters,
                    "collectives": {kind: dict(count) for kind, count in stage.collectives.items()},
                    "step_collectives": {kind: dict(count) for kind, count in stage.step_collectives.items()},
                    "recompute": list(stage.recompute),
                }
                for stage in self.stages
            ],
        }

    def to_json(self) -> str:
        """The file's text: one key per line, short lists on one line."""
        return pretty({"version": VERSION, **asdict(self)}) + "\n"

    def save(self, path: str | Path) -> None:
        """Writes the plan; a reader finds the old file or the whole new one, never a part. Raises OSError."""
        write_whole(path, self.to_json())

    @staticmethod
    def from_json(text: str, where: str = "plan") -> Plan:
        """Reads what :meth:`to_json` writes. Raises PlanError with the place and what is expected there."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(
                f"{where}:{error.lineno}: not readable as JSON: {error.msg}; make the plan again"
            ) from error
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, or lists in lists
            raise PlanError(f"{where}: not readable as JSON: {error}; make the plan again") from error
        if not isinstance(data, dict):
            raise PlanError(f"{where}: expected an object, found {type(data).__name__}")
        version = data.pop("version", None)
        if version != VERSION:
            raise PlanError(f"{where}: version: found {version!r}, this autopart reads {VERSION}; make the plan again")
        raw_stages = data.get("stages")
        if not isinstance(raw_stages, list):
            raise PlanError(f"{where}: stages: expected a list of stages, found {str(raw_stages)[:120]}")
        stages = tuple(build(StagePlan, item, f"{where}: stages[{index}]") for index, item in enumerate(raw_stages))
        plan = build(Plan, {**data, "stages": stages}, where)
        _check_devices(plan, where)
        return plan

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Reads a plan file. Raises PlanError."""
        try:
            text = Path(path).read_text()
        except OSError as error:
            raise PlanError(f"cannot read the plan {path}: {error.strerror}; make one with 'autopart plan'") from error
        except UnicodeDecodeError as error:
            raise PlanError(f"{path} is not a text file; make a plan with 'autopart plan'") from error
        return Plan.from_json(text, str(path))


def check_warmup(schedule: str, warmup: Sequence[int], stages: int) -> None:
    """Raises PlanError when the schedule has no warm-up, or stages would wait for each other."""
    _require(schedule == "1f1b", f"warmup: only the schedule 1f1b has a warm-up, not {schedule}; leave it out")
    least = f"such as {list(deeper_warmup(stages, 1))}"
    _require(len(warmup) == stages, f"warmup: one number for each of {stages} stages, {least}, found {list(warmup)}")
    falls = all(before >= after for before, after in itertools.pairwise(warmup))
    _require(
        falls and min(warmup) >= 0,
        f"warmup: a stage runs ahead at least as far as the next one, {least}; with {list(warmup)} they would wait for "
        "each other",
    )


def _check_devices(plan: Plan, where: str) -> None:
    """Raises PlanError for devices that the plan's cluster does not have, as far as its name tells how many it has."""
    from autopart.what_if import cluster_named

    cluster = cluster_named(plan.cluster)
    if cluster is None:
        return
    for index, stage in enumerate(plan.stages):
        last = max(stage.devices)
        _require(
            last < cluster.device_count,
            f"{where}: stages[{index}].devices: there is no device {last} in {plan.cluster}, whose "
            f"{counted(cluster.device_count, 'device')} count from 0; name others, or plan again",
        )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise PlanError(message)
