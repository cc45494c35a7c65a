"""A plan: who runs what, how it is split, and what that is predicted to cost.

What the solver returns and what a user writes by hand are the same type. A plan is one JSON file; every key is a field
of :class:`Plan` or :class:`StagePlan`, and reading checks each and says where and what is wrong.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopart.plan_checks import check_devices, check_plan, check_stage
from autopart.plan_file import build, pretty
from autopart.runtime.buckets import BUCKET_BYTES
from autopart.runtime.errors import PlanError
from autopart.runtime.files import write_whole
from autopart.runtime.schedule import in_flight
from autopart.tensor_scheme import TensorScheme

if TYPE_CHECKING:
    from autopart.passes.program import Program
    from autopart.runtime.pipelining import PipelineStages

VERSION = 1
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
        check_stage(self)

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
        check_plan(self)

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
            "zero": dict(self.zero),
            "asked": dict(self.asked),
            "pins": dict(self.pins),
            "together": [list(group) for group in self.together],
            "dp": self.dp,
            "tp": self.tp,
            "pp": self.pp,
            "tokens_per_s": self.tokens_per_s,
            "throughput_unit": self.throughput_unit,
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
        check_devices(plan, where)
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
