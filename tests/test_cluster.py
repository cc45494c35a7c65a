"""Descriptions of clusters: text, TOML, presets, links."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autopart.cli.arguments import read_cluster
from autopart.cluster import Cluster, Device, Link, Node
from autopart.cost import devices as presets
from autopart.device_layout import slowest
from autopart.runtime.errors import ClusterError

TEXTS = [
    "4x8xA100-80GB",
    "8xH100",
    "1xRTX-3090",
    "4x8xV100-16GB@Ethernet-25",
    "2x8xH100@4*InfiniBand-400+8xRTX-5000",
    "2xRTX-4090+2xRTX-3090-Ti",
    "4xCPU",
    "cpu:4",
    "cpu:2+cpu:2",
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_round_trip(text: str) -> None:
    assert str(Cluster.parse(text)) == text
    assert Cluster.parse(str(Cluster.parse(text))) == Cluster.parse(text)


@pytest.mark.parametrize("text", TEXTS)
def test_file_round_trip(text: str, tmp_path: Path) -> None:
    cluster = Cluster.parse(text)
    cluster.save(tmp_path / "cluster.toml")
    assert Cluster.load(tmp_path / "cluster.toml") == cluster


def test_parse_numbers() -> None:
    cluster = Cluster.parse("4x8xa100-80gb")
    assert cluster.device_count == 32
    assert len(cluster.nodes) == 4
    assert cluster.device(31).memory_bytes == 80 * 2**30
    assert cluster.device(0).peak("bfloat16") == 312e12
    assert cluster.device(0).peak("int64") == 19.5e12
    assert Cluster.parse("1x8xH100") == Cluster.parse("8xH100")
    assert len({Cluster.parse("8xH100"), Cluster.parse("8xH100")}) == 1


def test_two_levels_of_links() -> None:
    cluster = Cluster.parse("2x8xA100-80GB")
    assert cluster.link(0, 7).name == "NVLink3"
    assert cluster.link(7, 8).name == "InfiniBand-200"
    assert cluster.link(7, 8).bandwidth == 25e9
    assert cluster.group_link([0, 1, 2]).bandwidth == 300e9
    assert cluster.group_link([3]).name == "NVLink3"
    # One device per node has one port; eight per node send through eight.
    assert cluster.group_link([0, 8]).ring_bandwidth == 25e9
    assert cluster.group_link(range(16)).ring_bandwidth == 200e9
    assert cluster.group_link(range(16)).bandwidth == 25e9
    with pytest.raises(ClusterError, match="no device 16"):
        cluster.link(0, 16)
    with pytest.raises(ClusterError, match="itself"):
        cluster.link(1, 1)


def test_shared_port_and_rings() -> None:
    cluster = Cluster.parse("2x8xV100-16GB@Ethernet-25")
    assert cluster.link(0, 8).bandwidth == 25e9 / 8 / 8
    # as many as send share it
    assert [cluster.link(7, 8, senders).bandwidth for senders in (1, 2, 8, 16)] == [3.125e9 / n for n in (1, 2, 8, 8)]
    assert cluster.group_link(range(16)).ring_bandwidth == 25e9 / 8
    assert cluster.group_link([0, 1, 8]).rings == 1


def test_rings_end_at_the_inner_link() -> None:
    cluster = Cluster.parse("2x8xRTX-4090@8*InfiniBand-400")
    assert cluster.group_link(range(16)).name == "PCIe-4"  # one port is faster already
    cluster = Cluster.parse("2x8xRTX-4090@8*Ethernet-100")
    assert cluster.group_link(range(16)).payload_rate == pytest.approx(0.8 * 31.5e9)
    assert Cluster.parse("2x8xH100").group_link(range(16)).rings == pytest.approx(0.7 * 450 / (0.9 * 50))


def test_a_group_over_nodes_waits_for_a_slow_inner_link() -> None:
    cluster = Cluster.parse("2x2xRTX-3090@2*InfiniBand-400")
    link = cluster.group_link(range(4))
    assert (link.name, link.ring_bandwidth) == ("PCIe-4", 31.5e9)
    between, inside = presets.link("InfiniBand-400"), presets.link("PCIe-4")
    assert link.latency_s == (2 * between.latency_s + 2 * inside.latency_s) / 4
    assert link.sum_step_s == (2 * between.sum_latency_s + 2 * inside.sum_latency_s) / 4 < link.latency_s
    assert cluster.group_link([0, 2]).name == "InfiniBand-400"  # nothing passes inside
    assert cluster.group_link([0, 1, 2]).name == "PCIe-4"
    (node, _) = cluster.nodes
    mesh = Link("wires", 100e9, 1e-6, direct=20e9)  # of which two neighbours have one
    assert Cluster((replace(node, inside=mesh),) * 2).group_link(range(4)).bandwidth == 20e9
    unlike = Cluster((replace(node, inside=Link("slow", 1e9, 1e-6)), node))
    assert unlike.group_link(range(4)).name == "slow" and unlike.group_link([0, 2, 3]).name == "PCIe-4"


def test_between_cpus_gloo_scatters_what_it_summed_whole() -> None:
    hosts = Cluster.parse("2x2xcpu@Ethernet-25")
    assert [hosts.group_link(group).scatter_rounds for group in ([0, 1], [0, 2], range(4))] == [2, 2, 2]
    assert Cluster.parse("2x2xH100@Ethernet-25").group_link(range(4)).scatter_rounds == 1


def test_of_two_links_the_one_with_less_payload_is_the_slower() -> None:
    """Both move 12.5e9 bytes/s, but TCP leaves two thirds of that."""
    kinds = ("1xA100-40GB@InfiniBand-100", "1xA100-40GB@Ethernet-100")
    first, second = Cluster.parse("+".join(kinds)), Cluster.parse("+".join(reversed(kinds)))
    for cluster in (first, second):
        assert cluster.link(0, 1).name == cluster.group_link([0, 1]).name == "Ethernet-100"
    assert first.link(0, 1) == second.link(0, 1) and first.group_link([0, 1]) == second.group_link([0, 1])
    fast, slow = Link("a", 10e9, 1e-6, efficiency=0.5), Link("b", 9e9, 1e-6, efficiency=0.9)
    assert slowest([slow, fast]) is slowest([fast, slow]) is fast


def test_nodes_may_differ() -> None:
    cluster = Cluster.parse("8xH100+4xA100-40GB")
    assert [device.name for device in cluster.devices] == ["H100"] * 8 + ["A100-40GB"] * 4
    assert cluster.link(0, 11).name == "InfiniBand-200"
    assert cluster.node_of(7) == 0 and cluster.node_of(8) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("8xA100", ["did you mean A100-40GB or A100-80GB? known", "RTX-4090", "cluster.toml"]),
        ("8xH1000", ["H100", "did you mean"]),
        ("8xH100@NVLink9", ["unknown link", "NVLink4"]),
        ("eight", ["NODESxDEVICESxNAME"]),
        ("cpu:many", ["cpu:4"]),
        ("0x8xH100", ["expected"]),
        ("8xH100@0*Ethernet-25", ["one network port"]),
        ("", ["expected"]),
        ("99999999999x8xH100", ["799,999,999,992 devices", "at most"]),
        ("cpu:99999999999", ["99,999,999,999 devices", "at most"]),
    ],
)
def test_errors_say_what_to_do(text: str, words: list[str]) -> None:
    with pytest.raises(ClusterError) as error:
        Cluster.parse(text)
    for word in words:
        assert word in str(error.value)


GOOD = """
[[nodes]]
count = 2
device = "Mine"
devices = 4
inside = "PCIe-4"
port = "Wire"
ports = 2

[devices.Mine]
kind = "cuda"
memory_gib = 24
peak_flops = { float32 = 30e12, bfloat16 = 120e12 }
memory_bandwidth = 900e9
launch_s = 5e-6

[links.Wire]
bandwidth = 20e9
latency_s = 3e-6
"""


def test_own_devices(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(GOOD)
    cluster = Cluster.load(path)
    assert cluster.device_count == 8
    assert cluster.device(0) == Device("Mine", "cuda", 24 * 2**30, {"float32": 30e12, "bfloat16": 120e12}, 900e9, 5e-6)
    assert cluster.link(0, 4) == Link("Wire", 10e9, 3e-6)
    cluster.save(path)
    assert Cluster.load(path) == cluster
    assert str(cluster) == "2x4xMine@2*Wire"


def test_own_gpus_without_links_are_joined_by_the_hosts_pcie(tmp_path: Path) -> None:
    """What processes on CPUs share is no link of GPUs."""
    path = tmp_path / "cluster.toml"
    plain = GOOD.replace('inside = "PCIe-4"\nport = "Wire"\nports = 2\n', "")
    path.write_text(plain)
    (node, _) = Cluster.load(path).nodes
    assert (node.inside, node.port) == (presets.link("PCIe-4"), presets.link("Ethernet-100"))
    path.write_text(plain.replace('"cuda"', '"cpu"'))
    (node, _) = Cluster.load(path).nodes
    assert (node.inside, node.port) == (presets.link("SharedMemory"), presets.link("Ethernet-25"))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("devices = 4", 'devices = "4"', "nodes[0].devices"),
        ("devices = 4", "devices = 0", "nodes[0].devices"),
        ("devices = 4", "device_count = 4", "nodes[0].device_count"),
        ('device = "Mine"', 'device = "Yours"', "nodes[0].device"),
        ('device = "Mine"', "device = 3", "nodes[0].device"),
        ('device = "Mine"', 'device = "Nine"', "(this file describes Mine)"),
        ("devices = 4", "devices = 4000000", "nodes[0].devices: expected a whole number from 1 to 1,048,576"),
        ("devices = 4", "devices = 1000000", "nodes: 2,000,000 devices"),
        ("count = 2", f"count = {10**400}", "nodes[0].count"),
        ("ports = 2", f"ports = {10**400}", "nodes[0].ports"),
        ("devices = 4", "", "nodes[0].devices: missing"),
        ('"PCIe-4"', "4", "nodes[0].inside: expected the name of a link"),
        ("memory_gib = 24", "memory_gib = 24e9", "devices.Mine.memory_gib: expected a number from"),
        ("memory_bandwidth = 900e9", f"memory_bandwidth = {10**400}", "devices.Mine.memory_bandwidth"),
        ("memory_bandwidth = 900e9", "memory_bandwidth = 1e-300", "devices.Mine.memory_bandwidth"),
        ("launch_s = 5e-6", "launch_s = 1e308", "devices.Mine.launch_s"),
        ("launch_s = 5e-6", "launch_s = 5e-6\nalone = 0.5", "devices.Mine.alone"),
        ("launch_s = 5e-6", "launch_s = 5e-6\nprocessors = inf", "devices.Mine.processors"),
        ("launch_s = 5e-6", "launch_s = 5e-6\nmeasured = -1", "devices.Mine.measured"),
        (
            "launch_s = 5e-6",
            "launch_s = 5e-6\nattention_by = 0.4",
            "devices.Mine.attention_by: expected a table of shares",
        ),
        ("launch_s = 5e-6", "launch_s = 5e-6\nattention_by = {float32 = 4}", "devices.Mine.attention_by.float32"),
        ("launch_s = 5e-6", "launch_s = 5e-6\nattention_by = {int8 = 0.4}", "devices.Mine.attention_by.int8"),
        ("launch_s = 5e-6", "launch_s = 5e-6\ncontraction_by = {float32 = 2}", "devices.Mine.contraction_by.float32"),
        ("bandwidth = 20e9", 'bandwidth = "20GB"', "Wire.bandwidth: expected a number, found '20GB'; it is in bytes/s"),
        ('kind = "cuda"', "", 'devices.Mine.kind: missing; expected "cuda" or "cpu"'),
        ("launch_s = 5e-6", "launch_s = 5e-6\nprocessors = 82.5", "processors: expected a whole number, found 82.5"),
        ("latency_s = 3e-6", "latency_s = 3e-6\ndirect = -1", "links.Wire.direct"),
        ("[links.Wire]", '[links."a\\nb"]', "expected a name of printable characters"),
        ('"PCIe-4"', '"PCIe-9"', "nodes[0].inside"),
        ("memory_gib = 24", 'memory_gib = "24"', "devices.Mine.memory_gib"),
        ("memory_gib = 24", "memory_gib = -1", "devices.Mine"),
        ("memory_gib = 24", "", "devices.Mine.memory_gib"),
        ("memory_gib = 24", "memory_gib = nan", "devices.Mine"),
        (
            "float32 = 30e12",
            "float32 = nan",
            "peak_flops.float32: expected a number from 1e+06 to 1e+30, found nan; it is in FLOP/s, such as 10e12",
        ),
        ("float32 = 30e12", "float32 = 30", "devices.Mine.peak_flops.float32: expected a number from 1e+06"),
        ("memory_bandwidth = 900e9", "memory_bandwidth = 900", "devices.Mine.memory_bandwidth: expected a number from"),
        ("bandwidth = 20e9", "bandwidth = 20", "links.Wire.bandwidth: expected a number from 1e+06"),
        ("latency_s = 3e-6", "latency_s = 3e-6\ndirect = 5", "links.Wire.direct: expected a number from 1e+06"),
        (
            "latency_s = 3e-6",
            "latency_s = 3",
            "latency_s: expected a number from 0 to 1, found 3; it is in seconds, such as 5e-6",
        ),
        ("launch_s = 5e-6", "launch_s = 5", "devices.Mine.launch_s: expected a number from 0 to 1, found 5"),
        ("float32 = 30e12", 'float32 = "fast"', "devices.Mine"),
        ("float32 = 30e12", "float23 = 30e12", "devices.Mine.peak_flops.float23"),
        ('kind = "cuda"', 'kind = "tpu"', "devices.Mine"),
        ("bandwidth = 20e9", "bandwidth = 0", "links.Wire"),
        ("latency_s = 3e-6", "", "links.Wire.latency_s"),
        ("[[nodes]]", "[[node]]", "node"),
        ("[[nodes]]", "[nodes", "TOML"),
        ("memory_gib = 24", f"memory_gib = {'9' * 5000}", "not readable as TOML: Exceeds the limit (4300 digits)"),
        ("memory_gib = 24", f"memory_gib = {'[' * 5000}", "not readable as TOML"),
    ],
)
def test_file_errors_name_file_and_key(old: str, new: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    assert old in GOOD
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(ClusterError) as error:
        Cluster.load(path)
    assert str(path) in str(error.value)
    assert words in str(error.value)


def test_of_names_in_a_file_case_does_not_matter_and_its_own_go_first(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(GOOD)
    expected = Cluster.load(path)
    own = expected.device(0).name
    path.write_text(GOOD.replace(f'device = "{own}"', f'device = "{own.upper()}"').replace('= "Wire"', '= "wire"'))
    assert path.read_text() != GOOD
    assert Cluster.load(path) == expected
    path.write_text(GOOD.replace(own, "H100").replace('device = "H100"', 'device = "h100"'))
    assert Cluster.load(path).device(0).memory_bytes == expected.device(0).memory_bytes


@pytest.mark.parametrize(
    ("old", "new"), [("memory_gib = 80.0", "memory_gib = 24"), ('inside = "NVLink4"', 'inside = "PCIe-4"'), ("", "")]
)
def test_text_of_what_a_file_describes_under_a_presets_name(old: str, new: str, tmp_path: Path) -> None:
    """A plan keeps the text, by which commands look the cluster up later: the preset's numbers would be others."""
    path = tmp_path / "cluster.toml"
    Cluster.parse("2x4xH100").save(path)
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    text = str(Cluster.load(path))
    assert text == ("2x4xH100 (as described)" if new else "2x4xH100")
    if new:
        with pytest.raises(ClusterError):
            Cluster.parse(text)


def test_text_of_a_device_whose_driver_keeps_some_memory() -> None:
    (node,) = Cluster.parse("4xH100").nodes
    some = replace(node.device, memory_bytes=round(0.99 * node.device.memory_bytes))
    assert str(Cluster((replace(node, device=some),))) == "4xH100"


def test_files_of_any_name_and_with_a_mark_at_their_start(tmp_path: Path) -> None:
    marked, plain = tmp_path / "marked.toml", tmp_path / "cluster"
    marked.write_text(GOOD, encoding="utf-8-sig")
    plain.write_text(GOOD)
    assert read_cluster(str(marked)) == read_cluster(str(plain)) == Cluster.load(plain)
    with pytest.raises(ClusterError, match="cannot read the cluster"):
        read_cluster(str(tmp_path / "none"))


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"none\.toml"):
        Cluster.load(tmp_path / "none.toml")


def test_save_refuses_two_devices_of_one_name(tmp_path: Path) -> None:
    device = presets.device("H100")
    cluster = Cluster((Node.of(device, 1), Node.of(replace(device, launch_s=1.0), 1)))
    with pytest.raises(ClusterError, match="H100"):
        cluster.save(tmp_path / "cluster.toml")


def test_local_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # else local clusters are made of GPUs
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    one, four = Cluster.local(1), Cluster.local(4)
    assert Cluster.local() == one
    assert four == Cluster.parse("cpu:4")
    assert four.device(0).memory_bytes == one.device(0).memory_bytes // 4
    assert four.device(0).peak("float32") == pytest.approx(one.device(0).peak("float32") / 4)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert Cluster.local() == four
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert [node.count for node in Cluster.local().nodes] == [2, 2]


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("Tesla V100-SXM2-32GB", "V100-32GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("Quadro RTX 5000", "RTX-5000"),
        ("NVIDIA RTX 5000 Ada Generation", "RTX-5000-Ada"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("NVIDIA GeForce RTX 3090 Ti", "RTX-3090-Ti"),
        ("NVIDIA GeForce RTX 3090", "RTX-3090"),
        ("NVIDIA RTX A6000", "RTX-A6000"),
        ("NVIDIA L40S", "L40S"),
    ],
)
def test_names_that_the_driver_reports(reported: str, name: str) -> None:
    assert presets.from_cuda_name(reported).name == name


def test_unknown_gpu() -> None:
    with pytest.raises(ClusterError, match=r"autopart calibrate.*cluster\.toml"):
        presets.from_cuda_name("Tesla K80")


def test_every_preset_is_sound() -> None:
    assert {"CPU", "V100-16GB", "V100-32GB", "A100-40GB", "A100-80GB", "H100", "H200"} <= set(presets.devices())
    for name, device in presets.devices().items():
        assert device.peak("float64") <= device.peak("float32") <= max(device.peak_flops.values())
        assert set(device.peak_flops) == set(presets.DTYPES)
        defaults = presets.defaults(name, presets.device(name).kind)
        assert defaults.inside.latency_s <= defaults.between.latency_s or name == "CPU"
