"""One stage as a Python file: an ordinary nn.Module, with a class per kind of layer."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx, nn

from autopart.passes import graph as graphs
from autopart.passes.blocks import is_random
from autopart.passes.emit.expressions import Printer, Text
from autopart.passes.emit.layers import Run, find_runs
from autopart.passes.program import Role, TensorInfo
from autopart.passes.shard import Axes, local_extents
from autopart.passes.sizes import extent

_LINE = 118
_LONGEST_EXPRESSION = 64
_RESERVED = {"b", "B", "self", "torch", "nn", "F", "Tensor", "collectives", "Namespace", "parameter", "buffer", "Mesh"}


def identifier(text: str) -> str:
    """A Python name made from any text."""
    name = re.sub(r"\W", "_", text)
    if not name or name[0].isdigit():
        name = f"_{name}"
    return f"{name}_" if keyword.iskeyword(name) or name in _RESERVED else name


@dataclass(slots=True)
class _Names:
    """Names in one function, each used once."""

    taken: dict[str, int] = field(default_factory=dict)

    def fresh(self, wanted: str) -> str:
        wanted = identifier(wanted)
        count = self.taken.get(wanted, 0)
        self.taken[wanted] = count + 1
        if not count:
            return wanted
        return self.fresh(f"{wanted}_{count}")


def _wanted(node: fx.Node) -> str:
    """What to call a value: the module that made it, for ops with weights; else the op."""
    target = node.target
    operation = target.name().split("::")[1].split(".")[0] if isinstance(target, torch._ops.OpOverload) else node.name
    if "transition" in node.meta:
        return str(node.meta["transition"][1].name)
    weighted = any(item.op == "placeholder" and item.meta["role"] is Role.PARAMETER for item in node.all_input_nodes)
    last = graphs.module_path(node).rpartition(".")[2]
    if weighted and last and not last.isdigit() and operation not in ("transpose", "to", "mul", "add"):
        return last
    return {"scaled_dot_product_attention": "attention", "split_with_sizes": "split"}.get(operation, operation)


class _Function:
    """Statements of one forward: a layer's, or the part of the stage's outside of layers."""

    def __init__(self, axes: Axes, tensors: Mapping[str, str], names: _Names, indent: str = "        "):
        self.tensors = tensors  # placeholder name -> attribute expression
        self.axes = axes
        self.names = names
        self.indent = indent
        self.lines: list[str] = []
        self.texts: dict[fx.Node, Text] = {}
        self.used_axes: dict[str, None] = {}
        self.uses_batch: dict[str, None] = {}
        self.random_calls = 0
        self.printer = Printer("self._mesh.device", "self.training")

    def name(self, node: fx.Node) -> Text:
        if node in self.texts:
            return self.texts[node]
        if node.op == "placeholder" and node.meta["role"] in (Role.BATCH, Role.GLOBAL_BATCH):
            self.uses_batch[node.meta["name"]] = None
            return Text(node.meta["name"])
        assert node.op == "call_function", f"{node} is not known where it is used"
        return self.printer.text(node, self.name)  # a size: written where it is used

    def statement(self, node: fx.Node) -> None:
        """Writes a node: kept for its only reader if it is short, else assigned to a variable."""
        if not graphs.is_tensor(node) and not graphs.is_op(node):
            return
        if graphs.is_getitem(node):
            self.texts[node] = self.printer.text(node, self.name)
            return
        if "transition" in node.meta:
            axis = node.meta["transition"][0]
            self.used_axes[axis] = None
            source, _ = node.args
            rest = "".join(f", {key}={self._argument(value)}" for key, value in node.kwargs.items())
            call = f"collectives.{node.meta['transition'][1].name}({self.name(source).code}, {axis}{rest})"  # type: ignore[arg-type]
            self.assign(node, call)
            return
        text = self.printer.text(node, self.name)
        if is_random(node):
            self.random_calls += 1
            over = [*self._sample_axes(node), *self._sharded_axes(node)]
            listed = str(tuple(over)).replace("'", '"')
            self.lines.append(
                f"with self._mesh.random(self._path, {self.random_calls}, over={listed}, training=self.training):"
            )
            self.assign(node, text.code, "    ")
            return
        if self._inline(node, text):
            self.texts[node] = text
        else:
            self.assign(node, text.code)

    def _argument(self, value: object) -> str:
        return self.name(value).code if isinstance(value, fx.Node) else repr(value)

    def assign(self, node: fx.Node, code: str, indent: str = "") -> None:
        name = self.names.fresh(_wanted(node))
        self.lines.append(f"{indent}{name} = {code}")
        self.texts[node] = Text(name)

    def _inline(self, node: fx.Node, text: Text) -> bool:
        """Whether to write the expression inside its only reader: cheap to read, computed at the same place."""
        if len(node.users) != 1 or len(text.code) > _LONGEST_EXPRESSION or not graphs.is_tensor(node):
            return False
        (user,) = node.users
        if user.op != "call_function" or graphs.is_getitem(user) or user not in self.scope:
            return False
        return "transition" not in user.meta and sum(item is node for item in graphs.input_nodes(user)) == 1

    scope: set[fx.Node] = set()

    def _sample_axes(self, node: fx.Node) -> list[str]:
        sizes = [extent(size) for value in graphs.outputs(node) for size in value.fake.shape]
        return ["dp"] if any(size is None or size.batched for size in sizes) else []

    def _sharded_axes(self, node: fx.Node) -> list[str]:
        placements = node.meta["placements"]
        return [name for (name, _), placement in zip(self.axes, placements, strict=True) if placement.is_shard]

    def body(self) -> list[str]:
        """All lines, indented; the mesh axes first."""
        first = [f'{axis} = self._mesh["{axis}"]' for axis in self.used_axes]
        return [f"{self.indent}{line}" for line in [*first, *self.lines]]


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
    recompute: keep only the layers' inputs for the backward, and run each layer's forward again there.
    results: (sends + outputs) count; what follows in the graph's output are new values of the buffers ``updates``.
    """

    def __init__(
        self,
        graph: fx.Graph,
        axes: Axes,
        tensors: Mapping[str, TensorInfo],
        heading: Sequence[str],
        results: int,
        updates: Sequence[str],
        recompute: bool = False,
    ):
        self.recompute = recompute
        self.graph, self.axes, self.tensors, self.heading = graph, axes, tensors, heading
        self.results, self.updates = results, updates
        self.output = next(node for node in graph.nodes if node.op == "output")
        self.classes: dict[str, _LayerClass] = {}
        self.layers: dict[str, str] = {}  # path -> class name
        self.imports_checkpoint = False

    def write(self) -> str:
        placeholders = [node for node in self.graph.nodes if node.op == "placeholder"]
        arguments = [
            node for node in placeholders if node.meta["role"] in (Role.INPUT, Role.RECEIVED, Role.TOTAL)
        ]
        held = [node for node in placeholders if node.meta["role"] in (Role.PARAMETER, Role.BUFFER)]
        attributes = {node: _attribute("self", node.meta["name"]) for node in held}
        names = _Names()
        for node in arguments:
            names.fresh(node.meta["name"])
        main = _Function(self.axes, {}, names)
        for node in arguments:
            main.texts[node] = Text(identifier(node.meta["name"]))
        for node, expression in attributes.items():
            main.texts[node] = Text(expression)
        statements = [node for node in self.graph.nodes if node.op == "call_function"]
        tensors = [node for node in statements if graphs.is_tensor(node) or graphs.is_op(node)]
        for run in find_runs(tensors):
            if run.path and len(run.nodes) > 2:
                self._layer(run, main, attributes)
            else:
                main.scope = set(run.nodes)
                for node in run.nodes:
                    main.statement(node)
        returned = [main.name(node).code for node in self.output.args[0][: self.results]]  # type: ignore[index]
        if self.updates:
            main.lines.append("if self.training:")
            main.lines.append("    with torch.no_grad():")
            for name, node in zip(self.updates, self.output.args[0][self.results :], strict=True):  # type: ignore[index]
                main.lines.append(f"        {_attribute('self', name)}.copy_({main.name(node).code})")
        main.lines.append(f"return ({', '.join(returned)}{',' if len(returned) == 1 else ''})")
        signature = ", ".join(["b: int", "B: int", *(f"{identifier(node.meta['name'])}: Tensor" for node in arguments)])
        forward = _definition("forward", f"self, *, {signature}", "tuple[Tensor, ...]")
        text = [*self._header(), *self._class_texts()]
        text += ["class Stage(Namespace):", *_docstring(self.heading, "    "), ""]
        text += ["    def __init__(self, mesh: Mesh) -> None:", "        super().__init__()", "        self._mesh = mesh"]
        text += ['        self._path = ""', *self._constructor(), "", *forward, *main.body(), ""]
        return "\n".join(text)

    # -- layers ---------------------------------------------------------------------------------------------------

    def _layer(self, run: Run, main: _Function, attributes: Mapping[fx.Node, str]) -> None:
        """Writes a run as a call of its layer's class."""
        inside = set(run.nodes)
        prefix = f"{run.path}."
        names = _Names()
        function = _Function(self.axes, {}, names)
        function.scope = inside
        parameters: list[tuple[str, fx.Node]] = []
        held: dict[str, fx.Node] = {}
        for node in run.nodes:
            for source in node.all_input_nodes:
                if source in inside or source in function.texts or not graphs.is_tensor(source):
                    continue
                if source in attributes and str(source.meta["name"]).startswith(prefix):
                    relative = str(source.meta["name"]).removeprefix(prefix)
                    function.texts[source] = Text(_attribute("self", relative))
                    held[relative] = source
                else:
                    argument = names.fresh(_argument_name(source))
                    parameters.append((argument, source))
                    function.texts[source] = Text(argument)
        for node in run.nodes:
            function.statement(node)
        leaving = [
            node
            for node in run.nodes
            if graphs.is_tensor(node) and any(user not in inside for user in node.users if user.op != "placeholder")
        ]
        codes = [function.name(node).code for node in leaving]
        function.lines.append(f"return {', '.join(codes)}")
        batch = list(function.uses_batch)
        signature = ", ".join([*(f"{name}: int" for name in batch), *(f"{name}: Tensor" for name, _ in parameters)])
        returns = "Tensor" if len(leaving) == 1 else f"tuple[{', '.join(['Tensor'] * len(leaving))}]"
        constructor = self._tree({name: node for name, node in held.items()}, prefix)
        lines = [
            "    def __init__(self, mesh: Mesh, path: str) -> None:",
            "        super().__init__()",
            "        self._mesh, self._path = mesh, path",
            *constructor,
            "",
            *_definition("forward", f"self, {signature}" if signature else "self", returns),
            *function.body(),
        ]
        text = "\n".join(lines)
        layer = self.classes.get(text)
        if layer is None:
            layer = self.classes[text] = _LayerClass(
                self._class_name(run.path), text, [], tuple(held)
            )
        layer.paths.append(run.path)
        self.layers[run.path] = layer.name
        for name in batch:
            main.uses_batch[name] = None
        passed = ", ".join([*batch, *(main.name(source).code for _, source in parameters)])
        results = [main.names.fresh(_layer_result(node, run.path)) for node in leaving]
        call = f"{_attribute('self', run.path)}({passed})"
        # a second forward would update running statistics twice
        if self.recompute and not any("batch_norm" in str(node.target) for node in run.nodes):
            call = f"checkpoint({_attribute('self', run.path)}, {passed}, use_reentrant=False)"
            self.imports_checkpoint = True
        main.lines.append(f"{', '.join(results)} = {call}")
        for node, result in zip(leaving, results, strict=True):
            main.texts[node] = Text(result)

    def _class_name(self, path: str) -> str:
        parts = [part for part in path.split(".") if not part.isdigit()]
        base = "".join(word.capitalize() for part in parts[-2:] for word in part.split("_"))
        taken = {layer.name for layer in self.classes.values()}
        name, number = base, 2
        while name in taken or name in ("Stage", "Namespace"):
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
        inside = {name for name in held if any(name.startswith(f"{path}.") and self._owned(path, name) for path in self.layers)}
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

        for name in sorted(entries, key=first):
            containers(name)
            if name in layers:
                # the class makes the containers of what it holds itself
                made.update(f"{name}.{inner}" for held_name in self._class_of(name).held for inner in _containers(held_name))
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
        options = [f"dtype={info.dtype}"]
        if info.buffer and not info.persistent:
            options.append("persistent=False")
        if not info.buffer and not info.trainable:
            options.append("trainable=False")
        return f"{'buffer' if info.buffer else 'parameter'}({', '.join([*shape, *options])})"

    def _header(self) -> list[str]:
        imports = ["Mesh", "Namespace"]
        for name in ("buffer", "parameter"):
            if any(info.buffer == (name == "buffer") for info in self.tensors.values()):
                imports.append(name)
        imports.append("collectives")
        return [
            *_docstring(self.heading, ""),
            "",
            "from __future__ import annotations",
            "",
            "import torch",
            "import torch.nn.functional as F",
            "from torch import Tensor, nn",
            *(["from torch.utils.checkpoint import checkpoint"] if self.imports_checkpoint else []),
            "",
            f"from autopart.runtime import {', '.join(sorted(imports, key=str.lower))}",
            "",
            "",
        ]


def _attribute(root: str, path: str) -> str:
    """``self.h["0"].weight``: attributes where Python has a name for them and nn.Module does not use it itself."""
    text = root
    for part in path.split("."):
        plain = part.isidentifier() and not keyword.iskeyword(part) and not hasattr(nn.Module, part)
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


def _layer_result(node: fx.Node, path: str) -> str:
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
    if len(line) <= _LINE:
        return [line]
    return [f"    def {name}(", *(f"        {part}," for part in signature.split(", ")), f"    ) -> {returns}:"]


def totals_source(graph: fx.Graph, names: Sequence[str], inputs: Sequence[str]) -> str:
    """``totals.py``: the function that computes the whole batch's totals from its inputs."""
    taken = _Names()
    function = _Function((), {}, taken, "    ")
    arguments = [node for node in graph.nodes if node.op == "placeholder" and node.meta["role"] is Role.INPUT]
    assert [node.meta["name"] for node in arguments] == list(inputs)
    for node in arguments:
        function.texts[node] = Text(taken.fresh(node.meta["name"]))
    first = function.texts[arguments[0]].code
    function.printer = Printer(f"{first}.device", "True")
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    function.scope = set(nodes)
    for node in nodes:
        function.statement(node)
    output = next(node for node in graph.nodes if node.op == "output")
    codes = [function.name(node).code for node in output.args[0]]
    function.lines.append(f"return ({', '.join(codes)},)")
    signature = ", ".join(["b: int", "B: int", *(f"{function.texts[node].code}: Tensor" for node in arguments)])
    return "\n".join(
        [
            '"""Values of the whole batch that every stage divides by: computed once per step, from the inputs."""',
            "",
            "import torch",
            "import torch.nn.functional as F",
            "from torch import Tensor",
            "",
            "",
            f"def totals(*, {signature}) -> tuple[Tensor, ...]:",
            f'    """Returns {", ".join(names)} of a batch of b samples."""',
            *function.body(),
            "",
        ]
    )
