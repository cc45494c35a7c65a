"""Runs batches in a row without draining the pipeline, each on the weights that it began with.

PipeDream-2BW (Narayanan et al. 2021, arXiv 2006.09503, section 3.1). Call t of the model runs all forwards of batch t
and, of the backwards, what is left of batch t - 1 and all of batch t but the microbatches still on their way. It hands
out the gradients of batch t - 1, so that the user's optimizer applies each one step late:

    W(t+1) = W(t) - lr * grad_{t-1}(W(t-1)),    W(1) = W(0)

Two versions of the weights are alive: that of the batch that begins, which is the user's parameters, and a copy of that
of the batch before, until its last backward. The optimizer updates the parameters in place; so at the end of a call the
values that backwards still need stay where they are and the parameters move to the other buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autopart.runtime.errors import InputError
from autopart.runtime.executor import Run
from autopart.runtime.gradients import separate_gradients
from autopart.runtime.inputs import Division
from autopart.runtime.schedule import Action, Work
from autopart.runtime.schedule.double_buffered import carried

_in_flight: set[object] = set()
"""The keys of this process's buffers with messages of a batch on their way, also of those that went: messages stay."""


def check_nothing_waits(but: DoubleBuffer | None) -> None:
    """Raises InputError where a model other than that of ``but`` has a batch on its way between ranks.

    Its messages lie between the same ranks, so those of another model would be taken for them.
    """
    if _in_flight - ({but.key} if but is not None else set()):
        raise InputError(
            "a batch of another model is on its way under the schedule 2bw, whose messages this one would take for its "
            "own; call that model's finish() on all ranks before this one (where it is gone, start the job anew)"
        )


@dataclass(slots=True)
class Batch:
    """A batch on its way. weights: what its microbatches are computed with, in the order of the parameters.

    number: counted from the first after a pause. version: how many gradients were handed out before it began.
    """

    number: int
    version: int
    run: Run
    division: Division
    weights: list[nn.Parameter]


class DoubleBuffer:
    """The batches in flight on one rank, and the versions of its weights.

    log: of each forward the batch, the microbatch and the version; most_versions: alive at once so far.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        parameters: Sequence[nn.Parameter],
        actions: tuple[Action, ...],
        reduce: Callable[[], None],
    ) -> None:
        self._parameters = list(parameters)
        self._reduce = reduce
        self._actions = tuple(zip(actions, carried(actions), strict=True))
        # Only then does a later update meet a backward that still needs the old values.
        self._retains = any(before and action.work is not Work.REDUCE for action, before in self._actions)
        index = {id(parameter): position for position, parameter in enumerate(self._parameters)}
        self._uses = [
            (module, name, index[id(parameter)])
            for stage in modules
            for module in stage.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and id(parameter) in index
        ]
        self._spare: list[Tensor] = []
        self.key = object()
        self._handed_out = 0
        self._number = 0
        self.batch: Batch | None = None
        self.log: list[tuple[int, int, int]] = []
        self.most_versions = 0

    def advance(self, run: Run, division: Division) -> list[Tensor | None]:
        """Begins a batch and ends the one before; returns the gradients of that one, none for the first."""
        before = self.batch
        if any(action.work.is_send or action.work.is_receive for action, _ in self._actions):
            _in_flight.add(self.key)
        weights = [nn.Parameter(p.data, requires_grad=p.requires_grad) for p in self._parameters]
        self.batch = Batch(self._number, self._handed_out, run, division, weights)
        self._number += 1
        gradients = self._do(before, self.batch)
        if self._retains:
            old = before.weights if before is not None else []
            self._spare = self._spare or [weight.data for weight in old]
            for position, parameter in enumerate(self._parameters):
                kept = parameter.data
                fresh = self._spare[position].copy_(kept) if self._spare else kept.clone()
                parameter.data = fresh
            self._spare = []
        return gradients

    def finish(self) -> list[Tensor | None]:
        """Ends the batch in flight; returns its gradients."""
        before, self.batch = self.batch, None
        self._number = 0
        try:
            return self._do(before, None)
        finally:
            _in_flight.discard(self.key)

    def _do(self, before: Batch | None, batch: Batch | None) -> list[Tensor | None]:
        gradients: list[Tensor | None] = [None] * len(self._parameters)
        storages = [each.weights[0].data_ptr() for each in (before, batch) if each is not None and each.weights]
        self.most_versions = max(self.most_versions, len(set(storages)))
        try:
            for action, earlier in self._actions:
                mine = before if earlier else batch
                if mine is None:
                    continue
                if action.work is Work.REDUCE:
                    gradients = self._sum(mine)
                    self._handed_out += 1
                    continue
                if action.work.is_compute:
                    self._install(mine.weights)
                if action.work is Work.FORWARD:
                    assert action.microbatch is not None
                    self.log.append((mine.number, action.microbatch, mine.version))
                with torch.enable_grad():
                    mine.run.do(action)
        finally:
            self._install(self._parameters)
        return gradients

    def _install(self, weights: Sequence[nn.Parameter]) -> None:
        for module, name, position in self._uses:
            module._parameters[name] = weights[position]

    def _sum(self, batch: Batch) -> list[Tensor | None]:
        with separate_gradients(self._parameters) as made:
            for parameter, weight in zip(self._parameters, batch.weights, strict=True):
                parameter.grad, weight.grad = weight.grad, None
            self._reduce()
        return list(made)
