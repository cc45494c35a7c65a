"""What a stage of a real run keeps for its backward, counted with saved-tensor hooks, against the prediction."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from test_schedules_equal_serial import chain_of, placed, subject_of
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from autopart.api import load
from autopart.passes.saved import saved_bytes
from autopart.realize import build, read_strategies, realize
from autopart.runtime.manifest import argument_name
from launch import launch


def _count(directory: str, weights: Mapping[str, Tensor], leaves: Mapping[str, Any]) -> dict[int, int]:
    """Of each of this rank's stages, the bytes of distinct storages that autograd keeps of its first microbatch."""
    model = load(directory, dict(weights), device=torch.device("cpu")).train()
    found: dict[int, int] = {}
    for number, module in zip(model.mesh.stages, model.stages, strict=True):
        _watch(model.manifest.stages[number].receives, module, number, found)
    model(**leaves)
    return found


def _watch(receives: tuple[str, ...], module: torch.nn.Module, number: int, found: dict[int, int]) -> None:
    """Counts in ``found`` what is kept inside the module's forward; its inputs but the received ones are left out."""
    forward = module.forward
    received = set(map(argument_name, receives))

    def counted(**arguments: Any) -> Any:
        given = [item for name, item in arguments.items() if isinstance(item, Tensor) and name not in received]
        outside = {item.untyped_storage().data_ptr() for item in (*module.parameters(), *module.buffers(), *given)}
        kept: dict[int, torch.UntypedStorage] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in outside:
                kept[storage.data_ptr()] = storage  # held, so that no address is used twice
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            results = forward(**arguments)
        found.setdefault(number, sum(storage.nbytes() for storage in kept.values()))
        return results

    module.forward = counted


CASES = {
    "gpt2-3": ("gpt2", "1f1b", (0, 1, 2)),
    "t5-4on2": ("t5", "interleaved", (0, 1, 0, 1)),
    "unet-2": ("unet", "1f1b", (0, 1)),
    "branches-2": ("branches", "gpipe", (0, 1)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_stage_keeps_what_is_predicted(case: str, tmp_path: Path) -> None:
    name, schedule, places = CASES[case]
    subject, analysis = subject_of(name)
    plan = placed(chain_of(name, len(places)), schedule, places)
    realize(subject.program, plan, analysis).save(tmp_path / "program")
    weights = {name: tensor.detach() for name, tensor in subject.model.state_dict().items()}
    counted: dict[int, int] = {}
    for found in launch(_count, 1 + max(places), str(tmp_path / "program"), weights, subject.leaves):
        counted.update(found)
    boundaries = [stage.blocks[0] for stage in plan.stages] + [plan.stages[-1].blocks[1]]
    local = build(analysis, boundaries, (), *read_strategies(analysis, plan, ())).local
    samples = plan.batch // plan.microbatches
    predicted = {stage: saved_bytes(graph.nodes, "cpu").at(samples) for stage, graph in enumerate(local)}
    # The smallest stage keeps 672 bytes, 16 of them numbers that autograd wraps as tensors and no rule counts.
    assert counted == pytest.approx(predicted, rel=0.02, abs=16)
