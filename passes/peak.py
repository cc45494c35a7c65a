"""The most bytes of tensors that one rank of a stage has at once while a microbatch goes forward and back.

The stage's ops are walked in the order of the emitted code. Forward, an op allocates its results and what it keeps
inside; a value is freed once its readers are done, if the code writes it into its only reader, else when the layer's or
the stage's function returns; what the backward needs stays (:mod:`autopart.passes.kept`). Backward, ops come in the
opposite order: the gradients of an op's operands are allocated while those of its results and what it kept are there,
which are freed behind it; the caller holds the gradients of the stage's results until the end. The gradient of a
parameter that several ops read waits for the last of them. A layer, or a module in one, that is computed again first
runs forward once more, with everything that it keeps. Where the weights' gradients are left for later
(:mod:`autopart.passes.peak_split`), what they need stays. Gradients that ranks sum are copied into messages as the
last of each becomes final, in the last microbatch.

Not seen: what a kernel allocates for itself, buffers of collectives, and what is being sent or received
(:mod:`autopart.step_memory`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import fx

from autopart.passes.conversion import Axes
from autopart.passes.peak_code import Message, StageCode
from autopart.passes.peak_split import SplitWalk, sides
from autopart.passes.peak_walk import Walk
from autopart.passes.program import reached_by_gradients


@dataclass(frozen=True, slots=True)
class Back:
    """The most bytes while a microbatch goes back: in its backward, or its B; and in its W."""

    backward: float
    weight: float = 0.0


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes of one microbatch on one rank of a stage.

    forward: the most while it goes forward. retained: between forward and backward. first, other: back, where gradients
    of parameters are new; and where they are added to those of other microbatches, which are not counted. only, last:
    the same of the last microbatch, in which replicas begin to sum. gradients: of the stage's parameters; later: those
    of them that are made in W. left: between B and W, what is received aside, of which left_received. messages: what
    these take beyond the gradients, from the last microbatch on.
    """

    forward: float
    retained: float
    first: Back
    other: Back
    only: Back
    last: Back
    gradients: float
    later: float = 0.0
    left: float = 0.0
    left_received: float = 0.0
    messages: float = 0.0

    def back(self, adding: bool, summing: bool) -> Back:
        """adding: to gradients that are there already. summing: in the last microbatch."""
        return (self.last if adding else self.only) if summing else (self.other if adding else self.first)


def peak(
    graph: fx.Graph,
    axes: Axes,
    batch: int,
    roots: Sequence[fx.Node],
    recompute: Collection[str] = (),
    inlined: Collection[fx.Node] = (),
    kind: str = "cuda",
    sends: int = 0,
    messages: Sequence[Message] = (),
    splits: bool = False,
) -> Peak:
    """The peak of a rank's graph of a stage for a microbatch of ``batch`` samples.

    roots: where gradients enter. recompute: paths of what is computed again. inlined: values without a name.
    sends: how many of the results, the first, go to other stages; the others are let go when the forward returns.
    messages: of gradients that ranks sum. splits: whether the weights' gradients are left for W.
    """
    code = StageCode(graph, axes, batch, set(recompute), set(inlined), kind, messages)
    walk = SplitWalk(code, sides=sides(code)) if splits else Walk(code)
    walk.forward()
    forward = walk.most
    walk.let_go(sends)
    reached = reached_by_gradients(roots)

    def back(adding: bool, summing: bool) -> tuple[Back, Walk]:
        one = walk.back(adding, summing)
        backward = one.backward(reached, roots)
        one.in_backward = one.gradients
        return Back(backward, one.weights()), one

    (first, one), (other, _) = back(False, False), back(True, False)
    only, last = (back(False, True)[0], back(True, True)[0]) if messages else (first, other)
    return Peak(
        forward,
        walk.now,
        *(first, other, only, last),
        one.gradients,
        one.gradients - one.in_backward,
        *(one.left, one.left_received),
        sum(message.size - message.replaces for message in messages),
    )
