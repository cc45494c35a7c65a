"""Where whole parameters fit none are divided, and bounds are of plans that divide none."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from autopart.analysis import Analysis, analyze
from autopart.candidates import Candidates
from autopart.cluster import Cluster
from autopart.models import load_model
from autopart.plan import Plan
from autopart.planner import make_plan
from autopart.runtime.errors import InfeasibleError, PlanError
from autopart.solver.degrees import Degrees
from autopart.tracing import capture
from autopart.what_if import Change


@functools.cache
def analysis() -> Analysis:
    loaded = load_model("hf:bert?num_hidden_layers=4&hidden_size=256&num_attention_heads=4&seq=64&batch=8", meta=True)
    return analyze(capture(loaded.model, loaded.args, loaded.kwargs, check_eval=False))


GIB = 2**30
ROOMY = Cluster.parse("4xRTX-3090")


def test_of_replicas_that_fit_the_plan_is_the_best() -> None:
    """What divided parameters could save is no gap, but told."""

    def made(zero: int | None) -> Plan:
        return make_plan(analysis().program, ROOMY, analysis=analysis(), batch=64, dp=4, zero=zero)

    plan = made(None)
    assert not plan.zero and plan.gap < 0.005
    (told,) = (note for note in plan.notes if "divided over replicas" in note)
    assert "the lower bound is of plans that do" in told
    assert min(made(level).step_time_s for level in (1, 2, 3)) < 0.995 * plan.step_time_s


@pytest.mark.parametrize("cluster", ["4xRTX-3090", pytest.param("2x2xV100-16GB", marks=pytest.mark.slow)])
def test_no_plan_with_whole_parameters_beats_the_bound(cluster: str) -> None:
    devices = Cluster.parse(cluster)
    plan = make_plan(analysis().program, devices, analysis=analysis(), batch=16)
    tried = 0
    for pp, dp, tp in ((1, 4, 1), (1, 2, 2), (1, 1, 4), (2, 2, 1), (2, 1, 2), (4, 1, 1)):
        for count in (1, 2, 4):
            try:
                limits: dict[str, Any] = {"pp": pp, "dp": dp, "tp": tp, "microbatches": count}
                found = make_plan(analysis().program, devices, analysis=analysis(), batch=16, zero=0, **limits)
            except PlanError:
                continue
            tried += 1
            assert plan.bound_s <= found.step_time_s * (1 + 1e-9), limits
    assert tried >= 12


def test_levels_are_for_less_memory() -> None:
    """From what surely fits to what only divided parameters do."""
    config = Degrees(1, 4, (), 1, "1f1b")
    kinds = set()
    for memory in (24 * GIB, 5 * GIB // 2, 9 * GIB // 4):
        own = Candidates(analysis(), Change(memory=memory).applied(ROOMY), 64, "adamw", zero=None)
        assert own.levels(config) == ((0,) if own.keeps_whole(config) else (0, 1, 2, 3))
        kinds.add(own.keeps_whole(config))
        every = Candidates(analysis(), own.cluster, 64, "adamw", zero=None, all_levels=True)
        assert every.levels(config) == (0, 1, 2, 3)
        assert every.work_floor(config) <= own.work_floor(config) * (1 + 1e-9)
    assert kinds == {True, False}


def test_parameters_that_fit_nowhere_are_soon_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what the closest configurations lack, as if all had been solved."""
    evaluated: list[Degrees] = []
    solve = Candidates.evaluate

    def noted(self: Candidates, config: Degrees, below: float = float("inf")) -> object:
        evaluated.append(config)
        return solve(self, config, below)

    monkeypatch.setattr(Candidates, "evaluate", noted)
    little = Change(memory=2 * GIB + 2**24).applied(ROOMY)  # of which a process takes 2 GiB
    with pytest.raises(InfeasibleError, match=r"none of \d+ configurations fits; the closest, .* would do"):
        make_plan(analysis().program, little, analysis=analysis(), batch=64, meshes="equal")
    assert 1 <= len(evaluated) <= 3
