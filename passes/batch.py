"""Batch soundness: the samples of a batch may be split if no op mixes them, and this pass proves it op by op.

Splitting the batch into microbatches and over data-parallel replicas is one sharding of the batch factor. Every value
gets a :class:`BatchState`: independent of the samples (R), one part per share of the samples (S), or a sum over
samples whose parts add up (P). States follow from the ops' rules. Where they would not, the graph is rewritten so that
they do:

- a mean over samples becomes a sum divided by the number of samples in the *whole* batch, and a mean loss over valid
  labels a sum divided by the *whole* batch's number of valid labels;
- a sum over samples that depends on no parameter (such a count) and is used nonlinearly becomes a *total*: it is
  computed once per step over the whole batch, and handed to the stages;
- what does not depend on the samples but is added to a sum over them (a weight penalty) is scaled by the share
  ``b / B`` of the samples, so that the shares add up to it once.

Row numbers count within a share: ``arange(b)`` indexes the share's own rows, so it may only be used to pick rows of
it. Experts' routing sorts rows by expert, works on them row by row and puts them back: ``order`` names the sort that a
value's rows stand in, ``points`` what a value's entries are row numbers of.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from autopart.passes import graph as graphs
from autopart.passes.normalize import fakes
from autopart.passes.program import Program, Role, mark_differentiable
from autopart.passes.rules import RuleBook, follow
from autopart.passes.sizes import ONE, Extent, extent
from autopart.runtime.placement import PARTIAL, REPLICATE, Placement, shard

aten = torch.ops.aten

_NONE, _MEAN, _SUM = 0, 1, 2
# Position of the reduction argument: losses that average over all elements, and those that average over valid labels.
_ELEMENT_LOSSES = {
    aten.mse_loss.default: 2,
    aten.l1_loss.default: 2,
    aten.smooth_l1_loss.default: 2,
    aten.huber_loss.default: 2,
    aten.soft_margin_loss.default: 2,
    aten.kl_div.default: 2,
    aten.binary_cross_entropy.default: 3,
    aten.binary_cross_entropy_with_logits.default: 4,
}
_LABEL_LOSSES = {aten.cross_entropy_loss.default, aten.nll_loss.default, aten.nll_loss_nd.default}
_BATCH_STATISTICS = {"aten.batch_norm.default"}
# Ops that keep a row number a row number.
_KEEP_POINTS = {
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.expand.default,
    aten.slice.Tensor,
    aten.to.dtype,
    aten.clone.default,
    aten.contiguous.default,
    aten.detach.default,
}
_FACTORIES = ("empty", "zeros", "ones", "full", "rand", "new_", "expand", "scalar_tensor", "reshape")
_GROUPED = ("grouped_mm",)


@dataclass(frozen=True, slots=True)
class BatchState:
    """How a value depends on which share of the samples it was computed from.

    placement: R, S or P on the axis of samples. order: the sort node in whose order the rows stand; None: their own.
    points: the entries are row numbers, of rows in their own order ("rows") or in that of a sort node; "" otherwise.
    counter: entry i is the number i. grouped: a count of rows per group, rows in that sort's order.
    """

    placement: Placement = REPLICATE
    order: fx.Node | None = None
    points: fx.Node | str = ""
    counter: bool = False
    grouped: fx.Node | None = None

    @property
    def whole(self) -> bool:
        return self.placement == REPLICATE


WHOLE = BatchState()
SUMMED = BatchState(PARTIAL)


class Mixes(Exception):
    """An op combines samples in a way that splitting would change."""


@dataclass(slots=True)
class BatchSplit:
    """The graph that computes one share of the samples, and how the shares' outputs make the whole.

    graph: placeholders ``b`` (samples in this share), ``B`` (samples in the whole batch) and totals added.
    combine: for every tensor output its name, "sum", "cat" or "same", and the dim for "cat".
    totals: the graph that computes the totals from the inputs, and their names; None when there are none.
    flaw: why the batch may not be split, naming the op; '' when it may. The graph is then the program's own.
    """

    graph: fx.Graph
    combine: dict[str, tuple[str, int]]
    totals: fx.Graph | None = None
    total_names: tuple[str, ...] = ()
    flaw: str = ""
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class _Splitter:
    program: Program
    rules: RuleBook
    graph: fx.Graph = field(default_factory=fx.Graph)
    env: dict[fx.Node, fx.Node] = field(default_factory=dict)
    states: dict[fx.Node, BatchState] = field(default_factory=dict)
    outputs: dict[fx.Node, tuple[BatchState, ...]] = field(default_factory=dict)  # of ops with several
    bound: set[fx.Node] = field(default_factory=set)  # depends on a parameter or on chance
    totals: dict[fx.Node, fx.Node] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)
    whole_batch: fx.Node | None = None
    share: fx.Node | None = None
    last_placeholder: fx.Node | None = None
    current: fx.Node | None = None

    # -- building the new graph -----------------------------------------------------------------------------------

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        assert self.current is not None
        node.meta.update(path=self.current.meta.get("path", ""), source=self.current.meta.get("source", ""))
        tensors = [item for item in node.all_input_nodes if isinstance(item.meta.get("val"), torch.Tensor)]
        if tensors:
            with tensors[0].meta["val"].fake_mode, torch.no_grad():
                node.meta["val"] = target(*fakes(args), **fakes(kwargs))
        else:
            node.meta["val"] = target(*fakes(args), **fakes(kwargs))
        if any(item in self.bound for item in node.all_input_nodes):
            self.bound.add(node)
        return node

    def samples(self, count: Extent) -> Any:
        """A number of elements of the whole batch: the extent with ``B`` for ``b``."""
        assert self.whole_batch is not None
        if not count.batched:
            return count.coefficient
        return (
            self.whole_batch if count.coefficient == 1 else self.call(operator.mul, count.coefficient, self.whole_batch)
        )

    def run(self) -> BatchSplit:
        for node in self.program.graph.nodes:
            self.current = node
            if node.op == "placeholder":
                self.placeholder(node)
            elif node.op == "output":
                return self.finish(node)
            else:
                self.env[node] = self.op(node)
        raise AssertionError("a graph ends in an output")

    def placeholder(self, node: fx.Node) -> None:
        new = self.graph.node_copy(node)
        self.env[node] = new
        role = node.meta["role"]
        self.states[new] = WHOLE
        if role is Role.INPUT:
            dim = next(spec.batch_dim for spec in self.program.inputs if spec.name == node.meta["name"])
            self.states[new] = WHOLE if dim is None else BatchState(shard(dim))
        if role in (Role.PARAMETER, Role.BUFFER):
            self.bound.add(new)
        if role is Role.BUFFER and node.meta["name"] not in self.program.updated_buffers:
            self.bound.discard(new)
        if role is Role.BATCH:
            whole = self.graph.placeholder("B")
            whole.meta.update(val=node.meta["val"], role=Role.GLOBAL_BATCH, name="B", path="", source="")
            self.whole_batch, self.states[whole] = whole, WHOLE
        self.last_placeholder = new

    def copy(self, node: fx.Node) -> fx.Node:
        new = self.graph.node_copy(node, lambda argument: self.env[argument])
        if any(item in self.bound for item in new.all_input_nodes) or _is_random(node):
            self.bound.add(new)
        return new

    # -- one op ---------------------------------------------------------------------------------------------------

    def op(self, node: fx.Node) -> fx.Node:
        if graphs.is_getitem(node):
            new = self.copy(node)
            self.states[new] = self.outputs[self.env[node.args[0]]][node.args[1]]  # type: ignore[index]
            return new
        if not graphs.is_op(node):
            return self.copy(node)
        for special in (self.counter, self.reduced_loss, self.mean, self.routed):
            found = special(node)
            if found is not None:
                return found
        return self.generic(node)

    def state(self, node: fx.Node) -> BatchState:
        return self.states[self.env[node]]

    def put(self, new: fx.Node, *states: BatchState) -> fx.Node:
        if isinstance(new.meta.get("val"), torch.Tensor):
            self.states[new] = states[0]
        else:
            self.outputs[new] = states
        return new

    def counter(self, node: fx.Node) -> fx.Node | None:
        """``arange`` over as many rows as a share has: the share's row numbers, from zero."""
        if not str(node.target).startswith("aten.arange"):
            return None
        found = extent(node.meta["val"].shape[0])
        if found is not None and not found.batched:
            return None
        if found is None or node.target is not aten.arange.default:
            raise Mixes("numbers rows across the batch")
        return self.put(self.copy(node), BatchState(shard(0), points="rows", counter=True))

    def reduced_loss(self, node: fx.Node) -> fx.Node | None:
        """A loss averaged over samples: its sum, divided by the whole batch's count."""
        target = node.target
        if target in _ELEMENT_LOSSES:
            return self.element_loss(node, _ELEMENT_LOSSES[target])
        if target not in _LABEL_LOSSES:
            return None
        reduction = _argument(node, 3, "reduction", _MEAN)
        scores, labels = node.args[0], node.args[1]
        states = [self.state(item) for item in graphs.input_nodes(node)]
        if reduction == _NONE or all(state.whole for state in states):
            return None
        self.same_rows(states)
        args, kwargs = _with_argument(node, 3, "reduction", _SUM)
        loss = self.call(target, *self.mapped(args), **self.mapped(kwargs))
        if target is aten.cross_entropy_loss.default and labels.meta["val"].is_floating_point():
            if reduction == _MEAN:
                total = _elements(scores.meta["val"])
                classes = Extent(scores.meta["val"].shape[1 if scores.meta["val"].dim() > 1 else 0])
                loss = self.put(loss, SUMMED)
                count = total.over(classes)
                assert count is not None
                return self.put(self.call(aten.div.Tensor, loss, self.samples(count)), SUMMED)
            return self.put(loss, SUMMED)
        self.put(loss, SUMMED)
        if reduction == _SUM:
            return loss
        ignored = _argument(node, 4, "ignore_index", -100)
        weight = _argument(node, 2, "weight", None)
        valid = self.call(aten.ne.Scalar, self.env[labels], ignored)
        if weight is None:
            count = self.call(aten.sum.default, valid)
        else:
            inside = self.call(aten.where.ScalarOther, valid, self.env[labels], 0)
            chosen = self.call(aten.mul.Tensor, self.call(aten.index.Tensor, self.env[weight], [inside]), valid)
            count = self.call(aten.sum.default, chosen)
        self.put(count, SUMMED)
        return self.put(self.call(aten.div.Tensor, loss, self.completed(count)), SUMMED)

    def element_loss(self, node: fx.Node, position: int) -> fx.Node | None:
        states = [self.state(item) for item in graphs.input_nodes(node)]
        reduction = _argument(node, position, "reduction", _MEAN)
        if reduction == _NONE or all(state.whole for state in states):
            return None
        self.same_rows(states)
        args, kwargs = _with_argument(node, position, "reduction", _SUM)
        loss = self.put(self.call(node.target, *self.mapped(args), **self.mapped(kwargs)), SUMMED)
        if reduction == _SUM:
            return loss
        shape = torch.broadcast_shapes(*[item.meta["val"].shape for item in graphs.input_nodes(node)[:2]])
        count = _product(shape)
        return self.put(self.call(aten.div.Tensor, loss, self.samples(count)), SUMMED)

    def same_rows(self, states: list[BatchState]) -> None:
        spread = [state for state in states if not state.whole]
        if any(not state.placement.is_shard or state.points or state.grouped for state in spread):
            raise Mixes("averages a value that is already summed over samples")
        if len({state.order for state in spread}) > 1:
            raise Mixes("compares rows that stand in different orders")

    def mean(self, node: fx.Node) -> fx.Node | None:
        """A mean over dims that hold samples: their sum, divided by the whole batch's count."""
        if node.target not in (aten.mean.dim, aten.mean.default):
            return None
        state = self.state(node.args[0])  # type: ignore[arg-type]
        if not state.placement.is_shard:
            return None
        value = node.args[0].meta["val"]  # type: ignore[union-attr]
        dims = list(range(value.dim())) if node.target is aten.mean.default else _dims(node.args[1], value.dim())
        if state.placement.dim not in dims:
            return None
        source = self.env[node.args[0]]  # type: ignore[index]
        keep = _argument(node, 2, "keepdim", False) if node.target is aten.mean.dim else False
        kwargs = {"dtype": node.kwargs["dtype"]} if node.kwargs.get("dtype") is not None else {}
        total = self.put(self.call(aten.sum.dim_IntList, source, dims, keep, **kwargs), SUMMED)
        count = _product([value.shape[dim] for dim in dims])
        return self.put(self.call(aten.div.Tensor, total, self.samples(count)), SUMMED)

    def routed(self, node: fx.Node) -> fx.Node | None:
        """Ops that permute a share's rows, work on permuted rows, or undo the permutation."""
        target, name = node.target, str(node.target)
        if target in (aten.sort.default, aten.argsort.default) or target is aten.sort.stable:
            state = self.state(node.args[0])  # type: ignore[arg-type]
            value = node.args[0].meta["val"]  # type: ignore[union-attr]
            dim = _argument(node, 2 if target is aten.sort.stable else 1, "dim", -1) % max(value.dim(), 1)
            if not (state.placement.is_shard and state.placement.dim == dim):
                return None
            if value.dim() != 1 or state.order is not None:
                raise Mixes("sorts rows of the batch")
            new = self.copy(node)
            sorted_rows = BatchState(shard(0), order=new)
            indices = BatchState(shard(0), order=new, points="rows")
            return self.put(new, *((indices,) if target is aten.argsort.default else (sorted_rows, indices)))
        if target is aten.index.Tensor:
            return self.picked(node)
        if target in (aten.index_put.default, aten.scatter.src):
            return self.placed(node)
        if target in (aten.histc.default, aten.bincount.default):
            state = self.state(node.args[0])  # type: ignore[arg-type]
            if state.placement.is_shard and not state.points:
                return self.put(self.copy(node), BatchState(PARTIAL, grouped=state.order))
            return None
        if any(part in name for part in _GROUPED):
            states = [self.state(item) for item in graphs.input_nodes(node)]
            rows, offsets = states[0], states[2]
            if rows.placement.is_shard and rows.order is not None and offsets.grouped is rows.order and states[1].whole:
                return self.put(self.copy(node), BatchState(shard(0), order=rows.order))
            raise Mixes("multiplies groups of rows that are not a share's own groups")
        if target is aten.floor_divide.default or target is aten.div.Tensor_mode:
            state = self.state(node.args[0])  # type: ignore[arg-type]
            if state.points == "rows" and isinstance(node.args[1], int):
                return self.put(self.copy(node), replace(state, counter=False))
        return None

    def picked(self, node: fx.Node) -> fx.Node | None:
        """Indexing a share's rows by row numbers: the result's rows follow the index."""
        source, indices = self.state(node.args[0]), node.args[1]  # type: ignore[arg-type]
        pointers = [
            (position, self.state(item))
            for position, item in enumerate(indices)
            if item is not None and self.state(item).points
        ]
        if not pointers:
            return None
        position, pointer = pointers[0]
        others = [self.state(item) for at, item in enumerate(indices) if item is not None and at != position]
        expected = "rows" if source.order is None else source.order
        if len(pointers) > 1 or source.points and not source.counter:
            raise Mixes("picks rows by several row numbers")
        if source.placement != shard(position) or pointer.points != expected:
            raise Mixes("picks rows by numbers that count other rows")
        if any(not other.whole for other in others):
            raise Mixes("picks rows and columns of different samples")
        used = [item for item in indices if item is not None]
        shape = torch.broadcast_shapes(*[item.meta["val"].shape for item in used])
        first = next(at for at, item in enumerate(indices) if item is not None)
        adjacent = indices[first : first + len(used)] == used or list(indices[first : first + len(used)]) == used
        offset = first if adjacent else 0
        own = indices[position].meta["val"].dim()
        dim = pointer.placement.dim + len(shape) - own + offset
        return self.put(self.copy(node), replace(pointer, placement=shard(dim), points="", counter=False))

    def placed(self, node: fx.Node) -> fx.Node | None:
        """Writing rows to the positions they came from: the inverse of a sort."""
        if node.target is aten.index_put.default:
            base, indices, values = node.args[:3]
            if len(indices) != 1 or _argument(node, 3, "accumulate", False):  # type: ignore[arg-type]
                return None
            index = indices[0]  # type: ignore[index]
        else:
            base, _, index, values = node.args[:4]
        state, rows = self.state(index), self.state(values)  # type: ignore[arg-type]
        if not state.points:
            return None
        base_state = self.state(base)  # type: ignore[arg-type]
        if state.points != "rows" or state.order is None or not base_state.placement.is_shard:
            raise Mixes("writes rows by numbers that count other rows")
        if rows.counter:
            return self.put(self.copy(node), BatchState(shard(0), points=state.order))
        if rows.order is state.order and not rows.points:
            return self.put(self.copy(node), BatchState(shard(0)))
        raise Mixes("writes rows that stand in another order")

    def generic(self, node: fx.Node) -> fx.Node:
        """An op's rule decides; sums are completed or shares scaled where that makes it sound."""
        sources = graphs.input_nodes(node)
        states = [self.state(item) for item in sources]
        spread = [state for state in states if not state.whole]
        if all(state.whole for state in states) or str(node.target).startswith("aten.new_"):
            return self.independent(node)
        rule = self.rules.rule(node)
        orders = {state.order for state in spread if state.placement.is_shard}
        if len(orders) > 1:
            raise Mixes("combines rows that stand in different orders")
        order = next(iter(orders), None)
        points = [state for state in spread if state.points]
        if points:
            if node.target not in _KEEP_POINTS or len(sources) != 1:
                if str(node.target).startswith("aten.empty_like") or str(node.target).startswith("aten.zeros_like"):
                    return self.put(self.copy(node), replace(points[0], order=None, points="", counter=False))
                if _adds_nothing(node):
                    return self.put(self.copy(node), points[0])
                raise Mixes("computes with the row numbers of a share")
        if str(node.target) in _BATCH_STATISTICS:
            self.notes["batch norm's statistics are those of each microbatch on each replica"] = None
            return self.put(self.copy(node), BatchState(shard(0)))
        placements = [state.placement for state in states]
        found = None if rule is None else follow(rule, node, placements)
        if found is not None:
            grouped = next((state.grouped for state in spread if state.grouped is not None), None)
            results = [
                BatchState(
                    placement,
                    order if placement.is_shard else None,
                    points[0].points if points else "",
                    bool(points) and points[0].counter and node.target is not aten.slice.Tensor,
                    grouped if placement == PARTIAL else None,
                )
                for placement in found
            ]
            return self.put(self.copy(node), *results)
        if any(state.placement == PARTIAL for state in states):
            return self.after_sums(node, rule, sources, states)
        raise Mixes("combines different samples")

    def after_sums(self, node: fx.Node, rule: Any, sources: list[fx.Node], states: list[BatchState]) -> fx.Node:
        """An op that is not linear in a sum over samples, or adds to it what does not depend on them."""
        summed = [position for position, state in enumerate(states) if state.placement == PARTIAL]
        if rule is not None and all(state.whole or state.placement == PARTIAL for state in states):
            for group in rule.linear:
                if set(summed) <= set(group) and len(group) > 1 and len(states) == len(group):
                    scaled = dict(self.env)
                    for source, state in zip(sources, states, strict=True):
                        if state.whole:
                            scaled[source] = self.scaled(self.env[source])
                    new = self.graph.node_copy(node, lambda argument: scaled[argument])
                    if any(item in self.bound for item in new.all_input_nodes):
                        self.bound.add(new)
                    return self.put(new, SUMMED)
        replaced = dict(self.env)
        for position in summed:
            replaced[sources[position]] = self.completed(self.env[sources[position]])
        previous, self.env = self.env, replaced
        try:
            return self.generic(node)
        finally:
            self.env = previous

    def scaled(self, node: fx.Node) -> fx.Node:
        """The share ``b / B`` of a value that every share has."""
        if self.share is None:
            batch = self.graph.find_nodes(op="placeholder", target="b")[0]
            self.share = self.call(operator.truediv, batch, self.whole_batch)
        return self.call(aten.mul.Tensor, node, self.share)

    def completed(self, node: fx.Node) -> fx.Node:
        """A sum over the whole batch, computed before the step from the inputs alone."""
        if node in self.bound:
            raise Mixes("uses a sum over samples that depends on the parameters")
        if node.meta["val"].dim() and any(extent(size) is None for size in node.meta["val"].shape):
            raise Mixes("uses a sum over samples of unknown size")
        if node not in self.totals:
            assert self.last_placeholder is not None
            with self.graph.inserting_after(self.last_placeholder):
                total = self.graph.placeholder(f"total_{len(self.totals)}")
            total.meta.update(
                val=node.meta["val"],
                role=Role.TOTAL,
                name=f"total_{len(self.totals)}",
                path="",
                source="",
                differentiable=False,
            )
            self.states[total] = WHOLE
            self.last_placeholder = total
            self.totals[node] = total
        return self.totals[node]

    def independent(self, node: fx.Node) -> fx.Node:
        """No value that is read depends on the samples; sizes may."""
        new = self.copy(node)
        results = []
        for value in graphs.outputs(node):
            sizes = [extent(size) for size in value.fake.shape]
            batched = [dim for dim, size in enumerate(sizes) if size is None or size.batched]
            if not batched:
                results.append(WHOLE)
            elif len(batched) == 1 and any(part in str(node.target) for part in _FACTORIES):
                results.append(BatchState(shard(batched[0])))
            else:
                raise Mixes("makes a value whose size depends on the batch")
        return self.put(new, *results)

    def mapped(self, argument: Any) -> Any:
        return fx.node.map_arg(argument, lambda node: self.env[node])

    # -- the end --------------------------------------------------------------------------------------------------

    def finish(self, node: fx.Node) -> BatchSplit:
        results = self.mapped(node.args[0])
        tensors = [info for info in self.program.outputs if info.node is not None]
        combine: dict[str, tuple[str, int]] = {}
        for info, result in zip(tensors, results, strict=False):
            state = self.states[result]
            if state.points or state.order is not None:
                raise Mixes(f"returns {info.name!r}, whose rows stand in another order")
            if state.placement.is_shard and state.placement.outer != 1:
                raise Mixes(f"returns {info.name!r}, whose dim {state.placement.dim} holds samples inside other blocks")
            kind = "cat" if state.placement.is_shard else "sum" if state.placement == PARTIAL else "same"
            combine[info.name] = (kind, state.placement.dim)
        self.graph.output(results)
        totals = _extract(self.graph, list(self.totals)) if self.totals else None
        _prune(self.graph)
        mark_differentiable(self.graph)
        self.graph.lint()
        return BatchSplit(
            self.graph, combine, totals, tuple(new.meta["name"] for new in self.totals.values()), "", tuple(self.notes)
        )


def split_batch(program: Program, rules: RuleBook) -> BatchSplit:
    """Proves that the program's batch may be split and rewrites its graph for one share, or says which op mixes."""
    whole = {info.name: ("same", 0) for info in program.outputs if info.node is not None}
    if program.static_batch:
        return BatchSplit(program.graph, whole, flaw=f"the batch size is fixed: {program.static_batch}")
    splitter = _Splitter(program, rules)
    try:
        return splitter.run()
    except Mixes as reason:
        node = splitter.current
        assert node is not None
        where = graphs.module_path(node) or "the model"
        line = f" ({graphs.source_line(node)})" if graphs.source_line(node) else ""
        operation = "the output" if node.op == "output" else str(node.target)
        return BatchSplit(program.graph, whole, flaw=f"{operation} in {where}{line} {reason}")


def _extract(graph: fx.Graph, results: list[fx.Node]) -> fx.Graph:
    """A graph of its own that computes ``results``."""
    wanted: set[fx.Node] = set()
    stack = list(results)
    while stack:
        node = stack.pop()
        if node not in wanted:
            wanted.add(node)
            stack.extend(node.all_input_nodes)
    part = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node in wanted or (node.op == "placeholder" and node.meta["role"] in (Role.BATCH, Role.GLOBAL_BATCH)):
            if node.meta.get("role") is Role.TOTAL:
                raise Mixes("needs a sum over the whole batch that itself depends on another")
            env[node] = part.node_copy(node, lambda argument: env[argument])
    part.output(tuple(env[node] for node in results))
    return part


def _prune(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        keeps = node.op in ("placeholder", "output") or "batch_norm" in str(node.target)
        if not node.users and not keeps:
            graph.erase_node(node)


def _is_random(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return torch.Tag.nondeterministic_seeded in target.tags


def _argument(node: fx.Node, index: int, name: str, default: Any) -> Any:
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def _with_argument(node: fx.Node, index: int, name: str, value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if len(node.args) > index:
        return (*node.args[:index], value, *node.args[index + 1 :]), dict(node.kwargs)
    return tuple(node.args), {**node.kwargs, name: value}


def _dims(dims: Any, rank: int) -> list[int]:
    if dims is None or dims == []:
        return list(range(rank))
    return [dim % rank for dim in ([dims] if isinstance(dims, int) else dims)]


def _product(sizes: Any) -> Extent:
    total: Extent | None = ONE
    for size in sizes:
        found = extent(size)
        total = None if total is None or found is None else total.times(found)
    if total is None:
        raise Mixes("averages over a number of elements that is no multiple of the batch size")
    return total


def _elements(value: torch.Tensor) -> Extent:
    return _product(value.shape)


def _adds_nothing(node: fx.Node) -> bool:
    return node.target is aten.add.Tensor and node.args[1] == 0
