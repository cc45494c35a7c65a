"""``autopart rules``, and a user's op with a rule of its own from capture to a sharded program."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import autopart
from autopart.cli import main
from autopart.passes.rules import RULES
from autopart.planner import make_plan
from autopart.realize import emit
from autopart.tracing import capture
from clusters import ideal
from custom_ops import Gated, rules
from launch import launch

HERE = Path(__file__).parent


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    capsys.readouterr()
    status = main(["rules", *argv])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_all_rules_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "--json")
    listed = {entry["op"]: entry for entry in json.loads(out)}
    assert status == 0 and listed.keys() == RULES.entries.keys()
    assert "0 added" in listed["aten.addmm.default"]["properties"]
    assert listed["aten.softmax.int"]["for_shapes"]
    status, out, _ = run(capsys)
    assert status == 0 and f"{len(RULES.entries)} rules" in out


@pytest.mark.parametrize("parts", ["2", "3"])
def test_an_op_is_tried_on_examples_and_on_arguments(capsys: pytest.CaptureFixture[str], parts: str) -> None:
    status, out, _ = run(capsys, "linear", "--parts", parts, "--json")
    assert status == 0 and {"n", "R", "B"} <= {entry["strategy"] for entry in json.loads(out)}
    status, out, _ = run(capsys, "aten.gather.default", "6x6", "1", "i6x12", "--parts", parts)
    assert status == 0 and "6x6, 6x12" in out and "equal" in out


WRONG = """from autopart.passes.rules import RULES


def wrong():
    return RULES.extended({"aten.softmax.int": "b n -> b n"})
"""


def test_a_wrong_rule_fails(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "wrong_rules.py").write_text(WRONG)
    status, out, _ = run(capsys, "softmax", "--rules", f"{tmp_path / 'wrong_rules.py'}:wrong")
    assert status == 1 and "largest difference" in out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["nothing"], "no rule is for an op 'nothing'"),
        (["autopart_tests.none.default", "4x6"], "PyTorch knows no op"),
        (["aten.linear.default", "4x6", "8x5"], "does not take these operands"),
        (["aten.linear.default", "4y6"], "neither a shape"),
        (["--rules", "here.txt:rules"], "names no rules"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(capsys: pytest.CaptureFixture[str], argv: Sequence[str], said: str) -> None:
    status, out, err = run(capsys, *argv)
    assert status == 2 and not out and said in err and "Traceback" not in err


def test_a_users_op_is_tried_from_its_file() -> None:
    command = [sys.executable, "-m", "autopart", "rules", "autopart_tests.gate.default", "4x6", "4x6"]
    command += ["--rules", f"{HERE / 'custom_ops.py'}:rules"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "d1" in done.stdout and done.stdout.count("equal") == len(done.stdout.splitlines()) - 2


def example() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    double = torch.float64
    return {
        "x": torch.randn(8, 64, generator=generator, dtype=double),
        "y": torch.randn(8, 8, generator=generator, dtype=double),
    }


def build() -> Gated:
    torch.manual_seed(0)
    return Gated().double()


def train(model: Any) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        loss = model(**example())["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_loaded(folder: str) -> tuple[list[float], list[int]]:
    model = autopart.load(folder, build())
    losses = train(model)
    return losses, [value.numel() for value in model.parameters()]


def train_parallelized() -> list[float]:
    return train(autopart.parallelize(build(), tp=2, rules=rules(), verbose=False))


def test_a_users_rule_is_planned_and_emitted(tmp_path: Path) -> None:
    expected = train(build())
    program = capture(build(), (), example(), check_eval=False)
    plan = make_plan(program, ideal(2), tp=2, rules=rules())
    plan = dataclasses.replace(
        plan,
        strategies={"value:linear": "n", "control:linear": "n", ":gate": "d1", "out:linear": "k", ":mse_loss": "R"},
        storage={"value.weight": "S0", "control.weight": "S0", "value.bias": "S0", "control.bias": "S0"}
        | {"out.weight": "S1"},
    )
    emit(program, plan, tmp_path / "program", rules=rules())
    for losses, sizes in launch(train_loaded, 2, str(tmp_path / "program")):
        assert losses == pytest.approx(expected, rel=1e-9)
        assert 128 * 64 in sizes and 8 * 128 in sizes
    with pytest.raises(autopart.runtime.errors.PlanError, match="not offered"):  # without the rule it is replicated
        emit(program, plan, tmp_path / "other")


def test_parallelize_takes_rules() -> None:
    expected = train(build())
    for losses in launch(train_parallelized, 2):
        assert losses == pytest.approx(expected, rel=1e-9)
