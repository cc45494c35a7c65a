"""Ties a step's results into autograd, so that the user's ``loss.backward()`` reaches the parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autopart.runtime.elsewhere import empty_gradient
from autopart.runtime.errors import InputError
from autopart.runtime.hooks import pass_over_none

# Runs the backward half of a schedule: gradients of the outputs -> gradients of the parameters.
Backward = Callable[[Sequence[Tensor | None]], Sequence[Tensor | None]]


# Gradients of the parameters as a script's hooks take them.
Shown = Callable[[Sequence[Tensor | None]], Sequence[Tensor | None]]
# Gradients, and the loss's gradient in the script's backward -> the gradients under that.
Scale = Callable[[Sequence[Tensor | None], Tensor], Sequence[Tensor | None]]


def hand_out(
    loss: Tensor,
    gradients: Sequence[Tensor | None],
    parameters: Sequence[Tensor],
    scale: Scale | None = None,
    shown: Shown = list,
    elsewhere: Sequence[Tensor] = (),
) -> Tensor:
    """The loss, attached to gradients that are known already; they are given away by its first backward.

    scale: applies the loss's own gradient to them (default: multiplies). elsewhere: see :class:`_Elsewhere`.
    """
    apply, at = scale or _multiply, [at for at, gradient in enumerate(gradients) if gradient is not None]

    def give(known: Sequence[Tensor | None], factor: Tensor) -> Sequence[Tensor | None]:
        scaled = shown(apply(known, factor))
        return [scaled[item] for item in at]

    # Others take no part: a hook on a parameter that nothing uses is not called.
    return _HandOut.apply(loss, list(gradients), give, _anchor(loss, elsewhere), *(parameters[item] for item in at))


def run_later(
    outputs: Sequence[Tensor], backward: Backward, parameters: Sequence[Tensor], elsewhere: Sequence[Tensor] = ()
) -> tuple[Tensor, ...]:
    """The outputs, attached to a backward that has yet to run. elsewhere: see :class:`_Elsewhere`."""
    return _RunBackward.apply(backward, len(outputs), *outputs, _anchor(outputs[0], elsewhere), *parameters)


def refuse(value: Tensor, why: str) -> Tensor:
    """The value, whose gradient nothing computes: a backward through it raises InputError, which says why.

    It has a gradient in the original, and without this one the script's backward would leave it out.
    """
    return _Refuse.apply(value, why, _anchor(value))


def _anchor(like: Tensor, elsewhere: Sequence[Tensor] = ()) -> Tensor:
    # A rank without parameters takes part in the backward as well.
    anchor = torch.zeros((), requires_grad=True, device=like.device)
    hooked = [p for p in elsewhere if p._backward_hooks or p._post_accumulate_grad_hooks]  # would be called with None
    asked = [p for p in elsewhere if p.requires_grad and not any(p is other for other in hooked)]
    return _Elsewhere.apply(anchor.view_as(anchor), *asked) if asked else anchor


class _Elsewhere(torch.autograd.Function):
    """Parameters of other ranks, which here are empty: so are their gradients where ``torch.autograd.grad`` asks for
    them. ``loss.backward()`` gives them none.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *parameters: Tensor) -> Tensor:
        ctx.anchored, ctx.parameters = anchor.grad_fn, parameters
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if torch._C._will_engine_execute_node(ctx.anchored):  # all of the graph
            return (None, *(None for _ in ctx.parameters))
        return (None, *map(empty_gradient, ctx.parameters))


class _HandOut(torch.autograd.Function):
    """The loss, whose gradients are known already: backward scales them and gives them to the parameters."""

    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, gradients: list[Tensor | None], scale: Scale, anchor: Tensor, *parameters: Tensor
    ) -> Tensor:
        ctx.gradients, ctx.scale = gradients, scale
        return loss.clone()  # not a view, which the script could not scale in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if ctx.gradients is None:
            raise InputError(
                "the gradients of this step were handed out already, by an earlier backward through the same call "
                "(retain_graph=True keeps nothing here); add losses up and go back once, or call the model again"
            )
        _check_once()
        # Scaled in place and let go: a copy would double the memory of all gradients.
        gradients, ctx.gradients = ctx.gradients, None
        scale, ctx.scale = ctx.scale, None
        return (None, None, None, None, *scale(gradients, gradient))


def _multiply(gradients: Sequence[Tensor | None], factor: Tensor) -> list[Tensor | None]:
    if factor.device.type == "cpu" and factor == 1:  # what loss.backward() starts from; elsewhere a look would wait
        return list(gradients)
    for gradient in gradients:
        if gradient is not None:
            _scale(gradient, factor)
    return list(gradients)


def _scale(tensor: Tensor, factor: Tensor) -> None:
    """Multiplies in place by one kernel; narrow types in float32, as they could not hold a loss scaler's factor.

    A factor with a dim counts when types are promoted, one without does not.
    """
    if tensor.dtype in (torch.float16, torch.bfloat16):
        tensor.view(tensor.shape or (1,)).mul_(factor.reshape(1).float())
    else:
        tensor.mul_(factor.reshape(()))


class _RunBackward(torch.autograd.Function):
    """The outputs of a forward; backward runs the schedule's backward half."""

    @staticmethod
    def forward(ctx: Any, later: Backward, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.later, ctx.reached = later, tensors[count + 1 :]
        ctx.set_materialize_grads(False)
        # No views, which the script could not write into, as normalizing what a generator made in place does.
        outputs = tuple(tensor.clone() if tensor._is_view() else tensor for tensor in tensors[:count])
        ctx.mark_dirty(*(output for output, tensor in zip(outputs, tensors, strict=False) if output is tensor))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if ctx.later is None:
            raise InputError(
                "the backward of this batch has run already (retain_graph=True keeps nothing here); add losses up and "
                "go back once, or call the model again"
            )
        _check_once()
        later, ctx.later = ctx.later, None
        reached, ctx.reached = ctx.reached, ()
        made = later(gradients)
        for tensor, gradient in zip(reached, made, strict=True):
            if gradient is None:
                pass_over_none(tensor)
        return (None, None, *(None for _ in gradients), None, *made)


def _check_once() -> None:
    """Raises InputError in a backward that is to be gone back through itself, whose graph would be left out."""
    if torch.is_grad_enabled():
        raise InputError(
            "create_graph=True asks for gradients that have gradients themselves, as a penalty on their norm has, "
            "which a parallel model does not give: a call goes back once; compute such a term in one process"
        )


class _Refuse(torch.autograd.Function):
    """A value as it is, with a backward that raises."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, why: str, anchor: Tensor) -> Tensor:
        ctx.why = why
        ctx.mark_dirty(value)  # neither a copy nor a view, which the script could not write into
        return value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise InputError(ctx.why)
