"""Steps of emitted programs that are timed on all ranks together."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopart.api import load


def step_of(directory: Path, model: nn.Module, x: Tensor, target: Tensor) -> Callable[[], float]:
    """A forward and a backward of the program in ``directory``, which returns the loss."""
    parallel = load(directory, model)

    def step() -> float:
        parallel.zero_grad()
        loss = parallel(x, target)["loss"]
        loss.backward()
        return float(loss)

    return step


def processor_seconds_of(step: Callable[[], Any]) -> tuple[float, float]:
    """Seconds as :func:`seconds_of`, and those that all ranks' threads have computed: waiting does not count.

    The second is about the same on a machine that is busy with other things.
    """
    before = time.process_time()
    wall = seconds_of(step)
    spent = torch.tensor([time.process_time() - before], dtype=torch.float64)
    dist.all_reduce(spent)
    return wall, float(spent)


def seconds_of(step: Callable[[], Any]) -> float:
    """Seconds until the last rank is done."""
    dist.barrier()
    start = time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - start
