"""Tensors without sizes that a program could go by: of lazy modules before their first call, and inputs that are no
plain array, as sparse and nested ones are.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from autopart.runtime.errors import CaptureError


def refuse_lazy_modules(model: nn.Module) -> None:
    """Raises CaptureError naming the first lazy parameter or buffer: without sizes nothing can be planned."""
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor):
            raise CaptureError(
                f"the {'parameter' if isinstance(tensor, nn.Parameter) else 'buffer'} {name!r} has no size yet, as of "
                "lazy modules before their first call; call the model once on a batch, before it is parallelized and "
                "an optimizer is made"
            )


def refuse_sparse_and_nested(inputs: Mapping[str, Any]) -> None:
    """Raises CaptureError naming the first that is nested or sparse. inputs: by path."""
    for path, value in inputs.items():
        if not isinstance(value, Tensor) or (value.layout == torch.strided and not value.is_nested):
            continue
        if value.is_nested:
            what, instead = "nested", "pass torch.nested.to_padded_tensor(...) and a mask of what is padding"
        else:
            what, instead = "sparse", "pass its indices and values, for index_add or scatter_add, or to_dense() of it"
        raise CaptureError(f"the input {path!r} is a {what} tensor, which a program does not divide or send: {instead}")
