"""Captured programs on disk: the same program with and without them, whatever lies there."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

from autopart import cache, captured
from autopart.cli import main
from autopart.cluster import Cluster
from autopart.models import load_model
from autopart.passes import program_json
from autopart.passes.program import Program
from autopart.planner import make_plan
from autopart.tracing import capture

GPT2 = "hf:gpt2?n_layer=4&n_embd=32&n_head=2&vocab_size=64&n_positions=16&seq=16"
SPECS = {
    "gpt2": GPT2,
    "mixtral": "hf:mixtral?num_hidden_layers=3&hidden_size=32&intermediate_size=64&num_attention_heads=2"
    "&num_key_value_heads=1&num_local_experts=4&vocab_size=64&seq=16",
    "t5": "hf:t5?num_layers=2&d_model=32&d_ff=64&num_heads=2&d_kv=16&vocab_size=64&seq=16",
    "resnet": "hf:resnet?image=32&depths=1,1&hidden_sizes=32,64",
}
CLUSTER = Cluster.parse("2xA100-40GB")


@functools.cache
def once(spec: str) -> Program:
    """Of all tests, which leave it as it is."""
    loaded = load_model(spec, meta=True)
    return capture(loaded.model, loaded.args, loaded.kwargs, name=loaded.name, check_eval=False)


def plan(program: Program) -> dict[str, Any]:
    made = make_plan(program, CLUSTER, batch=16).to_json_object()
    return {name: value for name, value in made.items() if name not in ("solve_s", "total_s")}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path))
    return tmp_path / captured.FOLDER


def entries(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.json"))


@pytest.mark.parametrize("family", SPECS)
def test_what_is_read_is_what_was_written(family: str) -> None:
    program = once(SPECS[family])
    data = program_json.written(program)
    again = program_json.read(json.loads(json.dumps(data)))
    again.graph.lint()
    assert again.fingerprint == program.fingerprint
    assert program_json.written(again) == data
    for node, copy in zip(program.graph.nodes, again.graph.nodes, strict=True):
        assert (copy.op, copy.name, copy.target, copy.meta.keys()) == (
            node.op,
            node.name,
            node.target,
            node.meta.keys(),
        )
        assert [item.name for item in copy.users] == [item.name for item in node.users]
    assert plan(again) == plan(program)


def test_a_model_is_captured_once(folder: Path) -> None:
    calls = []

    def take() -> Program:
        calls.append(GPT2)
        return once(GPT2)

    programs = [captured.captured(GPT2, None, take) for _ in range(3)]
    assert len(calls) == len(entries(folder)) == 1
    assert len({program.fingerprint for program in programs}) == 1
    with cache.used(False):
        captured.captured(GPT2, None, take)
    assert len(calls) == 2


def test_the_key_changes_with_what_the_program_follows_from(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {captured.key(GPT2, None), captured.key(GPT2, torch.bfloat16), captured.key(SPECS["t5"], None)}
    monkeypatch.setenv("HF_SOMETHING", "1")
    keys.add(captured.key(GPT2, None))
    for part in ("sources", "installed", "_transformers"):
        monkeypatch.setattr(captured, part, lambda part=part: iter([part]))
        keys.add(captured.key(GPT2, None))
    assert len(keys) == 7


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"nodes": [["placeholder"]]}'])
def test_a_broken_entry_is_captured_again(folder: Path, text: str) -> None:
    first = captured.captured(GPT2, None, lambda: once(GPT2))
    (entry,) = entries(folder)
    good = entry.read_text()
    entry.write_text(text)
    assert captured.captured(GPT2, None, lambda: once(GPT2)).fingerprint == first.fingerprint
    assert entry.read_text() == good


def test_an_entry_of_which_a_bit_was_turned_is_captured_again(folder: Path) -> None:
    """Another digit still makes a program, of another size or with another number in it."""
    first = captured.captured(GPT2, None, lambda: once(GPT2))
    (entry,) = entries(folder)
    good = entry.read_text()
    digits = [index for index, letter in enumerate(good) if letter.isdecimal()]
    for index in digits[:: len(digits) // 8]:
        entry.write_text(good[:index] + chr(ord(good[index]) ^ 1) + good[index + 1 :])
        assert captured.captured(GPT2, None, lambda: once(GPT2)).fingerprint == first.fingerprint
        assert entry.read_text() == good


def test_an_entry_that_names_other_nodes_is_captured_again(folder: Path) -> None:
    captured.captured(GPT2, None, lambda: once(GPT2))
    (entry,) = entries(folder)
    data = cache.kept(entry)
    assert data is not None
    data["nodes"][1][2] = data["nodes"][0][2]
    cache.keep(entry, data)
    with pytest.raises(ValueError, match="became"):
        program_json.read(data)
    assert captured.captured(GPT2, None, lambda: once(GPT2)).fingerprint == once(GPT2).fingerprint


def test_functions_of_files_are_captured_each_time(folder: Path) -> None:
    calls = []

    def take() -> Program:
        calls.append(1)
        return once(GPT2)

    for _ in range(2):
        captured.captured("model.py:build", None, take)
    assert len(calls) == 2 and not entries(folder)


def test_what_no_object_says_is_not_kept(folder: Path) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("mask", torch.ones(4), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(self.linear(x) * self.mask)

    program = capture(Masked(), (torch.randn(2, 4),), {}, check_eval=False)
    assert program.constants
    with pytest.raises(program_json.NotWritten, match="constants"):
        program_json.written(program)
    captured.captured("hf:masked", None, lambda: program)
    assert not entries(folder)


def test_an_op_that_no_name_finds_is_not_written() -> None:
    program = program_json.read(program_json.written(once(GPT2)))
    node = next(node for node in program.graph.nodes if node.op == "call_function")
    node.target = lambda *args: args
    with pytest.raises(program_json.NotWritten, match="function"):
        program_json.written(program)


def test_another_batch_is_planned_without_the_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--cluster", str(CLUSTER), "--json", "--batch"]
    assert main(["plan", GPT2, *options, "16", "--no-cache"]) == 0 and not entries(folder)
    plain = json.loads(capsys.readouterr().out)
    assert main(["plan", GPT2, *options, "8"]) == 0 and len(entries(folder)) == 1
    capsys.readouterr()
    code = (
        "import sys; from autopart.cli import main; main(sys.argv[1:])\n"
        "assert not {'transformers', 'torch.distributed.checkpoint', 'torch.export._trace'} & set(sys.modules)"
    )
    command = [sys.executable, "-c", code, "plan", GPT2, *options, "16"]
    again = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    assert len(entries(folder)) == 1
    for name in ("solve_s", "total_s"):
        plain.pop(name), again.pop(name)
    assert again == plain


def test_runtime_loads_what_is_asked_for() -> None:
    code = (
        "import sys, autopart.runtime as r, autopart.runtime.errors\n"
        "assert 'autopart.runtime.module' not in sys.modules\n"
        "assert all(getattr(r, name) is not None for name in r.__all__)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_torch_makes_a_symbol_of_a_dynamic_dim() -> None:
    """What a read program's batch size is; torch names none of these in its public documentation."""
    program = program_json.read(program_json.written(once(GPT2)))
    batch = next(node for node in program.graph.nodes if node.meta.get("name") == "b").meta["val"]
    assert isinstance(batch, torch.SymInt) and str(2 * batch).startswith("2*s") and isinstance(program.graph, fx.Graph)
