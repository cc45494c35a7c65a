"""Least seconds of a configuration's step: before its strategies and stages are known, and with more of them known."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Self

from torch import fx

from autopart.candidate_prices import CandidatePrices, same_but_for_memory
from autopart.cluster import Cluster
from autopart.conversion_prices import TensorAxis
from autopart.cost.communication import bucketed_all_reduce_seconds
from autopart.cost.devices import Device
from autopart.memory_bound import MemoryBound, least_added
from autopart.passes.amounts import value_bytes
from autopart.passes.data_axis import LEVELS
from autopart.passes.graph import Value
from autopart.runtime.errors import InfeasibleError
from autopart.runtime.schedule import in_flight
from autopart.solver.search import Config, Degrees
from autopart.solver.stages_least import least_share
from autopart.step_time import WHOLE_SCHEDULES, one_stage_floor, pipeline_floor
from autopart.tensor_choice import TensorChoice, work_bound


@dataclass(slots=True)
class CandidateFloors(CandidatePrices):
    """Lower bounds of candidates; what is found for one is kept for those that share it."""

    alike: list[tuple[tuple[fx.Node, bool], int]] = field(init=False)  # an op of each class, in a layer; how many
    _trained: int = field(init=False)  # bytes of all parameters that have gradients
    _memory: MemoryBound = field(init=False)
    _work: dict[tuple[int, int, str], float] = field(default_factory=dict)
    _free: dict[int, float] = field(default_factory=dict)
    _work_bounds: dict[tuple[int, tuple[TensorAxis, ...], bool], float] = field(default_factory=dict)
    _enough: dict[object, float] = field(default_factory=dict)  # from where such a bound was not raised further
    _added: dict[tuple[Degrees, float], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        CandidatePrices.__post_init__(self)
        first, layers = self.analysis.first, self.analysis.layers
        alike = Counter((first.get(node, node), bool(layers[at])) for node, at in self.analysis.block_of.items())
        self.alike = list(alike.items())
        self._memory = MemoryBound(self.analysis, self._block_costs, self.readers, self.optimizer)
        self._trained = sum(value_bytes(Value(node)).at(1) for node in self.readers if node.meta.get("trainable"))

    def _with(self, cluster: Cluster, device: Device, whole: frozenset[str]) -> Self:
        found = CandidatePrices._with(self, cluster, device, whole)
        found._added = {}
        if not same_but_for_memory(device, self.device):
            found._work, found._free, found._work_bounds, found._enough = {}, {}, {}, {}
        if device.kind != self.device.kind:
            found._memory = MemoryBound(self.analysis, found._block_costs, self.readers, self.optimizer)
        return found

    def lower_bound(self, config: Degrees) -> float:
        """Seconds that a step takes at least: the work alone, shared perfectly where it is shared."""
        return self._floor(self.besides_seconds(config) + self.work_seconds(config), config)

    def work_floor(self, config: Degrees, below: float = math.inf) -> float:
        """The same, from the best strategies for the work alone, which takes a solver, and what memory adds to it.

        below: seconds from which a higher bound is of no interest.
        """
        setting = self.setting(config)
        key = self.samples(config), setting.axes, setting.beside
        if config.axes:
            enough = below / self.step_floor(1.0, config) - self.besides_seconds(config)
            bounded, known = self._enough.get(key), self._work_bounds.get(key, 0.0)
            if bounded is None or (known >= bounded and enough > known):
                # the second time as far as it goes
                wanted = enough if bounded is None else math.inf
                found = work_bound(
                    *(self.analysis, self._folded, setting, self._block_costs, self.time_limit_s), enough=wanted
                )
                self._work_bounds[key], self._enough[key] = max(known, found), wanted
        work = max(self._work_bounds.get(key, 0.0), self.work_seconds(config)) + self.besides_seconds(config)
        # what divided parameters exchange in each microbatch, they do not at the end
        summed = not self._divides(config) and not self.zero
        asked = self._floor(work + self._memory_seconds(config, work), config, summed)
        return max(self.known_floor(config), asked, self._order_floor(config, work))

    def _order_floor(self, config: Degrees, work: float) -> float:
        """What the order of a schedule with W apart, or several stages on a rank, makes of so many seconds at least."""
        if config.pp == 1 or config.schedule in (*WHOLE_SCHEDULES, "2bw"):
            return 0.0
        prices, share = self.prices(config), 1 / config.tp
        shared = (count * prices.shared_seconds(node, share, share)[0] for (node, _), count in self.alike)
        places = self.layout.places(config)
        least = least_share(config.schedule, places, config.microbatches, math.fsum(shared) / work if work else 0.0)
        return work * least / self.faster(config)

    def strategy_floor(self, config: Degrees) -> float:
        """The same from the best strategies whose parameters fit, which takes a solver for every candidate."""
        if not config.axes:
            return self.work_floor(config)
        room = sum(self._rooms(config))
        try:
            work = work_bound(
                *(self.analysis, self._folded, self.setting(config), self._block_costs, self.time_limit_s),
                *(self.optimizer, room, self._levels(config)),
            )
        except InfeasibleError:
            return self.work_floor(config)
        summed = not self._divides(config) and not self.zero
        return max(self.work_floor(config), self._floor(work + self.besides_seconds(config), config, summed))

    def shared_floor(self, config: Degrees) -> float:
        """The same under any factoring of the tensor ranks into axes: work shared perfectly, and memory; no solver."""
        work = self.work_seconds(config) + self.besides_seconds(config)
        summed = not self._divides(config) and not self.zero
        return max(self.lower_bound(config), self._floor(work + self._memory_seconds(config, work), config, summed))

    def known_floor(self, config: Degrees) -> float:
        """The best lower bound that is known already, memory left aside."""
        setting = self.setting(config)
        key = self.samples(config), setting.axes, setting.beside
        work = max(self._work_bounds.get(key, 0.0), self.work_seconds(config))
        return self._floor(work + self.besides_seconds(config), config)

    def _floor(self, work: float, config: Degrees, summed: bool = True) -> float:
        """Least seconds of a step whose microbatches take ``work``, in one stage with the end of the step.

        summed: sums of gradients too.
        """
        floor = self.step_floor(work, config)
        if config.pp > 1:
            return floor
        held = self._trained / config.tp
        updated = held if self.zero == 0 else held / config.dp
        sums = bucketed_all_reduce_seconds(held * self.summed, config.dp, self.layout.data_link(config))
        # a backward hides no more than it takes, however much longer than this
        hiding = work if config.schedule in WHOLE_SCHEDULES else 0.0
        exposed = max(0.0, sums - hiding) if summed else 0.0
        return floor + self.prices(config).optimizer_seconds(updated) + exposed

    def _mixture_floor(self, config: Degrees, seconds: float, work: float) -> float:
        """Under a step whose microbatches take at least so many seconds, all in all and without parameters."""
        free = self.free_seconds(config)
        work, summed = work + self.besides_seconds(config), not self._divides(config) and not self.zero
        asked = self._floor(work + self._memory_seconds(config, work), config, summed)
        floor = max(self.lower_bound(config), self._floor(work, config), asked)
        if config.pp > 1:
            return floor
        return max(floor, one_stage_floor(seconds + free, self._sum_seconds(config), config))

    def _least_seconds(self, config: Degrees, choice: TensorChoice) -> float:
        """Of a step with these strategies, however its blocks are divided."""
        costs = self._costs(config, choice, self.setting(config))
        self._add_parameters(costs, config, choice)
        return self.step_floor(math.fsum(cost.forward_s + cost.backward_s for cost in costs), config)

    def _memory_seconds(self, config: Degrees, work: float) -> float:
        """Seconds that memory adds to ``work`` of a microbatch, at least."""
        if (config, work) not in self._added:
            data, whole = self.setting(config).data, config.schedule in WHOLE_SCHEDULES
            prices, levels, rooms = self.prices(config), self._levels(config), self._rooms(config)
            blocks = self._memory.blocks(prices, 1 / config.tp, data, levels, config.recompute)
            m, places = config.microbatches, self.layout.places(config)
            flying = in_flight(config.schedule, config.stages, m, self.warmup_of(config), places)
            timed = whole and self.faster(config) == 1.0
            self._added[config, work] = least_added(blocks, rooms, flying, m if timed else 1, work)
        return self._added[config, work]

    def _levels(self, config: Degrees) -> tuple[int, ...]:
        """Of ZeRO, those that a parameter may have."""
        return LEVELS if self._divides(config) else tuple({0, self.zero or 0})

    def _sum_seconds(self, config: Degrees) -> float:
        """Of gradients' sums those over replicas, which start during the last backward, at most: of whole weights."""
        held = self._trained
        return bucketed_all_reduce_seconds(held * self.summed, config.dp, self.layout.data_link(config))

    def step_floor(self, work: float, config: Degrees) -> float:
        """Least seconds of a step whose microbatches take ``work`` seconds each through all stages."""
        floor = pipeline_floor(work, config, self.warmup_of(config))
        # while ranks wait others may be faster, but all together do no more than when none waits
        return max(floor / self.faster(config), config.microbatches * work / config.pp)

    def faster(self, config: Config) -> float:
        """How many times as fast as priced a stage is at most, while other stages wait."""
        return self.shared.alone if self.shared is not None and config.stages > 1 else 1.0

    def work_seconds(self, config: Degrees) -> float:
        """Seconds of one microbatch's ops, on tp ranks that share all FLOPs and bytes of each perfectly."""
        key = (self.samples(config), config.tp, config.recompute)
        if key not in self._work:
            prices, share = self.prices(config), 1 / config.tp
            work = 0.0
            for (node, in_layer), count in self.alike:
                if config.tp == 1:
                    forward, backward = prices.op_seconds(node)
                else:
                    forward, backward = prices.shared_seconds(node, share, share)
                work += count * (forward + backward + (forward if config.recompute == "full" and in_layer else 0.0))
            self._work[key] = work
        return self._work[key]

    def besides_seconds(self, config: Degrees) -> float:
        """Seconds of one microbatch beside its ops, at least: free ops, and adding its gradients to those before."""
        added = self.setting(config).data.least_seconds(self._trained / config.tp, self._levels(config))
        return self.free_seconds(config) + added

    def free_seconds(self, config: Degrees) -> float:
        """Seconds of one microbatch's free ops, which some stage has to compute at least once."""
        samples = self.samples(config)
        if samples not in self._free:
            prices = self.prices(config)
            self._free[samples] = sum(prices.op_seconds(node)[0] for node in self.analysis.free_block)
        return self._free[samples]
