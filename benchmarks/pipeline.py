"""Step times of emitted pipelines against torch.distributed.pipelining: same model, cut, microbatches and schedule.

    python benchmarks/pipeline.py [--ranks 2] [--rounds 20] [--width 256] [--json]

Both run in the same processes on gloo, one step of the one and one of the other in turn, so that what else the machine
does falls on both. A ratio is that of autopart's seconds to torch's in the same round: of the step, and of the
processors' time that all ranks spend in it. Printed are the median over the rounds and the quarters' bounds.
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
import torch.distributed as dist
from steps import processor_seconds_of, step_of
from torch import Tensor, nn
from torch.nn import functional as F

from autopart.analysis import Analysis, analyze
from autopart.local_job import run_local_job
from autopart.plan import Plan, StagePlan
from autopart.realize import emit
from autopart.runtime.schedule import places_of
from autopart.tracing import capture

LAYERS, LENGTH, MICROBATCHES, SAMPLES = 8, 32, 8, 4
# Our schedule, torch's class, stages on each rank.
PAIRS = (
    ("gpipe", "ScheduleGPipe", 1),
    ("1f1b", "Schedule1F1B", 1),
    ("interleaved", "ScheduleInterleaved1F1B", 2),
    ("zb-v", "ScheduleZBVZeroBubble", 2),
)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Equal residual blocks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(LAYERS))

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"loss": F.mse_loss(x, target)}


def stack(width: int) -> Stack:
    torch.manual_seed(0)
    return Stack(width)


def batch(width: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (MICROBATCHES * SAMPLES, LENGTH, width)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def cut_at_layers(analysis: Analysis, program: Any, schedule: str, stages: int, virtual: int) -> Plan:
    """As many layers on each stage."""
    layers = list(analysis.layers)
    starts = [0, *(layers.index(f"layers.{LAYERS * stage // stages}") for stage in range(1, stages))]
    ends = [*starts[1:], len(analysis.blocks)]
    places = places_of(schedule, stages, virtual)
    chosen = tuple(
        StagePlan((place,), (("dp", 1),), span)
        for place, span in zip(places, zip(starts, ends, strict=True), strict=True)
    )
    return Plan(
        program.fingerprint, "stack", "local", MICROBATCHES * SAMPLES, "float32", schedule, MICROBATCHES, chosen
    )


Cost = tuple[float, float]
"""Seconds of a step, and seconds of all processors in it."""


def compare(directory: str, width: int, rounds: int) -> dict[str, list[tuple[Cost, Cost]]]:
    """On each rank: for each schedule the costs of (autopart, torch) by round."""
    results = {}
    for name, other, virtual in PAIRS:
        ours = step_of(Path(directory) / name, stack(width), *batch(width))
        theirs = _theirs(name, other, virtual, width)
        first, second = ours(), theirs()
        if second is not None and abs(first - second) > 1e-4 * abs(second):
            raise AssertionError(f"{name}: the losses differ, {first} and {second}")
        pairs = []
        for number in range(rounds):
            order = (ours, theirs) if number % 2 else (theirs, ours)
            taken = {step: processor_seconds_of(step) for step in order}
            pairs.append((taken[ours], taken[theirs]))
        results[name] = pairs
    return results


def _theirs(name: str, other: str, virtual: int, width: int) -> Callable[[], float | None]:
    from torch.distributed import pipelining
    from torch.distributed.pipelining import schedules

    rank, ranks = dist.get_rank(), dist.get_world_size()
    stages = ranks * virtual
    whole = stack(width)
    own = [stage for stage, place in enumerate(places_of(name, stages, virtual)) if place == rank]
    modules = [
        nn.Sequential(*list(whole.layers)[LAYERS * stage // stages : LAYERS * (stage + 1) // stages]) for stage in own
    ]
    device = torch.device("cpu")
    made = [pipelining.PipelineStage(m, stage, stages, device) for m, stage in zip(modules, own, strict=True)]
    schedule: Any = getattr(schedules, other)(made if virtual > 1 else made[0], MICROBATCHES, loss_fn=F.mse_loss)
    x, target = batch(width)
    has_first, has_last = 0 in own, stages - 1 in own

    def step() -> float | None:
        for module in modules:
            module.zero_grad()
        losses: list[Tensor] = []
        schedule.step(*((x,) if has_first else ()), **({"target": target, "losses": losses} if has_last else {}))
        return float(torch.stack(losses).mean()) if losses else None

    return step


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    x, target = batch(options.width)
    program = capture(stack(options.width), (), {"x": x, "target": target}, check_eval=False)
    analysis = analyze(program)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as job:
        for name, _, virtual in PAIRS:
            emit(
                program,
                cut_at_layers(analysis, program, name, options.ranks * virtual, virtual),
                Path(folder) / name,
            )
        keywords = {"directory": folder, "width": options.width, "rounds": options.rounds}
        found = run_local_job(f"{Path(__file__).stem}:compare", options.ranks, keywords, Path(job))[0]
    rows = {name: _row(pairs) for name, pairs in found.items()}
    if options.json:
        print(json.dumps(rows))
        return
    print(f"{options.ranks} ranks, {MICROBATCHES} microbatches of {SAMPLES} x {LENGTH} x {options.width}")
    for name, row in rows.items():
        print(f"{name:12} autopart {row['autopart_s'] * 1e3:8.1f} ms   torch {row['torch_s'] * 1e3:8.1f} ms", end="")
        for kind in ("ratio", "processor_ratio"):
            print("   {} {:.3f} ({:.3f} to {:.3f})".format(kind.replace("_", " "), *row[kind]), end="")
        print()


def _row(pairs: Sequence[tuple[Cost, Cost]]) -> dict[str, Any]:
    """Medians of the seconds; of the ratios median and quarters' bounds."""

    def ratios(kind: int) -> list[float]:
        first, middle, last = statistics.quantiles([ours[kind] / theirs[kind] for ours, theirs in pairs], n=4)
        return [middle, first, last]

    return {
        "autopart_s": statistics.median(ours for (ours, _), _ in pairs),
        "torch_s": statistics.median(theirs for _, (theirs, _) in pairs),
        "ratio": ratios(0),
        "processor_ratio": ratios(1),
    }


if __name__ == "__main__":
    main()
