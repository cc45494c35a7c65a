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

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier, BrokenBarrierError
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from autopart.passes import graph as graphs
from autopart.passes.rules.book import RuleBook
from autopart.passes.rules.matching import Sharding, is_differentiable
from autopart.passes.rules.notation import Rule
from autopart.passes.rules.strategies import Strategy, called, divides, op_strategies
from autopart.passes.rules.table import RULES
from autopart.passes.sizes import ONE, Extent, extent
from autopart.runtime.mesh import Axis
from autopart.runtime.placement import Kind, Placement, join_shards, take_shard

T = TypeVar("T")
_TOLERANCE = 1e-8
_PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What came of one strategy.

    message: '' if it holds; else the first value or gradient that differs, and by how much.
    shapes_only: the op draws random numbers, so that only shapes could be compared.
    """

    strategy: Strategy
    message: str = ""
    shapes_only: bool = False

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
    if fake.dtype.is_floating_point:
        return torch.rand(shape, dtype=torch.float64) * 0.8 + 0.1
    return torch.randint(0, 2, shape).to(fake.dtype)


def _summands(tensor: Tensor, parts: int) -> list[Tensor]:
    if not tensor.dtype.is_floating_point:
        others = [torch.randint(0, 3, tensor.shape).to(tensor.dtype) for _ in range(parts - 1)]
    else:
        others = [torch.randn_like(tensor) for _ in range(parts - 1)]
    total = torch.stack(others).sum(0).to(tensor.dtype) if others else torch.zeros_like(tensor)
    return [tensor - total, *others]


def _spread(tensor: Tensor, placement: Placement, parts: int, batch: int, summands: Kind) -> list[Tensor]:
    """Every rank's tensor; ``summands`` says which kind of placement holds parts of a sum."""
    if placement.kind is summands:
        return _summands(tensor, parts)
    return [take_shard(tensor, placement, rank, parts, batch) for rank in range(parts)]


def _collect(shares: Sequence[Tensor], placement: Placement, whole: Tensor, batch: int, summands: Kind) -> str:
    """'' if the ranks' tensors combine to the whole, else what differs."""
    if placement.is_shard:
        joined = join_shards(shares, placement, batch)
    elif placement.kind is summands:
        joined = torch.stack(tuple(shares)).sum(0).to(whole.dtype)
    else:
        joined = shares[0]
        for rank, share in enumerate(shares):
            if message := _difference(share, joined):
                return f"rank {rank} differs from rank 0: {message}"
    return _difference(joined, whole)


def _difference(found: Tensor, expected: Tensor) -> str:
    if found.shape != expected.shape:
        return f"shape {list(found.shape)} instead of {list(expected.shape)}"
    if found.dtype != expected.dtype:
        return f"{found.dtype} instead of {expected.dtype}"
    if found.dtype.is_floating_point:
        if torch.allclose(found, expected, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True):
            return ""
        return f"largest difference {(found - expected).abs().max().item():.3g}"
    return "" if torch.equal(found, expected) else "values differ"


@dataclass(frozen=True)
class RehearsedAxis(Axis):
    """An axis whose ranks are threads of this process. ``board`` has a place for each rank's tensor."""

    board: list[Tensor | None] = field(default_factory=list, repr=False, compare=False)
    barrier: Barrier = field(default_factory=lambda: Barrier(1), repr=False, compare=False)

    def all_reduce(self, x: Tensor, maximum: bool = False) -> None:
        stacked = self.all_gather(x)
        x.copy_(stacked.amax(0) if maximum else stacked.sum(0))

    def all_gather(self, x: Tensor) -> Tensor:
        self.board[self.index] = x.clone()
        self.barrier.wait(_PATIENCE_S)
        stacked = torch.stack([tensor for tensor in self.board if tensor is not None])
        self.barrier.wait(_PATIENCE_S)
        return stacked


def rehearse(parts: int, run: Callable[[Axis], T]) -> list[T]:
    """``run`` on every rank of an axis, in threads. Raises what the first rank to fail raises."""
    board: list[Tensor | None] = [None] * parts
    barrier = Barrier(parts)

    def rank(index: int) -> T:
        try:
            return run(RehearsedAxis("axis", parts, index, board=board, barrier=barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(parts) as pool:
        futures = [pool.submit(rank, index) for index in range(parts)]
    failures = [error for future in futures if (error := future.exception()) is not None]
    if failures:
        raise next((error for error in failures if not isinstance(error, BrokenBarrierError)), failures[0])
    return [future.result() for future in futures]


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


def _check_strategy(
    node: fx.Node, strategy: Strategy, parts: int, rules: RuleBook, tensors: Sequence[Tensor], batch: int, split: bool
) -> CheckResult:
    rule = rules.rule(node)
    random = rule is not None and rule.random
    tracked = [index for index, value in enumerate(graphs.inputs(node)) if is_differentiable(value)]
    whole_inputs = _leaves(tensors, tracked)
    whole = _run(node.target, (tuple(node.args), dict(node.kwargs)), whole_inputs, batch)
    seeds = [torch.randn_like(out) if out.dtype.is_floating_point else out for out in whole]
    whole_gradients = _gradients(whole, seeds, [whole_inputs[index] for index in tracked])

    local_batch = batch // parts if split else batch
    spread = [_spread(t, p, parts, batch, Kind.PARTIAL) for t, p in zip(tensors, strategy.inputs, strict=True)]
    spread_seeds = [_spread(t, p, parts, batch, Kind.BROADCAST) for t, p in zip(seeds, strategy.outputs, strict=True)]

    def one(axis: Axis) -> tuple[list[Tensor], list[Tensor], list[Tensor], str]:
        target, args, kwargs = called(node, [(strategy, parts)], [axis], rules)
        inputs = _leaves([shares[axis.index] for shares in spread], tracked)
        outputs = _run(target, (args, kwargs), inputs, local_batch)
        own_seeds = [shares[axis.index] for shares in spread_seeds]
        for index, (out, seed) in enumerate(zip(outputs, own_seeds, strict=True)):
            if out.shape != seed.shape:
                message = f"output {index} of rank {axis.index} has shape {list(out.shape)}, not {list(seed.shape)}"
                return inputs, outputs, [], message
        return inputs, outputs, _gradients(outputs, own_seeds, [inputs[index] for index in tracked]), ""

    ran = rehearse(parts, one) if strategy.form is not None else [one(Axis("axis", parts, i)) for i in range(parts)]
    for *_, message in ran:
        if message:
            return CheckResult(strategy, message, random)
    written = [[operand.detach() for operand in inputs] for inputs, *_ in ran]
    results = [[out.detach() for out in outputs] for _, outputs, *_ in ran]
    gradients = [found for *_, found, _ in ran]
    if random:
        return CheckResult(strategy, shapes_only=True)
    # A shard of outputs or gradients counts its blocks in samples of the whole batch, which is what is joined.
    for index, (expected, placement) in enumerate(zip(whole, strategy.outputs, strict=True)):
        shares = [outputs[index] for outputs in results]
        if message := _collect(shares, placement, expected.detach(), batch, Kind.PARTIAL):
            return CheckResult(strategy, f"output {index} ({placement}): {message}")
    for index, (before, after) in enumerate(zip(tensors, whole_inputs, strict=True)):
        if not torch.equal(before, after):  # running statistics are updated in place
            shares = [operands[index] for operands in written]
            placement = strategy.inputs[index]
            if message := _collect(shares, placement, after.detach(), batch, Kind.PARTIAL):
                return CheckResult(strategy, f"operand {index} after the op ({placement}): {message}")
    for position, index in enumerate(tracked):
        shares = [found[position] for found in gradients]
        placement = strategy.inputs[index]
        if message := _collect(shares, placement, whole_gradients[position], batch, Kind.BROADCAST):
            return CheckResult(strategy, f"gradient of operand {index} ({placement}): {message}")
    return CheckResult(strategy)


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
    """Checks every strategy of an op: R, B, each P, and each factor in one block and in some.

    operands: data to run on, aligned with ``passes.graph.inputs``; by default ``make(fake, batch)`` of each.
    batch: the size of the whole batch, ``2 * parts`` by default. batched: check the factors that hold the batch size.
    """
    batch = 2 * parts if batch is None else batch
    rule = rules.rule(node)
    shardings = shardings_to_check(rule, parts, batched) if rule is not None else []
    tensors = list(operands or [make(value.fake, batch) for value in graphs.inputs(node)])
    tensors = [tensor.to(torch.float64) if tensor.dtype.is_floating_point else tensor for tensor in tensors]
    results = []
    for strategy in op_strategies(node, parts, shardings, rules):
        split = batched and any(p.is_shard for p in (*strategy.inputs, *strategy.outputs))
        results.append(_check_strategy(node, strategy, parts, rules, tensors, batch, split))
    return results
