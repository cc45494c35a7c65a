"""Parameters that are several but lie in one memory: they stay equal only as long as nothing is divided or moved."""

from __future__ import annotations

import itertools

from torch import Tensor, nn

from autopart.runtime.errors import CaptureError


def check_apart(model: nn.Module) -> None:
    """Raises CaptureError where two parameters of a model that are not one share elements."""
    spans = sorted(
        (parameter.data_ptr(), parameter.data_ptr() + parameter.nbytes, name)
        for name, parameter in model.named_parameters()
        if _has_memory(parameter) and parameter.numel() and parameter.is_contiguous()
    )
    for (_, stop, name), (start, _, other) in itertools.pairwise(spans):
        if start < stop:
            raise CaptureError(
                f"the parameters {name!r} and {other!r} are two that lie in one memory, as by assigning .data: divided "
                "or on other devices they would be trained apart; make them one, by assigning the parameter itself"
            )


def _has_memory(parameter: nn.Parameter) -> bool:
    """Not so of those on meta, of fake ones, and of those whose memory was taken away."""
    return not parameter.is_meta and type(parameter.data) is Tensor and parameter.untyped_storage().nbytes() > 0
