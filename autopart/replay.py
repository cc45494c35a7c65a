"""Making the values of tensors whose history was recorded (``autopart/recording.py``): one tensor at a time.

A tensor's values follow from a slice of the record: the ops that wrote it, and those that made what these read. What
was written over as a whole is left out. A slice is run in the recorded order, on the CPU, and its memory freed after
the last use. Random ops in it start from the generator's state that they would have had in one process; states are
found by running all random ops in their order, each on memory that is freed at once.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from autopart.recording import Draws, Memory, Op, Place, Seen, root_of, seen_of
from autopart.runtime.errors import InputError

OWN_PAGES_BYTES = 1 << 20

Memories = dict[Memory, torch.UntypedStorage]
Taker = Callable[[Tensor], None]


def values(tensor: Tensor) -> Tensor:
    """The values of a recorded tensor on meta, on the CPU and with memory of its own. Raises InputError for a draw
    that cannot be repeated.
    """
    seen = seen_of(tensor)
    assert seen is not None, "nothing wrote this tensor"
    return _value(seen, tensor.dtype)


def make(wanted: Iterable[tuple[Tensor, Taker]]) -> None:
    """Gives the values of each tensor to its taker, and forgets them before it makes those of the next one.

    A draw that nothing else follows on is taken where the generator's states are found, so that it is drawn once.
    """
    waiting: list[tuple[Seen, torch.dtype, Taker]] = []
    drawn: dict[Op, tuple[Seen, torch.dtype, Taker]] = {}
    for tensor, take in wanted:
        seen = seen_of(tensor)
        assert seen is not None, "nothing wrote this tensor"
        op = seen.writer
        if op is not None and op.place is not None and not op.needs and op not in drawn:
            drawn[op] = (seen, tensor.dtype, take)
        else:
            waiting.append((seen, tensor.dtype, take))

    def found(op: Op, memories: Memories) -> None:
        if op in drawn:
            seen, dtype, take = drawn.pop(op)
            take(_of(seen, memories).to(dtype))

    for op in list(drawn):
        if op in drawn:
            assert op.place is not None
            real_state(Place(op.place.draws, op.place.count + 1), found)
    for seen, dtype, take in [*waiting, *drawn.values()]:  # of these the states were known before
        take(_value(seen, dtype))


def _value(seen: Seen, dtype: torch.dtype) -> Tensor:
    memories: Memories = {}
    ops = slice_of([] if seen.writer is None else [seen.writer])
    last = {memory: index for index, op in enumerate(ops) for memory in _memories_of(op)}
    last[seen.memory] = len(ops)
    for index, op in enumerate(ops):
        _run(op, memories, None if op.place is None else real_state(op.place))
        for memory in _memories_of(op):
            if last[memory] <= index:
                memories.pop(memory, None)
    value = _of(seen, memories)
    return value if value.dtype == dtype else value.to(dtype)


def slice_of(results: Iterable[Op]) -> list[Op]:
    """These ops and all that they follow from, in their order."""
    found: set[Op] = set()
    waiting = list(results)
    while waiting:
        op = waiting.pop()
        if op not in found:
            found.add(op)
            waiting.extend(op.needs)
    return sorted(found, key=lambda op: op.number)


def _memories_of(op: Op) -> set[Memory]:
    return {leaf.memory for leaf in tree_leaves((op.args, op.kwargs)) if isinstance(leaf, Seen)} | {
        memory for _, memory in op.makes
    }


def _of(seen: Seen, memories: Memories) -> Tensor:
    """The view that was seen, of memory that is made where there is none yet."""
    storage = memories.get(seen.memory)
    if storage is None:
        given = seen.memory.given
        storage = _storage(seen.memory.size) if given is None else given.clone()
        memories[seen.memory] = storage
    with torch._C.DisableTorchFunction():
        return torch.empty(0, dtype=seen.dtype).set_(storage, seen.offset, seen.shape, seen.stride)


def _storage(size: int) -> torch.UntypedStorage:
    """Bytes without values; large ones in pages of their own, which the system has back as soon as they are freed.

    malloc puts pieces of up to 32 MiB between small ones that stay, and holes of several hundred megabytes remain.
    """
    if size < OWN_PAGES_BYTES:
        return torch.UntypedStorage(size)
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8).untyped_storage()


def _run(op: Op, memories: Memories, state: Tensor | None) -> Tensor | None:
    """Runs an op on real memory. Returns the generator's state after it, if it draws."""
    if op.flaw:
        raise InputError(
            f"a weight cannot be made shard by shard: {op.flaw}, while it follows torch's own generator of the CPU "
            "only; draw without generator=, or give the weights as files: parallelize(model, weights=folder)"
        )
    args, kwargs = tree_map_only(Seen, lambda seen: _of(seen, memories), (op.args, op.kwargs))
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
    after = None
    # Whatever modes are on: a default device, another precision.
    with torch._C.DisableTorchFunction(), torch.no_grad():
        if state is None:
            result = op.func(*args, **kwargs)
        else:
            before = torch.get_rng_state()
            torch.set_rng_state(state)
            try:
                result = op.func(*args, **kwargs)
                after = torch.get_rng_state()
            finally:
                torch.set_rng_state(before)
    leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    for number, memory in op.makes:
        memories[memory] = leaves[number].untyped_storage()
    return after


def real_state(place: Place, found: Callable[[Op, Memories], None] | None = None) -> Tensor:
    """The generator's state at a place. found: given each op that had to be run for it, and what it made."""
    draws = place.draws
    if not draws.states:
        assert isinstance(draws.start, Place)
        draws.states.append(real_state(draws.start, found))
    while len(draws.states) <= place.count:
        op = draws.ops[len(draws.states) - 1]
        memories: Memories = {}
        for need in slice_of(op.needs):
            _run(need, memories, None if need.place is None else real_state(need.place))
        after = _run(op, memories, draws.states[-1])
        assert after is not None
        draws.states.append(after)
        if found is not None:
            found(op, memories)
    return draws.states[place.count]


def same_on_all_ranks(tensors: Iterable[Tensor]) -> None:
    """Makes all ranks draw from rank 0's states of the generator. All ranks call it, with the same model's tensors."""
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return
    ops = slice_of(seen.writer for seen in map(seen_of, tensors) if seen is not None and seen.writer is not None)
    rows: dict[Draws, Draws] = {}
    for op in ops:
        place = op.place
        while place is not None:
            start = place.draws.start
            rows[place.draws] = root_of(place)
            place = start if isinstance(start, Place) else None
    roots = sorted(set(rows.values()), key=lambda draws: draws.number)
    box: list[Any] = [[draws.states[0] for draws in roots]]
    dist.broadcast_object_list(box, 0)
    if len(box[0]) != len(roots):
        raise InputError("the ranks built the model differently: it has to be made by the same calls on every rank")
    for draws, state in zip(roots, box[0], strict=True):
        if not torch.equal(draws.states[0], state):
            for row in [row for row, root in rows.items() if root is draws]:
                row.states.clear()
            draws.states[:] = [state]
