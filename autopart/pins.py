"""What users pin: modules that stay on one stage, and modules on a given stage.

A pattern is of module paths as :mod:`fnmatch` reads them, and means the modules that it matches with all that is inside
them: ``decoder.layers.3``, ``encoder.*``. Stages are made of blocks, so a block with an op of such a module is meant
as a whole. What lies between blocks of one stage is on it too: of a chain all blocks, of a graph those on a path.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from autopart.analysis import Analysis
from autopart.passes import graph as graphs
from autopart.passes.blocks import block_edges
from autopart.runtime.errors import PlanError
from autopart.solver.stages_order import chain_positions, positions


@dataclass(frozen=True, slots=True)
class Pins:
    """together: groups of block numbers that no cut parts. stages: (block, stage) that are forced.

    most_stages: into which the blocks can be divided that way.
    """

    together: tuple[tuple[int, ...], ...]
    stages: tuple[tuple[int, int], ...]
    most_stages: int

    @property
    def least_stages(self) -> int:
        return 1 + max((stage for _, stage in self.stages), default=0)


def read_pins(
    analysis: Analysis, together: Sequence[Sequence[str]] = (), stages: Mapping[str, int] | None = None
) -> Pins:
    """The pins as blocks. together: groups of patterns; stages: pattern -> stage.

    Raises PlanError when a pattern matches nothing, or no division into stages can have all pins.
    """
    groups_given = together if isinstance(together, tuple | list) else (together,)
    if not all(isinstance(group, tuple | list | set | frozenset) and _are_patterns(group) for group in groups_given):
        raise PlanError('together is a list of groups of patterns, such as [["encoder.*", "embed"]]')
    if not isinstance(stages or {}, Mapping) or not _are_patterns(stages or ()):
        raise PlanError('pins has a stage for each pattern, such as {"decoder.layers.3": 2}')
    groups = tuple(tuple(sorted({b for pattern in group for b in _blocks(analysis, pattern)})) for group in together)
    groups = (*filter(None, groups), *(item.places for item in analysis.written if len(item.places) > 1))
    wanted: dict[int, tuple[int, str]] = {}  # block -> stage, and the pattern that says so
    for pattern, stage in (stages or {}).items():
        if not isinstance(stage, int) or isinstance(stage, bool) or stage < 0:
            raise PlanError(f"pins[{pattern!r}]: a stage is a whole number from 0 on, not {stage!r}")
        for block in _blocks(analysis, pattern):
            other, before = wanted.setdefault(block, (stage, pattern))
            if other != stage:
                raise PlanError(
                    f"pins: {_named(analysis, block)} has ops of {before!r}, pinned on stage {other}, and of "
                    f"{pattern!r}, pinned on stage {stage}; a block is on one stage"
                )
    if not groups and not wanted:
        return Pins((), (), len(analysis.blocks))  # a stage for each
    fixed = tuple((block, stage) for block, (stage, _) in sorted(wanted.items()))
    edges = block_edges(analysis.blocks)
    if all((block - 1, block) in edges for block in range(1, len(analysis.blocks))):
        return Pins(groups, fixed, _most_stages(analysis, groups, wanted))
    counts = _stage_counts(positions(len(analysis.blocks), edges, groups)[0], fixed)
    if not counts:
        named = ", ".join(dict.fromkeys(f"{pattern!r} on stage {stage}" for stage, pattern in wanted.values()))
        raise PlanError(
            f"pins: no division into stages has {named}, with what is kept together: stages follow the order of "
            "computation, and each has at least one block; move a pin or take a pattern out of together"
        )
    return Pins(groups, fixed, counts.bit_length() - 1)


def check_stages(
    analysis: Analysis,
    pp: int | None,
    pinned: Pins,
    together: Sequence[Sequence[str]] | None = None,
    pins: Mapping[str, int] | None = None,
) -> None:
    """Raises PlanError where a pipeline has more stages than is allowed. together, pins: as a user gives them."""
    most = pinned.most_stages
    if pp is None or pp <= most:
        return
    if most == len(analysis.blocks):
        raise PlanError(f"pp={pp} stages need as many blocks, {analysis.program.name} has {most}; lower pp")
    asked = [f"together {','.join(group)}" for group in together or ()]
    asked += [f"pin {pattern}={stage}" for pattern, stage in (pins or {}).items()]
    if asked:
        raise PlanError(
            f"pp={pp} needs {pp} stages, but {' with '.join(asked)} allow{'s' if len(asked) == 1 else ''} {most} at "
            f"most; use pp={most}, or leave more modules free"
        )
    buffers = [name for item in analysis.written if len(item.places) > 1 for name in item.names]
    raise PlanError(
        f"pp={pp} needs {pp} stages, but what reads or writes a buffer that training writes is on one stage "
        f"({', '.join(buffers[:3])}{', …' if len(buffers) > 3 else ''}), which leaves {most} at most; use pp={most}"
    )


def _stage_counts(sets: Sequence[int], pins: Sequence[tuple[int, int]]) -> int:
    """Into how many stages all blocks can be divided, as bits: count c is bit c.

    reach[last] has bit s + 1 if reach[first] has bit s, for runs from first to last with exactly the blocks that are
    pinned on stage s.
    """
    stage_of = dict(pins)
    pinned = {stage: sum(1 << block for block, at in pins if at == stage) for stage in stage_of.values()}
    free = ~sum(1 << stage for stage in pinned)
    any_pinned = sum(1 << block for block in stage_of)
    reach = [1] + [0] * (len(sets) - 1)
    for last, whole in enumerate(sets):
        for first in range(last):
            if not reach[first] or sets[first] & ~whole:
                continue
            inside = whole & ~sets[first] & any_pinned
            if not inside:
                reach[last] |= (reach[first] & free) << 1
                continue
            stage = next((stage for stage, blocks in pinned.items() if blocks == inside), None)
            if stage is not None:
                reach[last] |= (reach[first] & 1 << stage) << 1
    return reach[-1]


def _blocks(analysis: Analysis, pattern: str) -> set[int]:
    """Numbers of the blocks with an op of a module that matches."""
    found = {index for node, index in analysis.block_of.items() if _matches(graphs.module_path(node), pattern)}
    if found:
        return found
    if any(_matches(graphs.module_path(node), pattern) for node in analysis.free_block):
        raise PlanError(
            f"pins: what {pattern!r} computes depends on no parameter, so that every stage computes it for itself; "
            "pin the modules that use it"
        )
    paths = {graphs.module_path(node) for node in analysis.block_of}
    known = {".".join(parts[:end]) for parts in (path.split(".") for path in paths) for end in range(1, len(parts) + 1)}
    near = difflib.get_close_matches(pattern, sorted(known), 3) or sorted(known - {""}, key=lambda p: (p.count("."), p))
    raise PlanError(f"pins: no op is in a module {pattern!r}; there are {', '.join(near[:5]) or 'no modules'}")


def _are_patterns(given: Iterable[object]) -> bool:
    return all(isinstance(pattern, str) for pattern in given)


def _matches(path: str, pattern: str) -> bool:
    return fnmatchcase(path, pattern) or fnmatchcase(path, f"{pattern}.*")


def _most_stages(analysis: Analysis, together: Sequence[Sequence[int]], wanted: Mapping[int, tuple[int, str]]) -> int:
    """Raises PlanError where pins contradict: stages fall along the chain, or have too few pieces for all of them.

    Between cuts that are allowed lie the pieces 0 .. n - 1. If piece i is on stage s and a later piece j on stage t,
    0 <= t - s <= j - i, for every stage has a piece; s <= i as well, and there are at most s + n - i stages.
    """
    ends = chain_positions(len(analysis.blocks), together)
    pieces = list(itertools.pairwise(ends))
    piece, stage, who = -1, -1, ""
    for index, (first, last) in enumerate(pieces):
        for block in range(first, last):
            if block not in wanted:
                continue
            target, pattern = wanted[block]
            if index == piece and target != stage:
                raise PlanError(
                    f"pins: {who!r} is pinned on stage {stage} and {pattern!r} on stage {target}, but they have to "
                    "stay together; give them one stage, or take a pattern out of together"
                )
            if target < stage:
                raise PlanError(
                    f"pins: {pattern!r} is pinned on stage {target}, before {who!r} on stage {stage}, but computes "
                    f"after it ({_named(analysis, block)}); stages follow the order of computation"
                )
            if target - stage > index - piece:
                place = f"after {who!r} on stage {stage}" if who else "before it"
                raise PlanError(
                    f"pins: {pattern!r} is pinned on stage {target}, but {place} there are "
                    f"{index - piece - 1} pieces of the model for {target - stage - 1} stages; pin it on a lower stage"
                )
            piece, stage, who = index, target, pattern
    return stage + len(pieces) - piece


def _named(analysis: Analysis, block: int) -> str:
    nodes = analysis.blocks[block].nodes
    return f"block {block} ({analysis.keys[nodes[0]]} .. {analysis.keys[nodes[-1]]})"
