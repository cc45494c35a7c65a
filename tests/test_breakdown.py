"""A plan's step taken apart: parts that add up to it, of planned and of made-up plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import explained
from autopart.analysis import analyze
from autopart.breakdown import IDLE, SlowestTransfer, axis_link, break_down
from autopart.cluster import Cluster, Node
from autopart.cost.communication import collective_seconds, counted_seconds
from autopart.cost.compute import copy_seconds
from autopart.cost.devices import device
from autopart.explain import cluster_of, compare
from autopart.passes.program import Program
from autopart.plan import Plan, StagePlan
from autopart.planner import make_plan
from autopart.report.explanation import binding_text, breakdown_table, comparison_text
from autopart.reshardings import reshardings
from autopart.runtime.errors import PlanError
from autopart.runtime.schedule import NAMES
from explained import CLUSTER, by_hand

SHARED = Cluster((Node.of(replace(device("CPU"), alone=4.0), 4),))
"""Four processes on one core."""


@pytest.fixture(scope="module", name="program")
def program_() -> Program:
    return explained.program()


@pytest.fixture(scope="module", name="plan")
def plan_() -> Plan:
    return explained.plan()


def test_parts_add_up_to_the_step(plan: Plan) -> None:
    for found in (break_down(plan, CLUSTER), break_down(plan, None)):
        for stage in found.stages:
            assert sum(stage.seconds.values()) == pytest.approx(plan.step_time_s, rel=1e-9)
        for stage, given in zip(found.stages, plan.stages, strict=True):
            assert stage.state_bytes + stage.working_bytes == given.memory_bytes


@pytest.mark.parametrize("schedule", NAMES)
@pytest.mark.parametrize("cluster", [CLUSTER, SHARED], ids=["own", "shared"])
def test_parts_add_up_under_all_schedules(program: Program, schedule: str, cluster: Cluster) -> None:
    limits: dict[str, Any] = {"pp": 2, "dp": 1, "tp": 2, "microbatches": 4, "schedule": schedule, "recompute": "none"}
    plan = make_plan(program, cluster, **limits)
    assert bool(plan.shared_host) == (cluster is SHARED)
    found = break_down(plan, cluster)
    assert len(found.stages) == 2 and any(stage.idle_s > 0 for stage in found.stages)
    for stage in found.stages:
        own = [plan.stages[index] for index in stage.stages]
        assert sum(stage.seconds.values()) == pytest.approx(plan.step_time_s, rel=1e-9)
        priced = 4 * sum(item.forward_s + item.backward_s for item in own)
        computed = stage.compute_s + sum((stage.collectives_s or {}).values())
        # cores have work for both ranks in part of the step only
        assert priced / 4 <= computed < priced if cluster is SHARED else computed == pytest.approx(priced)
        ends = sum(item.step_end_s for item in own)
        assert ends / 4 <= stage.step_end_s <= ends * (1 + 1e-9)


def test_state_that_replicas_divide_counts_as_a_rank_holds_it(program: Program) -> None:
    whole, divided = (
        break_down(make_plan(program, CLUSTER, pp=1, dp=4, tp=1, microbatches=1, recompute="none", zero=level), CLUSTER)
        for level in (0, 1)
    )
    (each,), (share,) = whole.stages, divided.stages
    # float32: weights and gradients; of AdamW's two moments each of four ranks has a part
    assert each.state_bytes * (2 + 2 / 4) / 4 == pytest.approx(share.state_bytes, rel=0.05)
    assert each.working_bytes == pytest.approx(share.working_bytes, rel=0.05)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("level", [2, 3])
def test_what_replicas_exchange_is_no_compute(program: Program, tp: int, level: int) -> None:
    limits: dict[str, Any] = {"pp": 1, "dp": 4 // tp, "tp": tp, "microbatches": 1, "recompute": "none"}
    plans = [make_plan(program, CLUSTER, zero=zero, **limits) for zero in (0, level)]
    (whole,), (divided,) = (break_down(plan, CLUSTER).stages for plan in plans)
    (stage,) = plans[1].stages
    link = axis_link(CLUSTER, stage, "dp")
    exchanged = sum(counted_seconds(stage.axis_collectives["dp"], stage.dp, link).values())
    exchanged += stage.arrival_s - stage.hidden_s.get("dp", 0.0)  # what passes beside ops
    assert (stage.arrival_s > 0) == (level == 2)
    assert whole.replicas_s == 0 and divided.replicas_s == pytest.approx(exchanged) and exchanged > 0
    # what is gathered is written and read; on tensor axes strategies may differ, by far less than the exchange
    gathered = stage.axis_collectives["dp"].get("all_gather", {"bytes": 0})["bytes"]
    moving = copy_seconds(CLUSTER.nodes[0].device, 2 * gathered * (1 - 1 / stage.dp))
    assert divided.compute_s == pytest.approx(whole.compute_s + moving, rel=1e-6 if tp == 1 else 1e-3)
    assert exchanged > 0.01 * whole.compute_s
    assert set(divided.collectives_s or {}) == set(stage.axis_collectives.get("tp", {}))
    assert sum(divided.seconds.values()) == pytest.approx(plans[1].step_time_s)
    text = binding_text(plans[1], break_down(plans[1], CLUSTER), 0)
    assert "replicas' exchange" in text and "note:" not in text
    for kind, total in stage.collectives.items():
        of_axes = [counts[kind] for counts in stage.axis_collectives.values() if kind in counts]
        assert {name: sum(count[name] for count in of_axes) for name in total} == total
    old = replace(plans[1], stages=(replace(stage, axis_collectives={}),))
    found = break_down(old, CLUSTER).stages[0].replicas_s
    assert found is None if tp > 1 else found == pytest.approx(exchanged), "of one axis there is nothing to tell apart"
    with pytest.raises(PlanError, match="no axis of the mesh"):
        replace(stage, axis_collectives={"ep": {}})


def test_several_tensor_axes_are_priced_each(program: Program) -> None:
    plan = make_plan(program, CLUSTER, pp=1, dp=1, tp=(2, 2), microbatches=1, recompute="none")
    (stage,) = break_down(plan, CLUSTER).stages
    sent: dict[str, float] = {}
    for row in reshardings(plan, analyze(program), CLUSTER):
        sent[row.kind] = sent.get(row.kind, 0.0) + row.seconds
    hidden = plan.stages[0].hidden_s
    assert len(plan.stages[0].axis_collectives) == 2
    assert stage.collectives_s == pytest.approx({kind: sent[kind] - hidden.get(kind, 0.0) for kind in sent})


def test_by_hand() -> None:
    plan = by_hand()
    cluster = cluster_of(plan)
    assert cluster is not None
    link = cluster.group_link((0, 1))
    found = break_down(plan, cluster)
    sent = 4 * 3 * collective_seconds("all_reduce", 2e9, 2, link)
    assert found.stages[1].seconds["all_reduce"] == pytest.approx(sent)
    assert found.stages[1].compute_s == pytest.approx(4 * 4.0 - sent)
    assert (found.slowest, found.fullest, found.binds) == (1, 0, "compute")
    assert found.stages[0].state_bytes == 2 * 4 * 4 and found.stages[0].working_bytes == 100 - 32
    mixed = break_down(replace(plan, dtype="bf16-mixed"), cluster).stages[0]
    assert mixed.state_bytes == found.stages[0].state_bytes, "weights in float32"
    slow = replace(plan, stages=(replace(plan.stages[0], forward_s=40.0), plan.stages[1]))
    assert break_down(slow, cluster).slowest == 0
    waiting = replace(plan, microbatches=1)
    assert break_down(waiting, cluster).stages[0].seconds[IDLE] == pytest.approx(4.0)  # the other's 1 + 3 s
    assert break_down(plan, None).stages[0].collectives_s is None
    looped = tuple(replace(plan.stages[s % 2], blocks=(s, s + 1)) for s in range(4))
    virtual = replace(plan, stages=looped, schedule="interleaved")
    found = break_down(virtual, cluster)
    assert [stage.stages for stage in found.stages] == [(0, 2), (1, 3)]
    assert found.stages[0].seconds["all_reduce"] == pytest.approx(2 * sent)
    assert found.stages[0].step_end_s == 1.0 and found.stages[0].state_bytes == 2 * 32
    assert [stage.capacity_bytes for stage in found.stages] == [2 * 200, 2 * 201], "each stage has a share"
    text = binding_text(virtual, found, 0)
    assert "stages 1 and 3 are bound by" in text and "stages 0 and 2 are fullest, 50.0% of their devices" in text
    assert compare((plan, virtual), (None, None)).figures["memory of the fullest device"] == (100.0, 200.0)
    assert cluster_of(replace(plan, cluster="8xMine")) is None is cluster_of(replace(plan, cluster="2xV100-32GB"))


def test_waiting_for_transfers_is_not_the_bubble() -> None:
    plan = replace(by_hand(transfers=((0, 1, 2.0, 3.0),)), microbatches=1, step_time_s=12.5)
    found = break_down(plan, Cluster.parse("2x2xV100-32GB@Ethernet-10"))
    for stage, other in zip(found.stages, (4.0, 3.0), strict=True):  # seconds of the other's forward and backward
        assert (stage.transfers_s, stage.idle_s) == pytest.approx((5.0, other))
        assert sum(stage.seconds.values()) == pytest.approx(plan.step_time_s)
    assert (found.binds, found.transfer) == ("transfers", SlowestTransfer(0, 1, 2.0, 3.0, "Ethernet-10"))
    text = binding_text(plan, found, 0)
    assert "stage 1 is bound by transfers between stages (transfers 40.0%" in text
    assert "stages 0 -> 1, 2 s a microbatch there and 3 s back, over Ethernet-10" in text
    told = found.to_json_object()
    assert told["slowest_transfer"]["back_s"] == 3.0 == told["stages"][0]["transfers_s"] - 2.0
    assert break_down(plan, None).transfer == SlowestTransfer(0, 1, 2.0, 3.0, "")
    assert break_down(by_hand(), None).transfer is None
    # hidden behind other microbatches, transfers cost their way there and back once
    many = break_down(replace(plan, microbatches=4, transfers=((0, 1, 0.1, None),)), None)
    assert many.binds == "compute" and many.stages[1].transfers_s == pytest.approx(0.1)
    assert "nothing back" in binding_text(plan, many, 0)


def test_what_rounding_leaves_is_no_time() -> None:
    plan = by_hand()
    cluster = cluster_of(plan)
    sent = (1 - 1e-15) * 3 * collective_seconds("all_reduce", 2e9, 2, Cluster.parse(plan.cluster).group_link((0, 1)))
    stages = tuple(replace(stage, hidden_s={"all_reduce": sent}) for stage in plan.stages)
    hidden = break_down(replace(plan, stages=stages), cluster)
    assert hidden.stages[1].seconds["all_reduce"] == 0.0 < hidden.stages[1].hidden_s
    assert "reduce" not in breakdown_table(hidden)
    more = (replace(stage, forward_s=1.0 + 1e-14) for stage in plan.stages)
    found = compare((plan, replace(plan, stages=tuple(more))), (None, None))
    assert found.parts["compute"][0] < found.parts["compute"][1]
    row = next(line for line in comparison_text(("a", "b"), found).splitlines() if line.startswith("compute"))
    assert row.split()[-1] == "0"


def test_links_of_axes() -> None:
    """Devices are row-major over the mesh: the last axis joins neighbours, the first goes across nodes."""
    cluster = Cluster.parse("2x4xA100-80GB")
    stage = StagePlan(tuple(range(8)), (("dp", 2), ("a", 2), ("b", 2)), (0, 1))
    assert axis_link(cluster, stage, "b") == axis_link(cluster, stage, "a") == cluster.group_link((0, 1))
    assert axis_link(cluster, stage, "dp") == cluster.group_link((0, 4))
