"""Norms of gradients over the whole model, also where the script takes them by torch's own functions.

``torch.nn.utils.clip_grad_norm_(model.parameters(), …)`` takes the norm of each ``.grad``, stacks these and takes the
norm of the stack. A rank has the gradients of its stage only, and of a divided parameter a share. So the gradients that
a program hands out are :class:`Share`, plain tensors in all but their norm; that is a :class:`ShareNorm`, and the norm
of a stack of all of them is the whole model's, on every rank. What would be a norm of this rank alone is refused.
What a script makes of a share without changing its shape (``p.grad / 2``), and puts into ``.grad``, is one as well.
"""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopart.runtime.errors import InputError
from autopart.runtime.hooks import weakly
from autopart.runtime.loading import cuts_of
from autopart.runtime.manifest import Manifest, ParameterSpec
from autopart.runtime.mesh import Mesh
from autopart.runtime.penalties import Penalties

NORMS: frozenset[Callable[..., Any]] = frozenset(
    {torch.linalg.vector_norm, torch.linalg.norm, torch.norm, Tensor.norm, torch.functional.norm}
)
_KEPT: frozenset[Callable[..., Any]] = frozenset({Tensor.to, Tensor.detach, torch.stack})
_RESHAPED: frozenset[Callable[..., Any]] = frozenset(
    {Tensor.view, Tensor.reshape, Tensor.flatten, Tensor.ravel, torch.reshape, torch.flatten, torch.ravel}
)
_JOINED: frozenset[Callable[..., Any]] = frozenset({torch.cat, torch.concat, torch.concatenate, torch.hstack})
PATIENCE = timedelta(minutes=2)
"""For how long a rank waits for the norms of others."""
_REDUCED: frozenset[Callable[..., Any]] = frozenset(
    getattr(of, name)
    for name in ("sum", "nansum", "mean", "max", "min", "amax", "amin", "all", "any", "count_nonzero", "dot")
    for of in (torch, Tensor)
)
_CHECKS: frozenset[Callable[..., Any]] = frozenset(
    getattr(of, name) for name in ("isfinite", "isnan", "isinf") for of in (torch, Tensor)
)
_NUMBERS = itertools.count(1)
_INSTEAD = "call model.clip_grad_norm_(max_norm) on every rank instead, which also returns the norm"


def counted(spec: ParameterSpec, mesh: Mesh) -> bool:
    """Whether this rank is the one that counts its share, of all ranks that have equal copies of it."""
    cut = {axis.name for _, axis in cuts_of(spec, mesh)}
    copies = [axis.index for axis in (mesh.data, *mesh.tensor_axes) if axis.name not in cut]
    return spec.stages[0] in mesh.stages and not any(copies)


def divided(spec: ParameterSpec, mesh: Mesh) -> bool:
    """Whether a rank holds less than the whole parameter."""
    return any(axis.size > 1 for _, axis in cuts_of(spec, mesh))


class GradientNorms:
    """The norms of one program's gradients. ``parameters``: this rank's own trainable ones by name."""

    def __init__(self, manifest: Manifest, mesh: Mesh, parameters: Mapping[str, nn.Parameter]) -> None:
        self._mesh = mesh
        self.number = next(_NUMBERS)  # equal on all ranks, which make the same programs in the same order
        self._parameters = dict(parameters)
        specs = {spec.name: spec for spec in manifest.parameters}
        self._counted = {name: counted(specs[name], mesh) for name in parameters}
        self._divided = {name for name in parameters if divided(specs[name], mesh)}
        trained = {stage for spec in manifest.parameters if spec.trainable for stage in spec.stages}
        busy = {mesh.place_of[stage] for stage in trained}
        self._idle = [stage for stage, place in enumerate(mesh.place_of) if place not in busy]
        self._running = False
        self._several = len(manifest.stages) > 1
        self._told = False
        self._given: list[str] = []  # of what, by the last backward
        self._parts = len(manifest.stages) > 1 or any(divided(spec, mesh) for spec in manifest.parameters)
        self._penalties = Penalties(parameters if self._parts else {})
        if self._parts:
            for name, parameter in parameters.items():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(weakly(self._hook, name))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, gradients belong to the running step and are plain."""
        self._running = self._penalties.resting = True
        try:
            yield
        finally:
            self._running = self._penalties.resting = False

    def _hook(self, name: str, parameter: Tensor) -> None:
        if not self._running and type(parameter.grad) is Tensor:
            parameter.grad = self._share(name, parameter.grad)

    def _share(self, name: str, gradient: Tensor) -> Share:
        share = gradient.as_subclass(Share)
        share.owner = (ref(self), name)
        return share

    def shares(self, gradients: Sequence[Tensor | None], parameters: Sequence[nn.Parameter]) -> Sequence[Tensor | None]:
        """What is handed out, as a script's hooks on the parameters and ``torch.autograd.grad`` see it."""
        if not self._parts:
            return gradients
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        found = [
            None if gradient is None else self._share(names[id(parameter)], gradient)
            for parameter, gradient in zip(parameters, gradients, strict=True)
        ]
        self._penalties.hand_out(found, parameters)
        self._given = sorted(share.owner[1] for share in found if share is not None and share.owner is not None)
        return found

    def of_share(self, name: str, norm: Tensor, order: float) -> ShareNorm:
        """The norm of this rank's share of one gradient."""
        return _share_norm(norm, ((self, name),), order)

    def check_whole(self, names: Sequence[str]) -> None:
        """Raises InputError where the norm of this gradient is that of a share."""
        shares = [name for name in names if name in self._divided]
        if shares or len(names) > 1:
            which = shares[0] if shares else names[0]
            raise InputError(
                f"the norm of {which!r}'s gradient is that of this rank's part of the model alone; {_INSTEAD}"
            )
        self.tell_apart(names[0], self._several)

    def tell_reduced(self, name: str) -> None:
        """Warns once where a sum over one gradient, as of its squares, or whether it is finite, is of this rank alone.

        A script that decides by it, as whether to step, would do so on one rank alone.
        """
        self.tell_apart(name, self._several or name in self._divided)

    def tell_apart(self, name: str, apart: bool, level: int = 4) -> None:
        """Warns once, but in an optimizer's step. apart: a number of this gradient is not of the whole model."""
        if apart and not self._told and not Stepping.now:
            self._told = True
            warnings.warn(
                f"numbers, or one vector, were made of gradients as of {name!r}: this rank has those of its own part "
                "of the model alone, so that what is added up from them, or decided by them, as whether a step is left "
                "out, is not of the whole model, and other ranks get another result; for the norm of all gradients "
                f"{_INSTEAD}, finite only where all gradients are",
                stacklevel=level,
            )

    def check_all(self, names: Sequence[str]) -> None:
        """Raises InputError unless these are all gradients of this rank, once each, on a rank of every stage."""
        if self._idle:
            raise InputError(
                f"stage {self._idle[0]} trains no parameter, so its ranks take no part in a norm over "
                f"model.parameters(); {_INSTEAD}"
            )
        present = [name for name, parameter in self._parameters.items() if parameter.grad is not None]
        if sorted(names) not in (sorted(present), self._given):  # those of torch.autograd.grad are in no ``.grad``
            raise InputError(
                f"a norm over {len(names)} gradients of the {len(present)} that this rank has: other ranks cannot know "
                f"which of theirs belong to it; pass all of model.parameters(), or {_INSTEAD}"
            )

    def total(self, norms: Tensor, names: Sequence[str], order: float) -> Tensor:
        """The norm of the whole model's gradients, a float64 scalar. norms: this rank's by name, 1-D."""
        mine = torch.tensor([self._counted[name] for name in names], device=norms.device)
        return reduce_norms(norms[mine], order, self._mesh, PATIENCE, self.number)


# What a norm is of: for each a program and the gradient's name, or none where all ranks have the same gradient.
Of = tuple[GradientNorms | None, str]


def total_norm(norms: Tensor, of: Sequence[Of], order: float) -> Tensor:
    """The norm of all gradients of one or several programs, and of layers beside them: a scalar like ``norms``, 1-D.

    Those of layers beside them count once, as all ranks have the same. Raises InputError as ``check_all``.
    """
    found: dict[GradientNorms | None, list[int]] = {}
    for at, (owner, _) in enumerate(of):
        found.setdefault(owner, []).append(at)
    beside = found.pop(None, [])
    owners = sorted((owner for owner in found if owner is not None), key=lambda owner: owner.number)
    names = {owner: [of[at][1] for at in found[owner]] for owner in owners}
    for owner in owners:
        owner.check_all(names[owner])
    totals = [owner.total(norms[found[owner]], names[owner], order).to(norms.device) for owner in owners]
    if beside or len(totals) > 1:
        totals = [torch.linalg.vector_norm(torch.cat([norms[beside].double(), torch.stack(totals)]), order)]
    return totals[0].to(norms.dtype)


def reduce_norms(norms: Tensor, order: float, mesh: Mesh, patience: timedelta | None = None, number: int = 0) -> Tensor:
    """The ``order``-norm of all ranks' norms (1-D), a float64 scalar. All ranks take part.

    Raises InputError where others do not within ``patience``, over gloo (NCCL has its own time limit), or take another
    program's, by its number.
    """
    wide, largest = norms.detach().to(mesh.device, torch.float64), math.isinf(order)
    value = torch.cat([wide, wide.new_zeros(1)]).max() if largest else wide.pow(order).sum()
    if mesh.world_size > 1:
        own = torch.tensor([number, -number if largest else number**2], dtype=torch.float64).to(mesh.device)
        told = torch.cat([value.reshape(1), own])
        work = dist.all_reduce(told, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, async_op=True)
        assert work is not None
        if patience is None or mesh.device.type != "cpu":
            work.wait()
        else:
            _wait(work, patience)
        value = told[0]
        asked = number > (0 if mesh.device.type == "cpu" else 1)  # a GPU waits for it: not where there is one model
        if asked and not torch.equal(told[1:], own if largest else own * mesh.world_size):
            raise InputError(
                "ranks take norms of different models' gradients: torch does not ask a rank of which none of the "
                f"parameters of a model has a gradient; take the norm of each model alone: {_INSTEAD}"
            )
    return value if largest else value.pow(1 / order)


def _wait(work: dist.Work, patience: timedelta) -> None:
    try:
        work.wait(patience)
    except RuntimeError as error:
        if not any(sign in str(error).lower() for sign in ("timed out", "timeout")):
            raise
        raise InputError(
            f"other ranks took no norm of their gradients for {patience.total_seconds():g} s: torch does not ask a "
            "rank of which none of the parameters in the norm has a gradient (a part of the model was given, or all "
            f"of a stage is frozen); {_INSTEAD}"
        ) from error


def plain(gradient: Tensor) -> Tensor:
    """The gradient as an ordinary tensor, sharing its memory."""
    return gradient.detach().as_subclass(Tensor)


class Stepping:
    """Whether an optimizer's step runs, which may look at one gradient after the other."""

    now = False


def plain_state(optimizer: torch.optim.Optimizer) -> None:
    """State that an optimizer made of gradients, as SGD's first momentum, is plain tensors like any other's."""
    for state in optimizer.state.values():
        for key, value in state.items() if isinstance(state, dict) else ():
            if isinstance(value, Share):
                state[key] = plain(value)


class Share(Tensor):
    """A gradient that a program handed out, or what was made of one element by element. Other results are plain.

    That is, all of its shape: its norm, among all others', is what the script means, and is no number of this rank.
    """

    # Weakly, as the parameter holds its gradient, and the norms' object the parameter.
    owner: tuple[ref[GradientNorms], str] | None = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved and sent as a plain tensor."""
        return plain(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(plain(self), memo)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if ShareNorm in types:
            return NotImplemented  # a norm knows what it may be used for
        if function is Tensor.detach_:  # torch refuses it for views; no graph is behind a gradient that was handed out
            return args[0]
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **kwargs)
        if function is torch._foreach_norm:
            order = _order(args, kwargs)
            return [_named(share, norm, order) for share, norm in zip(args[0], result, strict=True)]
        if function in NORMS and result.dim() == 0:
            return _named(args[0] if args else kwargs.get("x", kwargs.get("input")), result, _order(args, kwargs))
        if function in _REDUCED and isinstance(result, Tensor) and result.dim() == 0:
            share = args[0] if args else None
            owner = share.owner if isinstance(share, Share) and share.dim() else None
            norms = owner and owner[0]()
            if owner and norms:
                norms.tell_reduced(owner[1])
        if function in _JOINED:
            owners = [item.owner for item in args[0] if isinstance(item, Share) and item.owner] if args else []
            norms = owners[0][0]() if len(owners) > 1 else None
            if norms:
                norms.tell_apart(owners[0][1], True, 3)
        return _shaped(result, args, kwargs, function in _CHECKS, function in _RESHAPED)


class ShareNorm(Tensor):
    """Norms of shares: of one (a scalar) or of several, stacked. owner: None where other ranks have the elements."""

    owner: tuple[tuple[Of, ...], float] | None = None

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result: Any = function(*args, **(kwargs or {}))
            if not _is_value(result):
                return result  # a size, a device
            stacked = function is torch.stack
            given = args[0] if stacked else args
            parts = [item for item in given if isinstance(item, ShareNorm)]
            counting = [part for part in parts if part.owner is not None]
            owners = [part.owner for part in counting if part.owner is not None]
            kept = function in _KEPT and (stacked or len(parts) == 1)
            if not owners:
                return nothing(result) if kept and (not stacked or len(parts) == len(given)) else result
            if kept and stacked:
                here = [item for item in given if not isinstance(item, ShareNorm) or item.owner is not None]
                result = torch.stack([item.as_subclass(Tensor) for item in here], *args[1:], **(kwargs or {}))
                of = tuple(one for item in here for one in (getattr(item, "owner", None) or (((None, ""),),))[0])
            else:
                of = tuple(one for owner in owners for one in owner[0])
            order = owners[0][1]
            if kept and all(owner[1] == order for owner in owners):
                return _share_norm(result, of, order)
            if function in NORMS and result.dim() == 0 and counting[0].dim() == 1:
                if _order(args, kwargs or {}) == order:
                    return total_norm(counting[0].as_subclass(Tensor), of, order)
                raise InputError(f"a norm of norms of another order than {order:g}; {_INSTEAD}")
            norms = next(owner for owner, _ in of if owner is not None)
            norms.check_whole([name for _, name in sorted(of, key=lambda one: one[0] is None)])
            return _shaped(result, args, kwargs or {})


def _shaped(
    result: Any, args: Sequence[Any], kwargs: Mapping[str, Any], check: bool = False, reshaped: bool = False
) -> Any:
    """A result that is new and of the shape of a share among the arguments is a share as well.

    check: so is what says of each element whether it is finite; other truths are plain. reshaped: and what has all the
    elements of one in another shape.
    """
    given = [*args, *kwargs.values()]
    if type(result) is not Tensor or any(result is item for item in given):
        return result
    shares = (
        item
        for item in given
        if isinstance(item, Share) and (item.shape == result.shape or (reshaped and item.numel() == result.numel()))
    )
    share = next(shares, None)
    if share is None:
        return result
    if not (result.is_floating_point() or result.is_complex() or check or share.dtype is torch.bool):
        return result
    found: Share = result.as_subclass(Share)
    found.owner = share.owner
    return found


def _is_value(result: object) -> bool:
    return isinstance(result, Tensor | float | list)


def _share_norm(norm: Tensor, of: tuple[Of, ...], order: float) -> ShareNorm:
    with torch._C.DisableTorchFunctionSubclass():
        found = norm.as_subclass(ShareNorm)
    found.owner = (of, order)
    return found


def nothing(norm: Tensor) -> ShareNorm:
    """The norm of a gradient that has no elements here, but on other ranks, where the norm counts it."""
    with torch._C.DisableTorchFunctionSubclass():
        return norm.as_subclass(ShareNorm)


def _named(share: Any, norm: Tensor, order: float) -> Tensor:
    owner = getattr(share, "owner", None) if isinstance(share, Share) else None
    if owner is None:
        return norm if share.numel() else nothing(norm)
    norms, name = owner[0](), owner[1]
    if norms is None:
        raise InputError(
            f"the norm of {name!r}'s gradient, whose model is gone; keep the model for as long as its parameters train"
        )
    return norms.of_share(name, norm, order)


def _order(args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """The p of a call of a norm. Raises InputError for matrix norms and orders that do not add up."""
    given = next((kwargs[key] for key in ("ord", "p") if key in kwargs), args[1] if len(args) > 1 else 2)
    if given in (None, "fro"):
        return 2.0
    try:
        order = float(given)
    except (TypeError, ValueError):
        order = 0.0
    if order <= 0:
        raise InputError(f"a norm of order {given!r} of gradients of which this rank has a part; {_INSTEAD}")
    return order
