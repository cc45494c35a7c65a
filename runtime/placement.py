"""How a tensor lies on one mesh axis, forward and backward, and what that makes of its shape.

A value that is used on the ranks of a mesh axis has a placement for itself and one for its gradient. Four pairs are
enough, and they are closed under differentiation:

========  =====================  ====================  ==========================================================
letter    value on the ranks     its gradient          example
========  =====================  ====================  ==========================================================
``R``     replicated             replicated            the residual stream under Megatron's split
``S``     sharded on a dim       sharded alike         an activation between a column and a row split
``P``     partial sum            replicated            the output of a row split, before its all-reduce
``B``     replicated             partial sum           the input of a column split: broadcast, gradients to be summed
========  =====================  ====================  ==========================================================

``B`` is the transpose of ``P``: the forward of one is the backward of the other. A transition between two pairs is one
collective forward and one backward; :mod:`autopart.runtime.collectives` has one function for each.

A sharded dim may hold several outer blocks, each of which is sharded by itself: GPT-2's fused projection yields
``(3, heads, head_dim)`` in one dim, and its heads are sharded inside each of the three blocks. ``S2/3`` is dim 2 seen
as ``(3, n)`` with ``n`` sharded. The number of blocks may be a multiple of the batch size: ``S0/b``, ``S0/4b``.

Rows that are routed to groups, as a mixture routes tokens to experts, have placements of their own. Ops that every rank
runs on its own shard of the rows make values that have a meaning only beside each other: rows sorted by group are no
shard of all rows sorted. What a rank has of them is cut like a shard, value and gradient alike, but nothing converts
it; ops that know the routing lead from a shard into these placements and out again (``passes/rules/routing.py``):

========  ==========================================================================================================
``O0/b``  what an op makes of the own rows (those of ``S0/b``), in the order of their groups; rows are dim 0
``C0/b``  how many of the own rows each group has
``E0/b``  the rows of all ranks whose groups are this rank's (of experts: those that it has the weights of)
========  ==========================================================================================================

On several axes a value has one placement per axis, each in terms of the whole tensor: what a rank has is what all of
them leave to it. On one dim the cuts have to nest, each inside the pieces of the coarser one: with two ranks on each of
``x`` and ``y``, ``S0, S0/2`` and ``S0/2, S0`` do, ``S0, S0`` does not (:func:`nested`).
"""

from __future__ import annotations

import enum
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor


class Kind(enum.Enum):
    __hash__ = object.__hash__  # members are alone; an enum's own hash, of the name, is Python code

    REPLICATE = "R"
    SHARD = "S"
    PARTIAL = "P"
    BROADCAST = "B"
    OWN_ROWS = "O"
    OWN_COUNTS = "C"
    GROUP_ROWS = "E"


_ROUTED = (Kind.OWN_ROWS, Kind.OWN_COUNTS, Kind.GROUP_ROWS)
_WITH_DIM = (Kind.SHARD, *_ROUTED)
_KINDS = tuple(Kind)
_SHARD_TEXT = re.compile(r"([SOCE])(\d+)(?:/(\d*)(b?))?")


@dataclass(frozen=True, slots=True)
class Placement:
    """Placement of a value and of its gradient on one mesh axis.

    kind: the pair, see the module's tables.
    dim: the sharded tensor dim (never negative); of routed rows the dim of rows, of counts 0.
    outer: blocks in that dim outside the sharded part, times the local batch size if ``batched``; of routed rows those
        of the shard that they come from. R, P and B have neither.
    """

    kind: Kind
    dim: int = 0
    outer: int = 1
    batched: bool = False
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # made once, as placements are looked up by the million; of numbers, so that all processes have the same
        object.__setattr__(self, "_hash", hash((_KINDS.index(self.kind), self.dim, self.outer, self.batched)))
        if self.kind not in _WITH_DIM and (self.dim, self.outer, self.batched) != (0, 1, False):
            raise ValueError(f"only a sharded placement has a dim: {self.kind}")
        if self.dim < 0 or self.outer < 1:
            raise ValueError(f"a sharded dim is counted from the left and has at least one block: {self}")

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        if self.kind not in _WITH_DIM:
            return self.kind.value
        if self.outer == 1 and not self.batched:
            return f"{self.kind.value}{self.dim}"
        blocks = "" if self.outer == 1 else str(self.outer)
        return f"{self.kind.value}{self.dim}/{blocks}{'b' if self.batched else ''}"

    @staticmethod
    def parse(text: str) -> Placement:
        """Reads what ``str`` writes: ``R``, ``P``, ``B``, ``S1``, ``S2/3``, ``S0/4b``. Raises ValueError."""
        if text in ("R", "P", "B"):
            return Placement(Kind(text))
        match = _SHARD_TEXT.fullmatch(text)
        if match is None or text.endswith("/"):
            raise ValueError(f"not a placement: {text!r}; expected R, P, B, S<dim> or S<dim>/<blocks>")
        kind, dim, blocks, batched = match.groups()
        return Placement(Kind(kind), int(dim), int(blocks or 1), bool(batched))

    @property
    def is_shard(self) -> bool:
        return self.kind is Kind.SHARD

    @property
    def is_routed(self) -> bool:
        """Whether it belongs to a routing, so that nothing converts from or to it."""
        return self.kind in _ROUTED

    @property
    def divides(self) -> bool:
        """Whether a rank has a part of the tensor: a shard, or a part of routed rows (its groups' on average)."""
        return self.kind in (Kind.SHARD, Kind.OWN_ROWS, Kind.GROUP_ROWS)

    def blocks(self, batch: int) -> int:
        """The number of outer blocks for a local batch of that many samples."""
        return self.outer * batch if self.batched else self.outer


Placements = tuple[Placement, ...]
"""One placement per tensor axis of the mesh."""

REPLICATE = Placement(Kind.REPLICATE)
PARTIAL = Placement(Kind.PARTIAL)
BROADCAST = Placement(Kind.BROADCAST)


def shard(dim: int, outer: int = 1, batched: bool = False) -> Placement:
    """Sharded on ``dim``, inside ``outer`` blocks (times the batch size if ``batched``)."""
    return Placement(Kind.SHARD, dim, outer, batched)


def local_size(size: int, parts: int) -> int:
    """The size of one of ``parts`` equal shares of a dim; the strategies offered always divide."""
    assert size % parts == 0, f"a dim of {size} does not divide into {parts}"
    return size // parts


def _cuts(placements: Sequence[Placement], sizes: Sequence[int]) -> list[tuple[int, Placement]]:
    """Positions and placements of the axes that cut, by dim, coarse first."""
    found = [(index, p) for index, p in enumerate(placements) if p.is_shard and sizes[index] > 1]
    return sorted(found, key=lambda cut: (cut[1].dim, cut[1].batched, cut[1].outer))


def nested(placements: Sequence[Placement], sizes: Sequence[int]) -> bool:
    """Whether placements on axes of these sizes can hold together.

    On each dim, sorted by blocks, the blocks of a cut are a multiple of the blocks of the cut before times its parts.
    Routed rows are cut on one axis alone.
    """
    taken = [p.dim for p, size in zip(placements, sizes, strict=True) if p.divides and size > 1]
    if any(p.is_routed and p.divides and taken.count(p.dim) > 1 for p in placements):
        return False
    return all(
        before.dim != after.dim
        or (after.outer % (before.outer * sizes[index]) == 0 and (after.batched or not before.batched))
        for (index, before), (_, after) in itertools.pairwise(_cuts(placements, sizes))
    )


def local_cuts(placements: Sequence[Placement], sizes: Sequence[int]) -> tuple[tuple[int, Placement], ...]:
    """The cuts that make a rank's share, one after the other: position of the axis, and the cut of what is left.

    Coarse first on each dim; blocks are those inside the remainder of the cuts before. Shares are joined in the
    opposite order. The placements are :func:`nested`.
    """
    assert nested(placements, sizes), f"{', '.join(map(str, placements))} do not nest on axes of {tuple(sizes)}"
    taken: dict[int, int] = {}
    found = []
    for index, placement in _cuts(placements, sizes):
        coarser = taken.get(placement.dim, 1)
        found.append((index, replace(placement, outer=placement.outer // coarser)))
        taken[placement.dim] = coarser * sizes[index]
    return tuple(found)


def local_cut(placements: Sequence[Placement], sizes: Sequence[int], position: int) -> Placement:
    """The placement on one axis, with blocks counted in a tensor that has the other axes' shares alone."""
    return next((cut for index, cut in local_cuts(placements, sizes) if index == position), placements[position])


def take_share(
    tensor: Tensor, placements: Sequence[Placement], sizes: Sequence[int], indices: Sequence[int], batch: int = 1
) -> Tensor:
    """The share of the rank with these indices on axes of these sizes; a view where possible."""
    for position, cut in local_cuts(placements, sizes):
        tensor = take_shard(tensor, cut, indices[position], sizes[position], batch)
    return tensor


def take_shard(tensor: Tensor, placement: Placement, index: int, parts: int, batch: int = 1) -> Tensor:
    """The share of rank ``index`` of ``parts``: a view where the dim has one block, else a copy."""
    if not placement.is_shard or parts == 1:
        return tensor
    dim, outer = placement.dim, placement.blocks(batch)
    inner = tensor.size(dim) // outer
    share = local_size(inner, parts)
    if outer == 1:
        return tensor.narrow(dim, index * share, share)
    split = tensor.unflatten(dim, (outer, inner)).narrow(dim + 1, index * share, share)
    return split.flatten(dim, dim + 1)


def join_shards(shares: Sequence[Tensor], placement: Placement, batch: int = 1) -> Tensor:
    """The whole tensor from every rank's share: the inverse of :func:`take_shard`."""
    import torch

    if not placement.is_shard or len(shares) == 1:
        return shares[0]
    dim, outer = placement.dim, placement.blocks(batch)
    if outer == 1:
        return torch.cat(tuple(shares), dim)
    blocks = [share.unflatten(dim, (outer, share.size(dim) // outer)) for share in shares]
    return torch.cat(blocks, dim + 1).flatten(dim, dim + 1)
