"""Ranks that torchrun has started again find each other, whatever earlier starts left in the store."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from autopart.runtime.errors import ClusterError
from autopart.runtime.restarts import agree

SOON, AT_ONCE = timedelta(seconds=20), timedelta(seconds=0.2)


def names(store: Store, *ranks: int) -> set[str]:
    """What ranks of a job of three agree on, which come in this order."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return {future.result() for future in [pool.submit(agree, store, rank, 3, SOON) for rank in ranks]}


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)], ids=str)
def test_each_start_has_a_name_of_its_own(order: tuple[int, ...]) -> None:
    store = HashStore()
    found = [names(store, *order) for _ in range(3)]
    assert [len(each) for each in found] == [1, 1, 1]
    assert len(set[str]().union(*found)) == 3


def test_starts_that_some_ranks_never_reached_are_passed_over() -> None:
    store = HashStore()
    for lone in (1, 0):
        with pytest.raises(ClusterError, match="did not connect in time"):
            agree(store, lone, 3, AT_ONCE)
    assert len(names(store, 2, 1, 0)) == 1


SCRIPT = """
import os, signal, sys, torch, autopart
model = autopart.parallelize(torch.nn.Linear(4, 4), loss_fn=torch.nn.functional.mse_loss, dp=2, verbose=False)
loss = model(torch.ones(4, 4), targets=torch.ones(4, 4)).loss
if os.environ["TORCHELASTIC_RESTART_COUNT"] != "2" and os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
loss.backward()
model(torch.ones(4, 4), targets=torch.ones(4, 4))
print("trained", flush=True)
"""


@pytest.mark.slow  # three starts of torchrun's processes
def test_a_job_goes_on_after_restarts(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    run = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            *("--max-restarts=2", str(script)),
        ],
        capture_output=True,
        text=True,
        timeout=180,
        env={k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
    )
    assert run.returncode == 0 and run.stdout.count("trained") == 2, run.stdout + run.stderr
