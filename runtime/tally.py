"""What a rank's calls in training did: how much work, and when it computed. A meter reads it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from autopart.runtime.manifest import Manifest
from autopart.runtime.schedule import Work
from autopart.runtime.trace import Recorder


class Tally:
    """Counts of the calls since the last :meth:`take`. All ranks make theirs together (see :class:`Recorder`).

    samples, tokens: of the whole batches. flops: model FLOPs of all ranks, forward and backward, recomputation not
    counted. recorder: notes every action. clock: seconds of the host.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self.recorder = Recorder(device, clock)
        self.samples = 0
        self.tokens = 0
        self.flops = 0.0

    def add(self, manifest: Manifest, samples: int) -> None:
        """Counts a batch."""
        self.samples += samples
        self.tokens += samples * (manifest.tokens_per_sample or 1)
        self.flops += samples * manifest.flops_per_sample

    def take(self) -> tuple[float, float]:
        """Seconds that this rank computed or summed gradients, and seconds from its steps' first action to the last.

        Empties the tally.
        """
        busy = 0.0
        ends: dict[int, tuple[float, float]] = {}
        for span in self.recorder.take():
            if span.action.work.is_compute or span.action.work is Work.REDUCE:
                busy += span.end_s - span.start_s
            first, last = ends.get(span.step, (span.start_s, span.end_s))
            ends[span.step] = min(first, span.start_s), max(last, span.end_s)
        self.samples, self.tokens, self.flops = 0, 0, 0.0
        return busy, sum(last - first for first, last in ends.values())
