"""What an op makes besides its results, keeps, and makes in its backward: found by running it on the meta device.

Formulas of autograd, and ops that torch writes out, make tensors on their way, which are the same on every device but
for the few ops that have kernels of their own there. So an op is called with tensors of its sizes that have no memory,
goes back once, and what is alive meanwhile is counted. What a kernel allocates for itself is not seen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from autopart.passes import graph as graphs
from autopart.passes.graph import RECURRENT, Value
from autopart.passes.live_bytes import LiveBytes
from autopart.passes.storage import concrete, op_name, size_at

_OWN_KERNELS = (
    *("scaled_dot_product_attention", "mish", "dropout", "native_dropout", "_ctc_loss", "ctc_loss"),
    *("layer_norm", "group_norm", "batch_norm"),
)
"""Ops that go another way on the meta device or, of mixed types, make others there; or hang on the numbers."""


@dataclass(frozen=True, slots=True)
class Passing:
    """Bytes of whole tensors, at most. forward: besides results and what is kept. backward: besides the gradients of
    operands and what was there before; below 0 where what the op kept is let go before all gradients are there.
    """

    forward: float
    backward: float


@dataclass(frozen=True, slots=True)
class Keeping:
    """What autograd keeps of an op. operands, results: their places among the op's inputs and outputs. inside: bytes of
    whole tensors besides.
    """

    operands: tuple[int, ...]
    results: tuple[int, ...]
    inside: float


@dataclass(frozen=True, slots=True)
class _Tensor:
    """An operand. number: of the distinct ones. learns: its gradient is wanted."""

    number: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    learns: bool


def passing(
    node: fx.Node, batch: int, wanted: Sequence[Value], coming: Sequence[tuple[Value, bool]] = ()
) -> Passing | None:
    """Of an op for so many samples; None where it does not run on the meta device, or not as on others.

    wanted: the operands whose gradients are made. coming: the results that have gradients, and whether these are seen
    in more dims than they have in memory.
    """
    if str(node.target) in RECURRENT:
        return None
    call = _call_of(node, batch, wanted)
    return None if call is None else _measured(*call, tuple((value.index, seen) for value, seen in coming))


def keeping(node: fx.Node, batch: int, wanted: Sequence[Value]) -> Keeping | None:
    """What autograd keeps of an op for so many samples; None where that is not known. wanted: as in :func:`passing`."""
    call = _call_of(node, batch, wanted)
    return None if call is None else _kept(*call)


def _call_of(node: fx.Node, batch: int, wanted: Sequence[Value]) -> tuple[Any, Hashable, Hashable] | None:
    """The op and its arguments, as a key."""
    if not isinstance(node.target, torch._ops.OpOverload) or op_name(node) in _OWN_KERNELS:
        return None
    if "transition" in node.meta or "forms" in node.meta:
        return None
    numbers: dict[Value, int] = {}
    try:
        args, kwargs = (_frozen(item, numbers, batch, wanted) for item in (list(node.args), dict(node.kwargs)))
        hash((args, kwargs))
    except (_UnknownError, TypeError):
        return None
    return node.target, args, kwargs


class _UnknownError(Exception):
    """A size hangs on more than the number of samples."""


def _frozen(item: Any, numbers: dict[Value, int], batch: int, wanted: Sequence[Value]) -> Hashable:
    """An argument as a part of a key."""
    if isinstance(item, fx.Node):
        if not graphs.is_tensor(item):
            size = size_at(item.meta["val"], batch)
            if size is None:
                raise _UnknownError
            return size
        value = graphs.value_of(item)
        fake = value.fake
        sizes, strides = concrete(fake.shape, batch), concrete(fake.stride(), batch)
        if sizes is None or strides is None:
            raise _UnknownError
        place = numbers.setdefault(value, len(numbers))
        return _Tensor(place, tuple(sizes), tuple(strides), fake.dtype, value in wanted)
    if isinstance(item, dict):
        return "dict", tuple((key, _frozen(own, numbers, batch, wanted)) for key, own in item.items())
    if isinstance(item, list | tuple):
        return "list", tuple(_frozen(own, numbers, batch, wanted) for own in item)
    if isinstance(item, torch.SymInt):
        size = size_at(item, batch)
        if size is None:
            raise _UnknownError
        return size
    return "device" if isinstance(item, torch.device) else item


def _thawed(item: Any, made: dict[int, torch.Tensor]) -> Any:
    if isinstance(item, _Tensor):
        if item.number not in made:
            tensor = torch.empty_strided(item.sizes, item.strides, dtype=item.dtype, device="meta")
            made[item.number] = tensor.requires_grad_(item.learns)
        return made[item.number]
    if isinstance(item, tuple):
        kind, own = item
        if kind == "dict":
            return {key: _thawed(value, made) for key, value in own}
        return [_thawed(value, made) for value in own]
    return torch.device("meta") if item == "device" else item


@functools.lru_cache(maxsize=4096)
def _measured(
    target: Callable[..., Any], args: Hashable, kwargs: Hashable, coming: tuple[tuple[int, bool], ...]
) -> Passing | None:
    made: dict[int, torch.Tensor] = {}
    with torch.inference_mode(False), torch.enable_grad():
        positional, named = _thawed(args, made), _thawed(kwargs, made)
        with LiveBytes(list(made.values())) as alive:
            try:
                outputs = [item for item in tree_leaves(target(*positional, **named)) if isinstance(item, torch.Tensor)]
            except Exception:  # also what a user's own op raises
                return None
            return _gone_back(outputs, list(made.values()), coming, alive)


def _gone_back(
    outputs: list[torch.Tensor],
    operands: Sequence[torch.Tensor],
    coming: Sequence[tuple[int, bool]],
    alive: LiveBytes,
) -> Passing:
    """outputs: of the op, which are taken out of the list."""
    forward = alive.most - alive.now
    leaves = [tensor for tensor in operands if tensor.requires_grad]
    ends = [(outputs[index], expanded) for index, expanded in coming if outputs[index].requires_grad]
    if not leaves or not ends:
        return Passing(forward, 0.0)
    entries = [_Incoming.apply(end, expanded) for end, expanded in ends]
    arriving = sum(0 if expanded else end.nbytes for end, expanded in ends)
    del ends
    outputs.clear()  # the op may be the only one that keeps them
    start, alive.most = alive.now + arriving, 0
    try:
        found = torch.autograd.grad(entries, leaves, list(map(_expanded, entries)), allow_unused=True)
    except Exception:
        return Passing(forward, 0.0)
    known = {tensor.untyped_storage()._cdata for tensor in operands}
    new = [item for item in found if item is not None and item.untyped_storage()._cdata not in known]
    return Passing(forward, alive.most - start - sum(item.nbytes for item in new))


class _Incoming(torch.autograd.Function):
    """Where a gradient comes in that nothing holds but autograd, which lets go of it when the op's backward has."""

    @staticmethod
    def forward(ctx: Any, end: torch.Tensor, expanded: bool) -> torch.Tensor:
        ctx.expanded = expanded
        return _expanded(end)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return (gradient if ctx.expanded else torch.empty_like(gradient, memory_format=torch.contiguous_format)), None


def _expanded(end: torch.Tensor) -> torch.Tensor:
    return end.new_empty([1] * end.dim()).expand(end.shape).detach()


@functools.lru_cache(maxsize=4096)
def _kept(target: Callable[..., Any], args: Hashable, kwargs: Hashable) -> Keeping | None:
    made: dict[int, torch.Tensor] = {}
    packed: dict[int, float] = {}

    def pack(tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        held.append(storage)  # or its address were another's
        packed[storage._cdata] = storage.nbytes()

    held: list[torch.UntypedStorage] = []
    with torch.inference_mode(False), torch.enable_grad(), saved_tensors_hooks(pack, lambda _: torch.empty(0)):
        positional, named = _thawed(args, made), _thawed(kwargs, made)
        given = [item for item in tree_leaves((positional, named)) if isinstance(item, torch.Tensor)]
        try:
            results = target(*positional, **named)
        except Exception:
            return None
    outputs = [item for item in tree_leaves(results) if isinstance(item, torch.Tensor)]
    operands, own = ([item.untyped_storage()._cdata for item in listed] for listed in (given, outputs))
    return Keeping(
        tuple(place for place, storage in enumerate(operands) if storage in packed),
        tuple(place for place, storage in enumerate(own) if storage in packed),
        sum(size for storage, size in packed.items() if storage not in (*operands, *own)),
    )
