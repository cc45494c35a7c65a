"""Candidates: what one configuration (pp, dp, tp, microbatches, schedule, recomputation) costs, block by block."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from autopart.analysis import Analysis
from autopart.block_costs import BlockCost, BlockCosts
from autopart.cluster import Cluster
from autopart.conversion_prices import ConversionPrices, TensorAxis
from autopart.cost.communication import bucketed_all_reduce_seconds, send_seconds
from autopart.cost.devices import Device
from autopart.data_prices import TRANSIENT_COPIES
from autopart.device_layout import DeviceLayout, slowest
from autopart.folding import FoldedGraph, FoldedPart, fold_graph, fold_part
from autopart.layer_frontier import Frontiers
from autopart.layer_frontier import paths as modules_again
from autopart.layer_strategies import LayerStrategies
from autopart.memory_bound import MemoryBound, least_added
from autopart.mixed_strategies import applied, chosen_ways, merged
from autopart.offers import Offers
from autopart.parameter_prices import priced_parameters
from autopart.passes import graph as graphs
from autopart.passes.amounts import value_bytes
from autopart.passes.data_axis import LEVELS
from autopart.passes.emit.segments import around
from autopart.passes.graph import Value
from autopart.passes.program import Role
from autopart.pins import Pins
from autopart.positions import Positions
from autopart.prices import Prices, share_of
from autopart.recomputation import KEPT, WHOLE, Activations, activations, layers
from autopart.runtime.errors import InfeasibleError
from autopart.runtime.links import dtype_of
from autopart.runtime.placement import REPLICATE
from autopart.runtime.schedule import deeper_warmup, in_flight
from autopart.shared_hosts import SharedHosts
from autopart.solver import stages as stage_solver
from autopart.solver.search import Config, Degrees, Evaluation, NotBetter
from autopart.solver.stages_parts import Block, Cut, Family
from autopart.solver.stages_problem import StageProblem, StageSolution, Step
from autopart.step_time import SPLIT_SCHEDULES, WHOLE_SCHEDULES, one_stage_floor, pipeline_floor, simulated_seconds
from autopart.tensor_choice import Builder, Setting, Shared, TensorChoice, choose, work_bound
from autopart.tensor_scheme import TensorScheme

# What a CUDA process needs besides its tensors: context, libraries' workspaces, communication buffers.
CUDA_OVERHEAD_BYTES = 2 * 2**30
# How often strategies are chosen again under a tighter memory limit when the fastest ones do not fit.
TIGHTENINGS = 4


@dataclass(frozen=True, slots=True)
class Answer:
    """A solved candidate."""

    config: Degrees
    choice: TensorChoice
    problem: StageProblem
    cut: StageSolution


@dataclass(slots=True)
class Candidates:
    """Solves and prices candidates of one program on one cluster for a global batch."""

    analysis: Analysis
    cluster: Cluster
    batch: int
    optimizer: str
    time_limit_s: float = 60.0
    warmup: int | tuple[int, ...] | None = None  # of 1F1B: for all stages, or the depth of deeper_warmup
    pins: Pins | None = None
    zero: int | None = 0  # the level of all parameters; None: 0 where that fits, else chosen for each
    scheme: TensorScheme = TensorScheme.AUTO
    whole: frozenset[str] = frozenset()  # parameters that no tensor axis divides
    device: Device = field(init=False)
    layout: DeviceLayout = field(init=False)
    shared: SharedHosts | None = field(init=False)
    positions: Positions = field(init=False)
    _prices: dict[int, Prices] = field(default_factory=dict)
    _work: dict[tuple[int, int, str], float] = field(default_factory=dict)
    _free: dict[int, float] = field(default_factory=dict)
    _work_bounds: dict[tuple[int, tuple[TensorAxis, ...], bool], float] = field(default_factory=dict)
    alike: list[tuple[tuple[fx.Node, bool], int]] = field(init=False)  # an op of each class, in a layer; how many
    _conversions: dict[tuple[TensorAxis, ...], ConversionPrices] = field(default_factory=dict)
    _offers: dict[tuple[int, ...], Offers] = field(default_factory=dict)
    readers: dict[fx.Node, tuple[int, ...]] = field(init=False)  # blocks that read a parameter or buffer
    _shared: dict[tuple[int, tuple[TensorAxis, ...], bool], Shared] = field(default_factory=dict)
    _priced: dict[object, tuple[TensorChoice, list[BlockCost], dict[object, Family]]] = field(default_factory=dict)
    _trained: int = field(init=False)  # bytes of all parameters that have gradients
    _block_costs: BlockCosts = field(init=False)
    _folded: FoldedGraph = field(init=False)
    _memory: MemoryBound = field(init=False)
    _added: dict[tuple[Degrees, float], float] = field(default_factory=dict)
    _parts: dict[str, FoldedPart] = field(default_factory=dict)  # by layer

    def __post_init__(self) -> None:
        self.layout, self.shared = DeviceLayout(self.cluster), SharedHosts.of(self.cluster)
        # Stages are alike, so the slowest device sets the pace of all.
        self.device = min(self.cluster.devices, key=lambda device: (device.peak("float32"), device.memory_bandwidth))
        self.positions = Positions.of(self.analysis, self.pins.together if self.pins else ())
        self._block_costs = BlockCosts(self.analysis, self.device.kind)
        self._folded = fold_graph(self.analysis)
        first, layers = self.analysis.first, self.analysis.layers
        alike = Counter((first.get(node, node), bool(layers[at])) for node, at in self.analysis.block_of.items())
        self.alike = list(alike.items())
        readers: dict[fx.Node, set[int]] = {}
        for node, index in self.analysis.block_of.items():
            for value in graphs.inputs(node):
                if value.node.op == "placeholder" and value.node.meta["role"] in (Role.PARAMETER, Role.BUFFER):
                    readers.setdefault(value.node, set()).add(index)
        self.readers = {node: tuple(sorted(found)) for node, found in readers.items()}
        self._memory = MemoryBound(self.analysis, self._block_costs, self.readers, self.optimizer)
        self._trained = sum(value_bytes(Value(node)).at(1) for node in self.readers if node.meta.get("trainable"))

    def on(self, cluster: Cluster, device: Device, batch: int, whole: frozenset[str] = frozenset()) -> Candidates:
        """One stage of the same program on other devices, priced on ``device``; facts about the program are shared.

        Parameters are whole on every replica, those of ``whole`` on every tensor rank too. No pins, no warm-up.
        """
        found = copy.copy(self)
        found.cluster, found.device, found.batch, found.whole = cluster, device, batch, whole
        found.zero, found.warmup, found.pins = 0, None, None
        found.layout, found._added = DeviceLayout(cluster), {}
        if device != self.device or whole != self.whole:  # else by axes with their links
            found._conversions, found._shared, found._priced = {}, {}, {}
        if device != self.device:
            found._prices, found._work, found._free, found._work_bounds = {}, {}, {}, {}
        if device.kind != self.device.kind:
            found._block_costs = BlockCosts(self.analysis, device.kind)
            found._memory = MemoryBound(self.analysis, found._block_costs, self.readers, self.optimizer)
        if whole != self.whole:
            found._offers = {}
        return found

    # -- prices ---------------------------------------------------------------------------------------------------

    def prices(self, config: Degrees) -> Prices:
        samples = self.samples(config)
        if samples not in self._prices:
            self._prices[samples] = Prices(
                self.device, self.analysis.costs(self.device.kind), samples, self.analysis.first
            )
        return self._prices[samples]

    def samples(self, config: Degrees) -> int:
        """Samples in one microbatch on one replica."""
        return self.batch // (config.dp * config.microbatches)

    def warmup_of(self, config: Degrees) -> tuple[int, ...]:
        """Forwards of each stage before its first pair; empty: the least."""
        if self.warmup is None or config.schedule != "1f1b":
            return ()
        return deeper_warmup(config.pp, self.warmup) if isinstance(self.warmup, int) else self.warmup

    @property
    def summed(self) -> float:
        """Bytes in the type that ranks add gradients up in, for each byte of a gradient."""
        dtype = self.analysis.program.reduce_dtype
        return dtype_of(dtype).itemsize / self.analysis.dtype.itemsize if dtype else 1.0

    def setting(self, config: Degrees) -> Setting:
        axes = self.layout.tensor_axes(config)
        conversions = self._conversions.setdefault(axes, ConversionPrices(axes, self.device))
        offers = self._offers.setdefault(config.axes, Offers(self.analysis, config.axes, self.scheme, self.whole))
        beside = config.schedule not in SPLIT_SCHEDULES
        shared = self._shared.setdefault((self.samples(config), axes, beside), Shared())
        data = self.layout.data_link(config)
        prices, dp, microbatches = self.prices(config), config.dp, config.microbatches
        return Setting(prices, conversions, offers, dp, data, microbatches, shared, self.summed, beside)

    def choose(self, config: Degrees, memory_limit: float | None = None) -> TensorChoice:
        """The fastest strategies; under a limit, those whose bytes over all stages stay below it.

        Parameters are divided over replicas only under a limit, unless a level is given.
        """
        levels = LEVELS if self._divides(config) and memory_limit is not None else (self.zero or 0,)
        return choose(
            self.analysis,
            self._folded,
            self.setting(config),
            self._block_costs,
            self.optimizer,
            memory_limit,
            self.time_limit_s,
            levels,
            config.pp,
        )

    def _divides(self, config: Degrees) -> bool:
        """Whether parameters may be divided over replicas where they do not fit; 2BW keeps versions of whole ones."""
        return self.zero is None and config.dp > 1 and config.schedule != "2bw"

    def lower_bound(self, config: Degrees) -> float:
        """Seconds that a step takes at least: the work alone, shared perfectly where it is shared."""
        return self._floor(self.free_seconds(config) + self.work_seconds(config), config)

    def work_floor(self, config: Degrees) -> float:
        """The same, from the best strategies for the work alone, which takes a solver, and what memory adds to it."""
        setting = self.setting(config)
        key = self.samples(config), setting.axes, setting.beside
        if config.axes and key not in self._work_bounds:
            self._work_bounds[key] = work_bound(
                self.analysis, self._folded, setting, self._block_costs, self.time_limit_s
            )
        work = max(self._work_bounds.get(key, 0.0), self.work_seconds(config)) + self.free_seconds(config)
        # what divided parameters exchange in each microbatch, they do not at the end
        summed = not self._divides(config) and not self.zero
        asked = self._floor(work + self._memory_seconds(config, work), config, summed)
        return max(self.known_floor(config), asked)

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
        return max(self.work_floor(config), self._floor(work + self.free_seconds(config), config, summed))

    def known_floor(self, config: Degrees) -> float:
        """The best lower bound that is known already, memory left aside."""
        setting = self.setting(config)
        key = self.samples(config), setting.axes, setting.beside
        work = max(self._work_bounds.get(key, 0.0), self.work_seconds(config))
        return self._floor(work + self.free_seconds(config), config)

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

    def _rooms(self, config: Degrees) -> list[float]:
        """Bytes of each stage for what it holds."""
        overhead = CUDA_OVERHEAD_BYTES / config.virtual if self.device.kind == "cuda" else 0.0
        return [self.layout.capacity(config, stage) - overhead for stage in range(config.stages)]

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

    def free_seconds(self, config: Degrees) -> float:
        """Seconds of one microbatch's free ops, which some stage has to compute at least once."""
        samples = self.samples(config)
        if samples not in self._free:
            prices = self.prices(config)
            self._free[samples] = sum(prices.op_seconds(node)[0] for node in self.analysis.free_block)
        return self._free[samples]

    def evaluate(self, config: Degrees, below: float = math.inf) -> Evaluation[Answer]:
        """Strategies and stages of a candidate. Raises InfeasibleError when it does not fit in memory.

        below: seconds that it has to stay below to be of interest; raises NotBetter where it surely does not.
        Where layers are computed again for the fastest strategies to fit, those are tried too that fit without; where
        memory binds, mixtures around both answers as well.
        """
        fastest = self.choose(config)
        plain = replace(config, recompute="none")
        promising = False  # memory surely binds, and the fastest strategies alone take less than ``below``
        if config.recompute == "auto" and config.stages == 1:
            problem = self.problem(plain, fastest)
            if problem.excess_bytes([Step(0, 0, len(problem.positions) - 1)]) <= 0:
                return self._evaluate(plain, fastest, below, problem)
            promising = self._least_seconds(config, fastest) < below
        found: Evaluation[Answer] | None = None
        stopped: NotBetter | None = None
        try:
            found = self._evaluate_alike(config, fastest, below)
        except NotBetter as error:
            if not promising:
                raise
            stopped = error
        answers = [fastest]
        if found is not None and found.answer.choice is not fastest:
            answers.append(found.answer.choice)
        bound = any(step.choices for step in found.answer.cut.way) if found is not None else promising
        evaluated = [found] if found is not None else []
        if fastest.solution is not None and (bound or len(answers) > 1):
            for answer in answers:
                evaluated += self._mixtures(config, answer)
        least = min([item.bound for item in evaluated] + ([stopped.bound] if stopped is not None else []))
        best = min(evaluated, key=lambda item: item.objective, default=None)
        if stopped is not None and (best is None or best.objective >= below):
            raise NotBetter(stopped.seconds, least)
        assert best is not None
        return replace(best, bound=least)

    def _evaluate_alike(self, config: Degrees, fastest: TensorChoice, below: float) -> Evaluation[Answer]:
        """The same, with equal strategies for equal layers."""
        plain = replace(config, recompute="none")
        other = config.recompute == "auto" and not (fastest.solution is None and not self._divides(config))
        found: Evaluation[Answer] | None = None
        stopped: NotBetter | None = None
        try:
            found = self._evaluate(config, fastest, below)
        except NotBetter as error:
            # computing layers again takes too long, which other strategies need not ask for
            if not other or self._least_seconds(config, fastest) >= below:
                raise
            stopped = error
        if found is not None and not (other and any(step.choices for step in found.answer.cut.way)):
            return found
        try:
            kept = self._evaluate(plain, fastest, below if found is None else min(below, found.objective))
        except (InfeasibleError, NotBetter):
            if stopped is not None:
                raise stopped from None
            assert found is not None
            return found
        if stopped is not None:
            return replace(kept, bound=min(kept.bound, stopped.bound))
        assert found is not None
        return replace(min(found, kept, key=lambda item: item.objective), bound=min(found.bound, kept.bound))

    def _mixtures(self, config: Degrees, answer: TensorChoice) -> Iterator[Evaluation[Answer]]:
        """The best mixture of layers' strategies around an answer, where one is found that fits."""
        parts, found = self.layer_parts(), self.layer_strategies(config, answer)
        ways = {layer: found.ways(part) for layer, part in parts.items()}
        count = max(map(len, ways.values()), default=0)
        if count < 2:
            return
        units = replace(config, recompute=KEPT) if config.recompute == "none" else config
        uniform = [
            applied(answer, {layer: own[min(number, len(own) - 1)] for layer, own in ways.items()}, parts)
            for number in range(count)
        ]
        problem = merged([self.problem(units, choice) for choice in uniform])
        try:
            cut = stage_solver.solve(problem, self.time_limit_s)
            mixture = applied(answer, chosen_ways(problem, cut, ways, self.analysis), parts)
            problem = self.problem(config, mixture)
            cut = stage_solver.solve(problem, self.time_limit_s)
        except InfeasibleError:
            return
        floor = self._mixture_floor(config, *found.least_seconds(parts.values()))
        seconds = self._step_seconds(problem, cut, config)
        yield Evaluation(Answer(config, mixture, problem, cut), seconds, min(floor, seconds))

    def layer_strategies(self, config: Degrees, answer: TensorChoice) -> LayerStrategies:
        """The ways of layers around an answer on tensor axes."""
        places, warmup = self.layout.places(config), self.warmup_of(config)
        flying = in_flight(config.schedule, config.stages, config.microbatches, warmup, places)
        levels = LEVELS if self._divides(config) else (self.zero or 0,)
        builder = Builder(
            *(self.analysis, self._folded, self.setting(config), self._block_costs, self.optimizer, levels, config.pp)
        )
        return LayerStrategies(builder, answer, sorted({max(flying), min(flying), 0}, reverse=True), self.time_limit_s)

    def layer_parts(self) -> dict[str, FoldedPart]:
        """By layer, its ops and tensors folded."""
        if not self._parts:
            nodes: dict[str, list[fx.Node]] = {}
            for block, layer in zip(self.analysis.blocks, self.analysis.layers, strict=True):
                if layer:
                    nodes.setdefault(layer, []).extend(block.nodes)
            self._parts.update({layer: fold_part(self.analysis, self._folded, own) for layer, own in nodes.items()})
        return self._parts

    def _evaluate(
        self, config: Degrees, choice: TensorChoice, below: float, problem: StageProblem | None = None
    ) -> Evaluation[Answer]:
        """The same, from the strategies that are the fastest without a limit, and their problem."""
        free = self.free_seconds(config)
        if choice.solution is None:
            floor = 0.0
        elif config.pp == 1:
            sums = self._sum_seconds(config)
            floor = one_stage_floor(choice.solution.bound + free, sums, config)
            floor = max(floor, self.work_floor(config)) if sums else floor
        else:
            floor = self.work_floor(config)
        # without other strategies what holds for these choices holds for the candidate
        alone = choice.solution is None and not self._divides(config)
        whole, complete = config.schedule in WHOLE_SCHEDULES, self.positions.complete
        for attempt in range(TIGHTENINGS + 1):
            least = self._least_seconds(config, choice) if below < math.inf else 0.0
            if least >= below:
                raise NotBetter(least, least if alone else self.work_floor(config))
            problem = problem or self.problem(config, choice)
            try:
                cut = stage_solver.solve(
                    problem, self.time_limit_s, below=below * self.faster(config) if whole else math.inf
                )
                break
            except NotBetter as error:
                seconds = error.seconds / self.faster(config)
                raise NotBetter(seconds, seconds if alone and complete else self.work_floor(config)) from None
            except InfeasibleError as error:
                if alone or error.excess_bytes is None or attempt == TIGHTENINGS:
                    if below < math.inf:  # what fits may take longer
                        least = below if alone and complete and whole else self.work_floor(config)
                        raise NotBetter(below, least) from None
                    raise
                # Other strategies may hold less: take the missing bytes off what these hold together.
                try:
                    choice = self.choose(config, choice.memory_bytes - config.pp * error.excess_bytes)
                except InfeasibleError:
                    if below < math.inf:
                        raise NotBetter(below, self.work_floor(config)) from None
                    raise error from None
                problem = None
        assert problem is not None
        if choice.solution is not None and choice.levels and self.zero is None:
            floor = self.work_floor(config)  # of all levels
        elif choice.solution is None:
            floor = (
                cut.lower_bound_s / self.faster(config)
                if config.schedule in WHOLE_SCHEDULES
                else self.step_floor(free, config)
            )
            # of what was not among the choices this bound says nothing
            if (choice.levels and self.zero is None) or not complete:
                floor = self.work_floor(config)
        seconds = self._step_seconds(problem, cut, config)
        only = choice.solution is None and config.stages == 1 and not cut.way[0].choices
        if only and not (choice.levels and self.zero is None):
            floor = seconds  # the only division; slower ways to run its blocks hide no more than they take longer
        return Evaluation(Answer(config, choice, problem, cut), seconds, min(floor, seconds))

    def _least_seconds(self, config: Degrees, choice: TensorChoice) -> float:
        """Of a step with these strategies, however its blocks are divided."""
        costs = self._costs(config, choice, self.setting(config))
        self._add_exchanges(costs, config, choice)
        return self.step_floor(math.fsum(cost.forward_s + cost.backward_s for cost in costs), config)

    def _mixture_floor(self, config: Degrees, seconds: float, work: float) -> float:
        """Under a step whose microbatches take at least so many seconds, all in all and without parameters."""
        free = self.free_seconds(config)
        work, summed = work + free, not self._divides(config) and not self.zero
        asked = self._floor(work + self._memory_seconds(config, work), config, summed)
        floor = max(self.lower_bound(config), self._floor(work, config), asked)
        if config.pp > 1:
            return floor
        return max(floor, one_stage_floor(seconds + free, self._sum_seconds(config), config))

    def _sum_seconds(self, config: Degrees) -> float:
        """Of gradients' sums those over replicas, which start during the last backward, at most: of whole weights."""
        held = self._trained
        return bucketed_all_reduce_seconds(held * self.summed, config.dp, self.layout.data_link(config))

    def _step_seconds(self, problem: StageProblem, cut: StageSolution, config: Degrees) -> float:
        places = self.layout.places(config)
        devices = [self.layout.ranks(config, places.index(place)) for place in range(config.pp)]
        return simulated_seconds(
            problem,
            cut.way,
            config.schedule,
            [self.weight_share(config, step, problem) for step in cut.way],
            self.warmup_of(config),
            places,
            self.shared.durations(devices) if self.shared is not None else None,
        )

    def computed_again(self, config: Config, step: Step, problem: StageProblem) -> set[str]:
        """The layers of a stage, and modules in layers, that run again in the backward."""
        found: set[str] = set()
        for (part, _), choice in zip(problem.units(step), problem.chosen(step), strict=True):
            layer = self.analysis.layers[part[0]]
            found.update([layer] if choice.name == WHOLE else modules_again(layer, choice.name))
        return found

    def weight_share(self, config: Degrees, step: Step, problem: StageProblem) -> float:
        """Which part of a stage's backward a schedule can leave for W: half of that of ops with trained weights.

        Their other half is the inputs' gradients. What is computed again leaves none, as B does all of it.
        """
        if config.schedule not in SPLIT_SCHEDULES:
            return 0.0
        prices, inside = self.prices(config), set(problem.blocks_between(step.first, step.last))
        again = self.computed_again(config, step, problem)
        later = whole = 0.0
        for node, block in self.analysis.block_of.items():
            if block in inside:
                forward, seconds = prices.op_seconds(node)
                repeated = self.analysis.layers[block] in again or not again.isdisjoint(
                    around(graphs.module_path(node))
                )
                whole += seconds + (forward if repeated else 0.0)
                if not repeated and any(value.node.meta.get("trainable") for value in graphs.inputs(node)):
                    later += seconds / 2
        return later / whole if whole else 0.0

    # -- the stage problem ----------------------------------------------------------------------------------------

    def problem(self, config: Degrees, choice: TensorChoice) -> StageProblem:
        """How to cut the blocks into stages, for a candidate and its strategies."""
        setting = self.setting(config)
        costs = self._costs(config, choice, setting)
        again_s = [cost.forward_s for cost in costs]
        self._add_exchanges(costs, config, choice)
        layer_of, block_of = self.analysis.layers, self.analysis.block_of
        held = activations(costs, layer_of, block_of, config.recompute)
        # tied gradients are summed between the first and the last stage that may hold them
        ends = self.layout.stage_link(config, 0, config.pp - 1) if config.pp > 1 else None
        priced = priced_parameters(
            self.analysis, self.readers, choice, setting, self.optimizer, ends, versions=1 + (config.schedule == "2bw")
        )
        own = zip(costs, held.blocks, priced.private, strict=True)
        blocks = [
            Block(
                f"block {index}, {self.analysis.keys[self.analysis.blocks[index].nodes[0]]}",
                cost.forward_s,
                cost.backward_s,
                state,
                kept,
                cost.transient_bytes,
                step_end,
            )
            for index, (cost, kept, (state, step_end)) in enumerate(own)
        ]
        places = self.layout.places(config)
        flying = in_flight(config.schedule, config.stages, config.microbatches, self.warmup_of(config), places)
        problem = StageProblem.row(
            blocks,
            self.positions.sets,
            self._cuts(config, choice),
            config.microbatches,
            flying,
            tuple(float(self.layout.capacity(config, stage)) for stage in range(config.stages)),
            float(CUDA_OVERHEAD_BYTES if self.device.kind == "cuda" else 0) / config.virtual,
            priced.tied,
            self.pins.stages if self.pins else (),
            held.groups,
            layers(
                *(blocks, held, costs, again_s, layer_of, block_of),
                [block.signature for block in self.analysis.blocks],
                config.recompute,
                self.positions.sets,
                self._frontiers(config, choice, costs, held),
            ),
        )
        return replace(problem, shapes=tuple(replace(shape, sums=priced.sums) for shape in problem.shapes))

    def _frontiers(
        self, config: Degrees, choice: TensorChoice, costs: Sequence[BlockCost], held: Activations
    ) -> Frontiers:
        """Which modules of layers may run again: none where weights are gathered at use, which a module would keep."""
        axes, samples = self.setting(config).axes, self.samples(config)
        return Frontiers(
            self.analysis,
            costs,
            held,
            lambda op: self._block_costs.read(op, samples, axes),
            self._priced[self._priced_by(config, choice)][2],
            offered=3 not in choice.levels.values(),
        )

    def _costs(self, config: Degrees, choice: TensorChoice, setting: Setting) -> list[BlockCost]:
        """A copy of the block costs, which candidates of equal prices and strategies share."""
        key = self._priced_by(config, choice)
        if key not in self._priced:
            costs = self._block_costs.costs(
                setting.prices, choice.strategies, choice.storage, setting.conversions, setting.beside
            )
            self._priced[key] = choice, costs, {}
        return [replace(cost) for cost in self._priced[key][1]]

    def _priced_by(self, config: Degrees, choice: TensorChoice) -> object:
        # Strategies by identity, as hashing them costs more than pricing; the entry keeps them alive.
        setting = self.setting(config)
        used = (*map(id, choice.strategies.values()), *choice.storage.values())
        return (self.samples(config), setting.axes, setting.beside, *used)

    def data_seconds(self, config: Degrees, choice: TensorChoice, node: fx.Node) -> tuple[float, float]:
        """Forward and backward seconds of one microbatch in which replicas exchange a divided parameter."""
        if not choice.levels:
            return 0.0, 0.0
        setting, info = self.setting(config), self.analysis.program.tensors[node.meta["name"]]
        placements = choice.storage.get(info.name, (REPLICATE,) * len(setting.axes))
        size = value_bytes(Value(node)).at(1) * share_of(placements, setting.sizes)
        gathered = self._block_costs.gathering(node)
        return setting.data.microbatch_seconds(size, choice.levels.get(info.name, 0), info.trainable, *gathered)

    def _add_exchanges(self, costs: Sequence[BlockCost], config: Degrees, choice: TensorChoice) -> None:
        """What divided parameters add to the blocks that read them: exchanges, and whole weights for a while."""
        if not choice.levels:
            return
        sizes = self.setting(config).sizes
        layers = self.analysis.layers
        whole: dict[str, float] = {}  # by layer, or by block outside of layers
        owners = [layer or f"block {index}" for index, layer in enumerate(layers)]
        for node, found in self.readers.items():
            level = choice.levels.get(node.meta["name"], 0)
            there, back = self.data_seconds(config, choice, node)
            for index in found:
                costs[index].forward_s += there
                costs[index].backward_s += back
            if level == 3:
                placements = choice.storage.get(node.meta["name"], (REPLICATE,) * len(sizes))
                size = value_bytes(Value(node)).at(1) * share_of(placements, sizes)
                for owner in {owners[index] for index in found}:
                    whole[owner] = whole.get(owner, 0.0) + size
        for owner, cost in zip(owners, costs, strict=True):
            cost.transient_bytes += TRANSIENT_COPIES * whole.get(owner, 0.0)

    def _cuts(self, config: Degrees, choice: TensorChoice) -> tuple[Cut, ...]:
        """What a rank sends and receives at each position."""
        crossings = self.positions.crossings
        if config.pp == 1:
            return (Cut(),) * len(crossings)
        places = self.layout.places(config)
        apart = [stage for stage in range(config.stages - 1) if places[stage] != places[stage + 1]]
        link = slowest([self.layout.stage_link(config, stage, stage + 1) for stage in apart])
        sizes = {v: self.local_bytes(v, config, choice) for v in dict.fromkeys(v for row in crossings for v in row)}
        cuts = []
        for values in crossings:
            total = sum(sizes[value] for value in values)
            back = sum(sizes[value] for value in values if value.node.meta.get("differentiable"))
            there = send_seconds(total, link) if values else 0.0
            cuts.append(Cut(there, send_seconds(back, link) if back else 0.0, total + back))
        return tuple(cuts)

    def kept_bytes(self, alone: ConversionPrices) -> float:
        """Bytes of a sample's activations that one device would keep for the backward. alone: without tensor axes."""
        prices = Prices(self.device, self.analysis.costs(self.device.kind), 1, self.analysis.first)
        costs = self._block_costs.costs(prices, {}, {}, alone)
        kept = {owner: size for cost in costs for owner, size in cost.kept.items()}
        return sum(kept.values()) + sum(cost.inside_bytes for cost in costs)

    def whole_bytes(self, value: Value, samples: int) -> float:
        return self._block_costs.size(value).at(samples)

    def local_bytes(self, value: Value, config: Degrees, choice: TensorChoice) -> float:
        chosen = choice.strategies.get(value.node)
        size = value_bytes(value).at(self.samples(config))
        if not chosen:
            return size
        return size * share_of([item.outputs[value.index] for item in chosen], config.axes)
