"""The captured model: one functional graph, and what its placeholders and outputs stand for."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopart.passes.graph import RECURRENT, is_getitem, may_have_gradient, results
from autopart.runtime.manifest import ArgumentSpec, InputSpec


class Role(enum.Enum):
    """What a placeholder of the graph stands for (``node.meta["role"]``)."""

    BATCH = "batch"
    GLOBAL_BATCH = "global batch"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    TOTAL = "total"
    RECEIVED = "received"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A parameter or buffer: ``name`` is the first qualified name, ``aliases`` the further names it is tied to."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    buffer: bool = False
    persistent: bool = True
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OutputInfo:
    """A leaf of what the model returns; ``constant`` when it is not a tensor.

    differentiable: whether the model's own has a gradient, which is a loss's alone where there is one. kind: the class
    of an object, of which nothing is kept. per_sample: of a number that goes with the batch, such as a count of tokens.
    """

    name: str
    node: fx.Node | None
    constant: Any = None
    differentiable: bool = False
    kind: str = ""
    per_sample: int = 0


@dataclass(frozen=True, slots=True)
class Assumption:
    """What a condition of the model's code was when it was captured. text: module path, file, line, code."""

    value: bool
    text: str


@dataclass(frozen=True, slots=True)
class Evaluation:
    """How evaluation differs. flaw: why the stages cannot do it, '' where they can. writes: buffers that it writes.

    no_grad_flaw: why they cannot run under ``torch.no_grad()``, in training or evaluation.
    """

    flaw: str = ""
    writes: tuple[str, ...] = ()
    no_grad_flaw: str = ""


def _nobody_knows() -> Evaluation:
    return Evaluation("it was captured without check_eval, so that nobody knows whether evaluation computes the same")


@dataclass(slots=True)
class Program:
    """A model as autopart sees it. Passes do not change a Program; they make new graphs from its own.

    graph: functional; its placeholders carry ``meta["role"]`` and, for tensors, ``meta["name"]``; its output is the
    tuple of :attr:`outputs`' nodes followed by the new values of :attr:`updated_buffers`.
    batch: samples in the example inputs. static_batch: why the batch size is fixed, '' when it is symbolic.
    most_samples: for how many the graph holds at most, 0: any.
    loss: name of the output that is the loss, None when the user's code computes it.
    check_evaluation: finds :attr:`evaluation`, once somebody asks for it.
    precision: "bf16-mixed", "fp16-mixed", or '' where the ops compute in the types that the model names.
    reduce_dtype: in which ranks add gradients up ("float32"); '': in the parameters' own types.
    assumptions: what the model's branches were decided by, each a result of the graph ``conditions`` of the inputs.
    synced_norms: paths of modules whose statistics are those of the batch on all ranks, as SyncBatchNorm's are.
    set_attributes: what forward sets to tensors, as layers do with parts of a loss (autopart.set_by_forward.SetTensor).
    grad_mode_read: file and line of the model's code that first asks whether gradients are on, '' if none does.
    arguments: of the model's own forward, also those that the example inputs leave out.
    constants: tensors that the state dict does not hold (non-persistent buffers, literals), where they are real.
    """

    name: str
    graph: fx.Graph
    tensors: dict[str, TensorInfo]
    inputs: tuple[InputSpec, ...]
    input_names: tuple[str, ...]
    outputs: tuple[OutputInfo, ...]
    output_structure: Any
    updated_buffers: tuple[str, ...]
    loss: str | None
    batch: int
    static_batch: str = ""
    most_samples: int = 0
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    precision: str = ""
    reduce_dtype: str = ""
    check_evaluation: Callable[[], Evaluation] = _nobody_knows
    assumptions: tuple[Assumption, ...] = ()
    conditions: fx.Graph | None = None
    arguments: tuple[ArgumentSpec, ...] = ()
    synced_norms: tuple[str, ...] = ()
    set_attributes: tuple[Any, ...] = ()
    grad_mode_read: str = ""
    _fingerprint: str = ""

    @property
    def eval_flaw(self) -> str:
        """Why the emitted stages cannot be evaluated, '' when they can."""
        return self.evaluation.flaw

    @property
    def evaluation(self) -> Evaluation:
        found = self.check_evaluation()
        self.check_evaluation = lambda: found
        return found

    @property
    def parameters(self) -> list[TensorInfo]:
        return [info for info in self.tensors.values() if not info.buffer]

    @property
    def parameter_count(self) -> int:
        return sum(torch.Size(info.shape).numel() for info in self.parameters)

    @property
    def dtype(self) -> torch.dtype:
        """The type that most of the parameters have."""
        sizes: dict[torch.dtype, int] = {}
        for info in self.parameters:
            sizes[info.dtype] = sizes.get(info.dtype, 0) + torch.Size(info.shape).numel()
        return max(sizes, key=lambda dtype: sizes[dtype]) if sizes else torch.float32

    @property
    def computes_in(self) -> str:
        """``precision``, or the name of ``dtype`` where there is none."""
        return self.precision or str(self.dtype).removeprefix("torch.")

    @property
    def fingerprint(self) -> str:
        """Changes with ops, sizes, constants, parameters' names and ``reduce_dtype``; not with weights or devices."""
        return self.fingerprint_under(self.reduce_dtype)

    def fingerprint_under(self, reduce_dtype: str) -> str:
        """The fingerprint that this program has where ranks add gradients up in another type."""
        if not self._fingerprint:
            self._fingerprint = _digest(self)
        if not reduce_dtype:
            return self._fingerprint
        return hashlib.sha256(f"{self._fingerprint} {reduce_dtype}".encode()).hexdigest()[:16]

    def tokens(self, batch: int) -> int:
        """Tokens of a step: elements of the first integer input with one dim besides the samples'; else samples."""
        for spec in self.inputs:
            if spec.kind == "tensor" and spec.batch_dim is not None and "int" in spec.dtype and len(spec.shape) == 2:
                return batch * next(int(size) for size in spec.shape if isinstance(size, int))
        return batch

    def placeholders(self, *roles: Role) -> list[fx.Node]:
        return [node for node in self.graph.nodes if node.op == "placeholder" and node.meta["role"] in roles]


def _digest(program: Program) -> str:
    digest = hashlib.sha256()
    for info in program.tensors.values():
        digest.update(f"{info.name}{info.shape}{info.dtype}{info.trainable}{info.aliases}".encode())
    for spec in program.inputs:
        if spec.differentiable:
            digest.update(f"gradient of {spec.name}".encode())
    numbers: dict[fx.Node, int] = {}
    for number, node in enumerate(program.graph.nodes):
        numbers[node] = number

        def name(argument: fx.Node) -> str:
            return f"%{numbers[argument]}"

        kwargs = {key: value for key, value in node.kwargs.items() if key != "device"}
        arguments = fx.node.map_arg((node.args, kwargs), lambda argument: _Text(name(argument)))
        value = node.meta.get("val")
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) and not is_getitem(node) else ""
        sizes = [str(size) if isinstance(size, int) else "b" for size in shape]
        digest.update(f"{node.op}{node.target if node.op != 'placeholder' else ''}{arguments}{sizes}".encode())
    return digest.hexdigest()[:16]


MODE_ARGUMENTS = {
    **{f"aten.{kind}dropout.default": 2 for kind in ("", "feature_", "alpha_", "feature_alpha_")},
    "aten.batch_norm.default": 5,
    **dict.fromkeys(RECURRENT, 6),
    "aten.scaled_dot_product_attention.default": 4,
}
"""Where ops are told the mode, or attention its dropout, which is off in evaluation."""


def mode_free_digests(program: Program) -> dict[str, str]:
    """A digest of how each output is computed, blind to arguments that only switch between training and evaluation."""
    digests = _mode_free(program)
    return {info.name: digests[info.node] for info in program.outputs if info.node is not None}


def mode_free_updates(program: Program) -> dict[str, str]:
    """The same of the new values of written buffers."""
    digests, names = _mode_free(program), program.updated_buffers
    values = results(program.graph)
    return {name: digests[node] for name, node in zip(names, values[len(values) - len(names) :], strict=True)}


def _mode_free(program: Program) -> dict[fx.Node, str]:
    digests: dict[fx.Node, str] = {}

    def text(argument: Any) -> Any:
        return _Text(digests[argument]) if isinstance(argument, fx.Node) else argument

    for node in program.graph.nodes:
        if node.op == "output":
            break
        if node.op == "placeholder":
            digests[node] = f"{node.meta['role'].value}:{node.meta['name']}"
            continue
        if str(node.target) == "aten.detach.default":  # the same values, and under no_grad left out
            digests[node] = text(node.args[0])
            continue
        position = MODE_ARGUMENTS.get(str(node.target), -1)
        args = [argument for index, argument in enumerate(node.args) if index != position]
        kwargs = {key: value for key, value in node.kwargs.items() if key not in ("device", "dropout_p")}
        while position >= 0 and args and args[-1] is None:
            args.pop()
        mapped = fx.node.map_arg((args, kwargs), text)
        digests[node] = hashlib.sha256(f"{node.target}{mapped}".encode()).hexdigest()[:16]
    return digests


class _Text(str):
    """A string that prints without quotes, for node numbers inside argument lists."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


# Ops that read a tensor for its shape and type only, and the one that stops gradients.
_CONSTANT = {
    "aten::detach",
    *(f"aten::{kind}_like" for kind in ("zeros", "ones", "full", "empty", "rand", "randn", "randint")),
    *(f"aten::new_{kind}" for kind in ("zeros", "ones", "full", "empty")),
}


def mark_differentiable(graph: fx.Graph, roots: Iterable[fx.Node]) -> None:
    """Sets ``meta["differentiable"]``: whether a gradient flows through the node.

    Some trainable tensor reaches it, and it reaches one of ``roots``, at which gradients start: what only picks indices
    (scores of a router, of sparse attention) has none.
    """
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder":
            node.meta["differentiable"] = bool(node.meta.get("trainable", node.meta.get("differentiable", False)))
            continue
        if node.op != "call_function":
            continue
        tensors = value if isinstance(value, tuple | list) else (value,)
        continuous = any(isinstance(item, torch.Tensor) and may_have_gradient(item.dtype) for item in tensors)
        stops = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name in _CONSTANT
        node.meta["differentiable"] = (
            continuous and not stops and any(source.meta.get("differentiable") for source in node.all_input_nodes)
        )
    reached = reached_by_gradients(roots)
    for node in graph.nodes:
        if node.meta.get("differentiable") and node not in reached:
            node.meta["differentiable"] = False


def reached_by_gradients(roots: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes through which a gradient flows that starts at ``roots``."""
    reached: set[fx.Node] = set()
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        if node in reached or not node.meta.get("differentiable"):
            continue
        reached.add(node)
        waiting.extend(node.all_input_nodes)
    return reached
