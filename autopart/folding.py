"""A program's graph with equal ops folded: classes of ops and tensors, and the values between them.

Blocks that repeat are one block here: a class stands for the ops at the same place of all equal blocks. Values of one
class may have unlike readers (the last layer's output is not read by another layer); those are told apart. A part of
the graph, such as one layer, is folded by itself with :func:`fold_part`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from autopart.analysis import Analysis
from autopart.passes import graph as graphs
from autopart.passes.graph import Value
from autopart.passes.program import Role
from autopart.passes.rules import is_differentiable


@dataclass(frozen=True, slots=True)
class FoldedValue:
    """Values that come from one output of one class and are read by the same classes.

    source: class index; slot: its output. uses: (class index, operand) of every reader; the class behind the last
    stands for the model's outputs. members: the values. as_stored: statistics that an op updates in place, so that they
    have to be stored as they are used.
    """

    source: int
    slot: int
    uses: tuple[tuple[int, int], ...]
    members: tuple[Value, ...]
    as_stored: bool

    @property
    def example(self) -> Value:
        """One of the values."""
        return self.members[0]

    @property
    def count(self) -> int:
        return len(self.members)


@dataclass(frozen=True, slots=True)
class FoldedGraph:
    """classes: the equal ops, or parameters and buffers, of each class, in the order of the graph.

    readers: of every value that is made by an op of a block or stored: ops with the operand, None for the outputs.
    """

    classes: tuple[tuple[fx.Node, ...], ...]
    values: tuple[FoldedValue, ...]
    readers: Mapping[Value, Sequence[tuple[fx.Node | None, int]]]

    @property
    def output(self) -> int:
        """The index that stands for the model's outputs as a reader."""
        return len(self.classes)


@dataclass(frozen=True, slots=True)
class FoldedPart:
    """Some ops of a graph and the tensors that they alone read, folded; equal parts have equal ``signature``.

    classes: as those of FoldedGraph, of this part. outside: what makes, or stores, the values that enter. values: those
    that the part reads; their sources are classes, and past these ``outside``. leaving: (class, slot) of values that
    others read.
    """

    classes: tuple[tuple[fx.Node, ...], ...]
    outside: tuple[fx.Node, ...]
    values: tuple[FoldedValue, ...]
    leaving: frozenset[tuple[int, int]]
    signature: object


def is_stored(node: fx.Node) -> bool:
    """Whether the node is a parameter or buffer."""
    return node.op == "placeholder" and node.meta["role"] in (Role.PARAMETER, Role.BUFFER)


def fold_graph(analysis: Analysis) -> FoldedGraph:
    """Folds by the analysis' classes. Tensors that only free values read are left out: they stay whole."""
    readers: dict[Value, list[tuple[fx.Node | None, int]]] = {}
    updated: set[Value] = set()
    for node in analysis.block_of:
        for slot, value in enumerate(graphs.inputs(node)):
            if value.node in analysis.block_of or is_stored(value.node):
                readers.setdefault(value, []).append((node, slot))
                if graphs.updates_statistics(node) and value.node.meta.get("role") is Role.BUFFER:
                    updated.add(value)
    names = [info.name for info in analysis.program.outputs if info.node is not None]
    # new values of buffers follow the outputs, and are stored whole
    for index, node in enumerate(graphs.results(analysis.graph)):
        value = graphs.value_of(node)
        wanted = index >= len(names) or names[index] in analysis.whole_outputs
        if wanted and value.node in analysis.block_of:
            readers.setdefault(value, []).append((None, 0))
    members: dict[tuple[str, ...], list[fx.Node]] = {}
    read = {value.node for value in readers}
    for node in analysis.graph.nodes:
        if node in analysis.block_of or (node in read and is_stored(node)):
            members.setdefault(analysis.classes[node], []).append(node)
    number = {key: index for index, key in enumerate(members)}
    groups: dict[tuple[int, int, tuple[tuple[int, int], ...], bool], list[Value]] = {}
    for value, uses in readers.items():
        numbered = {(len(members) if node is None else number[analysis.classes[node]], slot) for node, slot in uses}
        source = number[analysis.classes[value.node]]
        groups.setdefault((source, value.index, tuple(sorted(numbered)), value in updated), []).append(value)
    return FoldedGraph(
        tuple(tuple(nodes) for nodes in members.values()),
        tuple(
            FoldedValue(source, slot, uses, tuple(values), as_stored)
            for (source, slot, uses, as_stored), values in groups.items()
        ),
        readers,
    )


def fold_part(analysis: Analysis, folded: FoldedGraph, nodes: Sequence[fx.Node]) -> FoldedPart:
    """Folds some ops, none of which updates statistics. folded: the whole graph."""
    inside = set(nodes)
    read = {value: None for node in nodes for value in graphs.inputs(node) if value in folded.readers}
    own = [*dict.fromkeys(v.node for v in read if is_stored(v.node) and inside.issuperset(v.node.users)), *nodes]
    members: dict[tuple[str, ...], list[fx.Node]] = {}
    for node in own:
        members.setdefault(analysis.classes[node], []).append(node)
    number = {node: index for index, alike in enumerate(members.values()) for node in alike}
    outside = list(dict.fromkeys(value.node for value in read if value.node not in number))
    number |= {node: len(members) + index for index, node in enumerate(outside)}
    groups: dict[tuple[int, int, tuple[tuple[int, int], ...]], list[Value]] = {}
    for value in read:
        uses = {(number[node], slot) for node, slot in folded.readers[value] if node is not None and node in inside}
        groups.setdefault((number[value.node], value.index, tuple(sorted(uses))), []).append(value)
    made = (Value(node, slot) for node in nodes for slot in range(len(graphs.outputs(node))))
    leaving = frozenset(
        (number[value.node], value.index)
        for value in made
        if any(node not in inside for node, _ in folded.readers.get(value, ()))
    )
    values = tuple(FoldedValue(*key, tuple(found), False) for key, found in groups.items())
    alike = tuple((key, len(nodes)) for key, nodes in members.items())
    # what enters may be of unlike kinds: what is converted back is its gradient
    enters = tuple((*key, len(found), is_differentiable(found[0])) for key, found in groups.items())
    return FoldedPart(
        tuple(map(tuple, members.values())), tuple(outside), values, leaving, (alike, enters, tuple(sorted(leaving)))
    )
