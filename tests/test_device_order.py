"""Devices of a plan in any order: of stages, of replicas and of tensor ranks, as those on unlike nodes may be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_unlike_batches import captured, on_ranks, steps, tagger
from unlike_cases import Mesh, laid_on

from autopart.planner import make_plan
from autopart.realize import realize
from clusters import ideal
from launch import launch

CASES: dict[str, tuple[tuple[Mesh, ...], tuple[int, ...], tuple[int, ...], int]] = {
    "stages": (((1, 1), (1, 1)), (), (1, 0), 0),
    "replicas": (((3, 1),), (), (2, 0, 1), 1),
    "unlike replicas": (((3, 1),), (3, 2, 1), (1, 2, 0), 2),
    "tied": (((2, 1), (2, 1)), (), (3, 0, 2, 1), 0),
    "tied, unlike meshes": (((2, 1), (1, 2)), (), (1, 0, 3, 2), 0),
}
"""Meshes, parts of the first stage's replicas, the devices that stages take in this order, the level of ZeRO."""


@pytest.mark.parametrize("name", CASES)
def test_programs_on_devices_in_any_order_equal_one_process(name: str, tmp_path: Path) -> None:
    meshes, shares, order, level = CASES[name]
    program, analysis = captured("mean")
    given: dict[str, Any] = {"batch": 12, "recompute": "none", "analysis": analysis}
    plan = make_plan(program, ideal(len(meshes)), pp=len(meshes), dp=1, tp=1, microbatches=2, **given)
    sharded = make_plan(program, ideal(2), pp=1, dp=1, tp=2, microbatches=1, **given)
    laid = laid_on(plan, meshes, shares, sharded=sharded)
    stages = tuple(replace(s, devices=tuple(order[device] for device in s.devices)) for s in laid.stages)
    zero = {info.name: level for info in program.parameters if info.shape[0] % 3 == 0} if level else {}
    realize(program, replace(laid, stages=stages, zero=zero), analysis).save(tmp_path)
    model, sizes = tagger("mean"), [12, 12, 5]
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    losses, _ = steps(model, "mean", sizes)
    for found, _, state in launch(on_ranks, len(order), str(tmp_path), "mean", sizes, weights):
        torch.testing.assert_close(found, losses, rtol=1e-10, atol=1e-12)
        for key, tensor in model.state_dict().items():
            torch.testing.assert_close(state[key], tensor, rtol=1e-10, atol=1e-12, msg=key)
