"""From what torch.export traced to a Program: roles of placeholders, the normalized graph, outputs and the loss."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import is_fake

from autopart import ctc_capture
from autopart.assumed_branches import Decisions, conditions_graph
from autopart.example_inputs import arguments_of, input_spec, plain, unread_arguments
from autopart.flat_model import TARGETS, FlatModel, module_path, stripped
from autopart.kept_buffers import drop_unread
from autopart.passes.attention_masks import simplify_masks
from autopart.passes.autocast import Autocast
from autopart.passes.graph import prune
from autopart.passes.normalize import Normalized, normalize
from autopart.passes.program import OutputInfo, Program, Role, TensorInfo, mark_differentiable
from autopart.passes.sizes import extent
from autopart.runtime.errors import CaptureError
from autopart.runtime.input_gradients import requiring


def assemble(
    flat: FlatModel,
    exported: torch.export.ExportedProgram,
    named: dict[str, Any],
    dims: dict[str, int | None],
    input_names: tuple[str, ...],
    batch: int,
    static_batch: str,
    name: str,
    autocast: Autocast,
) -> Program:
    """The program of what was traced.

    named: inputs by path, of which ``dims`` hold samples. input_names: of the model's forward. static_batch: why the
    graph fixes the batch, '' where it does not.
    Raises CaptureError where the model writes into what it may not, or holds what cannot be partitioned.
    """
    drop_unread(exported, flat.replaced)
    held = _placeholders(flat, exported, named)
    symbol = _symbol(exported, held.roles, dims)
    if symbol is None and not static_batch:
        static_batch = "no input has a dim for samples"
    normal = normalize(exported.graph_module, held.names, symbol, autocast)
    graph = normal.graph
    _give_roles(normal, held)
    updates, notes = _updated(normal, held)
    for node in graph.nodes:
        node.meta["path"] = module_path(node.meta.get("path", ""))
    nodes, conditions = _returned(graph, flat.decisions, list(updates.values()), held.constants)
    assumptions = () if flat.decisions is None else tuple(flat.decisions.assumptions)
    notes += [f"assumed, and checked before every step: {item.text} is {item.value}" for item in assumptions]
    simplify_masks(graph, batch)
    mark_differentiable(graph, nodes)
    outputs, loss = _outputs(flat, nodes)
    if loss is not None:
        mark_differentiable(graph, [info.node for info in outputs if info.node is not None and info.name == loss])
    graph.lint()
    unread = unread_arguments(flat.model) - ({TARGETS} if flat.loss_function is not None else set())
    return Program(
        name=name,
        graph=graph,
        tensors=held.tensors,
        inputs=tuple(input_spec(path, leaf, dims, unread) for path, leaf in named.items()),
        input_names=input_names,
        outputs=tuple(outputs),
        output_structure=flat.returned.structure,
        updated_buffers=tuple(updates),
        loss=loss,
        batch=batch,
        static_batch=static_batch,
        constants=_values(flat, held),
        notes=tuple(notes),
        imports=_imports(graph),
        assumptions=assumptions,
        conditions=conditions,
        arguments=arguments_of(flat.model.forward),
    )


@dataclass(frozen=True, slots=True)
class _Placeholders:
    """What the exported graph's placeholders hold. names: in the program, and roles: each with a tensor's qualified
    name or an input's path, by exported name. constants: tensors that forward makes itself. learning: inputs that
    require a gradient.
    """

    names: dict[str, str]
    roles: dict[str, tuple[Role, str]]
    tensors: dict[str, TensorInfo]
    constants: dict[str, torch.Tensor]
    learning: frozenset[str]


def _placeholders(flat: FlatModel, exported: torch.export.ExportedProgram, named: dict[str, Any]) -> _Placeholders:
    kinds = torch.export.graph_signature.InputKind
    tensors, canonical = _tensors(flat)
    paths = iter([path for path, leaf in named.items() if isinstance(leaf, torch.Tensor)])
    held = _Placeholders({}, {}, tensors, {}, requiring(named))
    for spec in exported.graph_signature.input_specs:
        argument = getattr(spec.arg, "name", "")
        if spec.kind in (kinds.PARAMETER, kinds.BUFFER):
            qualified = canonical[stripped(str(spec.target))]
            held.names[argument] = ("p_" if spec.kind is kinds.PARAMETER else "b_") + qualified.replace(".", "_")
            held.roles[argument] = (Role.BUFFER if tensors[qualified].buffer else Role.PARAMETER, qualified)
        elif spec.kind is kinds.CONSTANT_TENSOR:
            value = exported.constants[str(spec.target)]
            qualified = stripped(str(spec.target))
            tensors[qualified] = TensorInfo(
                qualified, tuple(value.shape), value.dtype, trainable=False, buffer=True, persistent=False
            )
            held.names[argument] = "c_" + qualified.replace(".", "_")
            held.roles[argument] = (Role.BUFFER, qualified)
            held.constants[qualified] = value
        elif spec.kind is kinds.USER_INPUT:
            path = next(paths)
            held.names[argument] = "".join(char if char.isalnum() else "_" for char in path)
            held.roles[argument] = (Role.INPUT, path)
        else:
            raise CaptureError(f"the model captures a {spec.kind} ({spec.target}), which cannot be partitioned")
    return held


def _give_roles(normal: Normalized, held: _Placeholders) -> None:
    """Marks placeholders with what they hold; one tensor has one, whatever it is called."""
    graph = normal.graph
    normal.batch.meta.update(role=Role.BATCH, name="b", path="", source="")
    first: dict[str, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "placeholder" or node is normal.batch:
            continue
        role, qualified = held.roles[node.meta["exported"]]
        node.meta.update(role=role, name=qualified)
        if role is Role.INPUT:
            node.meta["differentiable"] = qualified in held.learning
        if role in (Role.PARAMETER, Role.BUFFER):
            node.meta["trainable"] = held.tensors[qualified].trainable
            if qualified in first:
                node.replace_all_uses_with(first[qualified])
                graph.erase_node(node)
                continue
            first[qualified] = node


def _updated(normal: Normalized, held: _Placeholders) -> tuple[dict[str, fx.Node], list[str]]:
    """The new value of every buffer that is written, and notes of inputs that are."""
    updates: dict[str, fx.Node] = {}
    notes = []
    for exported_name, new in normal.buffer_updates.items():
        role, qualified = held.roles[exported_name]
        if role is Role.PARAMETER:
            raise CaptureError(f"the model writes into its parameter {qualified!r}; leave that to the optimizer")
        if qualified in held.constants:
            raise CaptureError(f"the model writes into the constant {qualified!r}; make it a buffer")
        if role is Role.BUFFER:
            updates[qualified] = new
        if role is Role.INPUT:
            notes.append(f"the input {qualified!r} is written by the model; the parallel model leaves it as it is")
    return updates, notes


def _returned(
    graph: fx.Graph, decisions: Decisions | None, updates: list[fx.Node], constants: dict[str, torch.Tensor]
) -> tuple[list[Any], fx.Graph | None]:
    """The nodes of the model's outputs, which the graph returns with the updates from then on; and the graph of what
    assumed branches depend on, which it returned too.
    """
    output_node = next(node for node in graph.nodes if node.op == "output")
    nodes = list(output_node.args[0])
    assumptions = () if decisions is None else tuple(decisions.assumptions)
    asked, nodes = nodes[len(nodes) - len(assumptions) :], nodes[: len(nodes) - len(assumptions)]
    conditions = conditions_graph(graph, asked, assumptions, constants) if assumptions else None
    output_node.args = ((*nodes, *updates),)
    if assumptions:
        prune(graph)
    return nodes, conditions


def _values(flat: FlatModel, held: _Placeholders) -> dict[str, torch.Tensor]:
    """The values of constants and of buffers that are in no state dict, as far as there are any."""
    constants = dict(held.constants)
    for qualified, info in held.tensors.items():
        if info.buffer and not info.persistent and qualified not in constants:
            constants[qualified] = _lookup(flat, qualified)
    return {name: value for name, value in constants.items() if not value.is_meta and not is_fake(value)}


def _tensors(flat: FlatModel) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Parameters and buffers by their first qualified name, and the first name for every name: tied by identity."""
    groups: dict[int, list[str]] = {}
    objects: dict[int, tuple[torch.Tensor, bool]] = {}
    for buffer, items in (
        (False, flat.named_parameters(remove_duplicate=False)),
        (True, flat.named_buffers(remove_duplicate=False)),
    ):
        for qualified, tensor in items:
            groups.setdefault(id(tensor), []).append(stripped(qualified))
            objects[id(tensor)] = (tensor, buffer)
    transient = {
        f"{stripped(prefix)}.{name}".strip(".") if prefix != "model" else name
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


def _lookup(flat: FlatModel, qualified: str) -> torch.Tensor:
    buffers = {stripped(name): buffer for name, buffer in flat.named_buffers(remove_duplicate=False)}
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


def _outputs(flat: FlatModel, nodes: list[fx.Node]) -> tuple[list[OutputInfo], str | None]:
    remaining = iter(nodes)
    outputs = [
        _output(path, next(remaining)) if isinstance(leaf, torch.Tensor) else _plain_output(path, leaf)
        for path, leaf in flat.returned.leaves.items()
    ]
    scalars = [
        info.name
        for info in outputs
        if info.node is not None and info.node.meta["val"].dim() == 0 and info.differentiable
    ]
    # What is called "loss" goes before what comes first, and the whole model's before that of a part of it.
    named = sorted((name for name in scalars if name.split(".")[-1] == "loss"), key=lambda name: name.count("."))
    if named:
        return outputs, named[0]
    tensors = [info.name for info in outputs if info.node is not None]
    # Several losses, as detectors return them ("loss_cls", "loss_box"), are added up in a way that the script knows.
    several = sum("loss" in name.lower() for name in scalars) > 1
    if scalars and scalars[0] == tensors[0] and not several:
        return outputs, scalars[0]
    return outputs, None


def _plain_output(path: str, leaf: Any) -> OutputInfo:
    """Of a leaf that is no tensor."""
    size = extent(leaf) if isinstance(leaf, torch.SymInt) else None
    if size is not None and size.batched:
        return OutputInfo(path, None, per_sample=size.coefficient)
    kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}" if plain(leaf) is None else ""
    return OutputInfo(path, None, plain(leaf), kind=kind)


def _output(path: str, node: fx.Node) -> OutputInfo:
    return OutputInfo(path, node, differentiable=bool(node.meta.get("differentiable")))


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
