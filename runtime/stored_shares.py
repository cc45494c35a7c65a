"""Shares of tensors as torch.distributed.checkpoint stores them.

A checkpoint written in one division is read in any other. Only DCP's public types are used: a planner for saving, one
for loading, and the reader and writer of folders. It takes a second to import, which only who saves or loads waits for.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_saver import save

from autopart.runtime.errors import CheckpointError
from autopart.runtime.shares import Piece, whole


def write_pieces(folder: Path, pieces: dict[str, Piece], group: dist.ProcessGroup | None) -> None:
    """Writes a folder of DCP from every rank's pieces, synced to the disk; all ranks of the group call it.

    Raises CheckpointError on every rank when one of them cannot write, or when something is missing between them.
    """
    try:
        with warnings.catch_warnings():
            # that this is one process is no news
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            save(
                {},
                storage_writer=FileSystemWriter(folder),
                planner=_PieceWriter(pieces),
                process_group=group,
                no_dist=group is None,
            )
    except CheckpointException as error:
        causes = "; ".join(f"rank {rank}: {_cause(failure)}" for rank, failure in error.failures.items())
        raise CheckpointError(f"the checkpoint could not be written: {causes}") from error


def _cause(failure: Any) -> str:
    found = failure[0] if isinstance(failure, tuple) else failure
    return f"{type(found).__name__}: {found}" if isinstance(found, BaseException) else str(found)


class _PieceWriter(SavePlanner):
    """Writes what each rank announces; nobody writes the same twice, so nothing is left to be decided."""

    def __init__(self, pieces: dict[str, Piece]) -> None:
        self._pieces = pieces

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        return SavePlan(
            [
                WriteItem(
                    MetadataIndex(name, box.offset),
                    WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.size)),
                        TensorProperties(dtype=piece.tensor.dtype),
                        torch.Size(piece.shape),
                    ),
                )
                for name, piece in self._pieces.items()
                for box in piece.boxes
            ]
        )

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = create_default_global_save_plan(all_plans)
        for name, found in metadata.state_dict_metadata.items():
            assert isinstance(found, TensorStorageMetadata)
            written = sum(math.prod(chunk.sizes) for chunk in found.chunks)
            if written != math.prod(found.size):
                raise CheckpointError(f"{name}: {written} of {math.prod(found.size)} elements would be written")
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        piece = self._pieces[write_item.index.fqn]
        box = next(box for box in piece.boxes if box.offset == tuple(write_item.index.offset or ()))
        return box.of(piece.tensor.detach())


# --- Reading ---


class Folder:
    """A folder of DCP: ``tensors`` has the metadata of each tensor by name. Raises CheckpointError if unreadable."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = FileSystemReader(path)
        try:
            self.metadata = self._reader.read_metadata()
            self._reader.set_up_storage_reader(self.metadata, is_coordinator=False)
        except Exception as error:  # unpickling fails in many ways
            raise CheckpointError(f"no readable checkpoint in {path}: {type(error).__name__}: {error}") from error
        self.tensors: dict[str, TensorStorageMetadata] = {
            name: found
            for name, found in self.metadata.state_dict_metadata.items()
            if isinstance(found, TensorStorageMetadata)
        }

    def read(self, pieces: dict[str, Piece]) -> None:
        """Fills the pieces' tensors in place, reading what overlaps with them. Raises CheckpointError."""
        items: list[ReadItem] = []
        for name, piece in pieces.items():
            chunks = [ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.size)) for box in piece.boxes]
            found = create_read_items_for_chunk_list(name, self.tensors[name], chunks)
            if sum(math.prod(item.lengths) for item in found) != sum(math.prod(box.size) for box in piece.boxes):
                raise CheckpointError(f"{self.path} has not all elements of {name}")
            items += found
        try:
            self._reader.read_data(LoadPlan(items), _PieceReader(pieces)).wait()
        except Exception as error:
            raise CheckpointError(f"{self.path} cannot be read: {type(error).__name__}: {error}") from error

    def tensor(self, name: str, empty: Callable[..., Tensor] = torch.empty) -> Tensor:
        """One tensor, whole. empty: makes the tensor that is filled, from shape and ``dtype``."""
        found = self.tensors[name]
        tensor = empty(tuple(found.size), dtype=found.properties.dtype)
        self.read({name: Piece(tuple(found.size), whole(found.size), tensor)})
        return tensor


class _PieceReader(DefaultLoadPlanner):
    """Says where in a rank's own tensors each part goes that the reader has read."""

    def __init__(self, pieces: dict[str, Piece]) -> None:
        super().__init__()
        self._pieces = pieces

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        piece = self._pieces[read_item.dest_index.fqn]
        box = next(box for box in piece.boxes if box.offset == tuple(read_item.dest_index.offset or ()))
        target = box.of(piece.tensor.detach())
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, start, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass
