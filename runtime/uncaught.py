"""What is added to an error of torch's that ends a script, where it met parts of a model: torch's words know of none.

A parameter that ranks divide has another shape than a copy that was made before, and one of another stage has no
gradient. Told in place, as for what has no elements here (:mod:`autopart.runtime.elsewhere`), it would cost each op of
each parameter, and optimizers their fast ways, which are for torch's own types. So nothing is looked at until an error
leaves the script.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from types import TracebackType
from typing import Any
from weakref import WeakSet

from torch import Tensor

from autopart.runtime.elsewhere import DIVIDED_ALIKE, ParameterElsewhere
from autopart.runtime.held_stages import HeldStages
from autopart.runtime.loading import tensors_in
from autopart.runtime.norms import divided

_PACKAGE = __name__.partition(".")[0]
_programs: WeakSet[HeldStages] = WeakSet()


def watch(program: HeldStages) -> None:
    """From now on errors that meet this program's parts are told of, if a rank has less than the whole model."""
    left_out = program.manifest.loss is not None and len(program.manifest.outputs) > 1
    if left_out or program.elsewhere or any(divided(spec, program.mesh) for spec in program.manifest.parameters):
        _programs.add(program)
        _install()


@cache
def _install() -> None:
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with suppress(Exception):  # the script's own error is what counts
            note = _note(error, trace)
            if note:
                error.add_note(note)
        before(kind, error, trace)

    sys.excepthook = hook


def _note(error: BaseException, trace: TracebackType | None) -> str:
    text, values = str(error), _seen(trace)
    if isinstance(error, RuntimeError) and ("size" in text or "shape" in text):
        met, numbers = {id(value) for value in values}, {int(number) for number in re.findall(r"\d+", text)}
        alike = []
        for name, tensor, shape in _shares():
            sizes = next((pair for pair in zip(shape, tensor.shape, strict=True) if pair[0] != pair[1]), None)
            if sizes and (id(tensor) in met or numbers.issuperset(sizes)):
                found = f"{name!r} of {list(shape)} is divided: this rank has {list(tensor.shape)} of it. "
                alike.append((id(tensor) not in met, found))
        if alike:
            return min(alike, key=lambda one: one[0])[1] + DIVIDED_ALIKE
    if isinstance(error, AttributeError | TypeError) and "NoneType" in text:
        for value in values:
            if isinstance(value, ParameterElsewhere):
                return f"{value.held} has no elements on this rank, and no gradient: pass over what has none"
    left_out = {name for program in [*_programs] for name in program.none_for}
    if isinstance(error, KeyError):
        left_out.intersection_update(error.args)
    elif not (isinstance(error, AttributeError | TypeError) and "NoneType" in text):
        left_out.clear()
    if left_out:
        return (
            "in training a parallel model returns its loss alone, and None for (or without) "
            f'{", ".join(map(repr, sorted(left_out)))}; parallelize(model, outputs="all") returns the rest as well'
        )
    return ""


def _shares() -> Iterator[tuple[str, Tensor, tuple[int, ...]]]:
    """Parameters and buffers of which this rank has a part, with their whole shapes."""
    for program in [*_programs]:
        specs = {spec.name: spec for spec in program.manifest.parameters}
        for name, tensor in tensors_in(program.stages, program.manifest).items():
            if divided(specs[name], program.mesh):
                yield name, tensor, specs[name].shape


def _seen(trace: TracebackType | None) -> list[Tensor]:
    """Tensors in the script's variables where the error was raised, the last first; none of an error of our own."""
    found: list[Tensor] = []
    while trace is not None:
        if str(trace.tb_frame.f_globals.get("__name__")).partition(".")[0] == _PACKAGE:
            return []
        for value in [*trace.tb_frame.f_locals.values()]:
            items: Any = value if isinstance(value, list | tuple) else (value,)
            found += (item for item in items if isinstance(item, Tensor))
        trace = trace.tb_next
    return found[::-1]
