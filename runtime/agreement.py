"""Ranks that agree: on one value, on whether a step worked everywhere, and the random state of each."""

from __future__ import annotations

import hashlib
import random
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist

from autopart.runtime.errors import CheckpointError, InputError
from autopart.runtime.mesh import job_size

Result = TypeVar("Result")

PATIENCE = timedelta(seconds=60)
_MODEL = "the model"
_TOGETHER = (
    "each rank has a part of the model, so all have to make the same calls: train, evaluate, save checkpoints and take "
    "state_dict() on every rank, and write other files on one"
)

# By all ranks' group, as a process may connect anew, and purpose. Torch holds them until the process disconnects.
_groups: WeakKeyDictionary[dist.ProcessGroup, dict[str, ref[dist.ProcessGroup]]] = WeakKeyDictionary()


def checkpoint_group() -> dist.ProcessGroup | None:
    """A group of checkpoints' own, so that a save in the background does not meet the training's collectives."""
    return _group("checkpoints")


def _group(purpose: str) -> dist.ProcessGroup | None:
    """A group of all ranks that talk through the hosts' memory; None where there is one process."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    world = dist.group.WORLD
    assert world is not None
    groups = _groups.setdefault(world, {})
    if purpose not in groups:
        groups[purpose] = ref(dist.new_group(backend="gloo"))
    group = groups[purpose]()
    assert group is not None
    return group


def model_call(training: bool) -> str:
    """What a call of the model is named: others of its ways take other exchanges, for which a rank would wait."""
    way = "evaluation" if not training else "training" if torch.is_grad_enabled() else "training without gradients"
    return f"{_MODEL} in {way}"


def unlike(value: object, told: str, call: str) -> list[str]:
    """What each rank tells, where values differ between ranks; nothing where they are equal. All ranks call it.

    Takes one small exchange between the hosts, so that no device has to be waited for. Raises InputError where ranks
    are in different calls; one that waits for the others says so after a while, if it is not in the model's own.
    """
    group = _group("steps")
    if group is None:
        return []
    number = int.from_bytes(hashlib.sha256(repr((call, value)).encode()).digest()[:7])
    ends = torch.tensor([number, -number])
    work = dist.all_reduce(ends, dist.ReduceOp.MAX, group=group, async_op=True)
    assert work is not None
    if not call.startswith(_MODEL):
        _say_where_it_waits(work, call)
    work.wait()
    if int(ends[0]) == -int(ends[1]):
        return []
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, (call, told), group=group)
    other = next((rank for rank, (name, _) in enumerate(found) if name != call), None)
    if other is not None:
        raise InputError(f"this rank calls {call} while rank {other} calls {found[other][0]}; {_TOGETHER}")
    return [text for _, text in found]


def told_by_all(value: Result) -> list[Result]:
    """What each rank tells, by rank; all ranks call it."""
    group = _group("steps")
    if group is None:
        return [value]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def _say_where_it_waits(work: dist.Work, call: str) -> None:
    try:
        work.wait(PATIENCE)
    except RuntimeError as error:
        if not any(sign in str(error).lower() for sign in ("timed out", "timeout")):
            raise
        text = f"{call} has waited for other ranks for {PATIENCE.total_seconds():g} s, and goes on waiting; {_TOGETHER}"
        warnings.warn(text, stacklevel=2)


def everywhere(group: dist.ProcessGroup | None, make: Callable[[], Result]) -> Result:
    """Runs it on every rank; when it fails on one, all raise CheckpointError."""
    result, failure = None, None
    try:
        result = make()
    except (CheckpointError, OSError) as error:
        failure = error
    if group is not None:
        told: list[str | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(told, None if failure is None else str(failure), group=group)
        other = next(((rank, text) for rank, text in enumerate(told) if text is not None), None)
        if failure is None and other is not None:
            raise CheckpointError(f"rank {other[0]}: {other[1]}")
    if failure is not None:
        raise failure if isinstance(failure, CheckpointError) else CheckpointError(str(failure)) from failure
    return result  # type: ignore[return-value]


def on_first(group: dist.ProcessGroup | None, make: Callable[[], Result]) -> Result:
    """Runs it on rank 0; the others get None. When it fails, all raise CheckpointError."""
    return everywhere(group, lambda: make() if group is None or dist.get_rank() == 0 else None)  # type: ignore[return-value]


def shared(group: dist.ProcessGroup | None, value: Result) -> Result:
    """Rank 0's value on every rank."""
    if group is None:
        return value
    box = [value]
    dist.broadcast_object_list(box, 0, group=group)
    return box[0]


def gathered(group: dist.ProcessGroup | None, value: dict[str, Any]) -> list[dict[str, Any]]:
    """Every rank's value, on rank 0; elsewhere nothing."""
    if group is None:
        return [value]
    first = dist.get_rank() == 0
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.gather_object(value, parts if first else None, 0, group=group)
    return parts if first else []


def random_state() -> dict[str, Any]:
    """Of torch's and Python's own generators; a program's random numbers follow from its seed and step."""
    state = {"torch": torch.get_rng_state(), "python": random.getstate(), "cuda": None}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(saved: Mapping[str, Any]) -> None:
    """Each rank goes on with its own state; among another number of ranks only if they were all the same."""
    states = saved["states"]
    rank = dist.get_rank() if dist.is_initialized() else 0
    if len(states) > 1 and saved["ranks"] != job_size():
        return
    state = states[rank if len(states) > 1 else 0]
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
