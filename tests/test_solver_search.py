"""The outer search."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from autopart.runtime.errors import InfeasibleError, PlanError
from autopart.solver.degrees import Config, Degrees
from autopart.solver.search import SearchResult, search
from autopart.solver.search_outcomes import Status
from autopart.solver.search_space import AHEAD, Effort, Evaluation, NotBetter, Space


class Given(Space[Degrees, Any]):
    """A space whose methods are functions of a test. settle: an answer's better one, and its seconds."""

    def __init__(self, evaluate: Any, lower_bound: Any, settle: Any = None, **others: Any) -> None:
        self._evaluate, self._lower_bound, self._settle = evaluate, lower_bound, settle
        for name, function in others.items():
            assert hasattr(Space, name)
            setattr(self, name, function)

    def evaluate(self, config: Degrees, below: float) -> Evaluation[Any]:
        return self._evaluate(config, below)

    def lower_bound(self, config: Degrees) -> float:
        return self._lower_bound(config)

    def settle(self, evaluation: Evaluation[Any]) -> Evaluation[Any]:
        if self._settle is None:
            return evaluation
        answer, seconds = self._settle(evaluation.answer)
        return replace(evaluation, answer=answer, objective=seconds)


def searched(configs: Iterable[Degrees], evaluate: Any, lower_bound: Any, **given: Any) -> SearchResult[Any]:
    """Fields of Effort, ``below`` and methods of a space by name; bounds are compared where they can be refined."""
    below = given.pop("below", math.inf)
    effort = {name: given.pop(name) for name in ("most", "tightened", "last") if name in given}
    ahead = AHEAD if "refine" in given else 1
    space = Given(evaluate, lower_bound, **given)
    return search(configs, space, effort=Effort(**effort, ahead=ahead), below=below)


def configs(count: int) -> list[Degrees]:
    return [Degrees(1, 1, (), number + 1, "1f1b") for number in range(count)]


@pytest.mark.parametrize("seed", range(200))
def test_finds_what_evaluating_everything_finds(seed: int) -> None:
    rng = random.Random(seed)
    candidates = configs(rng.randint(1, 12))
    floors: dict[Config, float] = {config: rng.random() for config in candidates}
    bounds = {config: floors[config] + rng.random() * 0.2 for config in candidates}
    objectives: dict[Config, float] = {config: bounds[config] + rng.choice([0.0, 0.1]) for config in candidates}
    lost = {config for config in candidates if rng.random() < 0.2}
    evaluated: list[Degrees] = []

    def evaluate(config: Degrees, below: float) -> Evaluation[str]:
        evaluated.append(config)
        if config in lost:
            raise InfeasibleError("too large")
        return Evaluation(str(config), objectives[config], bounds[config])

    feasible = [config for config in candidates if config not in lost]
    if not feasible:
        with pytest.raises(InfeasibleError, match="too large"):
            searched(candidates, evaluate, floors.__getitem__)
        return
    result = searched(candidates, evaluate, floors.__getitem__)
    assert result.objective == min(objectives[config] for config in feasible)
    assert result.answer == str(result.config) and objectives[result.config] == result.objective
    assert result.bound <= result.objective
    assert result.bound <= min(objectives[config] for config in feasible)
    assert result.gap == pytest.approx((result.objective - result.bound) / result.objective)
    by_status = {status: {c.config for c in result.considered if c.status is status} for status in Status}
    assert by_status[Status.CHOSEN] == {result.config}
    assert by_status[Status.INFEASIBLE] == lost & set(evaluated)
    assert by_status[Status.PRUNED] == set(candidates) - set(evaluated)
    assert all(floors[config] >= result.objective for config in by_status[Status.PRUNED])
    assert len(result.considered) == len(candidates)


def test_what_takes_longer_than_asked_for_is_not_evaluated() -> None:
    calls: list[int] = []

    def evaluate(config: Degrees, below: float) -> Evaluation[None]:
        calls.append(config.microbatches)
        if config.microbatches + 0.5 >= below:
            raise NotBetter(config.microbatches + 0.5, config.microbatches + 0.25)
        return Evaluation(None, config.microbatches + 0.5, config.microbatches + 0.25)

    def floor(config: Degrees) -> float:
        return float(config.microbatches)

    found = searched(configs(10), evaluate, floor, below=3.4)
    assert found.objective == 1.5 and calls == [1]
    with pytest.raises(NotBetter) as caught:
        searched(configs(10)[2:], evaluate, floor, below=3.4)
    assert calls == [1, 3] and (caught.value.seconds, caught.value.bound) == (3.4, 3.25)

    def slower(config: Degrees, below: float) -> Evaluation[None]:
        calls.append(config.microbatches)
        raise NotBetter(9.0, 8.0)

    with pytest.raises(NotBetter):  # something fits elsewhere: no more are tried than then
        searched(configs(10), slower, floor, below=3.4, most=2)
    assert calls == [1, 3, 1, 2]


def test_prunes_what_cannot_be_faster() -> None:
    calls: list[Degrees] = []

    def evaluate(config: Degrees, below: float) -> Evaluation[None]:
        calls.append(config)
        return Evaluation(None, config.microbatches + 0.5, config.microbatches + 0.5)

    result = searched(reversed(configs(10)), evaluate, lambda config: float(config.microbatches))
    assert len(calls) == 1 and result.gap == 0 and result.config.microbatches == 1


def test_what_is_left_untried_stays_in_the_bound() -> None:
    def evaluate(config: Degrees, below: float) -> Evaluation[None]:
        if config.microbatches == 9:
            raise InfeasibleError("too large")
        return Evaluation(None, config.microbatches + 5.0, config.microbatches + 4.0)

    def floor(config: Degrees) -> float:
        return float(config.microbatches)

    result = searched(configs(10), evaluate, floor, expected=lambda config, _: -config.microbatches, most=3)
    # 10, 9 and 8 were evaluated; of the others those that may be faster than 8 + 5 are untried
    assert result.objective == 13.0 and result.bound == 1.0
    assert [item.status for item in result.considered] == [
        Status.SLOWER, Status.INFEASIBLE, Status.CHOSEN, *[Status.UNTRIED] * 7
    ]  # fmt: skip
    pruned = searched(configs(20), evaluate, floor, expected=lambda config, _: -abs(config.microbatches - 15), most=1)
    assert {item.status for item in pruned.considered} == {Status.CHOSEN, Status.UNTRIED, Status.PRUNED}
    whole = searched(configs(10), evaluate, floor, most=3)
    assert whole.objective == 6.0


def test_an_evaluation_may_stop_where_it_is_not_better() -> None:
    asked: list[float] = []

    def evaluate(config: Degrees, below: float) -> Evaluation[None]:
        asked.append(below)
        if config.microbatches > 1:
            raise NotBetter(config.microbatches + 5.0, 2.5)
        return Evaluation(None, 4.0, 3.0)

    result = searched(configs(3), evaluate, lambda config: 1.0)
    assert asked == [math.inf, 4.0, 4.0]
    assert (result.objective, result.bound) == (4.0, 2.5)
    assert [item.seconds for item in result.considered if item.status is Status.PRUNED] == [7.0, 8.0]


@pytest.mark.parametrize(
    ("seconds", "reason"),
    [
        (9.98, "not made sure of; takes at most 0.2% less than the chosen one"),
        (10.0, "takes no less than the chosen one"),
        (10.0 + 1e-14, "takes no less than the chosen one"),
        (10.5, "takes at least 10.5 s, the chosen one 10 s"),
        (10.001, "takes at least 10.001 s, the chosen one 10.000 s"),
    ],
)
def test_reasons_are_no_contradictions(seconds: float, reason: str) -> None:
    """The best was settled at more seconds than those that another was stopped at."""
    first, second = configs(2)

    def evaluate(config: Degrees, _: float) -> Evaluation[str]:
        if config == second:
            raise NotBetter(seconds, seconds)
        return Evaluation("", 9.9, 9.0)

    result = searched([first, second], evaluate, lambda _: 0.0, settle=lambda answer: (answer, 10.0))
    assert {row.config: row.reason for row in result.considered} == {first: "the fastest", second: reason}


def test_the_fastest_change_places_once_they_are_settled() -> None:
    objectives = {1: 10.0, 2: 10.5, 3: 10.9, 4: 10.95, 5: 10.97, 6: 12.0}
    settled = {1: (1, 10.2), 2: (22, 9.9), 3: (3, 10.4), 4: (4, 10.1)}
    asked: list[int] = []

    def evaluate(config: Degrees, below: float) -> Evaluation[int]:
        number = config.microbatches
        if number == 7:
            raise NotBetter(10.1, 10.1)
        return Evaluation(number, objectives[number], 9.0 + number / 10)

    def settle(answer: int) -> tuple[int, float]:
        asked.append(answer)
        return settled[answer]

    result = searched(configs(8), evaluate, lambda config: 10.1 if config.microbatches == 8 else 1.0, settle=settle)
    # of the five within a tenth of the best the four fastest, the second with a better answer
    assert asked == [1, 2, 3, 4] and (result.answer, result.objective, result.bound) == (22, 9.9, 9.1)
    statuses = {item.config.microbatches: (item.status, item.seconds) for item in result.considered}
    assert statuses[2] == (Status.CHOSEN, 9.9) and statuses[1] == (Status.SLOWER, 10.2)
    assert statuses[5] == (Status.SLOWER, 10.97) and statuses[8] == (Status.PRUNED, 10.1)
    slower = searched(configs(1), evaluate, lambda config: 1.0, settle=lambda answer: (answer, 11.0))
    assert (slower.objective, slower.bound) == (11.0, 9.1)


def test_others_are_looked_at_where_what_is_settled_takes_longer_than_they_may() -> None:
    objectives = {1: 10.0, 2: 10.5, 3: 10.6, 4: 10.7, 5: 10.8, 6: 11.5, 7: 11.2, 8: 10.9}
    asked: list[tuple[int, float]] = []

    def evaluate(config: Degrees, below: float) -> Evaluation[int]:
        number = config.microbatches
        asked.append((number, below))
        if objectives[number] >= below > 10.95 or (number > 5 and below < 11.0):
            raise NotBetter(below, 9.0)
        return Evaluation(number, objectives[number], 9.0)

    def settle(answer: int) -> tuple[int, float]:
        return answer, {1: 12.0, 5: 11.4, 7: 11.3, 8: 11.6}.get(answer, 13.0)

    floors = {8: 10.9, 9: 11.35}
    result = searched(configs(9), evaluate, lambda config: floors.get(config.microbatches, 1.0), settle=settle)
    # the four fastest come out slower than 5, what was stopped (6 and 7), and what was ruled out (8) are known to be
    assert (result.answer, result.objective) == (7, 11.3)
    assert [item for item in asked if item[1] > 10.0] == [(1, math.inf), (6, 12.0), (7, 12.0), (8, 11.3)]
    statuses = {item.config.microbatches: item.status for item in result.considered}
    assert statuses[7] is Status.CHOSEN and statuses[9] is Status.PRUNED and statuses[6] is Status.SLOWER


def test_others_are_not_looked_at_for_less_than_they_are_worth() -> None:
    asked: list[tuple[int, float]] = []

    def evaluate(config: Degrees, below: float) -> Evaluation[int]:
        asked.append((config.microbatches, below))
        if config.microbatches > 1:
            raise NotBetter(below, 9.9)
        return Evaluation(1, 10.0, 9.9)

    for settled, tried in ((10.049, 2), (10.06, 3)):
        asked.clear()
        result = searched(configs(2), evaluate, lambda config: 1.0, settle={1: (1, settled)}.__getitem__)
        assert len(asked) == tried and (result.objective, result.bound) == (settled, 9.9)


def test_a_gap_of_one_candidate_is_the_gap_of_the_search() -> None:
    """The slower candidate may hide a better answer than the one found for it."""
    answers = {1: Evaluation("a", 10.0, 10.0), 2: Evaluation("b", 12.0, 8.0)}
    result = searched(configs(2), lambda config, below: answers[config.microbatches], lambda config: 1.0)
    assert (result.answer, result.bound) == ("a", 8.0)
    assert result.gap == pytest.approx(0.2)


def test_nothing_to_search() -> None:
    with pytest.raises(PlanError, match="no configuration"):
        searched([], lambda config, below: Evaluation(None, 0.0, 0.0), lambda config: 0.0)


def test_an_evaluation_has_seconds() -> None:
    with pytest.raises(ValueError, match="not seconds"):
        Evaluation(None, math.inf, 0.0)


def test_refined_bounds_say_what_is_evaluated_next() -> None:
    """Of the first by the estimates that of the smallest bound, which rules out the others; the last needs none."""
    taken = {1: 10.0, 2: 9.0, 3: 8.0, 4: 6.0, 5: 7.0, 6: 7.5}
    asked: list[int] = []
    refined: list[tuple[int, float]] = []

    def evaluate(config: Degrees, below: float) -> Evaluation[None]:
        asked.append(config.microbatches)
        return Evaluation(None, taken[config.microbatches], taken[config.microbatches])

    def refine(config: Degrees, below: float) -> float:
        refined.append((config.microbatches, below))
        return min(below, taken[config.microbatches] - 0.5)

    result = searched(
        [Degrees(1, 1, (), count, "1f1b") for count in taken],
        evaluate,
        lambda config: 6.0 if config.microbatches == 6 else 1.0,
        refine=refine,
        expected=lambda config, _: float(config.microbatches),
    )
    assert result.objective == 6.0 and asked == [4]
    # each up to the smallest that is known; once 4 takes 6.0 all are up to that, and 6 takes as long without
    assert refined[:5] == [(1, math.inf), (2, 9.5), (3, 8.5), (4, 7.5), (5, 5.5)]
    assert [count for count, _ in refined[5:]] == [5]


def test_what_takes_the_longest_to_search_comes_last_and_is_bounded_as_far_as_it_is_tried() -> None:
    """It is asked for once all else is known, and counts as several; behind those that are tried none is bounded."""
    bests: list[float] = []
    evaluated: list[int] = []
    refined: list[int] = []

    def evaluate(config: Degrees, below: float) -> Evaluation[None]:
        evaluated.append(config.microbatches)
        return Evaluation(None, 10.0 - config.microbatches, 0.0)

    def refine(config: Degrees, below: float) -> float:
        refined.append(config.microbatches)
        return config.microbatches / 100

    def slowest(best: Evaluation[None] | None) -> list[Degrees]:
        assert best is not None
        bests.append(best.objective)
        return configs(20)[2:]

    result = searched(
        configs(2),
        evaluate,
        lambda config: 0.0,
        refine=refine,
        slowest=slowest,
        most=3,
        tries=lambda config: 2.0 if config.microbatches > 2 else 1.0,
    )
    assert bests == [8.0] and evaluated == [1, 2, 3, 4] and result.objective == 6.0
    assert max(refined) < 4 + AHEAD < len(result.considered)


def test_what_is_ruled_out_is_not_evaluated() -> None:
    """It is asked of those that come next, once something fits, and what it says is a bound."""
    asked: list[tuple[int, float]] = []
    tried: list[int] = []

    def evaluate(config: Degrees, below: float) -> Evaluation[None]:
        tried.append(config.microbatches)
        if config.microbatches == 1:
            raise InfeasibleError("too large")
        return Evaluation(None, {2: 10.0, 4: 9.0}[config.microbatches], 8.5)

    def rules_out(config: Degrees, seconds: float) -> bool:
        asked.append((config.microbatches, seconds))
        return config.microbatches != 4

    floors = {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0, 5: 5.0, 6: 9.5}
    result = searched(configs(6), evaluate, lambda config: floors[config.microbatches], rules_out=rules_out)
    assert tried == [1, 2, 4] and asked == [(3, 10.0), (4, 10.0), (5, 9.0)]
    assert (result.objective, result.bound) == (9.0, 8.5)
    known = {item.config.microbatches: (item.status, item.seconds) for item in result.considered}
    assert known[3] == (Status.PRUNED, 10.0) and known[5] == (Status.PRUNED, 9.0) and known[6] == (Status.PRUNED, 9.5)


def test_what_can_gain_too_little_is_left() -> None:
    """It is neither refined nor tightened nor evaluated, and its bound counts; with less to gain asked for, it is."""
    taken, asked = {1: 10.0, 2: 9.7, 3: 9.8}, list[tuple[str, int]]()
    floors = {1: 9.0, 2: 9.6, 3: 9.7}

    def noting(name: str, seconds: dict[int, float]) -> Callable[[Degrees, float], float]:
        def found(config: Degrees, below: float) -> float:
            asked.append((name, config.microbatches))
            return seconds[config.microbatches]

        return found

    def evaluate(config: Degrees, below: float) -> Evaluation[None]:
        asked.append(("evaluate", config.microbatches))
        return Evaluation(None, taken[config.microbatches], taken[config.microbatches])

    def found(worth: float) -> SearchResult[None]:
        asked.clear()
        return searched(
            configs(3),
            evaluate,
            lambda config: floors[config.microbatches],
            refine=noting("refine", floors),
            tighten=noting("tighten", floors),
            tightened=3,
            last=3,
            worth=lambda config: 0.0 if config.microbatches == 1 else worth,
        )

    left = found(0.05)
    assert [name for name in asked if name[1] != 1] == []
    assert (left.objective, left.bound) == (10.0, 9.6)
    assert [item.status for item in left.considered] == [Status.CHOSEN, Status.UNTRIED, Status.UNTRIED]
    whole = found(0.0)
    assert (whole.objective, whole.bound) == (9.7, 9.7) and ("evaluate", 2) in asked
    assert found(0.035).objective == 9.7 and ("evaluate", 3) not in asked


def test_what_could_gain_too_little_is_asked_again_once_the_best_takes_longer() -> None:
    taken = {1: 10.0, 2: 9.9}
    result = searched(
        configs(2),
        lambda config, below: Evaluation(config.microbatches, taken[config.microbatches], 9.0),
        lambda config: 9.0 if config.microbatches == 1 else 9.8,
        settle=lambda answer: (answer, {1: 12.0, 2: 11.0}[answer]),
        worth=lambda config: 0.05,
    )
    assert (result.config.microbatches, result.objective) == (2, 11.0)


def test_the_smallest_bounds_are_tightened() -> None:
    """One after the other, until one stays the smallest or there have been enough."""
    configs = [Degrees(1, 1, (), count, "1f1b") for count in (1, 2, 3)]
    taken = dict(zip(configs, (10.0, 12.0, 14.0), strict=True))
    better = dict(zip(configs, (8.0, 9.0, 7.5), strict=True))

    def found(most: int) -> tuple[float, list[Degrees]]:
        asked: list[Degrees] = []

        def tighten(config: Degrees, below: float) -> float:
            asked.append(config)
            return better[config]

        result = searched(
            configs,
            lambda config, below: Evaluation("answer", taken[config], 5.0 + config.microbatches),
            lambda config: 5.0,
            tighten=tighten,
            tightened=most,
        )
        return result.bound, asked

    assert found(0) == (6.0, [])
    assert found(1) == (7.0, configs[:1])
    assert found(2) == (8.0, configs[:2])
    assert found(3) == (8.0, configs[:2])


def test_the_last_to_be_tried_are_those_of_the_smallest_bounds() -> None:
    """The estimates put the best one last; what is tightened beyond the best is not tried any more."""
    taken = {1: 10.0, 2: 9.0, 3: 6.0, 4: 8.0}
    asked: list[int] = []

    def evaluate(config: Degrees, below: float) -> Evaluation[None]:
        asked.append(config.microbatches)
        return Evaluation(None, taken[config.microbatches], taken[config.microbatches])

    def found(most_last: int, most_tightened: int = 0) -> tuple[float, float]:
        asked.clear()
        result = searched(
            [Degrees(1, 1, (), count, "1f1b") for count in taken],
            evaluate,
            lambda config: 5.0 - 0.5 * config.microbatches,
            expected=lambda config, _: float(config.microbatches),
            most=1,
            tighten=lambda config, below: 20.0 if config.microbatches == 4 else 0.0,
            tightened=most_tightened,
            last=most_last,
        )
        return result.objective, result.bound

    assert (found(0), asked) == ((10.0, 3.0), [1])
    assert (found(1), asked) == ((8.0, 3.5), [1, 4])
    assert (found(2), asked) == ((6.0, 4.0), [1, 4, 3])
    assert (found(1, 1), asked) == ((6.0, 4.0), [1, 3])
    assert (found(9, 9), asked) == ((6.0, 6.0), [1, 3, 2])


def test_those_left_untried_have_the_bound_that_they_share() -> None:
    """Not those that are known to be no better, nor those that were tried."""
    asked: list[tuple[int, float]] = []

    def shared_bound(config: Degrees, below: float) -> float:
        asked.append((config.microbatches, below))
        return 7.0

    result = searched(
        configs(5),
        lambda config, below: Evaluation(None, 10.0, 9.0),
        lambda config: {2: 4.0, 3: 8.0, 4: 5.0, 5: 11.0}.get(config.microbatches, 3.0),
        expected=lambda config, floor: float(config.microbatches),
        shared_bound=shared_bound,
        most=1,
    )
    assert result.bound == 7.0 and sorted(asked) == [(2, 10.0), (3, 10.0), (4, 10.0)]
    assert {item.config.microbatches: item.seconds for item in result.considered}[3] == 8.0


@pytest.mark.parametrize("fits", [True, False])
def test_what_surely_does_not_fit_is_evaluated_for_what_it_lacks_alone(fits: bool) -> None:
    """And then only those that lack least."""
    tried: list[int] = []

    def unfit(config: Degrees) -> InfeasibleError | None:
        lacks = 100 - config.microbatches
        return None if fits and config.microbatches == 7 else InfeasibleError(f"about {lacks}", lacks)

    def evaluate(config: Degrees, below: float) -> Evaluation[None]:
        tried.append(config.microbatches)
        if fits:
            return Evaluation(None, 1.0, 1.0)
        raise InfeasibleError(f"surely {200 - config.microbatches}", 200 - config.microbatches)

    if fits:
        result = searched(configs(9), evaluate, lambda config: 0.5, unfit=unfit)
        assert tried == [7] and result.bound == 1.0
        assert sum(item.status is Status.INFEASIBLE for item in result.considered) == 8
        return
    with pytest.raises(InfeasibleError, match=r"none of 9 configurations fits; the closest, .*=9 1f1b: surely 191"):
        searched(configs(9), evaluate, lambda config: 0.5, unfit=unfit)
    assert sorted(tried) == [7, 8, 9]
