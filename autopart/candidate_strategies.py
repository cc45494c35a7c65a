"""The strategies of one configuration: the fastest, those that hold less, and the ways of layers around them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from torch import fx

from autopart.candidate_floors import CandidateFloors
from autopart.cluster import Cluster
from autopart.cost.communication import bucketed_all_reduce_seconds
from autopart.cost.devices import Device
from autopart.folding import is_stored
from autopart.hidden_levels import Exchange, hidden_levels, least_price
from autopart.layer_strategies import LayerStrategies
from autopart.passes.data_axis import LEVELS
from autopart.runtime.schedule import in_flight
from autopart.solver.degrees import Degrees
from autopart.solver.stages_problem import Step
from autopart.tensor_choice import Builder, TensorChoice, choose, stored_as
from autopart.tensor_setting import Setting, Shared

_PRICES = (0.1, 0.2)
"""Of all bytes of a stage, in parts of its seconds: where strategies are chosen that hold less."""
_BISECTIONS = 3
"""In which the price is found at which what replicas exchange just passes beside ops."""


@dataclass(slots=True)
class CandidateStrategies(CandidateFloors):
    """Chooses strategies of one program on one cluster for a global batch."""

    _beyond: dict[Degrees, float] = field(default_factory=dict)
    # of those that no limit binds, by configuration, level of ZeRO, and whether exchanges may pass
    _chosen: dict[tuple[Degrees, int | None, bool], TensorChoice] = field(default_factory=dict)

    def _with(self, cluster: Cluster, device: Device, whole: frozenset[str]) -> Self:
        found = CandidateFloors._with(self, cluster, device, whole)
        found._beyond, found._chosen = {}, {}
        return found

    def warmed(self, depth: int) -> Self:
        """As :meth:`CandidateFloors.warmed`; what strategies are chosen by knows no warm-up."""
        found = CandidateFloors.warmed(self, depth)
        if all(config.recompute != "full" for config, *_ in self._chosen):  # else `_beyond` is of who asked first
            found._beyond, found._chosen = self._beyond, self._chosen
        return found

    def choose(
        self,
        config: Degrees,
        memory_limit: float | None = None,
        below: float = math.inf,
        level: int | None = None,
        gap: float = 0.0,
        tied: Mapping[str, float] | None = None,
        sent: Mapping[Hashable, float] | None = None,
        ends: float = 1.0,
    ) -> TensorChoice:
        """The fastest strategies; under a limit, those whose bytes over all stages stay below it.

        Parameters are divided over replicas only under a limit, unless a level is given. below: seconds of a step that
        are of interest; raises NotBetter where it is found that strategies take longer. level: of ZeRO, of all. gap:
        how far from the fastest they may be. tied, sent, ends: as in :class:`autopart.tensor_setting.Setting`.
        """
        if memory_limit is None and not (gap or tied or sent) and ends == 1.0:
            key = config, level, self._exchanges(config)
            if key not in self._chosen:
                self._chosen[key] = self._choose(config, None, below, level, gap, {}, {}, ends)
            return self._chosen[key]
        return self._choose(config, memory_limit, below, level, gap, tied or {}, sent or {}, ends)

    def _choose(
        self,
        config: Degrees,
        memory_limit: float | None,
        below: float,
        level: int | None,
        gap: float,
        tied: Mapping[str, float],
        sent: Mapping[Hashable, float],
        ends: float,
    ) -> TensorChoice:
        levels: tuple[int, ...] = (self.zero or 0,)
        if level is not None:
            levels = (level,)
        elif self._divides(config) and memory_limit is not None:
            levels = LEVELS
        beyond = memory_limit is None and max(levels) >= 2
        return choose(
            self.analysis,
            self._folded,
            replace(self._choosing(config, beyond), tied=tied, sent=sent, ends=ends),
            self._block_costs,
            self.optimizer,
            memory_limit,
            self.time_limit_s,
            levels,
            config.pp,
            self._most_seconds(config, below),
            gap,
        )

    def _choosing(self, config: Degrees, beyond: bool = True) -> Setting:
        """What strategies are chosen by: of an exchange in every microbatch the part that does not pass beside ops, as
        if replicas divided all weights and ops were shared perfectly. beyond: of what is exchanged because tensor axes
        do not divide weights, the part that :meth:`_beyond_part` says; a limit of memory sees to that by itself.
        """
        setting = self.setting(config)
        if not self._exchanges(config):
            return setting
        work = self.work_seconds(config)
        least, most = (self._exchanged(config, held) for held in (self.trained_bytes / config.tp, self.trained_bytes))
        part = self.exposed(config, least, work)
        setting = replace(setting, exposed=part, exposed_beyond=part)
        if not beyond or not config.axes:
            return setting
        more = (max(0.0, most - work) - max(0.0, least - work)) / (most - least) if most > least else part
        if more <= part or least >= work:
            return replace(setting, exposed_beyond=max(part, more))
        return replace(setting, exposed_beyond=self._beyond_part(config, setting, more))

    def _exchanged(self, config: Degrees, held: float) -> float:
        """Seconds of a microbatch in which replicas exchange so many bytes of weights at level 3."""
        return sum(self.setting(config).data.microbatch_seconds(held, 3, True, True, float(self.units)))

    def _beyond_part(self, config: Degrees, setting: Setting, most: float) -> float:
        """What is counted of a second of an exchange that there is because tensor axes do not divide a weight: the
        least, from ``setting``'s to ``most``, at which strategies that divide all over replicas exchange no more than
        passes beside ops.

        By Lagrange: with s the seconds of ops under some strategies and x those of their exchange, the least s under
        x <= s is that of s + part * x at a part at which the best strategies just obey it, if there is one. At ``most``
        as much is counted as weights add that are all whole.
        """
        key = replace(config, recompute="auto")
        if key not in self._beyond:
            part = least = setting.exposed_beyond
            for _ in range(_BISECTIONS):
                if not self._passes(config, replace(setting, exposed_beyond=part)):
                    least = part
                elif part == least:
                    most = part
                    break
                else:
                    most = part
                part = math.sqrt(least * most)
            self._beyond[key] = most
        return self._beyond[key]

    def _passes(self, config: Degrees, setting: Setting) -> bool:
        """Whether what the best strategies of level 3 exchange in a microbatch passes beside their ops."""
        builder = Builder(self.analysis, self._folded, setting, self._block_costs, self.optimizer, (3,), config.pp)
        problem, found = builder.solution(None, self.time_limit_s)
        choice, work, exchanged = builder.chosen(problem, found), found.objective, 0.0
        exchanges = self._exchanges_under(setting, choice)
        for nodes, op, index in zip(self._folded.classes, problem.ops, found.choices, strict=False):
            if is_stored(nodes[0]):
                work -= op.choices[index].cost
                level = choice.levels.get(nodes[0].meta["name"], 0)
                exchanged += sum(math.fsum(exchanges(node, level)) for node in nodes)
        return exchanged <= work

    def _exchanges_under(self, setting: Setting, choice: TensorChoice) -> Exchange:
        """Forward and backward seconds of a microbatch in which replicas exchange a parameter for all that read it."""
        tensors, known = self.analysis.program.tensors, dict[object, tuple[float, float]]()

        def exchanges(node: fx.Node, level: int) -> tuple[float, float]:
            info, readers = tensors[node.meta["name"]], len(self.readers[node])
            # how it lies by identity, as hashing that costs more than pricing; the choice keeps it alive
            stored = id(choice.storage.get(info.name))
            gathering = self._block_costs.gathering(node)
            alike = stored, info.shape, info.dtype, info.trainable, level, *gathering, readers
            if alike not in known:
                there, back = self._exchange_seconds(setting, choice, node, level)
                known[alike] = there * readers, back * readers
            return known[alike]

        return exchanges

    def _most_seconds(self, config: Degrees, below: float) -> float:
        """Of a microbatch, its part of the step's end included: what takes as long takes ``below`` a step or more.

        That is known of one stage, with m microbatches of s seconds. Its last backward hides no more than the sums of
        gradients, nor than itself, which is what the forward F leaves of s: the step takes m s - min(sums, s - F).
        Of several stages a step takes at least what they make of s without the step's end, which whole weights have.
        """
        if below == math.inf:
            return math.inf
        if config.stages > 1:
            setting, sent = self.setting(config), self.trained_bytes * self.summed
            data, held = setting.data, self.trained_bytes
            every = (data.step_end_seconds(held, level) + data.arriving_seconds(held, level) for level in (0, 1))
            ends = max(every) + math.fsum(
                bucketed_all_reduce_seconds(sent, axis.parts, axis.link) for axis in setting.axes
            )
            return below / self.step_floor(1.0, config) + ends / config.microbatches - self.free_seconds(config)
        m, prices, share = config.microbatches, self.prices(config), 1 / config.tp
        forward = math.fsum(count * prices.shared_seconds(node, share, share)[0] for (node, _), count in self.alike)
        most = (below + self.sum_seconds(config)) / m
        return (min(most, (below - forward) / (m - 1)) if m > 1 else most) - self.free_seconds(config)

    def _leaner(self, config: Degrees, seconds: float, prices: Sequence[float] = _PRICES) -> list[TensorChoice]:
        """The best strategies at prices for bytes, rising.

        Those that take the fewest seconds may hold much, as whole weights, for few of them. seconds: of a microbatch.
        """
        places, warmup = self.layout.places(config), self.warmup_of(config)
        flying = in_flight(config.schedule, config.stages, config.microbatches, warmup, places)
        mean, sizes = sum(flying) / len(flying), self.kept_sizes(config)
        unit = seconds / sum(self._rooms(config))
        return [self._builder(config).solve_priced(price * unit, mean, self.time_limit_s, sizes) for price in prices]

    def _builder(self, config: Degrees, setting: Setting | None = None) -> Builder:
        """Of all levels of ZeRO that parameters may have. setting: by default that by which strategies are chosen."""
        levels = LEVELS if self._divides(config) else (self.zero or 0,)
        setting = setting or self._choosing(config)
        return Builder(*(self.analysis, self._folded, setting, self._block_costs, self.optimizer, levels, config.pp))

    def least_state_bytes(self, config: Degrees) -> float:
        """What parameters hold at least on a rank of each stage, all together, which no exchange changes, as finding
        out what passes beside ops takes a solver.
        """
        setting = self.setting(config)
        if config.axes and self._exchanges(config):  # placements are numbered with the first problem that is solved
            setting = replace(setting, shared=Shared())
        return self._builder(config, setting).least_state_bytes()

    def hidden(self, config: Degrees) -> list[TensorChoice]:
        """Strategies that are the fastest where replicas divide all, at levels whose exchange passes beside ops: those
        that cost no more besides than a byte is worth, and, where these differ, whatever they cost; then those whose
        exchange passes so where all of the forward runs again.
        """
        choice, setting, tensors = self.choose(config, level=3), self.setting(config), self.analysis.program.tensors
        costs, hiding = self._costs(config, choice, setting), 1 - 1 / max(1.0, self.units / config.stages)
        builder = replace(self._builder(config), setting=replace(setting, exposed=0.0, exposed_beyond=0.0))
        ways: dict[fx.Node, dict[int, tuple[float, float]]] = {}
        classes = [nodes for nodes in self._folded.classes if is_stored(nodes[0])]
        for nodes in classes:
            stored = choice.storage.get(nodes[0].meta["name"])
            chosen = {level: own for own, level in builder.ways(nodes[0]) if stored in (None, stored_as(own))}
            held = {level: builder.stored(nodes[0], own, level, len(nodes)) for level, own in chosen.items()}
            ways[nodes[0]] = {level: (item.cost, item.memory) for level, item in held.items()}

        levels = list[dict[str, int]]()
        there, back = (math.fsum(getattr(cost, name) for cost in costs) for name in ("forward_s", "backward_s"))
        exchanges = self._exchanges_under(setting, choice)
        prices = self._byte_price(config, choice, [list(own.values()) for own in ways.values()]), math.inf
        for computed, price in itertools.product((back, back + there), prices):
            found = hidden_levels(
                [nodes for nodes in classes if 3 in ways[nodes[0]] and tensors[nodes[0].meta["name"]].trainable],
                exchanges,
                lambda nodes, level: ways[nodes[0]][level],
                hiding * there,
                hiding * computed,
                price,
            )
            if found not in levels:
                levels.append(found)
        return [replace(choice, levels=own) for own in levels]

    def _byte_price(
        self, config: Degrees, choice: TensorChoice, parameters: Sequence[Sequence[tuple[float, float]]]
    ) -> float:
        """The least of a byte, in seconds of a microbatch, at which all stages together have room for these strategies.

        parameters: the ways to hold each class, in seconds and bytes.
        """
        problem = self.problem(config, replace(choice, levels={}))
        shape, whole = problem.shapes[0], Step(0, 0, len(problem.positions) - 1)
        places, warmup = self.layout.places(config), self.warmup_of(config)
        flying = in_flight(config.schedule, config.stages, config.microbatches, warmup, places)
        mean, families = sum(flying) / len(flying), [family for _, family in problem.units(whole)]
        largest = max(family[0].transient_bytes for family in families)
        kept = math.fsum(group.bytes for group in shape.kept)
        room = sum(self._rooms(config)) - config.stages * largest - mean * kept
        layers = [[(way.seconds, mean * way.activation_bytes) for way in family] for family in families]
        return least_price([*parameters, *layers], room)

    def layer_strategies(
        self, config: Degrees, answer: TensorChoice, fastest: dict[object, tuple[float, ...]] | None = None
    ) -> LayerStrategies:
        """The ways of layers around an answer on tensor axes. fastest: what answers of this candidate share."""
        places, warmup = self.layout.places(config), self.warmup_of(config)
        flying = in_flight(config.schedule, config.stages, config.microbatches, warmup, places)
        counts = sorted({max(flying), min(flying), 0}, reverse=True)
        sizes = self.kept_sizes(config)
        return LayerStrategies(
            self._builder(config),
            answer,
            counts,
            self.time_limit_s,
            sizes,
            config.recompute != "none",
            {} if fastest is None else fastest,
        )
