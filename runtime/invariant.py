"""Dropout whose masks do not depend on the plan.

Whether an element is dropped is a function of the job's seed, the step, the module, the number of its call, and the
element's index in the whole tensor of the whole batch: a counter-based generator (Salmon et al., SC 2011, section 2),
here with the mixing function of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014, figure 16). Each rank computes the
numbers of its own elements alone. So the masks, and with them the losses, are the same under any plan; the program of
a plan for one process is the reference.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from autopart.runtime.placement import REPLICATE, Placement, Placements, take_share

_BITS = 53


@dataclass(frozen=True, slots=True)
class Share:
    """The samples that a rank computes with: ``count`` from ``first`` on, of ``batch`` in the whole step.

    in_copies: all replicas compute with these.
    """

    first: int = 0
    count: int = 1
    batch: int = 1
    in_copies: bool = False


@dataclass(frozen=True, slots=True)
class Draw:
    """One call's random numbers, and which elements of the whole tensor a rank's part holds.

    key: different for every call. placements: on axes of ``sizes`` ranks, where this one has ``indices``.
    samples: the dim that holds the batch, and the blocks outside of it; None if there is none. share: which samples.
    """

    key: int
    placements: Placements
    sizes: tuple[int, ...]
    indices: tuple[int, ...]
    samples: Placement | None
    share: Share

    def positions(self, dim: int, size: int) -> tuple[Tensor, int]:
        """The indices in the whole dim of a part with ``size`` of them, and the whole dim's size."""
        own = tuple(REPLICATE if not p.is_shard or p.dim != dim else _on_first(p) for p in self.placements)
        parts = math.prod(parts for p, parts in zip(own, self.sizes, strict=True) if p.is_shard)
        whole, share = size * parts, self.share
        found = torch.arange(whole)
        if self.samples is not None and self.samples.dim == dim:
            outer = self.samples.outer
            each = whole // (outer * share.count)
            whole = outer * share.batch * each
            found = torch.arange(whole).view(outer, -1)
            found = found[:, share.first * each : (share.first + share.count) * each].flatten()
        found = take_share(found, own, self.sizes, self.indices, share.count)
        assert len(found) == size, f"{len(found)} positions for {size} elements of dim {dim}"
        return found, whole

    def dropped(self, shape: torch.Size, p: float, device: torch.device) -> Tensor:
        """Which elements of a rank's part of that shape are dropped with probability p."""
        number = torch.zeros((), dtype=torch.int64, device=device)
        for dim, size in enumerate(shape):
            found, whole = self.positions(dim, size)
            column = found.to(device).view(-1, *[1] * (len(shape) - dim - 1))
            number = number * whole + column
        return (_mixed(number, self.key) >> (64 - _BITS)) & ((1 << _BITS) - 1) < int(p * (1 << _BITS))


def _on_first(placement: Placement) -> Placement:
    return Placement(placement.kind, 0, placement.outer, placement.batched)


def _signed(number: int) -> int:
    """The 64-bit integer that has the same bits."""
    number &= (1 << 64) - 1
    return number - (1 << 64) if number >> 63 else number


def _mixed(number: Tensor, key: int) -> Tensor:
    """64 random bits for each number, in one new tensor and one temporary; sums and products wrap around."""
    x = number * _signed(0x9E3779B97F4A7C15)
    x += _signed(key)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, None)):
        x ^= (x >> shift) & ((1 << (64 - shift)) - 1)
        if factor is not None:
            x *= _signed(factor)
    return x


def dropout(x: Tensor, p: float, training: bool, draw: Draw) -> Tensor:
    """``F.dropout`` with the draw's mask."""
    if not training or p == 0.0:
        return x
    if p == 1.0:
        return x * 0.0
    return x.masked_fill(draw.dropped(x.shape, p, x.device), 0.0) * (1.0 / (1.0 - p))


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    training: bool,
    draw: Draw,
) -> Tensor:
    """``F.scaled_dot_product_attention``; in training its weights ``[*b, h, q, k]`` are whole, for a mask of their own.

    Fused kernels draw their own numbers, so this one computes softmax and products one after the other. Where queries
    are sharded, a causal mask counts this rank's rows as the whole tensor's; keys are whole.
    """
    rows, keys = query.size(-2), key.size(-2)
    numbers, whole = draw.positions(query.dim() - 2, rows)
    if is_causal and (training or whole > rows):
        attn_mask, is_causal = numbers.to(query.device)[:, None] >= torch.arange(keys, device=query.device), False
    if not training:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        key, value = (item.repeat_interleave(query.size(-3) // item.size(-3), -3) for item in (key, value))
    scores = query @ key.transpose(-2, -1) * (query.size(-1) ** -0.5 if scale is None else scale)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    # a row that may see nothing gets zeros, as torch's own attention gives it
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)
    return dropout(weights, dropout_p, True, draw) @ value
