"""torch.autocast written out: which operands an op casts, and to what.

Export records ops as the model called them, before autocast cast their operands. Here the casts become ops of the
graph, so that everything after it sees types that do not depend on a context. No list of ops is restated: the op is run
once on fake tensors as autocast runs it, and casts of its operands are accepted if, without autocast, the same kernels
then run and give the same type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch.utils._python_dispatch import TorchDispatchMode

from autopart.runtime.errors import CaptureError

aten = torch.ops.aten

# Device type -> what autocast computes in there; missing: it is off.
Autocast = Mapping[str, torch.dtype]


class _Kernels(TorchDispatchMode):
    """Notes what runs, casts and views apart, and which of the given tensors are cast."""

    def __init__(self, operands: Sequence[Tensor]) -> None:
        super().__init__()
        self._operands = operands
        self.kernels: list[tuple[str, torch.dtype | None]] = []
        self.casts: dict[int, torch.dtype] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is aten._to_copy.default:
            for position, operand in enumerate(self._operands):
                if operand is args[0]:
                    self.casts[position] = result.dtype
        elif func.namespace != "prim" and not any(item.alias_info is not None for item in func._schema.returns):
            self.kernels.append((str(func), result.dtype if isinstance(result, Tensor) else None))
        return result


def casts_of(
    target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], autocast: Autocast, fake_mode: Any
) -> list[torch.dtype]:
    """The type in which autocast takes each tensor among the arguments, in the order of :func:`operands`.

    args, kwargs: with fake tensors. Raises CaptureError when no casts of the operands do what autocast does.
    """
    given = operands((args, kwargs))
    own = [tensor.dtype for tensor in given]
    wide = [torch.float32 if _casts(tensor) else tensor.dtype for tensor in given]
    # in torch 2.11 composite ops ask for the number of elements, which is not known here; their Python forms do not
    with fake_mode, torch.no_grad(), enable_python_dispatcher():
        with entered(autocast), _Kernels(given) as wanted:
            value = target(*args, **kwargs)
        type_ = value.dtype if isinstance(value, Tensor) else None
        noted = [wanted.casts.get(position, dtype) for position, dtype in enumerate(own)]
        candidates = [noted, own, wide]
        for narrow in set(autocast.values()):
            candidates.insert(1, [narrow if _casts(tensor) else tensor.dtype for tensor in given])
        for dtypes in candidates:
            cast = replaced((args, kwargs), [t.to(dtype) for t, dtype in zip(given, dtypes, strict=True)])
            try:
                with entered({}), _Kernels(()) as found:
                    value = target(*cast[0], **cast[1])
            except RuntimeError:  # operands of unlike types
                continue
            # autocast may ask a reduction for float32 rather than cast its operand: the same value by another kernel
            alike = found.kernels == wanted.kernels or (dtypes == wide and len(found.kernels) == len(wanted.kernels))
            if alike and type_ == (value.dtype if isinstance(value, Tensor) else None):
                return dtypes
    raise CaptureError(f"what torch.autocast does inside {target} cannot be written as casts of its operands")


def _casts(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype != torch.float64


def operands(arguments: Any) -> list[Tensor]:
    """The tensors among arguments, depth first."""
    if isinstance(arguments, Tensor):
        return [arguments]
    if isinstance(arguments, dict):
        arguments = list(arguments.values())
    return [found for item in arguments for found in operands(item)] if isinstance(arguments, tuple | list) else []


def type_of(node: fx.Node) -> str:
    """A node by the types and numbers of dims of its values."""
    value = node.meta.get("val")
    return ",".join(f"{tensor.dtype}{tensor.dim()}" for tensor in operands([value])) or str(value)


def replaced(arguments: Any, tensors: list[Tensor]) -> Any:
    """The arguments with other tensors in the place of theirs (taken from the front of the list)."""
    if isinstance(arguments, Tensor):
        return tensors.pop(0)
    if isinstance(arguments, dict):
        return {key: replaced(item, tensors) for key, item in arguments.items()}
    if isinstance(arguments, tuple | list):
        return type(arguments)(replaced(item, tensors) for item in arguments)
    return arguments


@contextmanager
def entered(autocast: Autocast) -> Iterator[None]:
    """Autocast as given and no other, without its cache of weights, which would keep fake tensors."""
    with ExitStack() as stack:
        for device in {"cpu", "cuda", *autocast}:
            stack.enter_context(
                torch.autocast(
                    device, autocast.get(device, torch.bfloat16), enabled=device in autocast, cache_enabled=False
                )
            )
        yield
