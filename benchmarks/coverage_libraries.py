"""Small models of libraries beside transformers for ``coverage.py``; each function imports the library that it is of.

As in ``coverage_models.py`` a function is a model with the arguments of one call, and its name the row's.
"""

from __future__ import annotations

from typing import Any

import torch
from coverage_models import BATCH, VOCAB, Call
from torch import Tensor, nn
from torch.nn import functional as F


class Denoiser(nn.Module):
    """The loss of a diffusion model: noise is predicted from a noised sample and its time (Ho et al. 2020)."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, sample: Tensor, times: Tensor, noise: Tensor, conditions: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(self.network(sample, times, **conditions).sample, noise)


def _denoiser(network: Any, shape: tuple[int, ...], **conditions: Tensor) -> Call:
    random = torch.Generator().manual_seed(0)
    sample, noise = torch.randn(BATCH, *shape, generator=random), torch.randn(BATCH, *shape, generator=random)
    times = torch.randint(1000, (BATCH,), generator=random)
    return Denoiser(network), (sample, times, noise, conditions), {}


def _prompt(width: int) -> Tensor:
    return torch.randn(BATCH, 6, width, generator=torch.Generator().manual_seed(1))


_SMALL: dict[str, Any] = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 4}


def diffusers_unet_1d() -> Call:
    from diffusers import UNet1DModel

    return _denoiser(UNet1DModel(sample_size=32, extra_in_channels=64), (2, 32))


def diffusers_unet_2d() -> Call:
    from diffusers import UNet2DModel

    down, up = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
    return _denoiser(UNet2DModel(16, down_block_types=down, up_block_types=up, **_SMALL), (3, 16, 16))


def diffusers_unet_2d_condition() -> Call:
    """Stable Diffusion's network: cross-attention to a prompt (Rombach et al. 2022)."""
    from diffusers import UNet2DConditionModel

    down, up = ("CrossAttnDownBlock2D", "DownBlock2D"), ("UpBlock2D", "CrossAttnUpBlock2D")
    network = UNet2DConditionModel(
        16, down_block_types=down, up_block_types=up, cross_attention_dim=24, attention_head_dim=4, **_SMALL
    )
    return _denoiser(network, (4, 16, 16), encoder_hidden_states=_prompt(24))


def diffusers_unet_3d_condition() -> Call:
    from diffusers import UNet3DConditionModel

    down, up = ("CrossAttnDownBlock3D", "DownBlock3D"), ("UpBlock3D", "CrossAttnUpBlock3D")
    network = UNet3DConditionModel(
        8, down_block_types=down, up_block_types=up, cross_attention_dim=24, attention_head_dim=4, **_SMALL
    )
    return _denoiser(network, (4, 3, 8, 8), encoder_hidden_states=_prompt(24))


def diffusers_dit() -> Call:
    """A transformer over patches, modulated by time and class (Peebles and Xie 2023)."""
    from diffusers import DiTTransformer2DModel

    network = DiTTransformer2DModel(4, 8, 4, num_layers=2, norm_num_groups=4, sample_size=8, num_embeds_ada_norm=16)
    classes = torch.randint(16, (BATCH,), generator=torch.Generator().manual_seed(1))
    return _denoiser(network, (4, 8, 8), class_labels=classes)


class Autoencoder(nn.Module):
    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        return F.mse_loss(self.network(images).sample, images)


def diffusers_autoencoder() -> Call:
    from diffusers import AutoencoderKL

    down, up = ("DownEncoderBlock2D",) * 2, ("UpDecoderBlock2D",) * 2
    network = AutoencoderKL(down_block_types=down, up_block_types=up, sample_size=16, **_SMALL)
    images = torch.randn(BATCH, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    return Autoencoder(network), (images,), {}


def _tokens(length: int) -> Tensor:
    return torch.randint(1, VOCAB, (BATCH, length), generator=torch.Generator().manual_seed(length))


def _x_decoder(**options: Any) -> Call:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    layers = Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, **options)
    network = TransformerWrapper(num_tokens=VOCAB, max_seq_len=16, attn_layers=layers)
    return AutoregressiveWrapper(network), (_tokens(16),), {}


def x_transformers_decoder() -> Call:
    return _x_decoder()


def x_transformers_llama() -> Call:
    """Rotary positions, RMS norm, SwiGLU, two heads of keys and values."""
    return _x_decoder(
        rotary_pos_emb=True, use_rmsnorm=True, ff_swish=True, ff_glu=True, attn_kv_heads=2, ff_no_bias=True
    )


def x_transformers_variants() -> Call:
    """Other forms of its parts: ALiBi, talking heads, normalised queries and keys, sandwich norm, gated residuals."""
    return _x_decoder(
        alibi_pos_bias=True, attn_pre_talking_heads=True, attn_qk_norm=True, sandwich_norm=True, gate_residual=True
    )


def x_transformers_encoder_decoder() -> Call:
    from x_transformers import XTransformer

    sides: dict[str, Any] = {}
    for side, length in (("enc", 12), ("dec", 8)):
        sides |= {f"{side}_num_tokens": VOCAB, f"{side}_depth": 2, f"{side}_heads": 4, f"{side}_attn_dim_head": 8}
        sides |= {f"{side}_max_seq_len": length}
    return XTransformer(dim=32, **sides), (_tokens(12), _tokens(8)), {}


class Classifier(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.network(images), labels)


def x_transformers_vit() -> Call:
    from x_transformers import Encoder, ViTransformerWrapper

    layers = Encoder(dim=32, depth=2, heads=4, attn_dim_head=8)
    network = ViTransformerWrapper(image_size=32, patch_size=8, num_classes=8, attn_layers=layers)
    random = torch.Generator().manual_seed(0)
    images, labels = torch.randn(BATCH, 3, 32, 32, generator=random), torch.randint(8, (BATCH,), generator=random)
    return Classifier(network), (images, labels), {}
