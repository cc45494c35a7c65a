"""Plans: what they check, and their file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autopart.plan import Plan, StagePlan
from autopart.runtime.errors import PlanError


def stage(devices: range, blocks: tuple[int, int], **more: Any) -> StagePlan:
    mesh = (("dp", 2), ("tp", len(devices) // 2))
    return StagePlan(
        tuple(devices), mesh, blocks, "embedding", "linear_3", 0.012, 0.024, 3 << 30, 80 << 30, 62_000_000, **more
    )


def example() -> Plan:
    return Plan(
        fingerprint="0123456789abcdef",
        model="hf:gpt2",
        cluster="8xH100",
        batch=32,
        dtype="bfloat16",
        schedule="1f1b",
        microbatches=4,
        stages=(
            stage(range(4), (0, 6), collectives={"all_reduce": {"calls": 24, "bytes": 8 << 20}}),
            stage(range(4, 8), (6, 12)),
        ),
        strategies={"transformer.h.*.mlp.c_fc:addmm": "n"},
        storage={"transformer.h.*.mlp.c_fc.weight": "S1"},
        step_time_s=0.25,
        bound_s=0.24,
        gap=0.0417,
        solve_s=2.0,
        total_s=3.5,
        tokens=32 * 1024,
        flops=1e14,
        notes=("batch norm sees one replica's samples",),
        considered=({"dp": 8, "step_time_s": 0.3}, {"dp": 4, "step_time_s": None}),
    )


def test_file_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    example().save(path)
    assert Plan.load(path) == example()
    assert [item.name for item in tmp_path.iterdir()] == ["plan.json"]
    assert hash(example()) == hash(Plan.load(path))


def test_the_file_is_for_reading(tmp_path: Path) -> None:
    text = example().to_json()
    assert json.loads(text)["version"] == 1
    assert '      "mesh": [["dp", 2], ["tp", 2]],' in text.splitlines()
    assert max(map(len, text.splitlines())) <= 120


def test_saving_never_leaves_half_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    example().save(path)

    def full(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="disk full"):
        replace(example(), batch=64).save(path)
    assert Plan.load(path) == example()
    assert [item.name for item in tmp_path.iterdir()] == ["plan.json"]


def test_numbers() -> None:
    plan = example()
    assert (plan.pp, plan.dp, plan.tp, plan.device_count) == (2, 2, 2, 8)
    assert plan.is_uniform
    assert plan.tokens_per_s == 32 * 1024 / 0.25
    assert plan.tflops_per_device == pytest.approx(1e14 / 0.25 / 8 / 1e12)
    assert replace(plan, step_time_s=0.0).tokens_per_s == 0.0
    mixed = replace(plan, stages=(plan.stages[0], StagePlan((4, 5, 6, 7), (("dp", 1), ("x", 2), ("y", 2)), (6, 12))))
    assert not mixed.is_uniform
    assert (mixed.dp, mixed.tp) == (2, 4)


def test_summary_has_the_command_lines_shape() -> None:
    summary = example().to_json_object()
    assert list(summary) == [
        *("model", "cluster", "batch", "dtype", "step_time_s", "bound_s", "gap", "solve_s", "total_s", "schedule"),
        *("warmup", "microbatches", "recompute", "zero", "asked", "pins", "together", "dp", "tp", "pp"),
        *("tokens_per_s", "throughput_unit", "tflops_per_device", "notes", "stages"),
    ]
    assert list(summary["stages"][0]) == [
        *("devices", "mesh", "shares", "device", "blocks", "forward_s", "backward_s", "memory_bytes"),
        *("capacity_bytes", "parameters", "collectives", "step_collectives", "recompute"),
    ]
    assert json.loads(json.dumps(summary)) == summary


def edited(change: dict[str, Any], stage_change: dict[str, Any] | None = None, remove: str = "") -> str:
    data = json.loads(example().to_json())
    data.update(change)
    if stage_change is not None:
        data["stages"][1].update(stage_change)
    data.pop(remove, None)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not readable as JSON"),
        ("[]", "expected an object"),
        (edited({"version": 2}), "version"),
        (edited({}, remove="version"), "version"),
        (edited({"colour": "red"}), "colour: unknown field"),
        (edited({}, remove="model"), "model: missing"),
        (edited({"batch": "32"}), 'batch: expected a whole number, found "32"'),
        (edited({"batch": True}), "batch: expected a whole number"),
        (edited({"batch": 0}), "at least 1"),
        (edited({"batch": 30}), "multiple of 8"),
        (edited({"schedule": "zigzag"}), "gpipe, 1f1b"),
        (edited({"recompute": "most"}), "none, full, some"),
        (edited({"step_time_s": -1}), "step_time_s"),
        (edited({"step_time_s": float("nan")}), "step_time_s"),
        (edited({"stages": {}}), "stages: expected a list"),
        ('{"version": 1, "stages": []}', "missing"),
        (edited({"strategies": {"a": 1}}), "strategies: expected an object of strings"),
        (edited({"storage": {"a": "S"}}), "storage['a']"),
        (edited({"storage": {"a": "S0,Q"}}), "storage['a']"),
        (edited({"notes": "one"}), "notes: expected a list of strings"),
        (edited({"considered": [1]}), "considered: expected a list of rows"),
        (edited({"considered": [{"seconds": "1"}]}), "considered: expected a list of rows"),
        (edited({"considered": [{"seconds": float("nan")}]}), "considered: expected a list of rows"),
        (edited({"shared_host": -1}), "shared_host: at least 0"),
        (edited({"alone": 0.0}), "alone: at least 1"),
        (edited({"dtype": "x"}), "dtype: one of torch's, such as bfloat16, or bf16-mixed"),
        (edited({"batch": 10**400}), "batch: expected a whole number"),
        (edited({"batch": 2**60, "microbatches": 2**58}), "microbatches: at most"),
        (edited({"bound_s": 10**400}), "bound_s: expected a number"),
        (edited({"step_time_s": 1e300}), "step_time_s: expected at most 1e+15 seconds"),
        (edited({}, {"forward_s": 1e308}), "stages[1]: forward_s: expected at most 1e+15 seconds"),
        (edited({}, {"hidden_s": {"all_reduce": 1e308, "dp": 1e308}}), "hidden_s['all_reduce']: expected at most"),
        (edited({"transfers": [[0, 1, 1e308, 1e308]]}), "transfers: [0, 1, ...]: expected"),
        ("[" * 100_000, "not readable as JSON"),
        ("1" * 5000, "not readable as JSON"),
        (edited({}, {"devices": [4, 5, 6]}), "stages[1]: mesh"),
        (edited({}, {"devices": [4, 5, 6, 6]}), "named twice"),
        (edited({}, {"devices": [0, 5, 6, 7]}), "in two stages"),
        (edited({}, {"devices": [4, 5, 6, -7]}), "count from 0"),
        (edited({}, {"devices": [4, 5, 6, 8]}), "stages[1].devices: there is no device 8 in 8xH100, whose 8 devices"),
        (edited({"cluster": "2x2xV100-32GB (memory 2x)"}), "stages[1].devices: there is no device 7 in 2x2xV100"),
        (edited({"pins": {"head": 2}}), "pins['head']: stage 2, but the plan's stages are 0 to 1"),
        (edited({}, {"mesh": [["tp", 4]]}), "stages[1]: mesh: the first axis is 'dp'"),
        (edited({}, {"mesh": [["dp", 4, 1]]}), "stages[1]: mesh: expected a list of [axis name, size]"),
        (edited({}, {"mesh": [["dp", 2], ["dp", 2]]}), "stages[1]: mesh"),
        (edited({}, {"mesh": [["dp", 2], ["t p", 2]]}), "identifiers"),
        (edited({}, {"blocks": [5, 12]}), "stages[1].blocks"),
        (edited({}, {"blocks": [6, 6]}), "stages[1]: blocks"),
        (edited({}, {"blocks": [6]}), "stages[1]: blocks: expected [first, end]"),
        (edited({}, {"memory_bytes": -1}), "stages[1]: memory_bytes"),
        (edited({}, {"hidden_s": {"dp": -1}}), "stages[1]: hidden_s: expected seconds of at least 0 in all, found -1"),
        (edited({"gap": 5.0}), "gap: a share of step_time_s, at most 1, found 5.0"),
        (edited({}, {"colour": "red"}), "stages[1]: colour: unknown field"),
        (edited({}, {"blocks": [6, 10**15]}), "stages[1]: blocks"),
        (edited({}, {"collectives": {"all_reduce": 3}}), "stages[1]: collectives"),
        (edited({}, {"collectives": {"shout": {"calls": 1, "bytes": 4}}}), "'shout' is none of all_reduce"),
        (edited({}, {"step_collectives": {"all_reduce": {"calls": 1, "bytes": -4}}}), "at least 0, found -4"),
        (edited({}, {"mesh": [["dp", 4], ["tp", 1]]}).replace('"batch": 32', '"batch": 8'), "stages[1]: a batch of 8"),
    ],
)
def test_errors_say_where(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(PlanError) as error:
        Plan.load(path)
    assert str(path) in str(error.value)
    assert words in str(error.value)


def test_a_plan_need_not_use_all_devices() -> None:
    for cluster in ("8xH100+8xA100-80GB", "32xmine"):  # the latter was described in a file
        text = edited({"cluster": cluster}, {"devices": [8, 9, 10, 15]})
        assert Plan.from_json(text).stages[1].devices == (8, 9, 10, 15)


def test_no_stages_and_no_file(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="at least one stage"):
        replace(example(), stages=())
    with pytest.raises(PlanError, match="autopart plan"):
        Plan.load(tmp_path / "none.json")
    with pytest.raises(PlanError, match="starts at block 0"):
        replace(example(), stages=example().stages[1:])


def test_a_plan_by_hand_needs_few_fields() -> None:
    text = """{"version": 1, "fingerprint": "x", "model": "m", "cluster": "cpu:2", "batch": 4, "dtype": "float32",
        "schedule": "gpipe", "microbatches": 2,
        "stages": [{"devices": [0, 1], "mesh": [["dp", 2]], "blocks": [0, 3]}]}"""
    plan = Plan.from_json(text)
    assert (plan.pp, plan.dp, plan.tp) == (1, 2, 1)
    assert plan.recompute == "none" and plan.strategies == {}
