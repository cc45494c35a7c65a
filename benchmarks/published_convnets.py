"""The planner's prices against measured steps of convolutional networks on one GPU: V100 and A100.

    python benchmarks/published_convnets.py [--only TEXT] [--json]

The rows of ``autopart/cost/published/convnets.csv``: ResNet-50, ResNeXt-101 with 32 groups of 4 channels and more, and
two EfficientNets, whose convolutions are depthwise, in float16 and float32. Captured without weights and priced by
``make_plan`` for one device; memory is not asked, as all ran. No constant was fitted to them, but that convolutions in
narrow groups have a rate of their own was seen here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

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

IMAGES = "task=image-classification&num_labels=1000"
NAMED = {
    "resnet50": f"hf:resnet?{IMAGES}",
    "efficientnet-b0": f"hf:efficientnet?{IMAGES}&width_coefficient=1.0&depth_coefficient=1.0&hidden_dim=1280",
    "efficientnet-b4": f"hf:efficientnet?{IMAGES}&width_coefficient=1.4&depth_coefficient=1.8&hidden_dim=1792",
}
GROUPS = 32
BLOCKS = ((3, 128, 256), (4, 256, 512), (23, 512, 1024), (3, 1024, 2048))
"""Of ResNeXt-101, by resolution: how many, their inner and their outer channels."""


class Block(nn.Module):
    def __init__(self, entering: int, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        sizes = ((entering, inner, 1, 1, 1), (inner, inner, 3, stride, GROUPS), (inner, outer, 1, 1, 1))
        self.convolutions = nn.ModuleList(
            nn.Conv2d(a, b, size, step, size // 2, groups=groups, bias=False) for a, b, size, step, groups in sizes
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _, width, *_ in sizes)
        self.past: nn.Module = nn.Identity()
        if entering != outer:
            self.past = nn.Sequential(nn.Conv2d(entering, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x: Tensor) -> Tensor:
        past = self.past(x)
        for at, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            x = norm(convolution(x if at == 0 else functional.relu(x)))
        return functional.relu(x + past)


class ResNeXt(nn.Module):
    """Images [batch, 3, height, width] and labels to the mean cross entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU())
        self.blocks = nn.Sequential(*self._blocks())
        self.head = nn.Linear(BLOCKS[-1][2], 1000)

    @staticmethod
    def _blocks() -> Iterator[Block]:
        widths = [64, *(outer for _, _, outer in BLOCKS)]
        for at, (entering, outer) in enumerate(pairwise(widths)):
            count, inner, _ = BLOCKS[at]
            yield Block(entering, inner, outer, 1 if at == 0 else 2)
            yield from (Block(outer, inner, outer, 1) for _ in range(count - 1))

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = functional.max_pool2d(self.stem(images), 3, 2, 1)
        return functional.cross_entropy(self.head(self.blocks(x).mean((2, 3))), labels)


@dataclass(frozen=True, slots=True)
class Priced:
    """A row."""

    device: str
    model: str
    dtype: str
    batch: int
    measured_s: float
    predicted_s: float


@functools.cache
def analysis_of(model: str, dtype: str, image: int) -> Analysis:
    kind: torch.dtype = getattr(torch, dtype)
    if model in NAMED:
        loaded = load_model(f"{NAMED[model]}&image={image}", meta=True, dtype=kind)
        return analyze(capture(loaded.model, loaded.args, loaded.kwargs, check_eval=False))
    with torch.device("meta"):
        module, images = ResNeXt().to(kind), torch.zeros(2, 3, image, image, dtype=kind)
        labels = torch.zeros(2, dtype=torch.long)
    return analyze(capture(module, (images, labels), {}, check_eval=False))


def priced(row: dict[str, str]) -> Priced:
    batch, analysis = int(row["batch"]), analysis_of(row["model"], row["dtype"], int(row["image"]))
    cluster = Change(memory=4.0).applied(Cluster.parse(f"1x{row['device']}"))
    plan = make_plan(analysis.program, cluster, analysis=analysis, batch=batch, microbatches=1, recompute="none")
    measured = batch / float(row["images_per_s"])
    return Priced(row["device"], row["model"], row["dtype"], batch, measured, plan.step_time_s)


def report(rows: list[Priced]) -> None:
    published_rows.table_of_steps(rows, ("device", "model", "dtype", "batch"))


def main() -> None:
    options = published_rows.parser(__doc__, "device, model and dtype").parse_args()
    rows = [
        priced(row)
        for row in read_table("convnets")
        if options.only in f"{row['device']} {row['model']} {row['dtype']}"
    ]
    published_rows.show(rows, options.json, report)


if __name__ == "__main__":
    main()
