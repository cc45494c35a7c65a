"""Whether an optimizer's step on this rank's part of the model is the step on the whole model.

It is for optimizers that treat every element alone (SGD, Adam and their kin). Others look at a whole parameter
(Adafactor's rows and columns, Muon's orthogonalization, LAMB's ratio of norms) or at all parameters together (L-BFGS),
of which a rank may have a part. No list of names: an optimizer is tried on small tensors before its first step.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autopart.runtime.errors import PlanError
from autopart.runtime.loading import local_share
from autopart.runtime.manifest import Manifest
from autopart.runtime.mesh import Mesh
from autopart.runtime.norms import Stepping, divided, plain_state
from autopart.runtime.saved_parts import SavedParts, forget

_SIZE = 8
_STEPS = 3
_RATE = 0.125


_checks: weakref.WeakSet[OptimizerCheck] = weakref.WeakSet()


@cache
def _watch() -> None:
    """Hooks for all programs, which stay: torch goes over its hooks while any program may be freed.

    After a step as well, for one whose closure called the model first: there was no program before it.
    """
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    _at_step(optimizer)
    Stepping.now = True


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    Stepping.now = False
    _at_step(optimizer)


def _at_step(optimizer: torch.optim.Optimizer) -> None:
    for check in list(_checks):
        check.check(optimizer)
    forget(optimizer)
    plain_state(optimizer)


class OptimizerCheck:
    """Tries every optimizer that updates this program's parameters, before its first step and when it gets new groups.

    Raises PlanError in ``optimizer.step()`` when the result would not be that of one process, and where its state was
    saved by a rank with other parts of the model.
    """

    def __init__(self, manifest: Manifest, mesh: Mesh, parameters: Mapping[str, nn.Parameter]) -> None:
        specs = {spec.name: spec for spec in manifest.parameters}
        self._mesh = mesh
        self._specs = {id(parameter): specs[name] for name, parameter in parameters.items()}
        self._divided = {id(p) for name, p in parameters.items() if divided(specs[name], mesh)}
        self._saved = SavedParts(specs, mesh, parameters)
        self._apart = len(manifest.stages) > 1 or bool(self._divided)
        self._tried: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        if self._apart or any(divided(spec, mesh) for spec in manifest.parameters):
            _checks.add(self)
            _watch()

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Before an optimizer's step, or behind its first."""
        self._saved.check(optimizer)
        if self._tried.get(optimizer) == len(optimizer.param_groups):
            return
        for group in optimizer.param_groups:
            own = [p for p in group["params"] if id(p) in self._specs]
            if own:
                self._divide_state(optimizer, own)
                self._check_group(optimizer, group, [p for p in own if id(p) in self._divided], own)
        self._tried[optimizer] = len(optimizer.param_groups)

    def _divide_state(self, optimizer: torch.optim.Optimizer, own: Sequence[nn.Parameter]) -> None:
        """State that was made for the whole parameter, before it was divided (Adagrad's), becomes this rank's share."""
        for parameter in own:
            spec = self._specs[id(parameter)]
            state = optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and value.shape != parameter.shape and tuple(value.shape) == spec.shape:
                    state[key] = local_share(value, spec, self._mesh).clone().contiguous()

    def _check_group(
        self,
        optimizer: torch.optim.Optimizer,
        group: Mapping[str, Any],
        shares: Sequence[nn.Parameter],
        own: Sequence[nn.Parameter],
    ) -> None:
        name = type(optimizer).__name__
        first = (shares or own)[0]
        with _quietly():
            try:
                couples = not _equal_apart(optimizer, group, first)
                kinds = {p.dim(): p for p in reversed(shares)}.values()
                shared = next((p for p in kinds if not _equal_divided(optimizer, group, p)), None)
            except Exception as error:
                raise PlanError(
                    f"{name} could not be tried on small tensors ({type(error).__name__}: {error}), so it is not known "
                    "whether its step on a part of the model is right; use an optimizer of torch.optim that treats "
                    "every element alone, or a plan with pp=1, tp=1 and zero=0"
                ) from error
        if couples:
            raise PlanError(
                f"{name} updates a parameter by what it knows of all others, and this rank has a part of the model; "
                "use another optimizer, or a plan with pp=1, tp=1 and zero=0"
            )
        if shared is not None:
            parameter = self._specs[id(shared)].name
            raise PlanError(
                f"{name} looks at a whole parameter at once, and of {parameter!r} this rank has a share; "
                "use an optimizer that treats every element alone, or a plan with tp=1 and zero=0 (stages, and "
                "replicas without ZeRO, have whole parameters)"
            )


@contextmanager
def _quietly() -> Iterator[None]:
    """Random numbers drawn inside are given back, for all ranks have to go on alike."""
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        yield


def _equal_divided(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], like: nn.Parameter) -> bool:
    """Whether halves of a parameter, along each dim, are updated as the whole is."""
    shape = (_SIZE,) * max(like.dim(), 1)
    gradients = [_numbers(shape, like, step + 1) for step in range(_STEPS)]
    start = _numbers(shape, like, 0)
    whole = _updated(optimizer, group, [start], [[g] for g in gradients])[0]
    for dim in range(len(shape)):
        parts = [
            _updated(optimizer, group, [start.chunk(2, dim)[half]], [[g.chunk(2, dim)[half]] for g in gradients])[0]
            for half in range(2)
        ]
        if not _close(torch.cat(parts, dim), whole):
            return False
    return True


def _equal_apart(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], like: nn.Parameter) -> bool:
    """Whether a parameter is updated alike beside another one and alone."""
    shape = (_SIZE,) * max(like.dim(), 1)
    starts = [_numbers(shape, like, 0), _numbers(shape, like, 10)]
    gradients = [[_numbers(shape, like, step + 1), 3 * _numbers(shape, like, step + 11)] for step in range(_STEPS)]
    together = _updated(optimizer, group, starts, gradients)[0]
    alone = _updated(optimizer, group, starts[:1], [pair[:1] for pair in gradients])[0]
    return _close(together, alone)


def _updated(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    starts: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor]],
) -> list[Tensor]:
    """The tensors after steps of a fresh optimizer of the same class and options."""
    parameters = [nn.Parameter(start.clone().contiguous()) for start in starts]
    options = {key: value for key, value in group.items() if key not in ("params", "param_names", "initial_lr")}
    options = {key: _copied(key, value) for key, value in options.items()}
    fresh = type(optimizer)([{"params": parameters, **options}], **_arguments(optimizer))
    closure = inspect.signature(fresh.step).parameters.get("closure")
    needs_closure = closure is not None and closure.default is inspect.Parameter.empty
    for made in gradients:
        for parameter, gradient in zip(parameters, made, strict=True):
            parameter.grad = gradient.clone().contiguous()
        if needs_closure:
            fresh.step(_no_loss)
        else:
            fresh.step()
    return [parameter.detach() for parameter in parameters]


def _no_loss() -> float:
    """For optimizers that compute the loss themselves (L-BFGS): gradients stay as they are."""
    return 0.0


def _arguments(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What the class has to be given: its defaults, as far as its constructor takes them."""
    taken = inspect.signature(type(optimizer).__init__).parameters
    anything = any(item.kind is inspect.Parameter.VAR_KEYWORD for item in taken.values())
    given = {key: value for key, value in optimizer.defaults.items() if anything or key in taken}
    return {key: _copied(key, value) for key, value in given.items()}


def _copied(key: str, value: Any) -> Any:
    """An option for the trial. The learning rate may be zero now, of a scheduler that begins there."""
    if isinstance(value, Tensor):
        return torch.full_like(value, _RATE) if key == "lr" else value.detach().clone()
    return _RATE if key == "lr" and value is not None else value


def _numbers(shape: tuple[int, ...], like: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    narrow = like.dtype in (torch.float16, torch.bfloat16)  # rounding there would hide a difference
    return torch.randn(shape, generator=generator).to(like.device, torch.float32 if narrow else like.dtype)


def _close(one: Tensor, two: Tensor) -> bool:
    """Equal but for rounding: kernels may add up in another order for another shape."""
    wide = torch.complex128 if one.is_complex() else torch.float64
    error = (one.to(wide) - two.to(wide)).abs().max()
    return bool(error <= 16 * torch.finfo(one.dtype).eps * two.to(wide).abs().max())
