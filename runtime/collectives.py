"""Moves a tensor from one placement to another on one mesh axis, forward and backward.

One function for each pair of placements (:mod:`autopart.runtime.placement`), named by what the forward does; where the
gradient needs something other than the mirror image, the name says that too. ``n`` is the axis' size:

=========  ==================================  ==========================  ==========================
from, to   function                            forward                     backward
=========  ==================================  ==========================  ==========================
R -> S     ``split``                           take own share              all-gather
R -> B     ``sum_gradients``                   nothing                     all-reduce
R -> P     ``keep_on_first``                   zeros but on rank 0         nothing
S -> R     ``all_gather``                      all-gather                  take own share
S -> B     ``all_gather_scatter_gradients``    all-gather                  reduce-scatter
S -> P     ``pad``                             zeros around own share      take own share
S -> S'    ``all_to_all``                      all-to-all                  all-to-all
P -> R     ``all_reduce``                      all-reduce                  nothing
P -> S     ``reduce_scatter``                  reduce-scatter              all-gather
P -> B     ``all_reduce_sum_gradients``        all-reduce                  all-reduce
B -> R     ``keep_gradients_on_first``         nothing                     zeros but on rank 0
B -> S     ``split_pad_gradients``             take own share              zeros around own share
B -> P     ``keep_all_on_first``               zeros but on rank 0         zeros but on rank 0
=========  ==================================  ==========================  ==========================

All take ``(x, axis)``; those with a sharded end also ``dim`` and ``outer``, the number of blocks in that dim outside
the sharded part. An axis of one rank returns ``x`` itself. Tensors of any dtype pass forward. Those whose backward is a
collective also take ``later`` (:class:`Later`): products whose weights' gradients are computed while that goes on.
Those that send anything can be begun and waited for later: :func:`begin`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from autopart.runtime.begun import Begun
from autopart.runtime.later import Begin, Later, convert_beside
from autopart.runtime.mesh import Axis, Pending, gather_single
from autopart.runtime.placement import join_shards, shard, take_shard
from autopart.runtime.traffic import Phase, payload

# An operation without autograd: takes the tensor and the phase under which to count.
_Operation = Callable[[Tensor, Phase], Tensor]

# torch 2.13 renamed this; 2.11 knows the old name alone.
_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# --- Operations without autograd ---


def gather_shards(x: Tensor, axis: Axis, dim: int, outer: int, phase: Phase) -> Tensor:
    """The whole tensor from every rank's share."""
    return _joined(gather_in_front(x, axis, phase), dim, outer)


def gather_parts(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int], phase: Phase) -> Tensor:
    """The whole tensor from the ranks' runs of a dim, of sizes in the proportion of ``sizes``."""
    if len(set(sizes)) == 1:
        return gather_shards(x, axis, dim, 1, phase)
    lengths = [x.size(dim) * size // sizes[axis.index] for size in sizes]
    padded = x.new_zeros([*x.shape[:dim], max(lengths), *x.shape[dim + 1 :]])
    padded.narrow(dim, 0, x.size(dim)).copy_(x.detach())
    pieces = gather_in_front(padded, axis, phase).unbind()
    return torch.cat([piece.narrow(dim, 0, length) for piece, length in zip(pieces, lengths, strict=True)], dim)


def gather_in_front(x: Tensor, axis: Axis, phase: Phase) -> Tensor:
    """Every rank's tensor, stacked in front: ``[axis.size, *x.shape]``."""
    if axis.size == 1:
        return x.detach().unsqueeze(0)
    axis.traffic.add("all_gather", axis.name, phase, axis.size * payload(x))
    return axis.all_gather(x.detach())


def sum_over(x: Tensor, axis: Axis, phase: Phase) -> Tensor:
    """The sum of all ranks' tensors, a new tensor on every rank."""
    total = x.detach().clone(memory_format=torch.contiguous_format)
    sum_in_place(total, axis, phase)
    return total


def sum_in_place(x: Tensor, axis: Axis, phase: Phase) -> None:
    """Replaces a contiguous tensor by the sum over the axis."""
    _reduce_in_place(x, axis, phase, False)


def sum_of_copies(message: Tensor, axis: Axis, copies: Axis, phase: Phase) -> Tensor:
    """The sum of a flat contiguous message ``[n]`` over ``axis``; may be the message itself, which is overwritten.

    copies: ranks that have equal messages, and peers on ``axis`` that have. Each sums a share with its peers, which is
    all that has to pass between these, and all gather the shares.
    """
    if copies.size == 1:
        sum_in_place(message, axis, phase)
        return message
    rest = -message.numel() % copies.size
    whole = torch.cat([message, message.new_zeros(rest)]) if rest else message
    share = whole.view(copies.size, -1)[copies.index].clone()
    sum_in_place(share, axis, phase)
    copies.traffic.add("all_gather", copies.name, phase, payload(whole))
    gather_single(_as_real(whole), _as_real(share), group=copies.group)
    return whole[: message.numel()]


def _as_real(flat: Tensor) -> Tensor:
    """Complex numbers as pairs of real ones, as torch sums them by itself: NCCL knows no others, and gathers none."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def max_in_place(x: Tensor, axis: Axis, phase: Phase) -> None:
    """Replaces a contiguous tensor by the maximum over the axis, element by element."""
    _reduce_in_place(x, axis, phase, True)


def _reduce_in_place(x: Tensor, axis: Axis, phase: Phase, maximum: bool) -> None:
    for part in axis.parts:
        if part.size > 1:
            part.traffic.add("all_reduce", part.name, phase, payload(x))
            part.all_reduce(x, maximum)


def start_broadcast(x: Tensor, axis: Axis, source: int, phase: Phase) -> Pending | None:
    """As :func:`broadcast_in_place`, done when it has been waited for; None: nothing is to be done."""
    if axis.size == 1:
        return None
    axis.traffic.add("broadcast", axis.name, phase, payload(x))
    return axis.broadcast(x, source)


def start_sum(x: Tensor, axis: Axis, target: int, phase: Phase) -> Pending | None:
    """Sums contiguous tensors into that of the rank with index ``target``, once it has been waited for; None as above.
    What other ranks hold is lost.
    """
    if axis.size == 1:
        return None
    axis.traffic.add("reduce", axis.name, phase, payload(x))
    return axis.reduce(x, target)


def broadcast_in_place(x: Tensor, axis: Axis, source: int, phase: Phase) -> None:
    """Replaces a contiguous tensor by the one of the rank with index ``source`` on the axis."""
    if axis.size == 1:
        return
    axis.traffic.add("broadcast", axis.name, phase, payload(x))
    dist.broadcast(x, group=axis.group, group_src=source)


def _scatter_sums(x: Tensor, axis: Axis, dim: int, outer: int, phase: Phase) -> Tensor:
    shares = _shares(x, axis, dim, outer)
    axis.traffic.add("reduce_scatter", axis.name, phase, payload(shares))
    own = torch.empty_like(shares[0])
    try:
        _scatter_single(own.flatten(), shares.flatten(), group=axis.group)
    except RuntimeError as error:
        # gloo in some versions of torch: every rank sums everything and keeps its share.
        if "support" not in str(error):
            raise
        dist.all_reduce(shares, group=axis.group)
        own = shares[axis.index].clone()
    return own


def gather_message(message: Tensor, axis: Axis, phase: Phase) -> tuple[dist.Work, Tensor]:
    """Starts gathering a flat message ``[n]`` of every rank; ``[ranks, n]`` is there once the work is waited for."""
    gathered = message.new_empty((axis.size, message.numel()))
    axis.traffic.add("all_gather", axis.name, phase, payload(gathered))
    return gather_single(gathered.view(-1), message, group=axis.group, async_op=True), gathered


def scatter_message(message: Tensor, axis: Axis, phase: Phase) -> tuple[dist.Work, Tensor]:
    """Starts summing ``[ranks, n]`` over the axis, of which each rank gets its row."""
    axis.traffic.add("reduce_scatter", axis.name, phase, payload(message))
    own = message.new_empty(message.size(1))
    try:
        work = _scatter_single(own, message.view(-1), group=axis.group, async_op=True)
    except RuntimeError as error:
        if "support" not in str(error):
            raise
        work = dist.all_reduce(message, group=axis.group, async_op=True)
        own = message[axis.index]
    return work, own


def sum_message(message: Tensor, axis: Axis, phase: Phase) -> dist.Work:
    """Starts replacing a contiguous tensor by its sum over the axis."""
    axis.traffic.add("all_reduce", axis.name, phase, payload(message))
    work = dist.all_reduce(message, group=axis.group, async_op=True)
    assert work is not None
    return work


def _exchange(x: Tensor, axis: Axis, source: tuple[int, int], target: tuple[int, int], phase: Phase) -> Tensor:
    """From shards of ``source`` (dim, outer) to shards of ``target``."""
    if source[0] == target[0]:
        # One dim in other blocks: what a rank needs may come from anywhere in the dim.
        return _own_share(gather_shards(x, axis, *source, phase), axis, *target)
    parts = _shares(x, axis, *target)
    axis.traffic.add("all_to_all", axis.name, phase, payload(parts))
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=axis.group)
    return join_shards(received.unbind(), shard(*source))


def _begin_exchange(
    x: Tensor, axis: Axis, source: tuple[int, int], target: tuple[int, int], phase: Phase
) -> Callable[[], Tensor]:
    """As :func:`_exchange`; what is returned waits for the result. So with the following."""
    if source[0] == target[0]:
        gathered = _begin_gather(x, axis, *source, phase)
        return lambda: _own_share(gathered(), axis, *target)
    parts = _shares(x, axis, *target)
    axis.traffic.add("all_to_all", axis.name, phase, payload(parts))
    received = torch.empty_like(parts)
    work = dist.all_to_all_single(received, parts, group=axis.group, async_op=True)

    def end() -> Tensor:
        work.wait()
        return join_shards(received.unbind(), shard(*source))

    return end


def _begin_sum(x: Tensor, axis: Axis, phase: Phase) -> Callable[[], Tensor]:
    """As :func:`sum_over`, begun."""
    total = x.detach().clone(memory_format=torch.contiguous_format)
    work = sum_message(total, axis, phase)

    def end() -> Tensor:
        work.wait()
        return total

    return end


def _begin_scatter(x: Tensor, axis: Axis, dim: int, outer: int, phase: Phase) -> Callable[[], Tensor]:
    shares = _shares(x, axis, dim, outer)
    work, own = scatter_message(shares.flatten(1), axis, phase)

    def end() -> Tensor:
        work.wait()
        return own.view(shares.shape[1:])

    return end


def _begin_gather(x: Tensor, axis: Axis, dim: int, outer: int, phase: Phase) -> Callable[[], Tensor]:
    work, gathered = gather_message(x.detach().contiguous().flatten(), axis, phase)

    def end() -> Tensor:
        work.wait()
        return _joined(gathered.view(axis.size, *x.shape), dim, outer)

    return end


def _joined(gathered: Tensor, dim: int, outer: int) -> Tensor:
    """The whole from every rank's share, stacked in front."""
    if dim == 0 and outer == 1 and gathered.dim() > 1:
        return gathered.flatten(0, 1)
    return join_shards(gathered.unbind(), shard(dim, outer))


def _shares(x: Tensor, axis: Axis, dim: int, outer: int) -> Tensor:
    """Every rank's share, stacked in a contiguous tensor (stacking alone keeps the strides of channels-last shares)."""
    placement = shard(dim, outer)
    return torch.stack([take_shard(x.detach(), placement, i, axis.size) for i in range(axis.size)]).contiguous()


def _own_share(x: Tensor, axis: Axis, dim: int, outer: int) -> Tensor:
    # A copy, not a view: a view would keep the whole tensor alive, and custom functions must not return views.
    share = take_shard(x.detach(), shard(dim, outer), axis.index, axis.size)
    return share.clone(memory_format=torch.contiguous_format)


def _padded(x: Tensor, axis: Axis, dim: int, outer: int) -> Tensor:
    """Zeros in the shape of the whole, with this rank's share in its place."""
    blocks = x.detach().unflatten(dim, (outer, x.size(dim) // outer))
    share = blocks.size(dim + 1)
    whole = x.new_zeros((*x.shape[:dim], outer, share * axis.size, *x.shape[dim + 1 :]))
    whole.narrow(dim + 1, axis.index * share, share).copy_(blocks)
    return whole.flatten(dim, dim + 1)


def _first_only(x: Tensor, axis: Axis) -> Tensor:
    return x if axis.index == 0 else torch.zeros_like(x)


class _Transition(torch.autograd.Function):
    """Runs one operation forward and another backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: _Operation, backward: _Operation) -> Tensor:
        ctx.operation = backward
        return forward(x, "forward")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.operation(gradient, "backward"), None, None


@dataclass(frozen=True, slots=True)
class _Way:
    """What a transition does in one direction. begin: the same, not waited for; None: nothing is sent."""

    run: _Operation
    begin: Begin | None = None

    def start(self, x: Tensor, phase: Phase) -> Callable[[], Tensor]:
        """Begins it; what is returned waits for the result."""
        if self.begin is not None:
            return self.begin(x, phase)
        result = self.run(x, phase)
        return lambda: result


def begin(function: Callable[..., Tensor], x: Tensor, axis: Axis, **options: Any) -> Begun:
    """Begins one of the transitions below, with its options; ``wait()`` of what is returned gives the result.

    Both ways it may take as long as what is computed between the two calls (:mod:`autopart.runtime.begun`).
    """
    begun = Begun()
    begun.hold(function(x, axis, begun=begun, **options))
    return begun


def _apply(
    x: Tensor, axis: Axis, forward: _Way, backward: _Way, later: Later | None = None, begun: Begun | None = None
) -> Tensor:
    if axis.size == 1:
        return x
    if has_torch_function((x,)):  # as torch's own functions: _Transition.apply would not be seen
        return handle_torch_function(_apply, (x,), x, axis, forward, backward)
    if begun is not None:
        return begun.start(x, forward.start, backward.start, later)
    if later is not None and backward.begin is not None and later.is_of_use(x):
        return convert_beside(x, forward.run, backward.begin, later)
    return _Transition.apply(x, forward.run, backward.run)


def _gathering(axis: Axis, dim: int, outer: int) -> _Way:
    return _Way(
        lambda x, phase: gather_shards(x, axis, dim, outer, phase),
        lambda x, phase: _begin_gather(x, axis, dim, outer, phase),
    )


def _scattering(axis: Axis, dim: int, outer: int) -> _Way:
    return _Way(
        lambda x, phase: _scatter_sums(x, axis, dim, outer, phase),
        lambda x, phase: _begin_scatter(x, axis, dim, outer, phase),
    )


def _summing(axis: Axis) -> _Way:
    return _Way(lambda x, phase: sum_over(x, axis, phase), lambda x, phase: _begin_sum(x, axis, phase))


def _exchanging(axis: Axis, source: tuple[int, int], target: tuple[int, int]) -> _Way:
    return _Way(
        lambda x, phase: _exchange(x, axis, source, target, phase),
        lambda x, phase: _begin_exchange(x, axis, source, target, phase),
    )


def _taking(axis: Axis, dim: int, outer: int) -> _Way:
    return _Way(lambda x, _: _own_share(x, axis, dim, outer))


def _padding(axis: Axis, dim: int, outer: int) -> _Way:
    return _Way(lambda x, _: _padded(x, axis, dim, outer))


def _keeping_first(axis: Axis) -> _Way:
    return _Way(lambda x, _: _first_only(x, axis))


_SAME = _Way(lambda x, _: x)


# --- The transitions ---


def split(
    x: Tensor, axis: Axis, dim: int, outer: int = 1, later: Later | None = None, begun: Begun | None = None
) -> Tensor:
    """R -> S: takes this rank's share of a replicated tensor; gradients are all-gathered."""
    return _apply(x, axis, _taking(axis, dim, outer), _gathering(axis, dim, outer), later, begun)


def sum_gradients(x: Tensor, axis: Axis, later: Later | None = None, begun: Begun | None = None) -> Tensor:
    """R -> B: the same tensor; the ranks' gradients are summed."""
    return _apply(x, axis, _SAME, _summing(axis), later, begun)


def keep_on_first(x: Tensor, axis: Axis) -> Tensor:
    """R -> P: the tensor on rank 0 of the axis, zeros elsewhere; every rank's gradient passes."""
    return _apply(x, axis, _keeping_first(axis), _SAME)


def all_gather(x: Tensor, axis: Axis, dim: int, outer: int = 1, begun: Begun | None = None) -> Tensor:
    """S -> R: the whole on every rank; each takes its share of the replicated gradient."""
    return _apply(x, axis, _gathering(axis, dim, outer), _taking(axis, dim, outer), begun=begun)


def all_gather_scatter_gradients(
    x: Tensor, axis: Axis, dim: int, outer: int = 1, later: Later | None = None, begun: Begun | None = None
) -> Tensor:
    """S -> B: the whole on every rank; the ranks' gradients are summed and each takes its share."""
    return _apply(x, axis, _gathering(axis, dim, outer), _scattering(axis, dim, outer), later, begun)


def pad(x: Tensor, axis: Axis, dim: int, outer: int = 1) -> Tensor:
    """S -> P: zeros around this rank's share; each takes its share of the replicated gradient."""
    return _apply(x, axis, _padding(axis, dim, outer), _taking(axis, dim, outer))


def all_to_all(
    x: Tensor, axis: Axis, dim: int, to_dim: int, outer: int = 1, to_outer: int = 1, begun: Begun | None = None
) -> Tensor:
    """S -> S': from shards of ``dim`` (in ``outer`` blocks) to shards of ``to_dim`` (in ``to_outer`` blocks).

    With ``dim == to_dim`` (other blocks of the same dim) the whole is all-gathered, both ways.
    """
    source, target = (dim, outer), (to_dim, to_outer)
    return _apply(x, axis, _exchanging(axis, source, target), _exchanging(axis, target, source), begun=begun)


def all_reduce(x: Tensor, axis: Axis, begun: Begun | None = None) -> Tensor:
    """P -> R: the sum on every rank; the replicated gradient passes."""
    return _apply(x, axis, _summing(axis), _SAME, begun=begun)


def reduce_scatter(
    x: Tensor, axis: Axis, dim: int, outer: int = 1, later: Later | None = None, begun: Begun | None = None
) -> Tensor:
    """P -> S: this rank's share of the sum; gradients are all-gathered."""
    return _apply(x, axis, _scattering(axis, dim, outer), _gathering(axis, dim, outer), later, begun)


def all_reduce_sum_gradients(x: Tensor, axis: Axis, later: Later | None = None, begun: Begun | None = None) -> Tensor:
    """P -> B: the sum on every rank; the ranks' gradients are summed as well."""
    return _apply(x, axis, _summing(axis), _summing(axis), later, begun)


def keep_gradients_on_first(x: Tensor, axis: Axis) -> Tensor:
    """B -> R: the same tensor; of the replicated gradients the one of rank 0 counts."""
    return _apply(x, axis, _SAME, _keeping_first(axis))


def split_pad_gradients(x: Tensor, axis: Axis, dim: int, outer: int = 1) -> Tensor:
    """B -> S: takes this rank's share; its gradient is padded with zeros to a partial one of the whole."""
    return _apply(x, axis, _taking(axis, dim, outer), _padding(axis, dim, outer))


def keep_all_on_first(x: Tensor, axis: Axis) -> Tensor:
    """B -> P: the tensor on rank 0, zeros elsewhere; gradients alike."""
    return _apply(x, axis, _keeping_first(axis), _keeping_first(axis))
