"""The block of a transformer whose norms come before its attention and its MLP, as published models have it."""

from __future__ import annotations

from torch import Tensor, nn


class Block(nn.Module):
    """[batch, sequence, width] to the same. attention: of so wide a sequence."""

    def __init__(self, width: int, attention: nn.Module) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), attention
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)
