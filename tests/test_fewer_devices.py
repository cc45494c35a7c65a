"""Notes of plans whose cluster would take less time without some of its devices."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import autopart
from autopart import fewer_devices
from autopart.analysis import Analysis, analyze
from autopart.candidates import Candidates
from autopart.cluster import Cluster
from autopart.fewer_devices import advised_plan, least_seconds, parts
from autopart.models import load_model
from autopart.passes.program import Program
from autopart.plan import Plan
from autopart.planned import planned
from autopart.runtime.errors import InfeasibleError


@functools.cache
def analysis() -> Analysis:
    loaded = load_model("hf:gpt2?n_layer=2&seq=256&vocab_size=4096", meta=True)
    program = autopart.capture(loaded.model, loaded.args, loaded.kwargs, check_eval=False)
    return analyze(program)


def plan_on(cluster: Cluster, **limits: Any) -> Plan:
    given: dict[str, Any] = {"batch": 64, **limits}
    return advised_plan(cluster, analysis(), **given)


def test_the_fastest_devices_first() -> None:
    cluster = Cluster.parse("2xV100-32GB+2x4xH100+3xA100-80GB")
    candidates = Candidates(analysis(), cluster, 64, "adamw")
    seconds = {node.device: least_seconds(candidates, node) for node in cluster.nodes}
    assert [str(part) for part in parts(cluster, seconds)] == [
        "2x4xH100+3xA100-80GB",
        "2x4xH100+2xV100-32GB",
        "2x4xH100",
        "4xH100+2xH100",
        "3xA100-80GB+2xV100-32GB",
        "3xH100",
        "3xA100-80GB",
        "2xV100-32GB",
        "1xH100",
    ]


def test_one_node_without_the_slow_network() -> None:
    """The other one repeats what it does."""
    notes = plan_on(Cluster.parse("2x2xA100-80GB@Ethernet-10"), batch=32).notes
    (note,) = [note for note in notes if "alone" in note]
    assert note.startswith("2xA100-80GB@Ethernet-10 alone takes") and "as much as all 4 devices" in note


def test_one_device_where_all_repeat_what_it_does() -> None:
    """Of a model that is too small to divide, however many there are."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
    program = autopart.capture(model, (torch.zeros(4, 8),))
    plan = advised_plan(Cluster.parse("16x8xH100"), analyze(program))
    assert plan.tp == 128 and not plan.strategies
    (note,) = [note for note in plan.notes if "alone" in note]
    assert note.startswith("1xH100 alone takes") and "as much as all 128 devices" in note


@pytest.mark.slow
def test_slower_devices_that_a_slow_port_holds_up() -> None:
    """Those behind it are the faster ones, one by one."""
    notes = plan_on(Cluster.parse("2x2xA100-80GB+1xH100@Ethernet-10")).notes
    (note,) = [note for note in notes if "alone" in note]
    assert note.startswith("2x2xA100-80GB alone takes") and "less than all 5 devices" in note


def test_no_plan_is_made_for_parts_that_cannot_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Cluster] = []

    def noted(program: Program, cluster: Cluster, **limits: Any) -> Plan:
        if "earlier" in limits:
            return planned(program, cluster, **limits)
        made.append(cluster)
        raise InfeasibleError("none")

    monkeypatch.setattr(fewer_devices, "planned", noted)
    assert not any("alone" in note for note in plan_on(Cluster.parse("2xA100-80GB")).notes) and not made
    slow = Cluster.parse("2x2xA100-80GB@Ethernet-10")
    for limits in ({"dp": 4}, {"pp": 2}, {"tp": 2}):
        assert not any("alone" in note for note in plan_on(slow, **limits).notes)
    assert not made
    plan_on(slow)
    assert made and all(part.device_count < 4 for part in made)
