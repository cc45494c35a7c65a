"""What fits is found whatever was found before it, and what does not fit says all that is held."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
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
from autopart.solver.time_limits import OutOfTime
from autopart.tracing import capture
from clusters import ideal

GIB = 2**30
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": GIB}


@functools.lru_cache(maxsize=1)
def analysis() -> Analysis:
    """A GPT-2 whose tied embedding is much of what its first and last stages hold."""
    loaded = load_model("hf:gpt2?n_layer=4&n_embd=768&n_head=12&seq=256", meta=True)
    return analyze(capture(loaded.model, loaded.args, loaded.kwargs, check_eval=False))


def plan(pp: int, gib: float, **more: Any) -> Plan:
    """On tensor axes of two, in so much memory."""
    nodes = Cluster.parse(f"{pp}x2xH100").nodes
    cluster = Cluster(tuple(replace(n, device=replace(n.device, memory_bytes=int(gib * GIB))) for n in nodes))
    limits: dict[str, Any] = {"batch": 8, "pp": pp, "dp": 1, "tp": 2, "microbatches": 4}
    return make_plan(analysis().program, cluster, analysis=analysis(), **limits, **more)


@pytest.mark.parametrize(
    ("pp", "gib", "recompute"), [(4, 2.55, "auto"), (4, 2.55, "none"), (2, 2.64, "auto"), (2, 2.72, "none")]
)
def test_what_fits_is_found_by_itself(pp: int, gib: float, recompute: str) -> None:
    found = plan(pp, gib, recompute=recompute)
    assert all(stage.memory_bytes <= stage.capacity_bytes for stage in found.stages)
    if recompute == "auto":
        assert plan(pp, gib, below=1e6).step_time_s == pytest.approx(found.step_time_s, rel=1e-9)


@pytest.mark.parametrize(("gib", "advice"), [(2.4, "smaller microbatches"), (1.0, "is all that they have")])
def test_the_parts_of_what_does_not_fit_are_all_of_it(gib: float, advice: str) -> None:
    with pytest.raises(InfeasibleError, match=advice) as raised:
        plan(4, gib, recompute="none")
    sizes = [float(size) * UNITS[unit] for size, unit in re.findall(r"([\d.]+) ([KMG]?i?B)\b", str(raised.value))]
    holds, _, _, *parts, _ = sizes  # over, the capacity; devices that would do
    assert sum(parts) == pytest.approx(holds, rel=0.01)


def test_a_solver_that_ran_out_of_time_does_not_end_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: dict[str, Any] = {"batch": 8, "microbatches": 1}
    cluster = ideal(4)
    whole = make_plan(analysis().program, cluster, analysis=analysis(), **limits)
    assert whole.tp > 1 or whole.dp > 1
    choose, late = Candidates.choose, list[Degrees]()

    def hurried(self: Candidates, config: Degrees, *args: Any, **more: Any) -> Any:
        if (config.pp, config.dp, config.tp) == (whole.pp, whole.dp, whole.tp):
            late.append(config)
            raise OutOfTime("no assignment of strategies was found in 60 s")
        return choose(self, config, *args, **more)

    monkeypatch.setattr(Candidates, "choose", hurried)
    found = make_plan(analysis().program, cluster, analysis=analysis(), below=1e6, **limits)
    assert late and (found.pp, found.dp, found.tp) != (whole.pp, whole.dp, whole.tp)
    assert found.bound_s <= whole.step_time_s <= found.step_time_s
    with pytest.raises(PlanError, match="in 60 s"):
        make_plan(analysis().program, cluster, analysis=analysis(), pp=whole.pp, dp=whole.dp, tp=whole.tp, **limits)
