"""Two small networks that are no chains: a U-Net with skips, and a two-input network of several branches."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 8


class UNet(nn.Module):
    """Two levels down and up, the ups joined with what was kept on the way down."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(1, WIDTH, 3, padding=1)
        self.down1 = nn.Conv2d(WIDTH, 2 * WIDTH, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(2, 2 * WIDTH)
        self.down2 = nn.Conv2d(2 * WIDTH, 2 * WIDTH, 3, stride=2, padding=1)
        self.up2 = nn.ConvTranspose2d(2 * WIDTH, 2 * WIDTH, 2, stride=2)
        self.up1 = nn.ConvTranspose2d(4 * WIDTH, WIDTH, 2, stride=2)
        self.leave = nn.Conv2d(2 * WIDTH, 1, 1)

    def forward(self, pixels: Tensor, target: Tensor) -> dict[str, Tensor]:
        first = torch.relu(self.enter(pixels))
        second = torch.relu(self.norm(self.down1(first)))
        deepest = torch.relu(self.down2(second))
        up = torch.cat([torch.relu(self.up2(deepest)), second], 1)
        up = torch.cat([torch.relu(self.up1(up)), first], 1)
        return {"loss": F.mse_loss(self.leave(up), target)}


class Branches(nn.Module):
    """Two inputs through branches of their own, a gate between them, and a weight that both ends share."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(WIDTH, WIDTH)
        self.left = nn.Sequential(shared, nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.right = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
        self.gate = nn.Linear(2 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.tail = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = shared.weight

    def forward(self, first: Tensor, second: Tensor, labels: Tensor) -> dict[str, Tensor]:
        left, right = self.left(first), self.right(second)
        gate = torch.sigmoid(self.gate(torch.cat([left, right], -1)))
        x = gate * left + (1 - gate) * right * self.scale
        for layer in self.tail:
            x = x + torch.tanh(layer(x)) * left
        return {"loss": F.cross_entropy(self.head(x) + right, labels)}


def unet() -> tuple[nn.Module, dict[str, Tensor]]:
    """The model and a batch of eight."""
    random = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = UNet().double()
    shape = (8, 1, 8, 8)
    return model, {
        "pixels": torch.randn(shape, generator=random).double(),
        "target": torch.randn(shape, generator=random).double(),
    }


def branches() -> tuple[nn.Module, dict[str, Tensor]]:
    """The model and a batch of eight."""
    random = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Branches().double()
    return model, {
        "first": torch.randn((8, WIDTH), generator=random).double(),
        "second": torch.randn((8, WIDTH), generator=random).double(),
        "labels": torch.randint(WIDTH, (8,), generator=random),
    }
