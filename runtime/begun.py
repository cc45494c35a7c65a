"""Transitions that are begun as soon as their operand is there, and waited for where the result is read first.

Between the two a rank computes what needs neither::

    begun = collectives.begin(collectives.all_reduce, x, tp)
    y = self.shared_expert(h)
    z = begun.wait() + y

Backward the two change places: the gradient's collective starts where the result was waited for, and is waited for
where the transition was begun, behind the gradients of what lies between. autograd sees two nodes, joined by a tensor
without memory of its own in the operand's shape.

On CUDA a wait makes the stream wait, not the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd import Function

from autopart.runtime.later import Begin, Later


class Begun:
    """One transition on its way. What was not begun by :meth:`start`, as on an axis of one rank, is there at once."""

    def __init__(self) -> None:
        self._given: Tensor | None = None
        self._flight: _Flight | None = None

    def start(self, x: Tensor, forward: Begin, backward: Begin, later: Later | None = None) -> Tensor:
        """Begins it; returns what :meth:`hold` is to have. later: products that read the result."""
        self._flight = _Flight(backward)
        weights = later.start() if later is not None and later.is_of_use(x) else ()
        token: Tensor = _Begin.apply(self._flight, forward, later, x, *weights)
        return token

    def hold(self, given: Tensor) -> None:
        """The result, or what :meth:`start` returned."""
        self._given = given

    def wait(self) -> Tensor:
        """The result; once."""
        given, flight = self._given, self._flight
        assert given is not None, "a transition is waited for once"
        self._given = self._flight = None
        return given if flight is None else _Wait.apply(flight, given)


class _Flight:
    """What both nodes know. end: waits for what was begun last, forward or backward."""

    __slots__ = ("backward", "end")

    def __init__(self, backward: Begin) -> None:
        self.backward = backward
        self.end: Callable[[], Tensor] | None = None

    def land(self) -> Tensor:
        end, self.end = self.end, None
        assert end is not None, "a transition is waited for before it was begun"
        return end()


class _Begin(Function):
    @staticmethod
    def forward(ctx: Any, flight: _Flight, forward: Begin, later: Later | None, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.parts = flight, later if weights else None
        flight.end = forward(x.detach(), "forward")
        return _without_memory(x)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        flight, later = ctx.parts
        made = later.gradients() if later is not None else ()
        return None, None, None, flight.land(), *made


class _Wait(Function):
    @staticmethod
    def forward(ctx: Any, flight: _Flight, token: Tensor) -> Tensor:
        ctx.parts = flight, token.detach()
        return flight.land()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        flight, token = ctx.parts
        flight.end = flight.backward(gradient, "backward")
        return None, token


def _without_memory(x: Tensor) -> Tensor:
    """Zeros of the same shape and type in the memory of one; they also go back, where anomalies may be looked for."""
    return x.new_zeros(()).expand_as(x)
