"""Plans whose stages have unlike meshes: what is chosen, what it is said to cost, and that it trains as one process."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest

import autopart.verify
from autopart.analysis import Analysis, analyze
from autopart.cluster import Cluster, Node
from autopart.plan import Plan
from autopart.planner import make_plan
from autopart.realize import realize
from autopart.verify import Subject, compare_emitted, prepare
from clusters import ideal
from families import family
from launch import run_kept_job


@functools.lru_cache(maxsize=2)
def subject_of(name: str) -> tuple[Subject, Analysis]:
    item = family(name)
    subject = prepare(item.build(), (), item.inputs(item.batch))
    return subject, analyze(subject.program)


def plan_of(name: str, cluster: Cluster, **limits: object) -> Plan:
    subject, analysis = subject_of(name)
    return make_plan(subject.program, cluster, analysis=analysis, batch=8, **limits)  # type: ignore[arg-type]


def unlike(*nodes: tuple[int, float, int]) -> Cluster:
    """Nodes of some devices of a speed (1: that of ``ideal``) and memory; network ports a tenth of the inner links."""
    made = []
    for count, speed, memory in nodes:
        node = ideal(count, bandwidth=1e9, memory_bytes=memory).nodes[0]
        peaks = {name: rate * speed for name, rate in node.device.peak_flops.items()}
        device = replace(
            node.device,
            name=f"ideal-{speed:g}",
            peak_flops=peaks,
            memory_bandwidth=node.device.memory_bandwidth * speed,
        )
        made.append(Node(device, count, node.inside, replace(node.port, bandwidth=1e8 * count), 1))
    return Cluster(tuple(made))


def check_equal(name: str, plan: Plan, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autopart.verify, "run_local_job", run_kept_job)
    subject, analysis = subject_of(name)
    realize(subject.program, plan, analysis).save(folder / "program")
    result = compare_emitted(folder / "program", subject, plan=plan)
    worst = sorted(result.groups, key=lambda group: -max(group.gradient or 0.0, group.parameter))[:3]
    assert result.equal, f"{result.loss_difference=} {worst}"
    assert all(stage.as_planned for stage in result.traffic), result.traffic


def test_three_devices_train_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of("gpt2", ideal(3, bandwidth=1e9), pp=2)
    assert sorted(len(stage.devices) for stage in plan.stages) == [1, 2]
    check_equal("gpt2", plan, tmp_path, monkeypatch)
