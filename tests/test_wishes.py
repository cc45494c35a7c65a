"""What a plan's user forced is recorded with it, and kept by what is planned from it later."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import explained
from autopart.cli import main
from autopart.plan import Plan
from autopart.planner import make_plan
from autopart.report.table import plan_text
from autopart.same_degrees import limits_beside
from autopart.wishes import LIMITS, forced_in, forced_text, recorded
from explained import CLUSTER, MODEL


def test_the_limits_of_a_script_are_those_of_a_plan() -> None:
    own = {"batch", "rules"}  # of parallelize, which has its own
    kept = {"below", "analysis", "earlier"}  # of the planner's own callers
    arguments = set(inspect.signature(make_plan).parameters) - {"program", "cluster"}
    assert arguments - own - kept == set(LIMITS)


@pytest.fixture
def forced(tmp_path: Path) -> tuple[Path, list[str]]:
    """A plan's file that forces what is not the fastest, and the what-if command for it."""
    file, cluster = tmp_path / "plan.json", tmp_path / "cluster.toml"
    CLUSTER.save(cluster)
    make_plan(explained.program(), CLUSTER, pp=2, microbatches=4, schedule="auto").save(file)
    return file, ["what-if", str(file), "--model", MODEL, "--cluster", str(cluster), "--json"]


def test_what_was_given_is_recorded() -> None:
    given: dict[str, Any] = {"pp": None, "dp": 2, "tp": (2, 4), "schedule": "auto", "recompute": "auto", "zero": 0}
    assert recorded({**given, "warmup": (1, 0)}) == {
        "dp": 2,
        "tp": "2x4",
        "schedule": "auto",
        "zero": 0,
        "warmup": "1,0",
    }
    assert all(recorded({"tp": tp}) == {"tp": 8} for tp in ("8", 8, (8,)))
    plan = make_plan(explained.program(), CLUSTER, pp=2, microbatches=4, warmup=(2, 0), recompute="none")
    assert plan.asked == {"pp": 2, "microbatches": 4, "recompute": "none", "warmup": "2,0"}
    assert Plan.from_json(plan.to_json()) == plan
    assert forced_in(plan) == {**plan.asked, "warmup": (2, 0)}
    assert forced_text(plan) == "pp 2, 4 microbatches, recompute none, warm-up 2,0"
    assert "asked for: pp 2, 4 microbatches" in plan_text(plan)


def test_files_that_record_less_are_read() -> None:
    plan = explained.plan()
    data = json.loads(plan.to_json())
    for asked in (None, {"zero": 1}, {"zero": 1, "warmup": 2}):
        data.pop("asked", None)
        old = Plan.from_json(json.dumps(data if asked is None else {**data, "asked": asked}))
        assert old.asked == (asked or {}) and forced_in(old) == old.asked
    assert not forced_text(replace(plan, asked={}))


def test_another_candidate_keeps_what_was_forced() -> None:
    plan = replace(explained.plan(), asked={"pp": 2, "dp": 1, "microbatches": 2, "schedule": "auto", "virtual": 2})
    unlike = limits_beside(plan, "pp=2 meshes=unlike microbatches=2 1f1b")
    assert unlike["dp"] == 1 and unlike["meshes"] == "unlike" and unlike["schedule"] == "1f1b"
    equal = limits_beside(plan, "pp=2 dp=1 tp=2 microbatches=2 interleaved x3 no-recompute")
    assert (equal["meshes"], equal["virtual"], equal["recompute"]) == ("equal", 3, "none")
    assert "virtual" not in unlike, "1f1b has one stage on each rank"


def test_explain_says_what_others_have_too(forced: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(forced[0])]) == 0
    assert (
        "all other candidates have what was asked for (pp 2, 4 microbatches, schedule auto)" in capsys.readouterr().out
    )
    assert main(["explain", str(forced[0]), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["asked"] == {"pp": 2, "microbatches": 4, "schedule": "auto"}


def test_what_if_keeps_what_was_forced(
    forced: tuple[Path, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, command = forced
    written = tmp_path / "best.json"
    seconds = {}
    for more in ([], ["--free"]):
        assert main([*command, "--inside", "2x", *more, "-o", str(written)]) == 0
        found, best = json.loads(capsys.readouterr().out), Plan.load(written)
        seconds[bool(more)] = best.step_time_s
        assert best.asked == ({} if more else Plan.load(file).asked) and (more or best.pp == 2)
        (note,) = [note for note in found["notes"] if "asked for (pp 2" in note]
        assert note.startswith("best: made without" if more else "best: with")
    assert seconds[True] < seconds[False]
    assert main([*command, "--batch", "7"]) == 0, "which 4 microbatches do not divide"
    (note,) = [note for note in json.loads(capsys.readouterr().out)["notes"] if "asked for (pp 2" in note]
    assert "which does not work under the change: a batch of 7 does not divide" in note
