"""Tensor sharding of one stage: ops get their local sizes, edges their collectives.

Given one strategy per op and mesh axis, every value has a placement per axis, and so has every use of it. Where they
differ the steps of :func:`autopart.passes.conversion.conversion` are inserted, once per value and target and shared by
all uses that want the same: what the solver charged is what stands in the graph. A rank's program is the result; sizes
in it are those of the rank's share.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx

from autopart.passes import graph as graphs
from autopart.passes.ahead import reorder
from autopart.passes.conversion import Axes, Step, conversion
from autopart.passes.graph import Value
from autopart.passes.partition import StageGraph
from autopart.passes.program import Role
from autopart.passes.rules import RULES, RuleBook, Strategy, called, local_forms
from autopart.passes.sizes import Extent, extent
from autopart.runtime import collectives
from autopart.runtime.errors import PlanError
from autopart.runtime.placement import REPLICATE, Kind, Placements


def value_placements(value: Value, strategies: Mapping[fx.Node, tuple[Strategy, ...]], axes: Axes) -> Placements:
    """How an op's output lies on the axes; replicated where no strategy was chosen (free values)."""
    chosen = strategies.get(value.node)
    if chosen is None:
        return (REPLICATE,) * len(axes)
    position = graphs.outputs(value.node).index(value)
    return tuple(strategy.outputs[position] for strategy in chosen)


def local_extents(fake: torch.Tensor, placements: Placements, axes: Axes) -> tuple[Extent | None, ...]:
    """The sizes of one rank's part of a tensor."""
    sizes = [extent(size) for size in fake.shape]
    for placement, (_, parts) in zip(placements, axes, strict=True):
        found = sizes[placement.dim] if placement.divides else None
        if found is not None:
            share = found.over(Extent(parts))
            assert share is not None, f"a dim of {found} does not divide into {parts}"
            sizes[placement.dim] = share
    return tuple(sizes)


def shard_stage(
    stage: StageGraph,
    axes: Axes,
    strategies: Mapping[fx.Node, tuple[Strategy, ...]],
    storage: Mapping[str, Placements],
    rules: RuleBook = RULES,
    whole_outputs: Collection[str] | None = None,
    crossing: Mapping[str, Placements] | None = None,
) -> fx.Graph:
    """One rank's graph of a stage.

    crossing: placements in which values are received or sent, by name, where they are not those in which the
    strategies make them: from and to stages with other meshes.

    whole_outputs: names of the model's outputs that every rank needs whole (default: all); others stay as they lie.

    strategies: for the ops of the *whole* graph, one strategy per axis; ops without one are replicated.
    storage: placements of parameters and buffers by name, replicated where absent.
    Nodes of the result have ``meta["placements"]`` (a tuple of them for ops with several outputs, by index) on
    ``meta["axes"]``;
    inserted collectives have ``meta["transition"]`` = (axis name, :class:`Transition`), ops that run by a local form
    ``meta["forms"]`` = pairs of axis name and :class:`LocalForm`, one for each axis that it spans; the names are in its
    call too, by role, a tuple where it takes several axes as one.
    """
    return _Sharder(stage, axes, strategies, storage, rules, whole_outputs, crossing or {}).run()


class _Sharder:
    def __init__(
        self,
        stage: StageGraph,
        axes: Axes,
        strategies: Mapping[fx.Node, tuple[Strategy, ...]],
        storage: Mapping[str, Placements],
        rules: RuleBook,
        whole_outputs: Collection[str] | None,
        crossing: Mapping[str, Placements],
    ) -> None:
        self.crossing = crossing
        self.whole_outputs = whole_outputs
        self.stage, self.axes, self.strategies, self.storage, self.rules = stage, axes, strategies, storage, rules
        self.graph = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.placements: dict[Value, Placements] = {}
        self.converted: dict[tuple[fx.Node, Placements], fx.Node] = {}
        self.replicated: Placements = (REPLICATE,) * len(axes)

    def run(self) -> fx.Graph:
        for node in self.stage.graph.nodes:
            if node.op == "placeholder":
                self.placeholder(node)
            elif node.op == "output":
                self.output(node)
            elif graphs.is_op(node):
                self.op(node)
            else:
                new = self.graph.node_copy(node, lambda argument: self.env[argument])
                if graphs.is_tensor(node):
                    new.meta["placements"] = self.placements[graphs.value_of(node)]
                self.env[node] = new
        for node in self.graph.nodes:
            if "placements" in node.meta:
                node.meta["axes"] = self.axes
        graphs.prune(self.graph)
        self.stop_gradients()
        reorder(self.graph)
        self.graph.lint()
        return self.graph

    def stop_gradients(self) -> None:
        """A collective has no backward where nothing that reads its result has, as what only takes its shape."""
        for node in reversed(self.graph.nodes):
            if "transition" in node.meta and node.meta["differentiable"]:
                node.meta["differentiable"] = any(user.meta.get("differentiable", True) for user in node.users)

    def placeholder(self, node: fx.Node) -> None:
        new = self.graph.node_copy(node)
        self.env[node] = new
        if not graphs.is_tensor(node):
            return
        role = node.meta["role"]
        if role in (Role.PARAMETER, Role.BUFFER):
            placements = self.storage.get(node.meta["name"], self.replicated)
            summed = any(placement.kind is Kind.PARTIAL for placement in placements)
            assert not summed, f"{node.meta['name']} is stored as a partial sum"
        elif role is Role.RECEIVED:
            source = self.stage.origin[node]
            value = Value(source, node.meta["index"])
            placements = self.crossing.get(node.meta["name"]) or value_placements(value, self.strategies, self.axes)
        else:
            placements = self.replicated
        self.placements[Value(node)] = placements
        new.meta["placements"] = placements

    def op(self, node: fx.Node) -> None:
        chosen = self.strategies.get(self.stage.origin[node])
        sources = graphs.input_nodes(node)
        outputs = graphs.outputs(node)
        target: Any = node.target
        if chosen is None:
            wanted = [self.replicated] * len(sources)
            given = [self.replicated] * len(outputs)
            args, kwargs = node.args, node.kwargs
        else:
            wanted = [tuple(strategy.inputs[index] for strategy in chosen) for index in range(len(sources))]
            given = [tuple(strategy.outputs[index] for strategy in chosen) for index in range(len(outputs))]
            names, sizes = zip(*self.axes, strict=True)
            applied = list(zip(chosen, sizes, strict=True))
            target, args, kwargs = called(node, applied, names, self.rules)
        tensors = iter([self.convert(source, target, node) for source, target in zip(sources, wanted, strict=True)])

        def replace(argument: fx.Node) -> fx.Node:
            return next(tensors) if graphs.is_tensor(argument) else self.env[argument]

        new_args: Any = fx.node.map_arg(args, replace)
        new_kwargs: Any = fx.node.map_arg(kwargs, replace)
        new = self.graph.call_function(target, new_args, new_kwargs)
        new.meta.update(node.meta)
        new.meta["origin"] = self.stage.origin[node]
        new.meta["placements"] = given[0] if isinstance(node.meta["val"], torch.Tensor) else tuple(given)
        if chosen is not None:
            new.meta["strategies"] = tuple(strategy.name for strategy in chosen)
            found = zip(self.axes, local_forms(applied), strict=True)
            forms = tuple((axis, form) for (axis, _), form in found if form is not None)
            if forms:
                new.meta["forms"] = forms
        self.env[node] = new
        for value, placements in zip(outputs, given, strict=True):
            self.placements[value] = placements

    def convert(self, source: fx.Node, target: Placements, user: fx.Node) -> fx.Node:
        """The value in the wanted placements, by collectives where it is not there yet; they belong to its user."""
        current = self.placements[graphs.value_of(source)]
        if current == target:
            return self.env[source]
        key = (self.env[source], target)
        if key not in self.converted:
            node = self.env[source]
            steps = conversion(current, target, self.axes)
            if steps is None:
                raise PlanError(
                    f"{user.name} reads {source.name} as {_text(target)}, which is made as {_text(current)}: routed "
                    "rows are not converted; give all ops between a routing's sort and its end strategies that fit"
                )
            for step in steps:
                node = self.insert(node, step, user)
            self.converted[key] = node
        return self.converted[key]

    def insert(self, source: fx.Node, step: Step, user: fx.Node) -> fx.Node:
        name, _ = self.axes[step.axis]
        call = step.transition
        keywords = {key: self.expression(text) for key, text in call.arguments}
        node = self.graph.call_function(getattr(collectives, call.name), (source, name), keywords)
        node.meta.update({key: source.meta.get(key) for key in ("val", "differentiable")})
        node.meta.update({key: user.meta.get(key, "") for key in ("path", "source")})
        if "layer" in user.meta:
            node.meta["layer"] = user.meta["layer"]
        node.meta["transition"] = (name, call)
        node.meta["user"] = self.stage.origin.get(user)
        node.meta["placements"] = step.after
        return node

    def expression(self, text: str) -> Any:
        """A number of blocks: a number, ``b`` or a multiple of it."""
        if text.isdigit():
            return int(text)
        batch = graphs.batch_size(self.graph)
        if text == "b":
            return batch
        node = self.graph.call_function(operator.mul, (int(text.split(" ")[0]), batch))
        node.meta["val"] = int(text.split(" ")[0]) * batch.meta["val"]
        return node

    def output(self, node: fx.Node) -> None:
        stage = self.stage
        results = list(node.args[0])  # type: ignore[arg-type]
        kept: list[fx.Node] = []
        for index, result in enumerate(results):
            if index < len(stage.sends):
                own = self.placements[graphs.value_of(result)]
                kept.append(self.convert(result, self.crossing.get(stage.sends[index], own), node))
            elif index < len(stage.sends) + len(stage.outputs):
                name = stage.outputs[index - len(stage.sends)]
                own = self.placements[graphs.value_of(result)]
                whole = self.whole_outputs is None or name in self.whole_outputs
                kept.append(self.convert(result, self.replicated if whole else own, node))
            else:
                name = stage.updates[index - len(stage.sends) - len(stage.outputs)]
                kept.append(self.convert(result, self.storage.get(name, self.replicated), node))
        self.graph.output(tuple(kept))


def _text(placements: Placements) -> str:
    return ",".join(map(str, placements))


def collective_counts(
    graph: fx.Graph, axes: Axes, batch: int, again: Collection[fx.Node] = ()
) -> dict[tuple[str, str], dict[str, list[int]]]:
    """Calls and bytes of the collectives in a rank's graph, one microbatch of ``batch`` samples.

    again: nodes whose forward runs a second time, in the backward.

    Keyed by (axis, "forward" or "backward"), then by operation: [calls, bytes], counted as
    :mod:`autopart.runtime.traffic` counts them.
    """
    sizes = dict(axes)
    counts: dict[tuple[str, str], dict[str, list[int]]] = {}

    def count(node: fx.Node, axis: str, direction: str, operation: str, size: int) -> None:
        entry = counts.setdefault((axis, direction), {}).setdefault(operation, [0, 0])
        times = 2 if direction == "forward" and node in again else 1
        entry[0] += times
        entry[1] += times * size

    for node in graph.nodes:
        for axis, form in node.meta.get("forms", ()):
            for message in form.messages:
                if message.phase == "backward" and not node.meta.get("differentiable"):
                    continue
                count(node, axis, message.phase, message.operation, message.payload(sizes[axis], batch))
        if "transition" not in node.meta:
            continue
        axis, step = node.meta["transition"]
        source: Placements = node.args[0].meta["placements"]
        index = [name for name, _ in axes].index(axis)
        others = tuple(REPLICATE if position == index else placement for position, placement in enumerate(source))
        whole = node.meta["val"].element_size()
        for size in local_extents(node.meta["val"], others, axes):
            assert size is not None
            whole *= size.at(batch)
        for direction, operation in (("forward", step.forward), ("backward", step.backward)):
            if operation is None or (direction == "backward" and not node.meta.get("differentiable")):
                continue
            count(node, axis, direction, operation, whole // sizes[axis] if operation == "all_to_all" else whole)
    return counts
