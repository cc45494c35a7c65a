"""A layer of a transformer so small that a GPU waits for its host: what the host takes to start kernels."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class SmallLayer(nn.Module):
    """A layer of a transformer. KERNELS: that :mod:`autopart.passes.traffic` counts of it, forward and backward."""

    WIDTH, HEADS, KERNELS = 64, 4, 37

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(self.WIDTH), nn.LayerNorm(self.WIDTH)
        self.qkv, self.out = nn.Linear(self.WIDTH, 3 * self.WIDTH), nn.Linear(self.WIDTH, self.WIDTH)
        self.up, self.down = nn.Linear(self.WIDTH, 4 * self.WIDTH), nn.Linear(4 * self.WIDTH, self.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, rows, width = x.shape
        parts = self.qkv(self.before(x)).split(width, -1)
        query, key, value = (part.view(batch, rows, self.HEADS, -1).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(batch, rows, width)
        x = x + F.dropout(self.out(mixed), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.between(x)), approximate="tanh")), 0.1)
