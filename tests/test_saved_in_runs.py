"""What a stage of a real run keeps for its backward, counted with saved-tensor hooks, against the prediction."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from chains import chain_of, subject_of
from kept_storages import KeptStorages
from test_recompute import recomputing
from test_schedules_equal_serial import placed
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from autopart.api import load
from autopart.passes.kept import kept_bytes
from autopart.realize import realize, realized, recomputed
from autopart.runtime.manifest import argument_name
from launch import launch


def _count(directory: str, weights: Mapping[str, Tensor], leaves: Mapping[str, Any]) -> dict[int, int]:
    """Of each of this rank's stages, the bytes of distinct storages that autograd keeps of its first microbatch."""
    model = load(directory, dict(weights), device=torch.device("cpu")).train()
    found: dict[int, int] = {}
    for number, module in zip(model.mesh.stages, model.stages, strict=True):
        watch(model.manifest.stages[number].receives, module, number, found)
    model(**leaves)
    return found


def watch(receives: tuple[str, ...], module: torch.nn.Module, number: int, found: dict[int, int]) -> None:
    """Counts in ``found`` what is kept inside the module's forward; its inputs but the received ones are left out."""
    forward = module.forward
    received = set(map(argument_name, receives))
    of_file = type(module).forward.__globals__
    again = of_file.get("checkpoint")

    def counted(**arguments: Any) -> Any:
        given = [item for name, item in arguments.items() if isinstance(item, Tensor) and name not in received]
        storages = KeptStorages.beside((*module.parameters(), *module.buffers(), *given))

        def given_again(layer: Any, *values: Any) -> Any:
            for item in values:
                if isinstance(item, Tensor):
                    storages.pack(item)
            assert again is not None
            return again(layer, *values)

        with saved_tensors_hooks(storages.pack, lambda tensor: tensor):
            of_file["checkpoint"] = given_again
            results = forward(**arguments)
            of_file["checkpoint"] = again
        found.setdefault(number, storages.nbytes)
        return results

    module.forward = counted


CASES = {
    "gpt2-3": ("gpt2", "1f1b", (0, 1, 2), ()),
    "gpt2-3-some": ("gpt2", "1f1b", (0, 1, 2), (1, 2)),
    "t5-4on2": ("t5", "interleaved", (0, 1, 0, 1), ()),
    "t5-3-some": ("t5", "1f1b", (0, 1, 2), (0, 2, 3)),
    "unet-2": ("unet", "1f1b", (0, 1), ()),
    "branches-2": ("branches", "gpipe", (0, 1), ()),
}
"""(model, schedule, ranks of the stages, numbers of the layers that are computed again)"""


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if case.startswith(("gpt2", "t5-3")) else ()) for case in CASES]
)
def test_a_stage_keeps_what_is_predicted(case: str, tmp_path: Path) -> None:
    name, schedule, places, again = CASES[case]
    subject, analysis = subject_of(name)
    plan = placed(chain_of(name, len(places)), schedule, places)
    local = realized(analysis, plan).local
    if again:
        plan = recomputing(plan, local, again)
    realize(subject.program, plan, analysis).save(tmp_path / "program")
    weights = {name: tensor.detach() for name, tensor in subject.model.state_dict().items()}
    counted: dict[int, int] = {}
    for found in launch(_count, 1 + max(places), str(tmp_path / "program"), weights, subject.leaves):
        counted.update(found)
    samples = plan.batch // plan.microbatches
    layers = recomputed(plan, local)
    predicted = {stage: kept_bytes(graph, (), samples, layers[stage], "cpu") for stage, graph in enumerate(local)}
    # The smallest stage keeps 672 bytes, 16 of them numbers that autograd wraps as tensors and no rule counts.
    assert counted == pytest.approx(predicted, rel=0.02, abs=16)
