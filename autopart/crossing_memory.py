"""What a stage holds of values that cross between stages, beside what its ops keep.

A stage has what it received until it has sent the gradient of that, and what it made for other stages until the
gradient comes, of each microbatch in flight (:mod:`autopart.step_memory` counts the same from emitted code). Mostly an
op keeps the tensor anyway. What none does: a residual sum that is handed on, logits that a loss reads.

Who keeps a tensor depends on what is computed again. Where a layer may be, what its ops keep of what it makes itself
may be gone after its forward, and what enters it counts as kept: in a stage whose first layer is kept after all and has
no op that keeps what enters it, one tensor is left out of the twenty or more that such a layer keeps.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from autopart.block_costs import BlockCost
from autopart.cost.communication import send_seconds
from autopart.cost.devices import Link
from autopart.passes.graph import Value
from autopart.passes.storage import is_contiguous
from autopart.positions import Positions
from autopart.rank_memory import Kept, RankMemory
from autopart.recomputation import KEPT
from autopart.solver.stages_coarse import bits_of
from autopart.solver.stages_parts import CrossingGroup, Cut

_FEW, _MOST_GROUPS = 8, 32
"""Tensors that cross more positions than that are counted one by one, of many those that cross the most."""


def cut_of(sizes: Mapping[Value, float], link: Link, microbatches: int, held: tuple[float, float] = (0.0, 0.0)) -> Cut:
    """What ranks do where values cross. sizes: of these, bytes of a microbatch on one rank. held: see
    :attr:`Across.held`.

    Receives are posted one computation early, so of several microbatches two gradients come at a time, while what is
    sent forward is held anyway; behind, one microbatch comes beside that which is held, and a gradient goes.
    """
    there = sum(sizes.values())
    back = sum(size for value, size in sizes.items() if value.node.meta.get("differentiable"))
    forward, backward = (send_seconds(size, link) if size else 0.0 for size in (there, back))
    more = microbatches > 1
    return Cut(forward, backward, (1 + more) * back, more * there + back, *held, there)


def sent_ahead(in_flight: Sequence[int]) -> tuple[int, ...]:
    """For 1F1B, by stage the microbatches that are sent to it while another one waits there already.

    in_flight: by stage; of one more than behind it as the least, and of more where it runs further ahead.
    """
    return (0, *(max(0, before - own - 1) for before, own in itertools.pairwise(in_flight)))


@dataclass(frozen=True, slots=True)
class Across:
    """What stages hold of what crosses, of each microbatch in flight.

    held: by position, bytes of a stage that ends there, and of one that begins there. groups: tensors that cross many
    positions, such as what skips over stages that have nothing of it.
    """

    held: tuple[tuple[float, float], ...]
    groups: tuple[CrossingGroup, ...]


def held_across(
    positions: Positions,
    costs: Sequence[BlockCost],
    layer_of: Sequence[str],
    block_of: Mapping[fx.Node, int],
    recompute: str,
    memory: RankMemory,
) -> Across:
    """costs: of the blocks, on a rank with ``memory``. recompute: as in :func:`autopart.recomputation.layers`."""
    before, behind = _keepers(costs, layer_of, block_of, recompute)
    crossed = Counter(value for values in positions.crossings for value in values)
    often = {value for value, count in crossed.most_common(_MOST_GROUPS) if count > _FEW and is_contiguous(value)}
    found = []
    for mask, values in zip(positions.sets, positions.crossings, strict=True):
        sent, copied, received = dict[Kept, float](), 0.0, 0.0
        for value in values:
            lying = value, memory.lies(value)
            item = memory.owner(*lying)
            if value in often or memory.is_stored(item):
                continue
            if not before[item] & mask:
                sent[item] = memory.bytes(item)
            if not is_contiguous(value):  # a copy is sent
                copied += memory.bytes(lying)
            rest = positions.readers[value] & ~mask
            if not behind[item] & rest & -rest:  # the first to read it, as others may be on another stage
                received += memory.bytes(lying)
        found.append((sum(sent.values()) + copied, received))
    groups = []
    for value in crossed:
        item = memory.owner(value, memory.lies(value))
        if value in often and not memory.is_stored(item):
            blocks = bits_of(1 << block_of[value.node] | positions.readers[value])
            groups.append(CrossingGroup(tuple(blocks), tuple(bits_of(before[item])), memory.bytes(item)))
    return Across(tuple(found), tuple(groups))


def _keepers(
    costs: Sequence[BlockCost], layer_of: Sequence[str], block_of: Mapping[fx.Node, int], recompute: str
) -> tuple[Mapping[Kept, int], Mapping[Kept, int]]:
    """The blocks, as bits, that keep a tensor which lies before, and behind, where stages are parted."""
    before, behind = defaultdict[Kept, int](int), defaultdict[Kept, int](int)
    for index, (layer, cost) in enumerate(zip(layer_of, costs, strict=True)):
        again = bool(layer) and recompute not in ("none", KEPT)
        for item in (*cost.kept, *(cost.entering if again else ())):
            behind[item] |= 1 << index
            made = block_of.get(item[0].node)
            if not again or made is None or layer_of[made] != layer:
                before[item] |= 1 << index
    return before, behind
