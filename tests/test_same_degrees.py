"""Plans made again from their own decisions, as what-if does: on the same cluster they are the same plans."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autopart.analysis import Analysis, analyze
from autopart.cli import main
from autopart.explain import runners_up
from autopart.models import load_model
from autopart.plan import Plan
from autopart.planner import make_plan
from autopart.runtime.errors import PlanError
from autopart.same_degrees import asked_of, chosen_anew, have_same_degrees, limits_beside, limits_of_plan
from autopart.tracing import capture
from autopart.what_if import Change
from clusters import ideal

MODEL = "hf:gpt2?n_layer=4&n_embd=32&n_head=4&vocab_size=96&n_positions=32&seq=16&batch=8"
CLUSTER = ideal(4, bandwidth=1e10)


@pytest.fixture(scope="module")
def analysis() -> Analysis:
    loaded = load_model(MODEL, meta=True)
    return analyze(capture(loaded.model, loaded.args, loaded.kwargs, name=loaded.name, check_eval=False))


def planned(analysis: Analysis, **limits: Any) -> Plan:
    return make_plan(analysis.program, CLUSTER, analysis=analysis, **limits)


@pytest.mark.parametrize(
    "limits",
    [
        {"pp": 1, "dp": 2, "tp": 2, "microbatches": 2, "zero": 3},
        {"pp": 1, "dp": 4, "tp": 1, "microbatches": 2, "zero": 1, "recompute": "full"},
        {"pp": 4, "dp": 1, "tp": 1, "microbatches": 8, "warmup": 2},
        {"pp": 2, "dp": 2, "tp": 1, "microbatches": 4, "schedule": "interleaved", "virtual": 3},
        {"pp": 2, "dp": 2, "tp": 1, "microbatches": 4, "schedule": "zb-v", "dropout": "invariant"},
        {"pp": 1, "dp": 1, "tp": (2, 2), "microbatches": 1, "tensor_scheme": "2d"},
        {"pp": 3, "meshes": "unlike", "microbatches": 2, "optimizer": "sgd"},
    ],
    ids=lambda limits: "-".join(f"{name}={value}" for name, value in limits.items()),
)
def test_the_same_plan_comes_out(analysis: Analysis, limits: dict[str, Any]) -> None:
    plan = planned(analysis, **limits)
    kept = limits_of_plan(plan, analysis, plan.batch)
    same = planned(analysis, **kept, **asked_of(plan))
    assert same.step_time_s == pytest.approx(plan.step_time_s, rel=1e-6)
    for name in ("layout", "microbatches", "schedule", "warmup", "recompute", "zero", "dropout", "optimizer"):
        assert getattr(same, name) == getattr(plan, name)
    assert set(chosen_anew(plan, same)) <= ({"meshes of stages", "blocks of stages"} if "meshes" in limits else set())
    assert Plan.from_json(plan.to_json()) == plan and plan.tensor_scheme == limits.get("tensor_scheme", "auto")
    assert all(kept[name] == value for name, value in limits.items() if name in ("zero", "microbatches", "virtual"))


@pytest.mark.parametrize(
    "limits",
    [
        {"zero": 2, "recompute": "none"},
        {"pp": 2, "warmup": 2},
        {"pp": 4, "warmup": (5, 3, 1, 0)},
        {"tensor_scheme": "1d"},
    ],
    ids=lambda limits: "-".join(limits),
)
def test_runners_up_are_planned_as_they_were_searched(analysis: Analysis, limits: dict[str, Any]) -> None:
    plan = planned(analysis, **limits)
    assert Plan.from_json(plan.to_json()) == plan
    row = runners_up(plan)[0]
    other = planned(analysis, **limits_beside(plan, str(row["config"])))
    assert plan.asked.items() <= other.asked.items() and other.tensor_scheme == plan.tensor_scheme
    assert set(other.zero.values()) <= set(plan.zero.values())
    if "warmup" in limits:
        assert other.warmup and len(other.warmup) == len(other.stages)
    assert other.step_time_s >= row["seconds"] * (1 - 1e-6), "at least"


def test_what_was_asked_is_checked(analysis: Analysis) -> None:
    plan = planned(analysis, pp=2, dp=2, tp=1, zero=1)
    assert plan.asked == {"pp": 2, "dp": 2, "tp": 1, "zero": 1}
    wrong: list[tuple[dict[str, int | str], str]] = [
        ({"zero": 4}, "a level of ZeRO"),
        ({"pp": "two"}, "at least 1"),
        ({"tp": "2x"}, "such as"),
        ({"schedule": "later"}, "one of gpipe"),
        ({"recompute": 1}, "one of none"),
        ({"warmup": -1}, "at least 0"),
        ({"speed": 1}, "no limit of planning"),
    ]
    for asked, words in wrong:
        with pytest.raises(PlanError, match=f"asked.*{words}"):
            replace(plan, asked=asked)


def test_another_batch(analysis: Analysis) -> None:
    plan = planned(analysis, pp=2, dp=2, tp=1, microbatches=2)
    assert limits_of_plan(plan, analysis, 16)["microbatches"] == 4, "samples of a microbatch stay"
    assert limits_of_plan(plan, analysis, 10)["microbatches"] is None, "4 samples do not divide 10"
    same = planned(analysis, **{**limits_of_plan(plan, analysis, 10), "batch": 10}, **asked_of(plan))
    assert "microbatches" in chosen_anew(plan, same)
    looped = planned(analysis, pp=2, dp=2, tp=1, microbatches=2, schedule="interleaved")
    assert limits_of_plan(looped, analysis, 12)["microbatches"] is None, "no multiple of the ranks"


@pytest.mark.parametrize("limits", [{"pp": 2, "dp": 2, "tp": 1, "microbatches": 4}, {"pp": 3, "meshes": "unlike"}])
def test_messages_are_as_large_on_another_network(analysis: Analysis, limits: dict[str, Any]) -> None:
    before = planned(analysis, **limits)
    kept = {**limits_of_plan(before, analysis, before.batch), **asked_of(before)}
    for size in (before.bucket_bytes, 3 * 2**20):
        limits = {**kept, "bucket_bytes": size}
        seconds = []
        for factor in (0.5, 1.0, 4.0):
            cluster = Change(network=factor, inside=factor).applied(CLUSTER)
            same = make_plan(analysis.program, cluster, analysis=analysis, **limits)
            assert same.bucket_bytes == size
            seconds.append(same.step_time_s)
        assert seconds == sorted(seconds, reverse=True), "a faster network takes no longer"
    with pytest.raises(PlanError, match="bucket_bytes is a whole number"):
        planned(analysis, bucket_bytes=0)


def test_levels_that_no_limit_says(analysis: Analysis) -> None:
    plan = planned(analysis, pp=1, dp=4, tp=1, microbatches=1, zero=1)
    some = {name: level for name, level in plan.zero.items() if "mlp" in name}
    assert limits_of_plan(replace(plan, zero=some), analysis, plan.batch)["zero"] is None
    assert limits_of_plan(replace(plan, zero={}), analysis, plan.batch)["zero"] == 0
    with pytest.raises(PlanError, match="tensor_scheme"):
        replace(plan, tensor_scheme="4d")


def test_what_if_nothing_changes(tmp_path: Path, analysis: Analysis, capsys: pytest.CaptureFixture[str]) -> None:
    cluster, file = tmp_path / "cluster.toml", tmp_path / "plan.json"
    CLUSTER.save(cluster)
    plan = planned(analysis, pp=2, dp=2, tp=1, microbatches=4, zero=2, schedule="zb-h1", dropout="invariant")
    plan.save(file)
    command = ["what-if", str(file), "--model", MODEL, "--cluster", str(cluster), "--json"]
    assert main([*command, "-o", str(tmp_path / "best.json")]) == 0
    found = json.loads(capsys.readouterr().out)
    now, same, best = found["figures"]["step time"]
    assert now == pytest.approx(same, rel=1e-6) and best <= same
    (note,) = found["notes"]
    assert "with what was asked for (pp 2, dp 2, tp 1, 4 microbatches, schedule zb-h1, zero 2)" in note
    assert {item["what"] for item in found["decisions"] if item["values"][0] != item["values"][1]} == set()
    assert Plan.load(tmp_path / "best.json").dropout == "invariant"


def test_what_if_tells_notes_of_the_new_plan(
    tmp_path: Path, analysis: Analysis, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, file = tmp_path / "cluster.toml", tmp_path / "plan.json"
    CLUSTER.save(cluster)
    plan = planned(analysis, pp=2, dp=2, tp=1, microbatches=4)
    replace(plan, notes=("as before",)).save(file)
    monkeypatch.setattr("autopart.planned.planned", lambda *_, **__: replace(plan, notes=("as before", "new")))
    command = ["what-if", str(file), "--model", MODEL, "--cluster", str(cluster), "--inside", "2x"]
    assert main([*command, "--json"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert "best: new" in notes and "best: as before" not in notes
    assert main(command) == 0
    assert "note: best: new" in capsys.readouterr().out


def test_what_if_takes_the_better_of_equal_degrees(
    tmp_path: Path, analysis: Analysis, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, file = tmp_path / "cluster.toml", tmp_path / "plan.json"
    CLUSTER.save(cluster)
    plan = replace(planned(analysis, pp=2, dp=2, tp=1, microbatches=4), asked={})
    plan.save(file)
    worse = replace(plan, step_time_s=2 * plan.step_time_s)
    assert have_same_degrees(plan, worse) and not have_same_degrees(plan, replace(plan, microbatches=2))
    monkeypatch.setattr("autopart.planned.planned", lambda *_, **limits: worse if "pp" in limits else plan)
    command = ["what-if", str(file), "--model", MODEL, "--cluster", str(cluster), "--inside", "2x", "--json"]
    assert main(command) == 0
    now, same, best = json.loads(capsys.readouterr().out)["figures"]["step time"]
    assert now == same == best


def test_what_if_bounds_the_best_plan_by_all_that_was_searched(
    tmp_path: Path, analysis: Analysis, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same degrees, which the search leaves out, a bound says nothing of other degrees."""
    cluster, file, written = tmp_path / "cluster.toml", tmp_path / "plan.json", tmp_path / "best.json"
    CLUSTER.save(cluster)
    plan = replace(planned(analysis, pp=2, dp=2, tp=1, microbatches=4), asked={})
    plan.save(file)
    same = replace(plan, bound_s=0.9 * plan.step_time_s, gap=0.1)
    searched = replace(plan, microbatches=2, step_time_s=2 * plan.step_time_s, bound_s=0.5 * plan.step_time_s, gap=0.75)
    monkeypatch.setattr("autopart.planned.planned", lambda *_, **limits: same if "pp" in limits else searched)
    command = ["what-if", str(file), "--model", MODEL, "--cluster", str(cluster), "--inside", "2x", "--json"]
    assert main([*command, "-o", str(written)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["figures"]["step time"][1:] == [plan.step_time_s] * 2
    assert found["figures"]["lower bound"][1:] == [same.bound_s, searched.bound_s]
    assert any(note.startswith("best: of the same degrees") for note in found["notes"])
    best = Plan.load(written)
    assert best.bound_s == searched.bound_s and best.gap == pytest.approx(0.5)


def test_what_if_says_why_there_are_no_same_degrees(
    tmp_path: Path, analysis: Analysis, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    replace(planned(analysis, pp=2, dp=2, tp=1, microbatches=4), asked={}, cluster_digest="").save(file)
    assert main(["what-if", str(file), "--model", MODEL, "--cluster", "2xV100-32GB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["plans"] == ["now", "best"]
    assert any(note.startswith("same degrees: do not work under the change: pp=2 x dp=2") for note in found["notes"])
