"""Partition: one graph per pipeline stage.

A stage's graph has as placeholders what it needs: sizes, its parameters and buffers, the model's inputs (every rank
has them), totals, and values received from earlier stages, each straight from the stage that made it. Free values are
computed again where they are used. Its output is a tuple: values that later stages need, then outputs of the model,
then new values of buffers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from autopart.passes import graph as graphs
from autopart.passes.blocks import Block
from autopart.passes.graph import Value
from autopart.passes.program import Program, Role
from autopart.passes.written import written_buffers
from autopart.runtime.errors import PlanError
from autopart.runtime.manifest import argument_name


@dataclass(frozen=True, slots=True)
class Crossing:
    """A value that crosses stages: its name, where it is made and which stages use it."""

    name: str
    value: Value
    source: int
    targets: tuple[int, ...]


@dataclass(slots=True)
class StageGraph:
    """The graph of one stage.

    origin: for every op of this graph the node of the whole graph it was copied from.
    sends, outputs, updates: what the graph returns, in this order: names of crossing values, of the model's outputs,
    of buffers.
    """

    index: int
    graph: fx.Graph
    origin: dict[fx.Node, fx.Node]
    receives: tuple[str, ...]
    sends: tuple[str, ...]
    outputs: tuple[str, ...]
    updates: tuple[str, ...]


def partition(
    program: Program, graph: fx.Graph, blocks: Sequence[Block], boundaries: Sequence[int]
) -> tuple[list[StageGraph], list[Crossing]]:
    """Splits a graph into stages.

    graph: the program's own or that for one share of the batch. boundaries: stage ``s`` holds the blocks
    ``boundaries[s]:boundaries[s + 1]``.
    """
    stages = len(boundaries) - 1
    home: dict[fx.Node, int] = {}
    for stage in range(stages):
        for block in blocks[boundaries[stage] : boundaries[stage + 1]]:
            for node in block.nodes:
                home[node] = stage
    users: dict[Value, set[int]] = {}
    for node, stage in home.items():
        for value in graphs.inputs(node):
            if value.node in home and home[value.node] != stage:
                users.setdefault(value, set()).add(stage)
    crossings = [
        Crossing(_value_name(value), value, home[value.node], tuple(sorted(targets)))
        for value, targets in sorted(users.items(), key=lambda item: (_order(graph)[item[0].node], item[0].index))
    ]
    results = _results(program, graph)
    buffers = _homes_of_written(program, graph, home)
    placed: list[list[tuple[str, str, fx.Node]]] = [[] for _ in range(stages)]
    for kind, name, node in results:
        stage = home.get(graphs.value_of(node).node, stages - 1)
        placed[buffers.get(name, stage) if kind == "update" else stage].append((kind, name, node))
    built = [_build(stage, graph, home, crossings, placed[stage]) for stage in range(stages)]
    return built, crossings


def _homes_of_written(program: Program, graph: fx.Graph, home: Mapping[fx.Node, int]) -> dict[str, int]:
    """The stage of each written buffer that some stage's ops read or make. Raises PlanError where these are several."""
    found: dict[str, int] = {}
    for written in written_buffers(program, graph, home):
        if len(written.places) > 1:
            raise PlanError(
                f"stages {', '.join(map(str, written.places))} have ops that read or write {', '.join(written.names)}, "
                "which training writes: these are on one stage, that holds it; cut elsewhere, or plan again"
            )
        found.update({name: stage for name in written.names for stage in written.places})
    return found


def _order(graph: fx.Graph) -> dict[fx.Node, int]:
    return {node: index for index, node in enumerate(graph.nodes)}


def _value_name(value: Value) -> str:
    # a dot: node names have none, so no value of an op with several outputs bears another op's name
    return f"{value.node.name}.{value.index}" if isinstance(value.node.meta["val"], tuple | list) else value.node.name


def _results(program: Program, graph: fx.Graph) -> list[tuple[str, str, fx.Node]]:
    names = [("output", info.name) for info in program.outputs if info.node is not None]
    names += [("update", name) for name in program.updated_buffers]
    return [(kind, name, node) for (kind, name), node in zip(names, graphs.results(graph), strict=True)]


def _build(
    stage: int,
    whole: fx.Graph,
    home: dict[fx.Node, int],
    crossings: Sequence[Crossing],
    results: Sequence[tuple[str, str, fx.Node]],
) -> StageGraph:
    needed: set[fx.Node] = {node for node, at in home.items() if at == stage}
    received = {crossing.value: crossing for crossing in crossings if stage in crossing.targets}
    stack = [source for node in needed for source in node.all_input_nodes]
    stack += [node for _, _, node in results]
    while stack:
        node = stack.pop()
        if node in needed or (graphs.value_of(node) in received and home.get(graphs.value_of(node).node) != stage):
            continue
        needed.add(node)
        stack.extend(node.all_input_nodes)
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    origin: dict[fx.Node, fx.Node] = {}
    for node in whole.nodes:
        always = node.op == "placeholder" and node.meta["role"] in (Role.BATCH, Role.GLOBAL_BATCH)
        if node.op == "placeholder" and (node in needed or always):
            env[node] = graph.node_copy(node)
            origin[env[node]] = node
    for value, crossing in received.items():
        new = graph.placeholder(argument_name(crossing.name))
        meta = {key: item for key, item in value.node.meta.items() if key != "val"}
        new.meta.update(meta, val=value.fake, role=Role.RECEIVED, name=crossing.name, index=value.index)
        origin[new] = value.node
        for node in whole.nodes:
            if graphs.is_tensor(node) and node.op == "call_function" and graphs.value_of(node) == value:
                env[node] = new
    for node in whole.nodes:
        if node in needed and node not in env and node.op == "call_function":
            env[node] = graph.node_copy(node, lambda argument: env[argument])
            origin[env[node]] = node
    sends = [crossing for crossing in crossings if crossing.source == stage]
    nodes = [_named(graph, env, crossing.value) for crossing in sends] + [env[node] for _, _, node in results]
    graph.output(tuple(nodes))
    graph.lint()
    return StageGraph(
        stage,
        graph,
        origin,
        receives=tuple(crossing.name for crossing in received.values()),
        sends=tuple(crossing.name for crossing in sends),
        outputs=tuple(name for kind, name, _ in results if kind == "output"),
        updates=tuple(name for kind, name, _ in results if kind == "update"),
    )


def _named(graph: fx.Graph, env: dict[fx.Node, fx.Node], value: Value) -> fx.Node:
    """The stage's node for a value: the op itself, or a ``getitem`` that picks it."""
    if not isinstance(value.node.meta["val"], tuple | list):
        return env[value.node]
    # where only later stages read it, the one that picks it is not here yet
    pick = next(node for node in value.node.users if graphs.value_of(node) == value)
    return env[pick] if pick in env else graph.node_copy(pick, lambda argument: env[argument])
