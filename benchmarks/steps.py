"""Steps of emitted programs that are timed on all ranks together."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def seconds_of(step: Callable[[], Any]) -> float:
    """Seconds until the last rank is done."""
    dist.barrier()
    start = time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - start
