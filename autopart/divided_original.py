"""The original, once its program is planned: a rank's shares of it are no model.

Its parameters are this rank's shares then, or empty, and the statistics of its buffers stay what they were. So it is
refused to compute with it and to take its state, which would be written as if it were the whole model's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from autopart.runtime.errors import PlanError
from autopart.runtime.manifest import Manifest

_CAPTURED: ContextVar[bool] = ContextVar("captured", default=False)
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A hook before a module computes, or gives its state. name: of a tensor that is not what it seems."""

    name: str
    why: str

    def __call__(self, module: nn.Module, *_: Any) -> None:
        if not _CAPTURED.get():
            raise PlanError(
                f"the original model cannot compute, or give its state, once it is planned, since {self.name!r} "
                f"{self.why}; call, or take state_dict() of, what parallelize returned, on all ranks "
                "(nor can a part of it belong to a second parallelized model)"
            )


@contextmanager
def captured_again() -> Iterator[None]:
    """Inside, the original computes as ever: a trace reads no values."""
    token = _CAPTURED.set(True)
    try:
        yield
    finally:
        _CAPTURED.reset(token)


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Of its parameters, before they are divided."""
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters() if not parameter.is_meta}


def refuse_parts(model: nn.Module, whole: Shapes, manifest: Manifest) -> list[RemovableHandle]:
    """Refuses what modules would do with parameters that are not whole, or buffers that the program goes on with."""
    handles: list[RemovableHandle] = []
    mutated = {name for spec in manifest.parameters if spec.mutated for name in (spec.name, *spec.aliases)}
    for path, module in model.named_modules():
        refusal = None
        for name, parameter in module.named_parameters(path, recurse=False):
            if tuple(parameter.shape) != whole.get(name, tuple(parameter.shape)):
                refusal = refusal or Refusal(name, "is this rank's share alone")
        for name, _ in module.named_buffers(path, recurse=False):
            if name in mutated:
                refusal = refusal or Refusal(name, "is what it was when the model was planned")
        if refusal is not None:
            handles.append(module.register_forward_pre_hook(refusal))
            handles.append(module.register_state_dict_pre_hook(refusal))
    return handles
