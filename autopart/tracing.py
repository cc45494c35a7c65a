"""Capture: an unmodified nn.Module becomes a Program.

torch.export (non-strict, training IR) traces the model once with fake tensors; the batch size stays symbolic. The
model is wrapped so that the trace sees a flat list of tensors in and out: nested inputs, dataclasses and
transformers' outputs keep their names, one tensor that is passed twice stays two inputs, and what is not a tensor
(a cache object, None, a number) does not reach the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.fx._lazy_graph_module import _use_lazy_graph_module

from autopart.argument_checks import unchecked_arguments
from autopart.assembled import assemble
from autopart.assumed_branches import Decisions, settle
from autopart.capture_errors import batch_reason, capture_error, fixes_batch, largest_batch
from autopart.capture_place import Where
from autopart.evaluation import evaluation_of, training
from autopart.example_inputs import batch_dims_of, bind, examples, guess_of
from autopart.export_noise import without_graphs
from autopart.flat_model import TARGETS, FlatModel
from autopart.grad_mode import grad_mode_read
from autopart.kept_buffers import kept_buffers
from autopart.long_traces import told_where
from autopart.lost_weights import weights_kept
from autopart.meta_capture import all_on_meta
from autopart.mixed_precision import autocast_of, check_sums, current_precision
from autopart.other_draws import note_on_draws, other_draws
from autopart.own_backwards import Place, own_backwards
from autopart.own_numbers import carried, note_on_numbers
from autopart.parameter_memory import check_apart
from autopart.passes.autocast import entered
from autopart.passes.program import Program
from autopart.repeated_layers import export_with_copies
from autopart.runtime.errors import CaptureError
from autopart.runtime.structure import flatten
from autopart.set_by_forward import note_on_tensors, without_new_attributes
from autopart.sizeless import refuse_lazy_modules, refuse_sparse_and_nested
from autopart.symbolic_lengths import symbolic_lengths
from autopart.synced_norms import synced_norms, synced_norms_alone


def capture(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    batch_dims: Mapping[str, int | None] | None = None,
    name: str = "",
    check_eval: bool = True,
    precision: str = "",
    reduce_dtype: str = "",
) -> Program:
    """Captures the training computation of ``model`` on example inputs.

    args, kwargs: example inputs, any nesting; on the model's device, or fake, or on meta with a meta model. With
    ``loss_fn``, ``kwargs["targets"]`` is what ``loss_fn(model(...), targets)`` compares with.
    batch_dims: which dim of an input holds samples, by input path; None: the input is shared by all samples. By
    default every tensor whose dim 0 has the size of the first tensor's dim 0.
    check_eval: before the program is emitted, also capture the model in evaluation mode, to know whether the emitted
    stages, which switch dropout, attention's dropout and batch norm by ``self.training``, can be evaluated; else they
    refuse to be. Until then the program holds the model and the inputs.
    precision: "bf16-mixed" or "fp16-mixed": as under ``torch.autocast``, weights kept in their own type; "": as the
    model computes, under the autocast that is on around this call.
    reduce_dtype: in which ranks add gradients up, "float32", "bfloat16" or "float64"; "": the parameters' own types.
    name: what plans call the model (default: its class).
    Raises CaptureError naming the module path and source line that cannot be captured.
    """
    if not isinstance(model, nn.Module):
        raise CaptureError(f"expected an nn.Module, got {type(model).__name__}; wrap the function in a module")
    if loss_fn is not None and not callable(loss_fn):
        raise CaptureError(f"loss_fn is a function of the model's output and the targets, not {loss_fn!r}")
    if isinstance(args, torch.Tensor | str | Mapping) or not isinstance(args, Iterable):
        raise CaptureError(f"args is a tuple or list of inputs, such as (x,), not a {type(args).__name__}")
    if not isinstance(kwargs or {}, Mapping):
        raise CaptureError(f"kwargs has inputs by name, such as {{'labels': y}}, not a {type(kwargs).__name__}")
    kwargs = dict(kwargs or {})
    targets = {TARGETS: kwargs.pop(TARGETS)} if loss_fn is not None and TARGETS in kwargs else {}
    if loss_fn is not None and not targets:
        raise CaptureError(f"a model with loss_fn needs the keyword input {TARGETS!r}: loss_fn(model(...), {TARGETS})")
    if isinstance(loss_fn, nn.Module) and any(True for _ in loss_fn.parameters()):
        raise CaptureError("loss_fn has parameters of its own; put it inside the model, so that they are trained too")
    scripted = [path for path, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    if scripted:
        raise CaptureError(
            f"the module {scripted[0] or '(root)'} is compiled by torch.jit, whose code cannot be traced; give the "
            "module that it was compiled from"
        )
    refuse_lazy_modules(model)
    check_apart(model)
    bound = {**bind(model.forward, args, kwargs), **targets}
    named, structure = flatten(bound)
    refuse_sparse_and_nested(named)
    dims = batch_dims_of(named, batch_dims or {})
    named, batch = examples(named, dims)
    flat = FlatModel(model, loss_fn, structure, named)
    precision = precision or current_precision(flat)
    autocast = autocast_of(precision, flat)
    name = name or type(model).__name__

    def trace(decisions: Decisions | None, scaled: frozenset[Place] = frozenset()) -> Program:
        flat.decisions = decisions
        with (
            training(model),
            entered(autocast),
            kept_buffers(flat),
            without_new_attributes(m for m in flat.modules() if m is not flat),
            unchecked_arguments(),
            weights_kept(),
            symbolic_lengths(flat),
            synced_norms_alone(),
            all_on_meta(flat, named) as leaves,
            own_backwards(model, scaled) as own,
            other_draws() as drawn,
            grad_mode_read() as asked,
        ):
            exported, static_batch, most = _export(flat, leaves, dims, batch)
        if more := own.scaled():
            return trace(decisions, scaled | more)
        if static_batch:
            static_batch += guess_of(named, dims, batch_dims or {})
        with entered({}):
            program = assemble(flat, exported, named, dims, tuple(bound), batch, static_batch, name, autocast)
        program.most_samples = most
        program.synced_norms = synced_norms(model)
        program.grad_mode_read = next(iter(asked), "")
        program.set_attributes = flat.returned.attributes
        program.notes = (*program.notes, *own.notes(), *map(note_on_draws, drawn))
        if told := [item for item in program.set_attributes if not item.is_table]:
            program.notes = (*program.notes, note_on_tensors(told))
        return program

    program = settle(trace, named, dims, batch)
    if changed := flat.returned.changed:
        with carried(changed):
            following = settle(trace, named, dims, batch)
        program.notes = (*program.notes, note_on_numbers(changed, program, following))
    program.precision = precision
    program.reduce_dtype = check_sums(reduce_dtype)
    if check_eval:
        options: dict[str, Any] = {
            "loss_fn": loss_fn,
            "batch_dims": batch_dims,
            "precision": precision,
            "check_eval": False,
        }
        again = partial(capture, model, args, {**kwargs, **targets}, **options)
        program.check_evaluation = partial(evaluation_of, program, model, again)
    return program


def _export(
    flat: FlatModel, named: dict[str, Any], dims: dict[str, int | None], batch: int
) -> tuple[torch.export.ExportedProgram, str, int]:
    """The graph, why it fixes the batch size ('' if it does not), and how many samples it holds for (0: any)."""
    tensors = [(path, leaf) for path, leaf in named.items() if isinstance(leaf, torch.Tensor)]
    arguments = tuple(leaf for _, leaf in tensors)
    # where the number of samples is fixed, it has to be the given one, also if that is 1
    given = tuple(leaf if (d := dims[path]) is None or batch > 1 else leaf.narrow(d, 0, 1) for path, leaf in tensors)
    reason, most = "", 0
    while True:
        symbol = torch.export.Dim("batch", min=1, max=most or None)
        shapes = tuple(None if dims[path] is None else {dims[path]: symbol} for path, _ in tensors)
        where = Where(flat)
        if flat.decisions is not None:
            flat.decisions.where = where
        try:
            # passes of export make a dozen modules, whose Python code nobody runs
            with where, told_where(where), without_graphs(), _use_lazy_graph_module(True):
                specs = None if reason else (shapes,)
                inputs = given if reason else arguments
                export = partial(torch.export.export, flat, inputs, dynamic_shapes=specs, strict=False)
                found = (export_with_copies(flat, export) if flat.decisions is None else None) or export()
                return found, reason, most
        except Exception as error:
            if not reason and not most and (bound := largest_batch(error)) >= max(batch, 2):
                most = bound
                continue
            if not reason and fixes_batch(error):
                reason, most = batch_reason(error), 0
                continue
            raise capture_error(error, where) from error
