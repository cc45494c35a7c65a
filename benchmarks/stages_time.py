"""How long the division into stages takes, and how good it is: CPU seconds, gap and nodes of the search.

    python benchmarks/stages_time.py [--only NAME]

Chains of random blocks on 64 devices in a row, alone, with other choices under a memory limit, and with devices of two
kinds; the same chains growing; and a U-Net of about 1,000 ops, planned as a user would, capture and analysis apart.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopart.analysis import analyze
from autopart.cluster import Cluster
from autopart.planner import make_plan
from autopart.positions import Positions
from autopart.solver import stages
from autopart.solver.stages_parts import Block, Choice, Cut, Shape
from autopart.solver.stages_problem import Slot, StageProblem
from autopart.tracing import capture

DEVICES = 64


def chain(
    count: int, devices: int = DEVICES, microbatches: int = 256, *, choices: bool = False, kinds: int = 1
) -> StageProblem:
    """Random blocks on a row of devices, one stage on each; the last of ``kinds`` kinds of devices is slower.

    choices: every block can be recomputed, and three quarters of the memory that the first stage would use is there.
    """
    dice = random.Random(count)
    blocks = []
    for index in range(count):
        forward = dice.uniform(0.5, 1.5) * 1e-3
        size = dice.uniform(0.5, 1.5) * 1e6
        others = (Choice(forward, 3 * forward, size, 0.1 * size, size),) if choices else ()
        blocks.append(Block(f"block {index}", forward, 2 * forward, size, size, size / 2, dice.random() * 1e-4, others))
    cuts = [Cut(), *(Cut(dice.uniform(1, 4) * 1e-5, dice.uniform(1, 4) * 1e-5, 1e4) for _ in range(count - 1)), Cut()]
    flight = tuple(min(microbatches, devices - stage) for stage in range(devices))
    room = 0.75 * (count / devices) * 1e6 * (devices + 1) if choices else math.inf
    shapes = []
    for kind in range(kinds):
        factor = 1.0 + 0.5 * kind / max(kinds - 1, 1)
        slower = tuple(
            Block(
                *(b.name, b.forward_s * factor, b.backward_s * factor),
                *(b.state_bytes, b.activation_bytes, b.transient_bytes, b.step_end_s),
                tuple(Choice(o.forward_s * factor, o.backward_s * factor, size, 0.1 * size, size) for o in b.others),
            )
            for b in blocks
            for size in [b.state_bytes]
        )
        shapes.append(Shape(slower, (tuple(cuts),)))
    slots = tuple(Slot(place, place + 1, place * kinds // devices, room) for place in range(devices))
    sets = tuple((1 << end) - 1 for end in range(count + 1))
    return StageProblem(tuple(shapes), sets, slots, (0,) * (devices + 1), (devices,), microbatches, flight)


def chains() -> Iterator[tuple[str, StageProblem]]:
    yield "100 blocks", chain(100)
    yield "100 blocks, 16 stages", chain(100, 16)
    yield "100 blocks, two kinds of devices", chain(100, kinds=2)
    yield "100 blocks, recomputation under a limit", chain(100, choices=True)
    yield "100 blocks, the same, 16 stages", chain(100, 16, choices=True)
    for count in (200, 400, 800, 1600):
        yield f"{count} blocks", chain(count)
    yield "400 blocks, recomputation under a limit", chain(400, choices=True)


class UNet(nn.Module):
    """``levels`` halvings and doublings of the image with residual blocks between them, joined by skips."""

    def __init__(self, levels: int = 4, blocks: int = 20, width: int = 32) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels)]
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(nn.Sequential(*(Residual(w) for _ in range(blocks))) for w in widths)
        self.narrow = nn.ModuleList(nn.Conv2d(w, 2 * w, 3, 2, 1) for w in widths[:-1])
        self.widen = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in widths[:-1])
        self.join = nn.ModuleList(nn.Conv2d(2 * w, w, 1) for w in widths[:-1])
        self.up = nn.ModuleList(nn.Sequential(*(Residual(w) for _ in range(blocks))) for w in widths[:-1])
        self.leave = nn.Conv2d(width, 3, 1)

    def forward(self, pixels: Tensor, target: Tensor) -> dict[str, Tensor]:
        x = self.enter(pixels)
        kept = []
        for level, down in enumerate(self.down):
            x = down(x)
            if level < len(self.narrow):
                kept.append(x)
                x = self.narrow[level](x)
        for level in reversed(range(len(self.up))):
            x = self.join[level](torch.cat([self.widen[level](x), kept[level]], 1))
            x = self.up[level](x)
        return {"loss": F.mse_loss(self.leave(x), target)}


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, width), nn.GroupNorm(8, width)
        self.conv1, self.conv2 = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(F.silu(self.norm2(self.conv1(F.silu(self.norm1(x))))))


def plan_unet() -> None:
    with torch.device("meta"):
        model, image = UNet(), torch.zeros(64, 3, 128, 128)
    start = time.process_time()
    program = capture(model, (image, image))
    captured = time.process_time()
    analysis = analyze(program)
    analyzed = time.process_time()
    found = Positions.of(analysis)
    print(
        f"U-Net: {len(analysis.block_of)} ops, {len(analysis.blocks)} blocks, {len(found.sets)} positions"
        f"{'' if found.complete else ' of more'}; CPU s of capture {captured - start:.1f}, analysis "
        f"{analyzed - captured:.1f}"
    )
    for limits in ({"pp": 64}, {"pp": 16}, {"tp": 1}, {}):
        start = time.process_time()
        plan = make_plan(program, Cluster.parse("8x8xA100-80GB"), batch=1024, analysis=analysis, **limits)  # type: ignore[arg-type]
        print(
            f"  {limits or 'all'}: {time.process_time() - start:6.1f} CPU s; pp {plan.pp} dp {plan.dp} tp {plan.tp} "
            f"m {plan.microbatches}, gap {plan.gap:.2%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a part of the case's name")
    only = parser.parse_args().only
    for name, problem in chains():
        if only in name:
            start = time.process_time()
            found = stages.solve(problem)
            print(
                f"{name:40} {problem.stages:3} stages {time.process_time() - start:7.2f} CPU s, gap {found.gap:.1e}, "
                f"{found.programs} nodes, {found.method}",
                flush=True,
            )
    if only in "U-Net":
        plan_unet()


if __name__ == "__main__":
    main()
