"""Recomputation of activations, as emitted stages call it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.overrides import handle_torch_function, has_torch_function
from torch.utils.checkpoint import checkpoint as _checkpoint


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Calls the function, keeps its arguments alone, and calls it again when its gradients are wanted.

    Whoever intercepts torch's functions sees this as one, so that both calls do the same.
    """
    if has_torch_function(args):
        return handle_torch_function(checkpoint, args, function, *args)
    return _checkpoint(function, *args, use_reentrant=False)
