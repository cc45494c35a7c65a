"""What transitions between placements take of a rank's memory while they run (:mod:`autopart.runtime.collectives`).

Each way makes its result from the tensor that it is given; besides, for a moment:

========  ===================================================  ==========================================
way       makes                                                besides
========  ===================================================  ==========================================
same      nothing                                              -
first     zeros, but on rank 0                                 -
sum       a copy, summed in place                              -
pad       zeros around the share                               -
take      a copy of the share                                  the same again where the dim has blocks
gather    the whole                                            the same again, rank by rank; not in dim 0
scatter   the share of the sum                                 the ranks' parts in one message
exchange  the ranks' parts joined                              a message there, and one back
========  ===================================================  ==========================================

Gloo sums a copy of what it scatters. One that is begun and waited for later holds its message until then.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from autopart.runtime.transitions import Transition

# What a transition does to a tensor, and to its gradient.
_WAYS = {
    "split": ("take", "gather"),
    "sum_gradients": ("same", "sum"),
    "keep_on_first": ("first", "same"),
    "all_gather": ("gather", "take"),
    "all_gather_scatter_gradients": ("gather", "scatter"),
    "pad": ("pad", "take"),
    "all_to_all": ("exchange", "exchange"),
    "all_reduce": ("sum", "same"),
    "reduce_scatter": ("scatter", "gather"),
    "all_reduce_sum_gradients": ("sum", "sum"),
    "keep_gradients_on_first": ("same", "first"),
    "split_pad_gradients": ("take", "pad"),
    "keep_all_on_first": ("first", "first"),
}


@dataclass(frozen=True, slots=True)
class Way:
    """How a tensor is made from another.

    flying: bytes besides it until it is waited for; landing: then, for a moment.
    """

    makes: bool
    flying: float = 0.0
    landing: float = 0.0

    @property
    def besides(self) -> float:
        """Bytes besides the result where it is waited for at once."""
        return max(self.flying, self.landing)


def transition_of(node: fx.Node) -> Transition | None:
    """The transition that a node of a rank's graph is."""
    found = node.meta.get("transition")
    return found[1] if found is not None else None


def way(call: Transition, back: bool, given: float, made: float, parts: int, copies: bool) -> Way:
    """Of a tensor, or back of its gradient. given, made: bytes of it and of the result on a rank. parts: ranks of the
    axis. copies: gloo sums a copy of what it scatters.
    """
    kind = _WAYS[call.name][back]
    cut = call.target if call.target.is_shard else call.source
    in_blocks = cut.outer > 1 or cut.batched
    if kind == "exchange" and call.source.dim == call.target.dim:  # gathered, of which a rank takes its share
        return Way(True, (parts - 1) * given, 2 * parts * given)
    if kind == "take":
        return Way(True, 0.0, made if in_blocks else 0.0)
    if kind == "gather":
        return Way(True, 0.0, made if cut.dim or in_blocks else 0.0)
    if kind == "scatter":
        message = given * (2 if copies else 1)
        return Way(True, message, max(message, 2 * given if in_blocks else 0.0))
    if kind == "exchange":
        return Way(True, 2 * given - made, 2 * given)
    return Way(kind != "same")
