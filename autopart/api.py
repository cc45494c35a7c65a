"""What a training script calls: ``parallelize`` and ``load``.

``parallelize`` returns at once; at the first call of the model, rank 0 captures it on that batch, plans, emits the
stages and sends them to all ranks, and every rank loads its share of the weights into the very Parameter objects that
the script's optimizer already holds.
"""

from __future__ import annotations

import copy
import hashlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from autopart.divided_original import refuse_parts, shapes_of
from autopart.initialize import Init, buffers_made, fill, prepare
from autopart.model_copies import Twin
from autopart.paired_walks import walk
from autopart.runtime.errors import AutopartError, InputError, PlanError
from autopart.runtime.inputs import BatchMode, Returned, check_modes
from autopart.runtime.mesh import connect, pick_device
from autopart.runtime.module import ParallelModule
from autopart.set_by_forward import StandIns
from autopart.sizeless import refuse_lazy_modules
from autopart.spread import check_options, on_first_rank, start_alike, write_on_hosts
from autopart.watched_attributes import Watched
from autopart.watched_parts import SetBuffers, WatchedParts
from autopart.weights import load_or_start, save_weights
from autopart.wishes import check_named

if TYPE_CHECKING:
    from autopart.compiling import Compiler
    from autopart.passes.program import Program
    from autopart.passes.rules import RuleBook
    from autopart.plan import Plan
    from autopart.runtime.pipelining import PipelineStages


def load(
    directory: str | Path, originals: nn.Module | Mapping[str, Tensor | None] | None = None, **options: Any
) -> ParallelModule:
    """Loads an emitted program on this rank of a running job (torchrun; or one process for a plan of one device).

    originals: the model, or its parameters and buffers by name; None: weights start as zeros, to be filled by
    ``load_state_dict``. options: those of :class:`autopart.runtime.ParallelModule`. Raises ClusterError when the job
    has another number of processes than the plan, PlanError when the folder holds no program, or one of another model.
    """
    if isinstance(originals, nn.Module):
        program = ParallelModule(directory, tensors_of(originals), **options)
        program.state_order = state_order(originals)
        return program
    return ParallelModule(directory, originals, **options)


def to_pipeline_stages(
    plan: Plan,
    program: Program,
    originals: nn.Module | Mapping[str, Tensor | None] | None = None,
    *,
    directory: str | Path | None = None,
    rules: RuleBook | None = None,
    **options: Any,
) -> PipelineStages:
    """What :meth:`autopart.plan.Plan.to_pipeline_stages` does; see there."""
    from autopart.compiling import files_of
    from autopart.passes.rules import RULES
    from autopart.realize import realize
    from autopart.runtime.pipelining import check_linear

    def make() -> dict[str, bytes]:
        emitted = realize(program, plan, rules=rules or RULES)
        on_one = max(([s for s, at in enumerate(plan.places) if at == place] for place in set(plan.places)), key=len)
        check_linear(emitted.manifest, on_one, plan.dp)
        emitted.files["plan.json"] = plan.to_json()
        return files_of(emitted)

    connect(pick_device())
    return load(write_on_hosts(on_first_rank(make), directory), originals, **options).to_pipeline_stages()


def tensors_of(model: nn.Module) -> dict[str, Tensor | None]:
    """Parameters and buffers under all their names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def state_order(model: nn.Module) -> list[str]:
    """Names of parameters and buffers in the order of ``state_dict()``: a module's own, then its parts'."""
    return [
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        for name in (*module._parameters, *module._buffers)
    ]


def parallelize(
    model: nn.Module,
    *,
    cluster: Any = None,
    plan: Any = None,
    loss_fn: Callable[..., Tensor] | None = None,
    batch: BatchMode = "global",
    outputs: Returned = "loss",
    batch_dims: Mapping[str, int | None] | None = None,
    directory: str | Path | None = None,
    verbose: bool = True,
    rules: Any = None,
    precision: str = "",
    reduce_dtype: str = "",
    example: Mapping[str, Any] | Sequence[Any] | None = None,
    weights: str | Path | None = None,
    init: Init | Literal[False] | None = None,
    variants: int = 32,
    **limits: Any,
) -> nn.Module:
    """The model as a parallel program over the processes of this job.

    Called alike on all ranks of a script that torchrun started (in one process it trains there). The model is planned
    at its first call; until then its parameters are the original ones, and an optimizer made from them goes on working.

    cluster: a Cluster or its text (default: this job's devices). plan: a Plan or a plan file, instead of planning.
    loss_fn: for models without a loss inside: ``out = model(x, targets=y)`` has ``out.loss = loss_fn(model(x), y)``.
    batch: "global": every rank passes the same whole batch; "local": each replica its own part (needs ``dp`` or a
    plan). outputs: "loss" returns only the loss in training, "all" everything. batch_dims: as for ``capture``.
    directory: where to write the emitted stages (default: a temporary folder). verbose: rank 0 prints the plan.
    rules: a RuleBook with the user's rules (``autopart.passes.rules.RULES.extended``; default: RULES).
    precision: "bf16-mixed" or "fp16-mixed": weights and their gradients in their own type, ops as under
    ``torch.autocast``; "": the types of the model, under the autocast that is on around the first call.
    reduce_dtype: in which ranks add gradients up, "float32", "bfloat16" or "float64"; "": the parameters' own types.
    example: a batch to plan with now instead of at the first call, by name (or by position, in a tuple or list):
    ``data_rank`` and ``data_world_size`` are known from then on, which a sampler for ``batch="local"`` needs.
    weights: a folder of safetensors files, of which each rank reads its shares once the model is planned. What is
    missing, such as a new head, keeps its initial values, with a warning.
    init: for a model on meta, each rank of which makes only its shares of the initial values: those that one process
    would have drawn where the model was built under ``autopart.parameters_on_meta()``, else what modules'
    ``reset_parameters`` and ``_init_weights`` give, with a warning. A function is called for each module after that,
    children first, as by ``model.apply(init)``. False: zeros, where a checkpoint will be loaded.
    variants: for inputs of other sizes than the first batch's (but for the number of samples), such as sequences padded
    to each batch's longest, a program of the same plan is made when they are first seen; so many are kept in memory.
    limits: other keyword arguments of ``make_plan``, such as pp, dp, tp, zero, microbatches, schedule, recompute, pins,
    optimizer, dropout; not beside a plan.

    Raises InputError and PlanError for values that are none of these, for a model that is wrapped or parallelized
    already, CaptureError for lazy modules that were never called, and PlanError where nothing says how a model on meta
    starts; what the model or the plan lacks is said when the model is planned.
    """
    if not isinstance(model, nn.Module):
        raise PlanError(f"parallelize takes an nn.Module, got {type(model).__name__}")
    if isinstance(model, Parallelized):
        raise PlanError("parallelize takes the model itself, and this one is parallelized already: use it as it is")
    inner = "module" if isinstance(model, DataParallel | DistributedDataParallel) else "_orig_mod"
    if isinstance(getattr(model, inner, None), nn.Module):  # torch.compile's keeps the model under that name
        raise PlanError(
            f"parallelize takes the model itself, not one that is wrapped ({type(model).__name__}): "
            f"give it model.{inner}"
        )
    refuse_lazy_modules(model)
    check_modes(batch, outputs)
    check_named(limits)
    if variants < 1:
        raise InputError(f"variants: at least 1 is kept, not {variants}")
    if plan is not None and (limits or cluster is not None):
        named = ", ".join([*limits, *(["cluster"] if cluster is not None else [])])
        raise PlanError(f"a plan is given, which says all that {named} would; leave out one or the other")
    on_meta = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    if callable(init) and not on_meta:
        raise PlanError("init= is for a model on meta; this one has its values: call model.apply(init) instead")
    if on_meta and init is not False:
        if weights is None:
            prepare(model, init)
        else:
            prepare(model, names=())
    parallelized = Parallelized(
        model,
        {
            "cluster": cluster,
            "plan": plan,
            "loss_fn": loss_fn,
            "batch_dims": batch_dims,
            "directory": directory,
            "verbose": verbose,
            "rules": rules,
            "precision": precision,
            "reduce_dtype": reduce_dtype,
            "variants": variants,
            "limits": limits,
        },
        batch,
        outputs,
    )
    if weights is not None:
        parallelized.when_started(partial(load_or_start, weights, parallelized, init or None))
    elif on_meta and init is not False:
        parallelized.when_started(partial(fill, parallelized))
    if isinstance(example, Mapping):
        parallelized.start((), dict(example))
    elif example is not None:
        parallelized.start(tuple(example), {})
    return parallelized


class Parallelized(Twin):
    """A model that becomes a parallel program at its first call.

    ``original`` keeps the model's attributes (such as transformers' ``config``); after the first call its parameters
    are this rank's shares. ``parallel`` is the program, None before.
    """

    def __init__(self, model: nn.Module, settings: dict[str, Any], batch: BatchMode, outputs: Returned):
        super().__init__(model, settings, batch)
        self._returned = outputs
        self._callbacks: list[Callable[[], object]] = []
        self._watched: Watched
        self._watched_parts: WatchedParts
        self._set_buffers: SetBuffers
        self._stand_ins = StandIns(model, ())
        self.training = model.training

        call = torch.compiler.disable(self._call_program)  # torch.compile of this module would go into the exchanges

        @wraps(model.forward)  # libraries look up what a model takes: names of columns, keyword arguments
        def forward(*args: Any, **kwargs: Any) -> Any:
            return call(args, kwargs)

        object.__setattr__(self, "forward", forward)

    def when_started(self, callback: Callable[[], object]) -> None:
        """Called on every rank once the weights are divided, before the first step."""
        self._callbacks.append(callback)

    @property
    def _current(self) -> nn.Module:
        return self.original if self.parallel is None else self.parallel

    def _call_program(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the original returns; see :class:`autopart.runtime.ParallelModule`."""
        self._check_followed(args, kwargs)
        if self.parallel is None:
            self.start(args, kwargs)
            assert self.parallel is not None
        else:
            if self.parallel.mesh.rank == 0:
                self._watched.warn_of_changes()
                self._watched_parts.warn_of_changes()
        return self.parallel(*args, **kwargs)

    def _take_set_buffers(self) -> None:
        for name, value in self._set_buffers.take():
            self._planned("set_buffer").set_buffer(name, value)

    def start(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Plans, emits and divides the model for batches like these inputs. All ranks call it, once."""
        with torch.inference_mode(False):  # what is made now will train
            twins = self._twins()
            self._become(self._start(args, kwargs))
            self._lead(twins)

    def _become(self, program: ParallelModule) -> None:
        object.__setattr__(self, "parallel", program)
        self._watch()
        program.taken_too = self._take_set_buffers
        program.state_order = state_order(self.original)
        program.train(self.training)
        while self._callbacks:
            self._callbacks.pop(0)()

    def _watch(self) -> None:
        """From now on what a script changes is told, or taken on."""
        loss_fn = self._settings.get("loss_fn")
        loss = loss_fn if isinstance(loss_fn, nn.Module) else nn.Module()
        watched = {"": self.original, "loss_fn": loss}
        self._watched, self._watched_parts = Watched(watched), WatchedParts(watched)
        self._set_buffers = SetBuffers({"": self.original, "loss_function": loss})

    @property
    def data_rank(self) -> int:
        """Which part of the data this rank is to be fed; see :attr:`autopart.runtime.ParallelModule.data_rank`."""
        return self._planned("data_rank").data_rank

    @property
    def data_world_size(self) -> int:
        """How many parts the data has."""
        return self._planned("data_world_size").data_world_size

    @property
    def data_shares(self) -> tuple[int, ...]:
        """How large these are; see :attr:`autopart.runtime.ParallelModule.data_shares`."""
        return self._planned("data_shares").data_shares

    def _planned(self, name: str) -> ParallelModule:
        """Raises PlanError before the model is planned."""
        if self.parallel is None:
            raise PlanError(
                f"{name} is known when the model is planned, at its first call; parallelize(model, example=batch) "
                "plans at once"
            )
        return self.parallel

    def _buffers_on_meta(self) -> dict[str, Tensor]:
        """The values of buffers on meta. Raises PlanError for those that nobody knows and no file of weights holds."""
        kept = self.original.state_dict(keep_vars=True).keys()
        made = buffers_made(self.original)
        for name, buffer in self.original.named_buffers():
            if buffer.is_meta and name not in kept and name not in made:
                raise PlanError(
                    f"the buffer {name!r} is on meta and in no state dict, so nobody knows its value; build the model "
                    "under autopart.parameters_on_meta() instead"
                )
        return made

    def _start(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ParallelModule:
        device = pick_device()
        connect(device)
        settings = self._settings
        plain = {name: settings[name] for name in ("batch_dims", "precision", "reduce_dtype", "variants")}
        check_options({"batch": self._batch, "outputs": self._returned, **plain, **settings["limits"]})
        made = self._buffers_on_meta()
        files, attributes = on_first_rank(lambda: (self._compiler.plan(args, kwargs), self._compiler.set_attributes))
        self._stand_ins = StandIns(self.original, attributes)
        self._directory = write_on_hosts(files, settings["directory"])
        parallel = self._load(made, device)
        if parallel.mesh.rank == 0 and settings["verbose"]:
            told = files["plan.txt"].decode()
            print(told, f"\nstages in {self._directory}", sep="", file=sys.stderr, flush=True)
        return parallel

    def _load(self, made: Mapping[str, Tensor], device: torch.device) -> ParallelModule:
        """The program of this model's folder, with its tensors. made: buffers on meta by name."""
        originals = {**tensors_of(self.original), **made}
        start_alike(originals, device)
        whole = shapes_of(self.original)
        parallel = load(self._directory, originals, batch=self._batch, outputs=self._returned, device=device)
        self._refusals = refuse_parts(self.original, whole, parallel.manifest)
        buffers = {**dict(self.original.named_buffers(remove_duplicate=False)), **made}
        parallel.variants.allow(self._compile_for, buffers, self._settings["variants"])
        return parallel

    @cached_property
    def _compiler(self) -> Compiler:
        """Rank 0's."""
        from autopart.compiling import Compiler

        return Compiler(self.original, self._settings, self._batch)

    def _compile_for(self, args: Sequence[Any], kwargs: Mapping[str, Any], sizes: str) -> Path:
        """The folder of a program for inputs of other sizes. All ranks call it; see runtime/variants.py."""
        began = time.perf_counter()

        def make() -> tuple[dict[str, bytes], tuple[str, ...]]:
            try:
                with self._stand_ins.away():
                    return self._compiler.for_sizes(args, kwargs)
            except AutopartError as error:
                raise InputError(f"no program can be made for {sizes}: {error}") from error

        files, whole = on_first_rank(make)
        self._watch()  # a capture may leave other tensors behind
        directory = self._settings["directory"]
        if directory is not None:
            digest = hashlib.sha256(sizes.encode()).hexdigest()[:8]
            directory = Path(directory).with_name(f"{Path(directory).name}-sizes-{digest}")
        target = write_on_hosts(files, directory)
        program = self._planned("variants")
        if program.mesh.rank == 0 and self._settings["verbose"]:
            told = f"autopart: compiled for {sizes} in {time.perf_counter() - began:.1f} s, stages in {target}"
            if whole:
                told += f"; {len(whole)} ops run whole that the plan shards, such as {whole[0]}"
            if not program.variants.made:
                told += (
                    f". Each new size is compiled for once, and the last {self._settings['variants']} are kept in "
                    "memory: padding to few lengths, such as multiples of 64, saves time"
                )
            print(told, file=sys.stderr, flush=True)
        return target

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Parallelized:
        """What ``to``, ``half`` and their like call: the original is converted, once planned it stays as it is."""
        self._current._apply(fn, recurse)
        return self

    def train(self, mode: bool = True) -> Parallelized:
        self.training = mode
        self._current.train(mode)
        return self

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Those of :meth:`named_parameters`."""
        self._check_not_on_meta()
        return walk(self, (parameter for _, parameter in self._named("parameters", "", recurse, True)))

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The original's, of which, once there is a program, this rank has its shares, and nothing of other stages'.

        Raises PlanError before the first call where the original is on meta: its parameters are not kept.
        """
        self._check_not_on_meta()
        return walk(self, self._named("parameters", prefix, recurse, remove_duplicate))

    def _named(self, kind: Literal["parameters", "buffers"], prefix: str, recurse: bool, remove_duplicate: bool) -> Any:
        """By the original's names, and in its order, those of the program once there is one."""
        ours = self.parallel and getattr(self.parallel, f"named_{kind}")(remove_duplicate=False)
        found = dict(ours or ())
        for name, tensor in getattr(self.original, f"named_{kind}")("", recurse, remove_duplicate):
            yield f"{prefix}.{name}" if prefix else name, found.get(name, tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> Parallelized:
        """Raises PlanError once it is planned: its parts are in other processes."""
        if self.parallel is not None:
            raise PlanError(
                "a model that runs as a parallel program has parts in other processes, and cannot be copied: copy its "
                "state_dict(), or the original before it is parallelized"
            )
        if self._callbacks:
            raise PlanError("a model whose weights are still to be made cannot be copied: copy it once it is planned")
        found = Parallelized(copy.deepcopy(self.original, memo), self._settings, self._batch, self._returned)
        found.training = self.training
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises PlanError once it is planned: a file would hold what this process alone has."""
        if self.parallel is not None:
            raise PlanError(
                "a model that runs as a parallel program has parts in other processes, and cannot be pickled: save its "
                "state_dict(), taken on every rank and written by one, or use autopart.runtime.checkpoint.save"
            )
        return super().__reduce_ex__(protocol)

    def _check_not_on_meta(self) -> None:
        if self.parallel is None and any(parameter.is_meta for parameter in self.original.parameters()):
            raise PlanError(
                "the model is on meta, so its parameters are made when it is planned; make the optimizer after that: "
                "parallelize(model, example=batch) plans at once"
            )

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes the weights as safetensors files, and the model's ``config`` if it has one; all ranks call it.

        ``from_pretrained`` of the transformers library reads the folder. Raises PlanError before the first call.
        """
        program = self._planned("save_pretrained")
        save_weights(folder, program)
        config = getattr(self.original, "config", None)
        if program.mesh.rank == 0 and config is not None and hasattr(config, "save_pretrained"):
            config.save_pretrained(folder)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """The original's, as they are in the program: this rank's shares, and nothing of other stages'."""
        return self._named("buffers", prefix, recurse, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The whole model's state; once it is parallel all ranks have to call this."""
        return self._current.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Raises PlanError before the first call where the original is on meta: the values would be dropped."""
        if self.parallel is None and not assign and any(tensor.is_meta for tensor in self.original.parameters()):
            raise PlanError(
                "the model is on meta, where no values can be kept; load them once it is planned (parallelize(model, "
                "example=batch) plans at once), or give assign=True, which keeps them whole until then"
            )
        return self._current.load_state_dict(state_dict, strict, assign)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales the gradients of all ranks to a norm of at most ``max_norm``; all ranks call it."""
        if self.parallel is None:
            return torch.nn.utils.clip_grad_norm_(self.original.parameters(), max_norm, norm_type)
        return self.parallel.clip_grad_norm_(max_norm, norm_type)

    def finish(self) -> Any:
        """Ends the last batch of the schedule "2bw"; see :meth:`autopart.runtime.ParallelModule.finish`."""
        if self.parallel is None:
            raise PlanError("finish() ends a batch that is in flight; call the model before")
        return self.parallel.finish()

    def trace(self, path: str | Path) -> AbstractContextManager[None]:
        """Records the calls inside the block; see :meth:`autopart.runtime.ParallelModule.trace`.

        Raises PlanError before the first call, which plans and is nothing to be recorded.
        """
        if self.parallel is None:
            raise PlanError(
                "trace() records a program that is planned at the model's first call; call the model before"
            )
        return self.parallel.trace(path)
