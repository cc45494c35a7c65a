"""Containers and empty parameters for emitted stages, so that parameters keep their original qualified names."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Namespace(nn.Module):
    """A module without a forward: a path of names down to parameters and buffers.

    ``self.h = Namespace()``, ``self.h["0"] = Namespace(weight=parameter(4, 4))`` give the parameter ``h.0.weight``.
    Keyword arguments are children, parameters or buffers. Items are what attributes are, for names such as ``0`` that
    are no Python identifiers.
    """

    def __init__(self, **members: nn.Module | Tensor | None) -> None:
        super().__init__()
        for name, member in members.items():
            self[name] = member

    def __getitem__(self, name: str) -> nn.Module | Tensor | None:
        # The dictionaries first: a child may bear the name of one of nn.Module's own methods, such as "type".
        for members in (self._modules, self._parameters, self._buffers):
            if name in members:
                return members[name]
        raise KeyError(f"{type(self).__name__} has no member {name!r}; it has {sorted(self._names())}")

    def __setitem__(self, name: str, member: nn.Module | Tensor | None) -> None:
        if isinstance(member, Tensor) and not isinstance(member, nn.Parameter):
            self.register_buffer(name, member, persistent=not getattr(member, "_autopart_transient", False))
        elif isinstance(member, nn.Module):
            # not add_module, which refuses the names of nn.Module's own methods
            super().__setattr__(name, member)
        else:
            self.register_parameter(name, member)

    def __setattr__(self, name: str, value: Tensor | nn.Module) -> None:
        # nn.Module takes an assigned tensor for a plain attribute; here it is a buffer.
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and name not in self._buffers:
            self[name] = value
        else:
            super().__setattr__(name, value)

    def __contains__(self, name: str) -> bool:
        return name in self._names()

    def _names(self) -> set[str]:
        return {*self._modules, *self._parameters, *self._buffers}


def parameter(*shape: int, dtype: torch.dtype = torch.float32, trainable: bool = True) -> nn.Parameter:
    """A parameter of this shape on the meta device; the loader puts the rank's share of the weights in its place."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=trainable)


def buffer(*shape: int, dtype: torch.dtype = torch.float32, persistent: bool = True) -> Tensor:
    """A buffer of this shape on the meta device, for a :class:`Namespace`; filled by the loader like a parameter."""
    tensor = torch.empty(shape, dtype=dtype, device="meta")
    if not persistent:
        tensor._autopart_transient = True  # type: ignore[attr-defined]
    return tensor
