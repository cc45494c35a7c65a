"""One strategy per op on the tensor axis: a program's graph as a problem for :mod:`autopart.solver.tensor`.

Blocks that repeat are folded: a class of equal ops is one op of the problem and takes one strategy, a value's edge
counts how many members it stands for, and edges with different readers (the last layer's output) are told apart. So
the answer is the best one among those that treat equal layers equally, and its size does not grow with depth.

What a choice costs is seconds per microbatch: the op's share of the work, or for a parameter its optimizer step, its
gradient's reduction over replicas, and over the tensor axis where its gradient is a partial sum, all divided by the
number of microbatches. What an edge costs is its collective forward and the gradient's backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from autopart.analysis import Analysis
from autopart.block_costs import BlockCosts
from autopart.cost.communication import bucketed_all_reduce_seconds, transition
from autopart.cost.devices import Link
from autopart.passes import graph as graphs
from autopart.passes.amounts import value_bytes
from autopart.passes.annotate import parameter_bytes
from autopart.passes.graph import Value
from autopart.passes.program import Role
from autopart.passes.rules import Strategy, is_differentiable
from autopart.passes.shard import Placements
from autopart.prices import Prices
from autopart.runtime.placement import BROADCAST, REPLICATE, Placement
from autopart.solver import tensor
from autopart.solver.tensor_problem import Choice, Edge, Op, TensorProblem, TensorSolution


@dataclass(frozen=True, slots=True)
class TensorChoice:
    """Strategies for every op of the graph (one axis), storage of parameters and buffers, and the solver's account.

    storage: by name; one placement per tensor axis. solution: None when there is one rank and nothing to choose.
    work_bound_s: no strategies make the ops and conversions of one microbatch take less, parameters left aside.
    memory_bytes: what the strategies hold over all stages, one microbatch in flight (each op's kept tensors by itself).
    """

    strategies: dict[fx.Node, tuple[Strategy, ...]]
    storage: dict[str, Placements]
    solution: TensorSolution | None
    work_bound_s: float = 0.0
    memory_bytes: float = 0.0


def choose(
    analysis: Analysis,
    parts: int,
    prices: Prices,
    link: Link,
    data_link: Link,
    dp: int,
    microbatches: int,
    block_costs: BlockCosts,
    optimizer: str = "adamw",
    memory_limit: float | None = None,
    time_limit_s: float = 60.0,
) -> TensorChoice:
    """The strategies with the least time per microbatch on an axis of ``parts`` ranks.

    memory_limit: for TensorChoice.memory_bytes. Raises InfeasibleError when no strategies hold that little.
    """
    if parts == 1:
        return TensorChoice({}, {}, None)
    builder = _Builder(analysis, parts, prices, link, data_link, dp, microbatches, block_costs, optimizer)
    return builder.solve(memory_limit, time_limit_s)


class _Builder:
    def __init__(
        self,
        analysis: Analysis,
        parts: int,
        prices: Prices,
        link: Link,
        data_link: Link,
        dp: int,
        microbatches: int,
        block_costs: BlockCosts,
        optimizer: str,
    ) -> None:
        self.analysis, self.parts, self.prices = analysis, parts, prices
        self.link, self.data_link, self.dp, self.microbatches = link, data_link, dp, microbatches
        self.block_costs, self.optimizer = block_costs, optimizer
        self.offered = analysis.strategies(parts)
        self.members: dict[tuple[str, ...], list[fx.Node]] = {}
        self.ids: dict[Placement, int] = {}
        # a tensor that only free values read stays whole
        read = {value.node for node in analysis.block_of for value in graphs.inputs(node)}
        for node in analysis.graph.nodes:
            if node in analysis.block_of or (self.is_tensor(node) and node in read):
                self.members.setdefault(analysis.classes[node], []).append(node)
        self.number = {key: index for index, key in enumerate(self.members)}

    def is_tensor(self, node: fx.Node) -> bool:
        return node.op == "placeholder" and node.meta["role"] in (Role.PARAMETER, Role.BUFFER)

    def id_of(self, placement: Placement) -> int:
        return self.ids.setdefault(placement, len(self.ids))

    # -- choices --------------------------------------------------------------------------------------------------

    def tensor_seconds(self, node: fx.Node, placement: Placement) -> float:
        """Seconds per microbatch that storing a parameter in a placement costs."""
        if not node.meta.get("trainable"):
            return 0.0
        whole = value_bytes(Value(node)).at(1)
        held = whole // self.parts if placement.is_shard else whole
        seconds = self.prices.optimizer_seconds(held) + bucketed_all_reduce_seconds(held, self.dp, self.data_link)
        if placement == BROADCAST:
            seconds += bucketed_all_reduce_seconds(whole, self.parts, self.link)
        return seconds / self.microbatches

    def tensor_bytes(self, node: fx.Node, placement: Placement) -> float:
        """Bytes of a parameter with gradient and optimizer state on one rank."""
        info = self.analysis.program.tensors[node.meta["name"]]
        total = parameter_bytes(info.shape, info.dtype, self.optimizer, info.trainable).total
        return total / self.parts if placement.is_shard else total

    def op(self, key: tuple[str, ...], nodes: list[fx.Node]) -> Op:
        node = nodes[0]
        if self.is_tensor(node):
            choices = [
                Choice(
                    strategy.name,
                    self.tensor_seconds(node, strategy.outputs[0]) * len(nodes),
                    (self.id_of(strategy.outputs[0]),),
                    memory=self.tensor_bytes(node, strategy.outputs[0]) * len(nodes),
                )
                for strategy in self.offered[node]
            ]
        else:
            choices = [
                Choice(
                    strategy.name,
                    sum(self.prices.op_seconds(node, strategy, self.parts)) * len(nodes),
                    tuple(self.id_of(placement) for placement in strategy.outputs),
                    tuple(self.id_of(placement) for placement in strategy.inputs),
                    self.block_costs.kept_bytes(node, strategy, self.parts, self.prices.batch) * len(nodes),
                )
                for strategy in self.offered[node]
            ]
        return Op("/".join(key), tuple(choices))

    # -- edges ----------------------------------------------------------------------------------------------------

    def edges(self, output: int) -> list[Edge]:
        """One edge per value class and set of reading classes, weighted by how many values it stands for."""
        readers: dict[Value, list[tuple[int, int]]] = {}
        analysis = self.analysis
        fixed: set[tuple[Value, int]] = set()
        for node in analysis.block_of:
            use = self.number[analysis.classes[node]]
            for slot, value in enumerate(graphs.inputs(node)):
                if value.node in analysis.block_of or self.is_tensor(value.node):
                    readers.setdefault(value, []).append((use, slot))
                    if "batch_norm" in str(node.target) and value.node.meta.get("role") is Role.BUFFER:
                        fixed.add((value, use))
        names = [info.name for info in analysis.program.outputs if info.node is not None]
        # buffers' new values follow the outputs, and are stored whole
        for index, node in enumerate(graphs.results(analysis.graph)):
            value = graphs.value_of(node)
            if index < len(names) and names[index] not in analysis.whole_outputs:
                continue
            if value.node in analysis.block_of:
                readers.setdefault(value, []).append((output, 0))
        stored_as_used = {value for value, _ in fixed}
        grouped: dict[tuple[int, int, tuple[tuple[int, int], ...], bool], list[Value]] = {}
        for value, uses in readers.items():
            source = self.number[analysis.classes[value.node]]
            key = (source, value.index, tuple(sorted(set(uses))), value in stored_as_used)
            grouped.setdefault(key, []).append(value)
        return [
            Edge(source, slot, uses, {} if exact else self.conversions(source, slot, uses, values[0]), len(values))
            for (source, slot, uses, exact), values in grouped.items()
        ]

    def conversions(
        self, source: int, slot: int, uses: tuple[tuple[int, int], ...], value: Value
    ) -> Mapping[tuple[int, int], float]:
        produced = {choice.outputs[slot] for choice in self.problem_ops[source].choices}
        wanted = {choice.inputs[index] for op, index in uses for choice in self.problem_ops[op].choices}
        placements = {number: placement for placement, number in self.ids.items()}
        size = value_bytes(value).at(self.prices.batch)
        gradient = is_differentiable(value)
        costs: dict[tuple[int, int], float] = {}
        for have in produced:
            for want in wanted:
                step = transition(
                    placements[have], placements[want], size, self.parts, self.link, self.prices.device, gradient
                )
                costs[have, want] = step.seconds
        return costs

    # -- the answer -----------------------------------------------------------------------------------------------

    def solve(self, memory_limit: float | None, time_limit_s: float) -> TensorChoice:
        self.problem_ops = [self.op(key, nodes) for key, nodes in self.members.items()]
        output = len(self.problem_ops)
        self.problem_ops.append(Op("output", (Choice("R", 0.0, (), (self.id_of(REPLICATE),)),)))
        problem = TensorProblem(tuple(self.problem_ops), tuple(self.edges(output)), memory_limit)
        solution = tensor.solve(problem, time_limit_s)
        stored = [op for op, nodes in zip(problem.ops, self.members.values(), strict=False) if self.is_tensor(nodes[0])]
        most = sum(max(choice.cost for choice in op.choices) for op in stored)
        strategies: dict[fx.Node, tuple[Strategy, ...]] = {}
        storage: dict[str, Placements] = {}
        for (_, nodes), index in zip(self.members.items(), solution.choices[:output], strict=True):
            chosen = self.offered[nodes[0]][index]
            for node in nodes:
                if self.is_tensor(node):
                    storage[node.meta["name"]] = (chosen.outputs[0],)
                else:
                    strategies[node] = (chosen,)
        work = max(0.0, solution.bound - most)
        return TensorChoice(strategies, storage, solution, work, problem.memory(solution.choices))
