r"""Least seconds of a step in one stage whose last gradients' sums nothing hides, and the strategies that take so few.

The gradients of all parameters that block b or an earlier one reads are summed one after the other, and none of them
before the last microbatch's backward is through b, where b begins a layer or lies in none. So with F and B the seconds
of blocks, c those of a parameter's sum over replicas, o those of its optimizer and of partial sums over tensor axes,
f the first block that reads it, and m microbatches, for every such b::

    T >= L_b = m sum_k F_k + (m - 1) sum_k B_k + sum_{k >= b} B_k + sum_{p: f_p <= b} c_p + sum_p o_p

For one b this is a problem of :mod:`autopart.tensor_choice`, where ops before b have one backward less, conversions of
what these make too, and later parameters have no sum. So it is for two of them at shares y and 1 - y, and for any y::

    T >= max(L_b, L_c) >= y L_b + (1 - y) L_c

whose least seconds over all strategies are concave in y: the next y is where those of the strategies found so far
would be highest (Kelley's cutting planes). Where levels of ZeRO may divide parameters, c is what all of them sum then:
a reduce-scatter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from autopart.alike_work import forward_table
from autopart.cost.communication import bucketed_all_reduce_seconds
from autopart.folding import FoldedValue, is_stored
from autopart.passes.graph import Value
from autopart.prices import Chosen, share_of
from autopart.runtime.placement import BROADCAST, Placements
from autopart.solver import cache
from autopart.solver.search_space import NotBetter
from autopart.solver.tensor_problem import Choice, CostTable, Edge, Op, TensorProblem
from autopart.tensor_choice import Builder, TensorChoice, stored_as

MOST_SHARES = 4
"""For which two blocks' seconds are mixed."""
_NEAR = 1e-4
"""Of seconds: a bound that is nearer to the highest that is possible is good enough."""


@dataclass(frozen=True, slots=True)
class LateSums:
    """seconds: of a step at least, ops outside of blocks left aside. choices: strategies that were found on the way.

    complete: whether more seconds of interest would tell no more.
    """

    seconds: float
    choices: tuple[TensorChoice, ...] = ()
    complete: bool = True


def late_sums(
    builder: Builder,
    block_of: Mapping[fx.Node, int],
    blocks: Sequence[int],
    divides: bool,
    time_limit_s: float = 60.0,
    enough: float = math.inf,
) -> LateSums:
    """By one block or two; see the module.

    block_of: of ops, and of parameters the first that reads them. divides: whether parameters may be divided over
    replicas. enough: seconds from which more are of no interest.
    """
    microbatches = builder.setting.microbatches
    ends = [_late_problem(builder, block_of, {block: 1.0}, divides) for block in blocks]
    least, found, lines = 0.0, list[TensorChoice](), list[tuple[float, float]]()
    share = 1.0
    for _ in range(MOST_SHARES):
        problem = ends[0] if share == 1.0 else _late_problem(builder, block_of, _shares(blocks, share), divides)
        try:
            solution = cache.solve(problem, time_limit_s, builder.gap, below=enough / microbatches)
        except NotBetter as error:
            return LateSums(microbatches * max(least, error.bound), tuple(found), complete=False)
        least = max(least, solution.bound)
        found.append(builder.chosen(problem, solution))
        first, last = (ends[at].objective(solution.choices) for at in (0, -1))
        lines.append((first, last))
        share, most = _highest(lines)
        if most <= least * (1 + _NEAR):
            break
    return LateSums(microbatches * least, tuple(found))


def _shares(blocks: Sequence[int], share: float) -> dict[int, float]:
    return {block: part for block, part in zip(blocks, (share, 1 - share), strict=True) if part}


def _highest(lines: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The share y at which the least of y first + (1 - y) last is highest, and that."""
    crossings = (
        (last - other) / (other_first - other - first + last)
        for (first, last), (other_first, other) in itertools.combinations(lines, 2)
        if other_first - other != first - last
    )
    shares = [1.0, 0.0, *(share for share in crossings if 0 < share < 1)]
    return max(
        ((share, min(share * first + (1 - share) * last for first, last in lines)) for share in shares),
        key=lambda both: both[1],
    )


def _late_problem(
    builder: Builder, block_of: Mapping[fx.Node, int], blocks: Mapping[int, float], divides: bool
) -> TensorProblem:
    """Seconds per microbatch, as all prices of strategies are. blocks: those that count, each with its share."""
    whole, classes = builder.problem(None), builder.folded.classes
    early = [[sum(block_of[node] < block for node in nodes) for block in blocks] for nodes in classes]
    late = [[sum(block_of[node] <= block for node in nodes) for block in blocks] for nodes in classes]

    def mean(counts: Iterable[int]) -> float:
        return sum(share * count for share, count in zip(blocks.values(), counts, strict=True))

    ops = [
        _stored(builder, op, nodes, mean(late[at]), mean(early[at]), divides)
        if is_stored(nodes[0])
        else _op(builder, op, nodes, mean(early[at]))
        for at, (op, nodes) in enumerate(zip(whole.ops, classes, strict=False))
    ]
    edges = (
        _edge(builder, edge, value, mean(min(value.count, count) for count in early[value.source]))
        for edge, value in zip(whole.edges, builder.folded.values, strict=True)
    )
    return TensorProblem((*ops, whole.ops[-1]), tuple(edges))


def _op(builder: Builder, op: Op, nodes: Sequence[fx.Node], early: float) -> Op:
    """early: how many have one backward less."""
    node, setting = nodes[0], builder.setting
    prices, backwards = setting.prices, len(nodes) - early / setting.microbatches

    def seconds(chosen: Chosen) -> float:
        forward, backward = prices.op_seconds(node, chosen, setting.sizes)
        exchanged = prices.form_seconds(node, chosen, setting.axes, setting.beside)
        backward += exchanged.backward_s - builder.longer_seconds(node, chosen)
        return (forward + exchanged.forward_s) * len(nodes) + backward * backwards

    return _priced(op, [seconds(chosen) for chosen, _ in builder.ways(node)])


def _stored(builder: Builder, op: Op, nodes: Sequence[fx.Node], late: float, early: float, divides: bool) -> Op:
    """late: how many gradients' sums count; early: how many are added up once less."""
    node, setting = nodes[0], builder.setting
    if not builder.analysis.program.tensors[node.meta["name"]].trainable:
        return _priced(op, [0.0] * len(op.choices))
    whole, share = builder.block_costs.size(Value(node)).at(1), 1 / setting.dp if divides else 1.0

    def seconds(placements: Placements) -> float:
        held = whole * share_of(placements, setting.sizes)
        end = setting.prices.optimizer_seconds(held * share)
        for placement, axis in zip(placements, setting.axes, strict=True):
            if placement == BROADCAST:
                end += bucketed_all_reduce_seconds(held * share * setting.summed, axis.parts, axis.link)
        summed = min(setting.data.sum_seconds(held, level) for level in ((0, 1) if divides else (0,)))
        ends = len(nodes) * end + late * summed
        adding = setting.prices.adding_seconds(held * share, setting.microbatches)
        return ends / setting.microbatches + adding * (len(nodes) - early / setting.microbatches)

    return _priced(op, [seconds(stored_as(chosen)) for chosen, _ in builder.ways(node)])


def _edge(builder: Builder, edge: Edge, value: FoldedValue, early: float) -> Edge:
    """early: how many such values have their gradients converted once less."""
    table = edge.cost
    if not early or not isinstance(table, CostTable):
        return edge
    forward = forward_table(builder, table, value.example).seconds
    less = early / (value.count * builder.setting.microbatches)
    seconds = forward if less == 1.0 else forward * less + table.seconds * (1 - less)
    return replace(edge, cost=CostTable(table.rows, table.columns, seconds))


def _priced(op: Op, seconds: Sequence[float]) -> Op:
    """The same placements at these seconds; bytes are left aside."""
    choices = zip(op.choices, seconds, strict=True)
    return Op(op.name, tuple(Choice(own.name, cost, own.outputs, own.inputs) for own, cost in choices))
