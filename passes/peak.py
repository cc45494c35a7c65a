"""The most bytes of tensors that one rank of a stage has at once while a microbatch goes forward and back.

The stage's ops are walked in the order of the emitted code. Forward, an op allocates its results and what it keeps
inside; a value is freed once its readers are done, if the code writes it into its only reader or lets go of it
(:mod:`autopart.passes.emit.releases`), else when the layer's or the stage's function returns; what the backward needs
stays (:mod:`autopart.passes.kept`). Backward, ops come in the
opposite order: the gradients of an op's operands are allocated while those of its results and what it kept are there,
which are freed behind it; the caller holds the gradients of the stage's results until the end. The gradient of a
parameter that several ops read waits for the last of them. A layer, or a module in one, that is computed again first
runs forward once more, with everything that it keeps. Where the weights' gradients are left for later
(:mod:`autopart.passes.peak_split`), what they need stays. Gradients that ranks sum are copied into messages as the
last of each becomes final, in the last microbatch.

Weights that replicas divide are in :mod:`autopart.passes.peak_weights`.

Not seen: what a kernel allocates for itself, buffers of collectives, and what is being sent or received
(:mod:`autopart.step_memory`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass

from torch import fx

from autopart.passes.backward_memory import is_parameter
from autopart.passes.conversion import Axes
from autopart.passes.emit.releases import Lifetimes
from autopart.passes.peak_code import Message, StageCode
from autopart.passes.peak_split import SplitWalk, sides
from autopart.passes.peak_walk import Walk
from autopart.passes.peak_weights import Divided, Scattered, Unit
from autopart.passes.program import reached_by_gradients


@dataclass(frozen=True, slots=True)
class Back:
    """The most bytes while a microbatch goes back: in its backward, or its B; and in its W.

    unsettled: of the backward, before what another stage of the rank has on its way is settled. tail: bytes of divided
    gradients that are still on their way after it.
    """

    backward: float
    weight: float
    unsettled: float
    tail: float


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes of one microbatch on one rank of a stage.

    forward: the most while it goes forward. retained: between forward and backward. backs: of it going back, by how
    many microbatches of the stage went back before (0, 1, or 2 for more, where that differs), whose gradients are not
    counted, by whether it is the last, in which replicas begin to sum, and by whether a message of the one before is on
    its way. gradients: of the stage's parameters; later:
    those of them that are made in W. left: between B and W, what is received aside, of which left_received. messages:
    what these take beyond the gradients, from the last microbatch on. arriving: divided weights on their way at the
    start of a call; arrival: the most while the first microbatch goes forward, with these.
    """

    forward: float
    retained: float
    backs: Mapping[tuple[int, bool, bool], Back]
    gradients: float
    later: float = 0.0
    left: float = 0.0
    left_received: float = 0.0
    messages: float = 0.0
    arriving: float = 0.0
    arrival: float = 0.0

    def back(self, before: int, summing: bool, carried: bool = False) -> Back:
        """before: microbatches of the stage that went back already. summing: it is the last. carried: a message of the
        one before is on its way; the only stage of a rank that sends any always has one.
        """
        number = min(before, max(number for number, *_ in self.backs))
        found = self.backs.get((number, summing, carried))
        return found or self.backs[number, summing, not carried]


def peak(
    graph: fx.Graph,
    axes: Axes,
    batch: int,
    roots: Sequence[fx.Node],
    recompute: Collection[str] = (),
    lifetimes: Lifetimes | None = None,
    kind: str = "cuda",
    sends: int = 0,
    messages: Sequence[Message] = (),
    splits: bool = False,
    divided: Divided | None = None,
    there: Set[str] = frozenset(),
    alone: bool = True,
) -> Peak:
    """The peak of a rank's graph of a stage for a microbatch of ``batch`` samples.

    roots: where gradients enter. recompute: paths of what is computed again. lifetimes: of names in the code. sends:
    how many of the results, the first, go to other stages; the others are let go when the forward returns. messages: of
    gradients that ranks sum. splits: whether the weights' gradients are left for W. divided: weights of which replicas
    have shares. there: parameters whose gradients other stages of the rank have made by then. alone: the rank has no
    other stage, whose messages settle what is on its way.
    """
    divided = divided or Divided()
    code = StageCode(graph, axes, batch, set(recompute), lifetimes or Lifetimes(), kind, messages, divided, splits)

    def ahead(arriving: bool, order: Sequence[Unit]) -> Walk:
        found = SplitWalk(code, sides=sides(code)) if splits else Walk(code)
        found.holding.expected = order
        found.forward(arriving)
        return found

    opening = ahead(True, ())
    walk = ahead(False, opening.holding.seen) if divided.cuts else opening
    forward = walk.most
    walk.let_go(sends)
    reached = reached_by_gradients(roots)

    def back(
        there: Set[str], summing: bool, order: Sequence[Unit], carried: Mapping[int, Sequence[Scattered]] | None
    ) -> tuple[Back, Walk]:
        one = walk.back(there, summing)
        one.holding.expected = order
        if carried is not None:
            one.holding.carry(carried)
        backward = one.backward(reached, roots)
        one.in_backward = one.gradients
        unsettled = backward if one.holding.unsettled_most is None else one.holding.unsettled_most
        return Back(backward, one.weights(), unsettled, one.holding.tail), one

    order = back(there, False, (), None)[1].holding.seen if divided.units else ()
    first, one = back(there, False, order, None)
    backs = {(0, False, False): first}
    known = [frozenset(there)]  # which gradients are there when a microbatch goes back, by how many did before
    on_its_way = {level: messages for level, messages in one.holding.unsettled.items() if messages} or None
    every = frozenset(node.meta["name"] for node in graph.nodes if is_parameter(node))
    coming = {name for message in one.holding.flying_sums for name in message.names}
    known += [every] if on_its_way is None else [every - coming | one.holding.there, every]
    for before, own in enumerate(known):
        # own messages are on their way, if other stages' did not settle them
        ways = [(own, on_its_way if before else None)]
        ways += [(every, None)] if before and on_its_way is not None and not alone else []
        for made, carried in ways:
            key = carried is not None
            if before:
                backs[before, False, key] = back(made, False, order, carried)[0]
            whole = backs[before, False, key]
            backs[before, True, key] = back(made, True, order, carried)[0] if messages else whole
    return Peak(
        forward,
        walk.now,
        backs,
        one.gradients,
        one.gradients - one.in_backward,
        *(one.left, one.left_received),
        sum(message.size - message.replaces for message in messages),
        opening.holding.begun,
        opening.most,
    )
