"""One stage, layers of several strategies: the ways of layers as choices of the stage problem.

Around an answer of the tensor solver every layer has its ways (:mod:`autopart.layer_strategies`), and each of these the
ways to compute modules of it again (:mod:`autopart.layer_frontier`). What costs what is taken from stage problems: one
in which all layers have their first way, and others in which runs of layers that are alike have one way after the other
(:class:`Samples`). The merged problem offers the undominated points of all ways
for each layer that lies in a stage as a whole, and its stages choose among them what is fastest and fits. What a way
changes at the step's end counts per microbatch. A layer that a stage's end parts has its fastest way.

The choices are then priced as one answer (:func:`applied`), so that nothing behind knows of ways.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopart.analysis import Analysis
from autopart.folding import FoldedPart, is_stored
from autopart.layer_strategies import Way
from autopart.solver.stages_choices import hull
from autopart.solver.stages_parts import Choice, Family, Layer, Shape
from autopart.solver.stages_problem import StageProblem, StageSolution, Step
from autopart.tensor_choice import TensorChoice, stored_as

MOST_POINTS = 16
MIXED = 0.9
"""Share of the layers that are mixed at least; a first or last one of many has the answer's strategies."""
# Share of the layers whose ways are all priced.
_SAMPLED = 0.75


def applied(answer: TensorChoice, ways: Mapping[str, Way], parts: Mapping[str, FoldedPart]) -> TensorChoice:
    """The answer with other ways of some layers."""
    strategies, storage, levels = dict(answer.strategies), dict(answer.storage), dict(answer.levels)
    for layer, way in ways.items():
        for nodes, (chosen, level) in zip(parts[layer].classes, way.taken, strict=True):
            for node in nodes:
                if not is_stored(node):
                    strategies[node] = chosen
                    continue
                name = node.meta["name"]
                storage[name] = stored_as(chosen)
                levels.pop(name, None)
                levels.update({name: level} if level else {})
    return replace(answer, strategies=strategies, storage=storage, levels=levels)


@dataclass(frozen=True, slots=True)
class Samples:
    """Which ways layers have in the problems by which ways are priced, few where many layers are alike.

    taken: by problem, of each layer the number of its way; 0 in the first. read: by layer, its further ways with the
    problem and the layer in it that has this way between neighbours that have it too, where these are alike.
    """

    taken: tuple[Mapping[str, int], ...]
    read: Mapping[str, Sequence[tuple[int, int, str]]]

    @staticmethod
    def of(groups: Collection[Sequence[str]], ways: Mapping[str, Sequence[Way]]) -> Samples:
        """groups: of layers that are alike, in the order of the model.

        There are as many problems as the larger groups need; layers of others may have fewer ways.
        """
        count = sum(map(len, groups))
        # neighbours that are alike take the same way: three layers or more for each
        needed = sorted((math.ceil((len(ways[own[0]]) - 1) / _at_once(own)), len(own)) for own in groups)
        done = itertools.accumulate(size for _, size in needed)
        rounds = next(number for (number, _), reached in zip(needed, done, strict=True) if reached >= _SAMPLED * count)
        taken = [
            {layer: min(number, len(ways[layer]) - 1) for own in groups for layer in own}
            for number in range(rounds + 1)
        ]
        read: dict[str, list[tuple[int, int, str]]] = {}
        for own in groups:
            last = len(ways[own[0]]) - 1
            offered = min(last, rounds * _at_once(own))
            numbers = [last - last * place // offered for place in reversed(range(offered))]
            found: list[tuple[int, int, str]] = []
            for number in range(1, rounds + 1):
                these = numbers[number - 1 :: rounds]
                ends = [len(own) * place // max(1, len(these)) for place in range(len(these) + 1)]
                for way, start, end in zip(these, ends, ends[1:], strict=False):
                    taken[number].update(dict.fromkeys(own[start:end], way))
                    found.append((way, number, own[(start + end) // 2]))
            read.update(dict.fromkeys(own, sorted(found)))
        return Samples(tuple(taken), read)


def _at_once(own: Sequence[str]) -> int:
    """How many ways of layers that are alike one problem prices."""
    return max(1, len(own) // 3)


def most_layers(groups: Collection[Sequence[str]]) -> set[str]:
    """The layers that are worth mixing: those of the largest groups of layers that are alike, MIXED of all at least."""
    most = MIXED * sum(map(len, groups))
    return {
        layer for own in groups if sum(len(other) for other in groups if len(other) > len(own)) < most for layer in own
    }


def merged(problems: Sequence[StageProblem], samples: Samples, analysis: Analysis) -> StageProblem:
    """The first problem, each of its layers with the points of all its ways. problems: those of ``samples``.

    The choices of whole layers are named by the number of their way, a colon, and their own name.
    """
    shapes = [problem.shapes[0] for problem in problems]
    flying = max(problems[0].in_flight), min(problems[0].in_flight)
    numbers = {analysis.layers[layer.blocks[0]]: number for number, layer in enumerate(shapes[0].layers)}
    counted: dict[tuple[int, int], Family] = {}

    def family(problem: int, number: int) -> Family:
        if (problem, number) not in counted:
            shape = shapes[problem]
            layer = shape.layers[number]
            counted[problem, number] = tuple(
                _counted(shapes[0], shape, layer, choice, problems[0].microbatches)
                for choice in layer.parts[layer.blocks]
            )
        return counted[problem, number]

    known: dict[object, Family] = {}
    layers = []
    for number, layer in enumerate(shapes[0].layers):
        others = samples.read[analysis.layers[layer.blocks[0]]]
        families = ((0, family(0, number)), *((way, family(problem, numbers[read])) for way, problem, read in others))
        if families not in known:
            known[families] = _undominated(families, flying)
        layers.append(replace(layer, parts={**layer.parts, layer.blocks: known[families]}))
    return replace(problems[0], shapes=(replace(shapes[0], layers=tuple(layers)),))


def way_of(choice: Choice) -> int:
    """The number of the way that a whole layer's choice is of."""
    return int(choice.name.split(":")[0])


def chosen_ways(
    problem: StageProblem, cut: StageSolution, ways: Mapping[str, Sequence[Way]], analysis: Analysis
) -> dict[str, Way]:
    """The way of each layer in a solution of the merged problem."""
    whole = {layer.blocks for layer in problem.shapes[0].layers}
    found = {layer: own[0] for layer, own in ways.items()}
    for step in cut.way:
        for (part, _), choice in zip(problem.units(step), problem.chosen(step), strict=True):
            if part in whole:
                layer = analysis.layers[part[0]]
                found[layer] = ways[layer][min(way_of(choice), len(ways[layer]) - 1)]
    return found


def carried(problem: StageProblem, cut: StageSolution, priced: StageProblem) -> tuple[Step, ...] | None:
    """A solution of the merged problem as one of that in which each layer has its way alone; None where a layer cannot
    be run so there.
    """
    found = []
    for step in cut.way:
        choices, families = dict[int, int](), dict(priced.units(step))
        for (part, _), choice in zip(problem.units(step), problem.chosen(step), strict=True):
            name = choice.name.rpartition(":")[2]
            if not name:  # all is kept, which is the first choice of each
                continue
            number = next((at for at, other in enumerate(families.get(part, ())) if other.name == name), None)
            if number is None:
                return None
            choices.update(dict.fromkeys(part, number))
        found.append(replace(step, choices=tuple(sorted(choices.items()))))
    return tuple(found)


def _counted(first: Shape, shape: Shape, layer: Layer, choice: Choice, microbatches: int) -> Choice:
    """A layer's choice with what it changes elsewhere: the step's end, and tensors kept together with other layers."""
    ends = [math.fsum(own.blocks[block].step_end_s for block in layer.blocks) for own in (first, shape)]
    inside = set(layer.blocks)
    together = 0.0
    if shape.kept != first.kept:
        # beyond the first problem's, which its stages have
        mine, others = (
            math.fsum(group.bytes for group in own.kept if not inside.isdisjoint(group.blocks))
            for own in (shape, first)
        )
        together = max(0.0, mine - others)
    return replace(
        choice,
        backward_s=max(0.0, choice.backward_s + (ends[1] - ends[0]) / microbatches),
        activation_bytes=choice.activation_bytes + together,
    )


def _undominated(families: Sequence[tuple[int, Family]], flying: tuple[int, int]) -> Family:
    """The points of all families that none undercuts, the first family's first at their head."""
    number, (fastest, *_) = families[0]
    first = replace(fastest, name=f"{number}:{fastest.name}")
    points = []
    for number, family in families:
        for choice in family:
            # a stage problem's first choice is the fastest, forward and backward; only their sum is weighed
            backward = max(first.backward_s, choice.seconds - first.forward_s)
            name = f"{number}:{choice.name}"
            points.append(replace(choice, forward_s=first.forward_s, backward_s=backward, name=name))
    kept = [first]
    for point in sorted(points, key=lambda item: (item.seconds, item.kept_bytes(flying[0]), item.transient_bytes)):
        if not any(other.undercuts(point) for other in kept):
            kept.append(point)
    return tuple(_few(kept, flying))


def _few(points: Sequence[Choice], flying: tuple[int, int]) -> Sequence[Choice]:
    """At most MOST_POINTS of them, in order: those on hulls, then those next to the first."""
    if len(points) <= MOST_POINTS:
        return points
    hulls = [hull(tuple(points), count, math.inf) for count in flying]
    kept = list(dict.fromkeys([0, *(index for own in hulls for _, _, index in own)]))[:MOST_POINTS]
    seconds, sizes, _ = zip(*reversed(hulls[0]), strict=True)

    def above(index: int) -> float:
        return points[index].seconds - float(np.interp(points[index].kept_bytes(flying[0]), sizes, seconds))

    rest = sorted((index for index in range(len(points)) if index not in kept), key=above)
    return [points[index] for index in sorted([*kept, *rest[: MOST_POINTS - len(kept)]])]
