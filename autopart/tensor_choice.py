"""One strategy per op and tensor axis: a program's graph as a problem for :mod:`autopart.solver.tensor`.

Blocks that repeat are folded (:mod:`autopart.folding`): a class of equal ops is one op of the problem and takes one
strategy, and a value's edge counts how many values it stands for. So the answer is the best one among those that treat
equal layers equally, and the problem's size does not grow with depth.

What a choice costs is seconds per microbatch: the op's share of the work, or for a parameter its optimizer step, its
gradient's reduction over replicas, and over the tensor axes where its gradient is a partial sum, all divided by the
number of microbatches. What an edge costs is its collective forward and the gradient's backward.

Of the backward that part is free which passes beside the weights' gradients of the products that read the value
(:mod:`autopart.passes.beside`). With e the collective's seconds and w_u the gradients' of product u, it hides
min(e, Σ w_u), where w_u depends on u's choice, of which the edge knows only how u reads the value. So the edge is
credited with the least w_u among the choices that read it so, and each choice with what its own is longer::

    min(e, Σ w_u)  <=  min(e, Σ least_u) + Σ (w_u - least_u)

Hence no strategies take less than the problem says; of those whose gradients are the shortest it says exactly what
they take, and that is what sharding them does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from torch import fx

from autopart.analysis import Analysis
from autopart.block_costs import BlockCosts
from autopart.data_prices import held_bytes, offered_levels
from autopart.folding import FoldedGraph, FoldedValue, is_stored
from autopart.passes import graph as graphs
from autopart.passes.annotate import parameter_bytes
from autopart.passes.beside import operand_of, products_reading
from autopart.passes.graph import Value
from autopart.passes.rules import is_differentiable
from autopart.prices import Chosen, share_of
from autopart.runtime.errors import InfeasibleError
from autopart.runtime.placement import REPLICATE, Placements
from autopart.solver import cache
from autopart.solver.search_space import NotBetter
from autopart.solver.tensor_problem import Choice, CostTable, Edge, Op, TensorProblem, TensorSolution
from autopart.tensor_setting import Setting

# How near to its bound an answer is proved, by the number of axes: the optimum on one, half a percent on two.
_GAPS = (0.0, 0.0, 0.005, 0.01)


@dataclass(frozen=True, slots=True)
class TensorChoice:
    """Strategies for every op of the graph, one per axis, storage of parameters and buffers, and the solver's account.

    storage: by name; one placement per tensor axis. levels: of ZeRO by name, those above 0. solution: None without
    tensor axes.
    memory_bytes: what the strategies hold over all stages, one microbatch in flight (each op's kept tensors by itself),
    with the largest transient on each.
    """

    strategies: dict[fx.Node, Chosen]
    storage: dict[str, Placements]
    solution: TensorSolution | None
    memory_bytes: float = 0.0
    levels: dict[str, int] = field(default_factory=dict)


def choose(
    analysis: Analysis,
    folded: FoldedGraph,
    setting: Setting,
    block_costs: BlockCosts,
    optimizer: str = "adamw",
    memory_limit: float | None = None,
    time_limit_s: float = 60.0,
    levels: Sequence[int] = (0,),
    stages: int = 1,
    below: float = math.inf,
    gap: float = 0.0,
) -> TensorChoice:
    """The strategies with the least time per microbatch.

    memory_limit: for TensorChoice.memory_bytes. levels: of ZeRO, among which parameters choose (those that cannot be
    divided stay at 0). stages: each has the largest transient. below: of interest are only strategies that take fewer
    seconds of a microbatch; NotBetter may be raised where none do. Raises InfeasibleError when no strategies hold that
    little.
    """
    builder = Builder(analysis, folded, setting, block_costs, optimizer, levels, stages)
    if not setting.axes and len(levels) == 1:
        return builder.unsharded(levels[0])
    return builder.solve(memory_limit, time_limit_s, below, gap)


def work_bound(
    analysis: Analysis,
    folded: FoldedGraph,
    setting: Setting,
    block_costs: BlockCosts,
    time_limit_s: float = 60.0,
    optimizer: str = "adamw",
    memory_limit: float | None = None,
    levels: Sequence[int] = (0,),
    enough: float = math.inf,
    divided: fx.Node | None = None,
) -> float:
    """Seconds that the ops of one microbatch, with what they exchange over tensor axes, take under any strategies.

    memory_limit: bytes of all parameters of a rank in each stage, together. enough: seconds from which more are of no
    interest. divided: a parameter that no rank has whole. Raises InfeasibleError where no strategies hold that little,
    or divide it.
    """
    return Builder(analysis, folded, setting, block_costs, optimizer, levels, divided=divided).work_bound(
        memory_limit, time_limit_s, enough
    )


@dataclass(slots=True)
class Builder:
    """Makes the problem of a setting. levels: of ZeRO, among which parameters choose."""

    analysis: Analysis
    folded: FoldedGraph
    setting: Setting
    block_costs: BlockCosts
    optimizer: str
    levels: Sequence[int]
    stages: int = 1
    divided: fx.Node | None = None
    _least: dict[fx.Node, dict[int, float]] = field(default_factory=dict)
    _first: dict[tuple[str, ...], fx.Node] = field(default_factory=dict)  # of each class

    @property
    def gap(self) -> float:
        """How near to its bound an answer is proved."""
        return _GAPS[len(self.setting.axes)]

    def offered(self, node: fx.Node) -> Sequence[Chosen]:
        """The strategies of an op, or ways to store a parameter, one per axis."""
        return self.setting.offers.of(node) if self.setting.axes else ((),)

    def id_of(self, placements: Placements) -> int:
        return self.setting.shared.ids.setdefault(placements, len(self.setting.shared.ids))

    # -- choices --------------------------------------------------------------------------------------------------

    def ways(self, node: fx.Node) -> list[tuple[Chosen, int]]:
        """What is chosen for an op, or for a parameter together with its level of ZeRO."""
        if not is_stored(node):
            return [(chosen, 0) for chosen in self.offered(node)]
        info = self.analysis.program.tensors[node.meta["name"]]
        levels = (0,) if info.name in self.setting.offers.whole else self.levels
        return [
            (chosen, level)
            for chosen in self.offered(node)
            for level in offered_levels(info, stored_as(chosen), self.setting.named_sizes, self.setting.dp, levels)
        ]

    def stored(self, node: fx.Node, chosen: Chosen, level: int, count: int, ends: bool = True) -> Choice:
        """A way to store a parameter: its step end per microbatch, what it exchanges in each, and what it holds.

        ends: whether this costs anything, and moving it and its gradients in each microbatch.
        """
        placements, setting = stored_as(chosen), self.setting
        info = self.analysis.program.tensors[node.meta["name"]]
        held = held_bytes(parameter_bytes(info.shape, info.dtype, self.optimizer, info.trainable), level, setting.dp)
        whole = self.block_costs.size(Value(node)).at(1)
        own = whole * share_of(placements, setting.sizes)
        seconds, gathered = 0.0, self.block_costs.gathering(node)
        if ends and level >= 2:
            least, all_ = (
                sum(setting.data.microbatch_seconds(size, level, info.trainable, *gathered))
                for size in (whole / math.prod(setting.sizes), own)
            )
            seconds = setting.exposed * least + setting.exposed_beyond * (all_ - least)
        if ends:
            seconds += sum(setting.data.moving_seconds(own, level, bool(info.trainable), gathered[0]))
        if ends and info.trainable:
            arriving = setting.data.arriving_seconds(whole * share_of(placements, setting.sizes), level)
            once = setting.step_end_seconds(whole, placements, level) + arriving
            once += setting.tied.get(info.name, 0.0) * share_of(placements, setting.sizes)
            seconds += setting.ends * once / setting.microbatches
        return Choice(
            name_of(chosen) + (f" zero{level}" if level else ""),
            seconds * count,
            (self.id_of(placements),),
            memory=held.total * share_of(placements, setting.sizes) * count,
        )

    def run(self, node: fx.Node, chosen: Chosen, count: int) -> Choice:
        """A way to run an op: its share of the work, and what it keeps for the backward."""
        prices, sizes = self.setting.prices, self.setting.sizes
        computed = prices.op_seconds(node, chosen, sizes)
        exchanged = prices.form_seconds(node, chosen, self.setting.axes, self.setting.beside)
        kept, transient = self.block_costs.held_bytes(node, chosen, sizes, prices.batch)
        return Choice(
            name_of(chosen),
            (sum(computed) + exchanged.forward_s + exchanged.backward_s - self.longer_seconds(node, chosen)) * count,
            tuple(map(self.id_of, zip(*(strategy.outputs for strategy in chosen), strict=True))),
            tuple(map(self.id_of, zip(*(strategy.inputs for strategy in chosen), strict=True))),
            kept * count,
            transient,
        )

    def op(self, nodes: Sequence[fx.Node]) -> Op:
        node, count = nodes[0], len(nodes)
        if is_stored(node):
            return Op(node.name, tuple(self.stored(node, chosen, level, count) for chosen, level in self.ways(node)))
        known, ways = self.setting.shared.ops, [chosen for chosen, _ in self.ways(node)]
        if node not in known:
            known[node] = Op(node.name, tuple(self.run(node, chosen, count) for chosen in ways))
        sent = [self.sent_seconds(node, chosen) for chosen in ways] if self.setting.sent else []
        if not any(sent):
            return known[node]
        priced = zip(known[node].choices, sent, strict=True)
        return Op(node.name, tuple(replace(choice, cost=choice.cost + more) for choice, more in priced))

    def sent_seconds(self, node: fx.Node, chosen: Chosen) -> float:
        """In which stages send what an op's class makes, as this choice makes it."""
        kind, sizes, total = self.analysis.classes[node], self.setting.sizes, 0.0
        for index in range(len(chosen[0].outputs) if chosen else 0):
            whole = self.setting.sent.get((kind, index), 0.0)
            total += whole * share_of([strategy.outputs[index] for strategy in chosen], sizes) if whole else 0.0
        return total

    def least_state_bytes(self) -> float:
        """What parameters hold at least on a rank of each stage, all stages together, whatever the strategies."""
        return math.fsum(
            min(self.stored(nodes[0], *way, len(nodes), ends=False).memory for way in self.ways(nodes[0]))
            for nodes in self.folded.classes
            if is_stored(nodes[0])
        )

    # -- weights' gradients beside collectives --------------------------------------------------------------------

    def least_weight_seconds(self, node: fx.Node) -> dict[int, float]:
        """Of a product, by how it reads what it multiplies: the fewest seconds of its weight's gradient."""
        if node not in self._least:
            found = self._least[node] = {}
            for chosen in self.offered(node):
                at, seconds = self.read_as(node, chosen), self.weight_seconds(node, chosen)
                found[at] = min(seconds, found.get(at, seconds))
        return self._least[node]

    def weight_seconds(self, node: fx.Node, chosen: Chosen) -> float:
        return self.setting.prices.weight_seconds(node, chosen, self.setting.sizes)

    def read_as(self, node: fx.Node, chosen: Chosen) -> int:
        operand = operand_of(node)
        assert operand is not None
        slot = graphs.inputs(node).index(graphs.value_of(operand))
        return self.id_of(tuple(strategy.inputs[slot] for strategy in chosen))

    def longer_seconds(self, node: fx.Node, chosen: Chosen) -> float:
        """What a choice's weight's gradient may hide beyond what the edge is credited with."""
        if not self.setting.beside or not chosen or operand_of(node) is None:
            return 0.0
        least = self.least_weight_seconds(node)[self.read_as(node, chosen)]
        return self.weight_seconds(node, chosen) - least

    def hiding(self, value: FoldedValue) -> tuple[fx.Node, ...]:
        """The products that read a value whose weights' gradients a collective of its gradient may pass beside."""
        if not self.setting.beside or not is_differentiable(value.example):
            return ()
        products = [self.analysis.classes[node] for node in products_reading(value.example)]
        if not self._first:
            self._first.update({self.analysis.classes[nodes[0]]: nodes[0] for nodes in self.folded.classes})
        return tuple(self._first[name] for name in products)

    def hiding_seconds(self, products: Sequence[fx.Node], want: Sequence[int]) -> list[float]:
        """How long a collective may take unseen where such a value is converted to each of these placements."""
        if not products:
            return []
        return [sum(self.least_weight_seconds(node).get(wanted, 0.0) for node in products) for wanted in want]

    # -- edges ----------------------------------------------------------------------------------------------------

    def edge(self, value: FoldedValue, ops: Sequence[Op], placements: Sequence[Placements]) -> Edge:
        """The collectives between how a value is made and how it is read; statistics are stored as they are used."""
        if value.as_stored:
            return Edge(value.source, value.slot, value.uses, {}, value.count)
        have = tuple(sorted({choice.outputs[value.slot] for choice in ops[value.source].choices}))
        want = tuple(sorted({choice.inputs[slot] for op, slot in value.uses for choice in ops[op].choices}))
        size = self.block_costs.size(value.example).at(self.setting.prices.batch)
        differentiable, products = is_differentiable(value.example), self.hiding(value)
        known, key = self.setting.shared.tables, (size, differentiable, products, have, want)
        if key not in known:
            seconds = self.setting.conversions.table(
                [placements[item] for item in have],
                [placements[item] for item in want],
                size,
                differentiable,
                self.hiding_seconds(products, want),
            )
            known[key] = CostTable(have, want, seconds)
        return Edge(value.source, value.slot, value.uses, known[key], value.count)

    # -- the answer -----------------------------------------------------------------------------------------------

    def unsharded(self, level: int) -> TensorChoice:
        """The only choice where there is no tensor axis and one level: every parameter that can be is at it."""
        levels: dict[str, int] = {}
        memory = 0.0
        for nodes in self.folded.classes:
            if is_stored(nodes[0]):
                found = self.ways(nodes[0])[0][1] if level else 0
                memory += self.stored(nodes[0], (), found, len(nodes)).memory
                levels.update({node.meta["name"]: found for node in nodes if found})
        return TensorChoice({}, {}, None, memory_bytes=memory, levels=levels)

    def solve(
        self, memory_limit: float | None, time_limit_s: float, below: float = math.inf, gap: float = 0.0
    ) -> TensorChoice:
        classes: Sequence[tuple[fx.Node, ...]] = self.folded.classes
        if not self.setting.axes:
            return self.solve_levels([nodes for nodes in classes if is_stored(nodes[0])], memory_limit, time_limit_s)
        return self.chosen(*self.solution(memory_limit, time_limit_s, below=below, gap=gap))

    def chosen(self, problem: TensorProblem, solution: TensorSolution) -> TensorChoice:
        """What a solution chooses, of a problem with the choices of :meth:`problem`."""
        strategies: dict[fx.Node, Chosen] = {}
        storage: dict[str, Placements] = {}
        levels: dict[str, int] = {}
        for nodes, index in zip(self.folded.classes, solution.choices, strict=False):
            chosen, level = self.ways(nodes[0])[index]
            for node in nodes:
                if is_stored(node):
                    storage[node.meta["name"]] = stored_as(chosen)
                    levels.update({node.meta["name"]: level} if level else {})
                else:
                    strategies[node] = chosen
        return TensorChoice(strategies, storage, solution, problem.memory(solution.choices), levels)

    def solve_priced(
        self,
        byte_s: float,
        in_flight: float,
        time_limit_s: float,
        kept: Mapping[tuple[str, ...], NDArray[np.float64]] | None = None,
    ) -> TensorChoice:
        """The strategies with the least seconds where a byte held costs some; of the solution seconds alone are told.

        byte_s: seconds of a byte. in_flight: microbatches whose kept tensors are held. kept: by class of ops, bytes
        that each keeps by choice, where these are not what it keeps by itself.
        """
        problem, kept = self.problem(None), kept or {}
        ops = []
        for op, nodes in zip(problem.ops, (*self.folded.classes, None), strict=True):
            times = byte_s * (in_flight if nodes is not None and not is_stored(nodes[0]) else 1.0)
            sizes = [choice.memory for choice in op.choices]
            if nodes is not None and self.analysis.classes[nodes[0]] in kept:
                sizes = (kept[self.analysis.classes[nodes[0]]] * len(nodes)).tolist()
            priced = (
                replace(choice, cost=choice.cost + times * size, memory=0.0, transient=0.0)
                for choice, size in zip(op.choices, sizes, strict=True)
            )
            ops.append(Op(op.name, tuple(priced)))
        found = cache.solve(replace(problem, ops=tuple(ops)), time_limit_s, self.gap)
        seconds = problem.objective(found.choices)
        return self.chosen(problem, replace(found, objective=seconds, bound=0.0, gap=1.0))

    def work_bound(self, memory_limit: float | None, time_limit_s: float, enough: float = math.inf) -> float:
        """No strategies make the ops and conversions of one microbatch take less, ends of a step left aside."""
        try:
            return self.solution(memory_limit, time_limit_s, free=True, below=enough)[1].bound
        except NotBetter as error:
            return error.bound

    def free(self, op: Op, nodes: Sequence[fx.Node]) -> Op:
        """An op that holds nothing, or a parameter without its step end."""
        if not is_stored(nodes[0]):
            return replace(op, choices=tuple(replace(choice, memory=0.0, transient=0.0) for choice in op.choices))
        ways = self.ways(nodes[0])
        if self.divided in nodes:
            ways = [way for way in ways if share_of(stored_as(way[0]), self.setting.sizes) < 1]
            if not ways:
                raise InfeasibleError(f"no strategy divides {op.name}")
        return Op(op.name, tuple(self.stored(nodes[0], *way, len(nodes), ends=False) for way in ways))

    def solution(
        self,
        memory_limit: float | None,
        time_limit_s: float,
        free: bool = False,
        below: float = math.inf,
        gap: float = 0.0,
    ) -> tuple[TensorProblem, TensorSolution]:
        """The problem of all classes, and its solution. free: parameters cost nothing, and alone hold.

        below, gap: as in :func:`choose`.
        """
        problem = self.problem(memory_limit, free)
        least = math.fsum(min(choice.cost for choice in op.choices) for op in problem.ops)
        if least >= below:
            raise NotBetter(least, least)
        return problem, cache.solve(problem, time_limit_s, max(self.gap, gap), below=below)

    def problem(self, memory_limit: float | None, free: bool = False) -> TensorProblem:
        """Of all classes, and of what leaves the graph. free: as of :meth:`solution`."""
        classes = self.folded.classes
        ops = [self.op(nodes) for nodes in classes]
        if free:
            ops = [self.free(op, nodes) for op, nodes in zip(ops, classes, strict=True)]
        ops.append(Op("output", (Choice("R", 0.0, (), (self.id_of((REPLICATE,) * len(self.setting.axes)),)),)))
        placements = list(self.setting.shared.ids)
        edges = tuple(self.edge(value, ops, placements) for value in self.folded.values)
        return TensorProblem(tuple(ops), edges, memory_limit, self.stages)

    def solve_levels(
        self, classes: Sequence[Sequence[fx.Node]], memory_limit: float | None, time_limit_s: float
    ) -> TensorChoice:
        """Without tensor axes: the levels of the parameters alone."""
        problem = TensorProblem(tuple(self.op(nodes) for nodes in classes), (), memory_limit)
        choices = cache.solve(problem, time_limit_s).choices
        levels = {
            node.meta["name"]: self.ways(nodes[0])[index][1]
            for nodes, index in zip(classes, choices, strict=True)
            for node in nodes
        }
        divided = {name: level for name, level in levels.items() if level}
        return TensorChoice({}, {}, None, memory_bytes=problem.memory(choices), levels=divided)


def stored_as(chosen: Chosen) -> Placements:
    """How a parameter lies, one placement per axis."""
    return tuple(strategy.outputs[0] for strategy in chosen)


def name_of(chosen: Chosen) -> str:
    """Strategies as a plan writes them."""
    return ",".join(strategy.name for strategy in chosen)
