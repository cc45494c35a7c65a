"""The command line: results on stdout, one line on stderr and status 2 for what a user got wrong."""

from __future__ import annotations

import dataclasses
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import autopart.verify
from autopart.cli import main
from autopart.plan import Plan
from launch import run_kept_job

TINY = "hf:gpt2?n_layer=2&n_embd=32&n_head=4&vocab_size=96&n_positions=32&seq=16&batch=8"
MODELS = """
import torch
from torch import nn


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleDict({"fc": nn.Linear(8, 8)})

    def forward(self, x):
        y = self.inner["fc"](x)
        if y.sum() > 0:
            y = y * 2
        return y.mean()


class Contrast(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        y = self.fc(x)
        return (y @ y.T).log_softmax(-1).diagonal().mean()


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return (self.fc(x).float() * self.scale).mean()


def scaled():
    return Scaled(), (torch.randn(8, 8, dtype=torch.bfloat16),), {}


def branch():
    return Branch(), (torch.randn(4, 8),), {}


def contrast():
    return Contrast(), (torch.randn(4, 8),), {}


def large():
    return nn.Linear(2**18, 2**18), (torch.randn(4, 2**18),), {}


def plain():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), (torch.randn(8, 8),), {}


def broken():
    return nn.Linear(8, 8), (torch.randn(4, 9),), {}
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "models.py"
    path.write_text(MODELS)
    return path


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    limits = ("--pp", "2", "--tp", "2", "--microbatches", "2", "--schedule", "1f1b", "--recompute", "none")
    assert main(["plan", TINY, "--cluster", "cpu:4", *limits, "-o", str(path)]) == 0
    return path


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    capsys.readouterr()
    status = main([str(item) for item in argv])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def refused(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """The one line about what is wrong; lines before it say what is being done (they end in …)."""
    status, out, err = run(capsys, *argv)
    lines = [line for line in err.splitlines() if not line.endswith("…")]
    assert status == 2 and out == "", (status, out)
    assert len(lines) == 1 and lines[0].startswith("autopart") and "Traceback" not in err, err
    return lines[0]


def test_help_shows_an_example_of_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "--help")
    assert status == 0
    for command in ("inspect", "plan", "show", "emit", "verify"):
        assert command in out
        status, text, _ = run(capsys, command, "--help")
        assert status == 0 and f"example: autopart {command}" in text


def test_a_terminal_that_takes_ascii_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert main(["inspect", "--help"]) == 0
    sys.stdout.flush()
    assert b"hf:FAMILY?key=value&?" in written.getvalue()


def test_help_loads_no_torch() -> None:
    code = (
        "import sys; from autopart.cli import main; main(['--help']); assert not {'torch', 'ortools'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_plan_prints_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "plan", TINY, "--cluster", "2x2xA100-80GB", "--batch", 16, "--dtype", "bf16", "--json")
    assert status == 0
    found: dict[str, Any] = json.loads(out)
    keys = (
        "model cluster batch dtype step_time_s bound_s gap solve_s total_s schedule warmup microbatches recompute "
        "zero asked pins together dp tp pp tokens_per_s throughput_unit tflops_per_device notes stages"
    )
    assert list(found) == keys.split()
    stage_keys = (
        "devices mesh shares device blocks forward_s backward_s memory_bytes capacity_bytes parameters collectives "
        "step_collectives recompute"
    )
    for stage in found["stages"]:
        assert list(stage) == stage_keys.split()
    assert found["dp"] * found["tp"] * found["pp"] == 4
    assert 0 < found["bound_s"] <= found["step_time_s"]
    assert (found["cluster"], found["batch"], found["dtype"]) == ("2x2xA100-80GB", 16, "bfloat16")
    assert all(isinstance(note, str) for note in found["notes"])


def test_what_is_given_is_forced(plan_file: Path) -> None:
    plan = Plan.load(plan_file)
    assert (plan.pp, plan.dp, plan.tp, plan.microbatches) == (2, 1, 2, 2)
    assert (plan.schedule, plan.recompute, plan.batch) == ("1f1b", "none", 8)


def test_show(capsys: pytest.CaptureFixture[str], plan_file: Path) -> None:
    status, out, _ = run(capsys, "show", plan_file)
    assert status == 0 and "pp 2 x dp 1 x tp 2" in out and "memory / capacity" in out
    status, out, _ = run(capsys, "show", plan_file, "--json")
    plan = Plan.load(plan_file)
    assert status == 0 and json.loads(out) == plan.to_json_object()
    status, out, _ = run(capsys, "show", plan_file, "--considered", "--json")
    assert status == 0 and json.loads(out) == {**plan.to_json_object(), "considered": list(plan.considered)}
    assert len(plan.considered) >= 1


@pytest.mark.parametrize(
    ("model", "dtype"),
    [(TINY, "bf16"), (f"{TINY}&dtype=bfloat16", None), ("plain", "bf16"), ("plain", None), ("scaled", None)],
)
def test_a_plans_model_is_read_in_its_type(
    capsys: pytest.CaptureFixture[str], models: Path, tmp_path: Path, model: str, dtype: str | None
) -> None:
    """Without --dtype, and of a model of several types, which conversion would change, in these."""
    spec, path = model if model.startswith("hf:") else f"{models}:{model}", tmp_path / "plan.json"
    given = ("--dtype", dtype) if dtype else ()
    assert run(capsys, "plan", spec, "--cluster", "2xA100-80GB", *given, "-o", path)[0] == 0
    assert (Plan.load(path).dtype == "bfloat16") == (model != "plain" or dtype is not None)
    assert run(capsys, "explain", path, "--model", spec)[0] == 0
    assert run(capsys, "emit", spec, path, "-o", tmp_path / "stages")[0] == 0
    if dtype:
        assert "add --dtype bfloat16" in refused(capsys, "explain", path, "--model", spec, "--dtype", "fp32")


def test_inspect(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "inspect", TINY, "--json")
    assert status == 0
    found = json.loads(out)
    # Embeddings of 96 + 32 rows, two layers of 12 n^2 + 13 n, the last norm; the output layer is tied.
    assert found["parameters"] == (96 + 32) * 32 + 2 * (12 * 32**2 + 13 * 32) + 2 * 32
    assert {item["name"]: item["shape"] for item in found["inputs"]}["input_ids"] == ["b", 16]
    assert found["loss"] == "loss" and found["batch_splittable"] and found["ops_without_rule"] == {}
    assert sum(block["repeats"] for block in found["blocks"]) == found["block_count"]
    matrices = 2 * 16 * (2 * 12 * 32**2 + 96 * 32) + 2 * 2 * 2 * 16 * 16 * 32
    assert matrices < found["forward_flops_per_sample"] < 1.2 * matrices
    status, out, _ = run(capsys, "inspect", TINY)
    assert status == 0 and f"{found['parameters']:,} parameters" in out and "2 " in out


def test_inspect_names_the_op_that_mixes(capsys: pytest.CaptureFixture[str], models: Path) -> None:
    status, out, _ = run(capsys, "inspect", f"{models}:contrast")
    assert status == 0 and "is not split: aten.matmul" in out and "models.py:25" in out


def test_emit_from_a_plan_file(capsys: pytest.CaptureFixture[str], plan_file: Path, tmp_path: Path) -> None:
    status, out, _ = run(capsys, "emit", TINY, plan_file, "-o", tmp_path / "stages")
    assert status == 0 and "4 ranks" in out
    assert {"stage_0.py", "stage_1.py", "manifest.json"} <= {path.name for path in (tmp_path / "stages").iterdir()}


def test_emit_writes_what_no_checkpoint_holds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    import torch

    spec = "hf:llama?num_hidden_layers=1&hidden_size=32&intermediate_size=32&num_attention_heads=4&vocab_size=96&seq=8"
    status, _, _ = run(capsys, "emit", spec, "--cluster", "cpu:2", "--pp", 2, "-o", tmp_path / "stages", "--json")
    constants = torch.load(tmp_path / "stages" / "constants.pt")
    assert status == 0 and constants and not any(tensor.is_meta for tensor in constants.values())


def test_plan_of_another_model(capsys: pytest.CaptureFixture[str], plan_file: Path, tmp_path: Path) -> None:
    other = TINY.replace("n_layer=2", "n_layer=3")
    assert "plan is for another model" in refused(capsys, "emit", other, plan_file, "-o", tmp_path / "stages")
    assert "another model" in refused(capsys, "verify", other, "--plan", plan_file)
    assert not (tmp_path / "stages").exists()


def test_plan_of_another_version(capsys: pytest.CaptureFixture[str], plan_file: Path, tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    old.write_text(plan_file.read_text().replace('"version": 1', '"version": 0'))
    assert "version: found 0, this autopart reads 1; make the plan again" in refused(capsys, "show", old)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file or directory; make one with 'autopart plan'"),
        ("{", "not readable as JSON"),
        ("[]", "expected an object, found list"),
        ('{"version": 1, "stages": 3}', "stages: expected a list of stages"),
    ],
)
def test_unreadable_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "plan.json"
    if text is not None:
        path.write_text(text)
    assert message in refused(capsys, "show", path)


def test_unknown_device(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "plan", TINY, "--cluster", "8xA100-90GB")
    assert "unknown device 'A100-90GB'" in line and "A100-80GB" in line
    assert "expected cpu:COUNT" in refused(capsys, "verify", TINY, "--cluster", "cpu:none")


def test_a_batch_that_does_not_divide(capsys: pytest.CaptureFixture[str]) -> None:
    assert "6" in refused(capsys, "plan", TINY, "--cluster", "cpu:4", "--dp", 4, "--batch", 6, "--meshes", "equal")
    assert "4" in refused(capsys, "plan", TINY, "--cluster", "cpu:4", "--dp", 4, "--batch", 3)
    line = refused(capsys, "plan", TINY, "--cluster", "cpu:2", "--dp", 2, "--batch", 8, "--microbatches", 8)
    assert "8" in line and "16" in line


def test_data_dependent_control_flow(capsys: pytest.CaptureFixture[str], models: Path) -> None:
    for command in ("plan", "verify"):
        line = refused(capsys, command, f"{models}:branch", "--cluster", "cpu:2")
        assert "models.py:13: if y.sum() > 0:" in line and "torch.where" in line


def test_a_batch_that_mixes(capsys: pytest.CaptureFixture[str], models: Path) -> None:
    line = refused(capsys, "plan", f"{models}:contrast", "--cluster", "cpu:2", "--dp", 2)
    assert "aten.matmul.default" in line and "models.py:25" in line


def test_a_layer_too_large(capsys: pytest.CaptureFixture[str], models: Path) -> None:
    # 2^36 weights of 4 bytes, with gradients and AdamW's state: a tebibyte, of which a device would hold half.
    line = refused(capsys, "plan", f"{models}:large", "--cluster", "2xV100-16GB")
    assert "over" in line and "would do" in line


def test_wrong_arguments(capsys: pytest.CaptureFixture[str], models: Path, tmp_path: Path, plan_file: Path) -> None:
    assert "--cluster" in refused(capsys, "plan", TINY)
    assert "'0' is not a whole number of at least 1" in refused(capsys, "plan", TINY, "--cluster", "cpu:2", "--pp", 0)
    assert "names no model" in refused(capsys, "inspect", "gpt2")
    assert "autopart show: unrecognized arguments: b.json (see autopart show --help)" in refused(
        capsys, "show", "a.json", "b.json"
    )
    assert "did you mean plain" in refused(capsys, "inspect", f"{models}:plane")
    assert "run the model once on these inputs" in refused(capsys, "inspect", f"{models}:broken")
    assert "no folder" in refused(capsys, "plan", TINY, "--cluster", "cpu:2", "-o", tmp_path / "none" / "plan.json")
    assert "it is a folder" in refused(capsys, "plan", TINY, "--cluster", "cpu:2", "-o", tmp_path)
    assert "no patterns" in refused(capsys, "plan", TINY, "--cluster", "cpu:2", "--together", ",")
    assert "give either" in refused(capsys, "emit", TINY, "-o", tmp_path / "stages")
    assert "has its own tp, zero" in refused(capsys, "emit", TINY, plan_file, "-o", tmp_path, "--tp", 2, "--zero", 1)
    assert "has its own pp" in refused(capsys, "verify", TINY, "--plan", plan_file, "--batch", 4, "--pp", 2)
    (tmp_path / "notes.txt").write_text("mine")
    assert "holds other files" in refused(capsys, "emit", TINY, plan_file, "-o", tmp_path)
    assert "devices" in refused(capsys, "plan", TINY, "--cluster", "cpu:3", "--pp", 2, "--dp", 2)


def test_a_strategy_that_is_not_offered(capsys: pytest.CaptureFixture[str], plan_file: Path, tmp_path: Path) -> None:
    plan = Plan.load(plan_file)
    edited = dataclasses.replace(plan, strategies={**plan.strategies, "transformer.h.*.mlp.c_fc:addmm": "sideways"})
    edited.save(tmp_path / "plan.json")
    assert "'sideways' is not offered" in refused(capsys, "emit", TINY, tmp_path / "plan.json", "-o", tmp_path / "out")


@pytest.mark.parametrize("command", ["plan", "verify"])
def test_what_a_model_prints_is_no_part_of_the_answer(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    file = tmp_path / "prints.py"
    file.write_text(
        "import torch\nfrom torch import nn\nprint('imported')\n\n\nclass Printing(nn.Linear):\n"
        "    def forward(self, x):\n        print('called')\n        return super().forward(x).mean()\n\n\n"
        "def model():\n    print('made')\n    return Printing(4, 4), (torch.zeros(2, 4),), {}\n"
    )
    status, out, err = run(capsys, command, f"{file}:model", "--cluster", "cpu:1", "--json")
    assert status == 0 and json.loads(out)
    assert all(word in err for word in ("imported", "made", "called"))


def test_verify(capsys: pytest.CaptureFixture[str], models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ("verify", f"{models}:plain", "--cluster", "cpu:2", "--pp", 2, "--microbatches", 2, "--steps", 2, "--json")
    status, out, _ = run(capsys, *argv)
    found = json.loads(out)
    assert status == 0 and found["equal"] is True and len(found["losses"]) == 2
    assert {item["group"] for item in found["groups"]} == {"*.weight", "*.bias"}
    # An impossible tolerance, to see the other status; the processes of a job's own were tried above.
    monkeypatch.setattr(autopart.verify, "run_local_job", run_kept_job)
    verify = autopart.verify.verify
    monkeypatch.setattr(autopart.verify, "verify", lambda *given, **named: verify(*given, **{**named, "tolerance": -1}))
    status, out, _ = run(capsys, *argv[:-1])
    assert status == 1 and out.startswith("NOT EQUAL")


@pytest.mark.parametrize(
    "given", ["--tolerance=-1", "--tolerance=nan", "--tolerance=x", "--timeout=0", "--timeout=inf"]
)
def test_verify_refuses_numbers_that_say_nothing(capsys: pytest.CaptureFixture[str], given: str) -> None:
    assert main(["verify", "no/such.py:model", "--cluster", "cpu:2", given]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert given.partition("=")[0] in line and "such as" in line


def test_verify_says_why_it_cannot_run(capsys: pytest.CaptureFixture[str], models: Path, tmp_path: Path) -> None:
    assert "give either" in refused(capsys, "verify", f"{models}:plain")
    forced = "--dp", 2, "--batch", 3, "--meshes", "equal"
    line = refused(capsys, "verify", f"{models}:plain", "--cluster", "cpu:2", *forced)
    assert "does not divide" in line
