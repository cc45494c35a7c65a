"""Whether a layer does as a traced one did: its forward runs again, and every call of torch is compared, not made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autopart.layer_copies import Differs

FIXED = (type(None), bool, int, float, str, torch.dtype, torch.device)


class Itself:
    """An object that equals itself alone."""

    def __init__(self, value: object):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and other.value is self.value

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class _Meaning:
    """What a tensor is to a layer, as in layer_copies.py, where the same comes first."""

    what: str
    which: Any


class _Tensors:
    """A call's tensors: what they mean, and what is meant."""

    def __init__(self, layer: nn.Module, given: Sequence[Any]):
        self.given = given
        self.own = dict([*layer.named_parameters(remove_duplicate=False), *layer.named_buffers(remove_duplicate=False)])
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
            return type(item), item
        if isinstance(item, torch.SymInt | torch.SymFloat | torch.SymBool):
            return type(item), str(item)
        return Itself(item)

    def returned(self, result: Any) -> Any:
        leaves, spec = pytree.tree_flatten(result)
        return self.described(leaves), spec


@dataclass(frozen=True, slots=True)
class _Made:
    """One call of a torch function. result: a tensor by what it means, else as it is. made: how many tensors until then
    were first met as results.
    """

    function: Any
    arguments: Any
    result: Any
    made: int


class Recorded(TorchFunctionMode):
    """Inside, calls of torch functions by a layer's forward are remembered."""

    def __init__(self, layer: nn.Module, given: Sequence[Any]):
        super().__init__()
        self.tensors = _Tensors(layer, given)
        self.calls: list[_Made] = []
        self.returned: Any = None

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        arguments = self.tensors.described((args, kwargs))
        result = function(*args, **kwargs)
        tensors = [result] if isinstance(result, Tensor) else pytree.tree_leaves(result)
        for tensor in tensors:
            if isinstance(tensor, Tensor) and self.tensors.make(tensor).what != "made" and tensor is not result:
                raise Differs(f"{function} returns an argument among others")
        kept = self.tensors.meaning(result) if isinstance(result, Tensor) else result
        self.calls.append(_Made(function, arguments, kept, len(self.tensors.made)))
        return result

    def made(self, value: Any) -> bool:
        """Whether the layer made this tensor."""
        return isinstance(value, Tensor) and self.tensors.meaning(value).what == "made"

    def finish(self, result: Any) -> None:
        self.returned = self.tensors.returned(result)


class Compared(TorchFunctionMode):
    """Inside, what a layer's forward calls is compared with what was recorded of another, whose results it is given.

    Nothing is computed or traced. Raises Differs.
    """

    def __init__(self, recorded: Recorded, layer: nn.Module, given: Sequence[Any]):
        super().__init__()
        self.recorded = recorded
        self.tensors = _Tensors(layer, given)
        self.calls = iter(recorded.calls)

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = next(self.calls, None)
        if made is None or function != made.function:
            raise Differs(f"a layer calls {function} where one alike does not")
        if self.tensors.described((args, dict(kwargs or {}))) != made.arguments:
            raise Differs(f"a layer calls {function} with other arguments than one alike")
        for tensor in self.recorded.tensors.made[len(self.tensors.made) : made.made]:
            self.tensors.make(tensor)
        return self.tensors.meant(made.result) if isinstance(made.result, _Meaning) else made.result

    def finish(self, result: Any) -> None:
        if next(self.calls, None) is not None:
            raise Differs("a layer calls less than one alike")
        if self.tensors.returned(result) != self.recorded.returned:
            raise Differs("alike layers return unlike results")
