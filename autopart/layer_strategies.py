"""The undominated strategies of one layer, seconds against bytes, with everything around it as a solved answer has it.

The placements of what enters and of what leaves the layer are those of the answer, so that any layers may take any of
their ways together: seconds and bytes of a mixture are sums. With S what parameters hold, A what ops keep for their
backward, and f microbatches in flight, over the layer's own choices x:

    undominated (seconds(x), S(x) + f A(x))       for the most and the fewest in flight of a stage,
                                                   and f = 0: of a layer that is computed again as a whole

each exactly by elimination (:mod:`autopart.solver.elimination`). By this measure each op's kept tensors count by
themselves, unless ``kept`` says otherwise, and the largest transient does not. Of more than MOST_WAYS those stay that
free the most bytes for their seconds (hulls), also where the layer is computed again, then evenly by bytes; and the
answer's own.

Where parameters choose levels of ZeRO, a layer has hundreds of undominated ways, one near the other, and on several
axes its graph may be too wide for elimination. Then it is the corners of their lower convex hull
(:mod:`autopart.solver.tensor_hull`): prices for bytes take the tensor solver a small part of what memory limits do.

:class:`Slack` says by how much any ways of the layers are faster than the answer's own.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from torch import fx

from autopart.folding import FoldedPart, is_stored
from autopart.prices import Chosen
from autopart.runtime.errors import PlanError
from autopart.runtime.placement import Placements
from autopart.solver import cache, elimination, tensor_hull
from autopart.solver.tensor_problem import Choice, Op, TensorProblem
from autopart.solver.tensor_sums import Weights
from autopart.tensor_choice import Builder, TensorChoice, stored_as

MOST_WAYS = 8
MOST_SETTINGS = 50_000
"""Of a table of elimination of a frontier; with more, prices for bytes are faster."""
_LOOSE = 0.03
"""The gap of a corner that a solver is asked for by itself: a way that is offered need not be the best at its price."""


@dataclass(frozen=True, slots=True)
class Way:
    """How a layer is run. taken: of each class of the layer its strategies, or its storage with a level of ZeRO.

    seconds: per microbatch, the step's end divided among them. state_bytes: of parameters. kept_bytes: of one
    microbatch for its backward. again_s: of its ops' forward, which the layer takes more where it is computed again.
    """

    seconds: float
    state_bytes: float
    kept_bytes: float
    taken: tuple[tuple[Chosen, int], ...]
    again_s: float = 0.0

    def undercuts(self, other: Way) -> bool:
        """Neither slower nor larger."""
        amounts = zip(self._amounts, other._amounts, strict=True)
        return all(mine <= theirs for mine, theirs in amounts)

    @property
    def _amounts(self) -> tuple[float, float, float]:
        return self.seconds, self.state_bytes, self.kept_bytes

    def held(self, in_flight: int) -> float:
        return self.state_bytes + in_flight * self.kept_bytes


@dataclass(frozen=True, slots=True)
class Slack:
    """Seconds of a microbatch that no ways of a layer save beyond these, against the answer's own.

    all: with the step's end. work: of ops and conversions alone.
    """

    all: float = 0.0
    work: float = 0.0


@dataclass(frozen=True, slots=True)
class _Local:
    """A layer's problem. Memory of choices: of parameters, or of what one microbatch keeps.

    ways: of each class what its choices are. forward: seconds of a class's ops under one of them. own: the answer's
    choices. elsewhere: edges of values that come in, and that others read too.
    """

    problem: TensorProblem
    ways: tuple[tuple[tuple[Chosen, int], ...], ...]
    forward: Callable[[int, Chosen], float]
    stored: tuple[bool, ...]
    own: tuple[int, ...]
    elsewhere: frozenset[int]

    def weighted(self, in_flight: int) -> TensorProblem:
        """With so many microbatches kept."""
        ops = [
            op if stored else _with(op, lambda choice: replace(choice, memory=choice.memory * in_flight))
            for op, stored in zip(self.problem.ops, self.stored, strict=True)
        ]
        return replace(self.problem, ops=tuple(ops))

    def floor(self, free: bool) -> TensorProblem:
        """What the layer costs at least in any mixture. free: parameters cost nothing."""
        ops = [
            _with(op, lambda choice: replace(choice, cost=0.0)) if free and stored else op
            for op, stored in zip(self.problem.ops, self.stored, strict=True)
        ]
        edges = [edge for index, edge in enumerate(self.problem.edges) if index not in self.elsewhere]
        return replace(self.problem, ops=tuple(ops), edges=tuple(edges))

    def way(self, choices: Sequence[int]) -> Way:
        chosen = [op.choices[index] for op, index in zip(self.problem.ops, choices, strict=True)]
        pairs = list(zip(chosen, self.stored, strict=True))
        state, kept = (math.fsum(choice.memory for choice, own in pairs if own is stored) for stored in (True, False))
        taken = tuple(own[index] for own, index in zip(self.ways, choices, strict=False))
        again = math.fsum(
            self.forward(at, chosen)
            for at, ((chosen, _), stored) in enumerate(zip(taken, self.stored, strict=False))
            if not stored
        )
        return Way(self.problem.objective(choices), state, kept, taken, again)


@dataclass(slots=True)
class LayerStrategies:
    """Finds the ways of layers around one answer; equal layers with equal surroundings share them.

    builder: of the answer's problem. in_flight: the measures of memory. kept: by class of ops, bytes that each keeps by
    choice, where these are not what it keeps by itself. again: whether layers may be computed again. fastest: by
    :meth:`around` the least seconds of a layer, with parameters and without; around other answers of the same problem
    they are the same.
    """

    builder: Builder
    answer: TensorChoice
    in_flight: Sequence[int]
    time_limit_s: float = 60.0
    kept: Mapping[tuple[str, ...], NDArray[np.float64]] = field(default_factory=dict)
    again: bool = True
    fastest: dict[object, tuple[float, ...]] = field(default_factory=dict)
    _numbers: dict[tuple[str, ...], int] = field(default_factory=dict)  # of folded classes
    _ways: dict[object, tuple[Way, ...]] = field(default_factory=dict)
    _slack: dict[object, Slack] = field(default_factory=dict)

    def __post_init__(self) -> None:
        classes = self.builder.analysis.classes
        self._numbers = {classes[nodes[0]]: index for index, nodes in enumerate(self.builder.folded.classes)}

    def ways(self, part: FoldedPart) -> tuple[Way, ...]:
        """The fastest first, the answer's own among them."""
        key = self.alike(part)
        if key not in self._ways:
            local = self._local(part)
            found = {way: None for flying in self.in_flight for way in self._frontier(local, flying)}
            few, own = _few(list(found), self.in_flight, self.again), local.way(local.own)
            if not any(way.undercuts(own) for way in few):
                few = sorted((*few, own), key=lambda way: (way.seconds, way.held(max(self.in_flight))))
            self._ways[key] = tuple(few)
        return self._ways[key]

    def slack(self, part: FoldedPart) -> Slack:
        key = self.alike(part)
        if key not in self._slack:
            local, around = self._local(part), self.around(part)
            floors = [local.floor(free) for free in (False, True)]
            if around not in self.fastest:
                self.fastest[around] = tuple(map(self._least_seconds, floors))
            mine = [replace(floor, edges=local.problem.edges).objective(local.own) for floor in floors]
            self._slack[key] = Slack(*(own - least for own, least in zip(mine, self.fastest[around], strict=True)))
        return self._slack[key]

    def _least_seconds(self, problem: TensorProblem) -> float:
        """Of any choices, where nothing is limited."""
        try:
            (choices,) = tensor_hull.eliminator(problem)([(1.0, 0.0)])
        except PlanError:
            return cache.solve(problem, self.time_limit_s, self.builder.gap).bound
        assert choices is not None, "the answer's own are possible"
        return problem.objective(choices)

    def own(self, part: FoldedPart) -> Way:
        """The answer's own."""
        local = self._local(part)
        return local.way(local.own)

    def least_seconds(self, parts: Iterable[FoldedPart]) -> tuple[float, float]:
        """What a microbatch takes at least in any mixture around the answer: in all, and without its parameters."""
        builder, solution = self.builder, self.answer.solution
        assert solution is not None, "there are tensor axes"
        parameters = 0.0
        for nodes in builder.folded.classes:
            if is_stored(nodes[0]):
                parameters += builder.op(nodes).choices[self._taken(nodes[0], builder.ways(nodes[0]))].cost
        slack = [self.slack(part) for part in parts]
        work = solution.objective - parameters
        return solution.objective - math.fsum(item.all for item in slack), work - math.fsum(item.work for item in slack)

    def _frontier(self, local: _Local, in_flight: int) -> Iterator[Way]:
        problem = local.weighted(in_flight)
        points: Sequence[elimination.Point] = ()
        if len(self.builder.levels) == 1:
            with contextlib.suppress(PlanError):  # tables that are too wide
                points = elimination.frontier(problem, most_settings=MOST_SETTINGS)
        for point in points or tensor_hull.hull(problem, self._least(problem), MOST_WAYS):
            yield local.way(point.choices)

    def _least(self, problem: TensorProblem) -> Callable[[Sequence[Weights]], Sequence[Sequence[int] | None]]:
        """What answers for the hull."""
        try:
            return tensor_hull.eliminator(problem)
        except PlanError:
            return lambda weights: [
                cache.solve(tensor_hull.weighed(problem, pair), self.time_limit_s, _LOOSE).choices for pair in weights
            ]

    def around(self, part: FoldedPart) -> object:
        """Equal for layers, also of other answers, that have the same ways but for the answer's own."""
        entering = tuple(self.builder.id_of(item) for node in part.outside for item in self._lies(node))
        leaving = tuple(self.builder.id_of(self._lies(part.classes[at][0])[slot]) for at, slot in part.leaving)
        return part.signature, entering, leaving

    def alike(self, part: FoldedPart) -> object:
        """Equal for layers that have the same ways."""
        # strategies by identity, as hashing them costs more; the answer keeps them alive
        answer = self.answer
        around = tuple(self.builder.id_of(item) for node in part.outside for item in self._lies(node))
        names = [node.meta.get("name", "") for node, *_ in part.classes]
        taken = tuple(
            (answer.storage[name], answer.levels.get(name, 0)) if is_stored(node) else id(answer.strategies[node])
            for name, (node, *_) in zip(names, part.classes, strict=True)
        )
        return part.signature, around, taken

    def _taken(self, node: fx.Node, ways: Sequence[tuple[Chosen, int]]) -> int:
        """Which of the ways of an op, or of what is stored, the answer takes."""
        if not is_stored(node):
            return ways.index((self.answer.strategies[node], 0))
        name = node.meta["name"]
        made = [(stored_as(chosen), level) for chosen, level in ways]
        return made.index((self.answer.storage[name], self.answer.levels.get(name, 0)))

    def _lies(self, node: fx.Node) -> tuple[Placements, ...]:
        """How the answer has an op's results, or what is stored."""
        if is_stored(node):
            return (self.answer.storage[node.meta["name"]],)
        return tuple(zip(*(strategy.outputs for strategy in self.answer.strategies[node]), strict=True))

    def _local(self, part: FoldedPart) -> _Local:
        builder, classes = self.builder, self.builder.analysis.classes
        ops: list[Op] = []
        ways: list[tuple[tuple[Chosen, int], ...]] = []
        own: list[int] = []
        for index, nodes in enumerate(part.classes):
            folded = builder.folded.classes[self._numbers[classes[nodes[0]]]]
            share, lies = len(nodes) / len(folded), tuple(map(builder.id_of, self._lies(nodes[0])))
            slots = [slot for number, slot in part.leaving if number == index]
            offered = builder.op(folded).choices
            if classes[nodes[0]] in self.kept:
                sizes = (self.kept[classes[nodes[0]]] * len(folded)).tolist()
                offered = tuple(replace(c, memory=size) for c, size in zip(offered, sizes, strict=True))
            found = [
                (choice, way)
                for choice, way in zip(offered, builder.ways(folded[0]), strict=True)
                if all(choice.outputs[slot] == lies[slot] for slot in slots)
            ]
            choices = [replace(c, cost=c.cost * share, memory=c.memory * share) for c, _ in found]
            ops.append(Op(nodes[0].name, tuple(choices)))
            ways.append(tuple(way for _, way in found))
            own.append(self._taken(nodes[0], ways[-1]))
        ops += [
            Op(node.name, (Choice("as it lies", 0.0, tuple(map(builder.id_of, self._lies(node)))),))
            for node in part.outside
        ]
        placements = list(builder.setting.shared.ids)
        edges = tuple(builder.edge(value, ops, placements) for value in part.values)
        inner = {node for nodes in part.classes for node in nodes}
        elsewhere = frozenset(
            index
            for index, value in enumerate(part.values)
            if value.source >= len(part.classes)
            and any(node not in inner for node, _ in builder.folded.readers[value.example])
        )
        stored = (*(is_stored(nodes[0]) for nodes in part.classes), *(True for _ in part.outside))
        prices, sizes = builder.setting.prices, builder.setting.sizes

        def forward(at: int, chosen: Chosen) -> float:
            return len(part.classes[at]) * prices.op_seconds(part.classes[at][0], chosen, sizes)[0]

        problem, own_choices = TensorProblem(tuple(ops), edges), (*own, *(0 for _ in part.outside))
        return _Local(problem, tuple(ways), forward, stored, own_choices, elsewhere)


def _few(ways: Sequence[Way], in_flight: Sequence[int], again: bool) -> list[Way]:
    """At most MOST_WAYS of the undominated ways, the fastest first: those that lie farthest below others on the hulls
    of seconds and bytes, with so many microbatches in flight, of layers that are kept and, with ``again``, of those
    that are computed again.
    """

    def place(point: tuple[float, float, Way]) -> Weights:
        return point[:2]

    hulls, most = [], max(in_flight)
    for flying in (count for count in in_flight if count or not most):
        points = [(way.seconds, way.held(flying), way) for way in ways]
        if again:
            points += [(way.seconds + way.again_s, way.state_bytes, way) for way in ways]
        hulls.append(tensor_hull.farthest_first(tensor_hull.corners(points, place), place))
    hull = dict.fromkeys(point[2] for column in itertools.zip_longest(*hulls) for point in column if point is not None)
    chosen, rest = list(hull)[:MOST_WAYS], sorted((way for way in ways if way not in hull), key=lambda w: w.held(most))
    missing = MOST_WAYS - len(chosen)
    if missing and rest:
        chosen += rest[:: math.ceil(len(rest) / missing)]
    return sorted(chosen, key=lambda way: (way.seconds, way.held(most)))


def _with(op: Op, change: Callable[[Choice], Choice]) -> Op:
    return Op(op.name, tuple(map(change, op.choices)))
