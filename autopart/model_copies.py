"""Models that are alike, of which one is a copy of the other: they become the same program, divided alike.

Averages of weights, teachers and momentum encoders go over the parameters of both models in turn, so these have to be
divided alike, or other shares of a parameter would meet. When one of them is planned, those that it leads (see
:meth:`Twin._leads`) become the same program. A frozen one whose inputs turn out to be others is planned by itself.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from autopart.attribute_forms import Forms
from autopart.runtime.elsewhere import restore
from autopart.runtime.inputs import BatchMode, fits
from autopart.runtime.mesh import job_size
from autopart.runtime.module import ParallelModule
from autopart.stand_in import StandIn
from autopart.watched_attributes import attributes

if TYPE_CHECKING:
    from autopart.compiling import Compiler

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_numbers = itertools.count()
_made: WeakValueDictionary[int, Twin] = WeakValueDictionary()
"""All parallelized models, in the order in which they were made, which is the same on all ranks."""


@dataclass(frozen=True, slots=True)
class _Module:
    path: str
    type: type
    training: bool
    kinds: tuple[Any, ...]
    attributes: dict[str, Any]  # and hooks


@dataclass(frozen=True, slots=True)
class Likeness:
    """What a program follows from. trained: the names of parameters that are."""

    modules: tuple[_Module, ...]
    trained: frozenset[str]

    @staticmethod
    def of(model: nn.Module) -> Likeness:
        forms = Forms(model)
        return Likeness(
            tuple(
                _Module(
                    path,
                    type(module),
                    module.training == model.training,
                    _kinds(module),
                    {
                        **{name: [*map(forms.of, vars(module)[name].values())] for name in _HOOKS},
                        **{name: forms.of(value) for name, value in attributes(module)},
                    },
                )
                for path, module in model.named_modules(remove_duplicate=False)
            ),
            frozenset(name for name, parameter in model.named_parameters() if parameter.requires_grad),
        )

    def covers(self, other: Likeness) -> bool:
        """Whether a program of this one is right for the other. What cannot be compared is unlike."""
        if len(self.modules) != len(other.modules) or not other.trained <= self.trained:
            return False
        return all(
            (a.path, a.type, a.training, a.kinds) == (b.path, b.type, b.training, b.kinds)
            and _equal(a.attributes, b.attributes)
            for a, b in zip(self.modules, other.modules, strict=True)
        )


def _kinds(module: nn.Module) -> tuple[Any, ...]:
    named = [*module._parameters.items(), *module._buffers.items()]
    kinds = [
        (name,) if item is None else (name, type(item), tuple(item.shape), item.stride(), item.dtype, item.device)
        for name, item in named
    ]
    return kinds, set(module._non_persistent_buffers_set)


def _equal(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    try:
        return ours.keys() == theirs.keys() and all(
            torch.equal(value, theirs[name]) if isinstance(value, Tensor) else bool(value == theirs[name])
            for name, value in ours.items()
        )
    except Exception:  # of any object's own comparison
        return False


class Twin(StandIn):
    """A model that may become the program of another one."""

    def __init__(self, model: nn.Module, settings: dict[str, Any], batch: BatchMode) -> None:
        super().__init__(model)
        self._settings = settings
        self._batch: BatchMode = batch
        self._number = next(_numbers)
        self._likeness: Likeness | None = None  # as it was when it was planned
        self._followed = False  # has another's program, and was not called since
        self._directory: Path
        self._refusals: list[RemovableHandle] = []
        _made[self._number] = self

    @property
    @abc.abstractmethod
    def _compiler(self) -> Compiler:
        """On rank 0."""

    @abc.abstractmethod
    def _become(self, program: ParallelModule) -> None:
        """Goes on as this program."""

    @abc.abstractmethod
    def _load(self, made: Mapping[str, Tensor], device: torch.device) -> ParallelModule:
        """The program of ``_directory``, with the original's weights. made: buffers that were made for it."""

    def _twins(self) -> list[Self]:
        """Before this model is planned: those that the same program is for."""
        if not self._kept:
            return []
        self._likeness = Likeness.of(self.original)
        others = [other for other in _made.values() if other is not self and type(other) is type(self)]
        return [other for other in others if self._leads(other)]

    def _leads(self, other: Twin) -> bool:
        """Whether the other is to have this model's program: a deep copy, or one given the same settings and frozen.

        One that is planned already, as a teacher is that was called first, changes to this program where it is frozen.
        """
        is_copy, frozen = other._settings is self._settings, _frozen(other)
        if not is_copy and not (frozen and other._batch == self._batch and _alike(self._settings, other._settings)):
            return False
        if other.parallel is not None and not frozen:
            return False
        likeness = Likeness.of(other.original) if other._kept else other._likeness
        assert self._likeness is not None
        return likeness is not None and self._likeness.covers(Likeness(likeness.modules, _trained(other)))

    def _lead(self, twins: Iterable[Twin]) -> None:
        """Has them become this model's program. All ranks call it."""
        for other in _present(self, twins):
            assert self.parallel is not None
            if other.parallel is None:
                other._follow(self)
            elif other._directory != self._directory and _inputs(other.parallel) == _inputs(self.parallel):
                other._give_up_program()
                other._follow(self)

    def _follow(self, leader: Twin) -> None:
        """Becomes the program that the one it was copied from, or with, has become."""
        self._directory = leader._directory
        assert leader.parallel is not None
        if leader.parallel.mesh.rank == 0:
            self._compiler.follow(leader._compiler)
        self._likeness = leader._likeness
        self._become(self._load({}, leader.parallel.mesh.device))
        self._followed = True

    def _check_followed(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """At the first call of one that followed: where its inputs are others, it is planned by itself after all."""
        followed, self._followed = self._followed, False
        if followed and self.parallel is not None and _frozen(self) and not fits(self.parallel.manifest, args, kwargs):
            self._give_up_program()

    def _give_up_program(self) -> None:
        """Puts the whole weights back into the original, which nothing trains. All ranks call it."""
        program = self.parallel
        assert program is not None
        state = program.full_state_dict()
        for refusal in self._refusals:
            refusal.remove()
        tensors = [*self.original.named_parameters(), *self.original.named_buffers()]
        with torch.no_grad():
            for name, tensor in tensors:
                if name in state:
                    restore(tensor, state[name])
        object.__setattr__(self, "parallel", None)
        self.__dict__.pop("_compiler", None)


def _trained(model: Twin) -> frozenset[str]:
    return frozenset(name for name, parameter in model.original.named_parameters() if parameter.requires_grad)


def _frozen(model: Twin) -> bool:
    return not any(parameter.requires_grad for parameter in model.original.parameters())


def _inputs(program: ParallelModule) -> list[tuple[Any, ...]]:
    return [(i.name, i.kind, i.dtype, len(i.shape), i.batch_dim, i.constant) for i in program.manifest.inputs]


def _alike(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    names = [name for name in ours if name != "verbose"]
    return _equal({name: ours[name] for name in names}, {name: theirs[name] for name in names})


def _present(leader: Twin, wanted: Iterable[Twin]) -> list[Twin]:
    """Of these the ones that all ranks want, in the same order: garbage is collected when each likes."""
    mine = {other._number - leader._number: other for other in wanted}
    found: list[list[int]] = [[*mine]] * job_size()
    if job_size() > 1:
        dist.all_gather_object(found, [*mine])
    return [mine[at] for at in sorted(set(mine).intersection(*found))]
