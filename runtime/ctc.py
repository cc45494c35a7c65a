"""The CTC loss of each sample as one op that torch.export can trace.

``F.ctc_loss`` cannot be: it allocates by the longest target, whose length is data. The targets of one share of the
samples cannot be told in a list of all samples' targets either, so they come as rows, with a mask of what counts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, library, nn

from autopart.runtime.errors import InputError

NAME = "autopart::ctc_losses"

library.define(
    NAME,
    "(Tensor log_probs, Tensor targets, Tensor valid, Tensor input_lengths, Tensor target_lengths, "
    "int blank, bool zero_infinity) -> Tensor",
)


def _losses(
    log_probs: Tensor,
    targets: Tensor,
    valid: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    return nn.functional.ctc_loss(
        log_probs,
        targets.long().masked_select(valid),
        input_lengths,
        target_lengths,
        blank=blank,
        reduction="none",
        zero_infinity=zero_infinity,
    )


def ctc_losses(
    log_probs: Tensor,
    targets: Tensor,
    valid: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    """The loss ``(n,)`` of each of n samples.

    log_probs: ``(t, n, c)``, float32 or float64, the blank among the c classes. targets, valid: ``(n, u)``; a sample's
    target are the classes in its row that are valid. input_lengths, target_lengths: ``(n,)``; the latter has to be
    ``valid.sum(-1)``. blank, zero_infinity: as ``F.ctc_loss`` has them. Raises InputError, on the ranks that have a
    sample whose lengths disagree.
    """
    counted = valid.sum(-1)
    if not torch.equal(counted, target_lengths.to(counted)):
        raise InputError(
            f"the CTC loss is given target lengths {target_lengths.tolist()} for targets that have {counted.tolist()} "
            "classes each; make them agree, sample by sample"
        )
    return _losses(log_probs, targets, valid, input_lengths, target_lengths, blank, zero_infinity)


library.impl(NAME, "CompositeExplicitAutograd", ctc_losses)


@library.register_fake(NAME)  # type: ignore[untyped-decorator]
def _fake(log_probs: Tensor, *_: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.options = inputs[5:]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """Runs the forward again: what torch's backward needs of it has a size that is data."""
    log_probs, *rest = ctx.saved_tensors
    with torch.enable_grad():
        leaf = log_probs.detach().requires_grad_()
        losses = _losses(leaf, *rest, *ctx.options)
    (found,) = torch.autograd.grad(losses, leaf, gradient)
    return found, *(None,) * 6


library.register_autograd(NAME, _backward, setup_context=_keep)
