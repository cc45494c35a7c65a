"""What each change of placement in a plan costs: which op asks for it, what is sent, how many bytes, how long.

Read off the graphs that are emitted (:mod:`autopart.realize`), so that calls and bytes are those of the run. Equal
conversions of equal layers are one row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from torch import fx

from autopart.analysis import Analysis, pattern_of
from autopart.breakdown import axis_link, tensor_axes
from autopart.cluster import Cluster
from autopart.cost.communication import collective_seconds
from autopart.passes import graph as graphs
from autopart.passes.conversion import Axes
from autopart.passes.partition import StageGraph
from autopart.passes.shard import collective_counts
from autopart.plan import Plan
from autopart.realize import realized
from autopart.runtime.placement import Placement


@dataclass(frozen=True, slots=True)
class Resharding:
    """Equal conversions of one stage and direction, over all microbatches of a step on one rank.

    op: the pattern of the op that reads the value, or that exchanges by itself. value: of the op that made it, or a
    parameter's name. source, target: placements ("P" to "S1"); empty where an op exchanges by itself, unless it moves
    routed rows ("O0/b" to "E0/b"). kind: the collective. calls, bytes: of a step. seconds: without what it can be
    hidden behind.
    """

    stage: int
    axis: str
    direction: str
    op: str
    value: str
    source: str
    target: str
    kind: str
    calls: int
    bytes: int
    seconds: float

    def to_json_object(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


_Counts = dict[tuple[str, str], dict[str, list[int]]]


@dataclass(frozen=True, slots=True)
class _Part:
    """Some nodes of a graph, for what reads the nodes alone."""

    nodes: list[fx.Node]


def reshardings(plan: Plan, analysis: Analysis, cluster: Cluster) -> list[Resharding]:
    """All of a plan, the most expensive first. Raises PlanError when the plan is another model's."""
    found = realized(analysis, plan)
    rows: dict[tuple[int, str, str, str, str, str, str, str], list[float]] = {}
    for index, (stage, graph) in enumerate(zip(found.stages, found.local, strict=True)):
        own = plan.stages[index]
        axes: Axes = tensor_axes(own)
        if not axes:
            continue
        sizes = dict(axes)
        names = _names(analysis, stage, graph)
        links = {name: axis_link(cluster, own, name) for name in sizes}
        shares = own.shares or (1,) * own.dp
        samples = plan.batch // plan.microbatches * max(shares) // sum(shares)
        for node, counts in _counts(graph, axes, samples):
            op, value, source, target = _about(node, analysis, names)
            for (axis, direction), operations in counts.items():
                for kind, (calls, size) in operations.items():
                    row = rows.setdefault((index, axis, direction, op, value, source, target, kind), [0, 0, 0.0])
                    row[0] += calls * plan.microbatches
                    row[1] += size * plan.microbatches
                    seconds = calls * collective_seconds(kind, size / calls, sizes[axis], links[axis])
                    row[2] += plan.microbatches * seconds
    result = [Resharding(*key, int(calls), int(size), seconds) for key, (calls, size, seconds) in rows.items()]
    return sorted(result, key=lambda item: -item.seconds)


def _counts(graph: fx.Graph, axes: Axes, samples: int) -> Iterator[tuple[fx.Node, _Counts]]:
    """What each node of a rank's graph sends, counted as for the whole graph."""
    for node in graph.nodes:
        if "transition" in node.meta or "forms" in node.meta:
            yield node, collective_counts(cast(fx.Graph, _Part([node])), axes, samples)


def _names(analysis: Analysis, stage: StageGraph, local: fx.Graph) -> dict[fx.Node, str]:
    """The readable name of every op and tensor of a rank's graph."""
    names = {node: analysis.keys.get(node.meta["origin"], node.name) for node in local.nodes if "origin" in node.meta}
    placeholders = {node.name: node for node in stage.graph.nodes if node.op == "placeholder"}
    for node in local.nodes:
        if node.op == "placeholder":
            origin = stage.origin.get(placeholders[node.name]) if node.name in placeholders else None
            key = analysis.keys.get(origin) if origin is not None else None
            names[node] = key or str(node.meta.get("name", node.name))
    return names


def _about(node: fx.Node, analysis: Analysis, names: dict[fx.Node, str]) -> tuple[str, str, str, str]:
    """Patterns of the op and the value, and the placements between which it is converted."""
    if "transition" not in node.meta:
        source, target = graphs.input_nodes(node)[0].meta["placements"], node.meta["placements"]
        routed = any(isinstance(item, Placement) and item.is_routed for item in target)
        ends = (",".join(map(str, source)), ",".join(map(str, target))) if routed else ("", "")
        return pattern_of(names[node]), "", *ends
    _, step = node.meta["transition"]
    source = node.args[0]
    while isinstance(source, fx.Node) and source not in names:
        source = source.args[0]
    made = names[source] if isinstance(source, fx.Node) else ""
    user = analysis.keys.get(node.meta["user"], "output") if node.meta.get("user") is not None else "output"
    return pattern_of(user), pattern_of(made), str(step.source), str(step.target)
