"""Chosen levels of ZeRO against one level for all parameters, from plenty of memory to where nothing fits."""

from __future__ import annotations

from typing import Any

import pytest

from autopart.plan import Plan
from autopart.planner import make_plan
from autopart.runtime.errors import InfeasibleError
from clusters import ideal
from weighty import analysis, needed


@pytest.mark.parametrize("recompute", ["none", pytest.param("full", marks=pytest.mark.slow), "auto"])
@pytest.mark.parametrize("bandwidth", [1e9, 1e12])
@pytest.mark.parametrize(
    ("pp", "tp", "microbatches"), [(1, 1, 4), (2, 1, 8), pytest.param(1, 2, 2, marks=pytest.mark.slow)]
)
def test_chosen_levels_fit_where_one_for_all_does_and_take_no_longer(
    pp: int, tp: int, microbatches: int, bandwidth: float, recompute: str
) -> None:
    """Within 1 %, as strategies under limits of memory are. Of a pipeline memory also decides where it may be cut."""
    limits: dict[str, Any] = {"batch": 32, "pp": pp, "dp": 2, "tp": tp, "microbatches": microbatches}

    def made(level: int | None, memory: int) -> Plan | None:
        cluster = ideal(2 * pp * tp, memory_bytes=memory, bandwidth=bandwidth)
        try:
            return make_plan(
                analysis().program, cluster, analysis=analysis(), zero=level, recompute=recompute, **limits
            )
        except InfeasibleError:
            return None

    plans = [found for level in range(4) if (found := made(level, 2**40)) is not None]
    roomy = sorted(needed(found) for found in plans)
    assert len(roomy) == 4
    for memory in (roomy[0] - 2**23, roomy[0], (roomy[0] + roomy[-1]) // 2):
        fitting = [found.step_time_s for level in range(4) if (found := made(level, memory)) is not None]
        chosen = made(None, memory)
        assert (chosen is None) == (not fitting)
        assert chosen is None or chosen.step_time_s <= 1.01 * min(fitting)
