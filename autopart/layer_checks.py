"""Whether a layer does as a traced one did: its forward runs too, and every call of torch is compared, not made.

In place of results the forward is given tensors that stand for them in this call alone (Inside): whatever it leaves
behind, in a list or an attribute, cannot be taken for what the traced layer or another one computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autopart.layer_copies import Differs

FIXED = (type(None), bool, int, float, str, torch.dtype, torch.device)

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class Itself:
    """An object that equals itself alone."""

    def __init__(self, value: object):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and other.value is self.value

    __hash__ = None  # type: ignore[assignment]


class Inside(Tensor):
    """Stands for a tensor that a compared call makes, and means nothing outside of this call."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not hasattr(Tensor, name):
            raise Differs(f"a layer gives a tensor the attribute {name}")
        super().__setattr__(name, value)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise Differs(f"{function} is called with what a layer computes, outside of it")


def fixed(value: Any) -> tuple[type, Any]:
    """Equal for values that are the same: 0.0 and -0.0 are not."""
    return type(value), repr(value) if isinstance(value, float) else value


# What they say of a tensor is known of no stand-in, and follows from nothing that is compared.
_UNSEEN = (
    Tensor.storage_offset,
    Tensor.data_ptr,
    Tensor.untyped_storage,
    *(getattr(Tensor, name).__get__ for name in ("_base", "_version", "is_leaf", "grad_fn", "grad")),
)
_NOTHING = torch.empty(0, device="cpu")
# Fake tensors say it themselves, others by a torch function: the same to a layer.
_DEVICE = Tensor.device.__get__


@dataclass(frozen=True, slots=True)
class _Meaning:
    """What a tensor is to a layer, as in layer_copies.py, where the same comes first."""

    what: str
    which: Any


def _own(layer: nn.Module) -> dict[str, Tensor]:
    return dict([*layer.named_parameters(remove_duplicate=False), *layer.named_buffers(remove_duplicate=False)])


class _Tensors:
    """A call's tensors: what they mean, and what is meant."""

    def __init__(self, layer: nn.Module, given: Sequence[Any]):
        self.layer = layer
        self.given = given
        self.own = _own(layer)
        self.made: list[Tensor] = []
        self._meanings: dict[int, _Meaning] = {}
        for name, tensor in self.own.items():
            self._meanings.setdefault(id(tensor), _Meaning("own", name))
        for place, leaf in enumerate(given):
            if isinstance(leaf, Tensor):
                self._meanings[id(leaf)] = _Meaning("given", place)

    def make(self, tensor: Tensor) -> _Meaning:
        """What a call's result means: a tensor that is none of the layer's, or of its arguments, is made by it."""
        if id(tensor) not in self._meanings:
            self._meanings[id(tensor)] = _Meaning("made", len(self.made))
            self.made.append(tensor)
        return self._meanings[id(tensor)]

    def finish(self) -> None:
        """After the call. Raises Differs where the layer holds another tensor under a name than before."""
        now = _own(self.layer)
        if now.keys() != self.own.keys() or any(now[name] is not tensor for name, tensor in self.own.items()):
            raise Differs("a layer replaces a parameter or buffer")

    def meaning(self, tensor: Tensor) -> _Meaning:
        return self._meanings.get(id(tensor)) or _Meaning("same", Itself(tensor))

    def meant(self, meaning: _Meaning) -> Tensor:
        if meaning.what == "same":
            return meaning.which.value
        among: dict[str, Any] = {"given": self.given, "own": self.own, "made": self.made}
        return among[meaning.what][meaning.which]

    def described(self, item: Any) -> Any:
        """An argument with what its tensors mean in their place; equal for calls that are alike."""
        if isinstance(item, Tensor):
            return self.meaning(item)
        if isinstance(item, tuple | list):
            return type(item), [self.described(part) for part in item]
        if isinstance(item, dict):
            return [(key, self.described(part)) for key, part in item.items()]
        if isinstance(item, slice):
            return slice, [self.described(part) for part in (item.start, item.stop, item.step)]
        if isinstance(item, FIXED):
            return fixed(item)
        if isinstance(item, _SYMBOLIC):
            return type(item), str(item)
        if type(item).__hash__ is None:
            raise Differs(f"a layer calls torch with a {type(item).__name__}, which may have changed since")
        return Itself(item)

    def called_with(self, args: Any, kwargs: Any) -> Any:
        """What decides a call's result; the default type decides that of what is made from numbers."""
        return torch.get_default_dtype(), self.described((args, kwargs))

    def returned(self, result: Any) -> Any:
        leaves, spec = pytree.tree_flatten(result)
        return self.described(leaves), spec, repr(spec)  # where 1 and True are not the same key


@dataclass(frozen=True, slots=True)
class _Made:
    """One call of a torch function. result: its leaves, tensors by what they mean, and how they are put together.
    made: how many tensors until then were first met as results.
    """

    function: Any
    arguments: Any
    result: tuple[list[Any], Any]
    made: int


class Recorded(TorchFunctionMode):
    """Inside, calls of torch functions by a layer's forward are remembered. Raises Differs."""

    def __init__(self, layer: nn.Module, given: Sequence[Any]):
        super().__init__()
        self.tensors = _Tensors(layer, given)
        self.calls: list[_Made] = []
        self.with_gradient: list[bool] = []
        self.returned: Any = None

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function == _DEVICE:
            return args[0].device
        kwargs = dict(kwargs or {})
        if function in _UNSEEN:
            raise Differs(f"a layer asks for {function}")
        arguments = self.tensors.called_with(args, kwargs)
        result = function(*args, **kwargs)
        leaves, spec = pytree.tree_flatten(result)
        if not any(isinstance(leaf, Tensor) for leaf in leaves):
            leaves, spec = pytree.tree_flatten(result, is_leaf=lambda _: True)  # a size is put together as a tuple
        if any(free_unbacked_symbols(leaf) for leaf in leaves if isinstance(leaf, (Tensor, *_SYMBOLIC))):
            raise Differs("a layer makes a number or a size that follows from values, for which each has its symbol")
        leaves = [self.tensors.make(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        made = self.tensors.made
        self.with_gradient += [tensor.requires_grad for tensor in made[len(self.with_gradient) :]]
        self.calls.append(_Made(function, arguments, (leaves, spec), len(made)))
        return result

    def finish(self, result: Any) -> None:
        self.tensors.finish()
        self.returned = self.tensors.returned(result)


class Compared(TorchFunctionMode):
    """Inside, what a layer's forward calls is compared with what was recorded of another. Raises Differs.

    Nothing is computed or traced.
    """

    def __init__(self, recorded: Recorded, layer: nn.Module, given: Sequence[Any]):
        super().__init__()
        self.recorded = recorded
        self.tensors = _Tensors(layer, given)
        self.calls = iter(recorded.calls)

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function == _DEVICE:
            meaning = self.tensors.meaning(args[0])
            return (self.recorded.tensors.made[meaning.which] if meaning.what == "made" else args[0]).device
        made = next(self.calls, None)
        if made is None or function != made.function:
            raise Differs(f"a layer calls {function} where one alike does not")
        if self.tensors.called_with(args, dict(kwargs or {})) != made.arguments:
            raise Differs(f"a layer calls {function} with other arguments than one alike")
        for with_gradient in self.recorded.with_gradient[len(self.tensors.made) : made.made]:
            self.tensors.make(Tensor._make_subclass(Inside, _NOTHING, with_gradient))
        leaves, spec = made.result
        return pytree.tree_unflatten(
            [self.tensors.meant(leaf) if isinstance(leaf, _Meaning) else leaf for leaf in leaves], spec
        )

    def finish(self, result: Any) -> None:
        self.tensors.finish()
        if next(self.calls, None) is not None:
            raise Differs("a layer calls less than one alike")
        if self.tensors.returned(result) != self.recorded.returned:
            raise Differs("alike layers return unlike results")


@contextmanager
def without_autocast() -> Iterator[None]:
    """Inside, entering torch.autocast raises Differs: no torch function says so, and the graph has it around ops."""
    original = torch.autocast.__enter__

    def enter(self: torch.autocast) -> None:
        raise Differs("a layer enters torch.autocast")

    setattr(torch.autocast, "__enter__", enter)  # noqa: B010
    try:
        yield
    finally:
        setattr(torch.autocast, "__enter__", original)  # noqa: B010
