"""Parameters and buffers that have no size until their module is called, as those of ``nn.LazyLinear``."""

from __future__ import annotations

import itertools

from torch import nn
from torch.nn.parameter import is_lazy

from autopart.runtime.errors import CaptureError


def refuse_sizeless(model: nn.Module) -> None:
    """Raises CaptureError naming the first of them: nothing can be planned, and no optimizer be made, without sizes."""
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor):
            raise CaptureError(
                f"the {'parameter' if isinstance(tensor, nn.Parameter) else 'buffer'} {name!r} has no size yet, as of "
                "lazy modules before their first call; call the model once on a batch, before it is parallelized and "
                "an optimizer is made"
            )
