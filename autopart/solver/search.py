"""The outer search: which degrees of parallelism, how many microbatches, which schedule.

:func:`degrees` enumerates the configurations of a number of devices; :func:`search` evaluates candidates, promising
ones first, and none whose lower bound exceeds the best found. With B the bound that an evaluation returns, or the
cheap lower bound of a candidate that was pruned or not tried, no candidate takes less than the smallest B.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from autopart.runtime.errors import InfeasibleError, PlanError
from autopart.solver.tensor_problem import relative_gap
from autopart.tensor_scheme import TensorScheme

Answer = TypeVar("Answer")
_RECOMPUTE = {"full": " recompute", "none": " no-recompute", "auto": ""}
MOST_AXES = 3
"""Tensor axes of a mesh: the 3-D scheme needs three."""
AHEAD = 8
"""Candidates whose bounds are compared before one of them is evaluated."""
NEAR, MOST_SETTLED = 0.1, 4
"""The share of the best within which answers may change places once they are settled, and how many are."""


@dataclass(frozen=True, slots=True)
class Degrees:
    """A configuration: pp ranks of the pipeline x dp replicas x tensor axes, and how a step runs on it.

    axes: sizes of the tensor axes, outermost first; a stage's devices are row-major over (dp, *axes), so that the last
    axis joins neighbours. microbatches: per replica and step. schedule: a schedule's name. recompute: layers whose
    activations are computed again in the backward: "none", "full" (all), "auto" (chosen). virtual: stages that each
    rank of the pipeline runs.
    """

    pp: int
    dp: int
    axes: tuple[int, ...]
    microbatches: int
    schedule: str
    recompute: str = "auto"
    virtual: int = 1

    def __post_init__(self) -> None:
        for name in ("pp", "dp", "microbatches", "virtual"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is at least 1, not {getattr(self, name)}")
        if len(self.axes) > MOST_AXES or any(size < 2 for size in self.axes):
            raise ValueError(f"at most {MOST_AXES} tensor axes of at least 2 devices each, not {self.axes}")
        if not self.schedule:
            raise ValueError("a configuration names its schedule")

    @property
    def tp(self) -> int:
        """Devices that share one replica of a stage."""
        return math.prod(self.axes)

    @property
    def devices(self) -> int:
        return self.pp * self.dp * self.tp

    @property
    def stages(self) -> int:
        return self.pp * self.virtual

    @property
    def runs(self) -> bool:
        """Whether the schedule takes as many microbatches."""
        if self.schedule == "interleaved":
            return self.microbatches % self.pp == 0
        return self.schedule != "2bw" or self.microbatches >= self.pp

    def __str__(self) -> str:
        virtual = f" x{self.virtual}" if self.virtual > 1 else ""
        recompute = _RECOMPUTE[self.recompute]
        tp = axes_text(self.axes)
        return f"pp={self.pp} dp={self.dp} tp={tp} microbatches={self.microbatches} {self.schedule}{virtual}{recompute}"


@dataclass(frozen=True, slots=True)
class UnlikeMeshes:
    """A configuration whose ``pp`` ranks of the pipeline have meshes of their own, which are chosen; see Degrees."""

    pp: int
    microbatches: int
    schedule: str
    recompute: str = "auto"
    virtual: int = 1

    def __post_init__(self) -> None:
        if min(self.pp, self.microbatches, self.virtual) < 1:
            raise ValueError(
                f"ranks, microbatches and stages on a rank are at least 1: {self.pp}, {self.microbatches}, "
                f"{self.virtual}"
            )

    @property
    def stages(self) -> int:
        return self.pp * self.virtual

    @property
    def equal(self) -> Degrees:
        """The same with one device for each rank of the pipeline."""
        return Degrees(self.pp, 1, (), self.microbatches, self.schedule, self.recompute, self.virtual)

    def __str__(self) -> str:
        recompute = _RECOMPUTE[self.recompute]
        virtual = f" x{self.virtual}" if self.virtual > 1 else ""
        return f"pp={self.pp} meshes=unlike microbatches={self.microbatches} {self.schedule}{virtual}{recompute}"


Config = Degrees | UnlikeMeshes
Candidate = TypeVar("Candidate", bound=Config)


def axes_text(axes: Sequence[int]) -> str:
    """``2x4`` for two axes, ``8`` for one, ``1`` for none."""
    return "x".join(map(str, axes)) or "1"


def read_axes(tp: int | Sequence[int] | str) -> int | tuple[int, ...]:
    """A tensor degree as users write it: a number, whose axes are free, or sizes (``"2x4"``, ``(2, 4)``).

    Raises PlanError for anything else.
    """
    if isinstance(tp, int):
        sizes: tuple[int, ...] = (tp,)
    elif isinstance(tp, str):
        parts = tp.split("x")
        if not all(part.isdecimal() for part in parts):
            raise PlanError(f"tp={tp!r} is neither a number of devices nor sizes of axes such as 2x4")
        sizes = tuple(map(int, parts))
    else:
        sizes = tuple(tp)
    if min(sizes, default=0) < 1 or (len(sizes) > 1 and min(sizes) < 2):
        raise PlanError(f"tp is at least 1, and each of several tensor axes at least 2, not {axes_text(sizes)}")
    if len(sizes) > MOST_AXES:
        raise PlanError(f"tp={axes_text(sizes)}: there are at most {MOST_AXES} tensor axes")
    return sizes[0] if len(sizes) == 1 else sizes


class Status(enum.Enum):
    CHOSEN = "chosen"
    SLOWER = "slower"
    PRUNED = "pruned"
    UNTRIED = "untried"
    INFEASIBLE = "infeasible"


@dataclass(frozen=True, slots=True)
class Evaluation(Generic[Answer]):
    """What evaluating a candidate gives. objective: seconds of its answer; bound: seconds that it takes at least."""

    answer: Answer
    objective: float
    bound: float

    def __post_init__(self) -> None:
        if not 0 <= self.objective < math.inf or math.isnan(self.bound):
            raise ValueError(f"not seconds: objective {self.objective}, bound {self.bound}")


class NotBetter(Exception):
    """An evaluation that was stopped, as it would have taken no less than what was asked for.

    seconds: that it would have taken at least. bound: as Evaluation.bound.
    """

    def __init__(self, seconds: float, bound: float) -> None:
        super().__init__(f"takes at least {seconds:.6g} s")
        self.seconds, self.bound = seconds, bound


@dataclass(frozen=True, slots=True)
class Considered:
    """What became of a candidate.

    seconds: its objective, for one that was not tried its lower bound, for an infeasible one None. reason: for people.
    """

    config: Config
    status: Status
    seconds: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class SearchResult(Generic[Answer]):
    """The best candidate. bound: seconds that every candidate takes at least. gap: (objective - bound) / objective.

    considered: every candidate in the order of the search.
    """

    config: Config
    answer: Answer
    objective: float
    bound: float
    gap: float
    considered: tuple[Considered, ...]


@dataclass(slots=True, eq=False)
class _Ahead(Generic[Candidate]):
    """A candidate that may be next. first: what it is ordered by; known: seconds up to which its bound was refined."""

    config: Candidate
    first: float
    floor: float
    known: float = 0.0

    @property
    def key(self) -> float:
        return max(self.first, self.floor)

    def wants(self, most_seconds: float) -> bool:
        """Whether its bound is to be refined, where seconds below these are of interest."""
        return self.known <= self.floor < most_seconds


_Outcome = Evaluation[Answer] | InfeasibleError | NotBetter | None


def search(
    candidates: Iterable[Candidate],
    evaluate: Callable[[Candidate, float], Evaluation[Answer]],
    lower_bound: Callable[[Candidate], float],
    *,
    refine: Callable[[Candidate, float], float] | None = None,
    order: Callable[[Candidate], float] | None = None,
    most: int | None = None,
    more: Callable[[Evaluation[Answer] | None], Iterable[Candidate]] | None = None,
    tighten: Callable[[Candidate, float], float] | None = None,
    most_tightened: int = 0,
    most_last: int = 0,
    settle: Callable[[Answer], float] | None = None,
) -> SearchResult[Answer]:
    """Evaluates candidates until no other can be faster.

    evaluate: solves one candidate; raises InfeasibleError when it has no solution, and may raise NotBetter where it
    takes as long as the seconds that are given. lower_bound: cheap seconds that a candidate takes at least, infinite
    when it cannot run at all. refine: a better bound, for those that it may rule out or put behind others; of no
    interest beyond the seconds that are given. order: what comes first is smallest in it, the lower bound by default;
    of the AHEAD first, where bounds are refined, in the larger of both. most: evaluations, after which the rest is left
    untried once something
    fits. more: further candidates, asked for with the best evaluation of the first. tighten: a bound that takes
    longer, for up to ``most_tightened`` of those whose bound is the smallest in the end. most_last: further evaluations
    then, of those left untried whose bound is the smallest. settle: seconds of an answer that were not known while it
    was evaluated; of the MOST_SETTLED fastest within NEAR of the best the one is chosen that takes the fewest. Raises
    InfeasibleError, with what the closest candidates lack, when none has a solution.
    """
    best: tuple[Candidate, Evaluation[Answer]] | None = None
    found: list[tuple[Candidate, float, _Outcome[Answer]]] = []

    def outcome_of(config: Candidate) -> _Outcome[Answer]:
        nonlocal best
        try:
            evaluation = evaluate(config, best[1].objective if best is not None else math.inf)
        except (InfeasibleError, NotBetter) as error:
            return error
        if best is None or evaluation.objective < best[1].objective:
            best = config, evaluation
        return evaluation

    def go_over(configs: Iterable[Candidate]) -> None:
        ranked = []
        for at, config in enumerate(configs):
            floor = lower_bound(config)
            ranked.append((floor if order is None else order(config), floor, at, config))
        left = deque(sorted(ranked, key=lambda item: item[:3]))
        tried, ahead = 0, list[_Ahead[Candidate]]()
        while left or ahead:
            while left and len(ahead) < (1 if refine is None else AHEAD):
                first, floor, _, config = left.popleft()
                ahead.append(_Ahead(config, first, floor))
            next_ = min(ahead, key=lambda item: item.key)
            of_interest = [best[1].objective] if best is not None else [item.key for item in ahead if item.known]
            if refine is not None and next_.wants(most_seconds := min(of_interest, default=math.inf)):
                next_.floor = max(next_.floor, refine(next_.config, most_seconds))
                next_.known = most_seconds
                continue
            ahead.remove(next_)
            config, floor = next_.config, next_.floor
            if best is not None and (floor >= best[1].objective or (most is not None and tried >= most)):
                found.append((config, floor, None))
                continue
            tried += 1
            found.append((config, floor, outcome_of(config)))

    go_over(candidates)
    if more is not None:
        go_over(more(best[1] if best is not None else None))
    if not found:
        raise PlanError("no configuration to search; allow more degrees of parallelism or schedules")
    if best is None:
        raise _none_feasible(
            [(config, outcome) for config, _, outcome in found if isinstance(outcome, InfeasibleError)]
        )
    bounds = {
        at: floor if outcome is None else max(floor, outcome.bound)
        for at, (_, floor, outcome) in enumerate(found)
        if not isinstance(outcome, InfeasibleError)
    }
    tightened: set[int] = set()
    last: set[int] = set()
    while bounds:
        lowest = min(bounds, key=lambda at: bounds[at])
        config, floor, outcome = found[lowest]
        if bounds[lowest] >= best[1].objective:
            break
        if tighten is not None and lowest not in tightened and len(tightened) < most_tightened:
            tightened.add(lowest)
            bounds[lowest] = max(bounds[lowest], tighten(config, best[1].objective))
            continue
        untried = [at for at in bounds if found[at][2] is None and bounds[at] < best[1].objective]
        if not untried or len(last) == most_last:
            break
        lowest = min(untried, key=lambda at: bounds[at])
        last.add(lowest)
        config, floor, _ = found[lowest]
        outcome = outcome_of(config)
        found[lowest] = config, max(floor, bounds[lowest]), outcome
        if isinstance(outcome, InfeasibleError):
            del bounds[lowest]
        else:
            assert outcome is not None
            bounds[lowest] = max(bounds[lowest], outcome.bound)
    ruled_out = best[1].objective
    if settle is not None:
        fastest = sorted(
            (outcome.objective, at)
            for at, (_, _, outcome) in enumerate(found)
            if isinstance(outcome, Evaluation) and outcome.objective <= (1 + NEAR) * best[1].objective
        )
        settled = []
        for _, at in fastest[:MOST_SETTLED]:
            config, floor, outcome = found[at]
            assert isinstance(outcome, Evaluation)
            outcome = replace(outcome, objective=settle(outcome.answer))
            found[at] = config, floor, outcome
            settled.append((config, outcome))
        best = min(settled, key=lambda item: item[1].objective)
    config, chosen = best
    ruled_out = min(ruled_out, chosen.objective)
    bound = min([*bounds.values(), chosen.objective])
    return SearchResult(
        config=config,
        answer=chosen.answer,
        objective=chosen.objective,
        bound=bound,
        gap=relative_gap(chosen.objective, bound),
        considered=tuple(_considered(*item, chosen, ruled_out) for item in found),
    )


def degrees(
    devices: int,
    batch: int,
    *,
    pp: int | None = None,
    dp: int | None = None,
    tp: int | Sequence[int] | str | None = None,
    microbatches: int | None = None,
    schedules: Sequence[tuple[str, int]] = (("1f1b", 1),),
    recompute: str = "auto",
    max_pp: int | None = None,
    max_tp: int | None = None,
    max_axes: int = 1,
    scheme: TensorScheme = TensorScheme.AUTO,
) -> tuple[Degrees, ...]:
    """Every configuration of exactly ``devices`` devices whose microbatches divide a batch of ``batch`` samples.

    schedules: names with the stages on each rank. max_pp: stages in all. pp, dp, tp, microbatches: forced where given;
    tp as :func:`read_axes` takes it. max_axes: tensor axes that a tensor degree is factored
    into where neither its axes nor a scheme are given. Raises PlanError, saying what would do, when nothing matches.
    """
    wanted = None if tp is None else read_axes(tp)
    axes = wanted if isinstance(wanted, tuple) else None
    count = math.prod(wanted) if isinstance(wanted, tuple) else wanted
    for name, value in (("devices", devices), ("batch", batch), ("pp", pp), ("dp", dp)):
        if value is not None and value < 1:
            raise PlanError(f"{name} is at least 1, not {value}")
    if microbatches is not None and microbatches < 1:
        raise PlanError(f"microbatches is at least 1, not {microbatches}")
    if not schedules:
        raise PlanError("name at least one schedule")
    meshes = [
        mesh
        for mesh in _meshes(devices)
        if all(want in (None, have) for want, have in zip((pp, dp, count), mesh, strict=True))
        and (max_pp is None or mesh[0] <= max_pp)
        and (max_tp is None or mesh[2] <= max_tp)
    ]
    fitting = [mesh for mesh in meshes if (scheme.fits(axes) if axes else _axes_of(mesh[2], scheme, max_axes))]
    if meshes and not fitting:
        raise PlanError(_no_scheme(scheme, devices, axes or sorted({mesh[2] for mesh in meshes})))
    meshes = fitting
    if not meshes:
        raise PlanError(_no_mesh(devices, {"pp": pp, "dp": dp, "tp": count}, {"pp": max_pp, "tp": max_tp}))
    result = tuple(
        config
        for pp, dp, tensor in meshes
        if batch % dp == 0
        for sizes in ([axes] if axes else _axes_of(tensor, scheme, max_axes))
        for pieces in _divisors(batch // dp)
        if microbatches in (None, pieces)
        for schedule, virtual in schedules
        if (config := Degrees(pp, dp, sizes, pieces, schedule, recompute, virtual)).runs
        and (max_pp is None or config.stages <= max_pp)
    )
    if not result:
        raise PlanError(_no_batch(batch, sorted({mesh[1] for mesh in meshes}), microbatches))
    return result


def factorizations(tensor: int, most: int) -> tuple[tuple[int, ...], ...]:
    """All ways to write a tensor degree as at most ``most`` ordered axes, fewest axes first; one way, (), for 1.

    The order decides which link an axis lies on.
    """
    if tensor == 1:
        return ((),)
    found: list[tuple[int, ...]] = [(tensor,)]
    if most > 1:
        for outer in _divisors(tensor)[1:-1]:
            found += [(outer, *inner) for inner in factorizations(tensor // outer, most - 1)]
    return tuple(sorted(found, key=lambda sizes: (len(sizes), sizes)))


def _axes_of(tensor: int, scheme: TensorScheme, most: int) -> tuple[tuple[int, ...], ...]:
    found = factorizations(tensor, most if scheme is TensorScheme.AUTO else MOST_AXES)
    return tuple(axes for axes in found if scheme.fits(axes))


def _considered(
    config: Config, floor: float, outcome: _Outcome[Answer], chosen: Evaluation[Answer], ruled_out: float
) -> Considered:
    """ruled_out: seconds from which a bound kept candidates from being tried."""
    if outcome is None:
        reason = f"takes at least {floor:.6g} s, the chosen one {chosen.objective:.6g} s"
        return Considered(config, Status.PRUNED if floor >= ruled_out else Status.UNTRIED, floor, reason)
    if isinstance(outcome, NotBetter):
        reason = f"{outcome}, the chosen one {chosen.objective:.6g} s"
        return Considered(config, Status.PRUNED, outcome.seconds, reason)
    if isinstance(outcome, InfeasibleError):
        return Considered(config, Status.INFEASIBLE, None, str(outcome))
    if outcome is chosen:
        return Considered(config, Status.CHOSEN, outcome.objective, "the fastest")
    share = outcome.objective / chosen.objective - 1 if chosen.objective else 0.0
    return Considered(config, Status.SLOWER, outcome.objective, f"{share:.1%} slower than the chosen one")


def _none_feasible(failures: Sequence[tuple[Config, InfeasibleError]]) -> InfeasibleError:
    """The failure that is closest to fitting speaks for all; failures are in the order of the search, fastest first."""
    config, closest = min(failures, key=lambda item: math.inf if item[1].excess_bytes is None else item[1].excess_bytes)
    count = len(failures)
    which = "the only configuration" if count == 1 else f"none of {count} configurations fits; the closest"
    return InfeasibleError(f"{which}, {config}: {closest}", closest.excess_bytes)


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def _meshes(devices: int) -> Iterator[tuple[int, int, int]]:
    """Every (pp, dp, tp) whose product is ``devices``."""
    for pp in _divisors(devices):
        for tp in _divisors(devices // pp):
            yield pp, devices // pp // tp, tp


def _no_mesh(devices: int, forced: dict[str, int | None], largest: dict[str, int | None]) -> str:
    wanted = [f"{name}={value}" for name, value in forced.items() if value is not None]
    wanted += [f"{name} at most {value}" for name, value in largest.items() if value is not None]
    product = math.prod(value or 1 for value in forced.values())
    if devices % product:
        below, above = devices // product * product, -(-devices // product) * product
        counts = " or ".join(str(count) for count in (below, above) if count)
        return f"{', '.join(wanted)} does not divide {devices} devices; {counts} devices would do"
    return (
        f"no pp x dp x tp makes {devices} devices with {', '.join(wanted)}; pp, dp and tp have to be divisors of "
        f"{devices} ({', '.join(map(str, _divisors(devices)))}) whose product it is"
    )


def _no_scheme(scheme: TensorScheme, devices: int, wanted: Sequence[int]) -> str:
    given = "x".join(map(str, wanted)) if isinstance(wanted, tuple) else " or ".join(map(str, wanted))
    would = [tp for tp in _divisors(devices) if _axes_of(tp, scheme, MOST_AXES)]
    which = f"of the divisors of {devices} devices "
    if not would:
        would, which = [tp for tp in range(2, 33) if _axes_of(tp, scheme, MOST_AXES)], "with other numbers of devices "
    return (
        f"the tensor scheme {scheme.value} lays the tensor devices of a stage on {scheme.shape} axes, which tp={given} "
        f"cannot be; tensor degrees that can: {which}{', '.join(map(str, would))}"
    )


def _no_batch(batch: int, replicas: Sequence[int], microbatches: int | None) -> str:
    units = sorted(dp * (microbatches or 1) for dp in replicas)
    sizes = sorted({size for unit in units for size in (batch // unit * unit, -(-batch // unit) * unit) if size})
    nearest = sorted(sizes, key=lambda size: (abs(size - batch), size))[:4]
    parts = f"dp={' or '.join(map(str, replicas))}" + (f" with microbatches={microbatches}" if microbatches else "")
    return (
        f"a batch of {batch} does not divide by {parts}; batch sizes that would do: "
        f"{', '.join(map(str, sorted(nearest)))} (multiples of {' or '.join(map(str, units))})"
    )
