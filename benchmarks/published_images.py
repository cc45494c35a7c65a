"""The planner's prices against measured steps of image models in mixed precision on one RTX 3090.

    python benchmarks/published_images.py [--only TEXT] [--json]

The rows of ``autopart/cost/published/timm_images.csv``: ViTs, ResNets, ConvNeXts and Swins under autocast to float16,
captured so and priced by ``make_plan`` for one device, with SGD; memory is not asked, as all ran. Nothing was fitted to
them. The ViT is written out here, as timm has one product for queries, keys and values: under autocast each product
converts its input anew, so that transformers' three take longer. The others are transformers' own,
with attention in single ops, as it was then.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

import published_rows
from autopart.analysis import Analysis, analyze
from autopart.cluster import Cluster
from autopart.cost.published import read_table
from autopart.models import load_model
from autopart.planner import make_plan
from autopart.tracing import capture
from autopart.what_if import Change
from pre_norm import Block

TABLE = "timm_images"
CLASSES = 1000
VITS = {"tiny": (192, 12, 3), "small": (384, 12, 6), "base": (768, 12, 12), "large": (1024, 24, 16)}
"""Width, layers and heads."""
BASIC = "layer_type=basic&hidden_sizes=[64,128,256,512]"
SWIN = "drop_path_rate=0&attn_implementation=eager"
NAMED = {
    "resnet-18": f"resnet?{BASIC}&depths=[2,2,2,2]",
    "resnet-34": f"resnet?{BASIC}&depths=[3,4,6,3]",
    "resnet-50": "resnet?depths=[3,4,6,3]",
    "resnet-101": "resnet?depths=[3,4,23,3]",
    "resnet-152": "resnet?depths=[3,8,36,3]",
    "convnext-tiny": "convnext?depths=[3,3,9,3]&hidden_sizes=[96,192,384,768]",
    "convnext-small": "convnext?depths=[3,3,27,3]&hidden_sizes=[96,192,384,768]",
    "convnext-base": "convnext?depths=[3,3,27,3]&hidden_sizes=[128,256,512,1024]",
    "swin-tiny": f"swin?embed_dim=96&depths=[2,2,6,2]&num_heads=[3,6,12,24]&{SWIN}",
    "swin-small": f"swin?embed_dim=96&depths=[2,2,18,2]&num_heads=[3,6,12,24]&{SWIN}",
    "swin-base": f"swin?embed_dim=128&depths=[2,2,18,2]&num_heads=[4,8,16,32]&{SWIN}",
}


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (query @ key.transpose(-2, -1) * self.scale).softmax(-1)
        return self.out((scores @ value).transpose(1, 2).flatten(2))


class ViT(nn.Module):
    """Images [batch, 3, image, image] and labels to the mean cross entropy."""

    def __init__(self, width: int, layers: int, heads: int, patch: int, image: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, (image // patch) ** 2 + 1, width))
        self.blocks = nn.Sequential(*(Block(width, Attention(width, heads)) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.first.expand(x.shape[0], -1, -1), x), 1) + self.positions
        return functional.cross_entropy(self.head(self.norm(self.blocks(x))[:, 0]), labels)


@dataclass(frozen=True, slots=True)
class Priced:
    """A row."""

    device: str
    model: str
    image: int
    batch: int
    measured_s: float
    predicted_s: float


@functools.cache
def analysis_of(model: str, image: int) -> Analysis:
    family, size, *patch = model.split("-")
    if family == "vit":
        module: nn.Module = ViT(*VITS[size], int(patch[0]), image)
        inputs = torch.zeros(2, 3, image, image), torch.zeros(2, dtype=torch.long)
        return analyze(capture(module, inputs, {}, check_eval=False, precision="fp16-mixed"))
    loaded = load_model(f"hf:{NAMED[model]}&task=image-classification&num_labels={CLASSES}&image={image}")
    return analyze(capture(loaded.model, loaded.args, loaded.kwargs, check_eval=False, precision="fp16-mixed"))


def priced(row: dict[str, str]) -> Priced:
    image, batch = int(row["image"]), int(row["batch"])
    analysis = analysis_of(row["model"], image)
    plan = make_plan(
        analysis.program,
        Change(memory=9.0).applied(Cluster.parse(f"1x{row['device']}")),
        analysis=analysis,
        batch=batch,
        microbatches=1,
        recompute="none",
        optimizer="sgd",
    )
    measured = batch / float(row["images_per_s"])
    return Priced(row["device"], row["model"], image, batch, measured, plan.step_time_s)


def report(rows: list[Priced]) -> None:
    published_rows.table_of_steps(rows, ("device", "model", "image", "batch"))


def main() -> None:
    options = published_rows.parser(__doc__, "device and model").parse_args()
    rows = [priced(row) for row in read_table(TABLE) if options.only in f"{row['device']} {row['model']}"]
    published_rows.show(rows, options.json, report)


if __name__ == "__main__":
    main()
