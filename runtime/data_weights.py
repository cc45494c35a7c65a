"""Weights that are stored as shares on the data axis: ZeRO (Rajbhandari et al., arXiv 1910.02054, section 5).

The optimizer's parameters are this rank's shares at all three levels; what is kept besides differs:

========  ===============================  =========================================================
level     whole weights                    gradients
========  ===============================  =========================================================
1 (P_os)  kept, gathered at every call     whole until the last microbatch, then summed and divided
2 (+ g)   kept, gathered at every call     summed and divided in every microbatch's backward
3 (+ p)   gathered at use, freed after it  summed and divided where they arise
========  ===============================  =========================================================

Emitted code reads a weight by ``mesh.gather(share, ...)``. At levels 1 and 2 the shares are views into the whole
weights, which are autograd leaves of their own (:mod:`autopart.runtime.gradients` divides what gathers in them). They
are gathered in messages of several, the first when a call begins, others when one before them is read, as far as what
is on its way beside the largest are no more bytes than one statement reads and a message more. So what the next layer
reads arrives while one runs, and a large table, as an output layer's, while several do. Where a call begins with
waiting for another stage, all arrive before that.

At level 3 the shares of one call are a *unit*: one message forward, and one back with their gradients. Nothing keeps
the whole weights between the two: where autograd saves a tensor that lies in one, it is given a note of which part of
which unit that was, and the unit is gathered again when the backward asks for it. While a unit is used the next one, as
the pass before used them, is on its way: at most two are in memory.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopart.runtime.buckets import home_of, kept_buckets
from autopart.runtime.collectives import gather_message, scatter_message
from autopart.runtime.flat import FlatShares
from autopart.runtime.links import dtype_of
from autopart.runtime.manifest import ParameterSpec
from autopart.runtime.mesh import Axis, Mesh
from autopart.runtime.traffic import Phase

BESIDE = 4
"""As many bytes of level 2's gradients as fill so many messages are on their way beside the largest."""

_CHANGED = "a weight was changed between its forward and its backward; call optimizer.step() after loss.backward()"

# A microbatch's way through a stage. weight: what a split backward has left for later.
Pass = Literal["forward", "backward", "weight"]


def sent_ahead(flying: Sequence[float], size: float, window: float) -> bool:
    """Whether a message of whole weights of levels 1 and 2 is begun beside others. flying: bytes of these. window: the
    most that one statement reads, and that fills a message.
    """
    return sum(flying) + size - max([*flying, size]) <= window


def summed_beside(flying: Sequence[float], size: float, limit: float) -> bool:
    """Whether a message of level 2's gradients is sent beside others on their way. flying: bytes of these. limit: that
    fill a message.
    """
    return sum(flying) + size - max([*flying, size]) <= BESIDE * limit


@dataclass(eq=False, slots=True)
class _Unit:
    """Shares that one statement gathers. wholes: while they are in memory. arriving: the message on its way."""

    shares: tuple[nn.Parameter, ...]
    layout: FlatShares
    wholes: list[Tensor] | None = None
    arriving: tuple[dist.Work, Tensor] | None = None

    @property
    def trained(self) -> bool:
        return any(share.requires_grad for share in self.shares)


@dataclass(eq=False, slots=True)
class _Kept:
    """Whole weights that are gathered in one message. homes: their memory, with views of it that shares begin as."""

    shares: list[nn.Parameter]
    leaves: list[Tensor]
    homes: list[tuple[Tensor, Tensor]]
    layout: FlatShares

    @property
    def bytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves)

    def settle(self) -> None:
        """Where a script has given a share other memory, as averages of weights are put in and taken out by ``.data``,
        the whole weight takes other memory too: what the share was before is the script's, and may come back.
        """
        for share, leaf, (whole, view) in zip(self.shares, self.leaves, self.homes, strict=True):
            at_home = share.data_ptr() == view.data_ptr()
            if at_home != (leaf.data_ptr() == whole.data_ptr()):
                leaf.data = whole if at_home else torch.empty_like(whole)


@dataclass(frozen=True, slots=True)
class _Saved:
    """What autograd keeps instead of a tensor that lies in a unit's whole weight.

    dtype: that of the weight, or of pairs of its numbers or of their parts. conjugate, negative: marks of lazy views.
    """

    unit: _Unit
    index: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    conjugate: bool
    negative: bool
    version: int

    def seen(self, whole: Tensor) -> Tensor:
        """The tensor, in the whole weight that has been gathered again."""
        found = torch.empty(0, dtype=self.dtype, device=whole.device)
        found.set_(whole.untyped_storage(), self.offset, self.size, self.stride)
        if self.conjugate:
            found = found.conj()
        return torch._neg_view(found) if self.negative else found


class Weights:
    """The divided weights of one rank. parameters: its own by name; specs: of the whole program, in its order."""

    def __init__(
        self, specs: Sequence[ParameterSpec], mesh: Mesh, parameters: Mapping[str, nn.Parameter], bucket_bytes: int
    ) -> None:
        self._axis: Axis = mesh.data
        divided = [spec for spec in specs if spec.zero and spec.name in parameters]
        self._summed = next(iter(divided), None)  # in what type gradients are added up, which is one for all
        self._summed_last = {id(parameters[spec.name]) for spec in divided if spec.zero == 1}
        self._cut_in = {id(parameters[spec.name]): spec.data_dim for spec in divided}
        sizes = [axis.size for axis in mesh.tensor_axes]
        self._kept = [
            self._keep([(parameters[spec.name], spec.data_dim) for spec in run])
            for stage in mesh.stages
            for run in kept_buckets((s for s in divided if home_of(s, mesh.stages) == stage), sizes, bucket_bytes)
        ]
        self._kept_of = {id(share): kept for kept in self._kept for share in kept.shares}
        # Of what shares may have changed since it was gathered; messages on their way; bytes that a statement read.
        self._stale: deque[_Kept] = deque()
        self._flying: dict[_Kept, tuple[dist.Work, Tensor]] = {}
        self._read, self._limit = 0, bucket_bytes
        self.leaves = {
            id(share): leaf for kept in self._kept for share, leaf in zip(kept.shares, kept.leaves, strict=True)
        }
        self._units: dict[tuple[int, ...], _Unit] = {}
        self._frees = any(spec.zero == 3 for spec in divided)
        self._phase: Phase = "forward"
        # Units in the order of this pass so far, and of the last whole one of each kind.
        self._seen: list[_Unit] = []
        self._order: dict[tuple[Pass, int], list[_Unit]] = {}
        self._expected: list[_Unit] = []
        # Units in memory; True while their gradient is still to come, which will free them.
        self._held: dict[_Unit, bool] = {}
        self._storages: dict[int, tuple[_Unit, int]] = {}
        # Whole weights that were handed out in this pass: an op that reads several saves the first when its unit has
        # been let go. While one lives its address is no other tensor's.
        self._lent: dict[int, tuple[weakref.ref[Tensor], _Unit, int]] = {}
        self._summing: tuple[_Unit, list[int], dist.Work, Tensor] | None = None

    def left_for_w(self, parameter: nn.Parameter) -> Tensor:
        """What a split backward may leave the gradients of for W: level 1's whole weight, of which this is a share.

        Those of levels 2 and 3 are summed where B makes them, and none of theirs arrive at what is returned.
        """
        return self.leaves[id(parameter)] if id(parameter) in self._summed_last else parameter

    # --- Levels 1 and 2 ---

    def _keep(self, members: Sequence[tuple[nn.Parameter, int]]) -> _Kept:
        """Makes the shares views of whole weights, whose other parts the first gathering fills."""
        ranks, index = self._axis.size, self._axis.index
        layout = FlatShares([share.shape for share, _ in members], [dim for _, dim in members], ranks)
        leaves, homes = [], []
        for share, dim in members:
            shape = list(share.shape)
            shape[dim] *= ranks
            whole = share.detach().new_empty(shape)
            view = whole.narrow(dim, index * share.size(dim), share.size(dim))
            view.copy_(share.detach())
            share.data = view
            leaves.append(whole.detach().requires_grad_(share.requires_grad))
            homes.append((whole, view))
        return _Kept([share for share, _ in members], leaves, homes, layout)

    def refresh(self) -> None:
        """Begins gathering the weights that are kept whole: an optimizer or a loaded state may have changed shares."""
        for kept in self._kept:
            kept.settle()
            for share, leaf in zip(kept.shares, kept.leaves, strict=True):
                leaf.requires_grad_(share.requires_grad)
        self._stale = deque(self._kept)
        self._send_ahead()

    def watch(self) -> Callable[[], None]:
        """Raises RuntimeError, when called, if an optimizer has changed shares of the weights that are kept whole: as
        their memory is that of the whole weights, of which autograd knows nothing, a backward would go by both.
        """
        before = [(share, share._version) for kept in self._kept for share in kept.shares]

        def check() -> None:
            if any(share._version != version for share, version in before):
                raise RuntimeError(_CHANGED)

        return check

    def _send_ahead(self) -> None:
        window = self._read + self._limit
        while self._stale and sent_ahead([kept.bytes for kept in self._flying], self._stale[0].bytes, window):
            self._send(self._stale.popleft())

    def _send(self, kept: _Kept) -> None:
        self._flying[kept] = gather_message(kept.layout.message(kept.shares), self._axis, "update")

    def _arrive(self, kept: _Kept) -> None:
        if kept in self._stale:  # read sooner than the model has it
            self._stale.remove(kept)
            self._send(kept)
        if kept not in self._flying:
            return
        work, message = self._flying.pop(kept)
        work.wait()
        for index, leaf in enumerate(kept.leaves):
            # By .data: a graph that still waits for its backward may have saved the weight, whose values are the same.
            kept.layout.fill(message, index, leaf.data)
        del work, message  # a work may hold its tensors
        self._send_ahead()

    def arrive(self) -> None:
        """Waits for all weights that are kept whole."""
        for kept in self._kept:
            self._arrive(kept)

    # --- Level 3 ---

    def gather(self, *shares: nn.Parameter) -> Any:
        """The whole weights of shares that are stored alike: one tensor, or a tuple of several."""
        if id(shares[0]) in self._kept_of:
            found = tuple(self.leaves[id(share)] for share in shares)
            if self._stale or self._flying:
                self._read = max(self._read, sum(leaf.nbytes for leaf in found))
                for share in shares:
                    self._arrive(self._kept_of[id(share)])
        else:
            unit = self._unit(shares)
            self._ensure(unit)
            if torch.is_grad_enabled() and unit.trained:
                found = _Gather.apply(self, unit, *shares)
            else:
                assert unit.wholes is not None
                found = tuple(whole.data for whole in unit.wholes)
            for index, whole in enumerate(found):
                self._lent[whole.untyped_storage().data_ptr()] = weakref.ref(whole), unit, index
        return found[0] if len(found) == 1 else found

    def _unit(self, shares: tuple[nn.Parameter, ...]) -> _Unit:
        key = tuple(map(id, shares))
        if key not in self._units:
            dims = [self._cut_in[id(share)] for share in shares]
            self._units[key] = _Unit(shares, FlatShares([share.shape for share in shares], dims, self._axis.size))
        return self._units[key]

    @contextmanager
    def passing(self, kind: Pass, stage: int) -> Iterator[None]:
        """Around one stage's forward or backward of one microbatch: no whole weight outlives it."""
        self._phase = "forward" if kind == "forward" else "backward"
        self._seen, self._expected = [], self._order.get((kind, stage), [])
        try:
            if kind == "forward" and self._frees and torch.is_grad_enabled():
                with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                    yield
            else:
                yield
            self._order[kind, stage] = self._seen
        finally:
            for unit in self._units.values():
                self._free(unit)
            self._lent.clear()

    def _ensure(self, unit: _Unit) -> None:
        """Has a unit's whole weights in memory, and the next one's on their way."""
        for other, awaited in list(self._held.items()):
            if other is not unit and not awaited:
                self._free(other)
        if unit.wholes is not None:
            return
        if unit.arriving is None:
            self._start(unit)
        assert unit.arriving is not None
        (work, message), unit.arriving = unit.arriving, None
        work.wait()
        unit.wholes = unit.layout.wholes(message)
        del work, message  # a work may hold its tensors
        for index, whole in enumerate(unit.wholes):
            self._storages[whole.untyped_storage().data_ptr()] = unit, index
        self._held[unit] = self._phase == "backward" and unit.trained
        self._start_next(unit)

    def _start_next(self, unit: _Unit) -> None:
        """Starts gathering what followed here in the pass before."""
        position, order = len(self._seen), self._expected
        self._seen.append(unit)
        if position + 1 < len(order) and order[position] is unit:
            following = order[position + 1]
            if following.wholes is None and following.arriving is None:
                self._start(following)

    def _start(self, unit: _Unit) -> None:
        unit.arriving = gather_message(unit.layout.message(unit.shares), self._axis, self._phase)

    def _free(self, unit: _Unit) -> None:
        if unit.arriving is not None:  # the pass went another way than the one before
            unit.arriving[0].wait()
            unit.arriving = None
        for whole in unit.wholes or ():
            del self._storages[whole.untyped_storage().data_ptr()]
        unit.wholes = None
        self._held.pop(unit, None)

    def _pack(self, tensor: Tensor) -> Tensor | _Saved:
        if tensor.layout is not torch.strided:
            return tensor
        found = self._at(tensor.untyped_storage().data_ptr())
        if found is None:
            return tensor
        unit, index = found
        layout = tensor.size(), tensor.stride(), int(tensor.storage_offset())
        marks = tensor.is_conj(), tensor.is_neg()
        return _Saved(unit, index, *layout, tensor.dtype, *marks, unit.shares[index]._version)

    def _at(self, address: int) -> tuple[_Unit, int] | None:
        """Which whole weight lies at an address."""
        if address in self._storages or address not in self._lent:
            return self._storages.get(address)
        whole, unit, index = self._lent[address]
        return None if whole() is None else (unit, index)

    def _unpack(self, saved: Tensor | _Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if saved.unit.shares[saved.index]._version != saved.version:
            raise RuntimeError(_CHANGED)
        self._ensure(saved.unit)
        assert saved.unit.wholes is not None
        return saved.seen(saved.unit.wholes[saved.index])

    def _sum(self, unit: _Unit, gradients: Sequence[Tensor | None]) -> None:
        """Starts summing a unit's gradients; each rank keeps its shares. Ends the sum before."""
        self._free(unit)
        self.settle()
        present = [index for index, gradient in enumerate(gradients) if gradient is not None]
        if not present:
            return
        layout = unit.layout
        if len(present) < len(unit.shares):
            shapes = [unit.shares[index].shape for index in present]
            layout = FlatShares(shapes, [unit.layout.dims[index] for index in present], self._axis.size)
        message = layout.whole_message([gradient for gradient in gradients if gradient is not None])
        message = message if self._summed is None else in_sum_type(message, self._summed)
        work, result = scatter_message(message, self._axis, "backward")
        self._summing = unit, present, work, result

    def settle(self) -> None:
        """Waits for the sums that were started, and adds them to the shares' gradients."""
        if self._summing is None:
            return
        (unit, present, work, message), self._summing = self._summing, None
        work.wait()
        shapes = [unit.shares[index].shape for index in present]
        layout = FlatShares(shapes, [0] * len(present), 1)
        message = message.to(unit.shares[0].dtype)
        for index, gradient in zip(present, layout.shares(message), strict=True):
            add_gradient(unit.shares[index], gradient)


def in_sum_type(message: Tensor, spec: ParameterSpec) -> Tensor:
    """Gradients in the type that they are summed in."""
    return message.to(dtype_of(spec.summed)) if spec.summed else message


def add_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """As autograd adds it."""
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient


class _Gather(torch.autograd.Function):
    """Whole weights from shares; backward hands the gradients over to be summed, and returns none itself."""

    @staticmethod
    def forward(ctx: Any, weights: Weights, unit: _Unit, *shares: Tensor) -> tuple[Tensor, ...]:
        ctx.weights, ctx.unit = weights, unit
        ctx.set_materialize_grads(False)
        assert unit.wholes is not None
        # not the very tensors, which would get this function as their history
        found = tuple(whole.data for whole in unit.wholes)
        frozen = [whole for whole, share in zip(found, shares, strict=True) if not share.requires_grad]
        ctx.mark_non_differentiable(*frozen)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.weights._sum(ctx.unit, gradients)
        return (None, None, *(None for _ in gradients))
