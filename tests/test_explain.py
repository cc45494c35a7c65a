"""explain, compare and what-if: what they say of planned and of made-up plans."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import explained
from autopart.analysis import analyze
from autopart.breakdown import break_down
from autopart.candidate_settings import CUDA_OVERHEAD_BYTES
from autopart.cli import main
from autopart.cluster import Cluster
from autopart.cost.devices import GIB
from autopart.explain import cluster_of, compare, limits_of, runners_up, to_plan_beside
from autopart.other_model import other_model
from autopart.passes.program import Program
from autopart.plan import Plan, StagePlan
from autopart.planner import make_plan
from autopart.rank_peaks import rank_peaks
from autopart.report.explanation import comparison_text, runners_table
from autopart.reshardings import reshardings
from autopart.runtime.errors import ClusterError
from autopart.what_if import Change, cluster_named, read_factor, read_memory
from explained import CLUSTER, MODEL, by_hand


@pytest.fixture(scope="module", name="program")
def program_() -> Program:
    return explained.program()


@pytest.fixture(scope="module", name="plan")
def plan_() -> Plan:
    return explained.plan()


@pytest.fixture(scope="module")
def cluster_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("clusters") / "cluster.toml"
    CLUSTER.save(path)
    return str(path)


@pytest.fixture(scope="module")
def plan_file(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    plan.save(path)
    return path


@pytest.mark.parametrize("command", ["show", "explain", "compare"])
def test_an_edited_plan_whose_step_time_is_stale_is_told_of(
    command: str, plan: Plan, plan_file: Path, cluster_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edited = tmp_path / "edited.json"
    replace(plan, microbatches=2 * plan.microbatches).save(edited)
    more = {"show": [], "explain": ["--cluster", cluster_file], "compare": [str(plan_file), "--cluster", cluster_file]}
    for path in (plan_file, edited):
        assert main([command, str(path), *more[command], "--json"]) == 0
        notes = json.loads(capsys.readouterr().out)["notes"]
        assert any("is not that of its stages" in note for note in notes) == (path == edited)
        assert main([command, str(path), *more[command]]) == 0
        assert ("is not that of its stages" in capsys.readouterr().out) == (path == edited)


def test_reshardings_are_those_of_the_plan(program: Program, plan: Plan) -> None:
    rows = reshardings(plan, analyze(program), CLUSTER)
    assert rows == sorted(rows, key=lambda row: -row.seconds)
    found = break_down(plan, CLUSTER)
    for index, stage in enumerate(plan.stages):
        assert stage.collectives, "the plan under test has to send something"
        for kind, count in stage.collectives.items():
            mine = [row for row in rows if row.stage == index and row.kind == kind]
            assert sum(row.calls for row in mine) == plan.microbatches * count["calls"]
            assert sum(row.bytes for row in mine) == plan.microbatches * count["bytes"]
            priced = found.stages[index].collectives_s
            assert priced is not None
            hidden = plan.microbatches * stage.hidden_s.get(kind, 0.0)
            assert sum(row.seconds for row in mine) == pytest.approx(priced[kind] + hidden)
    assert all(row.source for row in rows if "attn" in row.op) and {row.axis for row in rows} == {"tp"}
    assert any(".*." in row.op for row in rows)


def test_compare() -> None:
    one = by_hand(strategies={"h.*.fc:linear": "n"})
    other = replace(one, microbatches=2, strategies={"h.*.fc:linear": "k", "head:linear": "n"}, step_time_s=30.0)
    found = compare((one, other), (cluster_of(one), None))
    assert {item.what: item.values for item in found.decisions} == {
        "microbatches": (4, 2),
        "strategies of h.*.fc:linear": ("n", "k"),
        "strategies of head:linear": (None, "n"),
    }
    assert found.figures["step time"] == (20.0, 30.0)
    assert found.parts["all_reduce"][0] > 0 == found.parts["all_reduce"][1]
    assert not compare((one, one), (None, None)).decisions


def test_where_stages_lie_is_told_of_unlike_devices() -> None:
    one = by_hand()
    swapped = replace(one, stages=tuple(replace(one.stages[s], devices=one.stages[1 - s].devices) for s in range(2)))
    assert not compare((one, swapped), (cluster_of(one), None)).decisions, "all devices are alike"
    unlike = Cluster.parse("1x2xV100-32GB+1x2xV100-16GB")
    found = compare((one, swapped), (unlike, unlike))
    assert [item.what for item in found.decisions] == ["stage 0 devices", "stage 1 devices"]
    rows = [" ".join(line.split()) for line in comparison_text(("a", "b"), found).splitlines()]
    assert "stage 0 devices 0-1 2-3" in rows
    named = [
        replace(plan, stages=tuple(replace(s, device=f"of {s.devices[0]}") for s in plan.stages))
        for plan in (one, swapped)
    ]
    found = compare(named, (None, None))
    assert {"stage 0 devices", "stage 0 device"} <= {item.what for item in found.decisions}


def test_units_of_throughput() -> None:
    tokens, samples = by_hand(tokens=4 * 16), by_hand(tokens=4)
    for plans, units, row in (
        ((tokens, tokens), ["tokens", "tokens"], "tokens per second 3.2 3.2 1.000"),
        ((samples, samples), ["samples", "samples"], "samples per second 0.2 0.2 1.000"),
        ((samples, tokens), ["samples", "tokens"], "throughput per second 0.2 samples 3.2 tokens -"),
    ):
        found = compare(plans, (None, None))
        told = found.to_json_object()
        assert told["throughput_units"] == units and len(told["figures"]["tokens per second"]) == 2
        assert row in [" ".join(line.split()) for line in comparison_text(("a", "b"), found).splitlines()]


def test_a_plan_that_is_thousands_of_times_slower_is_so() -> None:
    one = by_hand(tokens=64)
    found = compare((one, replace(one, step_time_s=8192 * one.step_time_s)), (None, None))
    lines = comparison_text(("a", "b"), found).splitlines()
    ratios = {line.split("  ")[0]: line.split()[-1] for line in lines if line}
    assert (ratios["step time"], ratios["tokens per second"]) == ("8192.000", "0.000122")


def test_decisions_as_text() -> None:
    one, long = by_hand(), "hf:gpt2?n_layer=4&n_embd=128&n_head=4&vocab_size=512&seq="
    other = replace(
        one,
        model=f"{long}64",
        bucket_bytes=2**20,
        stages=(
            replace(one.stages[0], step_collectives={"all_reduce": {"calls": 3, "bytes": 2**19}}, recompute=()),
            replace(
                one.stages[1], strategies={"head:linear": "n"}, step_collectives={"broadcast": {"calls": 1, "bytes": 8}}
            ),
        ),
    )
    found = compare((replace(one, model=f"{long}128"), other), (None, None))
    text = comparison_text(("a", "b"), found)
    assert "3 all_reduce 512 KiB" in text and "1 broadcast 8 B" in text and "1 MiB" in text
    assert "seq=64" in text and "seq=128" in text and "stage 1 strategies of head:linear" in text
    assert not any(mark in text for mark in "{['…")
    more = replace(other.stages[0], step_collectives={"all_reduce": {"calls": 3, "bytes": 2**19 + 1}})
    text = comparison_text(("a", "b"), compare((other, replace(other, stages=(more, other.stages[1]))), (None, None)))
    assert "524,288 B" in text and "524,289 B" in text
    whole = replace(one, stages=(StagePlan((0, 1), (("dp", 1), ("tp", 2)), (0, 2)),), order=(1, 0))
    text = comparison_text(("a", "b"), compare((one, whole), (None, None)))
    assert "dp 1 x tp 2" in text and "stage 1 shares" not in text and "{" not in text


def test_many_strategies_as_text() -> None:
    one = by_hand(strategies={f"h.{layer}.act:gelu": "n" for layer in range(4)} | {"head:linear": "k"})
    text = comparison_text(("a", "b"), compare((one, by_hand()), (None, None)), most=2)
    assert "of head:linear" in text and text.count(":gelu") == 1 and "and 3 more strategies" in text


def test_runners_up() -> None:
    rows = (
        {"config": "a", "status": "slower", "seconds": 3.0, "reason": ""},
        {"config": "b", "status": "chosen", "seconds": 1.0, "reason": ""},
        {"config": "c", "status": "pruned", "seconds": 2.0, "reason": ""},
        {"config": "d", "status": "infeasible", "seconds": None, "reason": ""},
    )
    assert [row["config"] for row in runners_up(by_hand(considered=rows))] == ["c", "a"]
    assert limits_of("pp=2 dp=1 tp=4 microbatches=8 1f1b recompute") == {
        "pp": 2,
        "dp": 1,
        "tp": 4,
        "microbatches": 8,
        "schedule": "1f1b",
        "recompute": "full",
    }
    assert limits_of("pp=1 dp=1 tp=2x4 microbatches=8 gpipe") == {
        "pp": 1,
        "dp": 1,
        "tp": "2x4",
        "microbatches": 8,
        "schedule": "gpipe",
        "recompute": "auto",
    }
    assert limits_of("pp=2 dp=1 tp=1 microbatches=8 interleaved x4 no-recompute")["virtual"] == 4
    assert limits_of("pp=2 batch=7 program=3") == {"pp": 2, "recompute": "auto"}  # decisions of a candidate alone


def test_bounds_that_reach_the_chosen_step_are_not_below_it() -> None:
    row = {"config": "a", "status": "pruned", "seconds": 1 - 1e-12, "reason": "takes no less than the chosen one"}
    assert " +0.0% " in runners_table([row], 1.0)


def test_limits_of_what_the_search_writes(plan: Plan) -> None:
    (row,) = [row for row in plan.considered if row["status"] == "chosen"]
    found = limits_of(str(row["config"]))
    assert found == {"pp": 2, "dp": 1, "tp": 2, "microbatches": 2, "schedule": "1f1b", "recompute": "none"}


def test_change() -> None:
    cluster = Cluster.parse("2x8xH100")
    node = Change(network=2.0, inside=0.5, flops=3.0, bandwidth=4.0, memory=40 * GIB).applied(cluster).nodes[1]
    was = cluster.nodes[1]
    assert node.port.bandwidth == 2 * was.port.bandwidth and node.inside.bandwidth == was.inside.bandwidth / 2
    assert node.device.peak("bfloat16") == 3 * was.device.peak("bfloat16")
    assert node.device.memory_bandwidth == 4 * was.device.memory_bandwidth and node.device.memory_bytes == 40 * GIB
    assert Change().applied(cluster) == cluster
    assert Change(memory=0.5).applied(cluster).device(0).memory_bytes == was.device.memory_bytes // 2
    assert read_memory("80GB") == read_memory("80 GiB") == 80 * GIB and read_memory("2x") == 2.0 == read_factor("2x")
    for text in ("2", "x", "-1x", "0x", "infx", "nanx", "1e308x", "1e-300x"):
        with pytest.raises(ClusterError, match="factor"):
            read_factor(text)
    for text in ("80", "GB", "80MB", "0GB", "1.2.3GB", "9999999TB"):
        with pytest.raises(ClusterError):
            read_memory(text)


def test_explain_command(plan_file: Path, plan: Plan, cluster_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(plan_file)]) == 0
    text = capsys.readouterr().out
    assert "pace: stage" in text and "is fullest" in text and "compute includes collectives" in text
    command = ["explain", str(plan_file), "--model", MODEL]
    assert main([*command, "--cluster", cluster_file, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step_time_s"] == plan.step_time_s and len(found["stages"]) == 2 and found["reshardings"]
    assert [item["planned"] for item in found["rank_peaks"]] == [stage.memory_bytes for stage in plan.stages]
    assert main([*command, "--cluster", cluster_file, "--top", "2"]) == 0
    text = capsys.readouterr().out
    assert "more," in text and "share of step" in text and "most in a step" in text
    assert main(command) == 2
    assert "give its file with --cluster" in capsys.readouterr().err
    assert main([*command[:2], "--model", MODEL.replace("=32", "=64"), "--cluster", cluster_file]) == 2
    assert "another model" in capsys.readouterr().err
    assert main(["explain", str(plan_file), "--dtype", "bf16"]) == 2
    assert "give --model too" in capsys.readouterr().err
    assert main([*command, "--cluster", "4xH100"]) == 2
    text = capsys.readouterr().err
    assert f"made for {CLUSTER}, not for 4xH100" in text and "give the file" in text


def test_a_cluster_that_is_not_the_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    by_hand().save(one)
    replace(by_hand(), cluster="4xH100 (network 2x, memory 40 GiB)").save(other)
    assert main(["explain", str(one), "--cluster", "4xH100"]) == 2
    text = capsys.readouterr().err
    assert "made for 4xV100-32GB, not for 4xH100" in text and "leave out --cluster" in text
    assert main(["explain", str(one), "--cluster", "1x4xV100-32GB"]) == 0
    assert main(["compare", str(one), str(other), "--cluster", "4xH100"]) == 0
    assert main(["compare", str(one), str(other), "--cluster", "4xA100-40GB"]) == 2
    assert "4xV100-32GB and 4xH100 (network 2x, memory 40 GiB), not for" in capsys.readouterr().err


def test_clusters_of_plans_that_were_made_under_a_change() -> None:
    change = Change(network=2.0, memory=40 * GIB)
    cluster = Cluster.parse("4xH100")
    for given in (None, cluster):
        found = cluster_named(f"4xH100 ({change})", given)
        assert found == change.applied(cluster)
        assert cluster_named(f"4xH100 ({change}) (flops 3x)", given) == Change(flops=3.0).applied(
            change.applied(cluster)
        )
    assert cluster_named(f"{CLUSTER} ({change})") is None
    assert cluster_named(f"{CLUSTER} ({change})", CLUSTER) == change.applied(CLUSTER)
    for name in ("4xH100 (as described)", "4xH100 (memory)", "4xH100 (speed 2x)", "8xH100", "4xMine"):
        assert cluster_named(name, cluster) is None


def test_in_what_a_model_is_another(program: Program, plan: Plan) -> None:
    assert "in bfloat16, this model is in float32; add --dtype bfloat16" in other_model(
        program, replace(plan, dtype="bfloat16")
    )
    assert "precision='bf16-mixed'" in other_model(program, replace(plan, dtype="bf16-mixed"))
    mixed = replace(program, precision="fp16-mixed")
    assert "leave out precision='fp16-mixed', or plan" in other_model(mixed, plan)
    text = other_model(program, replace(plan, model="hf:other"))
    assert "hf:other" in text and program.name in text and "--dtype" not in text
    both = other_model(program, replace(plan, model="hf:other", dtype="bfloat16"))
    assert "give the model that was planned, and if this is it add --dtype bfloat16" in both
    assert "plan it again with 'autopart plan'" in other_model(program, plan)


@pytest.mark.parametrize(
    "limits",
    [
        {"pp": 4, "dp": 1, "tp": 1, "schedule": "1f1b"},
        {"pp": 2, "dp": 1, "tp": 2, "schedule": "interleaved"},
        {"pp": 2, "schedule": "interleaved", "meshes": "unlike"},
        {"pp": 1, "dp": 4, "tp": 1, "zero": 0},
        {"pp": 1, "dp": 4, "tp": 1, "zero": 1},
        {"pp": 1, "dp": 4, "tp": 1, "zero": 2},
        {"pp": 1, "dp": 4, "tp": 1, "zero": 3},
    ],
)
def test_what_ranks_hold_at_most(program: Program, limits: dict[str, Any]) -> None:
    """Parameters and their state are those of the plan's stages; the plan counts on as much at least, or nearly."""
    analysis = analyze(program)
    plan = make_plan(program, CLUSTER, analysis=analysis, microbatches=2, recompute="none", **limits)
    found = rank_peaks(plan, analysis, "cuda")
    for peak in found:
        own = [plan.stages[index] for index in peak.stages]
        weights = 4 * sum(stage.parameters for stage in own)
        assert peak.parameters == weights
        assert peak.optimizer == 2 * weights // (plan.dp if limits.get("zero") in (1, 2) else 1)
        assert peak.planned == sum(stage.memory_bytes for stage in own)
        assert peak.step > 0 and peak.total <= 1.05 * (peak.planned - CUDA_OVERHEAD_BYTES)
    in_order = sorted(range(len(plan.stages)), key=lambda stage: plan.places[stage])
    assert [stage for peak in found for stage in peak.stages] == in_order


def test_compare_command(plan_file: Path, plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "plan.json"
    replace(plan, microbatches=4, batch=16).save(other)
    assert main(["compare", str(plan_file), str(other)]) == 0
    text = capsys.readouterr().out
    assert "microbatches" in text and "step time" in text and str(other) in text
    assert main(["compare", str(plan_file), str(other), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"what": "microbatches", "values": [2, 4]} in found["decisions"]
    assert main(["compare", str(plan_file), str(tmp_path / "none.json")]) == 2


@pytest.mark.slow
def test_what_if_command(
    plan_file: Path, plan: Plan, cluster_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["what-if", str(plan_file), "--model", MODEL, "--cluster", cluster_file]
    written = tmp_path / "new.json"
    assert main([*command, "--inside", "10x", "--flops", "2x", "--json", "-o", str(written)]) == 0
    found = json.loads(capsys.readouterr().out)
    now, same, best = found["figures"]["step time"]
    assert found["plans"] == ["now", "same degrees", "best"] and now == plan.step_time_s and best <= same < now
    assert Plan.load(written).cluster == f"{CLUSTER} (inside 10x, flops 2x)"
    assert main([*command, "--memory", "1GB"]) == 2  # less than a process takes
    assert "fits" in capsys.readouterr().err
    assert main([*command[:-2], "--flops", "2x"]) == 2
    assert "give its file with --cluster" in capsys.readouterr().err
    assert main([*command, "--network", "fast"]) == 2
    assert "no factor" in capsys.readouterr().err
    known = tmp_path / "known.json"
    replace(plan, cluster="4xV100-32GB").save(known)
    assert main(["what-if", str(known), "--model", MODEL]) == 2
    assert "nothing is changed" in capsys.readouterr().err


def test_what_was_timed_is_planned_beside_before_what_was_ruled_out() -> None:
    rows = [{"config": f"pp={at}", "seconds": float(at), "status": "pruned"} for at in range(1, 9)]
    rows[6]["status"] = rows[7]["status"] = "slower"
    assert [row["seconds"] for row in to_plan_beside(rows, 3)] == [7.0, 1.0, 2.0, 3.0]
    assert [row["seconds"] for row in to_plan_beside(rows[:5], 3)] == [1.0, 2.0, 3.0]
