"""Least seconds of a configuration's step with the sums of its gradients, which a network of some speed passes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from torch import fx

from autopart.candidate_layers import CandidateLayers
from autopart.cost.devices import Link
from autopart.late_sums import LateSums, late_sums
from autopart.passes.graph import Value
from autopart.runtime.buckets import BUCKET_BYTES
from autopart.runtime.schedule import in_flight
from autopart.solver import stages as stage_solver
from autopart.solver.degrees import Degrees
from autopart.solver.overlap import GradientSum
from autopart.solver.stages_parts import Block, Cut, TiedGroup
from autopart.solver.stages_problem import StageProblem
from autopart.step_time import WHOLE_SCHEDULES
from autopart.tensor_choice import Builder

Product = tuple[fx.Node, Value, tuple[float, float, float], int]
"""With a weight: its operand, bytes of operand, weight and result, and how many are alike."""


@dataclass(frozen=True, slots=True)
class LeastParts:
    """Blocks with the seconds of their parameters' sums, those of parameters that several blocks read, and the sums.

    adding: by block, of a backward, where gradients are added to those of the microbatches before.
    """

    blocks: tuple[Block, ...]
    tied: tuple[TiedGroup, ...]
    sums: tuple[GradientSum, ...]
    adding: tuple[float, ...]


@dataclass(slots=True)
class CandidateSums(CandidateLayers):
    """Lower bounds in which the sums of gradients count that nothing hides."""

    _free: dict[int, float] = field(default_factory=dict)
    _shares: dict[object, tuple[tuple[float, ...], tuple[float, ...]]] = field(default_factory=dict)  # of blocks
    _shared_cuts: dict[tuple[int, int, Link, bool], tuple[Cut, ...]] = field(default_factory=dict)
    _last: dict[object, tuple[float, int]] = field(default_factory=dict)  # of last microbatches with sums
    _late: dict[object, LateSums] = field(default_factory=dict)
    products: dict[tuple[str, int], list[Product]] = field(default_factory=dict)
    """By kind of device and samples, what :mod:`autopart.axes_volume` reads of every configuration."""
    _kinds: tuple[list[tuple[fx.Node, bool]], NDArray[np.intp], NDArray[np.intp]] | None = None
    _sent: list[float | None] = field(default_factory=list)  # by block, once it is known

    def free_seconds(self, config: Degrees) -> float:
        """Seconds of one microbatch's free ops, which some stage has to compute at least once."""
        samples = self.samples(config)
        if samples not in self._free:
            prices = self.prices(config)
            self._free[samples] = sum(prices.op_seconds(node)[0] for node in self.analysis.free_block)
        return self._free[samples]

    def sum_seconds(self, config: Degrees) -> float:
        """Of gradients' sums those over replicas, which start during the last backward, at most: of whole weights, or
        of such that are divided, where switches add up whole ones in less than it takes to scatter them.
        """
        data = self.data(config)
        return max(data.sum_seconds(self.trained_bytes, level) for level in (0, 1))

    def block_seconds(self, config: Degrees) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Of each block, forward and backward, shared perfectly."""
        key = self.samples(config), config.tp, config.recompute
        if key not in self._shares:
            prices, share, full = self.prices(config), 1 / config.tp, config.recompute == "full"
            kinds, of, blocks = self._kinds_in_blocks()
            forward, backward = np.zeros(len(kinds)), np.zeros(len(kinds))
            for at, (node, again) in enumerate(kinds):
                there, back = prices.op_seconds(node) if config.tp == 1 else prices.shared_seconds(node, share, share)
                forward[at], backward[at] = there, back + (there if full and again else 0.0)
            sums = (np.bincount(blocks, own[of], len(self.analysis.blocks)) for own in (forward, backward))
            there_of, back_of = (tuple(found.tolist()) for found in sums)
            self._shares[key] = there_of, back_of
        return self._shares[key]

    def _kinds_in_blocks(self) -> tuple[list[tuple[fx.Node, bool]], NDArray[np.intp], NDArray[np.intp]]:
        """Ops that are unlike, with whether they run again with layers, and by op of a block its number and block."""
        if self._kinds is None:
            first, numbers = self.analysis.first, dict[tuple[fx.Node, bool], int]()
            of = [
                numbers.setdefault((first.get(node, node), self.runs_again(node)), len(numbers))
                for node in self.analysis.block_of
            ]
            self._kinds = list(numbers), np.array(of, np.intp), np.array(list(self.analysis.block_of.values()), np.intp)
        return self._kinds

    def byte_seconds(self, config: Degrees) -> float:
        """Of a byte of all weights, to sum its gradient over replicas where tensor axes divide it."""
        return self.data(config).sum_seconds(self.trained_bytes, 0) / (self.trained_bytes or 1) / config.tp

    def late_byte_seconds(self, config: Degrees, divided: bool | None = None) -> float:
        """The same of what is summed when its gradient is made: of weights that are divided a reduce-scatter, if that
        takes less.

        divided: whether they are; None: at best.
        """
        found, data = self.byte_seconds(config), self.data(config)
        if not found or not (self._divides(config) or self.zero if divided is None else divided):
            return found
        scattered = data.sum_seconds(self.trained_bytes, 1) / data.sum_seconds(self.trained_bytes, 0)
        return found * min(1.0, scattered)  # some cannot be divided

    def last_microbatch(self, config: Degrees, divided: bool | None = None) -> tuple[float, int]:
        """Seconds of the last microbatch and of sums of gradients in one stage, at least, and the block that says so.

        As :mod:`autopart.late_sums` says, with all shared perfectly. divided: whether weights are; None: at best.
        """
        byte_s = self.late_byte_seconds(config, divided)
        key = self.samples(config), config.tp, config.dp, config.recompute, byte_s
        if key not in self._last:
            forward, backward = self.block_seconds(config)
            behind, best = math.fsum(backward), (0.0, 0)
            for block, (back, size) in enumerate(zip(backward, self._sent_before(), strict=True)):
                if size is not None:
                    best = max(best, (behind + size * byte_s, block))
                behind -= back
            self._last[key] = math.fsum(forward) + best[0], best[1]
        return self._last[key]

    def first_sums(self, config: Degrees) -> float:
        """Seconds of the sums of what the first block reads, which begin when the last backward is over, at least."""
        first = (node for node, blocks in self.readers.items() if not blocks[0] and node.meta.get("trainable"))
        return math.fsum(self._block_costs.size(Value(node)).at(1) for node in first) * self.late_byte_seconds(config)

    def _sent_before(self) -> Sequence[float | None]:
        """By block bytes of the gradients of all up to it; None where a layer began before."""
        if not self._sent:
            sent = [0.0] * len(self.analysis.blocks)
            for node, blocks in self.readers.items():
                if node.meta.get("trainable"):
                    sent[blocks[0]] += self._block_costs.size(Value(node)).at(1)
            inside = self._inside_layers()
            self._sent = [None if at in inside else size for at, size in enumerate(itertools.accumulate(sent))]
        return self._sent

    def _inside_layers(self) -> set[int]:
        """Blocks before which a layer has begun, so that it may run as one with others behind them."""
        spans: dict[str, list[int]] = {}
        for block, layer in enumerate(self.analysis.layers):
            if layer:
                spans.setdefault(layer, []).append(block)
        return {block for own in spans.values() for block in range(own[0] + 1, own[-1] + 1)}

    def late_sums(self, config: Degrees, below: float, whole: bool = False) -> LateSums:
        """Of one stage, under any strategies, and such with whole parameters; nothing where it is not known.

        below: seconds of interest. whole: of strategies with whole parameters alone.
        """
        sums = config.dp > 1 and config.schedule in WHOLE_SCHEDULES and not self._exchange_forced
        if config.pp > 1 or len(config.axes) != 1 or not sums:
            return LateSums(0.0)
        divides = not whole and (self._divides(config) or bool(self.zero))
        key = config, divides
        known = self._late.get(key)
        if known is None or (known.seconds < below and not known.complete):
            known = self._late[key] = self._late_sums(config, below, divides)
        return known

    def _late_sums(self, config: Degrees, below: float, divides: bool) -> LateSums:
        builder = Builder(
            *(self.analysis, self._folded, self.setting(config), self._block_costs, self.optimizer, (0,), config.pp)
        )
        block_of = {node: blocks[0] for node, blocks in self.readers.items()} | self.analysis.block_of
        free = config.microbatches * self.free_seconds(config)
        blocks = tuple(dict.fromkeys((self.last_microbatch(config, divides)[1], 0)))
        found = late_sums(builder, block_of, blocks, divides, self.time_limit_s, below - free)
        return replace(found, seconds=found.seconds + free)

    def least_parts(self, config: Degrees, level: int | None = None) -> LeastParts:
        """What stages of this configuration are made of, shared perfectly, without any memory.

        level: of ZeRO, of all parameters, with the optimizer and what adds up gradients; else without.
        """
        data, (forward, backward) = self.setting(config).data, self.block_seconds(config)
        # from level 2 on what is summed may pass unseen
        divided = None if level is None else level > 0
        byte_s = 0.0 if (level or 0) >= 2 else self.late_byte_seconds(config, divided)
        ends, adding = [0.0] * len(forward), [0.0] * len(forward)
        sums, tied = list[GradientSum](), list[TiedGroup]()
        for node, blocks in self.readers.items():
            if node.meta.get("trainable"):
                size = self._block_costs.size(Value(node)).at(1)
                seconds = size * byte_s
                sums.append(GradientSum(blocks, 2.0 * BUCKET_BYTES, seconds))  # in a message of its own
                if level is not None:
                    held = size / config.tp
                    seconds += data.prices.optimizer_seconds(held / config.dp if level else held)
                    adding[blocks[0]] += data.adding_seconds(held, level)  # once, if all are in one stage
                if len(blocks) == 1:
                    ends[blocks[0]] += seconds
                else:
                    tied.append(TiedGroup(node.name, blocks, 0.0, 0.0, seconds))
            elif len(blocks) > 1:
                tied.append(TiedGroup(node.name, blocks, 0.0, 0.0, 0.0))  # as stages' parts with memory have it
        own = enumerate(zip(forward, backward, ends, strict=True))
        shared = (Block(f"block {at}", there, back, step_end_s=end) for at, (there, back, end) in own)
        return LeastParts(tuple(shared), tuple(tied), tuple(sums), tuple(adding))

    def least_cuts(self, config: Degrees, link: Link) -> tuple[Cut, ...]:
        """At each position, all values shared perfectly."""
        key = self.samples(config), config.tp, link, config.microbatches > 1
        if key not in self._shared_cuts:
            self._shared_cuts[key] = self._cuts(config, None, link)
        return self._shared_cuts[key]

    def divided_sums(self, config: Degrees) -> float:
        """Of all divisions into stages, with everything shared perfectly and no memory needed."""
        parts = self.least_parts(config)
        problem = StageProblem.row(
            parts.blocks,
            self.positions.sets,
            (Cut(),) * len(self.positions.sets),
            config.microbatches,
            in_flight(
                *(config.schedule, config.stages, config.microbatches, self.warmup_of(config)),
                self.layout.places(config),
            ),
            (math.inf,) * config.stages,
            tied=parts.tied,
            pins=self.pins.stages if self.pins else (),
        )
        links = self._stage_links(config)
        kinds = list(dict.fromkeys(links))
        cuts = tuple(self.least_cuts(config, link) for link in kinds)
        shapes = tuple(replace(shape, sums=parts.sums, cuts=cuts) for shape in problem.shapes)
        return stage_solver.least_seconds(replace(problem, shapes=shapes, links=(0, *map(kinds.index, links), 0)))
