"""One stage, layers of several strategies: the ways of layers as choices of the stage problem.

Around an answer of the tensor solver every layer has its ways (:mod:`autopart.layer_strategies`), and each of these the
ways to compute modules of it again (:mod:`autopart.layer_frontier`). What costs what is taken from stage problems in
which all layers have their first way, their second, and so on; the merged problem offers the undominated points of all
for each layer that lies in a stage as a whole, and its stages choose among them what is fastest and fits. What a way
changes at the step's end counts per microbatch. A layer that a stage's end parts has its fastest way.

The choices are then priced as one answer (:func:`applied`), so that nothing behind knows of ways.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopart.analysis import Analysis
from autopart.folding import FoldedPart, is_stored
from autopart.layer_strategies import Way
from autopart.solver.stages_choices import hull
from autopart.solver.stages_parts import Choice, Family, Layer, Shape
from autopart.solver.stages_problem import StageProblem, StageSolution
from autopart.tensor_choice import TensorChoice, stored_as

MOST_POINTS = 16


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


def merged(problems: Sequence[StageProblem]) -> StageProblem:
    """The first problem, each of its layers with the points of all. problems: of one shape, alike but for choices.

    The choices of whole layers are named by the number of their problem, a colon, and their own name.
    """
    shapes = [problem.shapes[0] for problem in problems]
    flying = max(problems[0].in_flight), min(problems[0].in_flight)
    known: dict[object, Family] = {}
    layers = []
    for number, layer in enumerate(shapes[0].layers):
        families = tuple(
            tuple(_counted(shapes[0], shape, layer, choice, problems[0].microbatches) for choice in own)
            for shape in shapes
            for own in (shape.layers[number].parts[layer.blocks],)
        )
        if families not in known:
            known[families] = _undominated(families, flying)
        layers.append(replace(layer, parts={**layer.parts, layer.blocks: known[families]}))
    return replace(problems[0], shapes=(replace(shapes[0], layers=tuple(layers)),))


def way_of(choice: Choice) -> int:
    """The number of the problem that a whole layer's choice is of."""
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


def _counted(first: Shape, shape: Shape, layer: Layer, choice: Choice, microbatches: int) -> Choice:
    """A layer's choice with what it changes elsewhere: the step's end, and tensors kept together with other layers."""
    ends = [math.fsum(own.blocks[block].step_end_s for block in layer.blocks) for own in (first, shape)]
    inside = set(layer.blocks)
    together = 0.0
    if shape.kept != first.kept:
        together = math.fsum(group.bytes for group in shape.kept if not inside.isdisjoint(group.blocks))
    return replace(
        choice,
        backward_s=max(0.0, choice.backward_s + (ends[1] - ends[0]) / microbatches),
        activation_bytes=choice.activation_bytes + together,
    )


def _undominated(families: Sequence[Family], flying: tuple[int, int]) -> Family:
    """The points of all families that none undercuts, the first family's first at their head."""
    first = replace(families[0][0], name=f"0:{families[0][0].name}")
    points = []
    for number, family in enumerate(families):
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
    """At most MOST_POINTS of them, in order: those on hulls, then evenly by bytes."""
    if len(points) <= MOST_POINTS:
        return points
    found = [index for count in flying for _, _, index in hull(tuple(points), count, math.inf)]
    rest = sorted((i for i in range(len(points)) if i not in found), key=lambda i: points[i].kept_bytes(flying[0]))
    kept = list(dict.fromkeys([0, *found]))[:MOST_POINTS]
    missing = MOST_POINTS - len(kept)
    if missing:
        kept += rest[:: max(1, math.ceil(len(rest) / missing))][:missing]
    return [points[index] for index in sorted(kept)]
