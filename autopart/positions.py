"""Where an analysed program can be cut between stages, and which values cross there.

Blocks are the nodes of a graph (:func:`autopart.passes.blocks.block_edges`). Of a chain every beginning is a position;
of other graphs sets of blocks closed under dependence are (:mod:`autopart.solver.stages_order`), so that a stage may
take half of each of two branches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from autopart.analysis import FLOPS_PER_BYTE, Analysis
from autopart.passes import graph as graphs
from autopart.passes.amounts import value_bytes
from autopart.passes.blocks import block_edges
from autopart.passes.graph import Value
from autopart.solver.stages_coarse import bits_of
from autopart.solver.stages_order import positions


@dataclass(frozen=True, slots=True)
class Positions:
    """sets: of blocks as bits, the empty one first and the full one last. crossings: per position the values made in
    it and read outside of it. complete: whether no convex division is left out. edges: (block, block that reads a value
    of it), lower numbers first. readers: of what crosses the blocks that read it, as bits, its own left out.
    """

    sets: tuple[int, ...]
    crossings: tuple[tuple[Value, ...], ...]
    complete: bool
    edges: tuple[tuple[int, int], ...]
    readers: Mapping[Value, int] = field(default_factory=dict, hash=False)

    @property
    def in_row(self) -> bool:
        """Whether stages are runs of block numbers."""
        return all(mask & (mask + 1) == 0 for mask in self.sets)

    def between(self, blocks: Sequence[int]) -> Sequence[int]:
        """What a stage surely has that has all of these blocks."""
        if self.in_row:
            return range(min(blocks), max(blocks) + 1)
        behind, before = set(blocks), set(blocks)
        for source, target in self.edges:
            if source in behind:
                behind.add(target)
        for source, target in sorted(self.edges, key=lambda edge: -edge[1]):
            if target in before:
                before.add(source)
        return sorted(behind & before)

    @staticmethod
    def of(analysis: Analysis, together: Sequence[Sequence[int]] = ()) -> Positions:
        """The positions of a program's blocks. together: groups of blocks that no position parts, beside those that a
        buffer keeps together.
        """
        block_of = analysis.block_of
        readers: dict[Value, int] = {}
        for node, index in block_of.items():
            for value in graphs.inputs(node):
                if block_of.get(value.node, index) != index:
                    readers[value] = readers.get(value, 0) | 1 << index
        makers = {value: 1 << block_of[value.node] for value in readers}
        sent: dict[tuple[int, int], float] = {}
        for value, outside in readers.items():
            size = value_bytes(value).at(max(analysis.program.batch, 1))
            for index in bits_of(outside):
                pair = block_of[value.node], index
                sent[pair] = sent.get(pair, 0.0) + size
        edges = block_edges(analysis.blocks)
        found, complete = positions(
            len(analysis.blocks),
            edges,
            (*together, *(item.places for item in analysis.written)),
            weights=[_weight(analysis, block.nodes) for block in analysis.blocks],
            sent=sent,
        )
        crossings = tuple(
            tuple(value for value, outside in readers.items() if makers[value] & mask and outside & ~mask)
            for mask in found
        )
        return Positions(found, crossings, complete, edges, readers)


def _weight(analysis: Analysis, nodes: Sequence[fx.Node]) -> float:
    """FLOPs of a block's forward; a byte that it moves counts as much as the analysis says."""
    costs, batch = analysis.costs("cuda"), max(analysis.program.batch, 1)
    return sum(costs[n].flops_forward.at(batch) + FLOPS_PER_BYTE * costs[n].bytes_forward.at(batch) for n in nodes)
