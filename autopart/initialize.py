"""Initial values of a model on meta, each rank making only what it holds.

What the constructors did under ``parameters_on_meta`` is on record (``autopart/recording.py``) and is done again,
tensor by tensor: the values are those that one process would have drawn. What came onto meta otherwise, as under
``torch.device("meta")``, is recorded here, from its modules' initializers, which need not be what constructors do.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autopart.recording import Op, Place, Recorder, seen_of
from autopart.replay import make, same_on_all_ranks, slice_of, values
from autopart.runtime.errors import PlanError
from autopart.runtime.holding import Entry, holding_of

Init = Callable[[nn.Module], object]


def prepare(model: nn.Module, init: Init | None = None, names: Collection[str] | None = None) -> None:
    """Sees that the history of all tensors on meta is known, those that no state dict holds included.

    init: called for each module, children first, as by ``model.apply(init)``. names: the parameters that are needed,
    None for all.
    Warns where values follow modules' own initializers instead of constructors. Raises PlanError for tensors that
    nothing writes.
    """
    unknown = _unknown(model, names)
    if unknown:
        with Recorder():
            _reset(model, {id(tensor) for tensor in unknown.values()})
    if init is not None:
        with Recorder(_place_after(model)):
            _in_order(model, init)
    lacking = _unknown(model, names)
    if lacking:
        homes = sorted({_home(model, name) for name in lacking})
        raise PlanError(
            f"the model is on meta, and nothing says how {', '.join(list(lacking)[:8])} start (in "
            f"{'; '.join(homes[:8])}): they have no reset_parameters, and their values were not recorded; build the "
            "model under autopart.parameters_on_meta(), which repeats what constructors do, or give parallelize(model, "
            "init=function of a module), weights=folder, or init=False where a checkpoint will be loaded"
        )
    if unknown:
        warnings.warn(
            f"{len(unknown)} tensors, such as {next(iter(unknown))}, were not built under "
            "autopart.parameters_on_meta(): they start as their modules' own initializers make them, in the order of "
            "the modules, which from the same seed need not give the values of a model built in one process",
            stacklevel=3,
        )


def _unknown(model: nn.Module, names: Collection[str] | None) -> dict[str, Tensor]:
    """Parameters on meta (of these names) without history, and buffers alike."""
    return {name: tensor for name, tensor in _on_meta(model, names) if seen_of(tensor) is None}


def _on_meta(model: nn.Module, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        if parameter.is_meta and (names is None or name in names):
            yield name, parameter
    kept = model.state_dict(keep_vars=True).keys()
    for name, buffer in model.named_buffers():
        if buffer.is_meta and (names is None or name in names or name not in kept):
            yield name, buffer


def _home(model: nn.Module, name: str) -> str:
    path = name.rpartition(".")[0]
    return f"{path or 'the model itself'}: {type(model.get_submodule(path)).__name__}"


def _reset(model: nn.Module, unknown: Collection[int]) -> None:
    """Runs the initializers of all modules with such tensors, children first.

    torch's own modules have ``reset_parameters`` or ``_reset_parameters``. ``_init_weights``, for a module at a time,
    is what transformers' models have, and many others: of the outermost module that has it.
    """

    def reset(module: nn.Module) -> None:
        if any(id(tensor) in unknown for tensor in (*module.parameters(), *module.buffers())):
            function = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
            if callable(function):
                _called(module, function)

    _in_order(model, reset)
    for module in _outermost(model):
        # transformers' goes on into models inside of models, each with its own
        of_one: Any = module._init_weights
        whole: Any = getattr(module, "initialize_weights", None) or partial(module.apply, of_one)
        _called(module, whole)


def _called(module: nn.Module, function: Callable[[], object]) -> None:
    try:
        function()
    except Exception as error:
        raise PlanError(
            f"the initializer of {type(module).__name__} does not work on meta ({type(error).__name__}: {error}); "
            "build the model under autopart.parameters_on_meta() instead"
        ) from error


def _outermost(module: nn.Module) -> Iterator[nn.Module]:
    if callable(getattr(module, "_init_weights", None)):
        yield module
    else:
        for child in module.children():
            yield from _outermost(child)


def _in_order(model: nn.Module, function: Init) -> None:
    """As ``model.apply(function)``, but once for a module that has several places."""
    done: set[int] = set()

    def once(module: nn.Module) -> None:
        if id(module) not in done:
            done.add(id(module))
            function(module)

    with torch.no_grad():
        model.apply(once)


def _place_after(model: nn.Module) -> Place | None:
    """Where the model's last draw left the generator; None: where it is."""
    ops = slice_of(_writers(tensor for _, tensor in _on_meta(model)))
    last = next((op.place for op in reversed(ops) if op.place is not None), None)
    return None if last is None else Place(last.draws, last.count + 1)


def _writers(tensors: Iterator[Tensor]) -> Iterator[Op]:
    for tensor in tensors:
        seen = seen_of(tensor)
        if seen is not None and seen.writer is not None:
            yield seen.writer


def buffers_made(model: nn.Module) -> dict[str, Tensor]:
    """The values of buffers on meta that have a history, by all their names; whole, on every rank."""
    found = {name: buffer for name, buffer in model.named_buffers(remove_duplicate=False) if buffer.is_meta}
    known = {name: buffer for name, buffer in found.items() if seen_of(buffer) is not None}
    same_on_all_ranks(known.values())
    return {name: values(buffer) for name, buffer in known.items()}


def fill(model: nn.Module, names: Collection[str] | None = None) -> None:
    """Makes this rank's shares of the parameters on meta (of these names), one whole parameter at a time.

    model: as ``parallelize`` returns it, planned; ``prepare`` has seen its original. All ranks call it. Each draws all
    random numbers, those of other ranks' parameters too, since that is how one process would come to them.
    """
    original: Any = getattr(model, "original", model)
    entries = holding_of(model).entries
    wanted = {
        name: parameter
        for name, parameter in original.named_parameters()
        if parameter.is_meta and name in entries and (names is None or name in names)
    }
    same_on_all_ranks(wanted.values())
    make(
        (parameter, partial(_give, entries[name]))
        for name, parameter in wanted.items()
        if entries[name].tensor is not None
    )


def _give(entry: Entry, whole: Tensor) -> None:
    assert entry.tensor is not None
    with torch.no_grad():
        for box in entry.boxes:
            bounds = zip(box.offset, box.size, strict=True)
            box.of(entry.tensor).copy_(whole[tuple(slice(start, start + size) for start, size in bounds)])
