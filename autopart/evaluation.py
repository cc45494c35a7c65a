"""What a model computes otherwise in evaluation, or without gradients, than its training graph says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import nn

from autopart.passes import graph as graphs
from autopart.passes.blocks import is_training
from autopart.passes.program import Evaluation, Program, mode_free_digests, mode_free_updates
from autopart.passes.storage import op_name
from autopart.runtime.errors import CaptureError

_AS_IT_IS: ContextVar[bool] = ContextVar("as_it_is", default=False)


@contextmanager
def training(model: nn.Module) -> Iterator[None]:
    """Training mode for the trace: submodules that the user froze in eval mode stay so if the model itself trains."""
    if model.training or _AS_IT_IS.get():
        yield
        return
    with _modes_kept(model):
        model.train()
        yield


@contextmanager
def _modes_kept(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Captures inside take the model in evaluation mode."""
    with _modes_kept(model):
        model.eval()
        token = _AS_IT_IS.set(True)
        try:
            yield
        finally:
            _AS_IT_IS.reset(token)


def evaluation_of(program: Program, model: nn.Module, again: Callable[[], Program]) -> Evaluation:
    """How evaluation differs from the training graph with dropout off and statistics fixed. again: captures anew."""
    asked = program.grad_mode_read
    writes: tuple[str, ...] = ()
    try:
        with _evaluating(model):
            other = again()
        asked = asked or other.grad_mode_read
        flaw = _flaw(program, other, evaluates=True)
        writes = () if flaw else tuple(mode_free_updates(other))
    except CaptureError as error:
        flaw = f"the model cannot be captured in evaluation mode: {error}"
    if not asked:
        return Evaluation(flaw, writes)
    found = _without_gradients(program, model, again, evaluates=not flaw)
    return Evaluation(flaw, writes, found and f"{found}; the model asks for torch.is_grad_enabled() in {asked}")


def _without_gradients(program: Program, model: nn.Module, again: Callable[[], Program], evaluates: bool) -> str:
    """What is computed otherwise under ``torch.no_grad()``. evaluates: whether evaluation is asked for too."""
    try:
        with torch.no_grad():
            flaw = _flaw(program, again(), evaluates=False)
            if evaluates and not flaw:
                with _evaluating(model):
                    flaw = _flaw(program, again(), evaluates=True)
            return flaw
    except CaptureError as error:
        return f"the model cannot be captured so: {error}"


def _flaw(program: Program, other: Program, evaluates: bool) -> str:
    """What ``other`` computes otherwise than ``program``. evaluates: it was captured in evaluation mode."""
    kept = next((node for node in other.graph.nodes if is_training(node)), None) if evaluates else None
    if kept is not None:
        where = f"{graphs.module_path(kept) or 'the model'} ({graphs.source_line(kept)})"
        return (
            f"{op_name(kept)} in {where} stays on in evaluation, where stages switch it off: give it "
            "training=self.training, or of attention's dropout_p 0.0 unless self.training"
        )
    ours, theirs = mode_free_digests(program), mode_free_digests(other)
    differing = [name for name in ours if ours[name] != theirs.get(name)]
    if differing:
        return f"the output {differing[0]!r} is computed by other ops than in training"
    ours, theirs = mode_free_updates(program), mode_free_updates(other)
    for name, digest in theirs.items():
        if ours.get(name) != digest:
            return f"the buffer {name!r} is written by other ops than in training"
    return ""
