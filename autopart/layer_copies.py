"""Ops of layers that were not traced, copied from those of a traced one into an exported graph."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument

from autopart.passes.exported import module_path


class Differs(Exception):
    """Alike layers turn out to be unlike, or are not closed. raised: how often, as a model may catch it and go on."""

    raised = 0

    def __init__(self, what: str):
        super().__init__(what)
        Differs.raised += 1


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a layer. kind: equal for calls of alike layers with alike arguments. own: names of those of its
    parameters and buffers that are in the graph.
    """

    layer: nn.Module
    kind: int
    traced: bool
    own: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Meaning:
    """What an argument of a layer's op is: the layer's ``made`` op number, ``given`` argument number, ``own`` tensor of
    that name, or the ``same`` node in all layers.
    """

    what: str
    which: Any


class _Owners:
    """Which placeholders of the graph are a layer's parameters and buffers: one that is tied has one for each name."""

    def __init__(self, exported: torch.export.ExportedProgram, root: nn.Module):
        objects = dict(_tensors(root))
        placeholders = {node.name: node for node in exported.graph_module.graph.nodes if node.op == "placeholder"}
        self.nodes: dict[int, list[fx.Node]] = {}
        for spec in exported.graph_signature.input_specs:
            if spec.target in objects:
                self.nodes.setdefault(id(objects[spec.target]), []).append(placeholders[spec.arg.name])
        self.names = {id(module): name for name, module in root.named_modules()}


def _tensors(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def add_tensors(exported: torch.export.ExportedProgram, root: nn.Module, groups: list[list[nn.Module]]) -> None:
    """Adds the parameters and buffers of ``root`` that were away while it was exported, as if they had been there.

    groups: alike layers, of which the second was whole. Raises Differs.
    """
    specs, graph = exported.graph_signature.input_specs, exported.graph_module.graph
    paths = {module: name for name, module in root.named_modules()}
    alike = {
        f"{paths[layer]}.{name}": f"{paths[group[1]]}.{name}"
        for group in groups
        for layer in group
        for name, _ in _tensors(layer)
    }
    there = {spec.target: spec for spec in specs if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER)}
    names = [name for name, _ in _tensors(root)]
    if [name for name in names if name in there] != [spec.target for spec in specs[: len(there)]]:
        raise Differs("an exported graph has its tensors in another order than the model")
    node_of = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    behind: list[InputSpec] = []
    for name in reversed(names):
        spec = there.get(name)
        if spec is None:
            like = there[alike[name]]
            before = node_of[behind[-1].arg.name] if behind else node_of[specs[len(there)].arg.name]
            with graph.inserting_before(before):
                node = graph.placeholder(f"copied_{name.replace('.', '_')}")
            node.meta.update(node_of[like.arg.name].meta)
            node_of[node.name] = node
            spec = replace(like, arg=TensorArgument(name=node.name), target=name)
        behind.append(spec)
    specs[: len(there)] = reversed(behind)


class _Layer:
    """A call of a layer in the graph.

    given: its tensors among the arguments. results: what it made, nodes: all its ops; both empty unless it was traced.
    """

    def __init__(self, call: Call, owners: _Owners, start: fx.Node, end: fx.Node | None = None):
        layer = call.layer
        self.path = owners.names[id(layer)]
        self.given: list[fx.Node] = list(start.args[0])  # type: ignore[arg-type]
        own = {name: owners.nodes[id(item)] for name, item in _tensors(layer) if id(item) in owners.nodes}
        self.own = {name: nodes[0] for name, nodes in own.items()}
        if any(node not in own[name] for name, node in zip(call.own, start.args[1], strict=True)):  # type: ignore[arg-type]
            raise Differs(f"a tensor of {self.path} is written or replaced before the call")
        self.nodes: list[fx.Node] = []
        self.results: list[fx.Node] = []
        self.meanings: dict[fx.Node, _Meaning] = {}
        for name, nodes in own.items():  # export uses any of a tied tensor's placeholders
            for node in nodes:
                self.meanings.setdefault(node, _Meaning("own", name))
        self.meanings.update((node, _Meaning("given", place)) for place, node in enumerate(self.given))
        if end is None:
            return
        self.results = list(end.args[0])  # type: ignore[arg-type]
        node = start.next
        while node is not end:
            if node.op != "call_function" or isinstance(node.target, torch._ops.HigherOrderOperator):
                raise Differs(f"{node.op} {node.target} inside a layer")
            self.meanings[node] = _Meaning("made", len(self.nodes))
            self.nodes.append(node)
            node = node.next
        inside = {*self.nodes, end}
        if any(user not in inside for node in inside - {*self.results, end} for user in node.users):
            raise Differs(f"what {self.path} computes is used outside of it")

    def meaning(self, node: fx.Node) -> _Meaning:
        return self.meanings.get(node) or _Meaning("same", node)

    def node(self, meaning: _Meaning, made: list[fx.Node]) -> fx.Node:
        if meaning.what == "same":
            found = meaning.which
        else:
            among: dict[str, Any] = {"given": self.given, "own": self.own, "made": made}
            found = among[meaning.what][meaning.which]
        assert isinstance(found, fx.Node)
        return found


def insert_copies(
    exported: torch.export.ExportedProgram,
    root: nn.Module,
    calls: list[Call],
    mark: torch._ops.OpOverload,
    layer: torch._ops.OpOverload,
) -> None:
    """Puts ops for the calls of layers that were not traced into the graph of ``exported``, in place.

    mark: op at the start and the end of a traced call; layer: op that is a call which was not traced. Both have the
    call's tensors, its own ones and its number, and go. Of each kind one call is traced. Raises Differs where its ops
    cannot stand by themselves.
    """
    graph = exported.graph_module.graph
    starts: dict[int, fx.Node] = {}
    ends: dict[int, fx.Node] = {}
    stand_ins: dict[int, fx.Node] = {}
    for node in graph.nodes:
        if node.target is mark:
            (ends if node.args[3] else starts)[node.args[2]] = node
        elif node.target is layer:
            stand_ins[node.args[2]] = node
    traced = {number for number, call in enumerate(calls) if call.traced}
    if not set(starts) == set(ends) == traced or len(stand_ins) != len(calls) - len(traced):
        raise Differs("a layer's ops are in a graph within the graph")
    owners = _Owners(exported, root)
    number_of = {calls[number].kind: number for number in starts}
    for kind in sorted({calls[number].kind for number in stand_ins}):  # later kinds may be given what earlier ones made
        number = number_of[kind]
        template = _Template(_Layer(calls[number], owners, starts[number], ends[number]))
        for number, node in stand_ins.items():
            if calls[number].kind == kind:
                template.copy(graph, node, _Layer(calls[number], owners, node))
    for node in (*ends.values(), *starts.values()):
        graph.erase_node(node)


class _Template:
    """The ops of a traced layer, and what their arguments are to it."""

    def __init__(self, layer: _Layer):
        self.layer = layer
        self.meanings = [
            {argument: layer.meaning(argument) for argument in node.all_input_nodes} for node in layer.nodes
        ]
        self.results = [layer.meaning(node) for node in layer.results]

    def copy(self, graph: fx.Graph, stand_in: fx.Node, layer: _Layer) -> None:
        made: list[fx.Node] = []
        with graph.inserting_before(stand_in):
            for node, meanings in zip(self.layer.nodes, self.meanings, strict=True):
                nodes = {argument: layer.node(meaning, made) for argument, meaning in meanings.items()}
                args, kwargs = fx.map_arg((node.args, node.kwargs), nodes.__getitem__)
                copy = graph.create_node(node.op, node.target, args, kwargs)
                copy.meta = self._moved(node, layer.path)
                made.append(copy)
        for user in list(stand_in.users):
            assert user.target is operator.getitem
            user.replace_all_uses_with(layer.node(self.results[user.args[1]], made))  # type: ignore[index]
            graph.erase_node(user)
        graph.erase_node(stand_in)

    def _moved(self, node: fx.Node, path: str) -> dict[str, Any]:
        """The metadata of a node's copy in the layer at ``path``."""
        inside = module_path(node)
        stack = node.meta.get("nn_module_stack")
        if not stack or not f"{inside}.".startswith(f"{self.layer.path}."):
            return dict(node.meta)
        key, (_, module_type) = next(reversed(stack.items()))
        return {
            **node.meta,
            "nn_module_stack": {key: (path + inside.removeprefix(self.layer.path), module_type)},
        }
