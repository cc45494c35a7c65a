"""Seconds of calls, measured on all ranks of a job at once; a GPU's kernels by its own clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

_SPANS = 3
_BUSY = 8192
"""Rows of the square products that keep a GPU busy."""
_MOST_CALLS = 100
"""So many calls of a few kernels each fit into the queue of a GPU, so that the host never waits."""


def ranks() -> int:
    """Processes that measure at once."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def in_job() -> bool:
    """Whether there are others."""
    return ranks() > 1


@dataclass(slots=True)
class Clock:
    """span_s: seconds for which a call is repeated. busy: what a GPU is kept busy with."""

    device: torch.device
    span_s: float
    busy: Tensor | None = None

    def seconds(self, call: Callable[[], object]) -> float:
        """Of one call. All ranks make equally many: collectives demand it, and where ranks share cores the one that
        makes fewer would leave them to the others."""
        call()
        self.synchronize()
        # One call that other work holds up would leave spans of a single call, as disturbed as itself.
        once = min(self._span(call, 1) for _ in range(_SPANS))
        if in_job():
            once = self._least(once)
        count = max(1, round(self.span_s / once)) if once else 1
        spans = []
        for _ in range(_SPANS):
            if in_job():
                dist.barrier()
            spans.append(self._span(call, count))
        return max(median(spans), 1e-9)

    def kernel_seconds(self, call: Callable[[], object]) -> float:
        """Of one call's kernels: on a GPU without waiting for the host."""
        if self.device.type != "cuda":
            return self.seconds(call)
        call()
        self.synchronize()
        once = self._span(call, 1)
        count = max(1, min(_MOST_CALLS, round(self.span_s / once)))
        spans = []
        for _ in range(_SPANS):
            if in_job():
                dist.barrier()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._keep_busy(2 * count * once)
            start.record()
            for _ in range(count):
                call()
            end.record()
            self.synchronize()
            spans.append(start.elapsed_time(end) / 1e3 / count)
        return max(median(spans), 1e-9)

    def _keep_busy(self, seconds: float) -> None:
        """Starts products that take at least so long."""
        if self.busy is None:
            self.busy = torch.randn(_BUSY, _BUSY, device=self.device, dtype=torch.float16)
            torch.mm(self.busy, self.busy)
            self.synchronize()
        start = time.perf_counter()
        torch.mm(self.busy, self.busy)
        self.synchronize()
        once = time.perf_counter() - start
        for _ in range(1 + int(seconds / once)):
            torch.mm(self.busy, self.busy)

    def _span(self, call: Callable[[], object], count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            call()
        self.synchronize()
        return (time.perf_counter() - start) / count

    def _least(self, seconds: float) -> float:
        found = torch.tensor([seconds], dtype=torch.float64, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MIN)
        return float(found.item())

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
