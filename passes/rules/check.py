"""Checks a rule by running it: split, run the pieces, combine, compare with the whole, forward and backward.

Every strategy of an op is played through in one process on random float64 data. What a placement promises is set up on
the way in and demanded on the way out, for values and for gradients:

========  ================================  ===================================  =================================
letter    a value going in, per rank        an output's gradient, per rank       combining what comes out
========  ================================  ===================================  =================================
``R``     the whole                         the whole                            equal on all ranks
``S``     its shard                         its shard                            joined
``P``     random summands                   the whole (it is replicated)         values summed, gradients equal
``B``     the whole                         random summands                      values equal, gradients summed
========  ================================  ===================================  =================================
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier, BrokenBarrierError
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from autopart.passes import graph as graphs
from autopart.passes.graph import may_have_gradient
from autopart.passes.rules.applied import Strategy, called, compatible
from autopart.passes.rules.book import RuleBook
from autopart.passes.rules.joint import joint_strategies
from autopart.passes.rules.matching import Sharding, is_differentiable
from autopart.passes.rules.notation import Rule
from autopart.passes.rules.strategies import divides, op_strategies
from autopart.passes.rules.table import RULES
from autopart.passes.sizes import ONE, Extent, extent
from autopart.runtime.mesh import Axis, Pending, joined
from autopart.runtime.placement import Kind, Placements, take_share

T = TypeVar("T")
_TOLERANCE = 1e-8
_PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What came of one strategy, or of the strategies of several axes together.

    message: '' if it holds; else the first value or gradient that differs, and by how much.
    shapes_only: the op draws random numbers, so that only shapes could be compared.
    """

    strategies: tuple[Strategy, ...]
    message: str = ""
    shapes_only: bool = False

    @property
    def name(self) -> str:
        return ",".join(strategy.name for strategy in self.strategies)

    @property
    def inputs(self) -> list[str]:
        """Placements of the operands, axes joined with commas."""
        return [",".join(map(str, side)) for side in zip(*(item.inputs for item in self.strategies), strict=True)]

    @property
    def outputs(self) -> list[str]:
        return [",".join(map(str, side)) for side in zip(*(item.outputs for item in self.strategies), strict=True)]

    @property
    def ok(self) -> bool:
        return not self.message


def shardings_to_check(rule: Rule, parts: int, batch: bool = False) -> list[Sharding]:
    """Every factor that may be sharded, in one block, and in the smallest number of blocks that divides."""
    found: list[Sharding] = []
    for factor in rule.factors:
        size = rule.sizes[factor]
        assert size is not None
        # A factor of 16 samples' positions, 16b, is sharded over samples in one block, or over positions in b blocks.
        blocks = [ONE, Extent(1, batched=True)] if size.batched else [ONE]
        blocks += [Extent(outer) for outer in range(2, size.coefficient + 1) if size.coefficient % outer == 0][:2]
        found.extend((factor, outer) for outer in blocks if divides(rule, (factor, outer), parts, batch))
    return found


def random_operand(fake: Tensor, batch: int) -> Tensor:
    """Data of a fake tensor's shape for a batch of that size: floats in (0.1, 0.9), integers 0 and 1, booleans."""
    shape = []
    for size in fake.shape:
        found = extent(size)
        assert found is not None, f"a size of {size} is no multiple of the batch size"
        shape.append(found.at(batch))
    if may_have_gradient(fake.dtype):
        return torch.rand(shape, dtype=torch.complex128 if fake.dtype.is_complex else torch.float64) * 0.8 + 0.1
    return torch.randint(0, 2, shape).to(fake.dtype)


def _summands(tensor: Tensor, parts: int) -> list[Tensor]:
    if not may_have_gradient(tensor.dtype):
        others = [torch.randint(0, 3, tensor.shape).to(tensor.dtype) for _ in range(parts - 1)]
    else:
        others = [torch.randn_like(tensor) for _ in range(parts - 1)]
    total = torch.stack(others).sum(0).to(tensor.dtype) if others else torch.zeros_like(tensor)
    return [tensor - total, *others]


def _spread(
    tensor: Tensor, placements: Placements, sizes: Sequence[int], batch: int, summands: Kind
) -> dict[tuple[int, ...], Tensor]:
    """Every rank's tensor by its place on the axes; ``summands`` says which kind of placement holds parts of a sum."""
    spread: dict[tuple[int, ...], Tensor] = {(): tensor}
    for placement, parts in zip(placements, sizes, strict=True):
        spread = {
            (*place, index): piece
            for place, held in spread.items()
            for index, piece in enumerate(_summands(held, parts) if placement.kind is summands else [held] * parts)
        }
    return {place: take_share(held, placements, sizes, place, batch) for place, held in spread.items()}


def _collect(
    found: Mapping[tuple[int, ...], Tensor],
    placements: Placements,
    whole: Tensor,
    sizes: Sequence[int],
    batch: int,
    summands: Kind,
) -> str:
    """'' if the ranks' tensors are what the placements promise of the whole, else what differs."""
    summed = [axis for axis, placement in enumerate(placements) if placement.kind is summands]
    for place, held in found.items():
        total = held
        if summed:
            group = (range(sizes[axis]) if axis in summed else [index] for axis, index in enumerate(place))
            total = torch.stack([found[other] for other in itertools.product(*group)]).sum(0).to(whole.dtype)
        if message := _difference(total, take_share(whole, placements, sizes, place, batch)):
            return f"{message} on rank {', '.join(map(str, place))}"
    return ""


def _difference(found: Tensor, expected: Tensor) -> str:
    if found.shape != expected.shape:
        return f"shape {list(found.shape)} instead of {list(expected.shape)}"
    if found.dtype != expected.dtype:
        return f"{found.dtype} instead of {expected.dtype}"
    if may_have_gradient(found.dtype):
        if torch.allclose(found, expected, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True):
            return ""
        return f"largest difference {(found - expected).abs().max().item():.3g}"
    return "" if torch.equal(found, expected) else "values differ"


class _Done:
    def wait(self) -> None:
        pass


@dataclass(frozen=True)
class RehearsedAxis(Axis):
    """An axis whose ranks are threads of this process. ``board`` has a place for each rank's tensor."""

    board: list[Tensor | None] = field(default_factory=list, repr=False, compare=False)
    barrier: Barrier = field(default_factory=lambda: Barrier(1), repr=False, compare=False)

    def all_reduce(self, x: Tensor, maximum: bool = False) -> None:
        stacked = self.all_gather(x)
        x.copy_(stacked.amax(0) if maximum else stacked.sum(0))

    def broadcast(self, x: Tensor, source: int) -> Pending:
        x.copy_(self.all_gather(x)[source])
        return _Done()

    def reduce(self, x: Tensor, target: int) -> Pending:
        stacked = self.all_gather(x)
        if self.index == target:
            x.copy_(stacked.sum(0))
        return _Done()

    def all_gather(self, x: Tensor) -> Tensor:
        self.board[self.index] = x.clone()
        self.barrier.wait(_PATIENCE_S)
        stacked = torch.stack([tensor for tensor in self.board if tensor is not None])
        self.barrier.wait(_PATIENCE_S)
        return stacked


def rehearse(sizes: Sequence[int], run: Callable[[tuple[Axis, ...]], T]) -> dict[tuple[int, ...], T]:
    """``run`` on every rank of a mesh, in threads. Raises what the first rank to fail raises."""
    places = list(itertools.product(*map(range, sizes)))
    boards: dict[tuple[int, ...], tuple[list[Tensor | None], Barrier]] = {}

    def axes(place: tuple[int, ...]) -> tuple[Axis, ...]:
        found: list[Axis] = []
        for axis, (parts, index) in enumerate(zip(sizes, place, strict=True)):
            group = (axis, *place[:axis], *place[axis + 1 :])
            board, barrier = boards.setdefault(group, ([None] * parts, Barrier(parts)))
            found.append(RehearsedAxis(f"axis {axis}", parts, index, board=board, barrier=barrier))
        return tuple(found)

    def rank(own: tuple[Axis, ...]) -> T:
        try:
            return run(own)
        except BaseException:
            for _, barrier in boards.values():
                barrier.abort()
            raise

    meshes = [axes(place) for place in places]
    with ThreadPoolExecutor(len(places)) as pool:
        futures = [pool.submit(rank, own) for own in meshes]
    failures = [error for future in futures if (error := future.exception()) is not None]
    if failures:
        raise next((error for error in failures if not isinstance(error, BrokenBarrierError)), failures[0])
    return {place: future.result() for place, future in zip(places, futures, strict=True)}


def _run(
    target: Any, arguments: tuple[tuple[Any, ...], dict[str, Any]], tensors: Sequence[Tensor], batch: int
) -> list[Tensor]:
    """Calls the op with these tensors in place of its operands, and sizes at that batch."""
    remaining = list(tensors)

    def substitute(argument: fx.Node) -> Any:
        value = argument.meta["val"]
        if isinstance(value, Tensor):
            return remaining.pop(0)
        size = extent(value)
        assert size is not None
        return size.at(batch)

    args = fx.map_arg(arguments[0], substitute)
    kwargs = fx.map_arg(arguments[1], substitute)
    # Data is float64 whatever the model's dtype, so casts to other floating-point types must not round.
    args, kwargs = _in_float64((args, kwargs))
    result = target(*args, **kwargs)
    return [result] if isinstance(result, Tensor) else [item for item in result if isinstance(item, Tensor)]


def _in_float64(arguments: Any) -> Any:
    if isinstance(arguments, torch.dtype):
        return torch.float64 if arguments.is_floating_point else arguments
    if isinstance(arguments, tuple | list):
        return type(arguments)(_in_float64(item) for item in arguments)
    if isinstance(arguments, dict):
        return {name: _in_float64(item) for name, item in arguments.items()}
    return arguments


def _gradients(outputs: Sequence[Tensor], seeds: Sequence[Tensor], sources: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of all sources; zeros where nothing flows back."""
    pairs = [(out, seed) for out, seed in zip(outputs, seeds, strict=True) if out.requires_grad]
    if not pairs or not sources:
        return [torch.zeros_like(source) for source in sources]
    found = torch.autograd.grad(
        [out for out, _ in pairs], list(sources), [seed for _, seed in pairs], allow_unused=True
    )
    return [torch.zeros_like(s) if g is None else g for g, s in zip(found, sources, strict=True)]


def _check_strategies(
    node: fx.Node,
    chosen: tuple[Strategy, ...],
    sizes: tuple[int, ...],
    rules: RuleBook,
    tensors: Sequence[Tensor],
    batch: int,
    split: bool,
) -> CheckResult:
    rule = rules.rule(node)
    random = rule is not None and rule.random
    tracked = [index for index, value in enumerate(graphs.inputs(node)) if is_differentiable(value)]
    whole_inputs = _leaves(tensors, tracked)
    whole = _run(node.target, (tuple(node.args), dict(node.kwargs)), whole_inputs, batch)
    seeds = [torch.randn_like(out) if may_have_gradient(out.dtype) else out for out in whole]
    whole_gradients = _gradients(whole, seeds, [whole_inputs[index] for index in tracked])

    local_batch = batch // math.prod(sizes) if split else batch
    wanted = list(zip(*(strategy.inputs for strategy in chosen), strict=True))
    given = list(zip(*(strategy.outputs for strategy in chosen), strict=True))
    spread = [_spread(t, p, sizes, batch, Kind.PARTIAL) for t, p in zip(tensors, wanted, strict=True)]
    spread_seeds = [_spread(t, p, sizes, batch, Kind.BROADCAST) for t, p in zip(seeds, given, strict=True)]

    def one(axes: tuple[Axis, ...]) -> tuple[list[Tensor], list[Tensor], list[Tensor], str]:
        place = tuple(axis.index for axis in axes)
        target, args, kwargs = called(node, list(zip(chosen, sizes, strict=True)), axes, rules)
        for name, value in kwargs.items():
            if isinstance(value, tuple) and value and isinstance(value[0], Axis):
                kwargs[name] = joined(*value)
        inputs = _leaves([shares[place] for shares in spread], tracked)
        outputs = _run(target, (args, kwargs), inputs, local_batch)
        own_seeds = [shares[place] for shares in spread_seeds]
        for index, (out, seed) in enumerate(zip(outputs, own_seeds, strict=True)):
            if out.shape != seed.shape:
                where = ", ".join(map(str, place))
                message = f"output {index} of rank {where} has shape {list(out.shape)}, not {list(seed.shape)}"
                return inputs, outputs, [], message
        return inputs, outputs, _gradients(outputs, own_seeds, [inputs[index] for index in tracked]), ""

    if any(strategy.form is not None for strategy in chosen):
        ran = rehearse(sizes, one)
    else:
        places = itertools.product(*map(range, sizes))
        ran = {p: one(tuple(Axis("axis", n, i) for n, i in zip(sizes, p, strict=True))) for p in places}
    for *_, message in ran.values():
        if message:
            return CheckResult(chosen, message, random)
    if random:
        return CheckResult(chosen, shapes_only=True)

    def differs(found: Mapping[tuple[int, ...], Tensor], placements: Placements, whole: Tensor, summands: Kind) -> str:
        # A shard of outputs or gradients counts its blocks in samples of the whole batch.
        return _collect(found, placements, whole.detach(), sizes, batch, summands)

    for index, (expected, placements) in enumerate(zip(whole, given, strict=True)):
        found = {place: outputs[index].detach() for place, (_, outputs, _, _) in ran.items()}
        if message := differs(found, placements, expected, Kind.PARTIAL):
            return CheckResult(chosen, f"output {index} ({_text(placements)}): {message}")
    for index, (before, after) in enumerate(zip(tensors, whole_inputs, strict=True)):
        if not torch.equal(before, after):  # running statistics are updated in place
            found = {place: operands[index].detach() for place, (operands, _, _, _) in ran.items()}
            if message := differs(found, wanted[index], after, Kind.PARTIAL):
                return CheckResult(chosen, f"operand {index} after the op ({_text(wanted[index])}): {message}")
    for position, index in enumerate(tracked):
        found = {place: gradients[position] for place, (_, _, gradients, _) in ran.items()}
        if message := differs(found, wanted[index], whole_gradients[position], Kind.BROADCAST):
            return CheckResult(chosen, f"gradient of operand {index} ({_text(wanted[index])}): {message}")
    return CheckResult(chosen)


def _text(placements: Placements) -> str:
    return ",".join(map(str, placements))


def _leaves(tensors: Sequence[Tensor], tracked: Sequence[int]) -> list[Tensor]:
    """Copies to be written into and differentiated without touching the originals."""
    copies = [tensor.detach().clone() for tensor in tensors]
    for index in tracked:
        copies[index].requires_grad_()
    return copies


def check(
    node: fx.Node,
    parts: int = 2,
    rules: RuleBook = RULES,
    operands: Sequence[Tensor] | None = None,
    batch: int | None = None,
    batched: bool = False,
    make: Callable[[Tensor, int], Tensor] = random_operand,
) -> list[CheckResult]:
    """Checks every strategy of an op: R, B, each P, and each factor in one block and in some; and those in which two
    axes of ``parts`` ranks act together, or shard one factor by a local form, in both orders.

    operands: data to run on, aligned with ``passes.graph.inputs``; by default ``make(fake, batch)`` of each.
    batch: the size of the whole batch, ``2 * parts`` by default. batched: check the factors that hold the batch size.
    """
    batch = 2 * parts if batch is None else batch
    rule = rules.rule(node)
    shardings = shardings_to_check(rule, parts, batched) if rule is not None else []
    tensors = list(operands or [make(value.fake, batch) for value in graphs.inputs(node)])
    tensors = [tensor.to(torch.float64) if tensor.dtype.is_floating_point else tensor for tensor in tensors]
    results = []
    offered = op_strategies(node, parts, shardings, rules)
    for strategy in offered:
        split = batched and any(p.is_shard for p in (*strategy.inputs, *strategy.outputs))
        results.append(_check_strategies(node, (strategy,), (parts,), rules, tensors, batch, split))
    square = (parts, parts)
    together = list(() if batched else joint_strategies(node, [offered] * 2, [offered] * 2, square, rules))
    if rule is not None and not batched:
        together += _by_one_form(node, rule, parts, rules)
    return results + [_check_strategies(node, chosen, square, rules, tensors, batch, False) for chosen in together]


def _by_one_form(node: fx.Node, rule: Rule, parts: int, rules: RuleBook) -> list[tuple[Strategy, ...]]:
    """Pairs of strategies in which two axes of ``parts`` ranks shard one factor by its local form."""
    pairs: list[tuple[Strategy, ...]] = []
    for factor, form in rule.forms.items():
        if not form.several or rule.size(factor).coefficient % parts**2:
            continue
        for order in ((ONE, Extent(parts)), (Extent(parts), ONE)):
            ways = [op_strategies(node, parts, [(factor, outer)], rules) for outer in order]
            pairs += itertools.product(*([item for item in way if item.form is not None] for way in ways))
    return [pair for pair in pairs if compatible(node, pair, (parts, parts), rules, rule)]
