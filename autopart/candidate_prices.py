"""Prices of a configuration (pp, dp, tp, microbatches, schedule, recomputation), block by block."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from torch import fx

from autopart.block_costs import BlockCost
from autopart.candidate_settings import CandidateSettings, same_but_for_memory
from autopart.cluster import Cluster
from autopart.cost.devices import Device, Link
from autopart.crossing_memory import Across, cut_of, held_across, sent_ahead
from autopart.data_prices import whole_bytes
from autopart.device_layout import slowest
from autopart.layer_frontier import Frontiers, KnownFrontiers, Spans
from autopart.layer_frontier import paths as modules_again
from autopart.parameter_prices import priced_parameters
from autopart.passes import graph as graphs
from autopart.passes.amounts import value_bytes
from autopart.passes.data_axis import passed_on
from autopart.passes.emit.segments import around
from autopart.passes.graph import Value
from autopart.prices import share_of
from autopart.recomputation import WHOLE, Activations, activations, layers
from autopart.runtime.placement import REPLICATE
from autopart.runtime.schedule import SPLIT_SCHEDULES, in_flight
from autopart.solver.degrees import Config, Degrees
from autopart.solver.stages_parts import Block, Cut
from autopart.solver.stages_problem import StageProblem, Step
from autopart.tensor_choice import TensorChoice
from autopart.tensor_setting import Setting


@dataclass(slots=True)
class CandidatePrices(CandidateSettings):
    """Prices the blocks of candidates, and makes their stage problems."""

    _priced: dict[object, tuple[TensorChoice, list[BlockCost]]] = field(default_factory=dict)
    _families: dict[object, KnownFrontiers] = field(default_factory=dict)  # those of layers, by how ops are priced
    _spans: dict[tuple[int, ...], Spans] = field(default_factory=dict)
    _gradients: dict[object, list[float]] = field(default_factory=dict)  # by strategies, bytes of each block on a rank
    _across: dict[object, Across] = field(default_factory=dict)
    _kept: dict[object, Activations] = field(default_factory=dict)  # by strategies, and what runs again
    _cut_rows: dict[object, tuple[Cut, ...]] = field(default_factory=dict)  # by strategies and link

    def _with(self, cluster: Cluster, device: Device, whole: frozenset[str]) -> Self:
        found = CandidateSettings._with(self, cluster, device, whole)
        if not same_but_for_memory(device, self.device) or whole != self.whole:  # else by axes with their links
            found._priced, found._families, found._gradients, found._across = {}, {}, {}, {}
            found._kept, found._cut_rows = {}, {}
        return found

    def computed_again(self, config: Config, step: Step, problem: StageProblem) -> set[str]:
        """The layers of a stage, and modules in layers, that run again in the backward."""
        found: set[str] = set()
        for (part, _), choice in zip(problem.units(step), problem.chosen(step), strict=True):
            layer = self.analysis.layers[part[0]]
            found.update([layer] if choice.name == WHOLE else modules_again(layer, choice.name))
        return found

    def weight_share(self, config: Degrees, choice: TensorChoice, problem: StageProblem, step: Step) -> float:
        """Which part of a stage's backward a schedule can leave for W: half of that of ops with trained weights.

        Their other half is the inputs' gradients. B does all of the first stage, for which nothing waits, and of what
        is computed again, and makes the gradients of weights that replicas divide at levels 2 and 3 of ZeRO.
        """
        if config.schedule not in SPLIT_SCHEDULES or not step.first:
            return 0.0
        prices, inside = self.prices(config), set(problem.blocks_between(step.first, step.last))
        again = self.computed_again(config, step, problem)
        in_b = {name for name, level in choice.levels.items() if level >= 2}
        later = whole = 0.0
        for node, block in self.analysis.block_of.items():
            if block in inside:
                forward, seconds = prices.op_seconds(node)
                repeated = self.analysis.layers[block] in again or not again.isdisjoint(
                    around(graphs.module_path(node))
                )
                whole += seconds + (forward if repeated else 0.0)
                trained = (v.node.meta["name"] for v in graphs.inputs(node) if v.node.meta.get("trainable"))
                if not repeated and any(name not in in_b for name in trained):
                    later += seconds / 2
        return later / whole if whole else 0.0

    def problem(self, config: Degrees, choice: TensorChoice) -> StageProblem:
        """How to cut the blocks into stages, for a candidate and its strategies."""
        setting = self.setting(config)
        costs = self._costs(config, choice, setting)
        again_s = [cost.again_s for cost in costs]
        self._add_parameters(costs, config, choice)
        layer_of, block_of = self.analysis.layers, self.analysis.block_of
        held = self._activations(config, choice, costs)
        # tied gradients are summed between the first and the last stage that may hold them
        ends = self.layout.stage_link(config, 0, config.pp - 1) if config.pp > 1 else None
        priced = priced_parameters(
            *(self.analysis, self.readers, choice, setting, self.optimizer, ends),
            versions=1 + (config.schedule == "2bw"),
            limit=self.bucket_bytes(config),
            repeats=config.microbatches > 1,
            late=config.schedule not in (*SPLIT_SCHEDULES, "2bw"),
            alone=self.has_one_stage(config),
        )
        waits = self._arriving_seconds(config, choice, costs)
        own = zip(costs, held.blocks, priced.private, waits, strict=True)
        blocks = [
            Block(
                f"block {index}, {self.analysis.keys[self.analysis.blocks[index].nodes[0]]}",
                cost.forward_s,
                cost.backward_s,
                parameters.state_bytes,
                kept,
                cost.transient_bytes + parameters.passing_bytes + min(kept, parameters.late_bytes),
                parameters.step_end_s + waited,
                late_bytes=parameters.late_bytes,
            )
            for index, (cost, kept, parameters, waited) in enumerate(own)
        ]
        places = self.layout.places(config)
        flying = in_flight(config.schedule, config.stages, config.microbatches, self.warmup_of(config), places)
        problem = StageProblem.row(
            blocks,
            self.positions.sets,
            (Cut(),) * len(self.positions.sets),
            config.microbatches,
            flying,
            tuple(map(float, self.layout.capacities(config))),
            self.overhead_bytes / config.virtual,
            priced.tied,
            self.pins.stages if self.pins else (),
            held.groups,
            layers(
                *(blocks, held, costs, again_s, layer_of, block_of),
                self.analysis.kinds,
                config.recompute,
                self.positions.sets,
                self._frontiers(config, choice, costs, held),
            ),
        )
        cuts, places = problem.shapes[0].cuts, problem.links
        if config.pp > 1:
            links = self._stage_links(config)
            kinds = list(dict.fromkeys(links))
            cuts = tuple(self._cuts(config, choice, link) for link in kinds)
            places = (0, *map(kinds.index, links), 0)
        crossing = self.across(config, choice).groups
        transients = ((cost.forward_bytes, block.transient_bytes) for cost, block in zip(costs, blocks, strict=True))
        passing = replace(priced.passing, transients=tuple(transients))
        shapes = tuple(
            replace(shape, sums=priced.sums, cuts=cuts, passing=passing, crossing=crossing) for shape in problem.shapes
        )
        slots = tuple(replace(slot, sharing=config.virtual) for slot in problem.slots)
        ahead = sent_ahead(flying) if self.warmup_of(config) else ()
        return replace(problem, shapes=shapes, slots=slots, links=places, ahead=ahead)

    def _frontiers(
        self, config: Degrees, choice: TensorChoice, costs: Sequence[BlockCost], held: Activations
    ) -> Frontiers:
        """Which modules of layers may run again by themselves."""
        gathered = [node for node in self.readers if choice.levels.get(node.meta["name"]) == 3]
        return Frontiers(
            self.analysis,
            costs,
            held,
            self._block_costs.read,
            self._families.setdefault(self._prices_by(config), {}),
            self._spans,
            passed_on(gathered),
        )

    def _costs(self, config: Degrees, choice: TensorChoice, setting: Setting) -> list[BlockCost]:
        """A copy of the block costs, which candidates of equal prices and strategies share."""
        key = self._priced_by(config, choice)
        if key not in self._priced:
            costs = self._block_costs.costs(
                setting.prices, choice.strategies, choice.storage, setting.conversions, setting.beside
            )
            self._priced[key] = choice, costs
        found = [replace(cost) for cost in self._priced[key][1]]
        for node, blocks in self.readers.items() if config.stages > 1 and config.axes else ():
            stored = choice.storage.get(node.meta["name"])
            if len(blocks) > 1 and stored is not None:
                again = self._block_costs.converted_again(
                    node, setting.prices.batch, choice.strategies, stored, setting.conversions, config.stages
                )
                for block, there, back in again:
                    found[block].forward_s += there
                    found[block].backward_s += back
        return found

    def _activations(self, config: Degrees, choice: TensorChoice, costs: Sequence[BlockCost]) -> Activations:
        """Who keeps what, which no exchange of parameters changes; candidates of equal strategies share it."""
        key = self._priced_by(config, choice), config.recompute
        if key not in self._kept:
            self._kept[key] = activations(costs, self.analysis.layers, self.analysis.block_of, config.recompute)
        return self._kept[key]

    def _priced_by(self, config: Degrees, choice: TensorChoice) -> tuple[object, ...]:
        # Strategies by identity, as hashing them costs more than pricing; the entry keeps them alive.
        used = (*map(id, choice.strategies.values()), *choice.storage.values())
        return (*self._prices_by(config), *used)

    def _prices_by(self, config: Degrees) -> tuple[object, ...]:
        setting = self.setting(config)
        return self.samples(config), setting.axes, setting.beside

    def adding_seconds(self, config: Degrees, choice: TensorChoice, node: fx.Node) -> float:
        """Of one microbatch's backward: adding a parameter's gradient to those before."""
        setting, info = self.setting(config), self.analysis.program.tensors[node.meta["name"]]
        if not info.trainable:
            return 0.0
        return setting.data.adding_seconds(self._held(node, choice, setting), choice.levels.get(info.name, 0))

    def moving_seconds(self, config: Degrees, choice: TensorChoice, node: fx.Node) -> tuple[float, float]:
        """As :meth:`autopart.data_prices.DataPrices.moving_seconds`, of a parameter or buffer."""
        setting, info = self.setting(config), self.analysis.program.tensors[node.meta["name"]]
        size, level = self._held(node, choice, setting), choice.levels.get(info.name, 0)
        again, _ = self._block_costs.gathering(node)
        return setting.data.moving_seconds(size, level, bool(info.trainable), again)

    def _exchange_seconds(
        self, setting: Setting, choice: TensorChoice, node: fx.Node, level: int
    ) -> tuple[float, float]:
        """Forward and backward seconds of one microbatch in which replicas exchange a parameter at a level of ZeRO."""
        info, size = self.analysis.program.tensors[node.meta["name"]], self._held(node, choice, setting)
        return setting.data.microbatch_seconds(size, level, info.trainable, *self._block_costs.gathering(node))

    def _held(self, node: fx.Node, choice: TensorChoice, setting: Setting) -> float:
        """Bytes of a parameter on one rank, before replicas divide it."""
        placements = choice.storage.get(node.meta["name"], (REPLICATE,) * len(setting.axes))
        return self._block_costs.size(Value(node)).at(1) * share_of(placements, setting.sizes)

    def _add_parameters(self, costs: Sequence[BlockCost], config: Degrees, choice: TensorChoice) -> None:
        """What parameters add to a microbatch in the blocks that read them, and divided ones for a while in whole.

        What replicas exchange for a layer passes beside its ops, but for one layer of a stage.
        """
        setting = self.setting(config)
        if not choice.levels:
            for cost, size in zip(costs, self._gradient_bytes(config, choice), strict=True):
                cost.backward_s += setting.data.adding_seconds(size, 0)
            return
        owners = self._owners()
        whole: dict[str, list[tuple[float, bool]]] = {}  # of level 3, by owner
        sent = [[0.0] * len(costs), [0.0] * len(costs)]  # seconds by block, there and back
        late = [0.0] * len(costs)  # of that sums
        known: dict[object, tuple[tuple[float, float], float, tuple[float, float], float]] = {}
        for node, found in self.readers.items():
            name = node.meta["name"]
            info, level = self.analysis.program.tensors[name], choice.levels.get(name, 0)
            shared = *self._block_costs.gathering(node), choice.storage.get(name)
            alike = info.shape, info.dtype, info.trainable, level, *shared
            if alike not in known:
                exchanged = self._exchange_seconds(setting, choice, node, level)
                summed = self._exchange_seconds(setting, choice, node, 2)[1] if level >= 2 else 0.0
                moving = self.moving_seconds(config, choice, node)
                known[alike] = exchanged, summed, moving, self._held(node, choice, setting)
            exchanged, summed, moving, size = known[alike]
            for index in found if level == 3 else _summing(found, config):
                costs[index].forward_s += moving[0]
                costs[index].backward_s += moving[1]
                for seconds, own in zip(sent, exchanged, strict=True):
                    seconds[index] += own
                late[index] += summed
            if level == 3:
                for owner, index in {owners[index]: index for index in found}.items():
                    again = self._block_costs.gathered_again(node, index)
                    whole.setdefault(owner, []).append((size, again))
        if any(map(any, sent)):
            late = [seconds * (1 - 1 / config.microbatches) for seconds in late]  # the last one is waited for
            there = self._exposed_seconds(config, owners, sent[0], [cost.forward_s for cost in costs])
            computed = [cost.backward_s for cost in costs]
            back = self._exposed_seconds(config, owners, sent[1], computed, late)
            beside_all = self._exposed_seconds(config, owners, sent[1], [math.inf] * len(costs), late)
            for cost, forward, backward, least in zip(costs, there, back, beside_all, strict=True):
                cost.forward_s, cost.backward_s = cost.forward_s + forward, cost.backward_s + backward
                cost.waiting_s = backward - least
        if whole:
            repeats = self.has_one_stage(config) and config.microbatches > 1
            passing = whole_bytes(owners, set(self.analysis.layers), whole, config.dp, self.summed, repeats)
            for cost, size in zip(costs, passing, strict=True):
                cost.transient_bytes += size
                cost.forward_bytes += size

    def _owners(self) -> list[str]:
        """Of each block its layer, or itself."""
        return [layer or f"block {index}" for index, layer in enumerate(self.analysis.layers)]

    def arriving_seconds(self, config: Degrees, choice: TensorChoice) -> list[float]:
        """For how long the first forward of a step waits in each block for weights that were updated in shares.

        About: they are taken to pass beside a layer's ops, but for one layer of a stage.
        """
        costs = self._costs(config, choice, self.setting(config))
        self._add_parameters(costs, config, choice)
        return self._arriving_seconds(config, choice, costs)

    def _arriving_seconds(self, config: Degrees, choice: TensorChoice, costs: Sequence[BlockCost]) -> list[float]:
        """The same, beside the forward of these blocks."""
        setting, found = self.setting(config), [0.0] * len(costs)
        for node, blocks in self.readers.items():
            level = choice.levels.get(node.meta["name"], 0)
            if level in (1, 2) and node.meta.get("trainable"):
                found[blocks[0]] += setting.data.arriving_seconds(self._held(node, choice, setting), level)
        if not any(found):
            return found
        return self._exposed_seconds(config, self._owners(), found, [cost.forward_s for cost in costs])

    def _exposed_seconds(
        self,
        config: Degrees,
        owners: Sequence[str],
        sent: Sequence[float],
        computed: Sequence[float],
        late: Sequence[float] = (),
    ) -> list[float]:
        """Of each block's exchange in a pass what computing waits for. owners: of blocks, the layer or the block. late:
        what of the exchange passes beside the next microbatch.
        """
        totals: dict[str, tuple[float, float, float]] = {}
        for owner, *more in zip(owners, sent, computed, late or [0.0] * len(sent), strict=True):
            exchanged, work, beyond = totals.get(owner, (0.0, 0.0, 0.0))
            totals[owner] = exchanged + more[0], work + more[1], beyond + more[2]
        part = {owner: self.exposed(config, *total) for owner, total in totals.items()}
        return [own * part[owner] for owner, own in zip(owners, sent, strict=True)]

    def _gradient_bytes(self, config: Degrees, choice: TensorChoice) -> list[float]:
        """Of each block's trained parameters on one rank, where no replicas divide them; candidates share it."""
        key = config.pp == 1, self._priced_by(config, choice)
        if key not in self._gradients:
            setting, found = self.setting(config), [0.0] * len(self.analysis.blocks)
            for node, blocks in self.readers.items():
                if node.meta.get("trainable"):
                    for index in _summing(blocks, config):
                        found[index] += self._held(node, choice, setting)
            self._gradients[key] = found
        return self._gradients[key]

    def _stage_links(self, config: Degrees) -> list[Link]:
        """By cut the link between its two stages; between stages of one rank, the slowest of all."""
        places, found = self.layout.places(config), list[Link | None]()
        for stage in range(config.stages - 1):
            apart = places[stage] != places[stage + 1]
            found.append(self.layout.stage_link(config, stage, stage + 1) if apart else None)
        last = slowest([link for link in found if link is not None])
        return [link or last for link in found]

    def across(self, config: Degrees, choice: TensorChoice) -> Across:
        """What stages hold of what crosses between them."""
        key = self._priced_by(config, choice), config.recompute
        if key not in self._across:
            costs, setting = self._costs(config, choice, self.setting(config)), self.setting(config)
            memory = self._block_costs.memory(setting.prices, choice.strategies, choice.storage, setting.sizes)
            layers, block_of = self.analysis.layers, self.analysis.block_of
            self._across[key] = held_across(self.positions, costs, layers, block_of, config.recompute, memory)
        return self._across[key]

    def _cuts(self, config: Degrees, choice: TensorChoice | None, link: Link) -> tuple[Cut, ...]:
        """What a rank sends and receives at each position. choice: None: at least, all values shared perfectly."""
        crossings, several = self.positions.crossings, config.microbatches > 1
        by = (self.samples(config), config.tp) if choice is None else self._priced_by(config, choice)
        key = by, None if choice is None else config.recompute, link, several
        if key not in self._cut_rows:
            held = itertools.repeat((0.0, 0.0)) if choice is None else self.across(config, choice).held
            sizes = {v: self.local_bytes(v, config, choice) for v in dict.fromkeys(v for row in crossings for v in row)}
            self._cut_rows[key] = tuple(
                cut_of({value: sizes[value] for value in values}, link, config.microbatches, own)
                for values, own in zip(crossings, held, strict=choice is not None)
            )
        return self._cut_rows[key]

    def whole_bytes(self, value: Value, samples: int) -> float:
        return self._block_costs.size(value).at(samples)

    def local_bytes(self, value: Value, config: Degrees, choice: TensorChoice | None) -> float:
        size = value_bytes(value).at(self.samples(config))
        if choice is None:
            return size / config.tp
        chosen = choice.strategies.get(value.node)
        if not chosen:
            return size
        return size * share_of([item.outputs[value.index] for item in chosen], config.axes)


def _summing(blocks: Sequence[int], config: Degrees) -> Sequence[int]:
    """Of the blocks that read a parameter those at which its gradient is whole: of one stage the first, whose backward
    is the last; of several stages any may be the first in its own.
    """
    return blocks[:1] if config.pp == 1 else blocks
