"""Capture: an unmodified nn.Module becomes a Program.

torch.export (non-strict, training IR) traces the model once with fake tensors; the batch size stays symbolic. The
model is wrapped so that the trace sees a flat list of tensors in and out: nested inputs, dataclasses and
transformers' outputs keep their names, one tensor that is passed twice stays two inputs, and what is not a tensor
(a cache object, None, a number) does not reach the graph.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import is_fake
from torch.fx._lazy_graph_module import _use_lazy_graph_module

from autopart import ctc_capture
from autopart.assumed_branches import Decisions, conditions_graph, settle
from autopart.capture_errors import Where, batch_reason, capture_error, fixes_batch, largest_batch
from autopart.example_inputs import batch_dims_of, bind, examples, input_spec, plain
from autopart.kept_buffers import drop_unread, kept_buffers, replaced_buffers_written
from autopart.meta_capture import NumbersOnMeta, all_on_meta, is_on_meta
from autopart.mixed_precision import autocast_of, check_sums, current_precision
from autopart.other_draws import note_on_draws, other_draws
from autopart.own_backwards import own_backwards
from autopart.own_numbers import Changed, Numbers, carried, note_on_numbers
from autopart.parameter_memory import check_apart
from autopart.passes.attention_masks import simplify_masks
from autopart.passes.autocast import Autocast, entered
from autopart.passes.graph import prune
from autopart.passes.normalize import normalize
from autopart.passes.program import OutputInfo, Program, Role, TensorInfo, mark_differentiable, mode_free_digests
from autopart.repeated_layers import export_with_copies
from autopart.runtime.errors import CaptureError
from autopart.runtime.structure import flatten, rebuild
from autopart.symbolic_lengths import symbolic_lengths

TARGETS = "targets"


class LossOutput(NamedTuple):
    """What a model with a separate ``loss_fn`` returns: the loss, and the model's own output."""

    loss: torch.Tensor
    output: Any


class _Returned:
    """What the traced forward returned: named leaves and the structure around them. changed: numbers of the model's."""

    def __init__(self) -> None:
        self.leaves: dict[str, Any] = {}
        self.structure: Any = None
        self.changed: list[Changed] = []


class _Flat(nn.Module):
    """The model with a flat list of tensors in and out."""

    def __init__(
        self, model: nn.Module, loss_fn: Callable[..., torch.Tensor] | None, structure: Any, leaves: dict[str, Any]
    ):
        super().__init__()
        self.model = model
        self.loss_function = loss_fn
        self._structure = structure
        self._leaves = leaves
        # export restores attributes that a forward assigns, so the outputs are kept in an object
        self.returned = _Returned()
        self.decisions: Decisions | None = None
        self._on_meta = is_on_meta(self)
        # tuples, which are no submodules; found here, as layers may be away while the forward runs
        self._with_buffers = tuple((path, module) for path, module in self.named_modules() if module._buffers)
        self.replaced: set[str] = set()  # names of buffers, filled in place like what is returned

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        remaining = iter(tensors)
        leaves = {
            path: next(remaining) if isinstance(leaf, torch.Tensor) else leaf for path, leaf in self._leaves.items()
        }
        kwargs = rebuild(self._structure, leaves)
        decisions = self.decisions
        if decisions is not None:
            decisions.begin()
        numbers = Numbers((_module_path(path), module) for path, module in self.named_modules() if module is not self)
        with (
            NumbersOnMeta() if self._on_meta else nullcontext(),
            ctc_capture.RowsOfTargets(),
            nullcontext() if decisions is None else decisions,
            replaced_buffers_written(self._with_buffers, self.replaced),
        ):
            if self.loss_function is None:
                result = self.model(**kwargs)
            else:
                targets = kwargs.pop(TARGETS)
                result = self.model(**kwargs)
                result = LossOutput(self.loss_function(result, targets), result)
            self.returned.changed = numbers.changed()
        self.returned.leaves, self.returned.structure = flatten(result)
        found = [leaf for leaf in self.returned.leaves.values() if isinstance(leaf, torch.Tensor)]
        return found if decisions is None else [*found, *decisions.conditions]


def capture(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    batch_dims: Mapping[str, int | None] | None = None,
    name: str = "",
    check_eval: bool = True,
    precision: str = "",
    reduce_dtype: str = "",
) -> Program:
    """Captures the training computation of ``model`` on example inputs.

    args, kwargs: example inputs, any nesting; on the model's device, or fake, or on meta with a meta model. With
    ``loss_fn``, ``kwargs["targets"]`` is what ``loss_fn(model(...), targets)`` compares with.
    batch_dims: which dim of an input holds samples, by input path; None: the input is shared by all samples. By
    default every tensor whose dim 0 has the size of the first tensor's dim 0.
    check_eval: before the program is emitted, also capture the model in evaluation mode, to know whether the emitted
    stages, which switch dropout, attention's dropout and batch norm by ``self.training``, can be evaluated; else they
    refuse to be. Until then the program holds the model and the inputs.
    precision: "bf16-mixed" or "fp16-mixed": as under ``torch.autocast``, weights kept in their own type; "": as the
    model computes, under the autocast that is on around this call.
    reduce_dtype: in which ranks add gradients up, "float32", "bfloat16" or "float64"; "": the parameters' own types.
    Raises CaptureError naming the module path and source line that cannot be captured.
    """
    if not isinstance(model, nn.Module):
        raise CaptureError(f"expected an nn.Module, got {type(model).__name__}; wrap the function in a module")
    if loss_fn is not None and not callable(loss_fn):
        raise CaptureError(f"loss_fn is a function of the model's output and the targets, not {loss_fn!r}")
    if isinstance(args, torch.Tensor | str | Mapping) or not isinstance(args, Iterable):
        raise CaptureError(f"args is a tuple or list of inputs, such as (x,), not a {type(args).__name__}")
    if not isinstance(kwargs or {}, Mapping):
        raise CaptureError(f"kwargs has inputs by name, such as {{'labels': y}}, not a {type(kwargs).__name__}")
    kwargs = dict(kwargs or {})
    targets = {TARGETS: kwargs.pop(TARGETS)} if loss_fn is not None and TARGETS in kwargs else {}
    if loss_fn is not None and not targets:
        raise CaptureError(f"a model with loss_fn needs the keyword input {TARGETS!r}: loss_fn(model(...), {TARGETS})")
    if isinstance(loss_fn, nn.Module) and any(True for _ in loss_fn.parameters()):
        raise CaptureError("loss_fn has parameters of its own; put it inside the model, so that they are trained too")
    scripted = [path for path, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    if scripted:
        raise CaptureError(
            f"the module {scripted[0] or '(root)'} is compiled by torch.jit, whose code cannot be traced; give the "
            "module that it was compiled from"
        )
    check_apart(model)
    bound = {**bind(model.forward, args, kwargs), **targets}
    named, structure = flatten(bound)
    dims = batch_dims_of(named, batch_dims or {})
    named, batch = examples(named, dims)
    flat = _Flat(model, loss_fn, structure, named)
    precision = precision or current_precision(flat)
    autocast = autocast_of(precision, flat)
    name = name or type(model).__name__

    def trace(decisions: Decisions | None) -> Program:
        flat.decisions = decisions
        with (
            _training(model),
            entered(autocast),
            kept_buffers(flat),
            symbolic_lengths(flat),
            all_on_meta(flat, named) as leaves,
            own_backwards(model) as own,
            other_draws() as drawn,
        ):
            exported, static_batch, most = _export(flat, leaves, dims, batch)
        with entered({}):
            program = _assemble(flat, exported, named, dims, tuple(bound), batch, static_batch, name, autocast)
        program.most_samples = most
        program.notes = (*program.notes, *own, *map(note_on_draws, drawn))
        return program

    program = settle(trace, named, dims, batch)
    if changed := flat.returned.changed:
        with carried(changed):
            following = settle(trace, named, dims, batch)
        program.notes = (*program.notes, note_on_numbers(changed, program, following))
    program.precision = precision
    program.reduce_dtype = check_sums(reduce_dtype)
    if check_eval:
        program.check_evaluation = partial(_eval_flaw, program, model, args, {**kwargs, **targets}, loss_fn, batch_dims)
    return program


_EVALUATING: ContextVar[bool] = ContextVar("evaluating", default=False)


@contextmanager
def _evaluating() -> Iterator[None]:
    """Captures inside take the model in the mode it is in."""
    token = _EVALUATING.set(True)
    try:
        yield
    finally:
        _EVALUATING.reset(token)


@contextmanager
def _training(model: nn.Module) -> Iterator[None]:
    """Training mode for the trace: submodules that the user froze in eval mode stay so if the model itself trains."""
    if model.training or _EVALUATING.get():
        yield
        return
    modes = {module: module.training for module in model.modules()}
    model.train()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _export(
    flat: _Flat, named: dict[str, Any], dims: dict[str, int | None], batch: int
) -> tuple[torch.export.ExportedProgram, str, int]:
    """The graph, why it fixes the batch size ('' if it does not), and how many samples it holds for (0: any)."""
    tensors = [(path, leaf) for path, leaf in named.items() if isinstance(leaf, torch.Tensor)]
    arguments = tuple(leaf for _, leaf in tensors)
    # where the number of samples is fixed, it has to be the given one, also if that is 1
    given = tuple(leaf if (d := dims[path]) is None or batch > 1 else leaf.narrow(d, 0, 1) for path, leaf in tensors)
    reason, most = "", 0
    while True:
        symbol = torch.export.Dim("batch", min=1, max=most or None)
        shapes = tuple(None if dims[path] is None else {dims[path]: symbol} for path, _ in tensors)
        where = Where(flat)
        if flat.decisions is not None:
            flat.decisions.where = where
        try:
            # passes of export make a dozen modules, whose Python code nobody runs
            with where, _use_lazy_graph_module(True):
                specs = None if reason else (shapes,)
                inputs = given if reason else arguments
                export = partial(torch.export.export, flat, inputs, dynamic_shapes=specs, strict=False)
                found = (export_with_copies(flat, export) if flat.decisions is None else None) or export()
                return found, reason, most
        except Exception as error:
            if not reason and not most and (bound := largest_batch(error)) >= max(batch, 2):
                most = bound
                continue
            if not reason and fixes_batch(error):
                reason, most = batch_reason(error), 0
                continue
            raise capture_error(error, where) from error


def _assemble(
    flat: _Flat,
    exported: torch.export.ExportedProgram,
    named: dict[str, Any],
    dims: dict[str, int | None],
    input_names: tuple[str, ...],
    batch: int,
    static_batch: str,
    name: str,
    autocast: Autocast,
) -> Program:
    drop_unread(exported, flat.replaced)
    kinds = torch.export.graph_signature.InputKind
    tensors, canonical = _tensors(flat)
    paths = iter([path for path, leaf in named.items() if isinstance(leaf, torch.Tensor)])
    names: dict[str, str] = {}
    roles: dict[str, tuple[Role, str]] = {}
    constants: dict[str, torch.Tensor] = {}
    for spec in exported.graph_signature.input_specs:
        argument = getattr(spec.arg, "name", "")
        if spec.kind in (kinds.PARAMETER, kinds.BUFFER):
            qualified = canonical[_strip(str(spec.target))]
            names[argument] = ("p_" if spec.kind is kinds.PARAMETER else "b_") + qualified.replace(".", "_")
            roles[argument] = (Role.BUFFER if tensors[qualified].buffer else Role.PARAMETER, qualified)
        elif spec.kind is kinds.CONSTANT_TENSOR:
            value = exported.constants[str(spec.target)]
            qualified = _strip(str(spec.target))
            tensors[qualified] = TensorInfo(
                qualified, tuple(value.shape), value.dtype, trainable=False, buffer=True, persistent=False
            )
            names[argument] = "c_" + qualified.replace(".", "_")
            roles[argument] = (Role.BUFFER, qualified)
            constants[qualified] = value
        elif spec.kind is kinds.USER_INPUT:
            path = next(paths)
            names[argument] = "".join(char if char.isalnum() else "_" for char in path)
            roles[argument] = (Role.INPUT, path)
        else:
            raise CaptureError(f"the model captures a {spec.kind} ({spec.target}), which cannot be partitioned")
    symbol = _symbol(exported, roles, dims)
    if symbol is None and not static_batch:
        static_batch = "no input has a dim for samples"
    normal = normalize(exported.graph_module, names, symbol, autocast)
    graph = normal.graph
    normal.batch.meta.update(role=Role.BATCH, name="b", path="", source="")
    first: dict[str, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "placeholder" or node is normal.batch:
            continue
        role, qualified = roles[node.meta["exported"]]
        node.meta.update(role=role, name=qualified)
        if role in (Role.PARAMETER, Role.BUFFER):
            node.meta["trainable"] = tensors[qualified].trainable
            if qualified in first:
                node.replace_all_uses_with(first[qualified])
                graph.erase_node(node)
                continue
            first[qualified] = node
    updates = {
        roles[exported_name][1]: new
        for exported_name, new in normal.buffer_updates.items()
        if roles[exported_name][0] is Role.BUFFER
    }
    for exported_name in normal.buffer_updates:
        role, qualified = roles[exported_name]
        if role is Role.PARAMETER:
            raise CaptureError(f"the model writes into its parameter {qualified!r}; leave that to the optimizer")
        if qualified in constants:
            raise CaptureError(f"the model writes into the constant {qualified!r}; make it a buffer")
    notes = [
        f"the input {roles[exported_name][1]!r} is written by the model; the parallel model leaves it as it is"
        for exported_name in normal.buffer_updates
        if roles[exported_name][0] is Role.INPUT
    ]
    _strip_paths(graph)
    output_node = next(node for node in graph.nodes if node.op == "output")
    nodes = list(output_node.args[0])
    assumptions = () if flat.decisions is None else tuple(flat.decisions.assumptions)
    asked, conditions = nodes[len(nodes) - len(assumptions) :], None
    nodes = nodes[: len(nodes) - len(assumptions)]
    if assumptions:
        conditions = conditions_graph(graph, asked, assumptions, constants)
        notes += [f"assumed, and checked before every step: {item.text} is {item.value}" for item in assumptions]
    output_node.args = ((*nodes, *updates.values()),)
    if assumptions:
        prune(graph)
    simplify_masks(graph, batch)
    mark_differentiable(graph, nodes)
    outputs, loss = _outputs(flat, nodes)
    if loss is not None:
        mark_differentiable(graph, [info.node for info in outputs if info.node is not None and info.name == loss])
    for qualified, info in tensors.items():
        if info.buffer and not info.persistent and qualified not in constants:
            constants[qualified] = _lookup(flat, qualified)
    constants = {name: value for name, value in constants.items() if not value.is_meta and not is_fake(value)}
    graph.lint()
    return Program(
        name=name,
        graph=graph,
        tensors=tensors,
        inputs=tuple(input_spec(path, leaf, dims) for path, leaf in named.items()),
        input_names=input_names,
        outputs=tuple(outputs),
        output_structure=flat.returned.structure,
        updated_buffers=tuple(updates),
        loss=loss,
        batch=batch,
        static_batch=static_batch,
        constants=constants,
        notes=tuple(notes),
        imports=_imports(graph),
        assumptions=assumptions,
        conditions=conditions,
    )


def _strip(qualified: str) -> str:
    return qualified.removeprefix("model.")


def _module_path(path: str) -> str:
    return "" if path == "model" else _strip(path)


def _strip_paths(graph: fx.Graph) -> None:
    for node in graph.nodes:
        node.meta["path"] = _module_path(node.meta.get("path", ""))


def _tensors(flat: _Flat) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Parameters and buffers by their first qualified name, and the first name for every name: tied by identity."""
    groups: dict[int, list[str]] = {}
    objects: dict[int, tuple[torch.Tensor, bool]] = {}
    for buffer, items in (
        (False, flat.named_parameters(remove_duplicate=False)),
        (True, flat.named_buffers(remove_duplicate=False)),
    ):
        for qualified, tensor in items:
            groups.setdefault(id(tensor), []).append(_strip(qualified))
            objects[id(tensor)] = (tensor, buffer)
    transient = {
        f"{_strip(prefix)}.{name}".strip(".") if prefix != "model" else name
        for prefix, module in flat.named_modules()
        for name in module._non_persistent_buffers_set
    }
    tensors: dict[str, TensorInfo] = {}
    canonical: dict[str, str] = {}
    for key, names in groups.items():
        tensor, buffer = objects[key]
        for alias in names:
            canonical[alias] = names[0]
        tensors[names[0]] = TensorInfo(
            name=names[0],
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            trainable=not buffer and tensor.requires_grad,
            buffer=buffer,
            # what the loss function holds is not in the model's state dict
            persistent=names[0] not in transient and not names[0].startswith("loss_function."),
            aliases=tuple(names[1:]),
        )
    return tensors, canonical


def _lookup(flat: _Flat, qualified: str) -> torch.Tensor:
    buffers = {_strip(name): buffer for name, buffer in flat.named_buffers(remove_duplicate=False)}
    return buffers[qualified].detach()


def _symbol(
    exported: torch.export.ExportedProgram, roles: dict[str, tuple[Role, str]], dims: dict[str, int | None]
) -> torch.SymInt | None:
    for node in exported.graph.nodes:
        if node.op == "placeholder" and roles[node.name][0] is Role.INPUT:
            dim = dims[roles[node.name][1]]
            if dim is not None and isinstance(node.meta["val"].shape[dim], torch.SymInt):
                return node.meta["val"].shape[dim]
    return None


def _outputs(flat: _Flat, nodes: list[fx.Node]) -> tuple[list[OutputInfo], str | None]:
    remaining = iter(nodes)
    outputs = [
        OutputInfo(path, next(remaining)) if isinstance(leaf, torch.Tensor) else OutputInfo(path, None, plain(leaf))
        for path, leaf in flat.returned.leaves.items()
    ]
    scalars = [
        info.name
        for info in outputs
        if info.node is not None and info.node.meta["val"].dim() == 0 and info.node.meta.get("differentiable")
    ]
    tensors = [info.name for info in outputs if info.node is not None]
    for scalar in scalars:
        if scalar.split(".")[-1] == "loss" or scalar == tensors[0]:
            return outputs, scalar
    return outputs, None


def _imports(graph: fx.Graph) -> tuple[str, ...]:
    """Modules that call the custom ops in the graph; importing one defines the op where the emitted code runs."""
    files = {getattr(module, "__file__", None): name for name, module in list(sys.modules.items())}
    found: set[str] = set()
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace not in ("aten", "prims", "prim"):
            file = node.meta.get("source", "").rpartition(":")[0]
            module = ctc_capture.MODULE if node.target is ctc_capture.OP else files.get(file)
            if module is not None and module != "__main__":
                found.add(module)
    return tuple(sorted(found))


def _eval_flaw(
    program: Program,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    loss_fn: Callable[..., torch.Tensor] | None,
    batch_dims: Mapping[str, int | None] | None,
) -> str:
    """What evaluation computes otherwise than the training graph with dropout off and statistics fixed; or ''."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with _evaluating():
            other = capture(
                model,
                args,
                kwargs,
                loss_fn=loss_fn,
                batch_dims=batch_dims,
                check_eval=False,
                precision=program.precision,
            )
    except CaptureError as error:
        return f"the model cannot be captured in evaluation mode: {error}"
    finally:
        for module, mode in modes.items():
            module.training = mode
    ours, theirs = mode_free_digests(program), mode_free_digests(other)
    differing = [name for name in ours if ours[name] != theirs.get(name)]
    return f"the output {differing[0]!r} is computed by other ops than in training" if differing else ""
