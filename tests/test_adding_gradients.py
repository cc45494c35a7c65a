"""Adding a microbatch's gradients to those before: what is priced, what runs, and floors that count it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autopart.analysis import Analysis, analyze
from autopart.api import load
from autopart.candidates import Candidates
from autopart.planner import make_plan
from autopart.realize import realize
from autopart.solver.degrees import Degrees
from autopart.tracing import capture
from clusters import ideal
from families import family
from launch import launch

MEMORY = 1e12 * 0.8  # bytes/s of the ideal device
BATCH, REPLICAS = 8, 2


@functools.lru_cache(maxsize=1)
def analysis() -> Analysis:
    item = family("gpt2")
    return analyze(capture(item.build(), (), item.inputs(BATCH), check_eval=False))


def candidates(zero: int | None = 0) -> Candidates:
    return Candidates(analysis(), ideal(REPLICAS), BATCH, "adamw", zero=zero)


class Added(TorchDispatchMode):
    """Bytes of the tensors that something is added to in place."""

    def __init__(self) -> None:
        super().__init__()
        self.into: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.add_.Tensor:
            self.into.append(args[0].nbytes)
        return func(*args, **(kwargs or {}))


def added_bytes(directory: str) -> int:
    """What a rank adds to its gradients in one step."""
    item = family("gpt2")
    torch.manual_seed(0)
    model = load(directory, item.build(), device=torch.device("cpu")).train()
    with Added() as found:
        model(**item.inputs(BATCH)).loss.backward()
    sizes = {parameter.nbytes for parameter in model.parameters()}
    return sum(size for size in found.into if size in sizes)


@pytest.mark.parametrize(("microbatches", "zero"), [(1, 0), (4, 0), (4, 2)])
def test_as_many_bytes_are_added_as_are_priced(microbatches: int, zero: int, tmp_path: Path) -> None:
    limits: dict[str, Any] = {"pp": 1, "dp": REPLICAS, "tp": 1, "recompute": "none", "schedule": "gpipe"}
    plan = make_plan(
        *(analysis().program, ideal(REPLICAS)), analysis=analysis(), batch=BATCH, microbatches=microbatches,
        zero=zero, **limits,
    )  # fmt: skip
    realize(analysis().program, plan, analysis()).save(tmp_path / "program")
    found = launch(added_bytes, REPLICAS, str(tmp_path / "program"))
    of = candidates(zero)
    config = Degrees(1, REPLICAS, (), microbatches, "gpipe", "none")
    choice = of.choose(config)
    assert set(choice.levels.values()) == ({zero} if zero else set())
    setting = of.setting(config)
    trained = [node for node in of.readers if node.meta.get("trainable")]
    seconds = sum(
        setting.data.adding_seconds(of._held(node, choice, setting), choice.levels.get(node.meta["name"], 0))
        for node in trained
    )
    assert found == [pytest.approx(seconds * microbatches * MEMORY / 3)] * REPLICAS
    assert (seconds > 0) == (microbatches > 1)
    # and that is in the backward, once for all blocks that read one
    alone = of._block_costs.costs(setting.prices, choice.strategies, choice.storage, setting.conversions)
    blocks = of.problem(config, choice).blocks
    backward = sum(block.backward_s for block in blocks) - sum(cost.backward_s for cost in alone)
    added = sum(of.moving_seconds(config, choice, node)[1] for node in trained)
    exchanged = sum(of._exchange_seconds(setting, choice, node, zero)[1] for node in trained)
    assert added * (1 - 1e-9) <= backward <= (added + exchanged) * (1 + 1e-9) and added >= seconds
    assert (exchanged > 0) == (zero == 2)


@pytest.mark.parametrize("zero", [0, 2, 3, None])
@pytest.mark.parametrize("dp", [1, 2])
def test_floors_count_it_and_stay_below(zero: int | None, dp: int) -> None:
    """Of the work alone, and with more of it known; a step without it would take less than the floor."""
    of = candidates(zero)
    axes = () if dp == REPLICAS else (REPLICAS,)
    config = Degrees(1, dp, axes, 4, "gpipe", "none")
    found = of.evaluate(config)
    assert of.lower_bound(config) <= of.work_floor(config) * (1 + 1e-9) <= found.objective * (1 + 1e-9)
    besides = of.besides_seconds(config) - of.free_seconds(config)
    whole = of.setting(config).data.adding_seconds(of.trained_bytes / config.tp, 0)
    assert 0 < besides <= whole * (1 + 1e-9)
    if dp == 1:
        assert besides == pytest.approx(whole)  # nothing that replicas could divide
