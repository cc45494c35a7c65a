"""Grouped products of which each rank has the weights of some of the groups: the experts of a mixture.

Either all rows are whole on every rank (:func:`own_experts_product`), or each rank has its own rows, sorted by group,
and sends them to the ranks that have their groups' weights: expert parallelism (GShard, arXiv 2006.16668, section 3;
MegaBlocks, arXiv 2211.15841, drops no row either). A rank's groups are ``[e / ranks * index, …)`` of ``e``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from autopart.runtime.mesh import Axis
from autopart.runtime.traffic import Phase, payload

_ROUTE = "_autopart_route"


def own_experts_product(x: Tensor, weight: Tensor, offs: Tensor, *, axis: Axis) -> Tensor:
    """This rank's summand of the product of rows, sorted by expert, with their experts' matrices.

    x: ``[t, k]``, whole. weight: ``[experts / ranks, k, n]``, those of the rank. offs: ``[experts]``, where the rows of
    each of all experts end. Returns ``[t, n]``, zero but in the rows of the rank's own experts. Nothing is exchanged;
    x's gradient is a partial sum, zero but in these rows too. Where they lie is read from the device, once.
    """
    first = axis.index * weight.size(0)
    ends = [0, *offs.tolist()][first : first + weight.size(0) + 1]
    return F.pad(_product(x, weight, ends), (0, 0, ends[0], x.size(0) - ends[-1]))


def dispatch_experts_product(x: Tensor, weight: Tensor, offs: Tensor, *, axis: Axis) -> Tensor:
    """Sends this rank's rows to their experts' ranks and multiplies those that come: E of O.

    x: ``[t, k]``, the own rows, sorted by expert. weight: ``[experts / ranks, k, n]``. offs: ``[experts]``, where the
    own rows of each expert end; it keeps the way of the rows for the products that follow. Returns ``[r, n]``, the
    ``r`` rows of the rank's experts, from all ranks, sorted by expert and rank.
    Forward two all-to-all, of counts and of rows; backward the rows' gradients come back, while the weights' are
    computed. One read from the device.
    """
    route = _Route.exchanged(_counts(offs), weight.size(0), axis)
    setattr(offs, _ROUTE, route)
    return _product_there(x, weight, route)


def group_experts_product(x: Tensor, weight: Tensor, offs: Tensor, *, axis: Axis) -> Tensor:
    """The product of rows that were dispatched by the same ``offs``: E of E. Nothing is exchanged."""
    return _product(x, weight, _route(offs).ends)


def combine_experts_product(x: Tensor, weight: Tensor, offs: Tensor, *, axis: Axis) -> Tensor:
    """Multiplies the rows of this rank's experts and sends the products back: O of E.

    x: ``[r, k]``, as :func:`dispatch_experts_product` left them, by the same ``offs``. Returns ``[t, n]``, the products
    of the own rows. Forward one all-to-all, of rows; backward one of their gradients.
    """
    route = _route(offs)
    return _returned(_product(x, weight, route.ends), route)


def exchange_experts_product(x: Tensor, weight: Tensor, offs: Tensor, *, axis: Axis) -> Tensor:
    """Sends the own rows to their experts and the products back: O of O. Both exchanges, forward and backward."""
    route = _Route.exchanged(_counts(offs), weight.size(0), axis)
    return _returned(_product_there(x, weight, route), route)


def group_look_up(source: Tensor, indices: Sequence[Tensor], *, axis: Axis) -> Tensor:
    """What a tensor has for the group of each row, such as a bias, for the rows of this rank's groups: E of O.

    source: ``[experts / ranks, *n]``. indices: one tensor ``[t]``, the groups of the own rows, sorted. Returns
    ``[r, *n]``, as :func:`dispatch_experts_product` leaves the rows. Forward one all-to-all, of counts; one read from
    the device.
    """
    (keys,) = indices
    # not by bincount, which reads from the device, and is as long as the largest key asks for
    groups = torch.arange(source.size(0) * axis.size + 1, dtype=keys.dtype, device=keys.device)
    counts = torch.searchsorted(keys.contiguous(), groups).diff()
    route = _Route.exchanged(counts, source.size(0), axis)
    many = [last - first for first, last in itertools.pairwise(route.ends)]
    return torch.cat([row.expand(count, *row.shape) for row, count in zip(source, many, strict=True)])


def own_places(base: Tensor, indices: Sequence[Tensor], values: Tensor, *, axis: Axis) -> Tensor:
    """Where each of a rank's own rows went when they were sorted.

    base: ``[t]``, all of it written. indices: one tensor ``[t]``, the number of the own row in each place. values: the
    numbers from 0 on of the whole's places, of which the first ``t`` are written. Nothing is exchanged.
    """
    return torch.index_put(base, tuple(indices), values[: base.size(0)])


def _counts(offs: Tensor) -> Tensor:
    """Rows of each group, of where they end."""
    return offs.detach().to(torch.int64).diff(prepend=offs.new_zeros(1, dtype=torch.int64))


def _product(x: Tensor, weight: Tensor, ends: Sequence[int]) -> Tensor:
    """Rows times the matrices of their groups, which end at ``ends[1:]``."""
    return torch.cat([x[first:last] @ matrix for first, last, matrix in zip(ends[:-1], ends[1:], weight, strict=True)])


@dataclass(frozen=True, slots=True)
class _Route:
    """How many rows go where. sent: own rows for each rank. arriving: rows from each rank for each own group."""

    axis: Axis
    sent: tuple[int, ...]
    arriving: tuple[tuple[int, ...], ...]

    @staticmethod
    def exchanged(counts: Tensor, groups: int, axis: Axis) -> _Route:
        """counts: of the own rows of each of all groups. groups: how many a rank has."""
        arriving = counts
        if axis.size > 1:
            axis.traffic.add("all_to_all", axis.name, "forward", payload(counts))
            arriving = torch.empty_like(counts)
            dist.all_to_all_single(arriving, counts, group=axis.group)
        here, there = torch.stack((counts, arriving)).view(2, axis.size, groups).tolist()
        return _Route(axis, tuple(map(sum, here)), tuple(map(tuple, there)))

    @property
    def received(self) -> list[int]:
        return list(map(sum, self.arriving))

    @property
    def ends(self) -> list[int]:
        """Where the rows of each own group end, sorted by group; 0 in front."""
        found = [0]
        for count in map(sum, zip(*self.arriving, strict=True)):
            found.append(found[-1] + count)
        return found

    def by_group(self, rows: Tensor) -> Tensor:
        """From the order of arrival, by rank and then group, to that of the groups."""
        return _reordered(rows, self.arriving)

    def by_rank(self, rows: Tensor) -> Tensor:
        return _reordered(rows, tuple(zip(*self.arriving, strict=True)))

    def send(self, rows: Tensor, phase: Phase) -> Tensor:
        """Own rows to their groups."""
        return self.by_group(self.begin(rows.contiguous(), self.received, self.sent, rows, phase)())

    def bring_back(self, rows: Tensor, phase: Phase) -> Tensor:
        """The groups' rows to where they came from."""
        return self.begin_bringing_back(rows, phase)()

    def begin_bringing_back(self, rows: Tensor, phase: Phase) -> Callable[[], Tensor]:
        """As :meth:`bring_back`, when the result is called."""
        own = rows.new_empty((sum(self.sent), *rows.shape[1:]))
        return self.begin(self.by_rank(rows), self.sent, self.received, own, phase)

    def begin(
        self, rows: Tensor, arriving: Sequence[int], leaving: Sequence[int], own: Tensor, phase: Phase
    ) -> Callable[[], Tensor]:
        """Begins an exchange; what is returned waits for it. Counted by the own rows, those that are sent or come back:
        their number does not depend on the data.
        """
        if self.axis.size == 1:
            return lambda: rows
        self.axis.traffic.add("all_to_all", self.axis.name, phase, payload(own))
        result = rows.new_empty((sum(arriving), *rows.shape[1:]))
        work = dist.all_to_all_single(result, rows, list(arriving), list(leaving), group=self.axis.group, async_op=True)
        assert work is not None

        def end(sent: Tensor = rows) -> Tensor:  # what is sent is kept until then
            work.wait()
            return result

        return end


def _reordered(rows: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
    """Pieces of ``counts[i][j]`` rows, sorted by i and then j: sorted by j and then i."""
    pieces = rows.split([count for line in counts for count in line])
    width = len(counts[0])
    return torch.cat([piece for j in range(width) for piece in pieces[j::width]])


def _route(offs: Tensor) -> _Route:
    found = getattr(offs, _ROUTE, None)
    assert isinstance(found, _Route), "rows are dispatched by the same ends of groups before they are multiplied there"
    return found


class _Move(torch.autograd.Function):
    """Rows on their way: forward one exchange, backward the opposite one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, route: _Route, there: bool) -> Tensor:
        ctx.route, ctx.there = route, there
        return (route.send if there else route.bring_back)(x.detach(), "forward")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return (ctx.route.bring_back if ctx.there else ctx.route.send)(gradient, "backward"), None, None


class _ProductThere(torch.autograd.Function):
    """Rows are sent to their groups and multiplied; their gradients go back while the weights' are computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, route: _Route) -> Tensor:
        rows = route.send(x.detach(), "forward")
        of_x, of_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(rows if of_weight else None, weight if of_x else None)
        ctx.route = route
        return _product(rows, weight, route.ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, weight = ctx.saved_tensors
        ends, needed = ctx.route.ends, ctx.needs_input_grad
        back = None
        if needed[0]:
            back = ctx.route.begin_bringing_back(_product(gradient, weight.transpose(1, 2), ends), "backward")
        pieces = itertools.pairwise(ends) if needed[1] else ()
        sums = [rows[first:last].t() @ gradient[first:last] for first, last in pieces]
        return None if back is None else back(), torch.stack(sums) if sums else None, None


def _product_there(x: Tensor, weight: Tensor, route: _Route) -> Tensor:
    """The product of rows that are sent to their groups."""
    if has_torch_function((x, weight)):  # a split backward cuts the product out, whose weights' gradients are later yet
        return _product(_sent(x, route), weight, route.ends)
    result: Tensor = _ProductThere.apply(x, weight, route)
    return result


def _moved(x: Tensor, route: _Route, there: bool) -> Tensor:
    if has_torch_function((x,)):  # as torch's own functions: _Move.apply would not be seen
        return handle_torch_function(_moved, (x,), x, route, there)
    return _Move.apply(x, route, there)


def _sent(x: Tensor, route: _Route) -> Tensor:
    return _moved(x, route, True)


def _returned(x: Tensor, route: _Route) -> Tensor:
    return _moved(x, route, False)
