"""A plan command that is asked again answers as before, without the program."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autopart import asked, cache, captured
from autopart.cli import main
from autopart.cluster import Cluster
from autopart.solver import tensor, time_limits

GPT2 = "hf:gpt2?n_layer=2&n_embd=32&n_head=2&vocab_size=64&n_positions=16&seq=16"
COMMAND = ["plan", GPT2, "--cluster", "4xA100-40GB", "--batch", "16", "--json"]
CLUSTER = Cluster.parse("4xA100-40GB")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path))
    monkeypatch.setattr(captured, "_environment", lambda: iter(()))  # torch sets a variable when it first exports
    return tmp_path / asked.FOLDER


def entries(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.json"))


def answer(capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    assert main([*COMMAND, *more]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    del found["solve_s"], found["total_s"]
    return found


def test_a_question_is_answered_again_without_the_program(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = answer(capsys)
    assert len(entries(folder)) == 1
    with monkeypatch.context() as patch:

        def never(*_: Any) -> Any:
            raise AssertionError("the program is read")

        patch.setattr(captured, "captured", never)
        assert answer(capsys) == first
    other = answer(capsys, "--tp", "2")
    assert other != first and len(entries(folder)) == 2
    assert answer(capsys, "--no-cache") == first
    for entry in entries(folder):
        entry.write_text('{"plans": ["{}"]}')
    assert answer(capsys) == first


def test_what_a_time_limit_decided_is_not_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tensor._Search.run

    def slow(search: tensor._Search) -> str:
        search.until = time.perf_counter()
        return run(search)

    monkeypatch.setattr(tensor._Search, "run", slow)
    answer(capsys, "--tp", "2", "--pp", "1")
    assert not entries(folder)


def test_a_limit_reached_inside_is_reached_around_it() -> None:
    with time_limits.watched() as outer:
        with time_limits.watched() as inner:
            time_limits.ended(time.perf_counter())
        assert inner() and outer()
    with time_limits.watched() as later:
        pass
    assert not later()


def test_the_key_changes_with_all_that_an_answer_follows_from(monkeypatch: pytest.MonkeyPatch) -> None:
    (node,) = CLUSTER.nodes
    slower = Cluster((replace(node, device=replace(node.device, memory_bandwidth=node.device.memory_bandwidth / 2)),))
    keys = [
        asked.key(GPT2, None, CLUSTER, {"batch": 4}),
        asked.key(f"{GPT2}&batch=2", None, CLUSTER, {"batch": 4}),
        asked.key(GPT2, torch.bfloat16, CLUSTER, {"batch": 4}),
        asked.key(GPT2, None, slower, {"batch": 4}),
        asked.key(GPT2, None, CLUSTER, {"batch": 8}),
        asked.key(GPT2, None, CLUSTER, {"batch": 4, "pins": {"a": 0}}),
    ]
    assert asked.key(GPT2, None, CLUSTER, {"batch": 4, "pins": None}) == keys[0]
    monkeypatch.setattr(captured, "sources", lambda: iter(["other"]))
    keys.append(asked.key(GPT2, None, CLUSTER, {"batch": 4}))
    assert len(set(keys)) == len(keys)
