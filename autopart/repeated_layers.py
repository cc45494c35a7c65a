"""Export of a model whose alike layers are traced a few times only; the others' ops are copies.

For planning, where a model of a hundred layers is captured only to be looked at. The model's own forward runs, and so
do the first, second, third and last call of each kind of layer, all but the first between two marks in the graph.
Every other call of a layer of that kind, on arguments of the same types and sizes, is one op, which gives tensors of
the types and sizes that the traced calls gave. In the exported graph copies of a traced call's ops take these ops'
places (layer_copies.py). Where that cannot be had, the model is exported as a whole.

Not seen is what a layer does beside its ops, such as counting its calls in a Python object, and an influence of its
number on its ops that shows neither in its attributes nor in the traced calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, library, nn
from torch.utils import _pytree as pytree

from autopart.alike_layers import alike_layers
from autopart.layer_copies import Call, Differs, insert_copies

library.define("autopart_capture::mark", "(Tensor[] tensors, int call, bool leaves) -> ()")
library.define("autopart_capture::layer", "(Tensor[] tensors, int call) -> Tensor[]")
MARK = torch.ops.autopart_capture.mark.default
LAYER = torch.ops.autopart_capture.layer.default
fx.node.has_side_effect(MARK)
# Traced in any case; with no call to compare with in the first, as later ones may use sizes that it computes.
_TRACED = 3
_FIXED = (type(None), bool, int, float, str, torch.dtype, torch.device)


def export_with_copies(
    root: nn.Module, export: Callable[[], torch.export.ExportedProgram]
) -> torch.export.ExportedProgram | None:
    """What ``export()`` gives for ``root``, with few of its alike layers traced; None where that cannot be had."""
    groups = alike_layers(root)
    if not groups:
        return None
    calls = _Calls()
    try:
        with _watched(groups, calls):
            exported = export()
        insert_copies(exported, root, calls.made, MARK, LAYER)
    except Exception:  # whatever it is, the export of the whole model goes through or says it better
        return None
    return exported


@dataclass(frozen=True, slots=True)
class _Result:
    """A tensor that a layer makes."""

    shape: tuple[int | torch.SymInt, ...]
    stride: tuple[int | torch.SymInt, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class _Returned:
    """What a call returns: tensors that it makes, and how these, its arguments and constants are put together.

    leaves: ("made", place), ("given", place among the arguments' leaves) or ("fixed", value).
    """

    made: list[_Result]
    leaves: list[tuple[str, Any]]
    spec: Any

    def __str__(self) -> str:
        return f"{self.made} {self.leaves} {self.spec}"


@dataclass(slots=True, eq=False)
class _Kind:
    """Calls of alike layers on arguments of the same types and sizes."""

    number: int
    group: int
    arguments: list[Any]
    calls: int = 0
    returned: _Returned | None = None


class _Calls:
    """The calls of one export."""

    def __init__(self) -> None:
        self.made: list[Call] = []
        self.kinds: list[_Kind] = []
        self.results: dict[int, list[_Result]] = {}

    def run(
        self,
        group: int,
        layer: nn.Module,
        last: bool,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """A call of a layer: its forward, or the op that stands for it. Raises Differs."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        kind = self.kind(group, [spec, torch.is_grad_enabled(), *_described(leaves)])
        kind.calls += 1
        if kind.calls == 1:
            return forward(*args, **kwargs)
        number = len(self.made)
        traced = last or kind.calls <= _TRACED
        self.made.append(Call(layer, kind.number, traced))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not traced:
            assert kind.returned is not None
            return self.stand_in(kind.returned, number, tensors, leaves)
        MARK(tensors, number, False)
        result = forward(*args, **kwargs)
        made, returned = _taken_apart(result, leaves)
        MARK(made, number, True)
        kind.returned = kind.returned or returned
        if str(returned) != str(kind.returned):
            raise Differs("alike layers return unlike results")
        return result

    def kind(self, group: int, arguments: list[Any]) -> _Kind:
        for kind in self.kinds:
            if kind.group == group and kind.arguments == arguments:
                return kind
        self.kinds.append(_Kind(len(self.kinds), group, arguments))
        return self.kinds[-1]

    def stand_in(self, returned: _Returned, number: int, tensors: list[Tensor], given: list[Any]) -> Any:
        self.results[number] = returned.made
        made = LAYER(tensors, number)
        for tensor, like in zip(made, returned.made, strict=True):
            if tensor.requires_grad != like.requires_grad:
                tensor.requires_grad_(like.requires_grad)
        values = {"made": made, "given": given}
        leaves = [place if source == "fixed" else values[source][place] for source, place in returned.leaves]
        return pytree.tree_unflatten(leaves, returned.spec)


class _Itself:
    """An object that equals itself alone."""

    def __init__(self, value: object):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other.value is self.value

    __hash__ = None  # type: ignore[assignment]


def _described(leaves: Sequence[Any]) -> list[Any]:
    """Types and sizes of arguments, and which are the same tensor; other objects are themselves."""
    first: dict[int, int] = {}
    found: list[Any] = []
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            sizes = f"{tuple(leaf.shape)}{leaf.stride()}{leaf.dtype}{leaf.device}{leaf.requires_grad}"
            found.append((type(leaf), sizes, first.setdefault(id(leaf), place)))
        elif isinstance(leaf, _FIXED):
            found.append((type(leaf), leaf))
        elif isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
            found.append((type(leaf), str(leaf)))
        else:
            found.append(_Itself(leaf))
    return found


def _taken_apart(result: Any, given: Sequence[Any]) -> tuple[list[Tensor], _Returned]:
    """The tensors that a call made, and how its result is put together. Raises Differs."""
    places = {id(leaf): place for place, leaf in reversed(list(enumerate(given)))}
    made: dict[int, Tensor] = {}
    leaves: list[tuple[str, Any]] = []
    flat, spec = pytree.tree_flatten(result)
    for leaf in flat:
        if isinstance(leaf, _FIXED):
            leaves.append(("fixed", leaf))
        elif id(leaf) in places:
            leaves.append(("given", places[id(leaf)]))
        elif isinstance(leaf, Tensor):
            made.setdefault(id(leaf), leaf)
            leaves.append(("made", list(made).index(id(leaf))))
        else:
            raise Differs(f"a layer returns a {type(leaf).__name__}")
    results = [
        _Result(tuple(item.shape), item.stride(), item.dtype, item.device, item.requires_grad) for item in made.values()
    ]
    return list(made.values()), _Returned(results, leaves, spec)


_CURRENT: ContextVar[_Calls] = ContextVar("current")


@contextmanager
def _watched(groups: list[list[nn.Module]], calls: _Calls) -> Iterator[None]:
    """Calls of the groups' layers go through ``calls``."""
    token = _CURRENT.set(calls)
    replaced: list[tuple[nn.Module, Any]] = []

    def replace(number: int, layer: nn.Module, last: bool) -> None:
        forward = layer.forward
        replaced.append((layer, vars(layer).get("forward")))

        def watched(*args: Any, **kwargs: Any) -> Any:
            return calls.run(number, layer, last, forward, args, kwargs)

        vars(layer)["forward"] = watched

    try:
        for number, group in enumerate(groups):
            for layer in group:
                replace(number, layer, layer is group[-1])
        yield
    finally:
        for layer, own in replaced:
            if own is None:
                del vars(layer)["forward"]
            else:
                vars(layer)["forward"] = own
        _CURRENT.reset(token)


@library.register_fake("autopart_capture::mark")  # type: ignore[untyped-decorator]
def _mark(tensors: Sequence[Tensor], call: int, leaves: bool) -> None:
    pass


@library.register_fake("autopart_capture::layer")  # type: ignore[untyped-decorator]
def _layer(tensors: Sequence[Tensor], call: int) -> list[Tensor]:
    return [
        torch.empty_strided(like.shape, like.stride, dtype=like.dtype, device=like.device)
        for like in _CURRENT.get().results[call]
    ]
