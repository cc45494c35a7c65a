"""CTC losses in a capture: export cannot trace ``F.ctc_loss``, and its targets are often one list for all samples.

Code that has padded labels drops the padding, ``labels.masked_select(mask)`` or ``labels[mask]``, and gives the loss
the list that is left. In it a sample's target is found by the lengths of those before, so no share of the samples can
be computed alone. Here the rows and the mask that such a list was made of are remembered, and the loss takes these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autopart.runtime import ctc
from autopart.runtime.errors import CaptureError

OP = torch.ops.autopart.ctc_losses.default
MODULE = ctc.__name__
"""What registers the op."""
_SELECTIONS = {Tensor.masked_select, torch.masked_select, Tensor.__getitem__}
_REDUCTIONS = ("none", "mean", "sum")


@dataclass(frozen=True, slots=True)
class _Selected:
    """A list of all targets, and the rows and mask that it was made of, as they were then."""

    targets: Tensor
    rows: Tensor
    mask: Tensor
    versions: tuple[int, ...]

    @staticmethod
    def of(targets: Tensor, rows: Tensor, mask: Tensor) -> _Selected:
        return _Selected(targets, rows, mask, tuple(tensor._version for tensor in (targets, rows, mask)))

    @property
    def holds(self) -> bool:
        """Whether none of the three was written to since."""
        return self.versions == tuple(tensor._version for tensor in (self.targets, self.rows, self.mask))


class RowsOfTargets(TorchFunctionMode):
    """Inside, ``F.ctc_loss`` of a trace is an op for each sample's loss, and their mean or sum."""

    def __init__(self) -> None:
        super().__init__()
        self._selected: dict[int, _Selected] = {}  # by id of the list

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is nn.functional.ctc_loss or function is torch.ctc_loss:
            return self._loss(*args, **kwargs)
        result = function(*args, **kwargs)
        if function in _SELECTIONS and isinstance(result, Tensor) and result.dim() == 1:
            rows, mask, *_ = (*args, *kwargs.values())
            if isinstance(mask, Tensor) and mask.dtype is torch.bool and mask.shape == rows.shape and rows.dim() == 2:
                self._selected[id(result)] = _Selected.of(result, rows, mask)
        return result

    def _loss(
        self,
        log_probs: Tensor,
        targets: Tensor,
        input_lengths: Any,
        target_lengths: Any,
        blank: int = 0,
        reduction: str | int = "mean",
        zero_infinity: bool = False,
    ) -> Tensor:
        """Raises CaptureError where the samples' targets cannot be told apart."""
        if log_probs.dim() != 3 or not isinstance(input_lengths, Tensor) or not isinstance(target_lengths, Tensor):
            raise CaptureError(
                "F.ctc_loss is captured with log-probabilities (time, sample, class) and with lengths that are tensors"
            )
        selected = self._selected.get(id(targets))
        if selected is not None and selected.holds:
            rows, valid = selected.rows, selected.mask
        elif targets.dim() == 2:
            rows = targets
            valid = torch.arange(rows.shape[1], device=rows.device) < target_lengths.to(rows.device).unsqueeze(-1)
        else:
            raise CaptureError(
                "F.ctc_loss is given the targets of all samples in one list; give them padded, (sample, place), or as "
                "rows.masked_select(mask), with nothing written to these in place afterwards"
            )
        if log_probs.dtype in (torch.float16, torch.bfloat16):  # as autocast does
            log_probs = log_probs.float()
        losses: Tensor = OP(log_probs, rows, valid, input_lengths, target_lengths, blank, zero_infinity)
        asked = _REDUCTIONS[reduction] if isinstance(reduction, int) else reduction
        if asked == "none":
            return losses
        if asked == "sum":
            return losses.sum()
        # as torch takes the mean
        return (losses / target_lengths.to(losses).clamp_min(1)).mean()
