"""Accelerate's ``Accelerator`` for models that run as parallel programs.

    from autopart.accelerator import Accelerator  # instead of: from accelerate import Accelerator

``prepare`` gives every rank the whole batches, and parallelizes the model instead of wrapping it for data parallelism.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from autopart.api import Parallelized, parallelize
from autopart.runtime.errors import InputError
from autopart.runtime.mesh import connect, pick_device

try:
    import accelerate
    from accelerate.data_loader import prepare_data_loader
except ImportError as error:
    raise InputError(f"the Accelerator needs {error.name}: pip install accelerate") from error


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """``accelerate.Accelerator`` over a program of all processes of the job; ``prepare`` it before the first call.

    A model is what ``autopart.parallelize`` returned; or a plain one, which is then parallelized with its defaults. A
    batch is the whole job's. ``accumulate``, ``backward`` and what is prepared otherwise are the library's own. Weights
    are written by ``model.save_pretrained``, the state of training by ``autopart.runtime.checkpoint``: ``save_state``
    and ``load_state`` raise InputError.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        join_job()
        super().__init__(*arguments, **named)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        parallel = model if isinstance(model, Parallelized) else parallelize(model)
        # As for evaluation: not DistributedDataParallel. Each rank moves its own share, once the model is divided.
        return super().prepare_model(parallel, device_placement=False, evaluation_mode=True)

    def prepare_data_loader(self, data_loader: Any, *_: Any, **__: Any) -> Any:
        prepared = whole_batches(self, data_loader)
        self._dataloaders.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        prepared = super().prepare_scheduler(scheduler)
        prepared.split_batches = True  # a step of the job is one step of the schedule
        return prepared

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        return clip_whole(self, super().clip_grad_norm_, parameters, max_norm, norm_type)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        return whole_already(self, super().gather_for_metrics, input_data)

    def save_state(self, *_: Any, **__: Any) -> Any:
        raise InputError(
            "each rank holds a part of the model; use autopart.runtime.checkpoint.save(folder, model, optimizer, "
            "scheduler), or model.save_pretrained(folder) for the weights alone"
        )

    def load_state(self, *_: Any, **__: Any) -> Any:
        raise InputError("use autopart.runtime.checkpoint.load(folder, model, optimizer, scheduler)")


def join_job() -> None:
    """Connects the processes; on CPUs, which the library would otherwise take for a job of one process each."""
    device = pick_device()
    connect(device)
    if device.type == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"  # the library's own switch


def whole_batches(accelerator: Any, loader: Any) -> Any:
    """The loader as accelerate prepares it in one process: every rank has the whole batch, and the model divides it."""
    own = getattr(getattr(loader, "sampler", None), "generator", None) is not None
    return prepare_data_loader(
        loader,
        accelerator.device,
        num_processes=1,
        process_index=0,
        put_on_device=True,
        dispatch_batches=False,
        # the ranks shuffle alike: by torch's seed, unless by a generator that the script seeds
        use_seedable_sampler=accelerator.use_seedable_sampler or not own,
        data_seed=accelerator.dataloader_config.data_seed,
        non_blocking=accelerator.non_blocking,
    )


def clip_whole(
    accelerator: Any, clip: Callable[..., Any], parameters: Any, max_norm: float, norm_type: float = 2
) -> Any:
    """Accelerate's clipping. Of all that a model trains by its own, in which stages that train nothing take part."""
    given = [parameters] if isinstance(parameters, Tensor) else [*parameters]
    ids = set(map(id, given))
    for model in accelerator._models:
        trained = {id(p): p.requires_grad for p in model.parameters()} if isinstance(model, Parallelized) else {}
        if trained and ids <= trained.keys() and ids >= {at for at, asked in trained.items() if asked}:
            accelerator.unscale_gradients()
            return model.clip_grad_norm_(max_norm, norm_type)
    return clip(given, max_norm, norm_type)


def whole_already(accelerator: Any, gather_for_metrics: Callable[..., Any], values: Any, *_: Any) -> Any:
    """Accelerate's cut of the last batch without its gathering: every rank has the whole batch's outputs."""
    gather, accelerator.gather = accelerator.gather, lambda found: found
    try:
        return gather_for_metrics(values)
    finally:
        accelerator.gather = gather
