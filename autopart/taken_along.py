"""``take_along_dim`` in a trace: torch compares its sizes as numbers, which would fix the batch; a gather does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopart.passes.sizes import Extent, extent


class TakenAlong(TorchFunctionMode):
    """Inside, ``take_along_dim`` is the gather that it is for torch too, of what is broadcast first."""

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        taken = None
        if function is torch.take_along_dim or function is Tensor.take_along_dim:
            taken = _gathered(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {})) if taken is None else taken


def _gathered(input: Any, indices: Any = None, dim: Any = None, **others: Any) -> Tensor | None:
    """None for what is left to torch: flat indices, and sizes that do not fit or are not known."""
    if others or not isinstance(input, Tensor) or not isinstance(indices, Tensor) or not isinstance(dim, int):
        return None
    if input.dim() != indices.dim() or not -input.dim() <= dim < input.dim() or indices.dtype != torch.int64:
        return None
    dim %= input.dim()
    sizes: list[Any] = []
    for place, pair in enumerate(zip(input.shape, indices.shape, strict=True)):
        one, other = map(extent, pair)  # compared without asking what the batch's size is
        if one is None or other is None or (one != other and _ONE not in (one, other) and place != dim):
            return None
        sizes.append(pair[one == _ONE])
    read, picked = ([*sizes[:dim], whole.shape[dim], *sizes[dim + 1 :]] for whole in (input, indices))
    return input.expand(read).gather(dim, indices.expand(picked))


_ONE = Extent(1)
