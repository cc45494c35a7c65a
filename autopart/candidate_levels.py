"""Which levels of ZeRO a candidate's parameters may have: none where whole ones fit, however blocks are divided."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

from autopart.candidate_prices import CandidatePrices
from autopart.cluster import Cluster
from autopart.conversion_prices import ConversionPrices
from autopart.cost.devices import Device
from autopart.passes.amounts import value_bytes
from autopart.passes.annotate import parameter_bytes
from autopart.passes.data_axis import LEVELS
from autopart.prices import Prices
from autopart.runtime.schedule import in_flight
from autopart.solver.degrees import Degrees
from autopart.solver.stages_problem import StageProblem
from autopart.tensor_choice import TensorChoice

_BUFFERS = 4
"""Of what crosses at the two ends of a stage, on its way."""


@dataclass(slots=True)
class CandidateLevels(CandidatePrices):
    """Levels are searched where they may be needed, so that bounds are of plans that may be chosen."""

    all_levels: bool = False  # search levels where whole parameters fit too, for bounds that hold with less memory
    _state_bytes: int = field(init=False)  # of all parameters, with gradients and what the optimizer keeps
    _known_sample: tuple[float, float, float] | None = None
    _roomy: dict[Degrees, bool] = field(default_factory=dict)
    _fitted: set[Degrees] = field(default_factory=set)  # whose fastest strategies, with whole parameters, fit anyhow

    def __post_init__(self) -> None:
        CandidatePrices.__post_init__(self)
        self._state_bytes = sum(
            parameter_bytes(info.shape, info.dtype, self.optimizer, info.trainable).total
            for info in self.analysis.program.parameters
        )

    def _with(self, cluster: Cluster, device: Device, whole: frozenset[str]) -> Self:
        found = CandidatePrices._with(self, cluster, device, whole)
        found._roomy, found._fitted = {}, set()
        if device.kind != self.device.kind:
            found._known_sample = None
        return found

    def levels(self, config: Degrees) -> tuple[int, ...]:
        """Those that a parameter may have."""
        return LEVELS if self._divides(config) else tuple({0, self.zero or 0})

    def may_divide(self, config: Degrees) -> bool:
        """Whether no level is given and replicas can divide parameters; 2BW keeps versions of whole ones."""
        return self.zero is None and config.dp > 1 and config.schedule != "2bw"

    def _divides(self, config: Degrees) -> bool:
        """Whether parameters may be divided over replicas, as whole ones may not fit."""
        return self.may_divide(config) and (self.all_levels or not self.keeps_whole(config))

    @property
    def _exchange_forced(self) -> bool:
        """Whether all parameters have a level at which replicas exchange them in every microbatch."""
        return (self.zero or 0) >= 2

    def _exchanges(self, config: Degrees) -> bool:
        """Whether replicas may exchange divided parameters in every microbatch."""
        return self._divides(config) or self._exchange_forced

    def keeps_whole(self, config: Degrees) -> bool:
        """Whether whole parameters are known to fit: any, or since it was evaluated those of the fastest strategies."""
        return config in self._fitted or self._surely_whole(config)

    def _surely_whole(self, config: Degrees) -> bool:
        """Whether each rank could hold all parameters whole, and all that is kept, undivided and on one stage."""
        plain = config if config.recompute == "none" else replace(config, recompute="none")
        if plain not in self._roomy:
            places, warmup = self.layout.places(config), self.warmup_of(config)
            flying = max(in_flight(config.schedule, config.stages, config.microbatches, warmup, places))
            room, (least, most) = min(self._rooms(config)), self.held_bytes(self.samples(config), flying)
            fits = most <= room and config.schedule != "2bw"  # which has versions of parameters
            if not fits and least <= room:
                fits = self._fits_anyhow(plain, TensorChoice({}, {}, None)) is not None
            self._roomy[plain] = fits
        return self._roomy[plain]

    def holds_all(self, config: Degrees, flying: int) -> bool:
        """Whether a rank has room for all parameters whole, and for what so many microbatches keep of all blocks."""
        return self.held_bytes(self.samples(config), flying)[1] <= min(self._rooms(config))

    def held_bytes(self, samples: int, flying: int) -> tuple[float, float]:
        """Of a stage with everything, an estimate: all parameters and what is kept; and no less than it holds.

        samples: of a microbatch. flying: microbatches that it holds at most. Each gradient may be in a message, be
        copied, stay converted and be converted on its way, all of it at once; what the optimizer makes for its step is
        less. Of what crosses a stage may hold what it received, what it sent, and a copy of that.
        """
        kept, passing, crossing = (samples * size for size in self._of_sample)
        state = (2 + 3 * self.summed) * self._state_bytes
        most = state + flying * kept + passing + (3 * flying + _BUFFERS) * crossing
        return self._state_bytes + flying * kept, most

    @property
    def sample_bytes(self) -> float:
        """Of a sample's activations, what one device would keep for the backward."""
        return self._of_sample[0]

    @property
    def _of_sample(self) -> tuple[float, float, float]:
        """Of one sample on one device: bytes that are kept, the largest transients, and the most that crosses."""
        if self._known_sample is None:
            prices = Prices(self.device, self.analysis.costs(self.device.kind), 1, self.analysis.first)
            costs = self._block_costs.costs(prices, {}, {}, ConversionPrices((), self.device))
            kept = {owner: size for cost in costs for owner, size in cost.kept.items()}
            held = sum(kept.values()) + sum(cost.inside_bytes for cost in costs)
            crossing = (sum(value_bytes(v).at(1) for v in values) for values in self.positions.crossings)
            self._known_sample = held, max(cost.transient_bytes for cost in costs), max(crossing)
        return self._known_sample

    def _fits_anyhow(self, config: Degrees, choice: TensorChoice) -> StageProblem | None:
        """The problem of dividing these strategies, if they fit however they are: with all of them on every stage."""
        if config.stages > 1 and choice.memory_bytes > max(self.layout.capacities(config)):
            return None
        problem = self.problem(config, choice)
        return problem if problem.most_excess_bytes() + problem.most_crossing_bytes() <= 0 else None
