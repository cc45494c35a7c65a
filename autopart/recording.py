"""Recording how the weights of a model come about, so that a rank can make those that it holds, one after the other.

Under a :class:`Recorder` every op on tensors is noted: what it read, as views of storages after the op that wrote them
last, and what it wrote. Tensors on the meta device so have a history without having values; ``autopart/replay.py``
makes the values. Real tensors are computed as ever, and noted too, since they may become parameters.

Random numbers come in the order in which one process would draw them. Draws for tensors on meta are put off: the CPU's
generator gets a state that stands for "after this draw", and a real draw that follows first makes up for them. States
that the recorded code takes, restores or seeds are so understood without looking at its calls.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

_numbers = itertools.count()
_marks = itertools.count(0x5EED_0000_0000_0000)

# In place, reading nothing of what they write over.
_OVERWRITING = {
    f"aten::{name}"
    for name in ("normal_", "uniform_", "random_", "exponential_", "log_normal_", "geometric_", "cauchy_", "bernoulli_")
} | {"aten::fill_", "aten::zero_", "aten::copy_"}
_UNWRITTEN = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"}
# A number, or a size, that follows from values: these have to be made at once.
_FOLLOWING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


@dataclass(slots=True, eq=False, repr=False)
class Memory:
    """A storage that recorded ops read or wrote.

    size: bytes. given: the values it had when it was first seen; None: it has none. last: the op that wrote it last.
    """

    size: int
    given: torch.UntypedStorage | None = None
    last: Op | None = None

    @property
    def written(self) -> bool:
        return self.given is not None or self.last is not None


@dataclass(slots=True, eq=False, repr=False, frozen=True)
class Seen:
    """A tensor as an op saw it: a view of a memory, after ``writer`` (None: as given)."""

    memory: Memory
    writer: Op | None
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(slots=True, eq=False, repr=False)
class Op:
    """A call of an ATen op, tensors among its arguments as ``Seen``.

    makes: for a result that has memory of its own its number among the results. fills: what it writes over without
    reading. place: which draw of which run of random numbers it is. flaw: why it cannot be run again.
    """

    number: int
    func: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    makes: list[tuple[int, Memory]]
    fills: Memory | None
    place: Place | None
    flaw: str = ""

    @property
    def needs(self) -> list[Op]:
        """The ops whose results it reads."""
        seen = [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Seen)]
        return [leaf.writer for leaf in seen if leaf.writer is not None and leaf.memory is not self.fills]


@dataclass(slots=True, eq=False, repr=False)
class Draws:
    """Random ops in a row, from one state of the generator on.

    start: that state, or where it comes in another row. states: before each draw and after the last, as far as known.
    """

    start: Tensor | Place
    ops: list[Op] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    number: int = field(default_factory=lambda: next(_numbers))


@dataclass(slots=True, frozen=True)
class Place:
    """The state of a generator after ``count`` draws."""

    draws: Draws
    count: int


# By storage, which torch keeps as one Python object for as long as a tensor uses it.
_memories: weakref.WeakKeyDictionary[torch.UntypedStorage, Memory] = weakref.WeakKeyDictionary()


def seen_of(tensor: Tensor) -> Seen | None:
    """How a tensor on meta came about; None where no recorded op wrote it."""
    memory = _memories.get(tensor.untyped_storage())
    if memory is not None:
        return _view(tensor, memory) if memory.written else None
    # Converted after it was recorded (``model.bfloat16()``): the parameter is the same, its storage another one.
    before: Seen | None = getattr(tensor, "_autopart_seen", None)
    return before if before is not None and before.shape == tuple(tensor.shape) else None


def _view(tensor: Tensor, memory: Memory) -> Seen:
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    return Seen(memory, memory.last, tensor.dtype, shape, stride, int(tensor.storage_offset()))


def _on_meta(tensor: Tensor) -> bool:
    return tensor.device.type == "meta"  # ``is_meta`` is not to be asked here, see below


class _AsIfReal(TorchFunctionMode):
    """Tensors say that they are not on meta: ``torch.nn.init`` leaves some of those alone."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return False if func == _IS_META else func(*args, **(kwargs or {}))


_IS_META: Any = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]


class Recorder(TorchDispatchMode):
    """Notes the ops inside; of this thread and of the CPU's generator. Not to be nested.

    place: where in an earlier recording's random numbers these go on; None: at the generator's state.
    """

    def __init__(self, place: Place | None = None) -> None:
        super().__init__()
        self._from = place
        self._places: dict[bytes, Place] = {}
        self._as_if_real = _AsIfReal()
        self._parameters: list[weakref.ref[nn.Parameter]] = []

    def __enter__(self) -> Recorder:
        self._before = torch.get_rng_state()
        if self._from is not None:
            self._mark(self._from)
        super().__enter__()
        self._as_if_real.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._as_if_real.__exit__(*error)
        super().__exit__(*error)
        for reference in self._parameters:
            parameter = reference()
            if parameter is not None and (seen := seen_of(parameter)) is not None:
                parameter._autopart_seen = seen  # type: ignore[attr-defined]
        # What lies on meta may be asked for later; of the others only what went into that.
        for storage in list(_memories):
            if storage.device.type != "meta":
                del _memories[storage]
        place = self._places.get(_key(torch.get_rng_state()))
        if self._from is not None:
            torch.set_rng_state(self._before)
        elif place is not None and not place.draws.states[place.count :]:
            # as if nothing had been drawn for what is on meta
            torch.set_rng_state(root_of(place).states[0])

    def parameter(self, parameter: nn.Parameter) -> None:
        self._parameters.append(weakref.ref(parameter))

    # --- Random numbers ---

    def _place(self) -> Place:
        """Where the generator is."""
        state = torch.get_rng_state()
        place = self._places.get(_key(state))
        if place is None:  # untouched so far, or seeded by the recorded code
            place = self._places[_key(state)] = Place(Draws(state, states=[state]), 0)
        if place.count < len(place.draws.ops):  # a state that was taken and restored
            return Place(Draws(place), 0)
        return place

    def _mark(self, place: Place) -> None:
        """Gives the generator a state that stands for a place whose own is not known."""
        torch.default_generator.manual_seed(next(_marks))
        self._places[_key(torch.get_rng_state())] = place

    # --- Ops ---

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        written = _written(func, args, kwargs)
        for tensor in written:
            self._keep_given(tensor)
        seen_args, seen_kwargs = tree_map_only(Tensor, self._seen, (args, kwargs))
        virtual = any(_on_meta(t) for t in tensors) or torch.device(kwargs.get("device") or "cpu").type == "meta"
        if _FOLLOWING.intersection(func.tags) or not all(_on_meta(t) for t in written):
            virtual = False
        place, flaw = None, ""
        if torch.Tag.nondeterministic_seeded in func.tags:
            flaw = _other_generator(func, tensors, kwargs)
            place = None if flaw else self._place()
        try:
            result = _without_values(func, args, kwargs) if virtual else _with_values(func, args, kwargs, place)
        except NotImplementedError:  # there is no such op on meta
            if not virtual or written:
                raise
            virtual, result = False, _with_values(func, args, kwargs, place)
        op = Op(next(_numbers), func, seen_args, seen_kwargs, [], self._filled(func, tensors, written), place, flaw)
        if place is not None:
            after = Place(place.draws, place.count + 1)
            place.draws.ops.append(op)
            if virtual:
                self._mark(after)
            else:
                state = torch.get_rng_state()
                if len(place.draws.states) == after.count:
                    place.draws.states.append(state)
                self._places[_key(state)] = after
        self._note(op, result, written)
        return result

    def _seen(self, tensor: Tensor) -> Seen:
        return _view(tensor, self.memory(tensor))

    def memory(self, tensor: Tensor) -> Memory:
        storage = tensor.untyped_storage()
        memory = _memories.get(storage)
        if memory is None:
            memory = _memories[storage] = Memory(storage.nbytes(), None if _on_meta(tensor) else storage)
        return memory

    def _filled(self, func: torch._ops.OpOverload, tensors: list[Tensor], written: list[Tensor]) -> Memory | None:
        """The memory that an op writes over as a whole without reading it."""
        if _base(func) not in _OVERWRITING or len(written) != 1:
            return None
        memory = self.memory(written[0])
        whole = written[0].numel() * written[0].element_size() == memory.size
        return memory if whole and sum(self.memory(t) is memory for t in tensors) == 1 else None

    def _keep_given(self, tensor: Tensor) -> None:
        """Before a tensor's first values are written over: others may go on reading them."""
        memory = self.memory(tensor)
        if memory.given is not None and memory.last is None:
            memory.given = memory.given.clone()

    def _note(self, op: Op, result: Any, written: Sequence[Tensor]) -> None:
        """Enters what the op made and wrote."""
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for number, tensor in enumerate(results):
            storage = tensor.untyped_storage()
            if storage in _memories:
                continue
            memory = _memories[storage] = Memory(storage.nbytes())
            if _base(op.func) in _UNWRITTEN:
                continue
            memory.last = op
            op.makes.append((number, memory))
            if any(a.name == "dtype" for a in op.func._schema.arguments) and op.kwargs.get("dtype") is None:
                op.kwargs["dtype"] = tensor.dtype  # the default may be another when it is run again
        for tensor in written:
            memory = self.memory(tensor)
            memory.last, memory.size = op, tensor.untyped_storage().nbytes()


def _without_values(func: torch._ops.OpOverload, args: Any, kwargs: Any) -> Any:
    args, kwargs = tree_map_only(Tensor, lambda t: t.to("meta") if t.dim() and not _on_meta(t) else t, (args, kwargs))
    return func(*args, **kwargs)


def _with_values(func: torch._ops.OpOverload, args: Any, kwargs: Any, place: Place | None) -> Any:
    """Runs an op on real tensors, making those that are on meta; a draw at its place."""
    from autopart.replay import real_state, values

    args, kwargs = tree_map_only(Tensor, lambda t: values(t) if _on_meta(t) else t, (args, kwargs))
    if place is not None:
        torch.set_rng_state(real_state(place))
    return func(*args, **kwargs)


def _base(func: torch._ops.OpOverload) -> str:
    """The op's name without its overload."""
    return func.name().split(".")[0]


def _written(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors among the arguments that the op writes to."""
    if _base(func) == "aten::set_":  # which has another storage afterwards, and that one its own history
        return []
    found: list[Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            found.extend(leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
    return found


def _other_generator(func: torch._ops.OpOverload, tensors: Sequence[Tensor], kwargs: Mapping[str, Any]) -> str:
    """Why a draw is not one of the CPU's generator; "" where it is."""
    devices = {t.device.type for t in tensors} | {torch.device(kwargs.get("device") or "cpu").type}
    if kwargs.get("generator") is None and devices <= {"cpu", "meta"}:
        return ""
    return f"{func.name()} draws from a generator of its own or of {' and '.join(sorted(devices))}"


def root_of(place: Place) -> Draws:
    """The row of draws that a place comes from, which began at a state of the generator."""
    while isinstance(place.draws.start, Place):
        place = place.draws.start
    return place.draws


def _key(state: Tensor) -> bytes:
    return state.numpy().tobytes()


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules made inside have parameters without memory; buffers, such as rotary frequencies, are made as ever.

    What the constructors do to the parameters is recorded, for ``parallelize`` to make them of it where no files of
    weights are given. Random numbers that this takes are not drawn now; the generator stays as it is.
    """
    recorder = Recorder()

    # Any: torch's stubs say that a hook returns nothing; its documentation, that what it returns is registered.
    def emptied(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        if parameter is None or _on_meta(parameter):
            return parameter
        with torch.no_grad():
            empty = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
            if recorder.memory(parameter).written:
                empty.copy_(parameter)
        empty.__dict__.update(parameter.__dict__)
        try:
            torch.utils.swap_tensors(parameter, empty)  # the constructor may use it once more, or register it again
        except RuntimeError:  # something else refers to it
            parameter = empty
        recorder.parameter(parameter)
        return parameter

    hook = register_module_parameter_registration_hook(emptied)
    try:
        with recorder:
            yield
    finally:
        hook.remove()
