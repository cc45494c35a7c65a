"""No plan takes less than what is said of its configuration: of all that replicas exchange some passes unseen."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopart.analysis import Analysis, analyze
from autopart.cluster import Cluster
from autopart.models import load_model
from autopart.plan_space import PlanSpace
from autopart.planner import make_plan
from autopart.runtime.errors import PlanError
from autopart.solver.search_space import NotBetter
from autopart.tracing import capture
from clusters import ideal
from families import family

DEGREES = [
    (pp, dp, tp, microbatches)
    for pp, dp, tp, microbatches in itertools.product((1, 2), (2, 4), (1, 2), (1, 2))
    if pp * dp * tp == 4
]


@functools.lru_cache(maxsize=1)
def analysis_of(name: str) -> Analysis:
    item = family(name)
    return analyze(capture(item.build(), (), item.inputs(item.batch), check_eval=False))


def keep_bounds(found: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps what a search is told of configurations, before anything of a plan found joins it."""

    def noted(of: Any) -> Any:
        def kept(*asked: Any) -> float:
            found.append(of(*asked))
            return found[-1]

        return kept

    def evaluated(space: PlanSpace, config: Any, below: float) -> Any:
        try:
            evaluation = evaluate(space, config, below)
        except NotBetter as error:
            found.append(error.bound)
            raise
        found.append(evaluation.bound)
        return evaluation

    evaluate = PlanSpace.evaluate
    monkeypatch.setattr(PlanSpace, "evaluate", evaluated)
    for name in ("lower_bound", "refine", "tighten"):
        monkeypatch.setattr(PlanSpace, name, noted(getattr(PlanSpace, name)))


@pytest.mark.parametrize("cluster", ["2x2xRTX-4090", "2x2xV100-16GB@Ethernet-10"])
@pytest.mark.parametrize("level", [None, *(pytest.param(level, marks=pytest.mark.slow) for level in (1, 2)), 3])
@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_no_plan_takes_less(name: str, level: int | None, cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    analysis, tried = analysis_of(name), 0
    for pp, dp, tp, microbatches in DEGREES:
        limits: dict[str, Any] = {"pp": pp, "dp": dp, "tp": tp, "microbatches": microbatches, "zero": level}
        found: list[float] = []
        with monkeypatch.context() as patched:
            keep_bounds(found, patched)
            try:
                plan = make_plan(analysis.program, Cluster.parse(cluster), analysis=analysis, batch=16, **limits)
            except PlanError:
                continue
        tried += 1
        assert max(found) <= plan.step_time_s * (1 + 1e-9), limits
    assert tried > len(DEGREES) / 2


def test_bounds_know_what_tied_gradients_take_over_a_network() -> None:
    """As if tensor ranks divided them for nothing, or logits passed to a stage of the loss for nothing, the gap was
    0.53 here.
    """
    loaded = load_model("hf:gpt2?n_layer=4", meta=True, dtype=torch.bfloat16)
    analysis = analyze(capture(loaded.model, loaded.args, loaded.kwargs, check_eval=False))
    plan = make_plan(analysis.program, Cluster.parse("2x4xRTX-3090@Ethernet-10"), analysis=analysis, batch=32)
    assert plan.gap < 0.08


class Odd(nn.Module):
    """Sizes that no replicas divide."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return {"loss": x.square().mean()}


@pytest.mark.parametrize(("pp", "tp"), [(2, 1), (1, 2)])
def test_whole_gradients_may_be_summed_in_less_than_it_takes_to_scatter_them(
    pp: int, tp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In switches, which scatter nothing, and of parameters that are whole whatever the level."""
    (node,) = ideal(8, bandwidth=1e6).nodes
    cluster = Cluster((replace(node, inside=replace(node.inside, switch_sums=1.0, efficiency=0.3)),))
    analysis = analyze(capture(Odd(), (), {"x": torch.randn(8, 7)}))
    found: list[float] = []
    keep_bounds(found, monkeypatch)
    degrees: dict[str, Any] = {"pp": pp, "dp": 4, "tp": tp, "microbatches": 1, "zero": 1}
    plan = make_plan(analysis.program, cluster, analysis=analysis, batch=8, **degrees)
    assert max(found) <= plan.step_time_s * (1 + 1e-9)
