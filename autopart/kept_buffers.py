"""A model's buffers as they were before a capture: a forward that makes one leaves a tensor without values in it.

A new tensor under a buffer's name, as of a running mean, is a new value of the buffer: export would drop it.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.export.graph_signature import InputKind


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Buffers that are registered or replaced inside (biases by position, made when first used) are put back."""
    before = {module: (dict(module._buffers), set(module._non_persistent_buffers_set)) for module in model.modules()}
    try:
        yield
    finally:
        for module, (buffers, transient) in before.items():
            module._buffers.clear()
            module._buffers.update(buffers)
            module._non_persistent_buffers_set.clear()
            module._non_persistent_buffers_set.update(transient)


@contextmanager
def replaced_buffers_written(modules: Sequence[tuple[str, nn.Module]], replaced: set[str]) -> Iterator[None]:
    """Buffers of the modules that are replaced inside by others of their type and size are written instead.

    modules: with their paths. replaced: gets the names of these buffers.
    """
    # of layers that are away there are none, and none of them is asked for
    before = [(path, module, dict(dict.items(vars(module)["_buffers"]))) for path, module in modules]
    replaced.clear()
    yield
    for path, module, buffers in before:
        now = vars(module)["_buffers"]
        for name, old in buffers.items():
            new = dict.get(now, name)
            if old is None or new is None or new is old or (new.shape, new.dtype) != (old.shape, old.dtype):
                continue
            old.copy_(new.detach())
            now[name] = old
            replaced.add(f"{path}.{name}")


def drop_unread(exported: torch.export.ExportedProgram, replaced: Container[str]) -> None:
    """Takes away what is written into replaced buffers that are in no checkpoint and not read, such as the frequencies
    that a rotary embedding sets anew in every call: nobody sees it, and written buffers hold ops together on one stage.
    What the model itself writes in place stays.
    """
    graph = exported.graph_module.graph
    placeholders = {node.name: node for node in graph.find_nodes(op="placeholder")}
    for spec in exported.graph_signature.input_specs:
        if spec.kind is InputKind.BUFFER and not spec.persistent and spec.target in replaced:
            node = placeholders[spec.arg.name]
            writes = list(node.users)
            if all(
                use.target is torch.ops.aten.copy_.default and use.args[0] is node and not use.users for use in writes
            ):
                for use in writes:
                    graph.erase_node(use)
