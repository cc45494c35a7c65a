"""What planning needs to know of a program, computed once: soundness, blocks, repeats, costs, names of ops."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import fx

from autopart.passes import graph as graphs
from autopart.passes.annotate import OpCost, annotate
from autopart.passes.batch import BatchSplit, split_batch
from autopart.passes.blocks import Block, chain, cuts_of_tables, find_blocks, free_nodes
from autopart.passes.draws import number_draws
from autopart.passes.emit.layers import find_runs, is_recomputable, mark_layers
from autopart.passes.emit.segments import is_inside
from autopart.passes.program import Program, Role
from autopart.passes.rules import (
    RULES,
    Routing,
    Rule,
    RuleBook,
    Strategies,
    Strategy,
    bound_rules,
    find_routings,
    is_differentiable,
    joint_strategies,
    with_routings,
)
from autopart.passes.storage import op_name
from autopart.passes.written import Written, written_buffers
from autopart.runtime.manifest import MIXED

# Weights blocks by a nominal device, so that a model's blocks do not depend on the cluster: bytes cost as many FLOPs.
FLOPS_PER_BYTE = 100
_T = TypeVar("_T")


@dataclass(slots=True)
class Analysis:
    """A program seen by the planner.

    samples: by which blocks were found, as an op's work and what crosses depend on them.
    graph: the program's graph for one share of the batch (``split.graph``). free: nodes that every stage computes for
    itself. blocks: what stages are made of. free_block: the first block that needs a free op.
    layers: the layer that each block belongs to, whose inputs alone are kept when layers are recomputed; '' for none.
    kinds: each block's signature, and in one text the modules inside its layer that its ops are of: where both are
    equal the same modules can run again.
    classes: for every op and tensor the class of equal ones it belongs to (blocks that repeat are folded). first: for
    ops that are not the first of their class, the first, if that has gradients for the same operands and results: what
    is found for it holds for them. keys: a readable name for every op, ``transformer.h.0.mlp.c_fc:addmm``. routings:
    where rows are routed to groups; no block ends inside one. written: buffers that training writes, with the blocks
    that are on one stage for them.
    """

    program: Program
    rules: RuleBook
    samples: int
    split: BatchSplit
    graph: fx.Graph
    free: set[fx.Node]
    blocks: list[Block]
    block_of: dict[fx.Node, int]
    free_block: dict[fx.Node, int]
    layers: tuple[str, ...]
    kinds: tuple[tuple[str, str], ...]
    classes: dict[fx.Node, tuple[str, ...]]
    keys: dict[fx.Node, str]
    first: dict[fx.Node, fx.Node] = field(default_factory=dict)
    routings: tuple[Routing, ...] = ()
    written: tuple[Written, ...] = ()
    _costs: dict[str, dict[fx.Node, OpCost]] = field(default_factory=dict)
    _offered: Strategies | None = None
    _strategies: dict[tuple[int, ...], dict[fx.Node, tuple[Strategy, ...]]] = field(default_factory=dict)
    _joint: dict[tuple[int, ...], dict[fx.Node, tuple[tuple[Strategy, ...], ...]]] = field(default_factory=dict)
    _bound: dict[fx.Node, Rule | None] = field(default_factory=dict)

    def costs(self, kind: str) -> Mapping[fx.Node, OpCost]:
        """Costs of all ops on devices of a kind ("cuda" or "cpu")."""
        if kind not in self._costs:
            self._costs[kind] = annotate(self.graph.nodes, kind)
        return self._costs[kind]

    def strategies(self, parts: int, others: Sequence[int] = ()) -> Mapping[fx.Node, tuple[Strategy, ...]]:
        """The strategies of every op and tensor on an axis of ``parts`` ranks, beside axes of sizes ``others``."""
        key = (parts, *sorted(others))
        if key not in self._strategies:
            if self._offered is None:
                self._offered = Strategies(self.graph, self.rules, False, self.bound, self.first)
            found = self._offered.on(parts, key[1:])
            self._strategies[key] = with_routings(self.routings, found, parts, self.rules)
        return self._strategies[key]

    @property
    def bound(self) -> Mapping[fx.Node, Rule | None]:
        """Every op's rule with the sizes of its operands; None where there is none."""
        if not self._bound:
            self._bound = bound_rules(self.graph, self.rules, self.first)
        return self._bound

    def joint_strategies(self, sizes: Sequence[int]) -> Mapping[fx.Node, tuple[tuple[Strategy, ...], ...]]:
        """For ops that have any: the strategies on tensor axes of these sizes in which two of the axes act together."""
        key = tuple(sizes)
        if key not in self._joint:
            alone = [self.strategies(parts) for parts in key]
            beside = [self.strategies(parts, [*key[:index], *key[index + 1 :]]) for index, parts in enumerate(key)]
            found = {
                node: joint_strategies(
                    node, [s[node] for s in alone], [s[node] for s in beside], key, self.rules, self.bound[node]
                )
                for node in (alone[0] if len(key) > 1 else ())
                if graphs.is_op(node)
            }
            self._joint[key] = {node: tuples for node, tuples in found.items() if tuples}
        return self._joint[key]

    def flops(self, batch: int) -> float:
        """Model FLOPs of a step's contractions, forward and backward, without recomputation."""
        costs = self.costs("cuda").values()
        return float(
            sum(cost.flops_forward.at(batch) + cost.flops_backward.at(batch) for cost in costs if cost.contraction)
        )

    @property
    def whole_outputs(self) -> tuple[str, ...]:
        """Outputs that training needs whole on every rank: the loss; all, where the script computes it from them."""
        loss = self.program.loss
        return (loss,) if loss is not None else tuple(info.name for info in self.program.outputs)

    def tensors(self, role: Role) -> list[fx.Node]:
        """Placeholders of a role that something in the graph reads."""
        return [node for node in self.graph.nodes if node.op == "placeholder" and node.meta["role"] is role]

    @property
    def dtype(self) -> torch.dtype:
        """The type that most of the parameters have."""
        return self.program.dtype

    @property
    def products_in(self) -> str:
        """The name of the type that products compute in."""
        return str(MIXED.get(self.program.precision, self.dtype)).removeprefix("torch.")


def analyze(program: Program, rules: RuleBook = RULES, samples: int = 0) -> Analysis:
    """Everything that does not depend on the cluster.

    samples: by which blocks are found, those that a plan's were (``Plan.example_batch``); 0: the example inputs'.
    """
    split = split_batch(program, rules)
    graph = split.graph
    number_draws(graph)
    free = free_nodes(graph, program.updated_buffers)
    costs = annotate(graph.nodes, "cuda")
    batch = samples or max(program.batch, 1)

    def weight(node: fx.Node) -> float:
        cost = costs[node]
        return float(cost.flops_forward.at(batch) + FLOPS_PER_BYTE * cost.bytes_forward.at(batch))

    # free values are whole everywhere: rows that are routed by them (by a table of tokens, say) cannot be a rank's own
    routings = tuple(item for item in find_routings(graph, rules) if not any(op.node in free for op in item.ops))
    uncut = [[op.node for op in routing.ops] for routing in routings]
    ops = chain(graph, free)
    uncut += cuts_of_tables(ops)
    mark_layers(graph, ops)
    blocks = find_blocks(ops, weight, batch, uncut)
    block_of = {node: block.index for block in blocks for node in block.nodes}
    classes = _classes(graph, blocks, block_of)
    layers = _layers(blocks)
    return Analysis(
        program=program,
        rules=rules,
        samples=batch,
        split=split,
        graph=graph,
        free=free,
        blocks=blocks,
        block_of=block_of,
        free_block=_first_use(graph, free, block_of),
        layers=layers,
        kinds=tuple((block.signature, _modules(block, layer)) for block, layer in zip(blocks, layers, strict=True)),
        classes=classes,
        first=_first_alike(classes, block_of),
        keys=op_keys(graph),
        routings=routings,
        written=written_buffers(program, graph, block_of),
        _costs={"cuda": costs},
    )


def _layers(blocks: Sequence[Block]) -> tuple[str, ...]:
    """The layer that may be computed again (:mod:`autopart.passes.emit.layers`) and holds all ops of a block, or ''."""
    runs = [run for run in find_runs([node for block in blocks for node in block.nodes]) if is_recomputable(run)]
    layer_of = {node: run.path for run in runs for node in run.nodes}
    found = []
    for block in blocks:
        paths = {layer_of.get(node, "") for node in block.nodes}
        found.append(paths.pop() if len(paths) == 1 else "")
    return tuple(found)


def _modules(block: Block, layer: str) -> str:
    paths = (graphs.module_path(node) for node in block.nodes)
    return "\n".join(path.removeprefix(layer) if layer and is_inside(path, layer) else "" for path in paths)


def _first_use(graph: fx.Graph, free: set[fx.Node], block_of: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
    """For every free op the first block that needs it, directly or through other free ops."""
    first: dict[fx.Node, int] = {}
    for node in reversed(graph.nodes):
        if node not in free or node.op != "call_function":
            continue
        users = [block_of.get(user, first.get(user)) for user in node.users]
        found = [index for index in users if index is not None]
        if found:
            first[node] = min(found)
    return {node: index for node, index in first.items() if graphs.is_op(node)}


def _classes(
    graph: fx.Graph, blocks: Sequence[Block], block_of: Mapping[fx.Node, int]
) -> dict[fx.Node, tuple[str, ...]]:
    """Ops by (block signature, position in the block); tensors by (signature, where they are read) of the first block
    that reads them.
    """
    classes: dict[fx.Node, tuple[str, ...]] = {}
    for block in blocks:
        for position, node in enumerate(block.nodes):
            classes[node] = (block.signature, str(position))
            for operand, value in enumerate(graphs.inputs(node)):
                if value.node.op == "placeholder":
                    classes.setdefault(value.node, (block.signature, "tensor", f"{position}.{operand}"))
    for node in graph.nodes:
        if node.op == "placeholder" and node not in classes:
            classes[node] = ("shared", node.name)
    return classes


def _first_alike(classes: Mapping[fx.Node, tuple[str, ...]], block_of: Mapping[fx.Node, int]) -> dict[fx.Node, fx.Node]:
    """For every op that is not the first of its class, the first one; ops that differ in what has a gradient differ."""
    seen: dict[object, fx.Node] = {}
    found: dict[fx.Node, fx.Node] = {}
    for node in block_of:
        gradients = [is_differentiable(value) for value in (*graphs.inputs(node), *graphs.outputs(node))]
        other = seen.setdefault((classes[node], *gradients), node)
        if other is not node:
            found[node] = other
    return found


def op_keys(graph: fx.Graph) -> dict[fx.Node, str]:
    """``module.path:op``, with ``.1``, ``.2`` … where a module runs the same op again."""
    seen: dict[str, int] = {}
    keys: dict[fx.Node, str] = {}
    for node in graph.nodes:
        if not graphs.is_op(node):
            continue
        base = f"{graphs.module_path(node)}:{op_name(node)}"
        count = seen.get(base, 0)
        seen[base] = count + 1
        keys[node] = base if not count else f"{base}.{count}"
    return keys


def pattern_of(name: str) -> str:
    """A name with its layer numbers replaced by ``*``."""
    path, colon, op = name.partition(":")
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path) + colon + op


def fold(named: Mapping[str, _T]) -> dict[str, _T]:
    """Equal entries under one pattern, where everything that matches it is equal; the others by their own name."""
    groups: dict[str, set[_T]] = {}
    for name, value in named.items():
        groups.setdefault(pattern_of(name), set()).add(value)
    folded: dict[str, _T] = {}
    for name, value in named.items():
        pattern = pattern_of(name)
        folded[pattern if len(groups[pattern]) == 1 else name] = value
    return folded


def look_up(folded: Mapping[str, _T], name: str) -> _T | None:
    """The entry for a name: its own, else its pattern's."""
    return folded.get(name, folded.get(pattern_of(name)))
