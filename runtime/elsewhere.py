"""Parameters and buffers that only other ranks hold: here they have no elements, and say so where they meet others.

So what goes over ``model.parameters()`` finds the same list on all ranks, of which another model's, or a list that was
made before the model was planned, has the same order. With the stage's own ones alone, averages of weights kept in a
model that is not parallelized would meet other layers, in silence where shapes are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor, nn

from autopart.runtime.errors import PlanError
from autopart.runtime.links import dtype_of
from autopart.runtime.loading import Originals, give_data, original_of
from autopart.runtime.manifest import Manifest, ParameterSpec
from autopart.runtime.norms import NORMS, Share, nothing

DIVIDED_ALIKE = (
    "What is averaged with a parallelized model, or copied from or to it, tensor by tensor, has to be divided like it: "
    "wrap a copy.deepcopy of what autopart.parallelize returned, before the first call, or parallelize the copy with "
    "the same arguments, frozen by requires_grad_(False); lists of tensors are made from these once the model is "
    "planned; or go by state_dict(), which is whole on every rank"
)


class _Elsewhere(Tensor):
    """held: its name, and where it is."""

    held: str

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """As of any tensor. Raises PlanError where that fails, as for one with elements beside it."""
        if func is torch._foreach_norm and Share in types:
            return NotImplemented
        tensors = (item for arg in args for item in (arg if isinstance(arg, list | tuple) else (arg,)))
        held = next((getattr(item, "held", "a part") for item in tensors if isinstance(item, _Elsewhere)), "a part")
        try:
            with torch._C.DisableTorchFunctionSubclass():
                made = func(*args, **(kwargs or {}))
        except RuntimeError as error:
            raise PlanError(
                f"{func.__name__}() met {held}, of which this rank has no elements: {error}. {DIVIDED_ALIKE}"
            ) from error
        if type(made) is Tensor and not made.numel():  # .data, .detach(), .float()
            made = made.as_subclass(BufferElsewhere)
            made.held = held
        if func in NORMS and type(made) is Tensor and made.dim() == 0:  # as of torch.autograd.grad's gradients
            return nothing(made)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved and sent as a plain tensor, or parameter, without elements."""
        with torch._C.DisableTorchFunctionSubclass():
            empty: Tensor = self.detach().as_subclass(Tensor)
            plain = nn.Parameter(empty, self.requires_grad) if isinstance(self, nn.Parameter) else empty
            return plain.__reduce_ex__(protocol)


class ParameterElsewhere(_Elsewhere, nn.Parameter):
    """A parameter of another rank."""


class BufferElsewhere(_Elsewhere):
    """A buffer of another rank."""


def elsewhere(manifest: Manifest, device: torch.device, own: Container[str], originals: Originals) -> dict[str, Tensor]:
    """The parameters and buffers that only other ranks hold, by their specs' names. own: the names of this rank's.

    Of parameters the originals themselves where there are any, so that what was made of these, as an optimizer is,
    gives their memory back. Dims are as many as they were, which optimizers look at, the first of them empty.
    """
    found = {}
    for spec in manifest.parameters:
        if spec.name not in own:
            found[spec.name] = _empty(spec, device, original_of(spec, originals))
            where = f"stage {spec.stages[0]}" if len(spec.stages) == 1 else f"stages {', '.join(map(str, spec.stages))}"
            found[spec.name].held = f"{spec.name!r} of {where}"
    return found


def _empty(spec: ParameterSpec, device: torch.device, original: Tensor | None) -> Any:
    empty = torch.empty((0, *spec.shape[1:]), dtype=dtype_of(spec.dtype), device=device)
    if spec.buffer:
        return empty.as_subclass(BufferElsewhere)
    if not isinstance(original, nn.Parameter):
        return ParameterElsewhere(empty, requires_grad=spec.trainable)
    if original.is_meta:
        return ParameterElsewhere(empty, requires_grad=original.requires_grad)
    original.grad = None
    give_data(original, empty)
    original.__class__ = ParameterElsewhere
    return original


def empty_gradient(parameter: Tensor) -> Tensor:
    """That of a parameter of another rank, of which ``torch.autograd.grad`` asks: its norm counts as nothing."""
    return torch.empty_like(parameter).as_subclass(BufferElsewhere)


def restore(tensor: Tensor, value: Tensor) -> None:
    """Gives a tensor of the original all its elements again."""
    if isinstance(tensor, ParameterElsewhere):
        tensor.__class__ = nn.Parameter  # type: ignore[assignment]
    give_data(tensor, value.to(tensor.device))
