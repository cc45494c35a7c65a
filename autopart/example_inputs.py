"""The example inputs of a capture: named leaves, the dim of each with samples, what later calls have to match."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autopart.runtime.errors import CaptureError
from autopart.runtime.manifest import ArgumentSpec, InputSpec

# What names of a function's code may read all of its arguments.
_SEE_ALL = {"locals", "vars", "eval", "exec", "dir", "_getframe", "currentframe", "stack"}


def bind(forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, ``**kwargs`` merged. Raises CaptureError for ``*args`` or if they do not fit."""
    signature = inspect.signature(forward)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise CaptureError(f"the example inputs do not fit the model's forward{signature}: {error}") from error
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            raise CaptureError(
                f"forward takes *{name}; pass the inputs by name, or wrap the model in one that names them"
            )
        named.update(value if kind is inspect.Parameter.VAR_KEYWORD else {name: value})
    return named


def arguments_of(forward: Callable[..., Any]) -> tuple[ArgumentSpec, ...]:
    """The arguments of a forward, but for ``*args`` and ``**kwargs``; defaults that are objects count as none."""
    found = []
    for parameter in inspect.signature(forward).parameters.values():
        if parameter.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            by_position = parameter.kind is not inspect.Parameter.KEYWORD_ONLY
            if type(parameter.default) in (int, float, str, bool, type(None)):
                found.append(ArgumentSpec(parameter.name, by_position, True, parameter.default))
            else:
                found.append(ArgumentSpec(parameter.name, by_position))
    return tuple(found)


def batch_dims_of(named: dict[str, Any], given: Mapping[str, int | None]) -> dict[str, int | None]:
    """The dim that holds samples, for every tensor input, or None. Raises CaptureError for unknown names and dims."""
    tensors = {path: leaf for path, leaf in named.items() if isinstance(leaf, torch.Tensor)}
    if not isinstance(given, Mapping):
        raise CaptureError(f"batch_dims has a dim for each input, such as {{'x': 1}}, not a {type(given).__name__}")
    unknown = set(given) - set(tensors)
    if unknown:
        raise CaptureError(f"batch_dims names {sorted(unknown)}, the tensor inputs are {sorted(tensors)}")
    if not tensors:
        raise CaptureError("the model takes no tensor input, so there is no batch to split; pass example tensors")
    for path, dim in given.items():
        if not (dim is None or (isinstance(dim, int) and not isinstance(dim, bool))):
            raise CaptureError(f"batch_dims[{path!r}]: a dim is a whole number, or None without samples, not {dim!r}")
        rank = tensors[path].dim()
        if dim is not None and not -rank <= dim < rank:
            raise CaptureError(f"batch_dims[{path!r}]: {dim} is no dim of a tensor {list(tensors[path].shape)}")
    given = {path: None if dim is None else dim % tensors[path].dim() for path, dim in given.items()}
    sizes = [
        leaf.shape[given.get(path) or 0]
        for path, leaf in tensors.items()
        if leaf.dim() and given.get(path, 0) is not None
    ]
    batch = sizes[0] if sizes else None
    found: dict[str, int | None] = {}
    for path, leaf in tensors.items():
        if path in given:
            found[path] = given[path]
        else:
            found[path] = 0 if leaf.dim() and leaf.shape[0] == batch else None
    return found


def guess_of(named: dict[str, Any], dims: dict[str, int | None], given: Mapping[str, int | None]) -> str:
    """What was guessed of inputs by their sizes, where these differ, for a batch that cannot be split; else ''."""
    leaves = {path: leaf for path, leaf in named.items() if isinstance(leaf, torch.Tensor) and path not in given}
    other = [f"{path!r} {list(leaf.shape)}" for path, leaf in leaves.items() if leaf.dim() and dims[path] is None]
    taken = [f"{path!r} {list(leaf.shape)}" for path, leaf in leaves.items() if dims[path] is not None]
    if not other or not taken:
        return ""
    return (
        f" (samples were looked for in the first dim of {', '.join(taken)}, and not in {', '.join(other)}; batch_dims "
        "says in which dim of an input they are, if in any)"
    )


def examples(named: dict[str, Any], dims: dict[str, int | None]) -> tuple[dict[str, Any], int]:
    """The example leaves with one storage each, and at least two samples: export takes a size of 1 for a constant.

    Of tensors made under ``torch.inference_mode()``, of which no gradient can be traced, copies.
    """
    seen: list[torch.Tensor] = []
    result: dict[str, Any] = {}
    batch = 1
    for path, leaf in named.items():
        if isinstance(leaf, torch.Tensor):
            if any(leaf is other for other in seen):
                leaf = leaf.clone()
            seen.append(leaf)
            if leaf.grad_fn is not None:  # what another model made
                leaf = leaf.detach().requires_grad_()
            if leaf.is_inference():
                with torch.inference_mode(False):
                    leaf = leaf.clone()
            dim = dims[path]
            if dim is not None:
                batch = leaf.shape[dim]
                if batch == 1:
                    leaf = leaf.repeat_interleave(2, dim)
        result[path] = leaf
    return result, int(batch)


def plain(leaf: Any) -> Any:
    """Numbers, strings and None pass through; a parallel model has nothing of objects (a cache)."""
    return leaf if isinstance(leaf, int | float | str | bool | None) else None


def unread_arguments(model: nn.Module) -> frozenset[str]:
    """The arguments that the code of the model's own ``forward`` never names, and that nothing else is given."""
    forward, hooks = type(model).forward, (model._forward_pre_hooks, model._forward_hooks)
    if not inspect.isfunction(forward) or "forward" in vars(model) or any(hooks):
        return frozenset()
    if type(model).__call__ is not nn.Module.__call__ or _SEE_ALL.intersection(forward.__code__.co_names):
        return frozenset()
    code = forward.__code__
    arguments = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
    named: set[Any] = set(code.co_cellvars)
    for instruction in dis.get_instructions(code):
        named.update(instruction.argval if isinstance(instruction.argval, tuple) else {str(instruction.argval)})
    return frozenset(arguments) - named


def input_spec(path: str, leaf: Any, dims: dict[str, int | None], unread: Container[str] = ()) -> InputSpec:
    """What later calls have to match of an input. unread: arguments that may be anything."""
    if not isinstance(leaf, torch.Tensor):
        return InputSpec(path, "unread" if path.split(".")[0] in unread else "constant", constant=plain(leaf))
    dim = dims[path]
    shape = tuple("b" if position == dim else int(size) for position, size in enumerate(leaf.shape))
    dtype = str(leaf.dtype).removeprefix("torch.")
    return InputSpec(path, "tensor", shape, dtype, dim, differentiable=leaf.requires_grad)
