"""Errors of plans that do not fit name what was forced and would do to leave out."""

from __future__ import annotations

import re
from typing import Any

import pytest

from autopart.cluster import Cluster
from autopart.cost.devices import GIB
from autopart.fewer_devices import advised_plan
from autopart.plan import Plan
from autopart.runtime.errors import InfeasibleError
from autopart.what_if import Change
from clusters import ideal
from weighty import analysis, needed


def plan_on(cluster: Cluster, **limits: Any) -> Plan:
    return advised_plan(cluster, analysis(), **{"batch": 32, **limits})


PLAIN: dict[str, Any] = {"pp": 1, "dp": 2, "tp": 1, "microbatches": 1, "recompute": "none", "zero": 0}


@pytest.mark.parametrize(
    ("forced", "left_out"),
    [
        (PLAIN, ("recompute",)),
        ({**PLAIN, "recompute": "full", "microbatches": 16}, ("zero",)),
        ({**PLAIN, "recompute": "full", "zero": 3}, ("microbatches",)),
        ({**PLAIN, "microbatches": 16}, ("recompute", "zero")),
        (PLAIN, ("recompute", "zero", "microbatches")),
        ({**PLAIN, "pp": 2, "dp": 1, "microbatches": 16, "recompute": "full", "schedule": "gpipe"}, ("schedule",)),
    ],
)
def test_what_is_named_is_enough(forced: dict[str, Any], left_out: tuple[str, ...]) -> None:
    """On devices on which the plan without these limits just fits."""
    free = {name: value for name, value in forced.items() if name not in left_out}
    leanest = dict(free)
    if "recompute" in left_out:
        leanest["recompute"] = "full"
    if "zero" in left_out:
        leanest["zero"] = 3
    if "microbatches" in left_out:
        leanest["microbatches"] = 32 // forced["dp"]
    cluster = ideal(2, memory_bytes=needed(plan_on(ideal(2), **leanest)))
    with pytest.raises(InfeasibleError) as caught:
        plan_on(cluster, **forced)
    named = " and ".join(f"{name}={forced[name]}" for name in left_out)
    assert f"Without {named} it would fit, as pp={forced['pp']} dp={forced['dp']} tp=1" in str(caught.value)
    assert needed(plan_on(cluster, **free)) <= cluster.device(0).memory_bytes


@pytest.mark.parametrize("forced", [{}, {"pp": 2}, {"recompute": "full", "zero": 3, "schedule": "auto"}])
def test_nothing_is_named_that_does_not_help(forced: dict[str, Any]) -> None:
    with pytest.raises(InfeasibleError) as caught:
        plan_on(ideal(2, memory_bytes=2**20), **forced)
    assert "Without" not in str(caught.value)


def test_stages_that_share_a_device_ask_for_all_of_its_memory() -> None:
    """What is advised is of a device, not of a stage, and does."""
    limits: dict[str, Any] = {"pp": 2, "dp": 1, "tp": 1, "microbatches": 8, "schedule": "interleaved", "virtual": 2}
    cluster = Cluster.parse("2xRTX-3090")
    with pytest.raises(InfeasibleError, match="as 2 stages share a device's") as caught:
        plan_on(Change(memory=2 * GIB).applied(cluster), **limits)
    advised = re.search(r"Devices with ([\d.]+) GiB would do", str(caught.value))
    assert advised is not None and float(advised[1]) > 2
    assert plan_on(Change(memory=round(float(advised[1]) * GIB)).applied(cluster), **limits).pp == 2
