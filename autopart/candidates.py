"""Candidates: which strategies of one configuration are tried, and the best of them with their stages."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from autopart.answers import Answer, best_of
from autopart.candidate_passed import MOST_OF_ENDS, CandidatePassed
from autopart.data_prices import offered_levels
from autopart.layer_strategies import LayerStrategies
from autopart.mixed_strategies import Samples, applied, carried, chosen_ways, merged, most_layers
from autopart.passes.data_axis import LEVELS
from autopart.realize import Realization
from autopart.recomputation import KEPT
from autopart.runtime.errors import InfeasibleError
from autopart.solver.degrees import Degrees
from autopart.solver.search_space import Evaluation, NotBetter
from autopart.solver.stages_problem import StageProblem, StageSolution
from autopart.solver.time_limits import OutOfTime
from autopart.step_time import WHOLE_SCHEDULES
from autopart.tensor_choice import TensorChoice

# How often strategies are chosen again under a tighter memory limit when the fastest ones do not fit.
TIGHTENINGS = 4
_NEAR = 0.005
"""Of a step's seconds: what further levels of ZeRO have to be able to save to be tried."""
_ALIKE = 0.03
"""Of a step's seconds, by which graphs may tell strategies of one configuration apart."""
_MOST_OTHERS = 2
"""Answers of one configuration, at other levels of ZeRO than the best, that are kept to be told apart so."""
LIMITED_GAP = 0.002
"""How far from the fastest they may be then, of several stages, whose limit is a guess, or with levels of ZeRO to
choose from: what is optimal takes long to prove.
"""
_HOPELESS = 1.15
"""Times the seconds of interest: under other schedules than 1F1B and GPipe, whose divisions take the solver long, no
other strategies are tried of what takes longer with the first.
"""


@dataclass(slots=True)
class Candidates(CandidatePassed):
    """Solves candidates of one program on one cluster for a global batch."""

    # of the candidate that is evaluated, by strategies
    _divisions: dict[object, tuple[StageProblem, StageSolution]] = field(default_factory=dict)
    _by_levels: dict[Degrees, Evaluation[Answer] | None] = field(default_factory=dict)
    _answers: list[Evaluation[Answer]] = field(default_factory=list)
    # stages' graphs of the answers that were described last, by boundaries, axes and strategies
    built: deque[tuple[object, Realization]] = field(default_factory=lambda: deque(maxlen=2))

    def evaluate(self, config: Degrees, below: float = math.inf) -> Evaluation[Answer]:
        """Strategies and stages of a candidate. Raises InfeasibleError when it does not fit in memory, OutOfTime when a
        solver found nothing in its time and ``below`` does not tell what is of interest.

        below: seconds that it has to stay below to be of interest; raises NotBetter where it surely does not.
        Where layers are computed again for the fastest strategies to fit, those are tried too that fit without; where
        memory binds, those with parameters divided over replicas, and where layers may be computed again those at
        prices for bytes, and mixtures around the other answers as well.
        """
        self._divisions, self._worked, self._by_levels, self._answers = {}, {}, {}, []
        try:
            best = self._with_less_to_pass(config, below)
        except OutOfTime:
            if below == math.inf:
                raise
            raise NotBetter(below, self.work_floor(config, below)) from None
        answer, most = best.answer, (1 + _ALIKE) * best.objective
        if not answer.others and answer.choice.levels:
            near = dict[object, Answer]()
            for found in sorted(self._answers, key=lambda item: item.objective):
                levels = found.answer.choice.levels
                if found.objective < most and levels != answer.choice.levels:
                    near.setdefault(tuple(sorted(levels.items())), found.answer)
            others = tuple(near.values())[:_MOST_OTHERS]
            best = replace(best, answer=replace(answer, others=others))
        return best

    def _with_less_to_pass(self, config: Degrees, below: float) -> Evaluation[Answer]:
        """The best; or that of strategies which count what others do not, as it is not known then where stages begin
        and end, and what binds: what stages pass on, and where hosts bind the end of a step.
        """
        fastest, best = self._fastest(config, below), None
        try:
            best = self._best(config, fastest, below)
            most, bound = best.objective, best.bound
        except NotBetter as error:
            stopped, most, bound = error, below, error.bound
        tied = self.tied_to_share(config, fastest, most)
        if tied and (other := self._counting(config, most, tied=tied)) is not None:
            best, most = other, other.objective
        if best is not None and (sent := self.sent_to_share(best.answer, most)):
            best = self._counting(config, most, tied=tied, sent=sent) or best
        if best is not None and self.ends_decide(best.answer, best.objective):
            best = self._counting(config, best.objective, tied=tied, ends=MOST_OF_ENDS) or best
        if best is None:
            raise stopped
        return replace(best, bound=min(best.objective, bound))

    def _fastest(self, config: Degrees, below: float) -> TensorChoice:
        """The fastest strategies. Where these tell all, their solver stops when none takes less than ``below``."""
        alone = config.pp == 1 and not self.zero and not self._divides(config)
        try:
            return self.choose(config, below=below if alone else math.inf)
        except NotBetter:
            raise NotBetter(below, below) from None

    def _counting(
        self,
        config: Degrees,
        below: float,
        tied: Mapping[str, float],
        sent: Mapping[Hashable, float] | None = None,
        ends: float = 1.0,
    ) -> Evaluation[Answer] | None:
        """The best of strategies that count these too (see :meth:`choose`), if it takes less than ``below``."""
        kind = replace(config, recompute="none") if config in self._fitted else config
        with contextlib.suppress(InfeasibleError, OutOfTime):
            found = self._tried(kind, self.choose(config, tied=tied, sent=sent, ends=ends), below)
            if found is not None and found.objective < below:
                return found
        return None

    def _best(self, config: Degrees, fastest: TensorChoice, below: float) -> Evaluation[Answer]:
        """As :meth:`evaluate`, from the fastest strategies; what is found on the way is kept."""
        plain = replace(config, recompute="none")
        promising = False  # memory surely binds, and the fastest strategies alone take less than ``below``
        if config.recompute != "full":
            problem = self._fits_anyhow(plain, fastest)
            if problem is not None:
                self._fitted |= {config, plain}
                return self._whole(config, fastest, problem, below)
        if config.recompute == "auto":
            promising = config.stages == 1 and self._least_seconds(config, fastest) < below
        found: Evaluation[Answer] | None = None
        stopped: NotBetter | None = None
        try:
            found = self._evaluate_alike(config, fastest, below)
        except NotBetter as error:
            promising = promising or self._at_levels(config, below, known=True) is not None
            if not promising:
                other = self._holding_less(config, fastest, below) or self._of_one_level(config, fastest, below)
                if other is None:
                    raise
                return replace(other, bound=min(other.objective, error.bound))
            stopped = error
        except InfeasibleError:
            found = self._leanest(config, fastest, below)
            if found is None:
                raise
            return found
        if found is not None and config.recompute == "auto" and _as_they_are(found.answer, fastest):
            self._fitted |= {config, plain}  # and bounds are of such plans from here on
            floor = self.work_floor(config, found.objective)
            found = replace(found, bound=min(found.objective, max(found.bound, floor)))
        if found is not None and config.recompute != "auto":
            other = self._of_one_level(config, fastest, min(below, (1 - _NEAR) * found.objective))
            if other is not None:
                return replace(other, bound=min(other.bound, found.bound))
        ordered = config.schedule not in WHOLE_SCHEDULES
        if ordered and found is not None and found.objective >= _HOPELESS * below:
            return found
        answers = [fastest]
        if found is not None and found.answer.choice is not fastest:
            answers.append(found.answer.choice)
        bound = any(step.choices for step in found.answer.way) if found is not None else promising
        best = found
        least = found.bound if found is not None else stopped.bound if stopped is not None else math.inf
        if bound or len(answers) > 1:
            divided = self._at_levels(config, below if best is None else min(below, best.objective))
            if divided is not None:
                best, least = divided, min(least, divided.bound)
        if fastest.solution is not None and (bound or len(answers) > 1):
            if config.recompute == "auto":
                choices = self._leaner(config, fastest.solution.objective)
                priced = self._at_prices(config, choices, below if best is None else best.objective)
                if priced is not None and (best is None or priced.objective < best.objective):
                    best, least = priced, min(least, priced.objective)
                if priced is None:  # what takes longer by itself need not in a part of the layers
                    answers.append(choices[-1])
            if best is not None:
                answers.insert(0, best.answer.choice)
            if best is not None or len(config.axes) < 2:  # on several axes the ways of a layer take a solver long
                best, floor = self._mixed(config, answers, best, below)
                least = min(least, floor)
        if best is None or (stopped is not None and best.objective >= below):
            assert stopped is not None
            raise NotBetter(stopped.seconds, least)
        return replace(best, bound=least)

    def _whole(self, config: Degrees, fastest: TensorChoice, problem: StageProblem, below: float) -> Evaluation[Answer]:
        """The fastest strategies, which fit with whole parameters, or those that are the fastest once it counts which
        sums of gradients the last backward hides. problem: of the fastest.
        """
        plain = replace(config, recompute="none")
        found: list[Evaluation[Answer]] = []
        try:
            found.append(self._evaluate(plain, fastest, below, problem, among=config))
            most, near, bound = found[0].objective, (1 + _ALIKE) * found[0].objective, found[0].bound
        except NotBetter as error:
            stopped, most, near, bound = error, below, below, error.bound
        if bound < (1 - _NEAR) * most:
            late = self.late_sums(plain, most)
            bound = max(bound, late.seconds)
            if self._divides(plain):  # for less memory, which bounds have to hold with
                late = self.late_sums(plain, most, whole=True)
            others = list(late.choices)
            if self.zero and config.dp > 1:  # at the level that is given; of whole ones too, which graphs may prefer
                others.append(self.choose(plain, level=0))
                others = [replace(choice, levels=self._levels(plain, choice, self.zero)) for choice in others]
            others = [choice for choice in others if choice.strategies != fastest.strategies]
            tried = (self._tried(plain, choice, near) for choice in others)
            found += [other for other in tried if other is not None and other.objective < near]
        if not found:
            raise NotBetter(stopped.seconds, bound)
        best, *rest = sorted(found, key=lambda item: item.objective)
        answer = replace(best.answer, others=tuple(other.answer for other in rest[:1]))
        return replace(best, answer=answer, bound=min(best.objective, bound))

    def _leanest(self, config: Degrees, fastest: TensorChoice, below: float) -> Evaluation[Answer] | None:
        """The best of other strategies, where none was found that fits by limits of memory.

        A limit takes what is missing in one stage off all that strategies hold, which where stages hold the same tied
        parameters can be less than any hold.
        """
        if self._never_fits(config, fastest):
            return None
        found = self._holding_less(config, fastest, below) or self._of_one_level(config, fastest, below)
        if found is None and config.recompute != "auto" and fastest.solution is not None:
            found = self._at_prices(config, self._leaner(config, fastest.solution.objective), below)
        return found

    def _holding_less(self, config: Degrees, fastest: TensorChoice, below: float) -> Evaluation[Answer] | None:
        """The best of other strategies, where the fastest may take less than ``below`` and memory asks for too much."""
        if config.recompute != "auto" or self._least_seconds(config, fastest) >= below:
            return None
        found = self._at_levels(config, below)
        if fastest.solution is not None:
            most = below if found is None else min(below, found.objective)
            found = self._at_prices(config, self._leaner(config, fastest.solution.objective), most) or found
            if found is not None:
                mixture = self._mixture(config, self.layer_strategies(config, found.answer.choice), found.objective)
                if mixture is not None and mixture.objective < found.objective:
                    found = mixture
        return found if found is not None and found.objective < below else None

    def _at_prices(self, config: Degrees, choices: list[TensorChoice], below: float) -> Evaluation[Answer] | None:
        """The best of these strategies, where layers may run again, if they take less than ``below``."""
        return best_of(below, (partial(self._tried, config, choice) for choice in choices))

    def _at_levels(self, config: Degrees, below: float, known: bool = False) -> Evaluation[Answer] | None:
        """The best of strategies with parameters divided over replicas, of interest below so many seconds.

        known: if it is known already.
        """
        if config not in self._by_levels and not known:
            best: Evaluation[Answer] | None = None
            if self._divides(config) and config.recompute == "auto":
                one, *more = (partial(self._of_level, config, level) for level in LEVELS[1:])
                best = best_of(below, (one, partial(self._hidden, config)))
                most = below if best is None else best.objective
                if most > (1 + _NEAR) * self.work_floor(config):
                    best = best_of(most, more) or best
            self._by_levels[config] = best
        found = self._by_levels.get(config)
        return found if found is not None and found.objective < below else None

    def _tried(self, config: Degrees, choice: TensorChoice, below: float) -> Evaluation[Answer] | None:
        """These strategies, where they fit and may take less than ``below``."""
        try:
            return self._evaluate(config, choice, below, tightenings=0)
        except (InfeasibleError, NotBetter, OutOfTime):
            return None

    def _of_level(self, config: Degrees, level: int, below: float, tightenings: int = 0) -> Evaluation[Answer] | None:
        """The fastest strategies with all parameters at a level of ZeRO, where they fit.

        Limits of memory do not lead to these: they count what is kept where nothing runs again, and not the layers that
        level 3 holds whole while they run.
        """
        try:
            return self._evaluate(config, self.choose(config, level=level), below, None, tightenings, level=level)
        except (InfeasibleError, NotBetter, OutOfTime):
            return None

    def _hidden(self, config: Degrees, below: float) -> Evaluation[Answer] | None:
        """The first of :meth:`hidden` that fit with layers computed again."""
        tried = (self._tried(config, choice, below) for choice in self.hidden(config))
        return next((found for found in tried if found is not None), None)

    def _of_one_level(self, config: Degrees, fastest: TensorChoice, below: float) -> Evaluation[Answer] | None:
        """The best with all parameters at one level of ZeRO, of interest below so many seconds, where what is computed
        again is given and memory is what keeps whole parameters from taking less.
        """
        if not self._divides(config) or config.recompute == "auto" or not self._memory_binds(config, fastest, below):
            return None
        levels = LEVELS[1:]
        return best_of(below, (partial(self._of_level, config, level, tightenings=TIGHTENINGS) for level in levels))

    def seconds_of(self, answer: Answer) -> float:
        """Of a step, as candidates are compared by."""
        return self._step_seconds(answer.config, answer.choice, answer.problem, answer.way)

    def divided(self, answer: Answer) -> list[Answer]:
        """The same with all that can be divided over replicas at a level of ZeRO, from 1 on, where that fits; none
        where some are divided already.
        """
        config, choice, way = answer.config, answer.choice, answer.way
        if not self.may_divide(config) or choice.levels:
            return []
        found = []
        # what runs again would not read weights of level 3 whole
        for level in LEVELS[1:2] if any(step.choices for step in way) else LEVELS[1:]:
            own = replace(choice, levels=self._levels(config, choice, level))
            problem = self.problem(config, own)
            if problem.excess_bytes(way) <= 0:
                found.append(replace(answer, choice=own, problem=problem))
        return found

    def _levels(self, config: Degrees, choice: TensorChoice, level: int) -> dict[str, int]:
        """The levels of ZeRO with all parameters that can be divided under these strategies at this one."""
        axes, whole = self.setting(config).named_sizes, self.setting(config).offers.whole
        return {
            info.name: level
            for info in self.analysis.program.parameters
            if info.name not in whole
            and level in offered_levels(info, choice.storage.get(info.name, ()), axes, config.dp)
        }

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
        if found is not None and not (other and any(step.choices for step in found.answer.way)):
            return found
        try:
            most = below if found is None else min(below, found.objective)
            kept = self._evaluate(plain, fastest, most, among=config)
        except (InfeasibleError, NotBetter):
            if stopped is not None:
                raise stopped from None
            assert found is not None
            return found
        if stopped is not None:
            return replace(kept, bound=min(kept.bound, stopped.bound))
        assert found is not None
        return replace(min(found, kept, key=lambda item: item.objective), bound=min(found.bound, kept.bound))

    def _mixed(
        self, config: Degrees, answers: Sequence[TensorChoice], best: Evaluation[Answer] | None, below: float
    ) -> tuple[Evaluation[Answer] | None, float]:
        """The best of mixtures around answers and of what is known; and seconds that every such mixture takes at least.

        Of answers around which layers have the same ways the first is taken.
        """
        least, known, parts = math.inf, set[object](), self.layer_parts()
        fastest: dict[object, tuple[float, ...]] = {}
        for answer in answers if parts else ():
            ways = self.layer_strategies(config, answer, fastest)
            most = below if best is None else min(below, best.objective)
            floor = self._mixture_floor(config, *ways.least_seconds(parts.values()))
            around = tuple(map(ways.around, parts.values()))
            least = min(least, floor)
            if floor >= most or around in known:
                continue
            known.add(around)
            mixture = self._mixture(config, ways, most)
            if mixture is not None and (best is None or mixture.objective < best.objective):
                best, least = mixture, min(least, mixture.objective)
        return best, least

    def _mixture(self, config: Degrees, found: LayerStrategies, below: float) -> Evaluation[Answer] | None:
        """The best mixture of layers' strategies around an answer, where one is found that fits and is likely to take
        less than ``below``.
        """
        answer, parts = found.answer, self.layer_parts()
        alike: dict[object, list[str]] = {}
        for layer, part in parts.items():
            alike.setdefault(found.alike(part), []).append(layer)
        many = most_layers(alike.values())
        ways = {layer: found.ways(part) if layer in many else (found.own(part),) for layer, part in parts.items()}
        if max(map(len, ways.values()), default=0) < 2:
            return None
        units = replace(config, recompute=KEPT) if config.recompute == "none" else config
        samples = Samples.of(alike.values(), ways)
        priced = [
            self.problem(units, applied(answer, {layer: ways[layer][way] for layer, way in taken.items()}, parts))
            for taken in samples.taken
        ]
        problem = merged(priced, samples, self.analysis)
        most = below * self.faster(config)
        try:
            cut = self._cut(config, answer, problem, most)
            mixture = applied(answer, chosen_ways(problem, cut, ways, self.analysis), parts)
            problem, whole = self.problem(config, mixture), problem
            known = carried(whole, cut, problem)
            cut = self._cut(config, mixture, problem, most, known or ())
        except (NotBetter, InfeasibleError):  # the merged problem counts messages as of its first way alone
            return None
        seconds = self._step_seconds(config, mixture, problem, cut.way)
        self._answers.append(Evaluation(Answer(config, mixture, problem, cut), seconds, seconds))
        return self._answers[-1]

    def _evaluate(
        self,
        config: Degrees,
        choice: TensorChoice,
        below: float,
        problem: StageProblem | None = None,
        tightenings: int = TIGHTENINGS,
        among: Degrees | None = None,
        level: int | None = None,
    ) -> Evaluation[Answer]:
        """The same, from the strategies that are the fastest without a limit, and their problem.

        among: what this is a part of, whose bound is asked for. level: of ZeRO, of strategies that hold less too.
        """
        whose, fastest = among or config, choice
        # without other strategies what holds for these choices holds for the candidate, but for what replicas exchange,
        # of which more may pass unseen
        alone = choice.solution is None and not self._divides(config) and not (self.zero and config.dp > 1)
        complete = self.positions.complete
        for attempt in range(tightenings + 1):
            least = self._least_seconds(config, choice) if below < math.inf else 0.0
            if least >= below:
                raise NotBetter(least, least if alone else self.work_floor(whose, below))
            alike = config, self._priced_by(config, choice), *choice.levels.items()
            if alike in self._divisions:
                problem, cut = self._divisions[alike]
                break
            problem = problem or self.problem(config, choice)
            try:
                cut = self._cut(config, choice, problem, below * self.faster(config))
                self._divisions[alike] = problem, cut
                break
            except NotBetter as error:
                seconds = error.seconds / self.faster(config)
                if alone and complete:
                    raise NotBetter(seconds, seconds) from None
                uncut = self._uncut(config, problem) if alone else 0.0
                raise NotBetter(seconds, max(self.work_floor(whose, below), uncut)) from None
            except InfeasibleError as error:
                if (
                    alone
                    or error.excess_bytes is None
                    or attempt == tightenings
                    or (attempt == 0 and below == math.inf and self._never_fits(config, choice))
                ):
                    if below < math.inf:  # what fits may take longer
                        least = below if alone and complete else self.work_floor(whose, below)
                        raise NotBetter(below, least) from None
                    raise
                if attempt == 0:  # limits take the solver longer than levels of ZeRO, which tell what is of interest
                    divided = self._at_levels(whose, below)
                    below = below if divided is None else divided.objective
                # Other strategies may hold less: take the missing bytes off what these hold together.
                try:
                    limit = choice.memory_bytes - config.pp * error.excess_bytes
                    gap = LIMITED_GAP if config.pp > 1 or self._divides(config) else 0.0
                    choice = self.choose(config, limit, below, level, gap)
                except (InfeasibleError, NotBetter, OutOfTime):
                    if below < math.inf:
                        raise NotBetter(below, self.work_floor(whose, below)) from None
                    raise error from None
                problem = None
        assert problem is not None
        seconds = self._step_seconds(config, choice, problem, cut.way)
        if choice.solution is not None:
            floor = self.sharing_floor(config, whose, fastest, choice, seconds)
        elif not alone:
            floor = self.work_floor(whose, seconds)
        elif config.stages == 1 and not cut.way[0].choices:
            floor = seconds  # the only division; slower ways to run its blocks hide no more than they take longer
        elif complete:
            floor, free = cut.lower_bound_s / self.faster(config), self.free_seconds(config)
            whole = config.schedule in WHOLE_SCHEDULES
            floor = self._tied_floor(config, floor) if whole else max(floor, self.step_floor(free, config))
        else:
            floor = max(self.work_floor(whose, seconds), self._uncut(config, problem))
        self._answers.append(Evaluation(Answer(config, choice, problem, cut), seconds, min(floor, seconds)))
        return self._answers[-1]


def _as_they_are(answer: Answer, fastest: TensorChoice) -> bool:
    """Whether it has the fastest strategies, with nothing computed again."""
    return answer.choice is fastest and not any(step.choices for step in answer.way)
