"""One strategy per op on the tensor axis: a program's graph as a problem for :mod:`autopart.solver.tensor`.

Blocks that repeat are folded (:mod:`autopart.folding`): a class of equal ops is one op of the problem and takes one
strategy, and a value's edge counts how many values it stands for. So the answer is the best one among those that treat
equal layers equally, and the problem's size does not grow with depth.

What a choice costs is seconds per microbatch: the op's share of the work, or for a parameter its optimizer step, its
gradient's reduction over replicas, and over the tensor axis where its gradient is a partial sum, all divided by the
number of microbatches. What an edge costs is its collective forward and the gradient's backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from autopart.analysis import Analysis
from autopart.block_costs import BlockCosts
from autopart.cost.communication import bucketed_all_reduce_seconds, transition
from autopart.cost.devices import Link
from autopart.folding import FoldedGraph, FoldedValue, is_stored
from autopart.passes.annotate import parameter_bytes
from autopart.passes.graph import Value
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


@dataclass(frozen=True, slots=True)
class TensorAxis:
    """The setting of a choice: a tensor axis of ``parts`` ranks on ``link``, and ``dp`` replicas on ``data_link``."""

    parts: int
    link: Link
    dp: int
    data_link: Link
    microbatches: int


def choose(
    analysis: Analysis,
    folded: FoldedGraph,
    axis: TensorAxis,
    prices: Prices,
    block_costs: BlockCosts,
    optimizer: str = "adamw",
    memory_limit: float | None = None,
    time_limit_s: float = 60.0,
) -> TensorChoice:
    """The strategies with the least time per microbatch.

    memory_limit: for TensorChoice.memory_bytes. Raises InfeasibleError when no strategies hold that little.
    """
    if axis.parts == 1:
        return TensorChoice({}, {}, None)
    return _Builder(analysis, folded, axis, prices, block_costs, optimizer).solve(memory_limit, time_limit_s)


@dataclass(slots=True)
class _Builder:
    analysis: Analysis
    folded: FoldedGraph
    axis: TensorAxis
    prices: Prices
    block_costs: BlockCosts
    optimizer: str
    ids: dict[Placement, int] = field(default_factory=dict)

    @property
    def offered(self) -> Mapping[fx.Node, tuple[Strategy, ...]]:
        return self.analysis.strategies(self.axis.parts)

    def id_of(self, placement: Placement) -> int:
        return self.ids.setdefault(placement, len(self.ids))

    # -- choices --------------------------------------------------------------------------------------------------

    def stored(self, node: fx.Node, strategy: Strategy, count: int) -> Choice:
        """A way to store a parameter: its step end per microbatch, and what it holds."""
        (placement,), axis = strategy.outputs, self.axis
        info = self.analysis.program.tensors[node.meta["name"]]
        memory = parameter_bytes(info.shape, info.dtype, self.optimizer, info.trainable).total
        seconds = 0.0
        if info.trainable:
            whole = self.block_costs.size(Value(node)).at(1)
            held = whole // axis.parts if placement.is_shard else whole
            seconds = self.prices.optimizer_seconds(held)
            seconds += bucketed_all_reduce_seconds(held, axis.dp, axis.data_link)
            if placement == BROADCAST:
                seconds += bucketed_all_reduce_seconds(whole, axis.parts, axis.link)
        return Choice(
            strategy.name,
            seconds / axis.microbatches * count,
            (self.id_of(placement),),
            memory=(memory / axis.parts if placement.is_shard else memory) * count,
        )

    def run(self, node: fx.Node, strategy: Strategy, count: int) -> Choice:
        """A way to run an op: its share of the work, and what it keeps for the backward."""
        computed = self.prices.op_seconds(node, strategy, self.axis.parts)
        exchanged = self.prices.form_seconds(node, strategy, self.axis.parts, self.axis.link)
        return Choice(
            strategy.name,
            (sum(computed) + sum(exchanged)) * count,
            tuple(self.id_of(placement) for placement in strategy.outputs),
            tuple(self.id_of(placement) for placement in strategy.inputs),
            self.block_costs.kept_bytes(node, strategy, self.axis.parts, self.prices.batch) * count,
        )

    def op(self, nodes: Sequence[fx.Node]) -> Op:
        node = nodes[0]
        way = self.stored if is_stored(node) else self.run
        return Op(node.name, tuple(way(node, strategy, len(nodes)) for strategy in self.offered[node]))

    # -- edges ----------------------------------------------------------------------------------------------------

    def edge(self, value: FoldedValue, ops: Sequence[Op], placements: Sequence[Placement]) -> Edge:
        """The collectives between how a value is made and how it is read; statistics are stored as they are used."""
        costs: dict[tuple[int, int], float] = {}
        if not value.as_stored:
            size, gradient = (
                self.block_costs.size(value.example).at(self.prices.batch),
                is_differentiable(value.example),
            )
            wanted = {choice.inputs[slot] for op, slot in value.uses for choice in ops[op].choices}
            for have in {choice.outputs[value.slot] for choice in ops[value.source].choices}:
                for want in wanted:
                    step = transition(
                        placements[have],
                        placements[want],
                        size,
                        self.axis.parts,
                        self.axis.link,
                        self.prices.device,
                        gradient,
                    )
                    costs[have, want] = step.seconds
        return Edge(value.source, value.slot, value.uses, costs, value.count)

    # -- the answer -----------------------------------------------------------------------------------------------

    def solve(self, memory_limit: float | None, time_limit_s: float) -> TensorChoice:
        classes = self.folded.classes
        ops = [self.op(nodes) for nodes in classes]
        stored = [op for op, nodes in zip(ops, classes, strict=True) if is_stored(nodes[0])]
        ops.append(Op("output", (Choice("R", 0.0, (), (self.id_of(REPLICATE),)),)))
        placements = list(self.ids)
        edges = tuple(self.edge(value, ops, placements) for value in self.folded.values)
        problem = TensorProblem(tuple(ops), edges, memory_limit)
        solution = tensor.solve(problem, time_limit_s)
        strategies: dict[fx.Node, tuple[Strategy, ...]] = {}
        storage: dict[str, Placements] = {}
        for nodes, index in zip(classes, solution.choices, strict=False):
            chosen = self.offered[nodes[0]][index]
            for node in nodes:
                if is_stored(node):
                    storage[node.meta["name"]] = (chosen.outputs[0],)
                else:
                    strategies[node] = (chosen,)
        most = sum(max(choice.cost for choice in op.choices) for op in stored)
        work = max(0.0, solution.bound - most)
        return TensorChoice(strategies, storage, solution, work, problem.memory(solution.choices))
