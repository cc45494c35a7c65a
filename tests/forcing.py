"""Plans for one tensor axis in which some ops and parameters are offered less than they could be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import fx

import autopart.verify
from autopart.analysis import analyze
from autopart.passes.program import Role
from autopart.passes.rules import Strategy, name_of
from autopart.plan import Plan
from autopart.planner import make_plan
from autopart.realize import realize
from autopart.verify import Subject, Verification, compare_emitted
from clusters import ideal
from launch import run_kept_job

Keep = Callable[[fx.Node, Strategy], bool]


def forced(subject: Subject, parts: int, keep: Keep, limits: Mapping[str, Any] | None = None) -> Plan:
    """The planner's plan on a tensor axis of ``parts`` ranks, from the strategies that ``keep`` holds for.

    An op or a parameter of which nothing is kept keeps all. limits: of ``make_plan``, by default one stage and replica.
    """
    analysis = analyze(subject.program)
    offered = dict(analysis.strategies(parts))
    for node, strategies in offered.items():
        offered[node] = tuple(item for item in strategies if keep(node, item)) or strategies
    analysis._strategies[(parts,)] = offered
    limits = {"pp": 1, "dp": 1, "tp": parts, "microbatches": 1, **(limits or {})}
    devices = limits["pp"] * limits["dp"] * parts
    return make_plan(subject.program, ideal(devices), batch=8, analysis=analysis, **limits)


def is_parameter(node: fx.Node) -> bool:
    return node.op == "placeholder" and node.meta["role"] is Role.PARAMETER


def op(node: fx.Node) -> str:
    """The op's name without namespace and overload; '' for what is no op."""
    return name_of(node).split(".")[1] if node.op == "call_function" else ""


def run(subject: Subject, plan: Plan, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Verification, str]:
    """Trains the plan's program on processes beside the plain model; checks equality and traffic.

    Returns the comparison and the stages' source.
    """
    monkeypatch.setattr(autopart.verify, "run_local_job", run_kept_job)
    realize(subject.program, plan, analyze(subject.program)).save(folder / "program")
    source = "".join(path.read_text() for path in sorted((folder / "program").glob("stage_*.py")))
    result = compare_emitted(folder / "program", subject, plan=plan)
    worst = sorted(result.groups, key=lambda group: -max(group.gradient or 0.0, group.parameter))[:3]
    assert result.equal, f"{result.loss_difference=} {worst}"
    assert all(stage.counted and stage.as_planned for stage in result.traffic), result.traffic
    return result, source
