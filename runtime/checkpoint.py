"""Checkpoints that move between plans: saved under any plan and number of processes, loaded under any other.

``save(directory, model, optimizer, step=...)`` and ``load(directory, model, optimizer)``; the model is a program, what
``parallelize`` returned, or the plain model in one process. Tensors are stored by torch.distributed.checkpoint under
``model.<name>`` and ``optimizer.state.<name>.<key>`` with the original's names, each rank writing the shares that it
holds and reading those that it needs, so no rank ever has the whole model. All the rest is in one small file.

All ranks have to make the same calls, on a directory that all of them see.
"""

from __future__ import annotations

import atexit
import io
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autopart.runtime import checkpoint_folder as folders
from autopart.runtime.agreement import (
    checkpoint_group,
    everywhere,
    gathered,
    on_first,
    random_state,
    set_random_state,
    shared,
    unlike,
)
from autopart.runtime.checkpoint_folder import COMMON
from autopart.runtime.errors import CheckpointError
from autopart.runtime.holding import (
    Holding,
    Optimizers,
    Starting,
    holding_of,
    optimizers_in,
    options_of,
    set_options,
    slots_of,
)
from autopart.runtime.shares import Piece, whole
from autopart.runtime.stored_shares import Folder, write_pieces

VERSION = 1
MODEL, STATE = "model.", "optimizer.state."


class Saving:
    """A save, perhaps still running in the background."""

    def __init__(self, path: Path, write: Callable[[], None], asynchronous: bool) -> None:
        self.path = path
        self._error: BaseException | None = None
        self._write = write
        self._thread: threading.Thread | None = None
        if asynchronous:
            # Not a daemon: a script that ends waits until its last checkpoint is written.
            self._thread = threading.Thread(target=self._run, name="autopart-checkpoint")
            self._thread.start()
        else:
            write()

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:
            self._error = error

    @property
    def done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Waits until it is written; returns where. Raises CheckpointError, once, when it was not."""
        if self._thread is not None:
            self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise CheckpointError(f"the checkpoint {self.path} was not written: {error}") from error
        return self.path


@dataclass(frozen=True, slots=True)
class Loaded:
    """What was loaded, and what the script had added to it."""

    path: Path
    step: int
    extra: Any


_running: list[Saving] = []


def save(
    directory: str | Path,
    model: nn.Module,
    optimizer: Optimizers = None,
    scheduler: Any = None,
    *,
    step: int | None = None,
    extra: Any = None,
    asynchronous: bool = False,
    keep: int = 3,
) -> Saving:
    """Writes ``directory/step-…`` with weights, optimizer state, scheduler, random state and ``extra``.

    optimizer: one or several. step: names the checkpoint (default: the calls of the model in training so far). extra:
    rank 0's, of plain data and tensors, such as the position in the data. asynchronous: returns when the shares are
    copied to the host's memory; ``.wait()``, or the next save, raises what goes wrong later. keep: how many stay.

    Complete or absent: if a process dies at any moment, ``load`` finds the previous checkpoint.
    Raises CheckpointError on every rank when one of them cannot write, and for optimizer state that cannot be divided;
    InputError where another rank is in another call.
    """
    wait()
    unlike("", "", "checkpoint.save()")  # where one rank saves alone, the others train on
    group = checkpoint_group()
    holding = holding_of(model)
    content = everywhere(group, lambda: _content(holding, optimizers_in(optimizer)))
    parts = gathered(group, {**content.common, "random": random_state()})
    if step is None:
        step = 0 if holding.program is None else holding.program.steps

    def announce() -> tuple[Path, Path, bytes]:
        common = {**_merged(parts), **_described(holding), "step": step, "extra": extra}
        common["scheduler"] = None if scheduler is None else scheduler.state_dict()
        return (*folders.prepare(Path(directory).absolute(), step), _packed(common))

    announced = on_first(group, announce)
    partial, final = shared(group, announced and announced[:2])
    pieces = content.pieces
    if asynchronous:
        pieces = {name: Piece(p.shape, p.boxes, p.tensor.detach().to("cpu", copy=True)) for name, p in pieces.items()}

    def write() -> None:
        try:
            write_pieces(partial, pieces, group)
            on_first(group, lambda: folders.commit(partial, final, announced[2], keep))
        except RuntimeError as error:  # of gloo
            raise CheckpointError(f"lost another rank while saving {final.name}: {error}") from error

    saving = Saving(final, write, asynchronous)
    _running[:] = [saving]
    return saving


def wait() -> None:
    """Waits for a save in the background. Raises CheckpointError when it failed."""
    while _running:
        _running.pop().wait()


@atexit.register
def _complain() -> None:
    """Nobody may have waited for the last one."""
    try:
        wait()
    except CheckpointError:
        traceback.print_exc()


def load(
    directory: str | Path,
    model: nn.Module,
    optimizer: Optimizers = None,
    scheduler: Any = None,
    *,
    strict: bool = True,
) -> Loaded:
    """Loads the latest checkpoint of a directory, or the one at this path, into the model and the optimizer.

    A model from ``parallelize`` that has not been called yet gets its weights now, and the optimizer's state when its
    first call divides it. strict: names, shapes, dtypes and the program have to be the same; else what fits is loaded.

    Raises CheckpointError on every rank, naming what is missing or does not fit, before anything is changed (but for a
    damaged file, which is noticed when it is read).
    """
    wait()
    unlike("", "", "checkpoint.load()")
    group = checkpoint_group()
    path = shared(group, on_first(group, lambda: folders.resolve(Path(directory).absolute())))
    common = everywhere(group, lambda: read_common(path))
    if scheduler is not None and common["scheduler"] is None:
        raise CheckpointError(f"{path} was saved without a scheduler; leave scheduler out")
    optimizers = optimizers_in(optimizer)
    if isinstance(model, Starting) and model.parallel is None:
        weights = any(p.is_meta for p in model.original.parameters())
        if not weights:
            everywhere(group, lambda: _fill(path, common, model.original, [], strict))
        everywhere(group, lambda: set_options(holding_of(model), optimizers, common["options"]))
        model.when_started(lambda: _fill(path, common, model, optimizers, strict, weights))
    else:
        everywhere(group, lambda: _fill(path, common, model, optimizers, strict))
    if scheduler is not None:
        scheduler.load_state_dict(common["scheduler"])
    set_random_state(common["random"])
    return Loaded(path, common["step"], common["extra"])


def latest(directory: str | Path) -> Path | None:
    """The newest complete checkpoint of a directory; None if there is none."""
    return folders.find(Path(directory))


def read_common(path: Path) -> dict[str, Any]:
    """All that is not a share of a tensor. Raises CheckpointError."""
    try:
        common: dict[str, Any] = torch.load(path / COMMON, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{path / COMMON} cannot be read: {type(error).__name__}: {error}") from error
    if common.get("version") != VERSION:
        raise CheckpointError(f"{path} has version {common.get('version')}, this autopart reads {VERSION}")
    return common


# --- What is saved ---


@dataclass(frozen=True, slots=True)
class _Content:
    pieces: dict[str, Piece]
    common: dict[str, Any]


def _content(holding: Holding, optimizers: Sequence[torch.optim.Optimizer]) -> _Content:
    """What this rank writes: its shares, and plain values by parameter."""
    pieces: dict[str, Piece] = {}
    values: dict[str, dict[str, Any]] = {}
    for name, entry in holding.entries.items():
        if entry.writes and entry.tensor is not None:
            pieces[MODEL + name] = entry.piece(entry.tensor)
    for name, (optimizer, parameter) in slots_of(holding, optimizers).items():
        entry = holding.entries[name]
        for key, value in optimizer.state.get(parameter, {}).items() if entry.writes else ():
            if not isinstance(value, Tensor) or value.dim() == 0:
                kept = value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
                values.setdefault(name, {})[key] = kept
            elif value.shape == parameter.shape:
                pieces[f"{STATE}{name}.{key}"] = entry.piece(value)
            elif not entry.divided:
                pieces[f"{STATE}{name}.{key}"] = Piece(tuple(value.shape), whole(value.shape), value)
            else:
                raise CheckpointError(
                    f"the state {key!r} of {name} has the shape {list(value.shape)}, its share of the parameter "
                    f"{list(parameter.shape)}: {type(optimizer).__name__} is not element-wise, and what it keeps of a "
                    "divided parameter cannot be put together"
                )
    return _Content(pieces, {"values": values, "options": options_of(holding, optimizers)})


def _merged(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    states = [part["random"] for part in parts]
    same = all(repr(state) == repr(states[0]) and torch.equal(state["torch"], states[0]["torch"]) for state in states)
    return {
        "values": {name: value for part in parts for name, value in part["values"].items()},
        "options": {name: value for part in reversed(parts) for name, value in part["options"].items()},
        "random": {"ranks": len(states), "states": states[:1] if same else states},
    }


def _described(holding: Holding) -> dict[str, Any]:
    program = holding.program
    return {
        "version": VERSION,
        "fingerprint": holding.fingerprint,
        "outline": holding.outline,
        "plan": holding.plan,
        "aliases": {name: list(entry.aliases) for name, entry in holding.entries.items() if entry.aliases},
        "program": None if program is None else {"seed": program.mesh.seed, "steps": program.steps},
    }


def _packed(common: dict[str, Any]) -> bytes:
    """Raises CheckpointError for what could not be loaded again."""
    for key, value in common.items():
        buffer = io.BytesIO()
        try:
            torch.save(value, buffer)
            torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
        except Exception as error:
            reason = str(error).splitlines()[0]
            raise CheckpointError(
                f"{key} cannot be saved: {reason}; only numbers, texts, lists, dicts, tensors can"
            ) from error
    buffer = io.BytesIO()
    torch.save(common, buffer)
    return buffer.getvalue()


# --- What is loaded ---


def _fill(
    path: Path,
    common: Mapping[str, Any],
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    strict: bool,
    weights: bool = True,
) -> None:
    """Reads this rank's shares of the optimizer's state, and of the weights if they are wanted. See :func:`load`."""
    holding = holding_of(model)
    folder = Folder(path)
    saved = _names(holding, folder, common, path, strict)
    pieces = {
        MODEL + saved[name]: entry.piece(entry.tensor)
        for name, entry in holding.entries.items()
        if weights and name in saved and entry.tensor is not None
    }
    state: dict[torch.optim.Optimizer, dict[nn.Parameter, dict[str, Any]]] = {o: {} for o in optimizers}
    keys: dict[str, list[str]] = {}
    for full in folder.tensors:
        if full.startswith(STATE):
            owner, _, key = full.removeprefix(STATE).rpartition(".")
            keys.setdefault(owner, []).append(key)
    for name, (optimizer, parameter) in slots_of(holding, optimizers).items():
        entry = holding.entries[name]
        if entry.tensor is None or name not in saved:
            continue
        values = dict(common["values"].get(saved[name], {}))
        for key, value in values.items():
            if isinstance(value, Tensor) and (key != "step" or _on_device(optimizer)):
                values[key] = value.to(parameter.device)
        for key in keys.get(saved[name], ()):
            full = f"{STATE}{saved[name]}.{key}"
            size, dtype = tuple(folder.tensors[full].size), folder.tensors[full].properties.dtype
            shape, boxes = (parameter.shape, entry.boxes) if size == entry.shape else (size, whole(size))
            values[key] = torch.empty(shape, dtype=dtype, device=parameter.device)
            pieces[full] = Piece(size, boxes, values[key])
        state[optimizer][parameter] = values
    if optimizers and strict and not (keys or common["values"] or common["options"]):
        raise CheckpointError(f"{path} was saved without an optimizer; leave optimizer out")
    options = {name: common["options"][old] for name, old in saved.items() if old in common["options"]}
    set_options(holding, optimizers, options)
    folder.read(pieces)
    for optimizer, found in state.items():
        for parameter, values in found.items():
            optimizer.state.pop(parameter, None)
            if values:
                optimizer.state[parameter] = values
    if holding.program is not None and common["program"] is not None:
        holding.program.mesh.seed = common["program"]["seed"]
        holding.program.steps = common["program"]["steps"]


def _on_device(optimizer: torch.optim.Optimizer) -> bool:
    return any(group.get("capturable") or group.get("fused") for group in optimizer.param_groups)


def _names(holding: Holding, folder: Folder, common: Mapping[str, Any], path: Path, strict: bool) -> dict[str, str]:
    """The model's names -> those in the checkpoint. Raises CheckpointError when strict, or when a shape differs."""
    stored = [name.removeprefix(MODEL) for name in folder.tensors if name.startswith(MODEL)]
    under = {alias: name for name in stored for alias in (name, *common["aliases"].get(name, ()))}
    found = {
        name: next(under[n] for n in entry.names if n in under)
        for name, entry in holding.entries.items()
        if any(n in under for n in entry.names)
    }
    faults = []
    for name, old in found.items():
        entry, tensor = holding.entries[name], folder.tensors[MODEL + old]
        if tuple(tensor.size) != entry.shape:
            faults.append(f"{name} is {list(tensor.size)} in the checkpoint and {list(entry.shape)} in the model")
        elif strict and tensor.properties.dtype != entry.dtype:
            faults.append(f"{name} is {tensor.properties.dtype} in the checkpoint and {entry.dtype} in the model")
    if strict:
        missing = [name for name in holding.entries if name not in found]
        unexpected = sorted(set(stored) - set(found.values()))
        faults += [f"missing {_listed(missing)}"] if missing else []
        faults += [f"unexpected {_listed(unexpected)}"] if unexpected else []
        here, there = holding.fingerprint, common["fingerprint"]
        other_sizes = holding.outline and holding.outline == common.get("outline")  # such as longer sequences
        if not faults and here and there and here != there and not other_sizes:
            faults.append(f"names and shapes fit, but it is of another program (fingerprint {there}, here {here})")
    if faults:
        hint = "; load(strict=False) takes what fits" if strict else ""
        raise CheckpointError(f"{path} does not belong to this model: {'; '.join(faults[:8])}{hint}")
    return found


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
