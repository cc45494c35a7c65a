"""Capturing a model without weights: everything that it reads has to lie on the meta device as its parameters do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_MOST_NUMBERS = 64


def is_on_meta(model: nn.Module) -> bool:
    """Whether a model has parameters on meta. Others may have values for all that: ``torch.Tensor(size)`` takes no
    notice of a default device.
    """
    return any(parameter.is_meta for parameter in model.parameters())


@contextmanager
def all_on_meta(model: nn.Module, leaves: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The inputs' leaves to trace a model with; if its parameters are on meta, they are there too, and so is, inside,
    what of the model has values: buffers where it was built under ``parameters_on_meta``, and single parameters.
    """
    if not is_on_meta(model):
        yield dict(leaves)
        return
    kept: list[tuple[dict[str, Any], str, Tensor]] = []
    moved: dict[int, Tensor] = {}
    for module in model.modules():
        own: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for tensors in own:
            for name, tensor in tensors.items():
                if tensor is not None and not tensor.is_meta:
                    kept.append((tensors, name, tensor))
                    tensors[name] = moved.setdefault(id(tensor), _on_meta(tensor))
    try:
        yield {path: leaf.to("meta") if isinstance(leaf, Tensor) else leaf for path, leaf in leaves.items()}
    finally:
        for tensors, name, tensor in kept:
            tensors[name] = tensor


def _on_meta(tensor: Tensor) -> Tensor:
    moved = tensor.detach().to("meta")
    return nn.Parameter(moved, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved


class NumbersOnMeta(TorchFunctionMode):
    """``torch.tensor(numbers, device="meta")`` is made by ops that keep the numbers, which a constant on meta loses.

    For the model's forward alone: around an export it would be asked about all that export itself does with tensors.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        asked = function is torch.tensor and device is not None and torch.device(device).type == "meta"
        if not asked or len(args) != 1 or not kwargs.keys() <= {"dtype", "device"}:
            return function(*args, **kwargs)
        shape, numbers = _flat(args[0])
        if any(not isinstance(number, bool | int | float) for number in numbers) or len(numbers) > _MOST_NUMBERS:
            return function(*args, **kwargs)
        dtype = kwargs.get("dtype") or _type_of(numbers)
        if not numbers:
            return torch.empty(shape, dtype=dtype, device=device)
        single = [torch.full((), number, dtype=dtype, device=device) for number in numbers]
        return torch.stack(single).reshape(shape) if shape else single[0]


def _flat(data: Any) -> tuple[tuple[int, ...], list[Any]]:
    """The shape of nested lists, and what is in them, in order."""
    if not isinstance(data, list | tuple):
        return (), [data]
    parts = [_flat(item) for item in data]
    inner = parts[0][0] if parts else ()
    return (len(data), *inner), [number for _, numbers in parts for number in numbers]


def _type_of(numbers: Sequence[bool | int | float]) -> torch.dtype:
    """As ``torch.tensor`` chooses."""
    if not numbers or any(isinstance(number, float) for number in numbers):
        return torch.get_default_dtype()
    return torch.bool if all(isinstance(number, bool) for number in numbers) else torch.int64
