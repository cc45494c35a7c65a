"""Runs one rank's action list: of one stage, or of several."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from autopart.runtime.data_weights import Pass
from autopart.runtime.errors import PlanError
from autopart.runtime.input_gradients import InputGradients
from autopart.runtime.invariant import Share
from autopart.runtime.links import Arrival, Links, Samples
from autopart.runtime.manifest import Manifest, StageSpec, ValueSpec, argument_name
from autopart.runtime.mesh import Mesh
from autopart.runtime.schedule import Action, Work
from autopart.runtime.schedule.receipts import Receipts
from autopart.runtime.trace import Recorder
from autopart.runtime.traffic import Phase
from autopart.runtime.weight_split import LaterGradients, SplitBackward, into_outer
from autopart.runtime.written_buffers import BeforeBatch, add_up, average_statistics, written_once

# What starts the backward of a microbatch: output name -> gradient; None or missing: the output has none.
Seeds = Callable[[int, Mapping[str, Tensor]], Mapping[str, Tensor | None]]


_EVALUATED = -1
_AHEAD = 2
"""Microbatches that an evaluation's stage may be ahead of those that receive from it."""


@dataclass(frozen=True, slots=True)
class Feed:
    """What a step gives to a rank's stages besides what other stages send.

    replicas: that have samples of their own; 1 where each has the whole batch. in_copies: each of every stage has.
    inputs: microbatch -> the stages' inputs by name. samples: per microbatch on this rank (``b``); whole: over all
    replicas; batch: in the whole step (``B``). totals: by name. first: microbatch -> its first sample, counted in the
    whole batch. gradients: of inputs, those that are wanted.
    """

    inputs: Callable[[int], Mapping[str, Tensor]]
    samples: int
    whole: int
    batch: int
    totals: Mapping[str, Tensor]
    first: Callable[[int], int]
    replicas: int
    in_copies: bool
    gradients: InputGradients


@dataclass(slots=True)
class _Microbatch:
    """What a stage keeps of a microbatch between its actions."""

    received: dict[str, Tensor] = field(default_factory=dict)
    sent: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    gradients: list[tuple[ValueSpec, Tensor]] = field(default_factory=list)
    leaves: dict[str, Tensor] = field(default_factory=dict)  # inputs whose gradients are wanted
    # Apart: the gradients' receives may be posted before the forward, which must not wait for them.
    later: LaterGradients | None = None
    arriving: dict[Phase, list[tuple[Action, Arrival]]] = field(default_factory=lambda: {"forward": [], "backward": []})


class Run:
    """One batch on its way through a rank's stages: forward, and if ``train`` backward.

    modules: the stages by number. outputs: per microbatch, the stages' outputs by name, detached. Gradients gather in
    the parameters' ``.grad``; ``reduce`` is what the last REDUCE calls. recorders: note when each action starts and
    ends. passing: entered around the computation of each microbatch's forward and backward, with the stage. receipts:
    of the schedule that is trained by; what was sent is let go as they say, at the latest when the run ends.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        manifest: Manifest,
        mesh: Mesh,
        links: Links,
        feed: Feed,
        train: bool,
        seeds: Seeds | None = None,
        reduce: Callable[[], None] | None = None,
        keep: Collection[str] | None = None,
        recorders: Sequence[Recorder] = (),
        passing: Callable[[Pass, int], AbstractContextManager[None]] | None = None,
        receipts: Receipts | None = None,
    ) -> None:
        self._receipts: Receipts = receipts or {}
        self._passing = passing or (lambda kind, stage: nullcontext())
        self._recorders = recorders
        self._keep = keep
        self._modules = modules
        self._specs: Mapping[int, StageSpec] = {stage: manifest.stages[stage] for stage in mesh.stages}
        self._mesh = mesh
        self._links = links
        self._feed = feed
        self._train = train
        self._reduce = reduce
        self._microbatches: dict[tuple[int, int], _Microbatch] = {}
        self._weights: dict[int, list[Tensor]] = {}
        self._manifest = manifest
        self._written = {stage: BeforeBatch(own) for stage, own in written_once(modules, manifest).items()}
        self._step = mesh.step
        self._batch = mesh.step if train else _EVALUATED
        self._alone = len(set(mesh.place_of)) == len(mesh.place_of)  # no rank has several stages
        self.seeds = seeds
        self.outputs: dict[int, dict[str, Tensor]] = {}

    def execute(self, actions: Sequence[Action], flush: bool = True) -> None:
        """Does the actions in order. Raises what the stage raises; PlanError if it returns another number of values.

        flush: ends when all that was sent has left, also by other runs.
        """
        with torch.set_grad_enabled(self._train):
            self._weights = self._split_weights(actions) if self._train else {}
            if actions and actions[0].work.is_receive:  # while others compute, with nothing kept for the backward yet
                self._mesh.weights.arrive()
            last_sum = max((index for index, action in enumerate(actions) if action.work is Work.REDUCE), default=-1)
            for index, action in enumerate(actions):
                if action.work is Work.REDUCE:
                    with self._noted(action):
                        if index == last_sum and self._reduce is not None:
                            self._reduce()
                else:
                    self.do(action)
            if flush:
                self._links.flush()

    def settle_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """After all forwards, makes what they wrote the whole batch's, on all replicas. buffers: by name."""
        if all(module.training for module in self._modules.values()):
            average_statistics(self._manifest, self._mesh, buffers)
        if self._feed.replicas > 1:
            add_up([item for before in self._written.values() for item in before.parts(self._mesh)], self._mesh)

    def _split_weights(self, actions: Sequence[Action]) -> dict[int, list[Tensor]]:
        """The weights of the stages whose W has work of its own: without gradients to send, B may do it all."""
        sends = {value.name for values in self._links.values.values() for value in values if value.needs_grad}
        whole = self._mesh.weights.left_for_w
        return {
            stage: [whole(p) for p in self._modules[stage].parameters() if p.requires_grad]
            for stage in {action.stage for action in actions if action.work is Work.WEIGHT}
            if sends & set(self._specs[stage].receives)
        }

    def do(self, action: Action) -> None:
        """Does one action other than REDUCE, with what came before of its microbatch done."""
        assert action.microbatch is not None
        if action.work.is_compute:
            # A recomputed forward inside a backward draws its random numbers again by these.
            self._mesh.step, self._mesh.microbatch = self._step, action.microbatch
            feed = self._feed
            self._mesh.share = Share(feed.first(action.microbatch), feed.samples, feed.batch, feed.in_copies)
        state = self._state(action.stage, action.microbatch)
        match action.work:
            case Work.FORWARD:
                if not self._train and self._alone:
                    self._let_go_of_stage(action.stage, action.microbatch - _AHEAD)
                self._forward(action, action.microbatch, state)
            case Work.BACKWARD:
                self._backward(action, action.microbatch, state)
            case Work.SEND_ACTIVATION:
                with self._noted(action):
                    self._send_activations(action, action.microbatch, state)
            case Work.RECV_ACTIVATION:
                for value in self._crossing(action, "forward"):
                    state.received[value.name] = self._receive(value, state, action, "forward")
            case Work.SEND_GRADIENT:
                with self._noted(action):
                    self._send_gradients(action, action.microbatch, state)
            case Work.RECV_GRADIENT:
                for value in self._crossing(action, "backward"):
                    state.gradients.append((value, self._receive(value, state, action, "backward")))
            case Work.WEIGHT:
                with self._noted(action):
                    if state.later is not None:
                        with self._passing("weight", action.stage), self._as_before(action.stage):
                            state.later.compute(self._weights[action.stage])
                    state.later = None

    def _state(self, stage: int, microbatch: int) -> _Microbatch:
        return self._microbatches.setdefault((stage, microbatch), _Microbatch())

    def _crossing(self, action: Action, phase: Phase) -> Sequence[ValueSpec]:
        """What a receive takes from another rank; from a stage of this rank it was handed over by the send."""
        if action.peer in self._modules:
            with self._noted(action):
                return ()
        values = self._links.values[action.edge]
        return values if phase == "forward" else [value for value in values if value.needs_grad]

    def _send_activations(self, action: Action, microbatch: int, state: _Microbatch) -> None:
        edge = action.edge
        for value in self._links.values[edge]:
            tensor = state.sent[value.name]
            if edge[1] not in self._modules:
                self._links.send(value, tensor, action, self._samples, self._batch)
                continue
            self._links.check(value, tensor, self._feed.samples)
            received = tensor.detach()
            self._state(edge[1], microbatch).received[value.name] = self._as_leaf(value, received)

    def _send_gradients(self, action: Action, microbatch: int, state: _Microbatch) -> None:
        edge = action.edge
        for value in self._links.values[edge]:
            if not value.needs_grad:
                continue
            leaf = state.received.pop(value.name)
            gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            if edge[0] in self._modules:
                self._state(edge[0], microbatch).gradients.append((value, gradient))
            else:
                self._links.send(value, gradient, action, self._samples, self._batch)

    def _receive(self, value: ValueSpec, state: _Microbatch, action: Action, phase: Phase) -> Tensor:
        tensor, arrival = self._links.receive(value, action, self._samples)
        state.arriving[phase].append((action, arrival))
        return self._as_leaf(value, tensor) if phase == "forward" else tensor

    @property
    def _samples(self) -> Samples:
        return Samples(self._feed.samples, self._feed.whole, self._feed.in_copies)

    def _as_leaf(self, value: ValueSpec, tensor: Tensor) -> Tensor:
        return tensor.requires_grad_() if value.needs_grad and self._train else tensor

    def _noted(self, action: Action) -> AbstractContextManager[object]:
        if not self._recorders:
            return nullcontext()
        noted = ExitStack()
        for recorder in self._recorders:
            noted.enter_context(recorder.span(action, self._step))
        return noted

    def _wait(self, state: _Microbatch, phase: Phase) -> None:
        """Until the activations ("forward") or their gradients ("backward") are here; what that proves is let go."""
        arriving, state.arriving[phase] = state.arriving[phase], []
        for posted, group in groupby(arriving, key=itemgetter(0)):
            senders: set[int] = set()
            with self._noted(posted):
                for _, arrival in group:
                    arrival.wait()
                    senders |= arrival.senders
            for sent, later in self._receipts.get(posted, ()):
                self._links.let_go((sent, self._batch + later), senders)

    def _let_go_of_stage(self, stage: int, microbatch: int) -> None:
        """Waits until what a stage sent of a microbatch has left.

        In an evaluation by ranks of one stage each, waiting for an earlier microbatch blocks nobody for ever: to
        receive it takes a rank no more than what the others do of microbatches up to it.
        """
        for source, target in self._links.values:
            if source == stage and microbatch >= 0:
                self._links.let_go((Action(Work.SEND_ACTIVATION, stage, microbatch, target), self._batch))

    def _forward(self, action: Action, microbatch: int, state: _Microbatch) -> None:
        self._wait(state, "forward")
        with self._noted(action):
            self._compute_forward(action.stage, microbatch, state)

    def _compute_forward(self, stage: int, microbatch: int, state: _Microbatch) -> None:
        spec, feed = self._specs[stage], self._feed
        inputs = dict(feed.inputs(microbatch))
        if self._train:
            state.leaves = {n: inputs[n].detach().requires_grad_() for n in spec.inputs if n in feed.gradients}
            inputs.update(state.leaves)
        arguments = {
            **{argument_name(name): inputs[name] for name in spec.inputs},
            **{argument_name(name): state.received[name] for name in spec.receives},
            **{argument_name(name): feed.totals[name] for name in spec.totals},
        }
        if stage in self._written:
            self._written[stage].begin_forward()
        with self._passing("forward", stage), self._splitting(stage, state):
            results = self._modules[stage](b=feed.samples, B=feed.batch, **arguments)
            results = tuple(map(into_outer, results)) if isinstance(results, tuple) else results
        if stage in self._written:
            self._written[stage].end_forward()
        if not isinstance(results, tuple) or len(results) != len(spec.sends) + len(spec.outputs):
            raise PlanError(
                f"{spec.file} has to return a tuple of {len(spec.sends)} values to send {list(spec.sends)} and "
                f"{len(spec.outputs)} outputs {list(spec.outputs)}; emit the program again, or mend the edited stage"
            )
        state.sent = dict(zip(spec.sends, results, strict=False))
        outputs = zip(spec.outputs, results[len(spec.sends) :], strict=True)
        # what nobody asks for must not outlive the stage's forward: logits are larger than anything else
        state.outputs = {name: tensor for name, tensor in outputs if self._keep is None or name in self._keep}
        found = {name: tensor.detach() for name, tensor in state.outputs.items()}
        self.outputs.setdefault(microbatch, {}).update(found)

    def _splitting(self, stage: int, state: _Microbatch) -> AbstractContextManager[object]:
        """Around a stage's forward whose weights' gradients are computed apart from the others."""
        if stage not in self._weights:
            return nullcontext()
        state.later = LaterGradients()
        return SplitBackward(self._weights[stage], state.later)

    def _as_before(self, stage: int) -> AbstractContextManager[None]:
        """Around what goes back: a forward that runs again reads buffers as the first did."""
        return self._written[stage].backward() if stage in self._written else nullcontext()

    def _backward(self, action: Action, microbatch: int, state: _Microbatch) -> None:
        self._wait(state, "backward")
        with self._noted(action):
            self._compute_backward(action.stage, microbatch, state)

    def _compute_backward(self, stage: int, microbatch: int, state: _Microbatch) -> None:
        ends: list[GradientEdge] = []
        gradients: list[Tensor] = []
        for name, incoming in _sum_by_value(state.gradients).items():
            if state.sent[name].requires_grad:
                ends.append(get_gradient_edge(state.sent[name]))
                gradients.append(incoming)
        seeds = {} if self.seeds is None else self.seeds(microbatch, state.outputs)
        for name, seed in seeds.items():
            output = state.outputs.get(name)
            if seed is not None and output is not None and output.requires_grad:
                ends.append(get_gradient_edge(output))
                gradients.append(seed)
        # Nothing may hold the results while the graph is walked: their memory is then freed on the way.
        output = None
        state.sent, state.outputs, state.gradients = {}, {}, []
        with self._passing("backward", stage), self._as_before(stage):
            if ends:
                torch.autograd.backward(ends, gradients)
        for name, leaf in state.leaves.items():
            if leaf.grad is not None:
                self._feed.gradients.add(name, microbatch, leaf.grad)
        state.leaves = {}
        state.received = {name: leaf for name, leaf in state.received.items() if leaf.requires_grad}


def _sum_by_value(gradients: Sequence[tuple[ValueSpec, Tensor]]) -> dict[str, Tensor]:
    """The gradients of each value, summed over the stages that use it (in place on the first)."""
    sums: dict[str, Tensor] = {}
    for value, gradient in gradients:
        if value.name in sums:
            sums[value.name] += gradient
        else:
            sums[value.name] = gradient
    return sums
