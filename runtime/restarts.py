"""Which start of a job this is, where torchrun may start its processes again (``--max-restarts``).

torchrun keeps one store over all starts, and torch.distributed looks up under the same keys there where its peers
listen: a process that was started again then finds addresses of processes that are gone, and fails, or waits. So ranks
agree on a name for their start, under which they keep all else. Restarts are not counted alike on all hosts, so the
name is rank 0's: it is published, and each rank that reads it sends word. Only who gets an answer to its own word has
the name of this start; what an earlier one has left in the store answers others' words.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from autopart.runtime.errors import ClusterError

_LEADER = "autopart/start"
_WAIT_S = 0.05


def restartable() -> bool:
    """Whether torchrun keeps the store and may start the processes again."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ.get(
        "TORCHELASTIC_MAX_RESTARTS", "0"
    ) not in ("", "0")


def store_of_this_start(timeout: timedelta) -> Store:
    """The job's store, under the name of this start. Raises ClusterError when ranks do not come in time."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, is_master=False, timeout=timeout)
    name = agree(store, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), timeout)
    return PrefixStore(name, store)


def agree(store: Store, rank: int, ranks: int, timeout: timedelta) -> str:
    """A name that all ranks of this start return, and those of no other. Raises ClusterError after ``timeout``."""
    word = uuid.uuid4().hex
    end = time.monotonic() + timeout.total_seconds()
    if rank == 0:
        store.set(_LEADER, word)
        for other in range(1, ranks):
            _await(store, f"{word}/said/{other}", end, f"rank {other}")
            store.set(f"{word}/answered/{store.get(f'{word}/said/{other}').decode()}", "")
        return word
    while True:
        _await(store, _LEADER, end, "rank 0")
        name = store.get(_LEADER).decode()
        store.set(f"{name}/said/{rank}", word)
        while not store.check([f"{name}/answered/{word}"]):
            _pause(end, "rank 0")
            if store.get(_LEADER).decode() != name:
                break
        else:
            return name


def _await(store: Store, key: str, end: float, whom: str) -> None:
    while not store.check([key]):
        _pause(end, whom)


def _pause(end: float, whom: str) -> None:
    if time.monotonic() > end:
        raise ClusterError(f"{whom} did not connect in time: its own message, or torchrun's, says why")
    time.sleep(_WAIT_S)
