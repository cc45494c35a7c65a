"""Of candidates what stages take at least to sum the gradients of parameters that several of them read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from autopart.candidate_sums import CandidateSums
from autopart.passes.amounts import value_bytes
from autopart.passes.graph import Value
from autopart.solver.degrees import Degrees
from autopart.tied_sums import tied_seconds


@dataclass(slots=True)
class CandidateTied(CandidateSums):
    """Bounds with sums of tied gradients."""

    def _tied_floor(self, config: Degrees, found: float, whole: bool = False) -> float:
        """With sums of gradients of parameters that several stages read, or all in between in one stage."""
        if config.pp == 1:
            return found
        for _, blocks, tied in self._tied_seconds(config, whole):
            found = min(found + tied, max(found, self._alone_seconds(config, blocks)))
        return found

    def _alone_seconds(self, config: Degrees, blocks: Sequence[int]) -> float:
        """Of a step in which these blocks, and what lies between them, are in one stage: it does all of them for each
        microbatch, and what passes a cut that parts none of them passes one after the other.
        """
        seconds, first = self._op_seconds(config), self.analysis.first
        between = (self.analysis.blocks[number] for number in self.positions.between(tuple(blocks)))
        alone = math.fsum(sum(seconds(first.get(op, op))) for block in between for op in block.nodes)
        m, mask, passing = config.microbatches, sum(1 << block for block in set(blocks)), math.inf
        # where ranks run several stages some pass nothing, and of positions left out nothing is known
        links = dict.fromkeys(self._stage_links(config)) if config.virtual == 1 and self.positions.complete else {}
        for link in links:
            cuts = self.least_cuts(config, link)
            for inside, cut in list(zip(self.positions.sets, cuts, strict=True))[1:-1]:
                if inside & mask in (0, mask):
                    passing = min(passing, cut.seconds + (m - 1) * max(cut.forward_s, cut.backward_s))
        return max(m * alone, alone + passing) if passing < math.inf else m * alone

    def _tied_seconds(self, config: Degrees, whole: bool = False) -> Iterator[tuple[fx.Node, tuple[int, ...], float]]:
        """Trained parameters that several blocks read, these, and the least seconds in which stages sum a gradient.

        whole: where tensor ranks have them whole; else these share them.
        """
        ends, data = self.layout.stage_link(config, 0, config.pp - 1), self.layout.data_link(config)
        ranks, divided = 1 if whole else config.tp, self.levels(config) != (0,)
        for node, blocks in self.readers.items():
            if len(blocks) > 1 and node.meta.get("trainable"):
                size = value_bytes(Value(node)).at(1) / ranks * self.summed
                if divided:  # then replicas gather the weights, not the gradients
                    yield node, blocks, tied_seconds(size / config.dp, 2, ends, 1, data)
                else:
                    yield node, blocks, tied_seconds(size, 2, ends, config.dp, data)
