"""Buffers that training writes, and what has to be on one stage for them.

A stage holds a buffer as long as it lasts: its new value is there for the next microbatch and the next step. So the ops
that read a written buffer, those that make its new value, and those that write it in place (batch norm's running
statistics) are on one stage; of one that is a copy of another's value, with that other one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import fx

from autopart.passes import graph as graphs
from autopart.passes.program import Program, Role


@dataclass(frozen=True, slots=True)
class Written:
    """Buffers whose ops are on one stage. places: of these ops; none: any stage may make the value."""

    names: tuple[str, ...]
    places: tuple[int, ...]


def running_statistics(graph: fx.Graph) -> set[str]:
    """Buffers that an op of the graph updates in place (batch norm's means and variances)."""
    return {
        source.meta["name"]
        for node in graph.nodes
        if graphs.updates_statistics(node)
        for source in graphs.input_nodes(node)
        if _is_buffer(source)
    }


def written_buffers(program: Program, graph: fx.Graph, place_of: Mapping[fx.Node, int]) -> tuple[Written, ...]:
    """The written buffers of a program. graph: its own or that for one share of the batch. place_of: of ops that not
    every stage computes for itself the number of their block, or of their stage.
    """
    names, results = program.updated_buffers, graphs.results(graph)
    updates = dict(zip(names, results[len(results) - len(names) :], strict=True))  # new values come after outputs
    found: dict[str, set[int]] = {name: set() for name in sorted({*updates, *running_statistics(graph)})}
    shared = {name: {name} for name in found}  # with which others
    for node, place in place_of.items():
        for value in graphs.inputs(node):
            if _is_buffer(value.node) and value.node.meta["name"] in found:
                found[value.node.meta["name"]].add(place)
    for name, node in updates.items():
        source = graphs.value_of(node).node
        if source in place_of:
            found[name].add(place_of[source])
        elif _is_buffer(source) and source.meta["name"] in found:
            _join(shared, name, source.meta["name"])
    groups = {id(names): names for names in shared.values()}
    return tuple(
        Written(tuple(sorted(names)), tuple(sorted({place for name in names for place in found[name]})))
        for names in groups.values()
    )


def _is_buffer(node: fx.Node) -> bool:
    return node.op == "placeholder" and node.meta["role"] is Role.BUFFER


def _join(shared: dict[str, set[str]], one: str, other: str) -> None:
    names: Collection[str] = {*shared[one], *shared[other]}
    shared[one] |= shared[other]
    for name in names:
        shared[name] = shared[one]
