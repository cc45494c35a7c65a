"""How a candidate's blocks are divided into stages under given strategies, and what a step of that takes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial

from autopart.candidate_strategies import CandidateStrategies
from autopart.report.units import format_bytes
from autopart.runtime.errors import InfeasibleError
from autopart.solver import stages as stage_solver
from autopart.solver.degrees import Degrees
from autopart.solver.search_space import NotBetter
from autopart.solver.stages_floor import blocks_floor
from autopart.solver.stages_least import MOST_STEPS_ONCE
from autopart.solver.stages_problem import StageProblem, StageSolution, Way
from autopart.step_time import STEADY_SCHEDULES, WHOLE_SCHEDULES, simulated_seconds
from autopart.tensor_choice import TensorChoice

_ENOUGH = 2.0**60
"""Bytes of a device with room for anything."""
_HIGH_PRICE = 100.0
"""Of all bytes of a stage, in parts of its seconds: where strategies are chosen that hold the least."""


@dataclass(slots=True)
class CandidateStages(CandidateStrategies):
    """The stages of given strategies, and whether any fit."""

    _worked: dict[object, float] = field(default_factory=dict)  # of the candidate that is evaluated, by strategies
    _least_state: dict[object, float] = field(default_factory=dict)  # bytes of parameters on ranks of all stages

    def _memory_binds(self, config: Degrees, choice: TensorChoice, below: float) -> bool:
        """Whether these strategies would take less than so many seconds on devices that hold whatever they ask for."""
        if self._least_seconds(config, choice) >= below:
            return False
        problem = self.problem(config, choice)
        roomy = replace(problem, slots=tuple(replace(slot, capacity_bytes=_ENOUGH) for slot in problem.slots))
        try:
            cut = self._cut(config, choice, roomy, below * self.faster(config))
        except (InfeasibleError, NotBetter):
            return False
        return self._step_seconds(config, choice, roomy, cut.way) < below

    def unfit(self, config: Degrees) -> InfeasibleError | None:
        """Why a candidate surely does not fit, as its parameters alone hold too much; None where it may fit."""
        if self._surely_whole(config):
            return None
        key = config.dp, self.setting(config).axes, self.levels(config), self.whole
        if key not in self._least_state:
            self._least_state[key] = self.least_state_bytes(config)
        held, room = (size / config.stages for size in (self._least_state[key], math.fsum(self._rooms(config))))
        if held <= room:
            return None
        return InfeasibleError(
            f"parameters with gradients and optimizer state alone take {format_bytes(held)} on each rank, in the mean "
            f"over stages, {format_bytes(held - room)} more than there is room for",
            held - room,
        )

    def _never_fits(self, config: Degrees, choice: TensorChoice) -> bool:
        """Whether parameters alone hold more than there is, whatever the strategies; on several axes, where limits take
        a solver long, also whether not even the strategies that hold the least fit.
        """
        if self.unfit(config) is not None:
            return True
        if len(config.axes) < 2 or choice.solution is None:
            return False
        (leanest,) = self._leaner(config, choice.solution.objective, (_HIGH_PRICE,))
        try:
            self._cut(config, leanest, self.problem(config, leanest), math.inf)
        except InfeasibleError:
            return True
        return False

    def _least_seconds(self, config: Degrees, choice: TensorChoice) -> float:
        """Of a step with these strategies, however its blocks are divided."""
        alike = self._priced_by(config, choice), *choice.levels.items()
        if alike not in self._worked:
            costs = self._costs(config, choice, self.setting(config))
            self._add_parameters(costs, config, choice)
            self._worked[alike] = math.fsum(cost.forward_s + cost.backward_s for cost in costs)
        return self.step_floor(self._worked[alike], config)

    def _uncut(self, config: Degrees, problem: StageProblem) -> float:
        """Seconds of a step at least as blocks cannot be cut, with these choices, at whatever positions."""
        return blocks_floor(problem) / self.faster(config) if config.schedule in WHOLE_SCHEDULES else 0.0

    def _cut(
        self, config: Degrees, choice: TensorChoice, problem: StageProblem, below: float, known: Way = ()
    ) -> StageSolution:
        """The best division that is found, of interest where it takes less than ``below``. known: to begin with."""

        def simulated(way: Way) -> float:
            return self._step_seconds(config, choice, problem, way)

        whole, steady = config.schedule in WHOLE_SCHEDULES, config.schedule in STEADY_SCHEDULES
        apart = 1 < config.stages == config.pp
        return stage_solver.solve(
            *(problem, self.time_limit_s),
            below=below,
            least_step=None if whole else partial(self.ordered_seconds, config, most_steps=MOST_STEPS_ONCE),
            steady=steady,
            timed=simulated if (apart if whole else not steady) else None,
            places=() if whole else self.layout.places(config),
            known=known,
        )

    def _step_seconds(self, config: Degrees, choice: TensorChoice, problem: StageProblem, way: Way) -> float:
        places = self.layout.places(config)
        devices = [self.layout.ranks(config, places.index(place)) for place in range(config.pp)]
        return simulated_seconds(
            problem,
            way,
            config.schedule,
            [self.weight_share(config, choice, problem, step) for step in way],
            self.warmup_of(config),
            places,
            self.shared.durations(devices) if self.shared is not None else None,
            self.host_starts(config),
        )
