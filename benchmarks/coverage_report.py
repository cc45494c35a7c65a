"""docs/coverage.md from the results of ``coverage.py``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

PASS = "pass"
STAGES = ("build", "capture", "batch")


def write(path: Path, rows: Sequence[dict[str, Any]], plans: Sequence[str]) -> None:
    path.write_text("\n")
