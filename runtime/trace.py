"""Timelines of a step, executed or predicted, as traces for chrome://tracing and Perfetto (ui.perfetto.dev).

A rank of the pipeline, with its stage or stages, is a process of the trace, numbered by the first stage; the lanes of
its ranks are threads: computing, communication (waits of receives, and
gradient sums) and one lane for what is sent to each peer stage. Events bear the text of their action (``F0.3``,
``RA1.0<0``), in :class:`Recorder`'s traces of real runs as in the simulator's, so that the two can be compared by name.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopart.runtime.files import write_whole
from autopart.runtime.schedule import Action, Work

_COMPUTE, _COMMUNICATION = "compute", "communication"


@dataclass(frozen=True, slots=True)
class Span:
    """An action with its start and end in seconds on the trace's clock. step: the number of the training step."""

    action: Action
    start_s: float
    end_s: float
    step: int = 0

    @property
    def lane(self) -> str:
        if self.action.work.is_compute:
            return _COMPUTE
        return f"send to stage {self.action.peer}" if self.action.work.is_send else _COMMUNICATION


@dataclass(frozen=True, slots=True)
class Timeline:
    """What one rank did. stages: those that it runs."""

    stages: tuple[int, ...]
    rank: int
    spans: tuple[Span, ...]


class Recorder:
    """Notes when a rank's actions start and end, in seconds since all ranks began together.

    On the CPU by the host's clock. On CUDA by events on the stream that computes: an exchange or a sum is then the time
    that the stream spends on it or waits for it, and nothing is synchronised before :meth:`spans` is read.

    Of a send only the call is seen (it does not block); of a receive the wait for it. Built on every rank of the job at
    once: a barrier in here sets the clocks to zero. On the CPU all ranks of a host read one clock and take one zero;
    otherwise clocks differ by the width of that barrier.
    clock: the host's, in seconds.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._device = device
        self._clock = clock
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[Action, int, Any, Any]] = []
        together = dist.is_available() and dist.is_initialized()
        if together:
            # Twice: the first one gathers ranks that come late, the second lets them go with little between them.
            dist.barrier()
            dist.barrier()
        if self._cuda:
            torch.cuda.synchronize(device)
        self._zero = self._now()
        if together and not self._cuda:
            self._zero = _zero_of_host(self._zero)

    @contextmanager
    def span(self, action: Action, step: int) -> Iterator[None]:
        """Notes what happens inside as ``action``; a block that fails is not noted."""
        start = self._now()
        yield
        self._marks.append((action, step, start, self._now()))

    def spans(self) -> tuple[Span, ...]:
        """What was noted, in the order of ending."""
        if self._cuda:
            torch.cuda.synchronize(self._device)
        return tuple(
            Span(action, self._since_zero(start), self._since_zero(end), step)
            for action, step, start, end in self._marks
        )

    def take(self) -> tuple[Span, ...]:
        """What was noted since the last time."""
        found = self.spans()
        self._marks.clear()
        return found

    def _now(self) -> Any:
        if not self._cuda:
            return self._clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _since_zero(self, mark: Any) -> float:
        return float(self._zero.elapsed_time(mark)) / 1e3 if self._cuda else float(mark - self._zero)


def _zero_of_host(own: float) -> float:
    """The zero that the first rank on this host chose. All ranks call it."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (_host(), own))
    return next(zero for host, zero in told if host == _host())


def _host() -> str:
    """What processes that read the same clock have in common; names of hosts need not be unique."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return platform.node()


@dataclass(slots=True)
class _Lanes:
    """Thread numbers: those of a rank's lanes follow each other, computing first."""

    names: list[str] = field(default_factory=lambda: [_COMPUTE, _COMMUNICATION])

    def number(self, rank: int, lane: str) -> int:
        return rank * len(self.names) + self.names.index(lane)


def trace_object(timelines: Sequence[Timeline], label: str = "", first_pid: int = 0) -> dict[str, Any]:
    """The timelines as an object of the trace format; times are microseconds there.

    label: stands before the processes' names. first_pid: the number of the process with stage 0, so that several can be
    joined in one file. A message's send and receive are joined by an arrow where no two ranks run the same stages.
    """
    lanes = _Lanes()
    for line in timelines:
        lanes.names += [name for name in sorted({s.lane for s in line.spans}) if name not in lanes.names]
    events: list[dict[str, Any]] = []
    for stages in sorted({line.stages for line in timelines}):
        title = f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"
        pid = first_pid + stages[0]
        events.append(_metadata("process_name", pid, 0, {"name": f"{label} {title}".strip()}))
        events.append(_metadata("process_sort_index", pid, 0, {"sort_index": pid}))
    arrows = len({line.stages for line in timelines}) == len(timelines)
    for line in timelines:
        pid = first_pid + line.stages[0]
        for lane in dict.fromkeys([_COMPUTE, *sorted({span.lane for span in line.spans})]):
            name = f"rank {line.rank} {lane}"
            events.append(_metadata("thread_name", pid, lanes.number(line.rank, lane), {"name": name}))
        for span in line.spans:
            event = {
                "name": str(span.action),
                "cat": span.action.work.name.lower(),
                "ph": "X",
                "ts": span.start_s * 1e6,
                "dur": (span.end_s - span.start_s) * 1e6,
                "pid": pid,
                "tid": lanes.number(line.rank, span.lane),
                "args": {"rank": line.rank, "step": span.step, "microbatch": span.action.microbatch},
            }
            events.append(event)
            if arrows and span.action.peer is not None:
                events.append(_arrow(span, event, first_pid))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _metadata(name: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "args": args}


def _arrow(span: Span, event: dict[str, Any], first_pid: int) -> dict[str, Any]:
    """One end of the arrow from a send to its receive: at the send's start, and at the receive's end."""
    action = span.action
    ends = (action.stage, action.peer) if action.work.is_send else (action.peer, action.stage)
    kind = "activation" if action.work in (Work.SEND_ACTIVATION, Work.RECV_ACTIVATION) else "gradient"
    at = {"pid": event["pid"], "tid": event["tid"], "cat": "message", "name": kind}
    at["id"] = f"{first_pid}/{span.step}/{kind}/{action.microbatch}/{ends[0]}>{ends[1]}"
    if action.work.is_send:
        return {**at, "ph": "s", "ts": event["ts"]}
    return {**at, "ph": "f", "bp": "e", "ts": event["ts"] + event["dur"]}


def save_trace(path: str | Path, trace: dict[str, Any]) -> None:
    """Writes a trace; a reader finds the whole file or none. Raises OSError."""
    write_whole(path, json.dumps(trace))


def gather_timelines(own: Timeline) -> list[Timeline] | None:
    """All ranks' timelines on rank 0, in the order of ranks; None elsewhere. All ranks call it."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [own]
    first = dist.get_rank() == 0
    found: list[Any] | None = [None] * dist.get_world_size() if first else None
    dist.gather_object(own, found, dst=0)
    return found
