"""What the emitted files promise the runtime: one JSON file beside the stages' sources.

The manifest holds everything that a rank needs besides the stage's code: who runs which stage, what crosses between
stages, how each parameter is stored, how outputs of microbatches and replicas combine. Shapes use the string ``"b"``
(or ``"4b"``: four times) for the number of samples in one microbatch on one rank.
"""

from __future__ import annotations

import json
import keyword
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from autopart.runtime.errors import PlanError

VERSION = 1
FILE_NAME = "manifest.json"

Size = int | str

# Mixed precisions: the name, and in what torch.autocast computes there.
MIXED = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}

# Names that mean something else inside an emitted function.
_RESERVED = frozenset(
    "b B self torch nn F Tensor Mesh Namespace collectives invariant local_forms parameter buffer checkpoint "  # noqa: SIM905
    "float int tuple".split()
)


def argument_name(path: str) -> str:
    """The argument of an emitted function for an input, value or total of this path: ``batch.x`` is ``batch__x``.

    Distinct paths have distinct names as long as no path itself has two underscores in a row.
    """
    name = "".join(
        "__" if char == "." else char if char == "_" or char.isalnum() else f"_{ord(char):x}_" for char in path
    )
    if not name or name[0].isdigit():
        name = f"_{name}"
    return f"{name}_" if keyword.iskeyword(name) or name in _RESERVED else name


def size_of(size: Size, batch: int) -> int:
    """The number that a size of the manifest stands for when a microbatch has ``batch`` samples."""
    if isinstance(size, int):
        return size
    return int(size[:-1] or 1) * batch


@dataclass(frozen=True, slots=True)
class ValueSpec:
    """A tensor that crosses between stages; ``shape`` is what one rank holds (already its tensor shard).

    whole: the shape of a replica's value. batch_dim: where it has samples, None if it does not depend on them.
    placements: how it lies on the source's tensor axes; arrivals: on those of each target, in the order of ``targets``.
    Between stages with one mesh it arrives as it lies.
    """

    name: str
    shape: tuple[Size, ...]
    dtype: str
    source: int
    targets: tuple[int, ...]
    needs_grad: bool
    whole: tuple[Size, ...] = ()
    batch_dim: int | None = None
    placements: tuple[str, ...] = ()
    arrivals: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class InputSpec:
    """A leaf of the user's inputs, named by its path (``input_ids``, ``batch.pixels``, ``pairs.0``).

    batch_dim: the dim that holds samples; None: every rank takes it whole.
    shape: with "b" at batch_dim. kind "tensor"; a "constant" was fixed at capture and has to be equal;
        what is "unread" is of an argument that the model's code never reads, and may be anything.
    differentiable: it required a gradient when it was captured, which the program gives.
    """

    name: str
    kind: str
    shape: tuple[Size, ...] = ()
    dtype: str = ""
    batch_dim: int | None = None
    constant: Any = None
    differentiable: bool = False


@dataclass(frozen=True, slots=True)
class ArgumentSpec:
    """An argument of the model's own forward, captured or not. default: where it has one that is no object."""

    name: str
    by_position: bool
    has_default: bool = False
    default: Any = None


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """A leaf of the model's outputs, named by its path in the returned structure.

    combine: how the pieces of microbatches and data-parallel replicas make the whole: "sum", "cat" (along batch_dim,
    within each of so many blocks of it), "same" (equal everywhere), "constant". placements: how it lies on the stage's
    tensor axes; put together only when it is returned. differentiable: whether the model's own has a gradient. kind: of
    a constant that is an object, its class; it is not returned. per_sample: of a number that goes with the batch.
    """

    name: str
    stage: int
    combine: str
    shape: tuple[Size, ...] = ()
    dtype: str = ""
    batch_dim: int = 0
    blocks: int = 1
    constant: Any = None
    placements: tuple[str, ...] = ()
    differentiable: bool = False
    kind: str = ""
    per_sample: int = 0


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """A parameter or buffer under its original qualified name.

    shape: of the whole. stages: those that use it (several: tied, gradients summed over them).
    placements: one per tensor axis of the mesh (Placement text); "B" means whole on every rank with partial gradients,
    summed over the axis once per step. aliases: further names of the same tensor.
    persistent: False for buffers that are not part of the state dict. mutated: a buffer that the forward updates.
    once: it has one new value a step, of that before the step (:mod:`autopart.runtime.written_buffers`). combine: of
    such a buffer, how the new values that shares of the batch make become the whole batch's: ``""``: they are equal;
    ``"sum"``: they add up; ``"added"``: what each added to the value before does. evaluated: evaluation writes it too.
    by_stage: where meshes differ, the placements on each of ``stages``, of which ``placements`` are the first's.
    zero: what is divided over the data axis as well, in ``data_dim`` of the share that the tensor axes leave: 0
    nothing; 1 the optimizer's state; 2 gradients too; 3 weights too (:mod:`autopart.runtime.data_weights`).
    gradients: the stages in which a gradient reaches it; None: all that use it. summed: the dtype in which ranks add
    its gradients up; '': its own.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    stages: tuple[int, ...]
    placements: tuple[str, ...]
    aliases: tuple[str, ...] = ()
    trainable: bool = True
    buffer: bool = False
    persistent: bool = True
    mutated: bool = False
    once: bool = False
    combine: str = ""
    evaluated: bool = False
    by_stage: tuple[tuple[str, ...], ...] = ()
    zero: int = 0
    data_dim: int = 0
    gradients: tuple[int, ...] | None = None
    summed: str = ""

    def learns(self, stage: int) -> bool:
        """Whether its gradient is computed on a stage."""
        return (
            self.trainable and not self.buffer and stage in (self.stages if self.gradients is None else self.gradients)
        )


@dataclass(frozen=True, slots=True)
class StageSpec:
    """One stage: its source file, the ranks that run it (row-major over the mesh), its mesh, and what it exchanges.

    mesh: (axis name, size) pairs, outermost first; "dp" is the data axis, all others are tensor axes.
    inputs, receives, totals: keyword arguments of ``Stage.forward`` besides ``b`` and ``B``, see :func:`argument_name`.
    sends, outputs: what it returns, in this order, as one tuple. shares: of each microbatch, the part of every replica;
    empty: equal parts.
    """

    file: str
    devices: tuple[int, ...]
    mesh: tuple[tuple[str, int], ...]
    inputs: tuple[str, ...]
    receives: tuple[str, ...]
    totals: tuple[str, ...]
    sends: tuple[str, ...]
    outputs: tuple[str, ...]
    shares: tuple[int, ...] = ()

    @property
    def replica_shares(self) -> tuple[int, ...]:
        """The parts of the replicas, in lowest terms."""
        shares = self.shares or (1,) * dict(self.mesh).get("dp", 1)
        divisor = math.gcd(*shares)
        return tuple(share // divisor for share in shares)


@dataclass(frozen=True, slots=True)
class AssumptionSpec:
    """A condition of the model's code, and what it was when the model was captured."""

    value: bool
    text: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The whole program. ``schedule`` names a schedule of :mod:`autopart.runtime.schedule`, or is the text of one.

    warmup: forwards of each stage before its first pair under 1F1B; empty: the least.

    totals: values computed once per step from the inputs of the whole batch (such as the number of valid labels), by
    ``totals.py``'s function ``totals(*, b, B, <totals_inputs and totals_buffers>)`` which returns them as a tuple.
    Stages that use totals hold the buffers that these are computed from.
    loss: name of the output that is the loss; None when the user's code computes it from the outputs.
    precision: "bf16-mixed", "fp16-mixed" (see MIXED), or '' where the stages compute in the parameters' types.
    eval_flaw: why the stages cannot be evaluated (model.eval()), '' when they can. no_grad_flaw: why they cannot run
    under ``torch.no_grad()``.
    batch_splittable: False when the model mixes samples: one microbatch, one replica.
    tokens_per_sample, flops_per_sample: of a step, and peak_flops: FLOP/s of all devices in the type of most products,
    as the plan has them; 0: unknown.
    assumptions: of which the function ``conditions(*, b, B, <assumption_inputs>)`` of ``assumptions.py`` computes the
    values for a whole batch, in this order.
    arguments: of the model's own forward, in its order; empty: unknown, and ``input_names`` are all.
    outline: equal for programs of one model that are made for inputs of other sizes; '': unknown. fixed_batch: samples,
    where the program takes no other number; 0: any. most_samples: of a microbatch, 0: any. bucket_bytes: of gradients
    that share a message; 0: :data:`autopart.runtime.buckets.BUCKET_BYTES`.
    """

    fingerprint: str
    world_size: int
    schedule: str
    microbatches: int
    stages: tuple[StageSpec, ...]
    values: tuple[ValueSpec, ...]
    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]
    parameters: tuple[ParameterSpec, ...]
    parameter_order: tuple[str, ...]
    input_names: tuple[str, ...]
    loss: str | None
    totals: tuple[str, ...] = ()
    totals_inputs: tuple[str, ...] = ()
    totals_buffers: tuple[str, ...] = ()
    output_structure: Any = None
    batch_splittable: bool = True
    imports: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())
    eval_flaw: str = ""
    no_grad_flaw: str = ""
    warmup: tuple[int, ...] = ()
    precision: str = ""
    tokens_per_sample: int = 0
    flops_per_sample: float = 0.0
    peak_flops: float = 0.0
    assumptions: tuple[AssumptionSpec, ...] = ()
    assumption_inputs: tuple[str, ...] = ()
    outline: str = ""
    fixed_batch: int = 0
    most_samples: int = 0
    bucket_bytes: int = 0
    arguments: tuple[ArgumentSpec, ...] = ()

    @property
    def is_uniform(self) -> bool:
        """Whether all stages have one mesh, and replicas equal parts of the batch."""
        return len({stage.mesh for stage in self.stages}) == 1 and all(
            len(set(stage.replica_shares)) == 1 for stage in self.stages
        )

    @property
    def delays_gradients(self) -> bool:
        """Whether a call returns the loss, and its backward hands out the gradients, of the batch before (2BW)."""
        return self.schedule == "2bw" and self.loss is not None

    def seen_from(self, stages: Sequence[int]) -> Manifest:
        """The manifest as ranks of these stages see it: parameters with the placements that they have there.

        Of those that they do not hold nothing is known to be divided.
        """
        if self.is_uniform and all(len(set(spec.by_stage)) < 2 for spec in self.parameters):
            return self

        def local(spec: ParameterSpec) -> ParameterSpec:
            held = [placements for stage, placements in zip(spec.stages, spec.by_stage, strict=True) if stage in stages]
            return replace(spec, placements=held[0]) if held else replace(spec, placements=(), zero=0)

        return replace(self, parameters=tuple(map(local, self.parameters)))

    def save(self, directory: Path) -> None:
        text = json.dumps({"version": VERSION, **asdict(self)}, indent=1)
        (directory / FILE_NAME).write_text(text + "\n")

    @staticmethod
    def load(directory: Path) -> Manifest:
        """Reads a manifest. Raises PlanError when it is missing, unreadable or of another version."""
        path = directory / FILE_NAME
        try:
            data = json.loads(path.read_text())
        except OSError as error:
            raise PlanError(f"no emitted program in {directory}: {error}; write one with 'autopart emit'") from error
        except ValueError as error:
            raise PlanError(f"{path} is not readable as JSON: {error}; emit the program again") from error
        version = data.pop("version", None) if isinstance(data, dict) else None
        if version != VERSION:
            raise PlanError(f"{path} has version {version}, this autopart reads {VERSION}; emit the program again")
        try:
            return Manifest(
                **{
                    **data,
                    "stages": tuple(
                        StageSpec(**{**_tuples(item), "mesh": tuple((name, size) for name, size in item["mesh"])})
                        for item in data["stages"]
                    ),
                    "values": tuple(ValueSpec(**_tuples(item)) for item in data["values"]),
                    "inputs": tuple(InputSpec(**_tuples(item)) for item in data["inputs"]),
                    "outputs": tuple(OutputSpec(**_tuples(item)) for item in data["outputs"]),
                    "parameters": tuple(ParameterSpec(**_tuples(item)) for item in data["parameters"]),
                    **{key: tuple(data[key]) for key in _NAME_LISTS},
                    "assumptions": tuple(AssumptionSpec(**item) for item in data.get("assumptions", ())),
                    "assumption_inputs": tuple(data.get("assumption_inputs", ())),
                    "arguments": tuple(ArgumentSpec(**item) for item in data.get("arguments", ())),
                    "warmup": tuple(data.get("warmup", ())),  # older programs have none
                }
            )
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(f"{path} is not a complete manifest: {error}; emit the program again") from error


_NAME_LISTS = ("parameter_order", "input_names", "totals", "totals_inputs", "totals_buffers", "imports", "notes")


def _tuples(item: dict[str, Any]) -> dict[str, Any]:
    keep = ("constant",)
    return {key: _tuple(value) if key not in keep else value for key, value in item.items()}


def _tuple(value: Any) -> Any:
    return tuple(map(_tuple, value)) if isinstance(value, list) else value
