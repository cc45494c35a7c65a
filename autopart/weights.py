"""Weights from and to safetensors folders, as the Hugging Face libraries write them: no rank needs the whole model.

``load_weights`` reads only the slices that this rank holds. ``save_weights`` gathers one tensor at a time.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopart.initialize import Init, fill, prepare
from autopart.runtime.errors import InputError
from autopart.runtime.files import named
from autopart.runtime.holding import Entry, holding_of
from autopart.runtime.module import ParallelModule
from autopart.runtime.state import whole_tensors

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9


def load_weights(folder: str | Path, model: nn.Module, strict: bool = True) -> tuple[list[str], list[str]]:
    """Reads a model's weights, each rank its own shares, converted to the type of the model's.

    folder: with ``model.safetensors`` or ``model.safetensors.index.json``; or one safetensors file. One name of a tied
    tensor is enough. A model's ``base_model_prefix`` (transformers) is added or left out where names then fit, so that
    a model with a head reads the weights of one without. Buffers that are in no state dict are passed over. Returns
    the missing names, which keep their values, and the unexpected ones.

    Raises InputError for another shape, when no name fits, and when ``strict`` for missing or unexpected names, before
    anything is read.
    """
    homes = _homes(Path(folder))
    holding = holding_of(model)
    original: nn.Module = getattr(model, "original", model)
    known = {name for entry in holding.entries.values() for name in entry.names}
    prefix = str(getattr(original, "base_model_prefix", ""))
    stored = _names_in_file(homes, known, prefix)
    first = {e.name: next((name for name in e.names if name in stored), None) for e in holding.entries.values()}
    found = {name: stored[alias] for name, alias in first.items() if alias is not None}
    missing = [name for name, alias in first.items() if alias is None]
    made = _names_in_file(homes, {name for name, _ in original.named_buffers()}, prefix)
    unexpected = sorted(homes.keys() - set(stored.values()) - set(made.values()))
    if not found or (strict and (missing or unexpected)):
        raise InputError(f"{folder} does not fit the model: missing {missing[:8]}, unexpected {unexpected[:8]}")
    files: dict[Path, list[Entry]] = {}
    for name, alias in found.items():
        files.setdefault(homes[alias], []).append(holding.entries[name])
    for read in (False, True):
        for path, entries in files.items():
            with _opened(path) as file:
                for entry in entries:
                    _take(file.get_slice(found[entry.name]), entry, path, read)
    return missing, unexpected


def load_or_start(folder: str | Path, model: nn.Module, init: Init | None = None) -> None:
    """As :func:`load_weights`; what is missing keeps its values, or on meta gets its initial ones, with a warning.

    Raises InputError where no name fits, and PlanError as :func:`autopart.initialize.prepare` does.
    """
    original: nn.Module = getattr(model, "original", model)
    missing, unexpected = load_weights(folder, model, strict=False)
    on_meta = {name for name, parameter in original.named_parameters() if parameter.is_meta}.intersection(missing)
    if on_meta:
        prepare(original, init, on_meta)
        fill(model, on_meta)
    if missing or unexpected:
        kept = f"keep their initial values: {missing[:8]}" if missing else ""
        unread = f"not read: {unexpected[:8]}" if unexpected else ""
        warnings.warn(f"weights from {folder}: {'; '.join(filter(None, (kept, unread)))}", stacklevel=2)


def _names_in_file(homes: Mapping[str, Path], known: Collection[str], prefix: str) -> dict[str, str]:
    """The model's names that are stored, as they are or but for the prefix, and what they are called there."""
    stored = {name: name for name in homes if name in known}
    for name in homes if prefix else ():
        other = name.removeprefix(f"{prefix}.") if name.startswith(f"{prefix}.") else f"{prefix}.{name}"
        if name not in known and other in known:
            stored.setdefault(other, name)
    return stored


def _take(stored: Any, entry: Entry, path: Path, read: bool) -> None:
    """Checks the shape, or copies the boxes of this rank's share."""
    if tuple(stored.get_shape()) != entry.shape:
        raise InputError(f"{entry.name} is {stored.get_shape()} in {path} and {list(entry.shape)} in the model")
    if not read or entry.tensor is None:
        return
    with torch.no_grad():
        for box in entry.boxes:
            bounds = zip(box.offset, box.size, strict=True)
            piece = stored[tuple(slice(start, start + size) for start, size in bounds)] if entry.shape else stored[...]
            box.of(entry.tensor).copy_(piece)


def _homes(folder: Path) -> dict[str, Path]:
    """The file of every stored tensor. Raises InputError when there is none, or one is missing."""
    if folder.is_file():
        single = folder
    elif (folder / INDEX).is_file():
        try:
            placed = dict(json.loads((folder / INDEX).read_text())["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{folder / INDEX} is no index of weights ({error!r}); write it again") from error
        absent = sorted({file for file in placed.values() if not (folder / file).is_file()})
        if absent:
            raise InputError(f"{folder / INDEX} names {absent}, which are not there")
        return {name: folder / file for name, file in placed.items()}
    else:
        single = folder / SINGLE
    if not single.is_file():
        raise InputError(f"{folder} holds neither {SINGLE} nor {INDEX}")
    with _opened(single) as file:
        return dict.fromkeys(file.keys(), single)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    open_ = _safetensors().safe_open
    try:
        file = open_(path, framework="pt")
    except Exception as error:
        raise InputError(f"{path} is no readable safetensors file ({error}); write it again") from error
    with file:
        yield file


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise InputError("weights are read and written by the safetensors library: pip install safetensors") from error
    return safetensors


def save_weights(folder: str | Path, model: ParallelModule, shard_bytes: int = SHARD_BYTES) -> None:
    """Writes the whole model as safetensors files of up to ``shard_bytes``; all ranks call it.

    A tied tensor is written once, under its first name. Rank 0 holds one file's tensors at a time, the others one
    tensor. Raises OSError on rank 0 when it cannot write.
    """
    save_file = _safetensors().torch.save_file
    target, first = Path(folder), model.mesh.rank == 0
    if first:
        target.mkdir(parents=True, exist_ok=True)
    files: list[dict[str, int]] = []
    waiting: dict[str, Tensor] = {}

    def write() -> None:
        save_file(waiting, target / f".part-{len(files)}", metadata={"format": "pt"})
        files.append({name: _bytes(tensor) for name, tensor in waiting.items()})
        waiting.clear()

    for spec, tensor in whole_tensors(model.manifest, model.mesh, model.own_tensors(), "save_pretrained()"):
        if first:
            if waiting and sum(map(_bytes, waiting.values())) + _bytes(tensor) > shard_bytes:
                write()
            waiting[spec.name] = tensor.to("cpu", copy=True)
    if first:
        write()
        with named(target):
            _name_files(target, files)
    if model.mesh.world_size > 1:
        dist.barrier()


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _name_files(target: Path, files: list[dict[str, int]]) -> None:
    """Gives the written files their names, and writes the index where there are several."""
    for old in target.glob("model*.safetensors*"):
        old.unlink()
    if len(files) == 1:
        (target / ".part-0").replace(target / SINGLE)
        return
    placed: dict[str, str] = {}
    for number, names in enumerate(files):
        file = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        (target / f".part-{number}").replace(target / file)
        placed.update(dict.fromkeys(names, file))
    total = sum(size for names in files for size in names.values())
    (target / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": placed}, indent=1) + "\n")
