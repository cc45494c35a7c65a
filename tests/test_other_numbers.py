"""Plans of a cluster whose numbers are read from what was measured, after that changed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_calibrate import made_up

from autopart import cache
from autopart.cli import main
from autopart.cluster import Cluster
from autopart.cost import calibrated
from autopart.explain import cluster_of, given_cluster, has_other_numbers
from autopart.plan import Plan
from autopart.what_if import Change

MODEL = "hf:gpt2?n_layer=2&n_embd=32&n_head=4&vocab_size=96&n_positions=32&seq=16&batch=8"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A plan for what was measured, and the file that calibrate writes of it."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(cache.VARIABLE, str(folder / "cache"))
        calibrated.store(made_up(2))
        plan, cluster = folder / "plan.json", folder / "cluster.toml"
        command = ["plan", MODEL, "--cluster", "cpu:2", "--pp", "1", "--dp", "1", "--tp", "2", "--microbatches", "2"]
        assert main([*command, "-o", str(plan)]) == 0
        Cluster.parse("cpu:2").save(cluster)
    return plan, cluster


def test_a_digest_is_of_numbers(tmp_path: Path) -> None:
    cluster = Cluster.parse("2x4xA100-80GB+8xH100")
    cluster.save(tmp_path / "cluster.toml")
    assert (
        Cluster.load(tmp_path / "cluster.toml").digest == cluster.digest == Change(memory=0.5).applied(cluster).digest
    )
    others = [Change(**{name: 1.5}).applied(cluster) for name in ("network", "inside", "flops", "bandwidth")]
    assert len({cluster.digest, *(other.digest for other in others)}) == 5


def test_notes(made: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path))  # nothing was measured
    file, cluster = map(str, made)
    plan = Plan.load(file)
    assert plan.cluster_digest == Cluster.load(cluster).digest and has_other_numbers(plan, cluster_of(plan))
    commands = [["explain", file], ["compare", file, file]]
    for command in commands:
        assert main(command) == 0
        assert "numbers of cpu:2 at hand" in capsys.readouterr().out
        assert main([*command, "--json"]) == 0
        assert len(json.loads(capsys.readouterr().out)["notes"]) == 1
        assert main([*command, "--cluster", cluster]) == 0, "though its name is not the plan's now"
        assert "at hand" not in capsys.readouterr().out
    assert main(["explain", file, "--model", MODEL, "--json"]) == 0
    assert "runner_up" not in json.loads(capsys.readouterr().out), "made with other numbers"
    old = tmp_path / "old.json"
    data = json.loads(plan.to_json())
    del data["cluster_digest"], data["tensor_scheme"]
    old.write_text(json.dumps(data))
    assert main(["explain", str(old)]) == 0
    assert "at hand" not in capsys.readouterr().out


def test_changed_clusters_are_found_by_their_numbers(made: tuple[Path, Path]) -> None:
    cluster, change = Cluster.load(made[1]), Change(inside=2.0)
    changed = change.applied(cluster)
    plan = replace(Plan.load(made[0]), cluster=f"cpu:2 ({change})", cluster_digest=changed.digest)
    assert given_cluster(plan, cluster) == given_cluster(plan, changed) == changed
    assert given_cluster(plan, Cluster.parse("4xH100")) is None


def test_what_if(made: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path))
    file, cluster = map(str, made)
    command = ["what-if", file, "--model", MODEL, "--network", "2x", "--json"]
    planned = Plan.load(file).step_time_s
    for more, is_other in ([], True), (["--cluster", cluster], False):
        assert main([*command, *more]) == 0
        found = json.loads(capsys.readouterr().out)
        now, same, _ = found["figures"]["step time"]
        assert now == pytest.approx(same), "one host has no network"
        assert (now != pytest.approx(planned)) == is_other == any(text.startswith("now: ") for text in found["notes"])
