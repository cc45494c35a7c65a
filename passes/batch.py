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

A number made of the batch size (``loss / x.shape[0]``) means the whole batch, a size of a tensor the share. Losses are
in :mod:`~autopart.passes.batch_losses`, row numbers and permutations in :mod:`~autopart.passes.batch_rows`.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from autopart.passes import graph as graphs
from autopart.passes.batch_losses import mean, reduced_loss
from autopart.passes.batch_rows import counter, keeps_row_numbers, routed
from autopart.passes.batch_state import SUMMED, WHOLE, BatchState, Mixes
from autopart.passes.batch_totals import totals_graph, values_read
from autopart.passes.batch_written import accumulated, additions_to_buffers, how_written
from autopart.passes.exported import fakes
from autopart.passes.program import Program, Role, mark_differentiable
from autopart.passes.rules import Rule, RuleBook, follow
from autopart.passes.rules.arguments import argument
from autopart.passes.sizes import Extent, extent
from autopart.runtime.placement import PARTIAL, Placement, shard

aten = torch.ops.aten

_BATCH_STATISTICS = {"aten.batch_norm.default"}
_FACTORIES = (
    *("empty", "zeros", "ones", "full", "rand", "new_", "scalar_tensor", "bernoulli"),
    *("expand", "reshape", "repeat."),
)
# Ops that take only the shape of their operand: one row is like another.
_SAME_EVERYWHERE = {aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default}
# Ops that keep a count per group of rows one.
_KEEP_GROUPS = {aten.cumsum.default, aten.to.dtype, aten.clone.default}
# A number is added to a tensor.
_SHIFTS = {aten.add.Tensor, aten.sub.Tensor, aten.rsub.Scalar}


class Combined(NamedTuple):
    """How the shares of an output make the whole. kind: "sum", "cat" or "same".

    dim, blocks: of "cat" the tensor dim, and how many blocks in it each hold all samples.
    """

    kind: str
    dim: int = 0
    blocks: int = 1


@dataclass(slots=True)
class BatchSplit:
    """The graph that computes one share of the samples, and how the shares' outputs make the whole.

    graph: placeholders ``b`` (samples in this share), ``B`` (samples in the whole batch) and totals added.
    combine: of every tensor output, by its name.
    updates: of written buffers how the shares' new values make the whole batch's, see ``ParameterSpec.combine``.
    totals: the graph that computes the totals from the inputs, and their names; None when there are none.
    flaw: why the batch may not be split, naming the op; '' when it may. The graph is then the program's own.
    """

    graph: fx.Graph
    combine: dict[str, Combined]
    totals: fx.Graph | None = None
    total_names: tuple[str, ...] = ()
    flaw: str = ""
    notes: tuple[str, ...] = ()
    updates: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Splitter:
    program: Program
    rules: RuleBook
    graph: fx.Graph = field(default_factory=fx.Graph)
    env: dict[fx.Node, fx.Node] = field(default_factory=dict)
    states: dict[fx.Node, BatchState] = field(default_factory=dict)
    outputs: dict[fx.Node, tuple[BatchState, ...]] = field(default_factory=dict)  # of ops with several
    bound: set[fx.Node] = field(default_factory=set)  # depends on a parameter or on chance
    totals: dict[fx.Node, fx.Node] = field(default_factory=dict)
    numbers: dict[fx.Node, fx.Node] = field(default_factory=dict)  # sizes of the whole batch
    found: dict[object, tuple[Rule | None, tuple[Placement, ...] | None]] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)
    additions: set[fx.Node] = field(default_factory=set)  # to buffers, see batch_written.py
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
        if any(item in self.bound for item in values_read(node)):
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

    def copy(self, node: fx.Node, given: dict[fx.Node, fx.Node] | None = None) -> fx.Node:
        """The node in the new graph, its operands replaced by ``given`` where that has them."""
        env = self.env if given is None else {**self.env, **given}
        numbers = _numbers(node.target)

        def value(argument: Any, key: int | str) -> Any:
            return fx.node.map_arg(
                argument,
                lambda item: self.number(item) if key in numbers and not graphs.is_tensor(item) else env[item],
            )

        # first what the node reads: numbers of the whole batch are made when they are needed
        args = tuple(value(item, index) for index, item in enumerate(node.args))
        kwargs = {name: value(item, name) for name, item in node.kwargs.items()}
        new = self.graph.node_copy(node, lambda argument: env[argument])
        new.args, new.kwargs = args, kwargs
        if any(item in self.bound for item in values_read(new)) or _is_random(node):
            self.bound.add(new)
        return new

    def number(self, size: fx.Node) -> fx.Node:
        """A number made of the batch size, for the whole batch."""
        if size not in self.numbers:
            if size.op == "placeholder":
                assert self.whole_batch is not None
                self.numbers[size] = self.whole_batch
            else:
                tensors = {item: self.env[item] for item in size.all_input_nodes if graphs.is_tensor(item)}
                self.numbers[size] = self.graph.node_copy(size, lambda item: tensors.get(item) or self.number(item))
        return self.numbers[size]

    # -- one op ---------------------------------------------------------------------------------------------------

    def op(self, node: fx.Node) -> fx.Node:
        if graphs.is_getitem(node):
            new = self.copy(node)
            value = graphs.value_of(new)
            self.states[new] = self.outputs[value.node][value.index]
            return new
        if not graphs.is_op(node):
            # sizes that are no multiple of the batch size, and numbers read off a tensor
            if any(graphs.is_tensor(item) and not self.state(item).whole for item in node.all_input_nodes):
                raise Mixes("makes a number that depends on the samples")
            return self.copy(node)
        for special in (accumulated, counter, reduced_loss, mean, routed):
            found = special(self, node)
            if found is not None:
                return found
        return self.generic(node)

    def state(self, node: fx.Node) -> BatchState:
        return self.states[self.env[node]]

    def put(self, new: fx.Node, *states: BatchState) -> fx.Node:
        if isinstance(new.meta.get("val"), torch.Tensor):
            self.states[new] = states[0]
            if states[0].placement.is_shard:
                new.meta["samples"] = states[0].placement  # where the batch lies in the value
        else:
            self.outputs[new] = states
        return new

    def generic(self, node: fx.Node) -> fx.Node:
        """An op's rule decides; sums are completed or shares scaled where that makes it sound."""
        return self.by_rule(node, {})

    def by_rule(self, node: fx.Node, given: dict[fx.Node, fx.Node]) -> fx.Node:
        sources = graphs.input_nodes(node)
        states = [self.states[given[item]] if item in given else self.state(item) for item in sources]
        spread = [state for state in states if not state.whole]
        if not spread or str(node.target).startswith("aten.new_"):
            return self.independent(node, given)
        if node.target in _SAME_EVERYWHERE and len(sources) == 1:
            placement = states[0].placement
            return self.put(self.copy(node, given), BatchState(placement) if placement.is_shard else WHOLE)
        orders = {state.order for state in spread if state.placement.is_shard}
        if len(orders) > 1:
            raise Mixes("combines rows that stand in different orders")
        order = next(iter(orders), None)
        points = next((state for state in spread if state.points), None)
        if points is not None and not (len(sources) == 1 and keeps_row_numbers(node)):
            raise Mixes("computes with the row numbers of a share")
        if str(node.target) in _BATCH_STATISTICS:
            if graphs.module_path(node) in self.program.synced_norms and argument(node, 5, "training"):
                raise Mixes(
                    "takes statistics of the whole batch, as SyncBatchNorm does (BatchNorm: of each microbatch)"
                )
            self.notes["batch norm's statistics are those of each microbatch on each replica"] = None
            if states[0].placement != shard(0) or not all(state.whole for state in states[1:]):
                raise Mixes("combines different samples")
            return self.put(self.copy(node, given), BatchState(shard(0)))
        rule, found = self.followed(node, [state.placement for state in states])
        if found is None:
            if any(state.placement == PARTIAL for state in states):
                return self.after_sums(node, rule, sources, states, given)
            raise Mixes(self.why_refused(node, rule))
        grouped = next((state.grouped for state in spread if state.grouped is not None), None)
        results = []
        for placement in found:
            if placement == PARTIAL:
                results.append(BatchState(PARTIAL, grouped=grouped if node.target in _KEEP_GROUPS else None))
            elif points is None:
                results.append(BatchState(placement, order))
            else:
                counts = points.counter and node.target is not aten.slice.Tensor
                results.append(BatchState(placement, order, points.points, points.rows, counts))
        return self.put(self.copy(node, given), *results)

    def why_refused(self, node: fx.Node, rule: Rule | None) -> str:
        if any(free_unbacked_symbols(size) for value in graphs.outputs(node) for size in value.fake.shape):
            return "makes as many elements as the values say, of any samples; use torch.where, or weigh by the mask"
        if rule:
            return "combines different samples"
        return "may combine different samples: it has no rule (`autopart rules --help` says how to give it one)"

    def followed(self, node: fx.Node, placements: list[Placement]) -> tuple[Rule | None, tuple[Placement, ...] | None]:
        """An op's rule, and the placements that follow; found once for ops of copied layers, which share values."""
        plain = fx.node.map_aggregate(
            (node.args, node.kwargs),
            lambda item: (id(item.meta.get("val")), _differentiable(item)) if isinstance(item, fx.Node) else item,
        )
        key = node.target, str(plain), id(node.meta["val"]), _differentiable(node), *placements
        if key not in self.found:
            rule = self.rules.rule(node)
            self.found[key] = rule, None if rule is None else follow(rule, node, placements)
        return self.found[key]

    def after_sums(
        self,
        node: fx.Node,
        rule: Rule | None,
        sources: list[fx.Node],
        states: list[BatchState],
        given: dict[fx.Node, fx.Node],
    ) -> fx.Node:
        """An op that is not linear in a sum over samples, or adds to it what does not depend on them."""
        summed = [position for position, state in enumerate(states) if state.placement == PARTIAL]
        dtype = node.meta["val"].dtype if isinstance(node.meta["val"], torch.Tensor) else torch.int64
        exact = dtype.is_floating_point or dtype.is_complex  # a share of a whole number is none
        if all(state.whole or state.placement == PARTIAL for state in states):
            for group in () if rule is None else rule.linear:
                if set(summed) <= set(group) and len(group) > 1 and len(states) == len(group):
                    if not exact:
                        break
                    scaled = {
                        source: self.scaled(given.get(source, self.env[source]), dtype)
                        for source, state in zip(sources, states, strict=True)
                        if state.whole
                    }
                    return self.put(self.copy(node, {**given, **scaled}), SUMMED)
            if (
                exact
                and node.target in _SHIFTS
                and len(node.args) == 2
                and not node.kwargs
                and node.args[0] is sources[0]
            ):
                constant = self.number(node.args[1]) if isinstance(node.args[1], fx.Node) else node.args[1]
                shift = self.call(operator.mul, constant, self.part())
                assert isinstance(node.target, torch._ops.OpOverload)
                return self.put(self.call(node.target, given.get(sources[0], self.env[sources[0]]), shift), SUMMED)
        # A sum of losses over one of labels that count: linear in the first, which stays a sum; the other is completed.
        outside = [[item for item in summed if item not in group] for group in (() if rule is None else rule.linear)]
        parted = [rest for rest in outside if 0 < len(rest) < len(summed)]
        # of a product whichever can be: one of parameters stays a sum
        known = (rest for rest in parted if all(self.env[sources[item]] not in self.bound for item in rest))
        summed = next(known, parted[0] if parted else summed)
        completed = {sources[position]: self.completed(self.env[sources[position]]) for position in summed}
        return self.by_rule(node, {**given, **completed})

    def part(self) -> fx.Node:
        """The share ``b / B`` of the samples."""
        if self.share is None:
            self.share = self.call(operator.truediv, graphs.batch_size(self.graph), self.whole_batch)
        return self.share

    def scaled(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        """The share ``b / B`` of a value that every share has. dtype: of the result, for whole numbers."""
        if not (node.meta["val"].is_floating_point() or node.meta["val"].is_complex()):
            node = self.put(self.call(aten.to.dtype, node, dtype), WHOLE)
        return self.put(self.call(aten.mul.Tensor, node, self.part()), SUMMED)

    def completed(self, node: fx.Node) -> fx.Node:
        """A sum over the whole batch, computed before the step from the inputs alone."""
        if node in self.bound:
            raise Mixes("uses a sum over samples that depends on the parameters")
        if node.meta["val"].dim() and any(extent(size) is None for size in node.meta["val"].shape):
            raise Mixes("uses a sum over samples of unknown size")
        if node.meta.get("differentiable"):
            raise Mixes("uses a sum over samples of an input that requires a gradient")
        if node not in self.totals:
            assert self.last_placeholder is not None
            taken = {spec.name for spec in self.program.inputs}
            names = (name for name in map("total_{}".format, itertools.count()) if name not in taken)
            name = next(itertools.islice(names, len(self.totals), None))
            with self.graph.inserting_after(self.last_placeholder):
                total = self.graph.placeholder(name)
            total.meta.update(
                val=node.meta["val"],
                role=Role.TOTAL,
                name=name,
                path="",
                source="",
                differentiable=False,
            )
            self.states[total] = WHOLE
            self.last_placeholder = total
            self.totals[node] = total
        return self.totals[node]

    def independent(self, node: fx.Node, given: dict[fx.Node, fx.Node]) -> fx.Node:
        """No value that is read depends on the samples; sizes may."""
        new = self.copy(node, given)
        results = []
        for value in graphs.outputs(node):
            sizes = [extent(size) for size in value.fake.shape]
            batched = [dim for dim, size in enumerate(sizes) if size is None or size.batched]
            if not batched:
                results.append(WHOLE)
            elif (
                len(batched) == 1
                and any(part in str(node.target) for part in _FACTORIES)
                and "randperm" not in str(node.target)
            ):
                results.append(BatchState(shard(batched[0])))
            else:
                raise Mixes("makes a value whose size depends on the batch")
        return self.put(new, *results)

    def mapped(self, argument: Any) -> Any:
        return fx.node.map_arg(argument, lambda node: self.env[node])

    # -- the end --------------------------------------------------------------------------------------------------

    def finish(self, node: fx.Node) -> BatchSplit:
        results = self.mapped(graphs.results(node.graph))
        tensors = [info for info in self.program.outputs if info.node is not None]
        combine: dict[str, Combined] = {}
        for info, result in zip(tensors, results, strict=False):
            state = self.states[result]
            if state.onto is not None:
                raise Mixes(f"returns {info.name!r}, which is what samples add to a buffer and what that was before")
            if state.points or state.order is not None:
                raise Mixes(f"returns {info.name!r}, whose rows stand in another order")
            kind = "cat" if state.placement.is_shard else "sum" if state.placement == PARTIAL else "same"
            combine[info.name] = Combined(kind, state.placement.dim, state.placement.outer)
        updates = {
            name: how_written(name, self.states[result])
            for name, result in zip(self.program.updated_buffers, results[len(tensors) :], strict=True)
        }
        self.graph.output(results)
        totals = totals_graph(self.graph, list(self.totals)) if self.totals else None
        for node, state in self.states.items():
            node.meta["batch"] = state.placement
        for node, states in self.outputs.items():
            node.meta["batch"] = tuple(state.placement for state in states)
        graphs.prune(self.graph)
        loss = self.program.loss
        mark_differentiable(
            self.graph,
            [node for info, node in zip(tensors, results, strict=False) if loss in (None, info.name)],
        )
        self.graph.lint()
        names = tuple(new.meta["name"] for new in self.totals.values())
        return BatchSplit(self.graph, combine, totals, names, "", tuple(self.notes), updates)


def split_batch(program: Program, rules: RuleBook) -> BatchSplit:
    """Proves that the program's batch may be split and rewrites its graph for one share, or says which op mixes."""
    whole = {info.name: Combined("same") for info in program.outputs if info.node is not None}
    if program.static_batch:
        return BatchSplit(program.graph, whole, flaw=f"the batch size is fixed: {program.static_batch}")
    splitter = Splitter(program, rules, additions=additions_to_buffers(program))
    try:
        return splitter.run()
    except Mixes as reason:
        node = splitter.current
        assert node is not None
        where = graphs.module_path(node) or "the model"
        line = f" ({graphs.source_line(node)})" if graphs.source_line(node) else ""
        operation = "the output" if node.op == "output" else str(node.target)
        return BatchSplit(program.graph, whole, flaw=f"{operation} in {where}{line} {reason}")


def _is_random(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return bool(torch.Tag.nondeterministic_seeded in target.tags)


def _differentiable(node: fx.Node) -> bool:
    """What is known of a value's gradient, seen through ``getitem``."""
    return bool(graphs.value_of(node).node.meta.get("differentiable", True))


@functools.cache
def _numbers(target: object) -> frozenset[int | str]:
    """The arguments, by position and name, that are numbers to compute with; other integers are sizes and dims."""
    if not isinstance(target, torch._ops.OpOverload) or str(target).startswith("aten.arange"):
        return frozenset()
    found: set[int | str] = set()
    for index, declared in enumerate(target._schema.arguments):
        if str(declared.type).removeprefix("Optional[").rstrip("]") in ("number", "float", "Tensor"):
            found |= {index, declared.name}
    return frozenset(found)
