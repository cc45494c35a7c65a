"""In which order candidates are tried: a rough estimate of the step, memory included, which bounds nothing.

A lower bound knows nothing of memory, so that what it puts first often does not fit. Here a candidate that holds too
much recomputes, then divides its parameters over replicas, and each costs what it roughly costs. A good plan is then
found early; the bound alone decides what is not worth trying.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from autopart.candidate_prices import CUDA_OVERHEAD_BYTES
from autopart.candidates import Candidates
from autopart.conversion_prices import ConversionPrices
from autopart.cost.communication import ALL_GATHER, bucketed_all_reduce_seconds, collective_seconds
from autopart.passes.annotate import parameter_bytes
from autopart.solver.search import Degrees

# A forward takes a third of both passes; layers that are computed again keep about a tenth of their activations.
_FORWARD, _INPUTS = 1 / 3, 1 / 10
# The seconds of what seems to fit in no way, which comes last.
_HOPELESS = 100.0


@dataclass(slots=True)
class Estimates:
    """Estimates for the candidates of one program; bytes of all its parameters and of one sample's activations."""

    candidates: Candidates
    _weights: float = field(init=False, default=0.0)
    _state: float = field(init=False, default=0.0)
    _kept: float = field(init=False)

    def __post_init__(self) -> None:
        candidates = self.candidates
        for info in candidates.analysis.program.parameters:
            found = parameter_bytes(info.shape, info.dtype, candidates.optimizer, info.trainable)
            self._weights += found.weight
            self._state += found.total
        self._kept = candidates.kept_bytes(ConversionPrices((), candidates.device))

    def seconds(self, config: Degrees) -> float:
        """Of a step."""
        candidates, dp = self.candidates, config.dp
        data, ranks = candidates.layout.data_link(config), config.pp * config.tp
        weights, state = self._weights / ranks, self._state / ranks
        flying = min(config.stages, config.microbatches)
        kept = self._kept * candidates.samples(config) * flying / config.stages / config.tp
        overhead = CUDA_OVERHEAD_BYTES if candidates.device.kind == "cuda" else 0
        room = candidates.layout.capacity(config, 0) * config.virtual - overhead
        work = candidates.besides_seconds(config) + candidates.work_seconds(config)
        if config.recompute == "full":
            kept *= _INPUTS
        elif config.recompute == "auto" and state + kept > room:
            kept *= _INPUTS
            work *= 1 + _FORWARD
        updated, exchanged = weights, bucketed_all_reduce_seconds(weights * candidates.summed, dp, data)
        if state + kept > room:
            state, updated = state / dp, weights / dp
            exchanged = 3 * config.microbatches * collective_seconds(ALL_GATHER, weights, dp, data)
        share = work / config.pp
        seconds = (config.microbatches + (config.pp - 1) / config.virtual) * share + exchanged
        seconds += candidates.prices(config).optimizer_seconds(updated)
        return seconds * (_HOPELESS if state + kept > room else 1.0)
