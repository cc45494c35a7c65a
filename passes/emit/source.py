"""One stage as a Python file: an ordinary nn.Module, with a class per kind of layer."""

from __future__ import annotations

import keyword
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from autopart.passes import graph as graphs
from autopart.passes.ahead import begun
from autopart.passes.beside import products_beside
from autopart.passes.blocks import is_random
from autopart.passes.conversion import Axes
from autopart.passes.data_axis import DataCut, cut_of, gathered_by_layer
from autopart.passes.emit.expressions import Text, size_modules
from autopart.passes.emit.functions import GATHER, Function, Names
from autopart.passes.emit.layers import Run
from autopart.passes.emit.releases import Lifetimes, let_go
from autopart.passes.emit.segments import Segment, segments_of
from autopart.passes.emit.wrapping import LIMIT, wrapped
from autopart.passes.graph import Value
from autopart.passes.kept import kept_values, owner_of
from autopart.passes.program import Role, TensorInfo
from autopart.passes.shard import local_extents
from autopart.runtime.manifest import argument_name
from autopart.runtime.namespace import Namespace


@dataclass(slots=True)
class _LayerClass:
    """A layer's class: its text without the name, and the instances."""

    name: str
    text: str
    paths: list[str]
    held: tuple[str, ...] = ()


class StageSource:
    """Writes one stage.

    graph: one rank's graph (:func:`autopart.passes.shard.shard_stage`). tensors: parameters and buffers that the stage
    holds, in the order they are registered. heading: first lines of the file's docstring.
    path: a name of the stage, different for every stage: random numbers outside of layers are drawn under it.
    invariant: random numbers do not depend on the plan.
    recompute: layers, and modules in layers, of which only the inputs are kept for the backward, which runs their
    forward again.
    cuts: of the parameters that ``replicas`` ranks divide between them.
    results: (sends + outputs) count; what follows in the graph's output are new values of the buffers ``updates``,
    of which evaluation writes those ``evaluated`` too.
    """

    def __init__(
        self,
        graph: fx.Graph,
        axes: Axes,
        tensors: Mapping[str, TensorInfo],
        heading: Sequence[str],
        results: int,
        updates: Sequence[str],
        recompute: Collection[str] = (),
        path: str = "",
        invariant: bool = False,
        cuts: Mapping[str, DataCut] | None = None,
        replicas: int = 1,
        evaluated: Collection[str] = (),
    ):
        self.recompute, self.path, self.invariant = recompute, path, invariant
        self.cuts, self.replicas = cuts or {}, replicas
        self.graph, self.axes, self.tensors, self.heading = graph, axes, tensors, heading
        self.results, self.updates, self.evaluated = results, updates, evaluated
        self.returned = graphs.results(graph)
        self.classes: dict[str, _LayerClass] = {}
        self.layers: dict[str, str] = {}  # path -> class name
        self.imports_checkpoint = False
        self.inlined: set[fx.Node] = set()  # values that get no name
        self.freed: dict[fx.Node, list[Value]] = {}  # memory that goes before a function returns, by the op before that
        self.lasting = {*map(owner_of, map(graphs.value_of, self.returned))}
        for again in {frozenset[str](), frozenset(recompute)}:
            self.lasting.update(kept_values(graph, again))
        self.beside, self.begun = products_beside(graph, recompute), begun(graph, recompute)

    @property
    def lifetimes(self) -> Lifetimes:
        """Of the names in what was written."""
        return Lifetimes(self.inlined, self.freed)

    def write(self) -> str:
        placeholders = [node for node in self.graph.nodes if node.op == "placeholder"]
        arguments = [node for node in placeholders if node.meta["role"] in (Role.INPUT, Role.RECEIVED, Role.TOTAL)]
        held = [node for node in placeholders if node.meta["role"] in (Role.PARAMETER, Role.BUFFER)]
        attributes = {node: _attribute("self", node.meta["name"]) for node in held}
        names = Names()
        for node in arguments:
            names.fresh(argument_name(node.meta["name"]))
        main = self._function(names)
        for node in arguments:
            main.texts[node] = Text(argument_name(node.meta["name"]))
        for node, expression in attributes.items():
            divided = cut_of(node, self.cuts) is not None
            main.texts[node] = Text(f"{GATHER}{expression})" if divided else expression)
        for run, is_layer, own in segments_of(self.graph, self.recompute):
            if is_layer:
                self._layer(run, own, main, attributes)
            else:
                main.scope = set(run.nodes)
                for node in run.nodes:
                    main.statement(node)
        self.inlined |= main.inlined
        returned = [main.name(node).code for node in self.returned[: self.results]]
        if self.updates:
            updated = [main.name(node).code for node in self.returned[self.results :]]
            writes = {
                name: f"    {_attribute('self', name)}.data.copy_({code})"
                for name, code in zip(self.updates, updated, strict=True)
            }
            if trained := [line for name, line in writes.items() if name not in self.evaluated]:
                main.lines += ["if self.training:", "    with torch.no_grad():", *(f"    {line}" for line in trained)]
            if always := [line for name, line in writes.items() if name in self.evaluated]:
                main.lines += ["with torch.no_grad():", *always]
        main.lines.append(f"return ({', '.join(returned)}{',' if len(returned) == 1 else ''})")
        self.freed |= let_go(main, self.lasting)
        signature = ", ".join(
            ["b: int", "B: int", *(f"{argument_name(node.meta['name'])}: Tensor" for node in arguments)]
        )
        forward = _definition("forward", f"self, *, {signature}", "tuple[Tensor, ...]")
        body = wrapped(main.body())
        text = [*self._header(), *self._class_texts()]
        text += ["class Stage(Namespace):", *_docstring(self.heading, "    "), ""]
        text += [
            "    def __init__(self, mesh: Mesh) -> None:",
            "        super().__init__()",
            "        self._mesh = mesh",
        ]
        text += [f'        self._path = "{self.path}"', *wrapped(self._constructor()), "", *forward, *body, ""]
        return "\n".join(text)

    def _function(self, names: Names, path: str = "") -> Function:
        return Function(
            self.axes, names, invariant=self.invariant, path=path, beside=self.beside, begun=self.begun.keys()
        )

    # -- layers ---------------------------------------------------------------------------------------------------

    def _layer(self, run: Run, own: Sequence[Segment], main: Function, attributes: Mapping[fx.Node, str]) -> None:
        """Writes a run as a call of its layer's class. own: its segments."""
        inside = set(run.nodes)
        prefix = f"{run.path}."
        names = Names()
        function = self._function(names, run.path)
        again = [] if run.path in self.recompute else [segment for segment in own if segment.path]
        function.scope = inside.difference(*(segment.nodes for segment in again))
        parameters: list[tuple[str, fx.Node]] = []
        held: dict[str, fx.Node] = {}
        for node in run.nodes:
            for source in graphs.tensors_read(node):
                if source in inside or source in function.texts:
                    continue
                if source in attributes and str(source.meta["name"]).startswith(prefix):
                    relative = str(source.meta["name"]).removeprefix(prefix)
                    function.texts[source] = Text(_attribute("self", relative))
                    held[relative] = source
                else:
                    argument = names.fresh(_argument_name(source))
                    parameters.append((argument, source))
                    function.texts[source] = Text(argument)
        for group in gathered_by_layer(run.nodes, self.cuts):
            wholes = [names.fresh(_whole_name(node, prefix)) for node in group]
            shares = ", ".join(function.texts[node].code for node in group)
            function.lines.append(f"{_targets(wholes)} = self._mesh.gather({shares})")
            function.texts.update({node: Text(name) for node, name in zip(group, wholes, strict=True)})
        methods: list[str] = []
        called = Names()
        for segment in own:
            if segment in again:
                methods += self._span(segment, run.path, function, called)
            else:
                for node in segment.nodes:
                    function.statement(node)
        self.inlined |= function.inlined
        leaving = _leaving(run.nodes)
        codes = [function.name(node).code for node in leaving]
        if codes:
            function.lines.append(f"return {', '.join(codes)}")
        self.freed |= let_go(function, self.lasting)
        batch = list(function.uses_batch)
        signature = ", ".join([*(f"{name}: int" for name in batch), *(f"{name}: Tensor" for name, _ in parameters)])
        constructor = self._tree(held, prefix)
        lines = [
            "    def __init__(self, mesh: Mesh, path: str) -> None:",
            "        super().__init__()",
            "        self._mesh, self._path = mesh, path",
            *wrapped(constructor),
            "",
            *_definition("forward", f"self, {signature}" if signature else "self", _returned(len(leaving))),
            *wrapped(function.body()),
            *methods,
        ]
        text = "\n".join(lines)
        layer = self.classes.get(text)
        if layer is None:
            layer = self.classes[text] = _LayerClass(self._class_name(run.path), text, [], tuple(held))
        layer.paths.append(run.path)
        self.layers[run.path] = layer.name
        for name in batch:
            main.uses_batch[name] = None
        # a layer gathers by itself what it is given
        passed = [*batch, *(attributes.get(source) or main.name(source).code for _, source in parameters)]
        results = [main.names.fresh(_layer_result(run.path)) for _ in leaving]
        layer_name = _attribute("self", run.path)
        call = f"{layer_name}({', '.join(passed)})"
        if run.path in self.recompute:
            call = f"checkpoint({', '.join([layer_name, *passed])})"
            self.imports_checkpoint = True
        main.write(_last_op(run.nodes), f"{', '.join(results)} = {call}" if results else call)
        for node, result in zip(leaving, results, strict=True):
            main.texts[node], main.named[result] = Text(result), node

    def _span(self, segment: Segment, layer: str, outer: Function, called: Names) -> list[str]:
        """Writes a module of a layer that is computed again as a call of a method, whose lines are returned.

        called: the names of the layer's methods so far.
        """
        inside = set(segment.nodes)
        inner = self._function(Names(), layer)
        inner.scope, inner.random_calls = inside, outer.random_calls
        passed: list[str] = []
        arguments: list[str] = []
        for source in dict.fromkeys(source for node in segment.nodes for source in graphs.tensors_read(node)):
            if source in inside:
                continue
            code = outer.name(source)
            if code.code.startswith(("self.", "self[")):
                inner.texts[source] = code
            else:
                arguments.append(inner.names.fresh(_argument_name(source)))
                passed.append(code.code)
                inner.texts[source] = Text(arguments[-1])
        for node in segment.nodes:
            inner.statement(node)
        outer.random_calls = inner.random_calls
        self.inlined |= inner.inlined
        leaving = _leaving(segment.nodes)
        inner.lines.append(f"return {', '.join(inner.name(node).code for node in leaving)}")
        self.freed |= let_go(inner, self.lasting)
        outer.uses_batch.update(inner.uses_batch)
        name = called.fresh(f"_again_{segment.path.removeprefix(f'{layer}.')}")
        results = [outer.assigned(node) for node in leaving]
        call = f"checkpoint({', '.join([f'self.{name}', *inner.uses_batch, *passed])})"
        outer.write(_last_op(segment.nodes), f"{', '.join(results)} = {call}")
        self.imports_checkpoint = True
        signature = ", ".join(
            ["self", *(f"{size}: int" for size in inner.uses_batch), *(f"{item}: Tensor" for item in arguments)]
        )
        return ["", *_definition(name, signature, _returned(len(leaving))), *wrapped(inner.body())]

    def _class_name(self, path: str) -> str:
        parts = [part for part in path.split(".") if not part.isdigit()]
        base = "".join(word.capitalize() for part in parts[-2:] for word in part.split("_")) or "Layer"
        base = argument_name(base)  # a list of layers may be called "f", "none" or, in a ModuleDict, "3x3"
        taken = {layer.name for layer in self.classes.values()}
        name, number = base, 2
        while name in taken or name == "Stage":
            name, number = f"{base}{number}", number + 1
        return name

    def _class_texts(self) -> Iterable[str]:
        for layer in self.classes.values():
            yield f"class {layer.name}(Namespace):"
            yield from _docstring([f"{_listed(layer.paths)}."], "    ")
            yield ""
            yield layer.text
            yield ""
            yield ""

    # -- parameters -----------------------------------------------------------------------------------------------

    def _constructor(self) -> list[str]:
        nodes = {
            node.meta["name"]: node
            for node in self.graph.nodes
            if node.op == "placeholder" and node.meta["role"] in (Role.PARAMETER, Role.BUFFER)
        }
        held = {name: nodes.get(name) for name in self.tensors}
        inside = {
            name
            for name in held
            if any(name.startswith(f"{path}.") and self._owned(path, name) for path in self.layers)
        }
        return self._tree({name: node for name, node in held.items() if name not in inside}, "", self.layers)

    def _owned(self, path: str, name: str) -> bool:
        """Whether the layer's class itself registers the tensor."""
        return name.removeprefix(f"{path}.") in self._class_of(path).held

    def _class_of(self, path: str) -> _LayerClass:
        return next(layer for layer in self.classes.values() if path in layer.paths)

    def _tree(
        self, held: Mapping[str, fx.Node | None], prefix: str, layers: Mapping[str, str] | None = None
    ) -> list[str]:
        """Lines that register tensors under their names, containers first."""
        lines: list[str] = []
        made: set[str] = set()
        layers = layers or {}

        def containers(path: str) -> None:
            for container in _containers(path):
                if container not in made:
                    made.add(container)
                    lines.append(f"        {_attribute('self', container)} = Namespace()")

        entries = [*layers, *held]
        order = {name: index for index, name in enumerate(self.tensors)}

        def first(name: str) -> int:
            full = f"{prefix}{name}"
            inside = [index for tensor, index in order.items() if tensor == full or tensor.startswith(f"{full}.")]
            return min(inside, default=len(order))

        for name in sorted(entries, key=lambda item: (first(item), item.count("."))):
            containers(name)
            if name in layers:
                # the class makes the containers of what it holds itself
                made.update(
                    f"{name}.{inner}" for held_name in self._class_of(name).held for inner in _containers(held_name)
                )
                made.add(name)
                lines.append(f'        {_attribute("self", name)} = {layers[name]}(mesh, "{name}")')
            else:
                lines.append(f"        {_attribute('self', name)} = {self._declaration(f'{prefix}{name}', held[name])}")
        return lines

    def _declaration(self, name: str, node: fx.Node | None) -> str:
        info = self.tensors[name]
        if node is None:
            shape = [str(size) for size in info.shape]
        else:
            sizes = local_extents(node.meta["val"], node.meta["placements"], self.axes)
            shape = [str(size) for size in sizes]
        if name in self.cuts:
            dim = self.cuts[name].dim
            shape[dim] = str(int(shape[dim]) // self.replicas)
        options = [f"dtype={info.dtype}"]
        if info.buffer and not info.persistent:
            options.append("persistent=False")
        if not info.buffer and not info.trainable:
            options.append("trainable=False")
        return f"{'buffer' if info.buffer else 'parameter'}({', '.join([*shape, *options])})"

    def _header(self) -> list[str]:
        kinds = {"buffer" if info.buffer else "parameter" for info in self.tensors.values()}
        random = {node for node in self.graph.nodes if self.invariant and is_random(node)}
        drawn = ["invariant"] if random else []
        forms = ["local_forms"] if any("forms" in node.meta and node not in random for node in self.graph.nodes) else []
        imports = ["Mesh", "Namespace", "collectives", *drawn, *forms, *kinds]
        modules = size_modules(self.graph)
        return [
            *_docstring(self.heading, ""),
            "",
            "from __future__ import annotations",
            "",
            *([*(f"import {module}" for module in modules), ""] if modules else []),
            "import torch",
            "import torch.nn.functional as F",
            "from torch import Tensor, nn",
            "",
            f"from autopart.runtime import {', '.join(sorted(imports, key=str.lower))}",
            *(["from autopart.runtime.recompute import checkpoint"] if self.imports_checkpoint else []),
            "",
            "",
        ]


def _leaving(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """The tensors that are read behind these statements."""
    inside = set(nodes)
    return [
        node
        for node in nodes
        if graphs.is_tensor(node) and any(user not in inside for user in node.users if user.op != "placeholder")
    ]


def _last_op(nodes: Sequence[fx.Node]) -> fx.Node:
    return next(node for node in reversed(nodes) if graphs.is_op(node) and not graphs.is_getitem(node))


def _returned(count: int) -> str:
    """The type of what a function returns, by the number of tensors."""
    return ("None", "Tensor")[count] if count < 2 else f"tuple[{', '.join(['Tensor'] * count)}]"


def _attribute(root: str, path: str) -> str:
    """``self.h["0"].weight``: attributes where Python has a name for them and nn.Module does not use it itself."""
    text = root
    for part in path.split("."):
        plain = part.isidentifier() and not keyword.iskeyword(part) and not hasattr(Namespace, part)
        text += f".{part}" if plain and part not in ("_mesh", "_path", "training") else f'["{part}"]'
    return text


def _containers(path: str) -> list[str]:
    """All proper prefixes of a dotted path, shortest first."""
    parts = path.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _argument_name(node: fx.Node) -> str:
    """What a layer calls a value from outside."""
    if node.op == "placeholder" and node.meta["role"] in (Role.PARAMETER, Role.BUFFER):
        return str(node.meta["name"]).rpartition(".")[2]
    dtype = node.meta["val"].dtype
    return "mask" if dtype == torch.bool else "x" if dtype.is_floating_point else "index"


def _whole_name(node: fx.Node, prefix: str) -> str:
    """What a layer calls a weight that it gathers: ``attn_c_proj_weight``."""
    return str(node.meta["name"]).removeprefix(prefix).replace(".", "_")


def _targets(names: Sequence[str]) -> str:
    """Names that a tuple is assigned to; in brackets, which can be broken, where they are long."""
    text = ", ".join(names)
    return text if len(text) < LIMIT // 2 else f"({text})"


def _layer_result(path: str) -> str:
    parts = path.split(".")
    return f"{parts[-2] if len(parts) > 1 else 'layer'}_{parts[-1]}"


def _listed(paths: Sequence[str]) -> str:
    return paths[0] if len(paths) == 1 else f"{paths[0]} to {paths[-1]} ({len(paths)} layers)"


def _docstring(lines: Sequence[str], indent: str) -> list[str]:
    if len(lines) == 1:
        return [f'{indent}"""{lines[0]}"""']
    return [f'{indent}"""{lines[0]}', *(f"{indent}{line}".rstrip() for line in lines[1:]), f'{indent}"""']


def _definition(name: str, signature: str, returns: str) -> list[str]:
    line = f"    def {name}({signature}) -> {returns}:"
    if len(line) <= LIMIT:
        return [line]
    return [f"    def {name}(", *(f"        {part}," for part in signature.split(", ")), f"    ) -> {returns}:"]
