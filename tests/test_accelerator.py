"""Accelerate's loop over parallel programs: its losses, norms and weights."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from test_trainer import Rows, model_of
from torch import Tensor
from torch.utils.data import DataLoader

import autopart
from autopart.precision import eager_in_float64, float64_throughout
from autopart.runtime.errors import InputError
from launch import launch

pytest.importorskip("accelerate", reason="needs accelerate: pip install accelerate")


def trained(accelerator: Any, model: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Two epochs of 22 rows in batches of 4 (the last one has 2), two of them accumulated."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 6)
    loader = DataLoader(Rows(), 4, shuffle=True, generator=torch.Generator().manual_seed(0))
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    found: list[float] = []
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                out = model(input_ids=batch["input_ids"], labels=batch["labels"])
                accelerator.backward(out.loss)
                found.append(out.loss.item())
                if accelerator.sync_gradients:
                    found.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.3)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        found.append(len(accelerator.gather_for_metrics(batch["input_ids"])))
    return found, model.state_dict()


def built(frozen: bool) -> Any:
    """frozen: trained behind the last layer alone, so that a stage trains nothing."""
    model = model_of()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or "ln_f" in name)
    return model


def in_parallel(limits: dict[str, Any], frozen: bool) -> tuple[list[float], dict[str, Tensor]]:
    from autopart.accelerator import Accelerator

    # accelerate asks for what torchrun sets; the processes are connected already
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0", LOCAL_WORLD_SIZE="2")
    accelerator = Accelerator(gradient_accumulation_steps=2)
    assert accelerator.num_processes == 2
    model = built(frozen)
    with float64_throughout():
        example = {"input_ids": Rows().ids[:4], "labels": Rows().labels[:4]}
        model = autopart.parallelize(model, verbose=False, example=example, **limits)
    found = trained(accelerator, model)
    with pytest.raises(InputError, match="each rank holds a part"):
        accelerator.save_state("nowhere")
    return found


@pytest.mark.parametrize(
    ("limits", "frozen"),
    [
        ({"pp": 2, "microbatches": 2}, False),
        ({"pp": 2, "microbatches": 2}, True),
        pytest.param({"dp": 2}, False, marks=pytest.mark.slow),
    ],
)
def test_it_trains_as_the_library_s_own(limits: dict[str, Any], frozen: bool) -> None:
    import accelerate

    model = built(frozen)
    with eager_in_float64(model):
        expected, weights = trained(accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2), model)
    for found, state in launch(in_parallel, 2, limits, frozen, timeout=240.0):
        assert found == pytest.approx(expected, rel=1e-9)
        for name, tensor in weights.items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-9)
