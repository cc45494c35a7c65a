r"""Least seconds of a step in one stage whose last gradients' sums nothing hides, under any strategies of the ops.

The gradients of all parameters that block b or an earlier one reads are summed one after the other, and none of them
before the last microbatch's backward is through b, where b begins a layer or lies in none. So with F and B the seconds
of blocks, c those of a parameter's sum over replicas, o those of its optimizer and of partial sums over tensor axes,
f the first block that reads it, and m microbatches, for every such b::

    T >= m sum_k F_k + (m - 1) sum_k B_k + sum_{k >= b} B_k + sum_{p: f_p <= b} c_p + sum_p o_p

For one b this is a problem of :mod:`autopart.tensor_choice`, where ops before b have one backward less, conversions of
what these make too, and later parameters have no sum. Levels of ZeRO exchange no less, and hide no more of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import fx

from autopart.alike_work import forward_table
from autopart.cost.communication import bucketed_all_reduce_seconds
from autopart.folding import FoldedValue, is_stored
from autopart.passes.graph import Value
from autopart.prices import Chosen, share_of
from autopart.runtime.placement import BROADCAST, Placements
from autopart.solver import cache, tensor_transient
from autopart.solver.search import NotBetter
from autopart.solver.tensor_problem import Choice, CostTable, Edge, Op, TensorProblem
from autopart.tensor_choice import Builder, stored_as


def late_seconds(
    builder: Builder,
    block_of: Mapping[fx.Node, int],
    block: int,
    divides: bool,
    time_limit_s: float = 60.0,
    enough: float = math.inf,
) -> float:
    """Seconds of a step at least, ops outside of blocks left aside; see the module.

    block_of: of ops, and of parameters the first that reads them. divides: whether parameters may be divided over
    replicas. enough: seconds from which more are of no interest.
    """
    microbatches = builder.setting.microbatches
    problem = _late_problem(builder, block_of, block, divides)
    enough /= microbatches
    try:
        if enough == math.inf:
            return microbatches * cache.solve(problem, time_limit_s, builder.gap).bound
        return microbatches * tensor_transient.solve(problem, time_limit_s, builder.gap, enough).bound
    except NotBetter as error:
        return microbatches * error.bound


def _late_problem(builder: Builder, block_of: Mapping[fx.Node, int], block: int, divides: bool) -> TensorProblem:
    """Seconds per microbatch, as all prices of strategies are."""
    whole = builder.problem(None)
    early = [sum(block_of[node] < block for node in nodes) for nodes in builder.folded.classes]
    ops = [
        _stored(builder, op, nodes, sum(block_of[node] <= block for node in nodes), out, divides)
        if is_stored(nodes[0])
        else _op(builder, op, nodes, out)
        for op, nodes, out in zip(whole.ops, builder.folded.classes, early, strict=False)
    ]
    edges = (
        _edge(builder, edge, value, min(value.count, early[value.source]))
        for edge, value in zip(whole.edges, builder.folded.values, strict=True)
    )
    return TensorProblem((*ops, whole.ops[-1]), tuple(edges))


def _op(builder: Builder, op: Op, nodes: Sequence[fx.Node], early: int) -> Op:
    """early: how many have one backward less."""
    node, setting = nodes[0], builder.setting
    prices, backwards = setting.prices, len(nodes) - early / setting.microbatches

    def seconds(chosen: Chosen) -> float:
        forward, backward = prices.op_seconds(node, chosen, setting.sizes)
        exchanged = prices.form_seconds(node, chosen, setting.axes, setting.beside)
        backward += exchanged.backward_s - builder.longer_seconds(node, chosen)
        return (forward + exchanged.forward_s) * len(nodes) + backward * backwards

    return _priced(op, [seconds(chosen) for chosen, _ in builder.ways(node)])


def _stored(builder: Builder, op: Op, nodes: Sequence[fx.Node], late: int, early: int, divides: bool) -> Op:
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
        ends = len(nodes) * end + late * setting.data.sum_seconds(held, 0)
        adding = setting.prices.adding_seconds(held * share, setting.microbatches)
        return ends / setting.microbatches + adding * (len(nodes) - early / setting.microbatches)

    return _priced(op, [seconds(stored_as(chosen)) for chosen, _ in builder.ways(node)])


def _edge(builder: Builder, edge: Edge, value: FoldedValue, early: int) -> Edge:
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
