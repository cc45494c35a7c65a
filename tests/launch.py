"""Runs a function on a few local processes that form one gloo job, and fails with the child's own traceback.

Processes are kept for the next call with as many of them, and are forked from one that has imported what they need,
because importing it takes seconds.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import itertools
import multiprocessing
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

_MOST_KEPT = 9


class ChildFailure(AssertionError):
    """A process failed; ``failures`` has the traceback of each rank that did, in the order of failing."""

    def __init__(self, failures: dict[int, str]) -> None:
        self.failures = failures
        super().__init__("\n".join(f"--- rank {rank} ---\n{text}" for rank, text in failures.items()))


def launch(function: Callable[..., Any], processes: int, *args: Any, timeout: float = 240.0) -> list[Any]:
    """Runs ``function(*args)`` in each process, with torch.distributed ready; returns what each rank returns.

    ``function`` is a top-level function of an importable module (it is pickled); arguments and results are pickled.
    With one process it runs right here. Raises ChildFailure with the tracebacks when one fails, TimeoutError (naming
    the ranks) when one hangs.
    """
    if processes == 1:
        return [function(*args)]
    job = _jobs.pop(processes, None) or _Job(processes)
    # Before the call: a job that fails is not used again.
    results = job.call(function, args, timeout)
    while _jobs and sum(_jobs) + processes > _MOST_KEPT:
        _jobs.pop(next(iter(_jobs))).stop()
    _jobs[processes] = job
    return results


def run_kept_job(
    function: str, processes: int, arguments: Mapping[str, Any], directory: Path, timeout_s: float = 600.0
) -> list[Any]:
    """As autopart.local_job.run_local_job, in processes that are kept from call to call."""
    return launch(_call, processes, function, dict(arguments), timeout=timeout_s)


def _call(function: str, arguments: dict[str, Any]) -> Any:
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)(**arguments)


@functools.cache
def _forking() -> ForkServerContext:
    """Processes come from one that has loaded :mod:`preloaded`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["preloaded"])
    with pytest.MonkeyPatch.context() as patch:  # where it finds the module, and says nothing where it does not
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        forkserver.ensure_running()
    return context


class _Job:
    """Processes that wait for functions to run."""

    def __init__(self, processes: int) -> None:
        context = _forking()
        self.pipes: list[Connection] = []
        self.children: list[BaseProcess] = []
        # A file, not a port: tests that run side by side never meet.
        store = str(Path(mkdtemp()) / "store")
        for rank in range(processes):
            here, there = context.Pipe()
            child = context.Process(target=_serve, args=(there, rank, processes, store), daemon=True)
            child.start()
            there.close()
            self.pipes.append(here)
            self.children.append(child)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        try:
            for pipe in self.pipes:
                pipe.send_bytes(pickle.dumps((function, args)))
            return _gather(self.pipes, timeout)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for child in self.children:
            child.kill()
            child.join()


_jobs: dict[int, _Job] = {}


@atexit.register
def _stop_all() -> None:
    for job in _jobs.values():
        job.stop()


def _serve(pipe: Connection, rank: int, processes: int, store: str) -> None:
    import torch.distributed as dist

    assert "preloaded" in sys.modules
    torch.set_num_threads(1)
    gc.freeze()  # what is imported is not gone over again after every call
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(processes))
    for call in itertools.count():
        try:
            request = pipe.recv_bytes()
        except EOFError:
            return
        try:
            # Anew for each call: a group's thread wakes a hundred times a second for as long as it is there.
            dist.init_process_group("gloo", init_method=f"file://{store}{call}", rank=rank, world_size=processes)
            function, args = pickle.loads(request)
            answer = True, function(*args)
        except BaseException:
            pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
            # Without leaving properly: connections close, and peers that wait for this rank fail as well.
            os._exit(1)
        pipe.send_bytes(pickle.dumps(answer))
        del function, args, answer
        gc.collect()  # groups that garbage holds would not end
        dist.destroy_process_group()


def _gather(pipes: list[Connection], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    end = time.monotonic() + timeout
    while waiting:
        ready = wait(list(waiting), max(0.0, end - time.monotonic()))
        if not ready and not failures:
            raise TimeoutError(f"ranks {sorted(waiting.values())} did not finish within {timeout:g} s")
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                good, value = pickle.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                good, value = False, "the process died without a word"
            if good:
                results[rank] = value
            else:
                failures[rank] = value
                end = min(end, time.monotonic() + 10)  # what the others say may tell more
    if failures:
        raise ChildFailure(failures)
    return [results[rank] for rank in range(len(pipes))]
