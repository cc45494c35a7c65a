"""Loops over the parameters of two parallelized models in turn, as averages of weights go: both are divided alike.

A rank has shares of its own stages' parameters, and of others nothing. Where two models are divided otherwise, ``zip``
would pair other shares of a parameter, in silence where their shapes are equal.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from autopart.runtime.errors import PlanError
from autopart.runtime.manifest import ParameterSpec
from autopart.runtime.placement import Placement
from autopart.runtime.saved_parts import boxes_on
from autopart.runtime.shares import Box, whole

if TYPE_CHECKING:
    from autopart.stand_in import StandIn

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class _Part:
    """What a rank has of a parameter, which is the ``number``-th of the original. Names are for messages alone."""

    name: str = field(compare=False)
    number: int
    boxes: tuple[Box, ...]


Parts = tuple[_Part, ...]
_steps = itertools.count(1)


class _Walk:
    """A loop over a model's parameters that has begun and not ended.

    moved: when it gave the last one. place: the frame that asked for it, and the instruction there.
    """

    def __init__(self, model: StandIn) -> None:
        self.model, self.moved, self.thread = model, 0, threading.get_ident()
        self.place = (0, 0)
        self.checked: set[int] = set()


_walks: list[_Walk] = []


def walk(model: StandIn, items: Iterable[Item]) -> Iterator[Item]:
    """The items. Raises PlanError where another model's, divided otherwise, are gone over in turn with them."""
    own = _Walk(model)
    _walks.append(own)
    try:
        for item in items:
            asking = sys._getframe(1)
            own.place = (id(asking), asking.f_lasti)
            _check(own)
            own.moved = next(_steps)
            yield item
        _check(own)
    finally:
        _walks.remove(own)


def _check(own: _Walk) -> None:
    """One that began, or went on, after this one's last item and still goes on is in turn with it.

    At the first item it is one that the same instruction goes on with, as a loop over ``zip`` does and nested ones do
    not: then nothing was done with any pair yet.
    """
    for other in _walks:
        in_turn = other.moved > own.moved if own.moved else other.place == own.place
        if in_turn and other.thread == own.thread and other.model is not own.model and id(other) not in own.checked:
            own.checked.add(id(other))
            _check_alike(own.model, other.model)


def _check_alike(one: StandIn, other: StandIn) -> None:
    if one.parallel is None and other.parallel is None:
        return
    ours, theirs = _parts(one), _parts(other)
    if ours == theirs and _divisions(one) == _divisions(other):  # the second for all ranks to raise
        return
    pairs = enumerate(itertools.zip_longest(ours, theirs))
    found = [
        f"on this rank number {at} is {_described(mine)} of one and {_described(its)} of the other"
        for at, (mine, its) in pairs
        if mine != its
    ]
    raise PlanError(
        f"parameters of two parallelized models are gone over in turn, and their plans divide them otherwise: "
        f"{found[0] if found else 'other ranks have others'}. Models that are to be averaged or copied by parameters "
        "get the same plan as copies: copy.deepcopy(autopart.parallelize(model)) before the first call; or parallelize "
        "both with the same arguments before either is called, the copy frozen by requires_grad_(False), and call both "
        "with the same inputs; or go by state_dict(), which is whole on every rank"
    )


def _divisions(model: StandIn) -> tuple[tuple[object, ...], ...]:
    """How each parameter is divided over the ranks, the same on all of them."""
    numbers = {name: number for number, (name, _) in enumerate(model.original.named_parameters())}
    if model.parallel is None:
        return tuple((number, (0,), ()) for number in numbers.values())
    specs = {name: spec for spec in model.parallel.manifest.parameters for name in (spec.name, *spec.aliases)}
    found = {name: specs[name] for name in numbers if name in specs}
    return tuple((numbers[name], spec.stages, spec.by_stage or _shards(spec)) for name, spec in found.items())


def _shards(spec: ParameterSpec) -> tuple[object, ...]:
    cut = tuple((axis, text) for axis, text in enumerate(spec.placements) if Placement.parse(text).is_shard)
    return (*cut, ("data", spec.data_dim)) if spec.zero else cut


def _parts(model: StandIn) -> Parts:
    """What this rank has of each parameter, in the order in which they are gone over."""
    originals = [name for name, _ in model.original.named_parameters()]
    if model.parallel is None:
        sizes = [tuple(parameter.shape) for parameter in model.original.parameters()]
        return tuple(_Part(name, at, whole(sizes[at])) for at, name in enumerate(originals))
    numbers = {name: number for number, name in enumerate(originals)}
    manifest, mesh = model.parallel.manifest, model.parallel.mesh
    specs = {name: spec for spec in manifest.parameters for name in (spec.name, *spec.aliases)}
    elsewhere = model.parallel.elsewhere
    return tuple(
        _Part(name, numbers.get(name, -1), () if specs[name].name in elsewhere else boxes_on(specs[name], mesh))
        for name, _ in model.parallel.named_parameters()
    )


def _described(part: _Part | None) -> str:
    if part is None or not part.boxes:
        return "none"
    if len(part.boxes) == 1 and not any(part.boxes[0].offset):
        return f"{part.name!r} {list(part.boxes[0].size)}"
    return f"a part of {part.name!r}"
