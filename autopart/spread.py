"""What rank 0 makes for all ranks: a program's files, and the weights to start from."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from autopart.runtime.errors import AutopartError, PlanError
from autopart.runtime.mesh import job_size

Result = TypeVar("Result")


def on_first_rank(make: Callable[[], Result]) -> Result:
    """What ``make`` returns on rank 0, on every rank; when it fails there, every rank raises."""
    if job_size() == 1:
        return make()
    box: list[Any] = [None]
    failure: BaseException | None = None
    if dist.get_rank() == 0:
        try:
            box = [("made", make())]
        except AutopartError as error:
            failure, box = error, [("error", str(error))]
        except BaseException as error:  # the other ranks must not wait for files that never come
            failure, box = error, [("error", f"planning failed on rank 0: {type(error).__name__}: {error}")]
    dist.broadcast_object_list(box, 0)
    if failure is not None:
        raise failure
    kind, content = box[0]
    if kind == "error":
        raise PlanError(f"rank 0 could not plan the model: {content}")
    made: Result = content
    return made


def write_on_hosts(files: Mapping[str, bytes], directory: str | Path | None) -> Path:
    """Writes the program's files, once on each host: into the user's folder, or a temporary one of their own."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if directory is None:
        # named by content, so that the ranks of a host share it
        digest = hashlib.sha256(b"".join(name.encode() + text for name, text in sorted(files.items()))).hexdigest()[:12]
        target = Path(tempfile.gettempdir()) / f"autopart-{os.getuid()}" / digest
    else:
        target = Path(directory)
    if local_rank == 0:
        from autopart.passes.emit.folder import program_folder

        with program_folder(target) as folder:
            for name, text in files.items():
                (folder / name).write_bytes(text)
    if job_size() > 1:
        dist.barrier()
    return target


def start_alike(tensors: Mapping[str, Tensor | None], device: torch.device) -> None:
    """Makes all ranks start from rank 0's weights: those that differ are sent.

    Raises PlanError, on every rank, where ranks have unlike tensors.
    """
    if job_size() == 1:
        return
    distinct: dict[int, Tensor] = {}
    facts: dict[str, str] = {}
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_meta and id(tensor) not in distinct:
            distinct[id(tensor)] = tensor.detach()
            facts[name] = f"{tensor.dtype} {list(tensor.shape)}"
    _check_alike(facts)
    sums = torch.stack([_checksum(tensor) for tensor in distinct.values()]).to(device) if distinct else None
    if sums is None:
        return
    low, high = sums.clone(), sums.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    differing = (low != high).cpu().tolist()
    for tensor, differs in zip(distinct.values(), differing, strict=True):
        if differs:
            moved = tensor.to(device).contiguous()
            dist.broadcast(moved, 0)
            tensor.copy_(moved)


def _check_alike(facts: Mapping[str, str]) -> None:
    """facts: of each tensor by name. A collective of unlike sizes would end a process without a word of why."""
    if (differing := _unlike_first(facts)) is None:
        return
    other, name, first, second = differing
    what = (
        f"have unlike tensors: {name!r} is {first} on rank 0 and {second} on rank {other}"
        if name
        else "have the same tensors in another order"
    )
    raise PlanError(
        f"the models of ranks 0 and {other} {what}; every rank has to build the same model: configure it by nothing "
        "that is a rank's own"
    )


def check_options(options: Mapping[str, object]) -> None:
    """All ranks call it. Raises PlanError on each where numbers, texts and tables of these, by name, differ."""
    if job_size() == 1:
        return
    plain = {name: value for name, value in options.items() if _is_plain(value)}
    facts = {name: repr(value) for name, value in sorted(plain.items())}
    if (differing := _unlike_first(facts)) is None:
        return
    other, name, first, second = differing
    raise PlanError(
        f"parallelize was called with {name} {first} on rank 0 and {second} on rank {other}: rank 0 plans for all, so "
        "every rank has to give the same options"
    )


def _is_plain(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(_is_plain(item) for item in (*value.keys(), *value.values()))
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, str | int | float)


def _unlike_first(facts: Mapping[str, str]) -> tuple[int, str, str, str] | None:
    """A rank whose facts are not rank 0's, which one ('': the order), and what it is on both; None: all are alike."""
    digests: list[Any] = [None] * job_size()
    dist.all_gather_object(digests, hashlib.sha256(repr([*facts.items()]).encode()).hexdigest())
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is None:
        return None
    found: list[Any] = [None] * job_size()
    dist.all_gather_object(found, [*facts.items()])
    first, second = dict(found[0]), dict(found[other])
    name = next((n for n in {**first, **second} if first.get(n) != second.get(n)), "")
    return other, name, first.get(name, "missing"), second.get(name, "missing")


def _checksum(tensor: Tensor) -> Tensor:
    """A number that changes with the tensor's bits and their order."""
    flat = tensor.detach().reshape(-1)
    if flat.numel() == 0:
        return torch.zeros((), dtype=torch.int64)
    raw = flat.contiguous().view(torch.uint8)
    padded = torch.nn.functional.pad(raw, (0, -raw.numel() % 8)).view(torch.int64)
    weights = torch.arange(1, padded.numel() + 1, device=padded.device, dtype=torch.int64) * 2654435761 + 1
    return (padded * weights).sum().cpu()
