"""Models by name, as the command line takes them: ``hf:FAMILY?key=value&…`` or ``file.py:function``.

``hf:`` names a family of the transformers library (its ``model_type``) with random weights and nothing downloaded. Keys
are fields of the family's configuration; their values are read as the type of the field's default. Seven keys are
autopart's own: ``batch``, ``seq``, ``image`` and ``audio`` (frames of features; in a waveform 320 samples each) shape
the example inputs, ``padding=no`` has rows of text full and gives no mask, as in pretraining, where attention's kernels
leave out what a causal mask hides; ``task`` picks the head, ``dtype`` the precision of the weights. Labels are always
among the inputs, so the loss is computed inside the model; but for ``task=ctc``, which gives logits.

    hf:gpt2                                               as published, 124 M parameters, 1,024 tokens
    hf:llama?num_hidden_layers=4&hidden_size=64&seq=32    any field of LlamaConfig
    hf:vit?image=32&patch_size=4&num_labels=10            images of 32x32

``file.py:function`` calls the user's function, which returns a model, or a model with args and kwargs for one call.

Weights and inputs are seeded: the same name gives the same tensors in every process.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopart.runtime.errors import AutopartError

SEED = 0


class ModelError(AutopartError):
    """A model's name cannot be read, or the model that it names cannot be built."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model in training mode with the arguments of one example call, ``model(*args, **kwargs)``."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str


def load_model(
    spec: str, *, meta: bool = False, dtype: torch.dtype | None = None, batch: int | None = None
) -> LoadedModel:
    """Builds the model that ``spec`` names.

    meta: weights and inputs on the meta device; nothing is allocated, whatever the model's size.
    dtype: of the weights and of floating-point inputs; None leaves the model's own.
    batch: samples in the example inputs, before the ``batch`` of an ``hf:`` name; passed to a user's function that has
        a parameter ``batch``.

    Raises ModelError with one line that says what to change.
    """
    if batch is not None and batch < 1:
        raise ModelError(f"{spec}: the batch size is {batch}, it has to be at least 1")
    if spec.startswith("hf:"):
        from autopart.hf import load_hf

        return load_hf(spec, meta, dtype, batch)
    path, colon, function = spec.rpartition(":")
    if not colon or not path.endswith(".py") or not function.isidentifier():
        raise ModelError(f"{spec!r} names no model: write hf:FAMILY?key=value&… or file.py:function")
    return _load_file(spec, Path(path), function, meta, dtype, batch)


def _load_file(
    spec: str, path: Path, function: str, meta: bool, dtype: torch.dtype | None, batch: int | None
) -> LoadedModel:
    build = load_function(spec, path, function)
    with _reported(spec, path, f"in {function}()"), seeded(meta):
        result = _call(build, batch)
    if isinstance(result, nn.Module):
        result = (result, (), {})
    match result:
        case (nn.Module() as model, tuple() | list() as args, dict() as kwargs):
            pass
        case (nn.Module() as model, tuple() | list() as args):
            kwargs = {}
        case _:
            parts = result if isinstance(result, tuple) else ()
            got = type(result).__name__ + (f" ({', '.join(type(part).__name__ for part in parts)})" if parts else "")
            raise ModelError(f"{spec}: {function}() has to return a model or (model, args, kwargs), it returned {got}")
    if dtype is not None:
        model = model.to(dtype)
    if meta:
        _move_to_meta(model)

    def convert(leaf: object) -> object:
        if not isinstance(leaf, Tensor):
            return leaf
        converted = leaf.to(dtype) if dtype is not None and leaf.is_floating_point() else leaf
        return converted.to("meta") if meta else converted

    # Leaf by leaf with a memo, so that one tensor given twice stays one tensor.
    memo: dict[int, object] = {}
    converted_args, converted_kwargs = pytree.tree_map(
        lambda leaf: memo.setdefault(id(leaf), convert(leaf)), (tuple(args), kwargs)
    )
    return LoadedModel(model.train(), converted_args, converted_kwargs, spec)


def load_function(spec: str, path: Path, function: str) -> Callable[..., Any]:
    """A function of a user's file; ``spec`` is how errors name it. Raises ModelError."""
    path = path.expanduser().resolve()
    if not path.is_file():
        raise ModelError(f"{spec}: there is no file {path}")
    # As with ``python file.py``: the file may import its neighbours, also later, when the model runs.
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    with _reported(spec, path, "while it was imported"):
        module = _import(path)
    build = getattr(module, function, None)
    if not callable(build):
        names = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        raise ModelError(f"{spec}: {path.name} has no function {function!r}{near(function, names)}")
    found: Callable[..., Any] = build
    return found


def _import(path: Path) -> ModuleType:
    # A name of its own: the user's "model.py" must not hide, or be hidden by, a library's module of that name.
    name = f"_autopart_model_{path.stem}"
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # dataclasses and pickle look the module up
    try:
        module_spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _call(build: Callable[..., Any], batch: int | None) -> Any:
    if batch is not None and "batch" in inspect.signature(build).parameters:
        return build(batch=batch)
    return build()


@contextlib.contextmanager
def _reported(spec: str, path: Path, doing: str) -> Iterator[None]:
    """Turns whatever the user's file raises into one line that names the deepest of its lines on the stack."""
    try:
        yield
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if Path(frame.filename) == path]
        if isinstance(error, SyntaxError) and error.filename == str(path):
            lines.append(error.lineno)
        where = f"{path.name}:{lines[-1]}" if lines else path.name
        raise ModelError(f"{spec}: {where} raised {doing}: {one_line(error)}") from error


def _move_to_meta(model: nn.Module) -> None:
    """What a function made from data that has a device (from_numpy, loaded files) follows the rest; ties are kept."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not parameter.is_meta:
                moved = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
                module._parameters[name] = memo.setdefault(id(parameter), moved)
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = memo.setdefault(id(buffer), buffer.to("meta"))


@contextlib.contextmanager
def seeded(meta: bool) -> Iterator[None]:
    """Seeds torch inside the context, leaves the caller's random state alone, and puts new tensors on meta if asked."""
    device = torch.device("meta") if meta else contextlib.nullcontext()
    with torch.random.fork_rng(devices=[]), device:
        torch.default_generator.manual_seed(SEED)
        yield


def near(name: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(found)}?" if found else ""


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
