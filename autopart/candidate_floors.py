"""Least seconds of a configuration's step: before its strategies and stages are known, and with more of them known."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Self

from torch import fx

from autopart.candidate_settings import same_but_for_memory
from autopart.candidate_tied import CandidateTied
from autopart.cluster import Cluster
from autopart.conversion_prices import TensorAxis
from autopart.cost.communication import bucketed_all_reduce_seconds
from autopart.cost.devices import Device, Link
from autopart.host_starts import HostStarts
from autopart.memory_bound import least_added
from autopart.passes import graph as graphs
from autopart.runtime.errors import InfeasibleError
from autopart.runtime.schedule import SPLIT_SCHEDULES, in_flight
from autopart.solver.degrees import Config, Degrees
from autopart.solver.pipeline_cuts import LONG, SHORT, Divisions, Effort
from autopart.solver.pipeline_floor import least_step_seconds
from autopart.solver.pipeline_orders import Order
from autopart.solver.pipeline_pieces import Family, Piece, Pipeline
from autopart.solver.pipeline_row import Boundary, Place, Row, Tied
from autopart.solver.stages_least import MOST_STEPS, least_share
from autopart.step_time import STEADY_SCHEDULES, WHOLE_SCHEDULES, one_stage_floor, pipeline_floor
from autopart.tensor_choice import TensorChoice, work_bound

MOST_APART = 64
"""Blocks outside of layers that are alike, up to which a pipeline is bounded piece by piece."""
MOST_UNPRICED = 8
"""Stages up to which a pipeline is bounded without prices of layers' strategies before these are found."""
_NEAR = 0.01
"""Of the seconds of interest: a bound that is nearer to them is good enough."""
_LEAST_SUMS = 0.01
"""Of a step: sums of tied gradients that take less are not weighed against strategies that divide these."""
_MOST_LONGER = 3.0
"""How many times as long as without memory: more is not told apart."""

_Key = tuple[Degrees, tuple[int, ...], float]
"""A configuration, the levels of ZeRO that its parameters may have, and seconds of a microbatch's ops."""


@dataclass(slots=True)
class CandidateFloors(CandidateTied):
    """Lower bounds of candidates; what is found for one is kept for those that share it."""

    alike: list[tuple[tuple[fx.Node, bool], int]] = field(init=False)  # an op of each class, computed again; how many
    _work: dict[tuple[int, int, str], float] = field(default_factory=dict)
    _work_bounds: dict[tuple[int, tuple[TensorAxis, ...], bool], float] = field(default_factory=dict)
    _enough: dict[object, float] = field(default_factory=dict)  # from where such a bound was not raised further
    _added: dict[_Key, float] = field(default_factory=dict)
    _floors: dict[_Key, float] = field(default_factory=dict)  # of pipelines that end whole
    _rows: dict[tuple[Degrees, tuple[int, ...], float, bool], Divisions | None] = field(default_factory=dict)
    _starting: dict[str, float] = field(default_factory=dict)  # of a microbatch, by what is computed again
    _started: HostStarts | None = None
    _last_ops: list[fx.Node] = field(init=False)  # of a forward, from the last parameter on

    def __post_init__(self) -> None:
        CandidateTied.__post_init__(self)
        self.alike = self._counted()
        self._last_ops = self._behind_weights()

    def _counted(self) -> list[tuple[tuple[fx.Node, bool], int]]:
        first = self.analysis.first
        return list(Counter((first.get(node, node), self.runs_again(node)) for node in self.analysis.block_of).items())

    def _with(self, cluster: Cluster, device: Device, whole: frozenset[str]) -> Self:
        found = CandidateTied._with(self, cluster, device, whole)
        found._added, found._floors, found._rows, found._late = {}, {}, {}, {}
        if device.kind != self.device.kind:
            found.alike, found._kinds = found._counted(), None
        if not same_but_for_memory(device, self.device):
            found._work, found._free, found._work_bounds, found._enough = {}, {}, {}, {}
            found._shares, found._last, found._starting, found._started = {}, {}, {}, None
        return found

    def lower_bound(self, config: Degrees) -> float:
        """Seconds that a step takes at least: the work alone, shared perfectly where it is shared."""
        return self._floor(self.besides_seconds(config) + self.work_seconds(config), config)

    def work_floor(self, config: Degrees, below: float = math.inf) -> float:
        """The same, from the best strategies for the work alone, which takes a solver, and what memory adds to it.

        below: seconds from which a higher bound is of no interest.
        """
        setting = self.setting(config)
        key = self._strategies_key(config)
        if key not in self._work_bounds and below < math.inf:  # what takes no solver for strategies may do
            known = self._known_floor(config, self.work_seconds(config), below, priced=False)
            if known >= below:
                return known
        if config.axes:
            enough = below / self.step_floor(1.0, config) - self.besides_seconds(config)
            bounded, found = self._enough.get(key), self._work_bounds.get(key, 0.0)
            if bounded is None or (found >= bounded and enough > found):
                # the second time as far as it goes
                wanted = enough if bounded is None else math.inf
                more = work_bound(
                    *(self.analysis, self._folded, setting, self._block_costs, self.time_limit_s), enough=wanted
                )
                self._work_bounds[key], self._enough[key] = max(found, more), wanted
        return self._known_floor(config, self._work_bounds.get(key, 0.0), below)

    def sharing_floor(
        self, config: Degrees, whose: Degrees, fastest: TensorChoice, choice: TensorChoice, most: float
    ) -> float:
        """Seconds that a candidate with tensor axes takes at least. most: from which more are of no interest.

        fastest: its strategies without a limit of memory. choice: those of an answer, whose bound says nothing of what
        was not among its choices.
        """
        others = choice.levels and self.zero is None
        if others or fastest.levels or config.pp > 1 or self._divides(config):
            return self.work_floor(whose, most)
        assert fastest.solution is not None
        sums = self.sum_seconds(config)
        floor = one_stage_floor(fastest.solution.bound + self.free_seconds(config), sums, config)
        return max(floor, self.work_floor(whose, most)) if sums and floor < most else floor

    def _known_floor(self, config: Degrees, least: float, below: float, priced: bool = True) -> float:
        """The same from what is known of a microbatch's ops, which take at least ``least``.

        priced: from prices of layers' strategies too; else only for as many stages as take little time.
        """
        work = max(least, self.work_seconds(config)) + self.besides_seconds(config)
        known = max(self.known_floor(config), self._order_floor(config, work, below))
        if known >= below:
            return known
        # what divided parameters exchange in each microbatch, they do not at the end
        summed, held = not self._divides(config) and not self.zero, work + self._memory_seconds(config, work)
        known = max(known, self._floor(held, config, summed), self._order_floor(config, held, below))
        if known >= below or not (priced or config.stages <= MOST_UNPRICED):
            return known
        return max(known, self._pipeline_floor(config, least, below, priced))

    def _pipeline_floor(self, config: Degrees, work: float, below: float = math.inf, priced: bool = True) -> float:
        """Of a step with its end and each stage's memory, where most of a program are layers that are alike.

        work: of a microbatch's ops in blocks, with nothing computed again. priced: with prices of layers' strategies.
        """
        key = config, self.levels(config), work
        if key in self._floors:
            return self._floors[key]
        parts = self._pipeline(config, work, priced=priced)
        if parts is None:
            return 0.0
        found = min(least_step_seconds(*parts, below), _MOST_LONGER * self.known_floor(config))
        found = self._tied_floor(config, found)
        if found < below and priced:
            self._floors[key] = found
        return found

    def _pipeline(
        self, config: Degrees, work: float, others: bool = False, priced: bool = True
    ) -> tuple[list[Family], list[Piece], Pipeline] | None:
        """Layers that are alike, what is beside them, and the pipeline, where this can be bounded piece by piece.

        others: families of layers that few are alike to come after these, and of what lies beside layers; and pieces of
        layers that are cut have prices too. priced: with prices of layers' strategies.
        """
        if self.faster(config) != 1.0:
            return None
        alike, apart = self.alike_layers(), self._apart(self.alike_layers())
        if not alike or len(apart) > MOST_APART:
            return None
        setting = self._piece_setting(config, transients=others or config.stages == 1)
        if others:
            alike = [*alike, *self._other_layers(config)]
            apart = self._apart(alike)
        families = [self._family(config, item, setting, priced) for item in alike]
        if others and config.pp > 1:
            families = [self._with_pieces(config, *pair) for pair in zip(alike, families, strict=True)]
        ends_last = config.schedule in WHOLE_SCHEDULES and (config.pp == 1 or self.positions.in_row)
        first = ends_last and not self.analysis.layers[0]
        rest = [
            self._pieces.block(number, setting) if number or not first else self._pieces.first(setting)
            for number in apart
        ]
        rest.append(Piece(self.free_seconds(config), 0.0))
        flying = in_flight(
            *(config.schedule, config.stages, config.microbatches, self.warmup_of(config), self.layout.places(config))
        )
        work += self.free_seconds(config)
        rooms, transfers = tuple(self._rooms(config)), self._least_transfers(config)
        order = None
        if config.schedule not in WHOLE_SCHEDULES:
            kind = config.schedule in SPLIT_SCHEDULES, config.schedule in STEADY_SCHEDULES
            order = Order(self.layout.places(config), *kind)
        after = self._after_weights(config) if config.pp == 1 else 0.0
        return families, rest, Pipeline(config.microbatches, tuple(flying), rooms, work, *transfers, order, after)

    def _after_weights(self, config: Degrees) -> float:
        """Seconds of a forward, at least, from the op on that is the last to read a parameter for the first time."""
        seconds, first = self._op_seconds(config), self.analysis.first
        return math.fsum(seconds(first.get(node, node))[0] for node in self._last_ops)

    def _behind_weights(self) -> list[fx.Node]:
        """The op that is the last to read a trained parameter for the first time, and those behind it."""
        found, read = list[fx.Node](), set[fx.Node]()
        for node in self.analysis.block_of:
            new = {value.node for value in graphs.inputs(node) if value.node.meta.get("trainable")} - read
            if new:
                found.clear()
            found.append(node)
            read |= new
        return found

    def divided_floor(self, config: Degrees, below: float, effort: Effort = SHORT, whole: bool = False) -> float:
        """The same, of stages that are runs of whole blocks, with the strategies of layers that few are alike to.

        whole: where tensor ranks have parameters whole that several blocks read.
        """
        known = self._pipeline_floor(config, self._work_bound(config))
        if known >= below:
            return known
        if not self._in_runs(config):
            parts = self._pipeline(config, self._work_bound(config), others=True)
            if parts is None:
                return known
            return max(known, self._tied_floor(config, least_step_seconds(*parts, below), whole))
        divisions = self._divisions_of(config, whole)
        if divisions is None:
            return known
        return divisions.least_seconds(known, below, effort)

    def surely_takes(self, config: Degrees, seconds: float) -> bool:
        """Whether :meth:`divided_floor` is known to be as much, which is sooner told, of several stages."""
        if config.pp == 1:
            return False
        if not self._in_runs(config):
            return self.divided_floor(config, seconds) >= seconds
        if self._pipeline_floor(config, self._work_bound(config)) >= seconds:
            return True
        divisions = self._divisions_of(config)
        return divisions is not None and divisions.take(seconds)

    def _in_runs(self, config: Degrees) -> bool:
        """Whether stages are several in 1F1B's or GPipe's order, and each a run of block numbers."""
        return config.pp > 1 and self.positions.in_row and config.schedule in WHOLE_SCHEDULES

    def _work_bound(self, config: Degrees) -> float:
        """Of the ops of a microbatch, as far as a solver was asked."""
        return self._work_bounds.get(self._strategies_key(config), 0.0)

    def _divisions_of(self, config: Degrees, whole: bool = False) -> Divisions | None:
        work = self._work_bound(config)
        key = config, self.levels(config), work, whole
        if key not in self._rows:
            parts = self._pipeline(config, work, others=True)
            self._rows[key] = None if parts is None else Divisions(*parts[:2], self._row(config, whole), parts[2])
        return self._rows[key]

    def _row(self, config: Degrees, whole: bool) -> Row:
        layers = [*self.alike_layers(), *self._other_layers(config)]
        places = {
            block: Place(family, layer, piece)
            for family, alike in enumerate(layers)
            for layer, blocks in enumerate(alike.blocks)
            for piece, block in enumerate(blocks)
        }
        places |= {block: Place(-1, -1, number) for number, block in enumerate(self._apart(layers))}
        links = self._stage_links(config)
        cuts = {link: self.least_cuts(config, link) for link in dict.fromkeys(links)}
        boundaries = (
            Boundary(
                mask.bit_count(),
                min(cut.forward_s for cut in own),
                min(cut.backward_s for cut in own),
                own[0].before_bytes,
                own[0].behind_bytes,
            )
            for mask, own in zip(self.positions.sets, zip(*cuts.values(), strict=True), strict=True)
        )
        transfers = {link: [(cut.forward_s, cut.backward_s) for cut in own] for link, own in cuts.items()}
        tied = self._pieces.tied(self._piece_setting(config, transients=False))
        summed: dict[tuple[int, ...], float] = {}
        for _, blocks, seconds in self._tied_seconds(config, whole):
            summed[blocks] = summed.get(blocks, 0.0) + seconds
        return Row(
            tuple(places[block] for block in range(len(places))),
            tuple(boundaries),
            tuple(transfers[link] for link in links),
            tuple(Tied(blocks, piece, summed.get(blocks, 0.0)) for blocks, piece in tied),
        )

    def _least_transfers(self, config: Degrees) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """By cut, seconds of a transfer there and back, at whatever position and shared perfectly."""
        links = self._stage_links(config) if config.pp > 1 else []
        found = dict[Link, tuple[float, float]]()
        for link in dict.fromkeys(links):
            cuts = self.least_cuts(config, link)[1:-1]
            there, back = ((cut.forward_s for cut in cuts), (cut.backward_s for cut in cuts))
            found[link] = min(there, default=0.0), min(back, default=0.0)
        return tuple(found[link][0] for link in links), tuple(found[link][1] for link in links)

    def _order_floor(self, config: Degrees, work: float, below: float) -> float:
        """What the order of a schedule with W apart, or several stages on a rank, makes of so many seconds at least.

        below: seconds from which a higher bound is of no interest.
        """
        if config.pp == 1 or config.schedule in WHOLE_SCHEDULES:
            return 0.0
        prices, share = self.prices(config), 1 / config.tp
        shared = (count * prices.shared_seconds(node, share, share)[0] for (node, _), count in self.alike)
        return self.ordered_seconds(config, math.fsum(shared), work, below * self.faster(config)) / self.faster(config)

    def ordered_seconds(
        self, config: Degrees, forward: float, work: float, below: float, most_steps: int = MOST_STEPS
    ) -> float:
        """Seconds of a step at least, in the order of its schedule, by those of a microbatch: forward, and all.

        Where no rank is faster than priced. below: of interest. most_steps: see :mod:`autopart.solver.stages_least`.
        """
        if not work or config.schedule in STEADY_SCHEDULES:  # ranks have their work alone
            return pipeline_floor(work, config)
        places = self.layout.places(config)
        asked = config.schedule, places, config.microbatches, forward / work, below / work
        return work * least_share(*asked, most_steps)

    def last_floor(self, config: Degrees, below: float) -> float:
        """The best bound there is, which takes the longest. below: seconds from which more are of no interest."""
        found = self._last_floor(config, below)
        several = config.pp > 1 and len(config.axes) == 1 and config.schedule in WHOLE_SCHEDULES
        return max(found, self._shared_or_whole(config, found, below)) if several and found < below else found

    def _last_floor(self, config: Degrees, below: float) -> float:
        """The same, with tied gradients that tensor ranks share for nothing."""
        if self._pipeline(config, 0.0, priced=False) is None:
            found = self.strategy_floor(config)
            return max(found, self.sums_floor(config, below)) if found < below else found
        found = self.divided_floor(config, below)
        if self._in_runs(config):
            return self.divided_floor(config, below, LONG) if found < below * (1 - _NEAR) else found
        if found >= below:
            return found
        # on several axes the solver takes a minute for what prices of layers say as well
        found = max(found, self.strategy_floor(config)) if len(config.axes) <= 1 else found
        return max(found, self.sums_floor(config, below)) if found < below else found

    def sums_floor(self, config: Degrees, below: float) -> float:
        """The best of those that count sums of gradients at the end of a step. below: seconds from which more are of no
        interest.
        """
        if config.pp == 1:
            return self.late_sums(config, below).seconds
        if config.dp == 1 or config.schedule not in WHOLE_SCHEDULES or self._exchange_forced:
            return 0.0
        return self._tied_floor(config, self.divided_sums(config) / self.faster(config))

    def strategy_floor(self, config: Degrees, divided: fx.Node | None = None) -> float:
        """The same from the best strategies whose parameters fit, which takes a solver for every candidate.

        divided: a parameter that tensor ranks share, whatever that makes its readers exchange.
        """
        if not config.axes:
            return self.work_floor(config)
        room = sum(self._rooms(config))
        try:
            work = work_bound(
                *(self.analysis, self._folded, self.setting(config), self._block_costs, self.time_limit_s),
                *(self.optimizer, room, self.levels(config)),
                divided=divided,
            )
        except InfeasibleError:
            return self.work_floor(config) if divided is None else math.inf
        summed = not self._divides(config) and not self.zero
        return max(self.work_floor(config), self._floor(work + self.besides_seconds(config), config, summed))

    def _shared_or_whole(self, config: Degrees, found: float, below: float) -> float:
        """With sums of tied gradients of several stages on one tensor axis, whose ranks have these whole, or share one,
        which makes its readers exchange more; or whose readers are in one stage. found: as if shared for nothing.
        """
        whole = [seconds for _, _, seconds in self._tied_seconds(config, whole=True)]
        if max(whole, default=0.0) < _LEAST_SUMS * found:
            return found
        least = self._tied_floor(config, self.known_floor(config), whole=True)
        if self._pipeline(config, 0.0, priced=False) is not None:
            least = max(least, self.divided_floor(config, below, whole=True))
        for node, blocks, seconds in self._tied_seconds(config):
            if least > found:
                alone = max(found, self._alone_seconds(config, blocks))
                least = min(least, alone, self.strategy_floor(config, node) + seconds)
        return least

    def shared_floor(self, config: Degrees) -> float:
        """The same under any factoring of the tensor ranks into axes: work shared perfectly, and memory; no solver."""
        work = self.work_seconds(config) + self.besides_seconds(config)
        summed = not self._divides(config) and not self.zero
        return max(self.lower_bound(config), self._floor(work + self._memory_seconds(config, work), config, summed))

    def known_floor(self, config: Degrees) -> float:
        """The best lower bound that is known already, memory left aside."""
        work = max(self._work_bound(config), self.work_seconds(config))
        return self._floor(work + self.besides_seconds(config), config)

    def _floor(self, work: float, config: Degrees, summed: bool = True) -> float:
        """Least seconds of a step whose microbatches take ``work``, in one stage with the end of the step.

        summed: sums of gradients too.
        """
        floor, started = self.step_floor(work, config), self.step_floor(self.starting_seconds(config), config)
        if config.pp > 1:
            return max(floor, started)
        held = self.trained_bytes / config.tp
        updated = held if self.levels(config) == (0,) else held / config.dp
        sums = bucketed_all_reduce_seconds(held * self.summed, config.dp, self.layout.data_link(config))
        # a backward hides no more than it takes, however much longer than this
        hiding = 0.0 if config.schedule in STEADY_SCHEDULES else work
        floor += max(0.0, sums - hiding) if summed else 0.0
        if summed and hiding and config.dp > 1 and not self._exchange_forced:
            floor = max(floor, (config.microbatches - 1) * work + self.last_microbatch(config)[0])
            started += self.first_sums(config)
        return max(floor, started) + self.prices(config).optimizer_seconds(updated)

    def _mixture_floor(self, config: Degrees, seconds: float, work: float) -> float:
        """Under a step whose microbatches take at least so many seconds, all in all and without parameters."""
        free = self.free_seconds(config)
        work, summed = work + self.besides_seconds(config), not self._divides(config) and not self.zero
        asked = self._floor(work + self._memory_seconds(config, work), config, summed)
        floor = max(self.lower_bound(config), self._floor(work, config), asked)
        if config.pp > 1 or self._exchanges(config):  # of which some passes unseen
            return floor
        return max(floor, one_stage_floor(seconds + free, self.sum_seconds(config), config))

    def _memory_seconds(self, config: Degrees, work: float) -> float:
        """Seconds that memory adds to ``work`` of a microbatch, at least."""
        levels = self.levels(config)
        key = config, levels, work
        if key not in self._added:
            data, whole = self.setting(config).data, config.schedule in WHOLE_SCHEDULES
            prices, rooms = self.prices(config), self._rooms(config)
            blocks = self._memory.blocks(prices, 1 / config.tp, data, levels, config.recompute)
            m, places = config.microbatches, self.layout.places(config)
            flying = in_flight(config.schedule, config.stages, m, self.warmup_of(config), places)
            timed = whole and self.faster(config) == 1.0
            self._added[key] = least_added(blocks, rooms, flying, m if timed else 1, work)
        return self._added[key]

    def step_floor(self, work: float, config: Degrees) -> float:
        """Least seconds of a step whose microbatches take ``work`` seconds each through all stages."""
        floor = pipeline_floor(work, config, self.warmup_of(config))
        # while ranks wait others may be faster, but all together do no more than when none waits
        return max(floor / self.faster(config), config.microbatches * work / config.pp)

    def faster(self, config: Config) -> float:
        """How many times as fast as priced a stage is at most, while other stages wait."""
        return self.shared.alone if self.shared is not None and config.stages > 1 else 1.0

    def starting_seconds(self, config: Degrees) -> float:
        """Seconds in which hosts of GPUs start the kernels of one microbatch."""
        starts = self.host_starts(config)
        if starts is None:
            return 0.0
        if config.recompute not in self._starting:
            prices = self.prices(config)
            again = (count * prices.kernels(node)[0] for (node, again), count in self.alike if again)
            repeated = self.device.host_s * sum(again) if config.recompute == "full" else 0.0
            self._starting[config.recompute] = sum(starts.of(range(len(self.analysis.blocks)))) + repeated
        return self._starting[config.recompute]

    def starts_bind(self, config: Degrees) -> bool:
        """Whether hosts start the kernels of a microbatch no faster than devices run them, at their best."""
        return self.starting_seconds(config) > self.work_seconds(config) + self.besides_seconds(config)

    def host_starts(self, config: Degrees) -> HostStarts | None:
        """What hosts take to start blocks' kernels; None where none counts."""
        if self.device.host_s and self._started is None:
            self._started = HostStarts.made(self.analysis, self.prices(config).kernels, self.device.host_s)
        return self._started

    def work_seconds(self, config: Degrees) -> float:
        """Seconds of one microbatch's ops, on tp ranks that share all FLOPs and bytes of each perfectly."""
        key = (self.samples(config), config.tp, config.recompute)
        if key not in self._work:
            prices, share = self.prices(config), 1 / config.tp
            work = 0.0
            for (node, again), count in self.alike:
                if config.tp == 1:
                    forward, backward = prices.op_seconds(node)
                else:
                    forward, backward = prices.shared_seconds(node, share, share)
                work += count * (forward + backward + (forward if config.recompute == "full" and again else 0.0))
            self._work[key] = work
        return self._work[key]

    def besides_seconds(self, config: Degrees) -> float:
        """Seconds of one microbatch beside its ops, at least: free ops, and what moves for its parameters."""
        added = self.data(config).least_moving_seconds(self.trained_bytes / config.tp, self.levels(config))
        return self.free_seconds(config) + added
