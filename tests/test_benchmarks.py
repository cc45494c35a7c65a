"""The benchmarks that are paired with torch's own programs run to their end, in small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"
SMALL = {
    "tensor_parallel.py": (["--rounds", "1", "--layers", "1", "--width", "128"], {"tensor", "data", "zero3"}),
    "pipeline.py": (["--rounds", "2", "--width", "16"], {"gpipe", "1f1b", "interleaved", "zb-v"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_benchmark_runs(name: str) -> None:
    arguments, kinds = SMALL[name]
    done = subprocess.run(
        [sys.executable, str(FOLDER / name), *arguments, "--json"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert set(json.loads(done.stdout.splitlines()[-1])) == kinds
