"""Splits a stage's backward: the gradients that other stages wait for first, those of weights when there is time.

Qi et al. 2024 (arXiv 2401.10241) call the two B and W. An op that meets a weight is cut out of the stage's graph: it is
computed inside one node of that graph, on a small graph of its own,

    outer:   ... -> x -> [ node ] -> y -> ...        inner:   x' -> op(x', weight) -> y'

whose backward asks the inner graph for the gradient of x' alone (a linear's node knows it without) and puts the
gradient of y' aside. So B is one walk of the outer graph, which frees what it has passed, and W is one walk of all
inner graphs together, restricted to weights: no gradient is computed twice (but inside a function that torch makes of
several ops, such as attention with a learned bias on the CPU: these have one inner graph, and what lies between its end
and both x' and the weight is). Between B and W remain what the weights' gradients need (the op's inputs, as its
derivative saved them) and the gradients put aside.

What depends on weights but on nothing received (position embeddings, a relative bias) counts as a weight, with its
whole graph. In a stage that receives nothing everything is such, so B does all of its backward and W nothing. An op
that meets no weight stays in the outer graph, and so does a recomputed layer with its weights
(:func:`autopart.runtime.recompute.checkpoint`): it is computed again once, in B, which makes all its gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from autopart.runtime.recompute import checkpoint

# How a tensor that depends on weights and on nothing received is marked.
_MARK = "_autopart_of_weights"


class LaterGradients:
    """What a microbatch's B leaves for its W: ends of inner graphs and the gradients that reach them."""

    def __init__(self) -> None:
        self._ends: list[GradientEdge] = []
        self._gradients: list[Tensor] = []

    def add(self, ends: Sequence[GradientEdge], gradients: Sequence[Tensor]) -> None:
        self._ends += ends
        self._gradients += gradients

    def compute(self, weights: Sequence[Tensor]) -> None:
        """Adds the gradients to the weights' ``.grad``."""
        ends, self._ends = self._ends, []
        gradients, self._gradients = self._gradients, []
        if ends:
            torch.autograd.backward(ends, gradients, inputs=list(weights))


class SplitBackward(TorchFunctionMode):
    """Inside, ops that meet one of ``weights`` are cut out; their weights' gradients go to ``later``."""

    def __init__(self, weights: Sequence[Tensor], later: LaterGradients) -> None:
        super().__init__()
        self._weights = {id(weight) for weight in weights if weight.requires_grad}
        self._later = later

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not torch.is_grad_enabled():
            return func(*args, **kwargs)
        if func is checkpoint:
            return func(*map(into_outer, args))
        others: list[Tensor] = []
        weights = False
        for item in _tensors(args, kwargs):
            if item.requires_grad:
                if id(item) in self._weights or hasattr(item, _MARK):
                    weights = True
                elif not any(item is other for other in others):
                    others.append(item)
        if not weights:
            return func(*args, **kwargs)
        if func is F.linear and not kwargs and len(others) == 1 and others[0] is args[0] and not _autocast(args[0]):
            return _cut_linear(*args, later=self._later)
        if others:
            return _cut_out(func, args, kwargs, others, self._later)
        result = func(*args, **kwargs)
        for item in _tensors((result,), {}):
            if item.requires_grad and id(item) not in self._weights:
                setattr(item, _MARK, self._later)
        return result


def into_outer(value: Any) -> Any:
    """A tensor for use where ops are not intercepted: a graph of weights alone stays apart from the outer graph.

    Its gradient is put aside by B, and W goes on from there. Other values are returned as they are.
    """
    tensor, later = value, getattr(value, _MARK, None)
    if later is None or not torch.is_grad_enabled():
        return tensor
    return _Aside.apply(_anchor(tensor.device), later, get_gradient_edge(tensor), tensor.detach())


def _cut_out(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    others: Sequence[Tensor],
    later: LaterGradients,
) -> Any:
    """Calls ``func`` on an inner graph whose ends join the outer graph in one node."""
    entries = _Enter.apply(_anchor(others[0].device), [tensor.detach() for tensor in others])
    swapped = {id(tensor): entry for tensor, entry in zip(others, entries, strict=True)}
    result = func(*_swap(args, swapped), **_swap(kwargs, swapped))
    ends = [item for item in _tensors((result,), {}) if item.requires_grad]
    if not ends:
        return result
    # what get_gradient_edge would make for a node that the ends keep alive, without a further op
    starts = [GradientEdge(entry.grad_fn, entry.output_nr) for entry in entries]
    edges = starts, [get_gradient_edge(end) for end in ends]
    joined = _Cut.apply(later, *edges, [end.detach() for end in ends], *others)
    return _swap(result, {id(end): new for end, new in zip(ends, joined, strict=True)})


def _cut_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, later: LaterGradients) -> Tensor:
    """What :func:`_cut_out` does for a linear, whose gradient of x is a product, without a walk of an inner graph."""
    inner = F.linear(x.detach(), weight, bias)
    joined: Tensor = _CutLinear.apply(later, get_gradient_edge(inner), weight.detach(), inner.detach(), x)
    return joined


def _autocast(tensor: Tensor) -> bool:
    return torch.is_autocast_enabled(tensor.device.type)


class _Enter(torch.autograd.Function):
    """The start of an inner graph: tensors without a history, and without being kept as leaves are."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        raise AssertionError("an inner graph is never walked beyond its start")


class _Cut(torch.autograd.Function):
    """An op's node in the outer graph: its backward takes the gradients that leave the inner graph."""

    @staticmethod
    def forward(
        ctx: Any,
        later: LaterGradients,
        entries: list[GradientEdge],
        ends: list[GradientEdge],
        values: list[Tensor],
        *others: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.parts = later, entries, ends
        ctx.set_materialize_grads(False)
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        (later, entries, all_ends), ctx.parts = ctx.parts, None
        ends = [end for end, gradient in zip(all_ends, gradients, strict=True) if gradient is not None]
        given = [gradient for gradient in gradients if gradient is not None]
        made: Sequence[Tensor | None] = [None] * len(entries)
        if ends:
            made = torch.autograd.grad(ends, entries, given, retain_graph=True, allow_unused=True)
            later.add(ends, given)
        return (None, None, None, None, *made)


class _CutLinear(torch.autograd.Function):
    """A linear's node in the outer graph."""

    @staticmethod
    def forward(ctx: Any, later: LaterGradients, end: GradientEdge, weight: Tensor, value: Tensor, x: Tensor) -> Tensor:
        ctx.parts = later, end, weight
        return value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (later, end, weight), ctx.parts = ctx.parts, None
        later.add([end], [gradient])
        rows = gradient.reshape(-1, weight.shape[0]).mm(weight)
        return None, None, None, None, rows.view(*gradient.shape[:-1], weight.shape[1])


class _Aside(torch.autograd.Function):
    """A tensor that depends on weights alone, as a start of the outer graph."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, later: LaterGradients, end: GradientEdge, value: Tensor) -> Tensor:
        ctx.parts = later, end
        return value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (later, end), ctx.parts = ctx.parts, None
        later.add([end], [gradient])
        return None, None, None, None


@functools.cache
def _anchor(device: torch.device) -> Tensor:
    """What makes the start of a graph require gradients; it gets none."""
    return torch.empty((), device=device).requires_grad_()


def _tensors(args: Any, kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    for item in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(item, Tensor):
            yield item
        elif type(item) in (list, tuple):
            yield from _tensors(item, {})


def _swap(value: Any, swapped: Mapping[int, Tensor]) -> Any:
    """The nested value with tensors replaced by identity."""
    if isinstance(value, Tensor):
        return swapped.get(id(value), value)
    if isinstance(value, dict):
        return {key: _swap(item, swapped) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_swap(item, swapped) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_swap(item, swapped) for item in value)
    return value
