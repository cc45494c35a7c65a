"""Export of a model of whose alike layers two are traced; the others' ops are copies.

Tracing takes time by the op, and a model of a hundred layers says the same thing a hundred times. The model's own
forward runs, and so does that of every layer, but only the first and second call of each kind of layer are traced, the
second between two marks in the graph. Every other call of a layer of that kind, on arguments of the same types and
sizes, is one op, which gives tensors of the types and sizes that the second gave; its own forward is compared with what
the second called of torch, call by call, and nothing is computed (layer_checks.py). Layers behind the third have no
tensors while the model is exported but where their own forward runs; a forward that asks for them elsewhere, as for a
penalty on all parameters, is exported again with them. In the exported graph their tensors are added, and copies of the
second's ops take these ops' places (layer_copies.py). Where that cannot be had, the model is exported as a whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, library, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _pytree as pytree
from torch.utils._device import DeviceContext

from autopart.alike_layers import alike_layers
from autopart.kept_state import kept_attributes, undone_where_it_fails
from autopart.layer_checks import FIXED, Compared, Inside, Itself, Recorded, fixed, without_autocast
from autopart.layer_copies import Call, Differs, add_tensors, insert_copies

library.define("autopart_capture::mark", "(Tensor[] tensors, Tensor[] own, int call, bool leaves) -> ()")
library.define("autopart_capture::layer", "(Tensor[] tensors, Tensor[] own, int call) -> Tensor[]")
MARK = torch.ops.autopart_capture.mark.default
LAYER = torch.ops.autopart_capture.layer.default
fx.node.has_side_effect(MARK)
# The first is traced too, but is nothing to compare with, as later ones may use sizes that it computes.
_COPIED = 2


def export_with_copies(
    root: nn.Module, export: Callable[[], torch.export.ExportedProgram]
) -> torch.export.ExportedProgram | None:
    """What ``export()`` gives for ``root``, with few of its alike layers traced; None where that cannot be had."""
    groups = alike_layers(root)
    if not groups or _with_shared_modules(root):
        return None
    # the first may be a kind by itself: a model's input has no gradient
    copied = [layer for group in groups for layer in group[_COPIED + 1 :]]
    for unread in (copied, []):
        away = _Away()
        calls = _Calls(away)
        raised = Differs.raised
        try:
            with undone_where_it_fails(root), kept_attributes(copied), _watched(groups, calls):
                with _without_tensors(unread, root, away):
                    exported = export()
                if away.asked_for or Differs.raised > raised:
                    raise Differs("the model was told that layers differ, or asked for tensors away, and went on")
                add_tensors(exported, root, groups)
                insert_copies(exported, root, calls.made, MARK, LAYER)
            return exported
        except Exception:  # whatever it is, the export of the whole model goes through or says it better
            if not away.asked_for:
                return None
    return None


def _with_shared_modules(root: nn.Module) -> bool:
    """Whether a module has two names: export then stands in for modules, to tell by which name one was called."""
    return len(list(root.named_modules(remove_duplicate=False))) > len(list(root.modules()))


_TENSORS = ("_parameters", "_buffers")


@dataclass(slots=True)
class _Away:
    """The tensors that modules are without, whether the model's forward runs, and whether it asked for them."""

    held: dict[nn.Module, dict[str, Any]] = field(default_factory=dict)
    running: bool = False
    asked_for: bool = False

    def take(self, modules: Iterable[nn.Module]) -> None:
        for module in modules:
            self.held[module] = {name: vars(module)[name] for name in _TENSORS}
            vars(module).update((name, _Absent(self)) for name in _TENSORS)

    def give_back(self, modules: Iterable[nn.Module]) -> None:
        for module in modules:
            vars(module).update(self.held.pop(module))

    @contextmanager
    def back(self, layer: nn.Module) -> Iterator[None]:
        """Inside, ``layer`` has its tensors."""
        modules = [module for module in layer.modules() if module in self.held]
        self.give_back(modules)
        try:
            yield
        finally:
            self.take(modules)

    def present(self, layer: nn.Module) -> dict[str, Tensor]:
        """The tensors that ``layer`` has outside of ``back``."""
        return {
            f"{path}.{name}" if path else name: tensor
            for path, module in layer.named_modules(remove_duplicate=False)
            if module not in self.held
            for kind in _TENSORS
            for name, tensor in vars(module)[kind].items()
            if tensor is not None
        }

    def ask(self) -> None:
        if self.running:
            self.asked_for = True
            raise Differs("the model reads a layer's tensors outside of the layer")


class _Absent(dict[str, Any]):
    """In place of a module's parameters or buffers: none for export, which goes over all of them."""

    def __init__(self, away: _Away):
        super().__init__()
        self.away = away


def _asking(name: str) -> Callable[..., Any]:
    of_dict = getattr(dict, name)

    @functools.wraps(of_dict)
    def method(self: _Absent, *args: Any) -> Any:
        self.away.ask()
        return of_dict(self, *args)

    return method


for _name in (
    *("__contains__", "__iter__", "__reversed__", "__len__", "__eq__", "__or__", "__ror__"),
    *("__getitem__", "__setitem__", "__delitem__", "get", "pop", "setdefault", "copy", "keys", "values", "items"),
):
    setattr(_Absent, _name, _asking(_name))


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


@dataclass(slots=True, eq=False)
class _Kind:
    """Calls of alike layers on arguments of the same types and sizes."""

    number: int
    group: int
    arguments: list[Any]
    calls: int = 0
    recorded: Recorded | None = None
    returned: _Returned | None = None


class _Calls:
    """The calls of one export."""

    def __init__(self, away: _Away) -> None:
        self.away = away
        self.made: list[Call] = []
        self.kinds: list[_Kind] = []
        self.results: dict[int, list[_Result]] = {}

    def run(
        self,
        group: int,
        layer: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """A call of a layer: its forward, which is traced, or the op that stands for it. Raises Differs."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        arguments = [spec, torch.is_grad_enabled(), _modes(), *_described(leaves)]
        kind = self.kind(group, arguments)
        kind.calls += 1
        if kind.calls == 1:
            return forward(*args, **kwargs)
        number = len(self.made)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        traced = kind.calls == _COPIED
        own = self.away.present(layer)
        self.made.append(Call(layer, kind.number, traced, tuple(own)))
        if traced:
            MARK(tensors, list(own.values()), number, False)
            with without_autocast(), Recorded(layer, leaves) as kind.recorded:
                result = forward(*args, **kwargs)
            if _described(leaves) != arguments[3:]:
                raise Differs("a layer changes the size of an argument")
            made, kind.returned = _taken_apart(result, leaves)
            if any(kind.recorded.tensors.meaning(tensor).what != "made" for tensor in made):
                raise Differs("a layer returns a tensor that it did not make, which the model may know")
            MARK(made, [], number, True)
            kind.recorded.finish(result)
            return result
        assert kind.recorded is not None and kind.returned is not None
        last = _last_traced()
        with self.away.back(layer), without_autocast(), Compared(kind.recorded, layer, leaves) as compared:
            result = forward(*args, **kwargs)
            compared.finish(result)
        if _last_traced() is not last:
            raise Differs("a layer computes where calls of torch functions are not seen")
        return self.stand_in(kind.returned, number, tensors, list(own.values()), leaves)

    def kind(self, group: int, arguments: list[Any]) -> _Kind:
        for kind in self.kinds:
            if kind.group == group and kind.arguments == arguments:
                return kind
        self.kinds.append(_Kind(len(self.kinds), group, arguments))
        return self.kinds[-1]

    def stand_in(
        self, returned: _Returned, number: int, tensors: list[Tensor], own: list[Tensor], given: list[Any]
    ) -> Any:
        self.results[number] = returned.made
        made = LAYER(tensors, own, number)
        for tensor, like in zip(made, returned.made, strict=True):
            if tensor.requires_grad != like.requires_grad:
                tensor.requires_grad_(like.requires_grad)
        values = {"made": made, "given": given}
        leaves = [place if source == "fixed" else values[source][place] for source, place in returned.leaves]
        return pytree.tree_unflatten(leaves, returned.spec)


def _modes() -> list[Any]:
    """What is around a call: a default device, or what else a model puts around torch functions."""
    return [
        (DeviceContext, mode.device) if isinstance(mode, DeviceContext) else Itself(mode)
        for mode in _get_current_function_mode_stack()
    ]


def _last_traced() -> fx.Node | None:
    mode = get_proxy_mode()
    return None if mode is None else next(iter(reversed(mode.tracer.graph.nodes)), None)


def _described(leaves: Sequence[Any]) -> list[Any]:
    """Types and sizes of arguments, and which are the same tensor; other objects are themselves."""
    first: dict[int, int] = {}
    found: list[Any] = []
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            sizes = f"{tuple(leaf.shape)}{leaf.stride()}{leaf.dtype}{leaf.device}{leaf.requires_grad}"
            found.append((type(leaf), sizes, first.setdefault(id(leaf), place)))
        elif isinstance(leaf, FIXED):
            found.append(fixed(leaf))
        elif isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
            found.append((type(leaf), str(leaf)))
        else:
            found.append(Itself(leaf))
    return found


def _taken_apart(result: Any, given: Sequence[Any]) -> tuple[list[Tensor], _Returned]:
    """The tensors that a call made, and how its result is put together. Raises Differs."""
    places = {id(leaf): place for place, leaf in reversed(list(enumerate(given)))}
    made: dict[int, Tensor] = {}
    leaves: list[tuple[str, Any]] = []
    flat, spec = pytree.tree_flatten(result)
    for leaf in flat:
        if isinstance(leaf, FIXED):
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

    def replace(number: int, layer: nn.Module) -> None:
        forward = layer.forward
        replaced.append((layer, vars(layer).get("forward")))

        def watched(*args: Any, **kwargs: Any) -> Any:
            return calls.run(number, layer, forward, args, kwargs)

        vars(layer)["forward"] = watched

    try:
        for number, group in enumerate(groups):
            for layer in group:
                replace(number, layer)
        yield
    finally:
        for layer, own in replaced:
            if own is None:
                del vars(layer)["forward"]
            else:
                vars(layer)["forward"] = own
        _CURRENT.reset(token)


@contextmanager
def _without_tensors(layers: Sequence[nn.Module], root: nn.Module, away: _Away) -> Iterator[None]:
    """Inside, the layers have no parameters and buffers: export works on each, whether it is read or not.

    A forward of ``root`` that asks for them is told so, as it would compute something else without.
    """
    forward = root.forward

    @functools.wraps(forward)
    def running(*args: Any, **kwargs: Any) -> Any:
        away.running = True
        try:
            outputs = forward(*args, **kwargs)
        finally:
            away.running = False
        if any(isinstance(leaf, Inside) for leaf in pytree.tree_leaves(outputs)):
            raise Differs("the model returns what a layer computes beside its result")
        return outputs

    whole = _without(root, set(map(id, layers)))
    away.take([module for module in root.modules() if id(module) not in whole])
    vars(root)["forward"] = running
    try:
        yield
    finally:
        del vars(root)["forward"]
        away.give_back(list(away.held))


def _without(root: nn.Module, layers: set[int]) -> set[int]:
    """Of which modules ``root`` would be made up without ``layers``."""
    found: set[int] = set()
    left = [root]
    while left:
        module = left.pop()
        if id(module) not in layers and id(module) not in found:
            found.add(id(module))
            left.extend(module.children())
    return found


@library.register_fake("autopart_capture::mark")  # type: ignore[untyped-decorator]
def _mark(tensors: Sequence[Tensor], own: Sequence[Tensor], call: int, leaves: bool) -> None:
    pass


@library.register_fake("autopart_capture::layer")  # type: ignore[untyped-decorator]
def _layer(tensors: Sequence[Tensor], own: Sequence[Tensor], call: int) -> list[Tensor]:
    return [
        torch.empty_strided(like.shape, like.stride, dtype=like.dtype, device=like.device)
        for like in _CURRENT.get().results[call]
    ]
