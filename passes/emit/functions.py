"""Statements of one emitted function, and the names in it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from autopart.passes import graph as graphs
from autopart.passes.beside import weight_of
from autopart.passes.blocks import is_random
from autopart.passes.conversion import Axes
from autopart.passes.emit.expressions import Printer, Text
from autopart.passes.program import Role
from autopart.passes.sizes import extent
from autopart.runtime.manifest import argument_name

_LONGEST_EXPRESSION = 64
GATHER = "self._mesh.gather("


@dataclass(slots=True)
class Names:
    """Names in one function, each used once."""

    taken: dict[str, int] = field(default_factory=dict)

    def fresh(self, wanted: str) -> str:
        wanted = argument_name(re.sub(r"\W", "_", wanted))
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


class Function:
    """Statements of one forward: a layer's, or the part of the stage's outside of layers.

    invariant: random numbers do not depend on the plan. path: the layer's. beside: of :mod:`autopart.passes.beside`.
    begun: transitions that are waited for where they are read first (:mod:`autopart.passes.ahead`).
    """

    def __init__(
        self,
        axes: Axes,
        names: Names,
        indent: str = "        ",
        device: str = "self._mesh.device",
        invariant: bool = False,
        path: str = "",
        beside: Mapping[fx.Node, Sequence[fx.Node]] | None = None,
        begun: Collection[fx.Node] = (),
    ):
        self.axes, self.invariant, self.path = axes, invariant, path
        self.names = names
        self.indent = indent
        self.lines: list[str] = []
        self.texts: dict[fx.Node, Text] = {}
        self.used_axes: dict[str, str] = {}  # axis -> variable
        self.uses_batch: dict[str, None] = {}
        self.random_calls = 0
        self.scope: set[fx.Node] = set()
        self.inlined: set[fx.Node] = set()  # values without a name: written into their only reader
        self.beside, self.begun = beside or {}, begun
        self.flying: dict[fx.Node, str] = {}  # by transition that was begun, what is waited for
        self.laters: dict[fx.Node, str] = {}  # by product, what puts off its weight's gradient
        self.named: dict[str, fx.Node] = {}  # by name, the value that was assigned to it here
        self.made: dict[int, fx.Node] = {}  # by number of a line that makes something, the op that it ends with
        self.started: set[str] = set()  # names of what is waited for
        self.handed: set[str] = set()  # names that something else holds longer
        self.printer = Printer(device, "self.training")

    def name(self, node: fx.Node) -> Text:
        if node in self.texts:
            return self.texts[node]
        if node in self.flying:
            self.lines.append(f"{self.assigned(node)} = {self.flying.pop(node)}.wait()")
            return self.texts[node]
        if node.op == "placeholder" and node.meta["role"] in (Role.BATCH, Role.GLOBAL_BATCH):
            self.uses_batch[node.meta["name"]] = None
            return Text(node.meta["name"])
        assert node.op == "call_function", f"{node} is not known where it is used"
        return self.printer.text(node, self.name)  # a size: written where it is used

    def statement(self, node: fx.Node) -> None:
        """Writes a node: kept for its only reader if it is short, else assigned to a variable."""
        if node in self.texts or node in self.flying or (not graphs.is_tensor(node) and not graphs.is_op(node)):
            return
        if graphs.is_getitem(node):
            self.texts[node] = self.printer.text(node, self.name)
            return
        if "transition" in node.meta:
            axis = self._axis(node.meta["transition"][0])
            (source,) = node.all_input_nodes[:1]
            rest = "".join(f", {key}={self._argument(value)}" for key, value in node.kwargs.items())
            call = f"{self.name(source).code}, {axis}{rest}{self._later(node)}"
            function = f"collectives.{node.meta['transition'][1].name}"
            if node in self.begun:
                self.flying[node] = self.names.fresh("begun")
                self.started.add(self.flying[node])
                self.write(node, f"{self.flying[node]} = collectives.begin({function}, {call})")
            else:
                self.assign(node, f"{function}({call})")
            return
        if is_random(node) and self.invariant:
            self.assign(node, self.printer.invariant(node, self.name, self._draw(node)))
            return
        if "forms" in node.meta:
            axes = {form.role: self._axes(node.kwargs[form.role]) for _, form in node.meta["forms"]}
            text = Text(self.printer.form(node, self.name, axes))
        else:
            text = self.printer.text(node, self.name, self.laters.get(node, ""))
        if is_random(node):
            self.random_calls += 1
            over = [*self._sample_axes(node), *self._sharded_axes(node)]
            listed = str(tuple(over)).replace("'", '"')
            self.lines.append(
                f"with self._mesh.random(self._path, {self.random_calls}, over={listed}, training=self.training):"
            )
            self.assign(node, text.code, "    ")
            return
        if "forms" not in node.meta and self._inline(node, text):
            self.texts[node] = text
            self.inlined.add(node)
        else:
            self.assign(node, text.code)

    def _later(self, node: fx.Node) -> str:
        """The last argument of a transition beside whose backward weights' gradients are computed."""
        products = self.beside.get(node, ())
        weights = list(dict.fromkeys(map(weight_of, products)))
        for weight in weights:
            if weight.op != "placeholder" and (weight not in self.texts or weight in self.inlined):
                self.inlined.discard(weight)
                self.assign(weight, self.printer.text(weight, self.name).code)
        texts = [self.name(weight).code for weight in weights]
        self.handed.update(texts)
        if not weights or any(text.startswith(GATHER) for text in texts):  # outside of layers each read gathers anew
            return ""
        name = self.names.fresh("later")
        self.lines.append(f"{name} = collectives.Later({', '.join(texts)})")
        self.laters.update(dict.fromkeys(products, name))
        return f", later={name}"

    def _draw(self, node: fx.Node) -> str:
        """Which numbers of the whole tensor's a call draws; paths are written from the layer's on."""
        path = graphs.module_path(node)
        inner = path.removeprefix(f"{self.path}.") if self.path else path
        named = f'"{path}"' if inner == path else f'f"{{self._path}}.{inner}"'
        placements = ",".join(map(str, node.meta["placements"]))
        arguments = [named, str(node.meta["draw"]), *([f'"{placements}"'] if placements else [])]
        if "samples" in node.meta:
            arguments.append(f'samples="{node.meta["samples"]}"')
        return f"self._mesh.draw({', '.join(arguments)})"

    def _axes(self, names: object) -> str:
        """What a local form gets: an axis, or several as one."""
        if isinstance(names, str):
            return self._axis(names)
        assert isinstance(names, tuple)
        return f"local_forms.joined({', '.join(map(self._axis, names))})"

    def _axis(self, name: str) -> str:
        """The variable that holds a mesh axis."""
        if name not in self.used_axes:
            self.used_axes[name] = self.names.fresh(name)
        return self.used_axes[name]

    def _argument(self, value: object) -> str:
        return self.name(value).code if isinstance(value, fx.Node) else repr(value)

    def assign(self, node: fx.Node, code: str, indent: str = "") -> None:
        self.write(node, f"{indent}{self.assigned(node)} = {code}")

    def write(self, node: fx.Node, line: str) -> None:
        """A line that ends with an op."""
        self.made[len(self.lines)] = node
        self.lines.append(line)

    def assigned(self, node: fx.Node) -> str:
        """A name for a value, by which it is read from now on."""
        name = self.names.fresh(_wanted(node))
        self.texts[node] = Text(name)
        self.named[name] = node
        return name

    def _inline(self, node: fx.Node, text: Text) -> bool:
        """Whether to write the expression inside its only reader: cheap to read, computed at the same place."""
        if len(node.users) != 1 or len(text.code) > _LONGEST_EXPRESSION or not graphs.is_tensor(node):
            return False
        (user,) = node.users
        if user.op != "call_function" or graphs.is_getitem(user) or user not in self.scope:
            return False
        return "transition" not in user.meta and sum(item is node for item in graphs.input_nodes(user)) == 1

    def _sample_axes(self, node: fx.Node) -> list[str]:
        sizes = [extent(size) for value in graphs.outputs(node) for size in value.fake.shape]
        return ["dp"] if any(size is None or size.batched for size in sizes) else []

    def _sharded_axes(self, node: fx.Node) -> list[str]:
        found = node.meta["placements"]
        every = [found] if isinstance(node.meta["val"], torch.Tensor) else found  # of each output
        return [name for at, (name, _) in enumerate(self.axes) if any(own[at].is_shard for own in every)]

    def body(self) -> list[str]:
        """All lines, indented; the mesh axes first."""
        first = [f'{name} = self._mesh["{axis}"]' for axis, name in self.used_axes.items()]
        return [f"{self.indent}{line}" for line in [*first, *self.lines]]
