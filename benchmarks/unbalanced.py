"""Step times of planned cuts against the cut that people write by hand, equal numbers of layers on each stage.

    python benchmarks/unbalanced.py [--ranks 2] [--rounds 10] [--only NAME] [--json]

Models whose layers cost unlike amounts: a large vocabulary head, a VGG-16, a stack of LSTM layers as in GNMT, and a
ResNet-50, all narrow enough for steps of less than a second or so. Both programs run 1F1B with the same microbatches in
the same processes on gloo, one step of the one and one of the other in turn, so that what else the machine does falls
on both. A speedup is hand-written over planned seconds of one round; run ``autopart calibrate`` first, or the cuts are
planned with presets.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from steps import seconds_of, step_of
from torch import Tensor, nn
from torch.nn import functional as F

from autopart.analysis import Analysis, analyze
from autopart.cluster import Cluster
from autopart.local_job import run_local_job
from autopart.passes import graph as graphs
from autopart.plan import Plan, StagePlan
from autopart.planner import make_plan
from autopart.realize import emit
from autopart.tracing import capture

MICROBATCHES, SAMPLES = 4, 16


class Layered(nn.Module):
    """Layers one after the other, and a cross entropy of what the last one returns, classes first or last."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"loss": F.cross_entropy(x.flatten(0, -2), target.flatten())}


class Feedforward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Recurrent(nn.Module):
    """A layer of LSTM cells over the sequence, added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, 4 * width, bias=False), nn.Linear(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        entering = self.outer(x)
        hidden = cell = torch.zeros_like(x[:, 0])
        found = []
        for step in range(x.shape[1]):
            keep, write, show, new = (entering[:, step] + self.inner(hidden)).chunk(4, -1)
            cell = torch.sigmoid(keep) * cell + torch.sigmoid(write) * torch.tanh(new)
            hidden = torch.sigmoid(show) * torch.tanh(cell)
            found.append(hidden)
        return x + torch.stack(found, 1)


class Bottleneck(nn.Module):
    def __init__(self, enter: int, width: int, stride: int) -> None:
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(enter, width, 1), nn.Conv2d(width, 4 * width, 1)
        self.conv = nn.Conv2d(width, width, 3, stride, 1)
        self.norm1, self.norm2 = nn.GroupNorm(4, width), nn.GroupNorm(4, width)
        self.skip = nn.Conv2d(enter, 4 * width, 1, stride) if stride > 1 or enter != 4 * width else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm2(self.conv(F.relu(self.norm1(self.reduce(x))))))
        return F.relu(self.expand(y) + self.skip(x))


def large_head() -> nn.Module:
    return Layered([nn.Embedding(16384, 128), *(Feedforward(128) for _ in range(6)), nn.Linear(128, 16384)])


def vgg16() -> nn.Module:
    widths, layers, enter = [(16, 2), (32, 2), (64, 3), (128, 3), (128, 3)], [], 3
    for width, count in widths:
        for _ in range(count):
            layers.append(nn.Sequential(nn.Conv2d(enter, width, 3, padding=1), nn.ReLU()))
            enter = width
        layers[-1].append(nn.MaxPool2d(2))
    head = [nn.Sequential(nn.Flatten(), nn.Linear(512, 512), nn.ReLU()), nn.Sequential(nn.Linear(512, 512), nn.ReLU())]
    return Layered([*layers, *head, nn.Linear(512, 100)])


def gnmt() -> nn.Module:
    return Layered([nn.Embedding(8192, 128), *(Recurrent(128) for _ in range(6)), nn.Linear(128, 8192)])


def resnet50() -> nn.Module:
    layers: list[nn.Module] = [nn.Sequential(nn.Conv2d(3, 16, 7, 2, 3), nn.ReLU(), nn.MaxPool2d(2))]
    enter = 16
    for width, count in ((8, 3), (16, 4), (32, 6), (64, 3)):
        for number in range(count):
            layers.append(Bottleneck(enter, width, 2 if number == 0 and width > 8 else 1))
            enter = 4 * width
    return Layered([*layers, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(enter, 100))])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "large head": large_head,
    "VGG-16": vgg16,
    "GNMT": gnmt,
    "ResNet-50": resnet50,
}


def batch(name: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    samples = MICROBATCHES * SAMPLES
    if name in ("large head", "GNMT"):
        length = 16
        tokens = torch.randint(8192, (2, samples, length), generator=generator)
        return tokens[0], tokens[1]
    return torch.randn(samples, 3, 64, 64, generator=generator), torch.randint(100, (samples,), generator=generator)


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def by_hand(analysis: Analysis, program: Any, model: nn.Module, planned: Plan) -> Plan:
    """As many of the model's layers on each stage."""
    stages, count = len(planned.stages), len(model.layers)  # type: ignore[arg-type]
    paths = {node: graphs.module_path(node) for node in analysis.block_of}
    starts = [0]
    for stage in range(1, stages):
        prefix = f"layers.{round(count * stage / stages)}"
        starts.append(min(b for n, b in analysis.block_of.items() if f"{paths[n]}.".startswith(f"{prefix}.")))
    ends = [*starts[1:], len(analysis.blocks)]
    spans = zip(starts, ends, strict=True)
    chosen = tuple(StagePlan((stage,), (("dp", 1),), span) for stage, span in enumerate(spans))
    size = MICROBATCHES * SAMPLES
    return Plan(program.fingerprint, planned.model, "local", size, "float32", "1f1b", MICROBATCHES, chosen)


def compare(directory: str, name: str, rounds: int) -> list[tuple[float, float]]:
    """On each rank the seconds of (hand-written, planned) by round; the first round is not counted."""
    steps = [step_of(Path(directory) / kind, model_of(name), *batch(name)) for kind in ("hand", "planned")]
    losses = [step() for step in steps]
    if abs(losses[0] - losses[1]) > 1e-4 * abs(losses[0]):
        raise AssertionError(f"{name}: the losses differ, {losses}")
    pairs = []
    for number in range(rounds):
        order = (0, 1) if number % 2 else (1, 0)
        taken = {index: seconds_of(steps[index]) for index in order}
        pairs.append((taken[0], taken[1]))
    return pairs


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", default="", help="a part of the model's name")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    rows = {}
    for name in MODELS:
        if options.only not in name:
            continue
        model, inputs = model_of(name), batch(name)
        program = capture(model, inputs, check_eval=False)
        analysis = analyze(program)
        limits = {"pp": options.ranks, "dp": 1, "tp": 1, "microbatches": MICROBATCHES, "recompute": "none"}
        plan = make_plan(program, Cluster.local(options.ranks), analysis=analysis, **limits)
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as job:
            emit(program, plan, Path(folder) / "planned")
            emit(program, by_hand(analysis, program, model, plan), Path(folder) / "hand")
            keywords = {"directory": folder, "name": name, "rounds": options.rounds}
            pairs = run_local_job(f"{Path(__file__).stem}:compare", options.ranks, keywords, Path(job))[0]
        speedups = sorted(hand / planned for hand, planned in pairs)
        rows[name] = {
            "hand_s": statistics.median(hand for hand, _ in pairs),
            "planned_s": statistics.median(planned for _, planned in pairs),
            "min": speedups[0],
            "median": statistics.median(speedups),
            "max": speedups[-1],
        }
        if not options.json:
            row = rows[name]
            print(f"{name:12} by hand {row['hand_s'] * 1e3:7.1f} ms  planned {row['planned_s'] * 1e3:7.1f} ms", end="")
            print(f"  speedup {row['min']:.2f} {row['median']:.2f} {row['max']:.2f} (min median max)", flush=True)
    if options.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
