"""``len(tensor)`` in a traced model: Python makes a number of it, which would fix the batch whose rows it counts."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from autopart.passes.sizes import extent


@contextmanager
def symbolic_lengths(model: nn.Module) -> Iterator[None]:
    """Inside, ``len`` of a tensor is its first size, symbol or not, in the files that define the model's modules.

    For all threads: the files' own names are changed, and put back.
    """
    own = {base.__module__ for module in model.modules() for base in type(module).__mro__}
    own.add(getattr(getattr(model, "loss_function", None), "__module__", None) or "")
    files = [sys.modules[name] for name in own if name in sys.modules and name.partition(".")[0] not in _NOT_MODELS]
    changed = [file for file in files if "len" not in vars(file)]
    for file in changed:
        vars(file)["len"] = _length
    try:
        yield
    finally:
        for file in changed:
            del vars(file)["len"]


_NOT_MODELS = ("torch", "builtins", "autopart")


def _length(counted: Any) -> Any:
    if isinstance(counted, Tensor) and counted.dim() and extent(counted.shape[0]) is not None:
        return counted.shape[0]
    return builtins.len(counted)  # also of rows whose number is data
