"""Plans on disk: the same plan with and without them, whatever lies there, and none that need not come out again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopart
from autopart import cache, planned
from autopart.analysis import analyze
from autopart.cli import main
from autopart.cluster import Cluster
from autopart.models import load_model
from autopart.passes.program import Program
from autopart.passes.rules import RULES
from autopart.plan import Plan
from autopart.planner import make_plan
from autopart.runtime.errors import InfeasibleError
from autopart.solver import tensor
from autopart.tracing import capture

CLUSTER = Cluster.parse("4xA100-40GB")
GPT2 = "hf:gpt2?n_layer=4&n_embd=32&n_head=2&vocab_size=64&n_positions=16&seq=16"


def gpt2() -> Program:
    loaded = load_model(GPT2, meta=True)
    return capture(loaded.model, loaded.args, loaded.kwargs, name=loaded.name, check_eval=False)


class Masked(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("mask", torch.ones(width), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.linear(x) * self.mask)


def masked(width: int = 16) -> Program:
    """A program with a real constant, which planning does not read."""
    return capture(Masked(width), (torch.randn(2, width),), {}, check_eval=False)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path))
    return tmp_path / planned.FOLDER


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """The plans that were made anew."""
    plans = []

    def counted(*args: Any, **kwargs: Any) -> Plan:
        plans.append(make_plan(*args, **kwargs))
        return plans[-1]

    monkeypatch.setattr(planned, "make_plan", counted)
    return plans


def entries(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.json"))


def untimed(plan: Plan) -> Plan:
    return replace(plan, solve_s=0.0, total_s=0.0)


@pytest.mark.parametrize("take", [gpt2, masked], ids=["gpt2", "with a constant"])
def test_a_plan_is_made_once(folder: Path, made: list[Plan], take: Callable[[], Program]) -> None:
    """And is the same as without a cache, of a program that was captured anew too."""
    plans = []
    for _ in range(3):
        program = take()
        plans.append(planned.planned(program, CLUSTER, analysis=analyze(program), batch=16, tp=2))
    assert len(made) == len(entries(folder)) == 1
    with cache.used(False):
        plain = planned.planned(program, CLUSTER, analysis=analyze(program), batch=16, tp=2)
    assert len(made) == 2
    assert {untimed(plan).to_json() for plan in plans} == {untimed(plain).to_json()}
    assert all(untimed(plan) == untimed(plain) for plan in plans)
    assert plans[0].solve_s > 0 and [plan.solve_s for plan in plans[1:]] == [0.0, 0.0]


def test_the_key_changes_with_all_that_a_plan_follows_from(monkeypatch: pytest.MonkeyPatch) -> None:
    program = masked()

    def key(kind: str = "plan", program: Program = program, cluster: Cluster = CLUSTER, **limits: Any) -> str:
        return planned.key(kind, program, cluster, limits)

    (node,) = CLUSTER.nodes
    slower = replace(node, device=replace(node.device, memory_bandwidth=node.device.memory_bandwidth * 0.999))
    narrower = replace(node, port=replace(node.port, bandwidth=node.port.bandwidth * 0.999))
    keys = [
        *(key(), key("frontier"), key(program=masked(32)), key(batch=4), key(batch=8), key(pp=4), key(pins={"a": 1})),
        *(key(pins={"a": 0}), key(cluster=Cluster((slower,))), key(cluster=Cluster((narrower,)))),
        key(cluster=Cluster((replace(node, ports=node.ports + 1),))),
    ]
    for part in ("sources", "installed"):
        monkeypatch.setattr(planned, part, lambda part=part: iter([part]))
        keys.append(key())
    assert len(set(keys)) == len(keys)
    monkeypatch.undo()
    assert key() == keys[0] == key(batch=None) == key(program=masked())


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"plans": []}', '{"plans": ["{}"]}', '{"plans": [1]}'])
def test_a_broken_entry_is_planned_again(folder: Path, made: list[Plan], text: str) -> None:
    program = masked()
    analysis = analyze(program)
    planned.planned(program, CLUSTER, analysis=analysis)
    (entry,) = entries(folder)
    entry.write_text(text)
    planned.planned(program, CLUSTER, analysis=analysis)
    assert len(made) == 2 and json.loads(entry.read_text())["plans"]
    planned.planned(program, CLUSTER, analysis=analysis)
    assert len(made) == 2


def test_a_plan_of_another_program_is_not_taken(folder: Path, made: list[Plan]) -> None:
    program = masked()
    planned.planned(program, CLUSTER, analysis=analyze(program))
    (entry,) = entries(folder)
    other = make_plan(masked(32), CLUSTER)
    cache.keep(entry, {"plans": [other.to_json()]})
    assert planned.planned(program, CLUSTER, analysis=analyze(program)).fingerprint == program.fingerprint
    assert len(made) == 2


def test_what_a_time_limit_decided_is_not_kept(folder: Path, made: list[Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    program = masked()
    analysis = analyze(program)
    run = tensor._Search.run

    def slow(search: tensor._Search) -> str:
        search.until = time.perf_counter()
        return run(search)

    monkeypatch.setattr(tensor._Search, "run", slow)
    planned.planned(program, CLUSTER, analysis=analysis, tp=2, pp=1)
    assert len(made) == 1 and not entries(folder)


def test_what_a_users_own_rules_allow_is_not_kept(folder: Path, made: list[Plan]) -> None:
    program = masked()
    analysis = analyze(program, RULES.extended({}))
    assert analysis.rules is not RULES
    for count in (1, 2):
        planned.planned(program, CLUSTER, analysis=analysis)
        assert len(made) == count and not entries(folder)


def test_that_nothing_fits_is_found_again_each_time(folder: Path) -> None:
    program = masked(4096)
    (node,) = CLUSTER.nodes
    small = Cluster((replace(node, device=replace(node.device, memory_bytes=2**20)),))
    for _ in range(2):
        with pytest.raises(InfeasibleError):
            planned.planned(program, small, analysis=analyze(program))
    assert not entries(folder)


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(["--step", "0.3"], id="memory", marks=pytest.mark.slow),
        pytest.param(["--devices", "1,2,4"], id="devices"),
    ],
)
def test_a_frontier_is_found_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: list[str]
) -> None:
    model = GPT2.replace("n_layer=4", "n_layer=1")
    command = ["frontier", model, "--cluster", "4xA100-40GB", "--batch", "16", "--json", *given]

    def points() -> list[dict[str, Any]]:
        assert main(command) == 0
        found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["points"]
        for point in found:
            del point["plan"]["solve_s"], point["plan"]["total_s"]
        return found

    first = points()
    assert len(entries(folder)) == 1

    def never(*args: Any, **kwargs: Any) -> Plan:
        raise AssertionError("planned again")

    monkeypatch.setattr("autopart.frontier.make_plan", never)
    assert points() == first


def test_a_job_that_starts_again_plans_once(folder: Path, made: list[Plan], tmp_path: Path) -> None:
    texts = []
    for name in ("first", "second"):
        torch.manual_seed(0)
        autopart.parallelize(Masked(), example=(torch.randn(2, 16),), directory=tmp_path / name, verbose=False)
        texts.append((tmp_path / name / "stage_0.py").read_text())
    assert len(made) == len(entries(folder)) == 1 and texts[0] == texts[1]


def test_plans_do_not_depend_on_the_order_of_sets(tmp_path: Path) -> None:
    """The stages' clock once added up what runs again in the order of a set."""
    model = "hf:gpt2?n_layer=4&n_embd=128&n_head=4&vocab_size=512&seq=64"
    (tmp_path / "cluster.toml").write_text(
        '[[nodes]]\ndevice = "Small"\ndevices = 4\n[devices.Small]\nkind = "cpu"\nmemory_gib = 0.03\n'
        "peak_flops = {float32 = 1e12}\nmemory_bandwidth = 100e9\nlaunch_s = 5e-6\n"
    )
    found = []
    for seed in ("0", "3"):
        command = [sys.executable, "-m", "autopart", "plan", model, "--cluster", "cluster.toml", "--batch", "32"]
        environment = {**os.environ, "PYTHONHASHSEED": seed, "AUTOPART_CACHE": "off"}
        subprocess.run(
            [*command, "-o", "plan.json"], cwd=tmp_path, env=environment, check=True, capture_output=True, timeout=300
        )
        plan = json.loads((tmp_path / "plan.json").read_text())
        found.append({name: value for name, value in plan.items() if name not in ("solve_s", "total_s")})
    assert found[0] == found[1]
