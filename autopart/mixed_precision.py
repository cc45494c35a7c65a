"""Mixed precision by name: weights in their own type, matrix products in a narrower one, as under torch.autocast."""

from __future__ import annotations

import torch
from torch import nn

from autopart.passes.autocast import Autocast
from autopart.runtime.errors import CaptureError
from autopart.runtime.manifest import MIXED

# In which ranks may add gradients up. float16 would overflow.
SUMS = ("float32", "bfloat16", "float64")


def check_sums(reduce_dtype: str) -> str:
    """The type as it is. Raises CaptureError for one in which gradients are not added up."""
    if reduce_dtype and reduce_dtype not in SUMS:
        names = ", ".join(SUMS)
        raise CaptureError(f"reduce_dtype is one of {names}, or '' for the gradients' own type, not {reduce_dtype!r}")
    return reduce_dtype


def current_precision(model: nn.Module) -> str:
    """The precision of the autocast that is on for the model's device; '' when none is."""
    device = device_type(model)
    if device == "meta" or not torch.is_autocast_enabled(device):
        return ""
    return next((name for name, dtype in MIXED.items() if dtype == torch.get_autocast_dtype(device)), "")


def autocast_of(precision: str, model: nn.Module) -> Autocast:
    """What autocast has to be on while the model is captured. Raises CaptureError for an unknown name, or on meta."""
    if not precision:
        return {}
    if precision not in MIXED:
        raise CaptureError(f"precision is one of {', '.join(MIXED)}, or '' for the model's own type, not {precision!r}")
    device = device_type(model)
    if device == "meta":
        raise CaptureError(
            f"precision={precision!r}: torch.autocast knows no meta device; build the model on the CPU, or under "
            "torch._subclasses.FakeTensorMode, which needs no memory either"
        )
    return {device: MIXED[precision]}


def device_type(model: nn.Module) -> str:
    """Of the model's first parameter or buffer; the CPU for a model without any."""
    tensors = (*model.parameters(), *model.buffers())
    return tensors[0].device.type if tensors else "cpu"
