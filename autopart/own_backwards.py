"""Which gradients of its own a model makes while a capture runs it: export records forwards, and autograd the rest.

A ``torch.autograd.Function`` has a backward of its own, a hook changes a gradient on its way. A hook on a forward runs
in the trace, once, with tensors that have no values. What ``torch.utils.checkpoint`` runs in a Function is taken as it
is: it would come without gradients, and which layers run again is the plan's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointFunction


@contextmanager
def own_backwards(model: nn.Module) -> Iterator[dict[str, None]]:
    """Inside, what is said of each Function that is applied, torch's own left out, and of hooks."""
    found = dict.fromkeys(
        _on_hooks(f"module {path or '(root)'}", type(module).__name__)
        for path, module in model.named_modules()
        if module._backward_hooks or module._backward_pre_hooks
    )
    found |= dict.fromkeys(
        _on_forward_hooks(path, hook)
        for path, module in model.named_modules()
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        if not _of_torch(hook)
    )
    original, register = torch.autograd.Function.__dict__["apply"], torch.Tensor.register_hook

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction:
            run, _, *inputs = args
            return run(*inputs)
        if not cls.__module__.startswith("torch."):
            found[_on_function(cls.__qualname__)] = None
        return original.__func__(cls, *args, **kwargs)

    def register_hook(tensor: torch.Tensor, hook: Any) -> Any:
        if not isinstance(tensor, nn.Parameter):
            found[_on_hooks("a tensor in forward", getattr(hook, "__qualname__", type(hook).__name__))] = None
        return register(tensor, hook)

    setattr(torch.autograd.Function, "apply", classmethod(apply))  # noqa: B010
    setattr(torch.Tensor, "register_hook", register_hook)  # noqa: B010
    try:
        yield found
    finally:
        setattr(torch.autograd.Function, "apply", original)  # noqa: B010
        setattr(torch.Tensor, "register_hook", register)  # noqa: B010


def _of_torch(hook: Any) -> bool:
    """Such as those of ``weight_norm`` and ``prune``, which compute and keep nothing else."""
    return str(getattr(hook, "__module__", type(hook).__module__)).startswith("torch.")


def _on_forward_hooks(path: str, hook: Any) -> str:
    name = getattr(hook, "__qualname__", type(hook).__name__)
    return (
        f"module {path or '(root)'} has a hook on forward ({name}), of which the program has what it computes with "
        "tensors, but which is not called: what it keeps or prints is of the capture alone. Give what it looks at as "
        "an output of forward"
    )


def _on_function(name: str) -> str:
    return (
        f"{name} has a backward of its own, which is not used: its forward is differentiated. Where the two differ "
        "(straight-through estimators) the model trains otherwise than on one device"
    )


def _on_hooks(where: str, name: str) -> str:
    return (
        f"{where} has a hook on its gradients ({name}), which is not called: where it changes them the model trains "
        "otherwise than on one device. Hooks on parameters are called"
    )
