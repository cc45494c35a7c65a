"""The transformers library's ``Trainer`` for models that run as parallel programs.

    from autopart.trainer import Trainer  # instead of: from transformers import Trainer

All ranks see the same batches, of ``per_device_train_batch_size`` samples in all. What the library's Trainer does per
process (a share of the data for each, DistributedDataParallel, gathered metrics, files of one process) is replaced; its
loop, arguments and callbacks are its own. This file knows which of its methods, some private, that takes.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopart.api import Parallelized, parallelize
from autopart.runtime import checkpoint
from autopart.runtime.errors import InputError

try:
    import transformers

    from autopart.accelerator import clip_whole, join_job, whole_already, whole_batches
except ImportError as error:
    raise InputError(f"the Trainer needs {error.name}: pip install 'transformers[torch]'") from error

STATE = "autopart"


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """``transformers.Trainer`` over a program of all processes of the job.

    model: what ``autopart.parallelize`` returned; or a plain model, which is then parallelized with its defaults. All
    other arguments are the library's. ``save_model`` writes a folder for ``from_pretrained``; checkpoints also hold
    optimizer, scheduler and random state in a folder ``autopart``, and are resumed under any plan and number of
    processes. Raises InputError without a model.
    """

    def __init__(self, model: nn.Module | None = None, *arguments: Any, **named: Any) -> None:
        if model is None:
            raise InputError("autopart's Trainer takes a model, not model_init: parallelize(model) divides it once")
        parallel: Any = model if isinstance(model, Parallelized) else parallelize(model)
        join_job()
        given = named.get("args", arguments[0] if arguments else None)
        if given is not None and given.__dict__.pop("_setup_devices", None):
            _ = given.device  # its view of the job was made before; the library's accelerator starts from it
        # What the library looks up (loss, names of labels, columns) is the original's.
        super().__init__(parallel.original, *arguments, **named)
        self.model = self.model_wrapped = self.callback_handler.model = parallel

    # --- Every rank has the whole batch, and the model divides it ---

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        accelerator = self.accelerator
        accelerator.prepare_model = partial(
            accelerator.prepare_model, device_placement=False, evaluation_mode=True
        )  # not DistributedDataParallel
        accelerator.prepare_data_loader = lambda loader, *_, **__: whole_batches(accelerator, loader)
        accelerator.clip_grad_norm_ = partial(clip_whole, accelerator, accelerator.clip_grad_norm_)
        whole = partial(whole_already, accelerator, accelerator.gather_for_metrics)
        self.gather_function = accelerator.gather_for_metrics = whole

    def get_tp_size(self) -> int:
        """The processes that work on one batch: all."""
        return int(self.accelerator.num_processes)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Each rank moves its own share, once the model is divided."""

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        return list(super().get_decay_parameter_names(self.model.original))

    # --- Files ---

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the model for ``from_pretrained``; all ranks call it."""
        folder = Path(output_dir or self.args.output_dir)
        self.model.save_pretrained(folder)
        if self.args.should_save and self.processing_class is not None:
            self.processing_class.save_pretrained(folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        folder, step = Path(output_dir) / STATE, self.state.global_step
        checkpoint.save(folder, self.model, self._plain_optimizer(), self.lr_scheduler, step=step, keep=1)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Weights are loaded with the optimizer's state."""

    def _load_optimizer_and_scheduler(self, checkpoint_folder: str | None) -> None:
        if checkpoint_folder is not None:
            checkpoint.load(Path(checkpoint_folder) / STATE, self.model, self._plain_optimizer(), self.lr_scheduler)

    def _load_best_model(self) -> None:
        checkpoint.load(Path(self.state.best_model_checkpoint) / STATE, self.model)

    def _plain_optimizer(self) -> torch.optim.Optimizer:
        """Without accelerate's wrapper."""
        plain: Any = getattr(self.optimizer, "optimizer", self.optimizer)
        return plain
