"""docs/coverage.md is read back: a checkout without the results of earlier runs goes on from the page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

from coverage_report import failed_stage, read, write

PLANS = ("pp2", "tp2")
PASSED = {"build": "pass", "capture": "pass", "batch": "pass"}


def row(family: str, stages: dict[str, str], **plans: tuple[str, str]) -> dict[str, Any]:
    found = {name: {"stage": stage, "plan": name, "result": result} for name, (stage, result) in plans.items()}
    return {
        "family": family,
        "task": "causal-lm",
        "stages": stages,
        "plans": found,
        "date": "2026-01-02",
        "state": "12ab",
    }


def test_a_page_is_read_as_it_was_written(tmp_path: Path) -> None:
    rows = [
        row("all", PASSED, pp2=("verify", "pass"), tp2=("verify", "pass")) | {"parameters": 12_345},
        row("capture", {"build": "pass", "capture": "CaptureError: a|b"}),
        row("differs", PASSED, pp2=("verify", "differs: loss 1; gradients 2"), tp2=("plan", "took more than 1 s")),
        row("mixes", {**PASSED, "batch": "cumsum mixes"}, pp2=("verify", "pass"), tp2=("plan", "pass")),
    ]
    write(tmp_path / "page.md", rows, PLANS)
    again = read(tmp_path / "page.md", PLANS)
    assert again == rows
    assert [failed_stage(item) for item in again] == ["", "capture", "plan", "batch"]
    write(tmp_path / "again.md", again, PLANS)
    assert (tmp_path / "again.md").read_text() == (tmp_path / "page.md").read_text()
