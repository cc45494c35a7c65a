"""Tensor sharding on several axes: strategies that hold together give the same training, and move what was counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopart.passes.conversion import Axes
from programs import randomly
from test_shard import check

XY: Axes = (("x", 2), ("y", 2))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seed"), [("gpt2", 0), ("llama", 1), ("mixtral", 2)])
def test_random_strategies_on_two_axes(tmp_path: Path, name: str, seed: int) -> None:
    counted = check(tmp_path, name, randomly(seed), axes=XY)
    assert len(counted) >= 10
    assert {axis for axis, _, _ in counted} == {"x", "y"}
