"""What blocks keep of a microbatch for their backward, and what of a layer may be computed again there.

A layer, or the part of it that lies in one stage, can be computed again whole, or modules in it by themselves
(:mod:`autopart.passes.emit.segments`); :mod:`autopart.layer_frontier` says which sets of modules are worth offering:

    keep         activations = what its ops keep        transient = its largest op's
    recompute    activations = what enters the part     transient = its largest op's + what its ops keep
    modules      activations = what the other ops keep  transient = its largest op's + what the ops of one module keep,
                 and what enters the modules            the largest of them

A tensor that is kept by ops of several layers, or enters several that may be computed again (a mask, an encoder's
output), is in memory once for all of them and counts in every stage that has one of these.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from autopart.block_costs import BlockCost
from autopart.passes.emit.layers import MOST_INLINE
from autopart.rank_memory import Kept
from autopart.solver.stages_parts import Block, Choice, Family, KeptGroup, Layer


@dataclass(frozen=True, slots=True)
class Activations:
    """blocks: bytes that each keeps by itself, where it is not computed again. groups: tensors of several blocks."""

    blocks: tuple[float, ...]
    groups: tuple[KeptGroup, ...]
    shared: frozenset[Kept]  # the tensors of groups
    entering: tuple[Mapping[Kept, float], ...]  # into each block, from others of its layer or outside of it
    kept: tuple[Mapping[Kept, float], ...]  # by each block, groups left out


RECOMPUTE = ("none", "full", "auto")
"""What is computed again: nothing, every layer, or what the solver chooses."""
KEPT = "kept"
"""Nothing is computed again, and the blocks of a layer are run in one way."""
WHOLE = "*"
"""The name of the choice in which a part of a layer is computed again as a whole."""


def activations(
    costs: Sequence[BlockCost], layer_of: Sequence[str], block_of: Mapping[fx.Node, int], recompute: str
) -> Activations:
    """Who keeps what. layer_of: by block, '' for none. recompute: as in :func:`layers`."""
    free = recompute == "none"
    units = [index if free or not layer else layer for index, layer in enumerate(layer_of)]
    holders: dict[Kept, dict[int, float]] = defaultdict(dict)
    for index, cost in enumerate(costs):
        again = units[index] == layer_of[index]
        for item, size in cost.kept.items():
            made = block_of.get(item[0].node)
            if recompute != "full" or not again or made is None or units[made] != units[index]:
                holders[item][index] = size
        for item, size in cost.entering.items() if again and recompute != KEPT else ():
            made = block_of.get(item[0].node)
            if made is None or units[made] != units[index]:
                holders[item][index] = size
    shared = {item: held for item, held in holders.items() if len({units[index] for index in held}) > 1}
    groups = tuple(KeptGroup(tuple(sorted(held)), max(held.values())) for held in shared.values())
    kept = tuple({item: size for item, size in cost.kept.items() if item not in shared} for cost in costs)
    entering = tuple({item: size for item, size in cost.entering.items() if item not in shared} for cost in costs)
    alone = tuple(cost.inside_bytes + math.fsum(own.values()) for cost, own in zip(costs, kept, strict=True))
    return Activations(alone, groups, frozenset(shared), entering, kept)


def layers(
    blocks: Sequence[Block],
    found: Activations,
    costs: Sequence[BlockCost],
    again_s: Sequence[tuple[float, float | None]],
    layer_of: Sequence[str],
    block_of: Mapping[fx.Node, int],
    kinds: Sequence[object],
    recompute: str,
    positions: Sequence[int],
    modules: Callable[[str, Sequence[int], Choice], Family],
) -> tuple[Layer, ...]:
    """The layers with the ways to run each part of them that a stage can have, found once for layers that are alike.

    again_s: seconds of running a block's forward again, and up to its last op that keeps something, None where none
    does: what runs again ends there. recompute: "none", "full" (every layer is computed again) or
    "auto": each part of a layer is kept, which is choice 0, or computed again, whole or in modules; or KEPT.
    positions: sets of blocks between two of which a stage lies; beginnings of the row of blocks are taken to be among
    them. modules: further choices of a layer's blocks, beside the one in which all is kept. kinds: equal for blocks
    that compute the same in modules of the same names.
    """
    if recompute == "none":
        return ()
    members: dict[str, list[int]] = defaultdict(list)
    for index, layer in enumerate(layer_of):
        if layer:
            members[layer].append(index)
    known: dict[object, dict[int, Family]] = {}
    result = []
    for layer, own in members.items():
        start, possible = own[0], _parts(tuple(own), tuple(positions))
        amounts = tuple(
            (kinds[at], *blocks[at].choices, costs[at].inside_bytes, again_s[at], costs[at].waiting_s, at - start)
            for at in own
        )
        alike = possible, amounts, _tensors(found, own, block_of)
        if alike not in known:
            known[alike] = {
                bits: _ways(layer, _blocks(bits, start), blocks, found, costs, again_s, block_of, recompute, modules)
                for bits in possible
            }
        result.append(Layer(tuple(own), {_blocks(bits, start): family for bits, family in known[alike].items()}))
    return tuple(result)


def _ways(
    layer: str,
    part: tuple[int, ...],
    blocks: Sequence[Block],
    found: Activations,
    costs: Sequence[BlockCost],
    again_s: Sequence[tuple[float, float | None]],
    block_of: Mapping[fx.Node, int],
    recompute: str,
    modules: Callable[[str, Sequence[int], Choice], Family],
) -> Family:
    """The ways to run a part of a layer."""
    inside = [blocks[index] for index in part]
    held = {item: size for index in part for item, size in found.kept[index].items()}
    entering = {
        item: size
        for index in part
        for item, size in found.entering[index].items()
        if block_of.get(item[0].node) not in part
    }
    keep = Choice(
        math.fsum(block.forward_s for block in inside),
        math.fsum(block.backward_s for block in inside),
        math.fsum(block.state_bytes for block in inside),
        math.fsum(held.values()) + math.fsum(costs[index].inside_bytes for index in part),
        max(block.transient_bytes - min(block.activation_bytes, block.late_bytes) for block in inside),
        late_bytes=math.fsum(block.late_bytes for block in inside),
    )
    again = Choice(
        keep.forward_s,
        keep.backward_s + _again_seconds([again_s[index] for index in part]),
        keep.state_bytes,
        math.fsum(entering.values()),
        keep.transient_bytes + keep.activation_bytes,
        WHOLE,
        keep.late_bytes,
    )
    keep, again = (
        replace(way, transient_bytes=way.transient_bytes + min(way.activation_bytes, way.late_bytes))
        for way in (keep, again)
    )
    if recompute == KEPT or sum(op.node in block_of for index in part for op in costs[index].ops) <= MOST_INLINE:
        return (keep,)
    waiting_s = math.fsum(costs[index].waiting_s for index in part)
    if recompute == "full":
        return (_meanwhile(again, keep, waiting_s),)
    others = (keep, *modules(layer, part, keep))
    ways = others if any(other.undercuts(again) for other in others) else (*others, again)
    return _best(tuple(_meanwhile(way, keep, waiting_s) for way in ways)) if waiting_s else ways


def _meanwhile(way: Choice, keep: Choice, waiting_s: float) -> Choice:
    """A way whose backward computes while ``keep``, which runs nothing again, waits."""
    return replace(way, backward_s=keep.backward_s + max(0.0, way.backward_s - keep.backward_s - waiting_s))


def _best(ways: Family) -> Family:
    """The first way, and the others that none undercuts; of equal ones the first."""
    keep, *others = ways
    found: list[Choice] = []
    for way in others:
        if not any(known.undercuts(way) for known in found):
            found = [known for known in found if not way.undercuts(known)] + [way]
    return (keep, *found)


def _again_seconds(blocks: Sequence[tuple[float, float | None]]) -> float:
    """Of blocks that run again one after the other, up to the last op that keeps something."""
    kept = [at for at, (_, last) in enumerate(blocks) if last is not None]
    if not kept:
        return 0.0
    return math.fsum(whole for whole, _ in blocks[: kept[-1]]) + (blocks[kept[-1]][1] or 0.0)


def _tensors(found: Activations, own: Sequence[int], block_of: Mapping[fx.Node, int]) -> object:
    """What a layer's blocks keep and read, tensors by number in the layer: equal for layers that are alike."""
    numbers: dict[Kept, int] = {}
    inside = set(own)
    result = []
    for index in own:
        kept = tuple((numbers.setdefault(item, len(numbers)), size) for item, size in found.kept[index].items())
        entering = []
        for item, size in found.entering[index].items():
            made = block_of.get(item[0].node)
            home = made - own[0] if made is not None and made in inside else None
            entering.append((numbers.setdefault(item, len(numbers)), size, home))
        result.append((kept, tuple(entering)))
    return tuple(result)


def parts_of(own: Sequence[int], positions: Sequence[int]) -> list[tuple[int, ...]]:
    """The sets of a layer's blocks that can lie between two of the positions, which are sets of blocks as bits."""
    return [_blocks(bits, own[0]) for bits in _parts(tuple(own), tuple(positions))]


@functools.lru_cache(maxsize=1024)  # every problem of a program asks for the same
def _parts(own: tuple[int, ...], positions: tuple[int, ...]) -> frozenset[int]:
    """The same, as bits from the layer's first block on."""
    start = own[0]
    whole = sum(1 << index - start for index in own)
    cuts = {position >> start & whole for position in positions}
    cuts |= {((1 << index - start) - 1) & whole for index in (*own, own[-1] + 1)}
    return frozenset(last & ~first for first in cuts for last in cuts if first & last == first != last)


def _blocks(bits: int, start: int) -> tuple[int, ...]:
    return tuple(start + offset for offset in range(bits.bit_length()) if bits >> offset & 1)
