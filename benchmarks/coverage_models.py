"""Small models in plain torch for ``coverage.py``: what is not a transformer, and losses of other forms.

Each public function is a model with the arguments of one call; its name is the row's. The loss is computed inside.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BATCH = 8
VOCAB = 96
Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


class LSTMStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 32)
        self.lstm = nn.LSTM(32, 32, num_layers=2, batch_first=True)
        self.head = nn.Linear(32, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embed(ids))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def lstm_stack() -> Call:
    return LSTMStack(), (_ids(8), _ids(8)), {}


class GRUTranslator(nn.Module):
    """An encoder's last state, a decoder, and attention over the encoder's outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 32)
        self.encoder = nn.GRU(32, 16, batch_first=True, bidirectional=True)
        self.decoder = nn.GRU(32, 32, batch_first=True)
        self.join = nn.Linear(64, 32)
        self.head = nn.Linear(32, VOCAB)

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        memory, state = self.encoder(self.embed(source))
        hidden, _ = self.decoder(self.embed(target), state.transpose(0, 1).reshape(1, -1, 32))
        weights = torch.softmax(hidden @ memory.transpose(1, 2), -1)
        joined = torch.tanh(self.join(torch.cat([hidden, weights @ memory], -1)))
        return F.cross_entropy(self.head(joined).transpose(1, 2), labels)


def gru_translator() -> Call:
    return GRUTranslator(), (_ids(8), _ids(6), _ids(6)), {}


class VGG(nn.Module):
    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for width in (16, 32, 64):
            for _ in range(2):
                layers += [nn.Conv2d(channels, width, 3, padding=1), *([nn.BatchNorm2d(width)] if norm else [])]
                layers += [nn.ReLU(inplace=True)]
                channels = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d((2, 2))
        self.classifier = nn.Sequential(
            nn.Linear(256, 64), nn.ReLU(True), nn.Dropout(), nn.Linear(64, 64), nn.ReLU(True), nn.Linear(64, 8)
        )

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.classifier(torch.flatten(self.pool(self.features(images)), 1)), labels)


def vgg() -> Call:
    return VGG(), (_images(32), _classes()), {}


def vgg_batch_norm() -> Call:
    return VGG(norm=True), (_images(32), _classes()), {}


class MixerBlock(nn.Module):
    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(patches, 32), nn.GELU(), nn.Linear(32, patches))
        self.channels = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.first(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.second(x))


class MLPMixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 8, 8)
        self.blocks = nn.Sequential(*(MixerBlock(16, 32) for _ in range(2)))
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 8)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.blocks(self.patches(images).flatten(2).transpose(1, 2))
        return F.cross_entropy(self.head(self.norm(x).mean(1)), labels)


def mlp_mixer() -> Call:
    return MLPMixer(), (_images(32), _classes()), {}


class GraphNetwork(nn.Module):
    """Messages along the edges of each sample's own graph, summed at their ends; mean of nodes as the graph's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 32)
        self.messages = nn.ModuleList(nn.Linear(64, 32) for _ in range(2))
        self.updates = nn.ModuleList(nn.GRUCell(32, 32) for _ in range(2))
        self.head = nn.Linear(32, 8)

    def forward(self, nodes: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(nodes)
        source, target = (end.unsqueeze(-1).expand(-1, -1, 32) for end in (edges[..., 0], edges[..., 1]))
        for message, update in zip(self.messages, self.updates, strict=True):
            sent = torch.relu(message(torch.cat([x.gather(1, source), x.gather(1, target)], -1)))
            got = torch.zeros_like(x).scatter_add(1, target, sent)
            x = update(got.flatten(0, 1), x.flatten(0, 1)).view_as(x)
        return F.cross_entropy(self.head(x.mean(1)), labels)


def graph_network() -> Call:
    random = torch.Generator().manual_seed(0)
    edges = torch.randint(10, (BATCH, 24, 2), generator=random)
    return GraphNetwork(), (torch.randn(BATCH, 10, 8, generator=random), edges, _classes()), {}


class TwoLosses(nn.Module):
    """Classes and a reconstruction from one encoder; the sum is trained, and both parts are returned."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16))
        self.decoder = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 64))
        self.head = nn.Linear(16, 8)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        code = self.encoder(x)
        classes = F.cross_entropy(self.head(code), labels)
        rebuilt = F.mse_loss(self.decoder(code), x)
        return {"loss": classes + 0.5 * rebuilt, "classes": classes, "rebuilt": rebuilt}


def two_losses() -> Call:
    return TwoLosses(), (torch.randn(BATCH, 64, generator=torch.Generator().manual_seed(0)), _classes()), {}


class UNet(nn.Module):
    """Skips from the way down to the way up, group norm, transposed convolutions; predicts noise (Ho et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 32))
        self.enter = nn.Conv2d(3, 16, 3, padding=1)
        self.down = nn.ModuleList([_unet_block(16, 16), _unet_block(16, 32)])
        self.shrink = nn.ModuleList([nn.Conv2d(16, 16, 3, 2, 1), nn.Conv2d(32, 32, 3, 2, 1)])
        self.middle = _unet_block(32, 32)
        self.grow = nn.ModuleList([nn.ConvTranspose2d(32, 32, 2, 2), nn.ConvTranspose2d(16, 16, 2, 2)])
        self.up = nn.ModuleList([_unet_block(64, 16), _unet_block(32, 16)])
        self.leave = nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, images: Tensor, times: Tensor, noise: Tensor) -> Tensor:
        angles = times[:, None] * torch.exp(-torch.arange(8, device=times.device) / 2.0)
        step = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        x, skips = self.enter(images), []
        for block, shrink in zip(self.down, self.shrink, strict=True):
            x = block(x)
            skips.append(x)
            x = shrink(x)
        x = self.middle(x + step[:, :, None, None])
        for block, grow in zip(self.up, self.grow, strict=True):
            x = block(torch.cat([grow(x), skips.pop()], 1))
        return F.mse_loss(self.leave(x), noise)


def _unet_block(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(nn.GroupNorm(4, before), nn.SiLU(), nn.Conv2d(before, after, 3, padding=1))


def unet() -> Call:
    random = torch.Generator().manual_seed(1)
    times, noise = torch.rand(BATCH, generator=random), torch.randn(BATCH, 3, 16, 16, generator=random)
    return UNet(), (_images(16), times, noise), {}


class Transformer(nn.Module):
    """torch.nn's own encoder and decoder layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 32)
        self.body = nn.Transformer(32, 4, 2, 2, 64, batch_first=True)
        self.head = nn.Linear(32, VOCAB)

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        hidden = self.body(self.embed(source), self.embed(target), tgt_mask=mask, tgt_is_causal=True)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def torch_transformer() -> Call:
    return Transformer(), (_ids(8), _ids(6), _ids(6)), {}


class VAE(nn.Module):
    """Convolutions, two losses, and noise that is given: two programs draw different samples."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 16, 4, 2, 1), nn.ReLU(), nn.Conv2d(16, 16, 4, 2, 1), nn.ReLU())
        self.code = nn.Linear(16 * 16, 16)
        self.spread = nn.Linear(8, 16 * 16)
        self.decoder = nn.Sequential(nn.ConvTranspose2d(16, 16, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(16, 3, 4, 2, 1))

    def forward(self, images: Tensor, noise: Tensor) -> Tensor:
        mean, log_variance = self.code(self.encoder(images).flatten(1)).chunk(2, -1)
        code = mean + noise * torch.exp(0.5 * log_variance)
        rebuilt = self.decoder(self.spread(code).view(-1, 16, 4, 4))
        divergence = -0.5 * torch.sum(1 + log_variance - mean.square() - log_variance.exp(), -1).mean()
        return F.mse_loss(rebuilt, images) + 1e-3 * divergence


def vae() -> Call:
    return VAE(), (_images(16), torch.randn(BATCH, 8, generator=torch.Generator().manual_seed(1))), {}


class TemporalConvolutions(nn.Module):
    """Dilated causal convolutions over time with residuals (Bai et al. 2018); weight norm as a parametrization."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.embed = nn.Embedding(VOCAB, 32)
        self.layers = nn.ModuleList(norm(nn.Conv1d(32, 32, 3, dilation=2**i)) for i in range(3))
        self.head = nn.Linear(32, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids).transpose(1, 2)
        for index, layer in enumerate(self.layers):
            x = x + torch.relu(layer(F.pad(x, (2 * 2**index, 0))))
        return F.cross_entropy(self.head(x.transpose(1, 2)).flatten(0, 1), labels.flatten())


def temporal_convolutions() -> Call:
    return TemporalConvolutions(), (_ids(16), _ids(16)), {}


class RecommenderDLRM(nn.Module):
    """Tables of categories, bags summed, and products of all pairs (Naumov et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
        self.tables = nn.ModuleList(nn.Embedding(VOCAB, 16) for _ in range(4))
        self.top = nn.Sequential(nn.Linear(16 + 10, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense: Tensor, sparse: Tensor, clicks: Tensor) -> Tensor:
        x = self.bottom(dense)
        rows = torch.stack([x, *(table(sparse[:, i]).sum(1) for i, table in enumerate(self.tables))], 1)
        above = torch.triu_indices(5, 5, offset=1)
        pairs = (rows @ rows.transpose(1, 2))[:, above[0], above[1]]
        return F.binary_cross_entropy_with_logits(self.top(torch.cat([x, pairs], 1)).squeeze(-1), clicks)


def recommender() -> Call:
    random = torch.Generator().manual_seed(2)
    sparse = torch.randint(VOCAB, (BATCH, 4, 3), generator=random)
    clicks = torch.randint(2, (BATCH,), generator=random).float()
    return RecommenderDLRM(), (torch.randn(BATCH, 13, generator=random), sparse, clicks), {}


def _ids(length: int) -> Tensor:
    return torch.randint(VOCAB, (BATCH, length), generator=torch.Generator().manual_seed(length))


def _images(size: int) -> Tensor:
    return torch.randn(BATCH, 3, size, size, generator=torch.Generator().manual_seed(size))


def _classes() -> Tensor:
    return torch.randint(8, (BATCH,), generator=torch.Generator().manual_seed(3))
