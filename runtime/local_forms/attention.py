"""Attention on a shard of its queries or of its heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autopart.runtime.mesh import Axis


def query_sharded_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = True,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    axis: Axis,
) -> Tensor:
    """Causal ``F.scaled_dot_product_attention`` of this rank's queries: context parallelism with whole keys.

    query: ``[*b, h, q / n, d]``, the rows from ``index * q / n`` on. key, value: ``[*b, h, k, d]``, whole, k >= q.
    Returns ``[*b, h, q / n, v]``. Nothing is exchanged; the keys' and values' gradients are partial sums. Dropout
    draws this rank's numbers; with masks that do not depend on the plan :mod:`autopart.runtime.invariant` runs instead.

    Keys behind the rank's last row are cut off, which leaves a causal mask aligned to the lower right corner: flash
    kernels know it, and where there is none it costs ``q / n`` by that many keys, one byte each.
    """
    assert is_causal and attn_mask is None and query.size(-2) * axis.size <= key.size(-2)
    rows = query.size(-2)
    last = (axis.index + 1) * rows
    options: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
    if axis.index == 0:
        options["is_causal"] = True
    elif query.is_cuda:
        from torch.nn.attention.bias import causal_lower_right  # loads torch's compiler, which takes seconds

        options["attn_mask"] = causal_lower_right(rows, last)
    else:
        options["attn_mask"] = torch.ones(rows, last, dtype=torch.bool, device=query.device).tril(last - rows)
    return F.scaled_dot_product_attention(query, key[..., :last, :], value[..., :last, :], **options)
