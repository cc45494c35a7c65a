"""Checkpoints as other programs read them: one file with the plain model's whole state dict."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autopart.runtime.checkpoint import MODEL, STATE, read_common
from autopart.runtime.checkpoint_folder import resolve
from autopart.runtime.errors import CheckpointError
from autopart.runtime.files import named
from autopart.runtime.stored_shares import Folder

# torch's dtypes as the safetensors format spells them.
_SAFETENSORS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def describe(path: Path) -> dict[str, Any]:
    """What is in a checkpoint, or in the latest of a directory, as plain data. Raises CheckpointError."""
    path = resolve(path)
    folder, common = Folder(path), read_common(path)
    states: dict[str, list[str]] = {}
    for name in folder.tensors:
        if name.startswith(STATE):
            owner, _, key = name.removeprefix(STATE).rpartition(".")
            states.setdefault(owner, []).append(key)
    for owner, values in common["values"].items():
        states.setdefault(owner, []).extend(values)
    tensors = []
    for name, found in folder.tensors.items():
        if name.startswith(MODEL):
            own = name.removeprefix(MODEL)
            tensors.append(
                {
                    "name": own,
                    "aliases": common["aliases"].get(own, []),
                    "shape": list(found.size),
                    "dtype": _text(found.properties.dtype),
                    "bytes": _bytes(folder, name),
                    "pieces": len(found.chunks),
                    "optimizer_state": sorted(states.get(own, [])),
                }
            )
    return {
        "path": str(path),
        "step": common["step"],
        "fingerprint": common["fingerprint"],
        "plan": common["plan"],
        "model_bytes": sum(item["bytes"] for item in tensors),
        "optimizer_bytes": sum(_bytes(folder, name) for name in folder.tensors if name.startswith(STATE)),
        "scheduler": common["scheduler"] is not None,
        "tensors": sorted(tensors, key=lambda item: str(item["name"])),
    }


def convert(path: Path, out: Path) -> int:
    """Writes the plain model's whole state dict, tied tensors under all their names; returns how many names.

    out: ``*.safetensors``, or ``*.pt`` and ``*.pth`` for ``torch.load``. One tensor at a time is held in memory. The
    file appears when it is whole. Raises CheckpointError for another suffix.
    """
    path = resolve(path)
    folder, common = Folder(path), read_common(path)
    names = sorted(name.removeprefix(MODEL) for name in folder.tensors if name.startswith(MODEL))
    aliases = {name: [name, *common["aliases"].get(name, [])] for name in names}
    if out.suffix not in (".safetensors", ".pt", ".pth"):
        raise CheckpointError(f"{out.name} should end in .safetensors or .pt, which says the format to write")
    with tempfile.TemporaryDirectory(dir=out.absolute().parent, prefix=f".{out.name}-") as scratch:
        partial = Path(scratch) / "whole"
        with named(out):
            if out.suffix == ".safetensors":
                _write_safetensors(folder, aliases, partial)
            else:
                _write_torch(folder, aliases, partial, Path(scratch))
        partial.replace(out)
    return sum(map(len, aliases.values()))


def _write_safetensors(folder: Folder, aliases: dict[str, list[str]], path: Path) -> None:
    """The length of a JSON header, the header, then the tensors' bytes one after the other."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, alias in _all_names(aliases):
        found = folder.tensors[MODEL + name]
        dtype = _SAFETENSORS.get(found.properties.dtype)
        if dtype is None:
            raise CheckpointError(f"{name} is {found.properties.dtype}, which safetensors lacks; write a .pt file")
        start, end = end, end + _bytes(folder, MODEL + name)
        header[alias] = {"dtype": dtype, "shape": list(found.size), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, _ in _all_names(aliases):
            tensor = folder.tensor(MODEL + name)
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)


def _all_names(aliases: dict[str, list[str]]) -> Iterator[tuple[str, str]]:
    """Each name once more for each of its aliases: the format has no two names for the same bytes."""
    return ((name, alias) for name, found in aliases.items() for alias in found)


def _write_torch(folder: Folder, aliases: dict[str, list[str]], path: Path, scratch: Path) -> None:
    """Tensors lie in mapped files until torch has written them, so that they need not fit into memory."""

    def mapped(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        file = scratch / f"tensor-{len(state)}"
        return torch.from_file(str(file), shared=True, size=count, dtype=dtype).reshape(shape)

    state: dict[str, Tensor] = {}
    for name, found in aliases.items():
        tensor = folder.tensor(MODEL + name, mapped)
        state.update(dict.fromkeys(found, tensor))
    with path.open("wb") as file:  # of a full disk torch itself says nothing that can be read
        torch.save(state, file)


def _bytes(folder: Folder, name: str) -> int:
    found = folder.tensors[name]
    return math.prod(found.size) * found.properties.dtype.itemsize


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
