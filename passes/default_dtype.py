"""Results whose type is torch's default type written out: what an op makes of whole numbers alone.

``1.0 - mask`` of an integer mask is of the default type, which is a setting of the process. Where a model is captured
under another than float32, the graph has to say so itself: passes and ranks compute under their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from autopart.passes.autocast import operands, replaced


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Inside, torch's default type is another."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def promotions(
    target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], value: Any, fake_mode: Any
) -> list[torch.dtype] | None:
    """The type of each tensor among the arguments with which the op gives its value under float32 as default too.

    args, kwargs: with fake tensors, in the order of :func:`operands`. None: nothing to be cast, or not to be said so.
    """
    given = operands((args, kwargs))
    if not isinstance(value, Tensor) or value.dtype != torch.get_default_dtype():
        return None
    if not given or any(tensor.is_floating_point() or tensor.is_complex() for tensor in given):
        return None
    own = [tensor.dtype for tensor in given]
    numbers = [dtype if dtype is torch.bool else value.dtype for dtype in own]
    for dtypes in (own, numbers, [value.dtype for _ in own]):
        cast = replaced((args, kwargs), [t.to(dtype) for t, dtype in zip(given, dtypes, strict=True)])
        try:
            with fake_mode, torch.no_grad(), default_dtype(torch.float32):
                found = target(*cast[0], **cast[1])
        except RuntimeError:  # a condition that has to be bool, an index
            continue
        if found.dtype == value.dtype:
            return None if dtypes == own else dtypes
    return None


def is_made_by_default(
    target: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any
) -> bool:
    """Whether the op makes a tensor of numbers, of the default type since none is asked for."""
    if operands((args, kwargs)) or not isinstance(value, Tensor) or value.dtype != torch.get_default_dtype():
        return False
    names = [argument.name for argument in target._schema.arguments]
    return "dtype" in names[len(args) :] and kwargs.get("dtype") is None
