"""Steps that were measured on a GPU, and what is predicted of them now."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"
MEASURED = FOLDER / "measured" / "h100.json"


@pytest.fixture(scope="module")
def gpu_steps() -> Any:
    sys.path.insert(0, str(FOLDER))
    import gpu_steps

    yield gpu_steps
    sys.path.remove(str(FOLDER))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "gpt2_355m" else ())
        for name in ("gpt2_124m", "gpt2_355m", "llama_1b")
    ],
)
def test_predictions_hold_where_the_gpu_is_busy(name: str, gpu_steps: Any) -> None:
    """With the calibration, and with the preset, which is of whole nodes at work for hours: this GPU alone was faster.

    Memory in all rows.
    """
    data = json.loads(MEASURED.read_text())
    calibration = gpu_steps.Calibration.from_json_object(data["calibration"])
    rows = [gpu_steps.Row(**row) for row in data["rows"] if row["model"] == name]
    busy = [row.batch for row in rows if row.batch >= (2 if name == "llama_1b" else 8)]
    assert len(busy) >= 2
    for found, slower in ((calibration, 0.1), (None, 0.16)):
        for line in gpu_steps.compared(rows, found, data["gpu"]):
            assert -0.1 < line["error"] < slower or line["batch"] not in busy, line
            assert abs(line["memory error"]) < 0.025, line


def test_the_calibration_explains_its_samples(gpu_steps: Any) -> None:
    data = json.loads(MEASURED.read_text())
    calibration = gpu_steps.Calibration.from_json_object(data["calibration"])
    by_kind = {row.kind: row for row in calibration.accuracy(gpu_steps.devices.device("H100"))}
    assert by_kind["product"].median < 0.1 and by_kind["attention"].median < 0.2 and by_kind["stream"].median < 0.2
