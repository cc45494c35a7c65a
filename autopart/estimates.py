"""In which order candidates are tried: a rough estimate of the step, memory included, which bounds nothing.

A cheap lower bound knows nothing of memory, so that what it puts first often does not fit. Here a candidate that holds
too much recomputes or divides its parameters over replicas, whatever costs less, products exchange on tensor axes what
they have to if none is shared by rows, and blocks are whole; each costs what it roughly costs. A good plan is then
found early; bounds alone decide what is not worth trying.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import fx

from autopart.analysis import FLOPS_PER_BYTE, Analysis
from autopart.axes_volume import least_exchange_seconds
from autopart.candidate_prices import CUDA_OVERHEAD_BYTES
from autopart.candidates import Candidates
from autopart.conversion_prices import ConversionPrices
from autopart.cost.communication import (
    ALL_GATHER,
    REDUCE_SCATTER,
    bucketed_all_reduce_seconds,
    collective_seconds,
    send_seconds,
)
from autopart.passes.annotate import parameter_bytes
from autopart.runtime.schedule import in_flight
from autopart.solver.degrees import Degrees

# A forward takes a third of both passes; layers that are computed again keep about a tenth of their activations. What
# frees the most bytes a second runs again first: of what frees a share x of them all takes about x^2 of a forward.
_FORWARD, _INPUTS = 1 / 3, 1 / 10
# The seconds of what seems to fit in no way, which comes last.
_HOPELESS = 100.0


@dataclass(slots=True)
class Estimates:
    """Estimates for the candidates of one program; bytes of all its parameters and of one sample's activations."""

    candidates: Candidates
    _weights: float = field(init=False, default=0.0)
    _gradients: float = field(init=False, default=0.0)
    _optimizer: float = field(init=False, default=0.0)
    _kept: float = field(init=False)
    _block: float = field(init=False)  # the largest block's share of the work
    _crossing: float = field(init=False)  # bytes of a sample
    _exchanged: dict[object, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        candidates = self.candidates
        for info in candidates.analysis.program.parameters:
            found = parameter_bytes(info.shape, info.dtype, candidates.optimizer, info.trainable)
            self._weights += found.weight
            self._gradients += found.gradient
            self._optimizer += found.optimizer
        self._kept = candidates.kept_bytes(ConversionPrices((), candidates.device))
        self._block = _largest_share(candidates.analysis)
        crossing = [sum(candidates.whole_bytes(value, 1) for value in row) for row in candidates.positions.crossings]
        self._crossing = min((size for size in crossing if size), default=0.0)

    def seconds(self, config: Degrees) -> float:
        """Of a step."""
        candidates = self.candidates
        warmup, places = candidates.warmup_of(config), candidates.layout.places(config)
        flights = in_flight(config.schedule, config.stages, config.microbatches, warmup, places)
        flying = sum(flights) / len(flights)  # stages that hold more microbatches get fewer layers
        kept = self._kept * candidates.samples(config) * flying / config.pp / config.tp
        overhead = CUDA_OVERHEAD_BYTES if candidates.device.kind == "cuda" else 0
        room = candidates.layout.capacity(config, 0) * config.virtual - overhead
        work = candidates.besides_seconds(config) + candidates.work_seconds(config) + self._tensor_seconds(config)
        uneven = work * self._block / 2 if config.pp > 1 else 0.0  # a stage ends up to half a block late
        passes, sent = config.microbatches + (config.pp - 1) / config.virtual, self._sent_seconds(config)
        possible = []
        for held, exchanged in self._parameters(config):
            missing, freed = max(0.0, held + kept - room), kept * (1 - _INPUTS)
            share = {"none": 0.0, "full": 1.0, "auto": min(1.0, missing / freed) if freed else 0.0}[config.recompute]
            seconds = work * (1 + _FORWARD * share**2) / config.pp + uneven
            possible.append((missing > share * freed, (seconds + sent) * passes + exchanged))
        too_much, seconds = min(possible)
        return seconds * (_HOPELESS if too_much else 1.0)

    def _tensor_seconds(self, config: Degrees) -> float:
        """Of a microbatch, for what products exchange on tensor axes."""
        key = self.candidates.samples(config), config.axes, self.candidates.layout.tensor_axes(config)
        if key not in self._exchanged:
            self._exchanged[key] = least_exchange_seconds(self.candidates, config, by_rows=False)
        return self._exchanged[key]

    def _sent_seconds(self, config: Degrees) -> float:
        """Of a stage, for what it gets and sends of a microbatch there and back: the least that crosses anywhere."""
        if config.pp == 1:
            return 0.0
        size = self._crossing * self.candidates.samples(config) / config.tp
        return 4 * send_seconds(size, self.candidates.layout.stage_link(config, 0, 1))

    def _parameters(self, config: Degrees) -> Iterator[tuple[float, float]]:
        """By level of ZeRO, the bytes that parameters take on a rank and the seconds that they take in a step."""
        candidates, dp, m = self.candidates, config.dp, config.microbatches
        data, ranks = candidates.layout.data_link(config), config.pp * config.tp
        weights, gradients, optimizer = (size / ranks for size in (self._weights, self._gradients, self._optimizer))
        summed = weights * candidates.summed
        for level in candidates.levels(config):
            held = math.fsum(
                size / dp if level >= least else size for size, least in ((weights, 3), (gradients, 2), (optimizer, 1))
            )
            if level < 2:
                exchanged = bucketed_all_reduce_seconds(summed, dp, data)
            elif level == 2:
                exchanged = m * collective_seconds(REDUCE_SCATTER, summed, dp, data)
                exchanged += collective_seconds(ALL_GATHER, weights, dp, data)
            else:
                exchanged = 3 * m * collective_seconds(ALL_GATHER, weights, dp, data)
            yield held, exchanged + candidates.prices(config).optimizer_seconds(weights / dp if level else weights)


def _largest_share(analysis: Analysis) -> float:
    """Of all forward FLOPs and bytes that the largest block has."""
    costs, batch = analysis.costs("cuda"), max(analysis.program.batch, 1)

    def weight(node: fx.Node) -> float:
        cost = costs[node]
        return float(cost.flops_forward.at(batch) + FLOPS_PER_BYTE * cost.bytes_forward.at(batch))

    weights = [math.fsum(map(weight, block.nodes)) for block in analysis.blocks]
    return max(weights, default=0.0) / (math.fsum(weights) or 1.0)
