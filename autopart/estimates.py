"""In which order candidates are tried: a rough estimate of the step, memory included, which bounds nothing.

A cheap lower bound knows nothing of memory, so that what it puts first often does not fit. Here a candidate that holds
too much recomputes or divides its parameters over replicas, whatever costs less, products exchange on tensor axes what
they have to if none is shared by rows, and blocks are whole; each costs what it roughly costs. A good plan is then
found early; bounds alone decide what is not worth trying. A bound that knows more takes the estimate's place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import fx

from autopart.analysis import FLOPS_PER_BYTE, Analysis
from autopart.axes_volume import gathered_bytes, least_exchange_seconds, least_shared_seconds
from autopart.candidates import Candidates
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
# How far above their bounds candidates end that compute some of the forward again, over others: bounds let any part of
# a layer do so.
_AGAIN = 1.03


@dataclass(slots=True)
class Estimates:
    """Estimates for the candidates of one program; bytes of all its parameters and of one sample's activations."""

    candidates: Candidates
    _weights: float = field(init=False, default=0.0)
    _gradients: float = field(init=False, default=0.0)
    _optimizer: float = field(init=False, default=0.0)
    _kept: float = field(init=False)
    _gathered: float = field(init=False)  # those of them that each of the ranks that share a stage's tensors has whole
    _block: float = field(init=False)  # the largest block's share of the work
    _crossing: float = field(init=False)  # bytes of a sample
    _exchanged: dict[object, float] = field(default_factory=dict)
    _estimated: dict[Degrees, tuple[float, bool]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        candidates = self.candidates
        for info in candidates.analysis.program.parameters:
            found = parameter_bytes(info.shape, info.dtype, candidates.optimizer, info.trainable)
            self._weights += found.weight
            self._gradients += found.gradient
            self._optimizer += found.optimizer
        self._kept = candidates.sample_bytes
        self._gathered = gathered_bytes(candidates)
        self._block = _largest_share(candidates.analysis)
        crossing = [sum(candidates.whole_bytes(value, 1) for value in row) for row in candidates.positions.crossings]
        self._crossing = min((size for size in crossing if size), default=0.0)

    def expected(self, config: Degrees, floor: float) -> float:
        """Seconds of a step, of which ``floor`` is a bound."""
        if config not in self._estimated:
            self._estimated[config] = self._estimate(config, self._tensor_seconds(config))
        seconds, again = self._estimated[config]
        return max(seconds, floor * _AGAIN) if again else seconds

    def promised(self, config: Degrees) -> float:
        """The same, if the ranks of one tensor axis exchange the least that they can."""
        if len(config.axes) != 1:
            return self._estimate(config, self._tensor_seconds(config))[0]
        by_rows = self._weights <= math.fsum(self.candidates.layout.capacities(config))
        return self._estimate(config, least_shared_seconds(self.candidates, config, by_rows))[0]

    def _estimate(self, config: Degrees, exchanged_s: float) -> tuple[float, bool]:
        """Seconds of a step, and whether some of the forward runs again.

        exchanged_s: of a microbatch, for what products exchange on tensor axes.
        """
        candidates = self.candidates
        warmup, places = candidates.warmup_of(config), candidates.layout.places(config)
        flights = in_flight(config.schedule, config.stages, config.microbatches, warmup, places)
        sizes = self.kept_bytes(config) / config.stages
        overhead = candidates.overhead_bytes / config.virtual
        kept = [flying * sizes for flying in flights]
        rooms = [capacity - overhead for capacity in candidates.layout.capacities(config)]
        work = candidates.besides_seconds(config) + candidates.work_seconds(config) + exchanged_s
        uneven = work * self._block / 2 if config.pp > 1 else 0.0  # a stage ends up to half a block late
        passes, sent = config.microbatches + (config.pp - 1) / config.virtual, self._sent_seconds(config)
        possible = []
        for held, exchanged, ends in self._parameters(config):
            too_much, shares = _run_again(config.recompute, held / config.virtual, kept, rooms)
            mean = math.fsum(share**2 for share in shares) / len(shares)  # those that run less again get more layers
            seconds = work * (1 + _FORWARD * mean) / config.pp + uneven
            part = candidates.exposed(config, exchanged, seconds * config.microbatches)
            possible.append((too_much, (seconds + sent) * passes + part * exchanged + ends, max(shares) > 0))
        too_much, seconds, again = min(possible)
        return seconds * (_HOPELESS if too_much else 1.0), again

    def kept_bytes(self, config: Degrees) -> float:
        """Of a microbatch's activations, what ranks keep of it in all stages, one of each, where nothing runs again."""
        return (self._kept + self._gathered * (config.tp - 1)) / config.tp * self.candidates.samples(config)

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

    def passed_seconds(self, config: Degrees) -> float:
        """Of a step, for what a stage sends on and gets back of all microbatches: the least that crosses anywhere."""
        return config.microbatches * self._sent_seconds(config) / 2

    def _parameters(self, config: Degrees) -> Iterator[tuple[float, float, float]]:
        """By level of ZeRO, the bytes that parameters take on a rank, the seconds of a step in which replicas exchange
        them microbatch by microbatch, and those that they take at its end.
        """
        candidates, dp, m = self.candidates, config.dp, config.microbatches
        data, ranks = candidates.layout.data_link(config), config.pp * config.tp
        weights, gradients, optimizer = (size / ranks for size in (self._weights, self._gradients, self._optimizer))
        summed = weights * candidates.summed
        for level in candidates.levels(config):
            held = math.fsum(
                size / dp if level >= least else size for size, least in ((weights, 3), (gradients, 2), (optimizer, 1))
            )
            exchanged = ends = 0.0
            if level < 2:
                ends = bucketed_all_reduce_seconds(summed, dp, data)
            elif level == 2:
                exchanged = m * collective_seconds(REDUCE_SCATTER, summed, dp, data)
                ends = collective_seconds(ALL_GATHER, weights, dp, data)
            else:
                exchanged = 3 * m * collective_seconds(ALL_GATHER, weights, dp, data)
            ends += candidates.prices(config).optimizer_seconds(weights / dp if level else weights)
            yield held, exchanged, ends


def _run_again(recompute: str, held: float, kept: Sequence[float], rooms: Sequence[float]) -> tuple[bool, list[float]]:
    """Whether stages have too little room all together, and of what each keeps the share that it computes again.

    held, kept, rooms: bytes of a stage's parameters, of all it keeps where nothing runs again, and for both.
    """
    missing = [max(0.0, held + size - room) for size, room in zip(kept, rooms, strict=True)]
    freed = [size * (1 - _INPUTS) if recompute != "none" else 0.0 for size in kept]
    if recompute == "auto":
        shares = [min(1.0, short / size) if size else 0.0 for short, size in zip(missing, freed, strict=True)]
    else:
        shares = [float(recompute == "full") for _ in kept]
    return sum(missing) > sum(freed), shares


def _largest_share(analysis: Analysis) -> float:
    """Of all forward FLOPs and bytes that the largest block has."""
    costs, batch = analysis.costs("cuda"), max(analysis.program.batch, 1)

    def weight(node: fx.Node) -> float:
        cost = costs[node]
        return float(cost.flops_forward.at(batch) + FLOPS_PER_BYTE * cost.bytes_forward.at(batch))

    weights = [math.fsum(map(weight, block.nodes)) for block in analysis.blocks]
    return max(weights, default=0.0) / (math.fsum(weights) or 1.0)
