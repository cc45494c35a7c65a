"""Throughput, utilisation, idle time and memory of a training loop, step by step.

meter = autopart.Meter(model, progress=bar, json_lines="steps.jsonl", tensorboard="runs")
for batch in loader:
    loss = model(**batch).loss
    ...
    meter.step(loss=loss)
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopart.runtime.errors import InputError, PlanError
from autopart.runtime.files import named
from autopart.runtime.holding import Starting
from autopart.runtime.module import ParallelModule
from autopart.runtime.tally import Tally


class Progress(Protocol):
    """A progress bar as tqdm's."""

    def set_postfix(self, ordered_dict: Mapping[str, object]) -> object: ...


@dataclass(frozen=True, slots=True)
class Reading:
    """What the last ``steps`` steps did, over all ranks.

    step: the number of the last one, counted from 1. seconds: of all of them on rank 0, data loading and the optimizer
    included. samples, tokens: of whole batches; tokens are elements of the first integer input (padding too), or
    samples where there is none. flops: model FLOPs of the products with and between weights and activations, forward
    and backward, without recomputation. utilisation: ``flops / (seconds * peak)`` with the peak of the plan's devices
    (model FLOPs utilisation, PaLM, arXiv 2204.02311); None where the plan does not know them. bubble: of the time from
    a call's first action to its last, on the slowest rank, the mean share in which a rank neither computed nor summed
    gradients; None without a call in training. memory_bytes: the most that any rank has held so far: allocated on
    CUDA, else resident. values: what the script passed, such as the loss.
    """

    step: int
    steps: int
    seconds: float
    samples: int
    tokens: int
    flops: float
    utilisation: float | None
    bubble: float | None
    memory_bytes: int
    values: Mapping[str, float] = field(default_factory=dict, hash=False)

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def to_json_object(self) -> dict[str, float | None]:
        """All figures by name, with those that the script passed."""
        return {
            "step": self.step,
            "seconds": self.seconds,
            "samples": self.samples,
            "tokens": self.tokens,
            "samples_per_s": self.samples_per_s,
            "tokens_per_s": self.tokens_per_s,
            "utilisation": self.utilisation,
            "bubble": self.bubble,
            "memory_bytes": self.memory_bytes,
            **self.values,
        }


class Meter:
    """Measures the steps of a model that autopart runs, and writes them where it is told, on rank 0.

    model: what ``parallelize`` or ``load`` returned. Until it is planned, at its first call, nothing is measured; that
    call counts, planning does not. progress: a bar with ``set_postfix``, as tqdm's. json_lines: a file that gets a line
    for each reading, after those that are there. tensorboard: a folder for ``torch.utils.tensorboard``. every: steps
    between two readings, which take one small collective (and on CUDA wait for the device). clock: seconds of the host.

    All ranks make it and call :meth:`step`. Raises InputError when TensorBoard is not installed, or for another model.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        progress: Progress | None = None,
        json_lines: str | Path | None = None,
        tensorboard: str | Path | None = None,
        every: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if every < 1:
            raise InputError(f"every: at least one step between two readings, not {every}")
        if not isinstance(model, ParallelModule | Starting):
            raise InputError(f"a meter measures what parallelize or load returned, not a {type(model).__name__}")
        self._program: ParallelModule | None = None
        self._tally: Tally | None = None
        self._progress = progress
        self._json_lines = None if json_lines is None else Path(json_lines)
        self._tensorboard = tensorboard
        self._writer: Any = None
        if tensorboard is not None:
            _summary_writer()  # says at once that it is missing
        self._every = every
        self._clock = clock
        self._steps = self._since = 0
        self._start_s = 0.0
        if isinstance(model, Starting) and model.parallel is None:
            model.when_started(lambda: self._attach(model.parallel))
        else:
            self._attach(model.parallel if isinstance(model, Starting) else model)

    def _attach(self, program: ParallelModule | None) -> None:
        assert program is not None
        self._program = program
        self._tally = program.tally = Tally(program.mesh.device, self._clock)
        self._start_s = self._clock()
        if program.mesh.rank == 0 and self._tensorboard is not None:
            self._writer = _summary_writer()(str(self._tensorboard))

    def step(self, **values: float | Tensor) -> Reading | None:
        """Ends a step: after the optimizer's. values: written beside the figures, such as ``loss=loss``.

        Returns the reading every ``every`` steps, else None. Raises PlanError before the model's first call, OSError on
        rank 0 when a file cannot be written.
        """
        if self._program is None or self._tally is None:
            raise PlanError("the model is not planned yet; call it before the meter's first step")
        self._steps += 1
        self._since += 1
        if self._since < self._every:
            return None
        reading = self._read(self._program, self._tally, {name: _number(value) for name, value in values.items()})
        if self._program.mesh.rank == 0:
            self._write(reading)
        self._since = 0
        return reading

    def _read(self, program: ParallelModule, tally: Tally, values: Mapping[str, float]) -> Reading:
        device = program.mesh.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        now = self._clock()
        seconds, self._start_s = now - self._start_s, now
        samples, tokens, flops = tally.samples, tally.tokens, tally.flops
        found = _of_all_ranks([seconds, *tally.take(), float(_peak_bytes(device))], device)
        seconds = found[0][0]
        busy, makespan = sum(rank[1] for rank in found) / len(found), max(rank[2] for rank in found)
        peak = program.manifest.peak_flops
        return Reading(
            self._steps,
            self._since,
            seconds,
            samples,
            tokens,
            flops,
            flops / (seconds * peak) if peak and seconds else None,
            1 - busy / makespan if makespan else None,
            round(max(rank[3] for rank in found)),
            values,
        )

    def _write(self, reading: Reading) -> None:
        found = reading.to_json_object()
        if self._progress is not None:
            self._progress.set_postfix(_short(reading))
        if self._json_lines is not None:
            with named(self._json_lines), self._json_lines.open("a") as file:
                file.write(json.dumps(found) + "\n")
        if self._writer is not None:
            for name, value in found.items():
                if value is not None and name != "step":
                    self._writer.add_scalar(name, value, reading.step)

    def close(self) -> None:
        """Stops measuring, and ends TensorBoard's file."""
        if self._program is not None and self._program.tally is self._tally:
            self._program.tally = None
        if self._writer is not None:
            self._writer.close()


def _number(value: float | Tensor) -> float:
    return float(value.detach()) if isinstance(value, Tensor) else float(value)


def _short(reading: Reading) -> dict[str, str]:
    """For a progress bar."""
    shown = {name: f"{value:.4g}" for name, value in reading.values.items()}
    shown["tokens/s" if reading.tokens != reading.samples else "samples/s"] = f"{reading.tokens_per_s:,.0f}"
    if reading.utilisation is not None:
        shown["mfu"] = f"{reading.utilisation:.1%}"
    if reading.bubble is not None:
        shown["bubble"] = f"{reading.bubble:.0%}"
    shown["memory"] = f"{reading.memory_bytes / 2**30:.2f} GiB"
    return shown


def _of_all_ranks(own: list[float], device: torch.device) -> list[list[float]]:
    """These numbers of every rank, by rank."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [own]
    mine = torch.tensor(own, dtype=torch.float64, device=device)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    return [tensor.tolist() for tensor in gathered]


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise InputError(
            "TensorBoard is not installed: pip install tensorboard, or write json_lines=, which needs nothing"
        ) from error
    return SummaryWriter
