"""Which gradients of its own a model makes while a capture runs it: export records forwards, and autograd the rest.

A ``torch.autograd.Function`` has a backward of its own, which may be another than its forward's derivative
(:mod:`autopart.own_functions`); a hook changes a gradient on its way. A hook on a forward runs in the trace, once, with
tensors that have no values. What ``torch.utils.checkpoint`` runs in a Function is taken as it is: it would come without
gradients, and which layers run again is the plan's.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.function import _SingleLevelFunction
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.hooks import BackwardHook

from autopart.capture_place import own_place
from autopart.own_functions import Applied, Backward, Hook, ModuleHook, with_scaled_gradient
from autopart.runtime.errors import CaptureError

Place = tuple[Any, str]
"""A Function, and the file and line that apply it."""


@dataclass(slots=True)
class OwnBackwards:
    """hooks: what is said of them. functions: by Function and place what it was applied to. on_tensors: hooks on
    gradients of tensors in the forward, by place. on_modules: hooks on gradients of modules, by path and hook.
    """

    hooks: dict[str, None] = field(default_factory=dict)
    functions: dict[Place, dict[str, Applied]] = field(default_factory=dict)
    on_tensors: dict[str, Hook] = field(default_factory=dict)
    on_modules: dict[tuple[str, Any], ModuleHook] = field(default_factory=dict)
    _backwards: dict[Place, set[Backward]] = field(default_factory=dict)

    def backwards(self) -> dict[Place, set[Backward]]:
        """What is found of each Function's backward at each place."""
        for place, applied in self.functions.items():
            if place not in self._backwards:
                self._backwards[place] = {item.backward() for item in applied.values()}
        return self._backwards

    def notes(self) -> list[str]:
        """Of hooks, and of Functions of which is not known whether they have the derivative of their forward.

        Raises CaptureError for one that has another, and for a hook that changes a gradient.
        """
        found = dict(self.hooks)
        for (path, called), on_module in self.on_modules.items():
            if on_module.changes():
                raise CaptureError(_on_module_change(_name(called), path, on_module.before))
        for place, hook in self.on_tensors.items():
            if hook.changes():
                raise CaptureError(_on_change(_name(hook.called), place))
            found[_on_hooks("a tensor in forward", _name(hook.called))] = None
        for (function, place), backwards in self.backwards().items():
            if Backward.OTHER in backwards or Backward.SCALED in backwards:
                raise CaptureError(_on_other(function.__qualname__, place))
            if Backward.UNKNOWN in backwards:
                found[_on_function(function.__qualname__)] = None
        return list(found)

    def scaled(self) -> frozenset[Place]:
        """Functions whose backward scales the gradient wherever they were applied at a place."""
        return frozenset(place for place, found in self.backwards().items() if found == {Backward.SCALED})


@contextmanager
def own_backwards(model: nn.Module, scaled: frozenset[Place]) -> Iterator[OwnBackwards]:
    """Inside, hooks and Functions that are applied, torch's own left out, are noted.

    scaled: Functions of which it is known that their backward scales the gradient; they become tensor ops that do so.
    """
    own = OwnBackwards()
    own.hooks |= dict.fromkeys(
        _on_hooks(f"module {path or '(root)'}", type(module).__name__)
        for path, module in model.named_modules()
        if module._backward_hooks or module._backward_pre_hooks
    )
    own.hooks |= dict.fromkeys(
        _on_forward_hooks(path, hook)
        for path, module in model.named_modules()
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        if not _of_torch(hook)
    )
    paths = {module: path for path, module in model.named_modules()}
    set_up = BackwardHook.setup_input_hook, BackwardHook.setup_output_hook
    entered: dict[BackwardHook, Any] = {}
    register, before = torch.Tensor.register_hook, vars(_SingleLevelFunction).get("apply")

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction:
            run, _, *inputs = args
            return run(*inputs)
        trained = torch.is_grad_enabled() and any(
            isinstance(item, torch.Tensor) and item.requires_grad for item in args
        )
        if trained and not cls.__module__.startswith("torch."):
            place = cls, own_place(traceback.extract_stack())
            if place in scaled:
                return with_scaled_gradient(cls, args)
            applied = Applied.of(cls, args)
            own.functions.setdefault(place, {}).setdefault(repr(applied.arguments), applied)
        return super(_SingleLevelFunction, cls).apply(*args, **kwargs)

    def register_hook(tensor: torch.Tensor, hook: Any) -> Any:
        if not isinstance(tensor, nn.Parameter):
            own.on_tensors.setdefault(own_place(traceback.extract_stack()), Hook.of(tensor, hook))
        return register(tensor, hook)

    def enter(hook: BackwardHook, args: Any) -> Any:
        entered[hook] = args
        return set_up[0](hook, args)

    def leave(hook: BackwardHook, results: Any) -> Any:
        given, made = entered.pop(hook, ()), results if isinstance(results, tuple) else (results,)
        path = paths.get(hook.module, "")
        for user, early in [(user, False) for user in hook.user_hooks] + [(user, True) for user in hook.user_pre_hooks]:
            own.on_modules.setdefault((path, user), ModuleHook.of(user, hook.module, early, given, made))
        return set_up[1](hook, results)

    # Where Function.apply ends, also one that the model's code looked up before, as in `swish = Swish.apply`.
    setattr(_SingleLevelFunction, "apply", classmethod(apply))  # noqa: B010
    setattr(torch.Tensor, "register_hook", register_hook)  # noqa: B010
    setattr(BackwardHook, "setup_input_hook", enter)  # noqa: B010
    setattr(BackwardHook, "setup_output_hook", leave)  # noqa: B010
    try:
        yield own
    finally:
        delattr(_SingleLevelFunction, "apply")
        if before is not None:
            setattr(_SingleLevelFunction, "apply", before)  # noqa: B010
        setattr(torch.Tensor, "register_hook", register)  # noqa: B010
        setattr(BackwardHook, "setup_input_hook", set_up[0])  # noqa: B010
        setattr(BackwardHook, "setup_output_hook", set_up[1])  # noqa: B010


def _name(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__name__))


def _of_torch(hook: Any) -> bool:
    """Such as those of ``weight_norm`` and ``prune``, which compute and keep nothing else."""
    return str(getattr(hook, "__module__", type(hook).__module__)).startswith("torch.")


def _on_forward_hooks(path: str, hook: Any) -> str:
    return (
        f"module {path or '(root)'} has a hook on forward ({_name(hook)}), of which the program has what it computes "
        "with tensors, but which is not called: what it keeps or prints is of the capture alone. Give what it looks at "
        "as an output of forward"
    )


def _on_function(name: str) -> str:
    return (
        f"{name} has a backward of its own, which is not used: its forward is differentiated. Where the two differ "
        "(straight-through estimators) the model trains otherwise than on one device"
    )


def _on_other(name: str, place: str) -> str:
    return (
        f"{name}, applied at {place}, has a backward that is not the derivative of its forward, which is what a "
        "program has, and does not scale the gradient number by number: the model would train otherwise than on one "
        "device. Write it with tensor ops that have this derivative, such as x + (f(x) - x).detach(), which is f(x) "
        "with the gradient of x"
    )


def _on_change(name: str, place: str) -> str:
    return (
        f"the hook ({name}) that {place} registers on a tensor changes its gradient, and a program does not call it: "
        "the model would train otherwise than on one device. Write what it does with tensor ops: "
        "s * x + (x - s * x).detach() for a gradient times s"
    )


def _on_module_change(name: str, path: str, early: bool) -> str:
    of = "what a module made" if early else "what a module is given"
    return (
        f"the hook ({name}) on gradients of module {path or '(root)'} changes them, and a program does not call it: "
        f"the model would train otherwise than on one device. Write what it does with tensor ops in forward, on {of}: "
        "s * x + (x - s * x).detach() for a gradient times s"
    )


def _on_hooks(where: str, name: str) -> str:
    return (
        f"{where} has a hook on its gradients ({name}), which is not called: where it changes them the model trains "
        "otherwise than on one device. Hooks on parameters are called"
    )
