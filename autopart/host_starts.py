"""Seconds in which the host of a GPU starts the kernels of a stage, by its blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import fx

from autopart.analysis import Analysis


@dataclass(frozen=True, slots=True)
class HostStarts:
    """blocks: of each block, forward and backward. free: of free ops that the same blocks need, these blocks and the
    seconds of the ops' forwards, which a stage that has any of the blocks takes once. What runs again is left out.
    """

    blocks: tuple[tuple[float, float], ...]
    free: tuple[tuple[frozenset[int], float], ...]

    @staticmethod
    def made(analysis: Analysis, kernels: Callable[[fx.Node], tuple[int, int]], host_s: float) -> HostStarts:
        """kernels: of an op, forward and backward. host_s: seconds to start one."""
        counts = [[0, 0] for _ in analysis.blocks]
        needed: dict[fx.Node, set[int]] = {node: set() for node in analysis.free_block}
        for node in reversed(analysis.graph.nodes):
            block = analysis.block_of.get(node)
            if block is not None:
                for way, count in enumerate(kernels(node)):
                    counts[block][way] += count
            users = {block} if block is not None else needed.get(node, set())
            for source in node.all_input_nodes:
                if source in needed:
                    needed[source] |= users
        free: dict[frozenset[int], int] = {}
        for node, users in needed.items():
            if count := kernels(node)[0]:
                free[frozenset(users)] = free.get(frozenset(users), 0) + count
        return HostStarts(
            tuple((host_s * forward, host_s * backward) for forward, backward in counts),
            tuple((users, host_s * count) for users, count in free.items()),
        )

    def of(self, blocks: Iterable[int]) -> tuple[float, float]:
        """Of a stage of these blocks, forward and backward."""
        inside = [*blocks]
        free = math.fsum(seconds for users, seconds in self.free if not users.isdisjoint(inside))
        return free + sum(self.blocks[block][0] for block in inside), sum(self.blocks[block][1] for block in inside)
