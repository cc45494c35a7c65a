"""The last states of LSTMs, whose fake values torch 2.11 exports with a dim too many."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from autopart.passes import graph as graphs
from autopart.passes.exported import module_name, origin
from autopart.runtime.errors import CaptureError


def lstm_values(exported: fx.Node, states: tuple[Tensor, ...] | list[Tensor]) -> Any:
    """The fake values of an exported ``aten.lstm.input`` that begins with these states: it ends with as large ones.

    Raises CaptureError where the model reads last states whose shapes were wrong when it was traced.
    """
    sequence, *last = exported.meta["val"]
    if all(found.shape == given.shape for found, given in zip(last, states, strict=True)):
        return exported.meta["val"]
    path, source = origin(exported)
    if any(graphs.is_getitem(user) and user.args[1] and user.users for user in exported.users):
        raise CaptureError(
            f"module {module_name(path)} ({source}): the last states of an LSTM are "
            f"read, whose shapes torch {torch.__version__} does not know when it exports; use a later version, or the "
            "LSTM's first result alone"
        )
    return sequence, *states
