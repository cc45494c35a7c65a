"""A job of local processes that talk over gloo: started, watched, and ended together.

Each process runs one function of an importable module. The processes find each other through a file, so that jobs that
run side by side never meet, and no port has to be free.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from autopart.runtime.errors import AutopartError

# After one process failed the others are given this long to say what happened to them.
_GRACE_S = 3.0
_POLL_S = 0.05


class JobError(AutopartError):
    """A process of a local job failed or hung; ``details`` has what each failing rank said, tracebacks included."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


def run_local_job(
    function: str, processes: int, arguments: Mapping[str, Any], directory: Path, timeout_s: float = 600.0
) -> list[Any]:
    """Runs ``function(**arguments)`` in every process of a gloo job; returns what each rank returns.

    function: ``module:name``. arguments and results are JSON values; larger things go through files. directory: an
    existing folder for the job's own files. timeout_s: seconds for the whole job.

    Raises JobError, with the failing rank's own traceback, within seconds of the first failure.
    """
    job = {"function": function, "arguments": dict(arguments), "processes": processes, "timeout_s": timeout_s}
    (directory / "job.json").write_text(json.dumps(job))
    for path in (directory / "store", *(_result(directory, rank) for rank in range(processes))):
        path.unlink(missing_ok=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    environment.setdefault("OMP_NUM_THREADS", "1")
    children: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(processes):
            with _log(directory, rank).open("wb") as log:
                # Its input is a pipe that nothing is written to: it closes when this process ends, however it ends.
                command = [sys.executable, "-m", __name__, str(directory), str(rank)]
                child = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, env=environment
                )
                children.append(child)
        failed = _watch(children, timeout_s)
    finally:
        for child in children:
            child.kill()
            child.wait()
            if child.stdin is not None:
                child.stdin.close()
    if failed is None:
        late = [rank for rank in range(processes) if not _result(directory, rank).exists()]
        raise JobError(
            f"ranks {late} did not finish within {timeout_s:g} s; allow more time, or make the model smaller"
        )
    if failed:
        raise _failure(directory, failed)
    return [json.loads(_result(directory, rank).read_text()) for rank in range(processes)]


def _watch(children: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> list[int] | None:
    """Waits for all; returns the ranks that failed, in the order of failing; None when some did not finish in time."""
    failed: list[int] = []
    end = time.monotonic() + timeout_s
    while True:
        codes = [child.poll() for child in children]
        for rank, code in enumerate(codes):
            if code and rank not in failed:
                end = end if failed else min(end, time.monotonic() + _GRACE_S)
                failed.append(rank)
        if all(code is not None for code in codes):
            return failed
        if time.monotonic() > end:
            return failed or None
        time.sleep(_POLL_S)


def _failure(directory: Path, failed: Sequence[int]) -> JobError:
    """One line about the first cause, and everything that the failing ranks said."""
    said = {rank: _log(directory, rank).read_text(errors="replace").strip() for rank in failed}
    details = "\n".join(f"--- rank {rank} ---\n{text}" for rank, text in said.items())
    # A rank that only lost the connection to another one is no cause; its traceback names the transport.
    lost = ("closed by peer", "Connection reset", "Broken pipe", "lost the connection")
    cause = next((rank for rank in failed if not any(word in said[rank] for word in lost)), failed[0])
    last = said[cause].splitlines()[-1] if said[cause] else "the process died without a word (out of memory?)"
    return JobError(f"rank {cause} failed: {last}", details)


def _log(directory: Path, rank: int) -> Path:
    return directory / f"rank_{rank}.log"


def _result(directory: Path, rank: int) -> Path:
    return directory / f"rank_{rank}.json"


def _serve(directory: Path, rank: int) -> None:
    """What each process does: connect, run the function, write down what it returns."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    job = json.loads((directory / "job.json").read_text())
    processes = int(job["processes"])
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(processes), LOCAL_WORLD_SIZE=str(processes))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if processes > 1:
        store = f"file://{directory / 'store'}"
        timeout = timedelta(seconds=job["timeout_s"])
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=processes, timeout=timeout)
    module, _, name = job["function"].partition(":")
    result = getattr(importlib.import_module(module), name)(**job["arguments"])
    _result(directory, rank).write_text(json.dumps(result))


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def _main() -> None:
    code = 0
    try:
        _serve(Path(sys.argv[1]), int(sys.argv[2]))
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Without leaving properly: connections close at once, and peers that wait for this rank fail as well.
    os._exit(code)


if __name__ == "__main__":
    _main()
