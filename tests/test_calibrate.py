"""Calibration: known parameters come back from what they predict, and what is stored is used where it fits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autopart import cache
from autopart.cli import main
from autopart.cli.calibrating import calibration_text
from autopart.cluster import Cluster
from autopart.cluster_notes import speeds
from autopart.cost import calibrated
from autopart.cost.calibrate import calibrate
from autopart.cost.calibration import Calibration, doubts, fit
from autopart.cost.clock import Clock
from autopart.cost.communication import COLLECTIVES, SEND
from autopart.cost.compute import Product
from autopart.cost.devices import Device, Link, device
from autopart.cost.measure import Effort, hold_aside, odd_shapes, product_shapes
from autopart.cost.samples import ATTENTION, HOST, LAUNCH, PRODUCT, STREAM, Sample, predicted_seconds
from autopart.models import load_model
from autopart.plan import Plan
from autopart.planner import make_plan
from autopart.runtime.errors import ClusterError
from autopart.tracing import capture
from launch import launch

TINY = Effort(0.0001, 4, 1e7, ("float32",), 1)


def samples_of(machine: Device, link: Link | None) -> list[Sample]:
    """Made up: exactly what the cost model says of a machine."""
    found = []
    for dtype in machine.peak_flops:
        shapes = product_shapes(3e11 if machine.kind == "cuda" else 3e9, 20)
        found += [Sample(PRODUCT, "", 1.0, dtype, (shape,), shape.num_bytes(4)) for shape in shapes]
    if machine.kind == "cuda":
        found += [Sample(PRODUCT, "", 1.0, "bfloat16", (shape,), shape.num_bytes(2)) for shape in odd_shapes()]
    if machine.host_s:
        found += [Sample(HOST, "", 1.0, launches=layers * 37) for layers in 3 * (6, 12, 18, 24)]
    if machine.kind == "cpu":
        for what, each in (("functions", 10), ("drawn", 1), ("mapped", 4)):
            for elements in (2.0**power for power in range(15, 24)):
                more = {what: each * elements}
                found.append(Sample(STREAM, "", 1.0, num_bytes=8 * elements, **more))  # type: ignore[arg-type]
    found += [Sample(STREAM, "", 1.0, num_bytes=2.0**power) for power in range(16, 27)]
    found += [Sample(LAUNCH, "", 1.0, num_bytes=64.0) for _ in range(12)]
    for heads in (8, 96, 512):
        shape = Product(512, 512, 64, heads, fused=True)
        for dtype in machine.peak_flops:
            scores = 512.0**2 * heads if machine.kind == "cpu" else 0.0
            for products, functions in (((shape,), 5), ((shape, *shape.backward), 15)):
                sample = Sample(
                    *(ATTENTION, "", 1.0, dtype, products), launches=len(products), functions=functions * scores
                )
                found += 6 * [sample]
    if link is not None:
        for kind in (*COLLECTIVES, SEND):
            found += [Sample(kind, "", 1.0, num_bytes=2.0**power, parts=4) for power in range(10, 27, 3)]
    return hold_aside([replace(sample, seconds=predicted_seconds(sample, machine, link)) for sample in found])


@pytest.mark.parametrize("preset", ["CPU", "A100-80GB"])
def test_the_fit_recovers_known_parameters(preset: str) -> None:
    base = device(preset)
    rates = {"float32": 3.1 * base.peak("float32"), "bfloat16": 0.45 * base.peak("bfloat16")}
    machine = replace(
        base,
        peak_flops=rates,
        memory_bandwidth=0.7 * base.memory_bandwidth,
        launch_s=3 * base.launch_s,
        contraction=1.0,
        memory=1.0,
        attention_by={"float32": 0.37, "bfloat16": 0.81},
        attention_back_by={"float32": 0.31, "bfloat16": 0.43},
        host_s=3 * base.host_s or 2e-5,
        function_s=2 * base.function_s,
        random_s=0.7 * base.random_s,
        mapped_s=3 * base.mapped_s,
        unaligned=0.3 if base.kind == "cuda" else 1.0,
    )
    link = Link("true", 3.3e9, 41e-6, efficiency=1.0)
    link = link.of_gloo() if base.kind == "cpu" else link
    samples = samples_of(machine, link)
    disturbed = [
        replace(item, seconds=7 * item.seconds) if index % 40 == 3 else item for index, item in enumerate(samples)
    ]
    for measured, near in ((samples, 0.005), (disturbed, 0.1)):
        found = fit(measured, base)
        assert found.link is not None
        assert found.device.peak_flops == pytest.approx(rates, rel=near)
        assert found.device.memory_bandwidth == pytest.approx(machine.memory_bandwidth, rel=near)
        assert found.device.launch_s == pytest.approx(machine.launch_s, rel=near)
        assert found.device.attention_by == pytest.approx(machine.attention_by, rel=near)
        assert found.device.attention_back_by == pytest.approx(machine.attention_back_by, rel=near)
        assert found.device.host_s == pytest.approx(machine.host_s, rel=near)
        assert found.device.function_s == pytest.approx(machine.function_s, rel=near)
        assert found.device.random_s == pytest.approx(machine.random_s, rel=near)
        assert found.device.mapped_s == pytest.approx(machine.mapped_s, rel=near)
        assert found.device.unaligned == pytest.approx(machine.unaligned, rel=near)
        assert found.link.bandwidth == pytest.approx(link.bandwidth, rel=near)
        assert found.link.latency_s == pytest.approx(link.latency_s, rel=near)
        assert found.link.scatter_rounds == link.scatter_rounds


def test_rates_are_not_beyond_what_was_measured() -> None:
    """On a busy machine: as the softmax took long, the product seems bound by memory, attention by its functions."""
    whole, scores = Product(2048, 768, 768), Product(1024, 1024, 64, 8, fused=True)
    samples = [
        Sample(PRODUCT, "", 0.019, products=(whole,), num_bytes=15e6),
        Sample(STREAM, "", 0.012, num_bytes=4.2e6, functions=2.6e6),
        Sample(LAUNCH, "", 2.8e-6, num_bytes=512),
        Sample(ATTENTION, "", 0.0277, products=(scores, scores), num_bytes=8.4e6, functions=4.2e7),
        Sample(ATTENTION, "", 0.0754, products=(scores,) * 7, num_bytes=25e6, functions=12.6e7),
    ]
    found = fit(samples, device("CPU")).device
    assert found.peak("float32") <= 2 * whole.flops / 0.019
    assert found.memory_bandwidth <= 2 * 4.2e6 / 0.012


@pytest.mark.parametrize("held_up", [1, 2])
def test_one_call_that_is_held_up_does_not_shorten_spans(held_up: int, monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = [0.0], [0]

    def call() -> None:
        calls[0] += 1
        now[0] += 0.01 if calls[0] == 1 + held_up else 1e-5

    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    assert Clock(torch.device("cpu"), 0.01).seconds(call) == pytest.approx(1e-5)
    assert calls[0] > 3000


def test_a_mapping_that_the_fit_does_not_see_is_not_told() -> None:
    seen = made_up(1, mapped_s=2e-10)
    assert "mapped at 4.66 GiB/s" in calibration_text(seen, "cpu")
    assert "mapped" not in calibration_text(replace(seen, mapped_s=1e-25), "cpu")


def test_what_is_kept_aside_does_not_touch_the_fit() -> None:
    samples = samples_of(device("CPU"), None)
    spoiled = [replace(item, seconds=100.0) if item.held else item for item in samples]
    assert fit(samples, device("CPU")) == fit(spoiled, device("CPU"))
    assert {item.held for item in samples if item.kind == PRODUCT} == {True, False}
    with pytest.raises(ClusterError, match="finite numbers above zero") as told:
        replace(made_up(1), memory_bandwidth=-5.0)
    assert "'memory_bandwidth': -5.0" in str(told.value) and len(str(told.value)) < 1000, "without its samples"
    with pytest.raises(ClusterError, match="no sample of kind stream"):
        fit([item for item in samples if item.kind != STREAM], device("CPU"))


def made_up(processes: int = 4, **more: Any) -> Calibration:
    link = Link("measured", 2e9, 5e-5, efficiency=1.0) if processes > 1 else None
    found = Calibration(
        device=calibrated.device_name("cpu"),
        kind="cpu",
        processes=processes,
        threads=1,
        cores=calibrated.host_cores(),
        libraries=calibrated.libraries("cpu"),
        rates={"float32": 1e11 / processes},
        memory_bandwidth=8e9 / processes,
        launch_s=1e-5,
        attention={"float32": 0.5},
        link=link,
    )
    return replace(found, **more)


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path))
    return tmp_path


def test_stored_and_used(cached: Path) -> None:
    preset = Cluster.local(4)
    found = made_up()
    path = calibrated.store(found)
    assert path is not None and path.parent == cached / calibrated.FOLDER
    assert [item.name for item in path.parent.iterdir()] == [path.name]
    for cluster in (Cluster.local(4), Cluster.parse("cpu:4")):
        (node,) = cluster.nodes
        assert node.inside == found.link and cluster != preset and str(cluster) == "cpu:4"
        assert node.device.peak("float32") == 1e11 / 4 and node.device.contraction == 1.0
        assert node.device.memory_bandwidth == 2e9 and node.device.memory_bytes == preset.nodes[0].device.memory_bytes
    calibrated.store(replace(found, launch_s=2e-5))  # in the older one's place
    assert len(list(path.parent.iterdir())) == 1 and Cluster.local(4).nodes[0].device.launch_s == 2e-5


def test_a_file_of_a_calibrated_host_is_that_host(cached: Path, tmp_path: Path) -> None:
    found = made_up()
    assert found.link is not None
    calibrated.store(replace(found, link=found.link.of_gloo()))
    here, written = Cluster.local(4), tmp_path / "host.toml"
    here.save(written)
    assert Cluster.load(written) == here
    assert str(Cluster.load(written)) == "cpu:4"


def test_plans_say_whether_speeds_were_measured(cached: Path) -> None:
    loaded = load_model("hf:gpt2?n_layer=1&n_embd=32&n_head=2&vocab_size=64&seq=8", meta=True)
    program = capture(loaded.model, loaded.args, loaded.kwargs, check_eval=False)
    for measured in (False, True):
        if measured:
            calibrated.store(made_up())
        notes = [note for note in make_plan(program, Cluster.local(2), batch=4).notes if "calibrate" in note]
        assert notes == (["speeds are those that autopart calibrate measured with 4 ranks at once"] if measured else [])


def test_plans_say_that_a_calibration_is_of_other_versions(cached: Path) -> None:
    calibrated.store(made_up(libraries={"torch": "1.0"}))
    (note,) = speeds(Cluster.parse("cpu:2"))
    assert "speeds are presets: this host was calibrated with torch 1.0" in note and "calibrate again" in note
    assert not speeds(Cluster.parse("2xCPU")) and not speeds(Cluster.parse("8xH100"))
    calibrated.store(made_up())
    assert ["measured with 4 ranks" in note for note in speeds(Cluster.parse("cpu:2"))] == [True]
    assert calibrated.outdated("cpu") is None


def planned(tmp_path: Path, cluster: str | Path, *more: str) -> Plan:
    model = "hf:gpt2?n_layer=1&n_embd=32&n_head=2&vocab_size=64&seq=8"
    assert main(["plan", model, "--cluster", str(cluster), "-o", str(tmp_path / "plan.json"), *more]) == 0
    return replace(Plan.load(tmp_path / "plan.json"), solve_s=0.0, total_s=0.0)


def test_kept_plans_say_what_is_known_of_this_host_now(cached: Path, tmp_path: Path) -> None:
    """Its name and its notes, which its numbers do not tell."""
    before = planned(tmp_path, "cpu:2")
    outdated = calibrated.store(made_up(libraries={"torch": "1.0"}))
    after = planned(tmp_path, "cpu:2")
    assert outdated is not None and after == planned(tmp_path, "cpu:2", "--no-cache") != before
    outdated.unlink()
    path = calibrated.store(made_up(2))
    Cluster.parse("cpu:2").save(host := tmp_path / "host.toml")
    before = planned(tmp_path, host)
    assert path is not None and before.cluster == "cpu:2"
    path.unlink()
    after = planned(tmp_path, host)
    assert after == planned(tmp_path, host, "--no-cache") and after.cluster == "cpu:2 (as described)"


def test_attention_by_type() -> None:
    found = made_up(attention={"float32": 0.8, "bfloat16": 0.2}, rates={"float32": 1e11, "bfloat16": 4e11})
    applied = found.applied(device("CPU"), 4)
    assert [applied.attention_rate(dtype) for dtype in ("float32", "bfloat16")] == pytest.approx([8e10, 8e10])
    assert applied.attention_rate("float64") == applied.peak("float64") * device("CPU").attention


def test_the_nearest_number_of_ranks_counts(cached: Path) -> None:
    cores = calibrated.host_cores()
    calibrated.store(made_up(1))
    calibrated.store(made_up(4, rates={"float32": 1e10}))
    assert calibrated.find("cpu", 1) == made_up(1)
    eight = Cluster.local(8).nodes[0].device
    # eight ranks get half of what each of four got, where four use all cores
    busy = min(cores, 4)
    assert eight.peak("float32") == pytest.approx(1e10 * 4 / busy * cores / 8)
    assert eight.launch_s == pytest.approx(1e-5 * max(1.0, 8 / cores) / max(1.0, 4 / cores))


def test_ranks_of_jobs_have_one_thread() -> None:
    found, core = made_up(1, threads=2, cores=2), device("CPU")
    assert [found.applied(core, ranks).alone for ranks in (1, 2, 4)] == [1.0, 1.0, 2.0]
    assert made_up(4, threads=2, cores=2).applied(core, 4).alone == 4.0, "as it was measured"


@pytest.mark.parametrize(
    "more", [{"libraries": {"torch": "1.0"}}, {"device": "another"}, {"kind": "cuda"}, {"cores": 10_000}]
)
def test_of_another_machine(cached: Path, more: dict[str, Any]) -> None:
    calibrated.store(made_up(**more))
    assert calibrated.find("cpu", 4) is None


@pytest.mark.parametrize("spoil", ["", "[]", "{", '{"version": 7}', "launch_s", "rates", "link", "samples", "text"])
def test_bad_files_are_left_alone(cached: Path, spoil: str) -> None:
    before = Cluster.local(4)
    path = calibrated.store(made_up())
    assert path is not None
    data = json.loads(path.read_text())
    if spoil == "text":
        data["memory_bandwidth"] = "fast"
    elif spoil in data:
        del data[spoil]
    path.write_text(json.dumps(data) if spoil.isidentifier() else spoil)
    with pytest.warns(UserWarning, match=r"run 'autopart calibrate' again") as told:
        assert Cluster.local(4) == before == Cluster.local(4)
    assert len(told) == 1


@pytest.mark.parametrize(
    "damage",
    [
        {"libraries": ["torch"]},
        {"libraries": {"torch": 2}},
        {"device": 7},
        {"cores": 2.0},
        {"processes": True},
        {"rates": {"float32": float("nan")}},
        {"rates": {"float32": True}},
        {"rates": [1e9]},
        {"memory_bandwidth": float("nan")},
        {"launch_s": float("inf")},
        {"attention": {"float32": float("nan")}},
        {"link": {"name": "l", "bandwidth": float("nan"), "latency_s": 1e-5}},
        {"link": {"name": "l", "bandwidth": 1e9, "latency_s": "short"}},
        {"link": "fast"},
    ],
)
def test_numbers_of_bad_files_are_left_alone(cached: Path, damage: dict[str, Any]) -> None:
    before = Cluster.local(4)
    path = calibrated.store(made_up())
    assert path is not None
    path.write_text(json.dumps({**json.loads(path.read_text()), **damage}))
    with pytest.warns(UserWarning, match=r"run 'autopart calibrate' again"):
        assert Cluster.local(4) == before


def test_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(cache.VARIABLE, "off")
    assert calibrated.store(made_up()) is None and calibrated.find("cpu", 4) is None
    monkeypatch.delenv(cache.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.folder("x") == tmp_path / "autopart" / "x"


def test_json_round_trip() -> None:
    found = replace(made_up(), samples=tuple(samples_of(device("CPU"), Link("l", 1e9, 1e-5))))
    again = Calibration.from_json_object(json.loads(json.dumps(found.to_json_object())))
    assert again == found and again.rates == found.rates
    accuracy = {item.kind: item for item in again.accuracy(device("CPU"))}
    assert accuracy[PRODUCT].samples > 0 < accuracy[PRODUCT].fitted


def test_a_fit_that_says_little_is_told() -> None:
    found = made_up(samples=tuple(samples_of(made_up().applied(device("CPU"), 4), made_up().link)))
    assert "warning" not in calibration_text(found, "cpu") and not doubts(found.accuracy(device("CPU")))
    busy = [replace(item, seconds=item.seconds * (4 if item.kind == STREAM else 1.2)) for item in found.samples]
    text = calibration_text(replace(found, samples=tuple(busy)), "cpu")
    assert "warning: the median error on what was kept aside is 75% of stream, more than 50%" in text
    assert "when it is idle" in text and text.count("warning") == 1


def test_command(cached: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("autopart.cost.calibrate.effort_for", lambda *_: TINY)
    written = cached / "here.toml"
    assert main(["calibrate", "--quick", "--json", "-o", str(written)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["processes"] == 1 and printed["link"] is None
    assert len(printed["warnings"]) == any(item["median"] > 0.5 for item in printed["accuracy"])
    assert {item["kind"] for item in printed["accuracy"]} == {PRODUCT, STREAM, LAUNCH, HOST, ATTENTION}
    assert Cluster.load(written) == Cluster.local(1) and Cluster.local(1).nodes[0].device.attention_by
    device = Cluster.local(1).nodes[0].device
    assert device.launch_s == printed["host_s"] > printed["launch_s"] and not device.host_s
    for name in ("function_s", "random_s", "mapped_s"):
        assert getattr(device, name) == printed[name] > 0
    assert main(["calibrate"]) == 0
    assert "FLOP/s" in capsys.readouterr().out
    assert main(["calibrate", "-o", str(cached / "nowhere" / "x.toml")]) == 2
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert main(["calibrate"]) == 2
    assert "one host at a time" in capsys.readouterr().err


def test_what_was_measured_is_written_where_the_cache_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(cache.VARIABLE, "off")
    monkeypatch.setattr("autopart.cost.calibrate.effort_for", lambda *_: TINY)
    assert main(["calibrate", "--quick", "--json", "-o", str(tmp_path / "host.toml")]) == 0
    found = Cluster.load(tmp_path / "host.toml").device(0)
    assert found.measured == 1 and found.launch_s == json.loads(capsys.readouterr().out)["host_s"]


def test_a_folder_that_cannot_be_written_is_told_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(*_: Any) -> Any:
        raise AssertionError("measured first")

    monkeypatch.setattr("autopart.cost.calibrate.calibrate", measured)
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv(cache.VARIABLE, str(file))
    assert main(["calibrate"]) == 2
    said = capsys.readouterr().err
    assert f"cannot be stored in {file / calibrated.FOLDER}" in said and "set AUTOPART_CACHE" in said


def _in_a_job() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:  # the process is kept for other tests
        patch.setattr("autopart.cost.calibrate.effort_for", lambda *_: TINY)
        return calibrate(torch.device("cpu"), True).to_json_object()


def test_ranks_measure_together() -> None:
    first, second = launch(_in_a_job, 2)
    assert first == second and first["processes"] == 2
    assert first["link"]["bandwidth"] > 0 and {item["parts"] for item in first["samples"]} == {1, 2}
    assert {item["kind"] for item in first["samples"]} >= {*COLLECTIVES, SEND}
