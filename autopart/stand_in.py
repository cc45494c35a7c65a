"""What a parallelized model shows of the original, as scripts look at models: attributes, modules, ``apply``.

Before the model is planned all of it is the original's. After that every rank has its shares of the tensors, and the
program runs ``forward`` alone: modules are still listed, so that loops over ``modules()`` that set modes find them, and
what a call would not see of what they set is told by :mod:`autopart.watched_attributes`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor, nn

from autopart.runtime.errors import NotHereError, PlanError

if TYPE_CHECKING:
    from autopart.runtime.module import ParallelModule


class _Looked(dict[str, Any]):
    """Tensors of a module by name, looked up each time they are asked for."""

    def __init__(self, found: Callable[[], Iterator[tuple[str, Tensor]]]) -> None:
        super().__init__()
        self._found = found

    def items(self) -> Any:
        return dict(self._found()).items()


class StandIn(nn.Module):
    """Stands for a model. ``original`` is not registered: parameters are the original's until there is a program."""

    original: nn.Module
    parallel: ParallelModule | None
    _members: nn.Module

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "original", original)
        object.__setattr__(self, "parallel", None)
        members = nn.Module()
        members._parameters = _Looked(self.named_parameters)
        members._buffers = _Looked(self.named_buffers)
        object.__setattr__(self, "_members", members)

    @property
    def _kept(self) -> bool:
        """Whether the original's tensors are the ones that are trained, whole."""
        return self.parallel is None and not any(parameter.is_meta for parameter in self.original.parameters())

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """This module, the original, and all inside it.

        Where a module that holds this one looks for tensors, and these are not the original's, it finds them in one
        module that has them all.
        """
        for_tensors = memo is not None and not self._kept and _looks_for_tensors()
        memo = set() if memo is None else memo
        yield from super().named_modules(memo, prefix, remove_duplicate)
        if not for_tensors:
            yield from self.original.named_modules(memo, prefix, remove_duplicate)
        elif not remove_duplicate or self._members not in memo:
            memo.add(self._members)
            yield prefix, self._members

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The original's."""
        return self.original.named_children()

    def apply(self, fn: Callable[[nn.Module], object]) -> Self:
        """Calls ``fn`` for the original and all modules inside it.

        Raises PlanError where that fails or writes tensors once the model is planned: a rank has its shares of them.
        """
        if self.parallel is None:
            self.original.apply(fn)  # type: ignore[arg-type]
            return self
        before = {id(tensor): tensor._version for _, tensor in self._tensors()}
        failed: Exception | None = None
        try:
            self.original.apply(fn)  # type: ignore[arg-type]
        except Exception as error:
            failed = error
        written = [name for name, tensor in self._tensors() if before.get(id(tensor)) != tensor._version]
        if failed is not None or written:
            what = f"failed ({type(failed).__name__}: {failed})" if failed is not None else f"wrote {written[0]!r}"
            raise PlanError(
                f"apply() {what} on a model that is planned, of whose tensors this rank has its shares; initialize "
                "before the first call, or load values by load_state_dict"
            ) from failed
        return self

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.original.named_parameters()
        yield from self.original.named_buffers()

    def __setattr__(self, name: str, value: Any) -> None:
        """What the original or its class has is set there, where a capture reads it.

        Raises PlanError for its modules, parameters and buffers once it is planned.
        """
        original = self.__dict__.get("original")
        if original is None or name in self.__dict__ or name.startswith("_"):
            super().__setattr__(name, value)
            return
        part = _is_part(original, name)
        if part and self.parallel is not None:
            raise PlanError(
                f"{name!r} is a part of the model, of which the parallel program has its own; set it before the first "
                "call, or load its values by load_state_dict"
            )
        if part or name in original.__dict__ or (hasattr(type(original), name) and not hasattr(type(self), name)):
            setattr(original, name, value)
        else:
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        """Plain attributes of the original, such as ``config``, and its parts until it is planned.

        Raises NotHereError for parts after that, and for methods: both would compute with this rank's shares; PlanError
        for parts that torch.func.functional_call would exchange.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            original = self.__dict__.get("original")
            if original is None:
                raise
            if name in original.__dict__ and not name.startswith("_"):
                return original.__dict__[name]
            if _is_part(original, name):
                if sys._getframe(1).f_globals.get("__name__") == "torch.nn.utils._named_member_accessor":
                    raise PlanError(
                        "torch.func.functional_call computes a model with other tensors in place of its parameters, "
                        "and a parallel program computes with those that it has divided; call the model itself, load "
                        "the tensors by load_state_dict, or use functional_call on a model of one process"
                    ) from None
                if self._kept:
                    return getattr(original, name)
                raise NotHereError(
                    f"{name!r} is a part of the model, of which this rank has its shares alone "
                    f"{'until it is made' if self.parallel is None else 'now that it is planned'}: its parameters are "
                    f"those of model.named_parameters() that begin with {name!r}, what it computes has to be an "
                    "output of forward, and what torch.distributed.checkpoint.state_dict saves by modules is saved by "
                    "autopart.runtime.checkpoint"
                ) from None
            if not name.startswith("_") and hasattr(type(original), name):
                raise NotHereError(
                    f"{name!r} is of {type(original).__name__}, of which the parallel program runs forward() alone; "
                    f"call forward, or model.original.{name} before the first call, or load state_dict() into a "
                    "model of one process"
                ) from None
            raise


def _is_part(original: nn.Module, name: str) -> bool:
    """Whether it is a module, parameter or buffer."""
    return any(name in members for members in (original._modules, original._parameters, original._buffers))


def _looks_for_tensors() -> bool:
    """Whether it is torch that goes over modules, for the parameters or buffers of one that holds a stand-in."""
    frame = sys._getframe(1)
    own = (StandIn.named_modules.__code__, nn.Module.named_modules.__code__)
    while frame.f_code in own and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code is nn.Module._named_members.__code__
