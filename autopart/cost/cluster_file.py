"""The TOML form of a cluster.

::

    [[nodes]]                        # a row of equal nodes; repeat the table for other kinds
    count = 4                        # how many (default 1)
    device = "A100-80GB"             # a preset, or a table [devices.NAME] of this file
    devices = 8                      # per node
    inside = "NVLink3"               # a preset or [links.NAME]; default: the preset's usual link, of other GPUs PCIe-4
    port = "InfiniBand-200"          # one network port; default: the preset's usual, of other GPUs Ethernet-100
    ports = 8                        # per node, shared by its devices

    [devices.Mine]
    kind = "cuda"
    memory_gib = 24
    peak_flops = { float32 = 30e12, bfloat16 = 120e12 }    # FLOP/s
    memory_bandwidth = 900e9                               # bytes/s
    launch_s = 5e-6
    processors = 82                                        # optional: multiprocessors; without: no tile effects
    contraction = 0.65                                     # optional: shares of the peaks that are reached
    contraction_by = { float32 = 0.9 }                     # optional: the same by type, where types differ
    memory = 0.8
    attention = 0.5                                        # optional: of the peak, what fused attention reaches
    attention_by = { bfloat16 = 0.4 }                      # optional: the same by type, where types differ
    attention_back_by = { bfloat16 = 0.3 }                 # optional: of its backward alone, by type
    host_s = 10e-6                                         # optional: what a GPU's host takes to start an op
    unaligned = 0.45                                       # optional: share of the rate of 16-bit products of odd sizes
    function_s = 0.2e-9                                    # optional: of a CPU, an exponential of one element
    random_s = 5e-9                                        # optional: of a CPU, a random number
    mapped_s = 0.2e-9                                      # optional: of a CPU, a byte of a new tensor of 32 MiB
    alone = 2                                              # optional: times as fast while the host's others wait
    measured = 4                                           # optional: with how many ranks these were calibrated

    [links.Mine]
    bandwidth = 20e9                                       # bytes/s of one device in one direction
    latency_s = 3e-6                                       # seconds of one step of a ring
    efficiency = 0.8                                       # optional: share of the bandwidth that is payload
    direct = 5e9                                           # optional: of one pair, where there is no switch
    sum_latency_s = 2e-6                                   # optional: of one step of an all-reduce, if shorter
    switch_sums = 0.6                                      # optional: share of it that sums in the switch have
    scatter_rounds = 2                                     # optional: times that a reduce-scatter goes around (gloo: 2)
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from autopart.cost import devices as presets
from autopart.cost.devices import GIB, LINK_OPTIONS, Device, Link
from autopart.runtime.errors import ClusterError

_TOP = ("nodes", "devices", "links")
_NODE = ("count", "device", "devices", "inside", "port", "ports")
_DEVICE = ("kind", "memory_gib", "peak_flops", "memory_bandwidth", "launch_s")
_LINK = ("bandwidth", "latency_s")
_OF_CPUS = ("function_s", "random_s", "mapped_s")
_DEVICE_OPTIONS = (
    *("processors", "contraction", "memory", "attention", "alone", "measured", "host_s", "unaligned"),
    *_OF_CPUS,
)
_TIMES = ("launch_s", "host_s", "latency_s", "sum_latency_s", *_OF_CPUS)
_MOST = 2**20
"""Of anything that is counted, and of GiB."""
_LEAST_RATE = 1e6
"""FLOP/s and bytes/s: less than any machine has, and more than any has tera or giga of them."""
_SHARES_OF_1 = ("contraction", "memory", "attention", "unaligned", "efficiency")
_RANGES = {
    "memory_gib": (2.0**-30, float(_MOST)),
    **dict.fromkeys(("memory_bandwidth", "bandwidth", "direct"), (_LEAST_RATE, 1e30)),
    **dict.fromkeys(_TIMES, (0.0, 1.0)),
    **dict.fromkeys(_SHARES_OF_1, (1e-6, 1.0)),
    **dict.fromkeys(("processors", "measured"), (0.0, float(_MOST))),
    "alone": (1.0, float(_MOST)),
    "scatter_rounds": (1.0, 2.0),
    "switch_sums": (0.0, 1.0),
}
"""Least and most by key: what lies outside is a slip of the pen or in another unit, and no seconds come of it."""

_WHOLE = ("processors", "measured")
_SECONDS, _BYTES_PER_S = "seconds, such as 5e-6", "bytes/s, such as 900e9"
_UNITS = {
    "kind": '"cuda" or "cpu"',
    "memory_gib": "GiB, such as 80",
    "peak_flops": "a table of FLOP/s by dtype, such as { float32 = 10e12 }",
    **dict.fromkeys(("memory_bandwidth", "bandwidth", "direct"), _BYTES_PER_S),
    **dict.fromkeys(_TIMES, _SECONDS),
    **dict.fromkeys(_SHARES_OF_1, "shares of 1, such as 0.65"),
}
"""What is expected by key, for people."""

_SHARES = ("shares", "0.4", (1e-6, 1.0))
_BY_DTYPE = {
    "peak_flops": ("FLOP/s", "10e12", (_LEAST_RATE, 1e30)), "contraction_by": _SHARES, "attention_by": _SHARES,
    "attention_back_by": _SHARES,
}  # fmt: skip
"""By key what its table has for each dtype, an example, and least and most."""

Described = TypeVar("Described", Device, Link)
Row = tuple[int, Device, int, Link, Link, int]
"""How many nodes, their device, devices per node, inner link, network port, ports per node."""


def read_nodes(data: Mapping[str, Any], file: str) -> list[Row]:
    """The rows of ``[[nodes]]``. Raises ClusterError naming the file and the key."""
    _check_keys(data, _TOP, file, "")
    own_devices = {
        name: _read_device(name, table, f"{file}: devices.{name}") for name, table in _tables(data, "devices", file)
    }
    own_links = {name: _read_link(name, table, f"{file}: links.{name}") for name, table in _tables(data, "links", file)}
    rows = data.get("nodes")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise ClusterError(f"{file}: nodes: expected at least one [[nodes]] table with device and devices")
    return [_read_row(row, own_devices, own_links, f"{file}: nodes[{index}]") for index, row in enumerate(rows)]


def _read_row(row: Mapping[str, Any], devices: Mapping[str, Device], links: Mapping[str, Link], where: str) -> Row:
    _check_keys(row, _NODE, where, ".")
    device_name = row.get("device")
    if device_name is None:
        raise ClusterError(f"{where}.device: missing; expected the name of a device")
    if not isinstance(device_name, str):
        raise ClusterError(f"{where}.device: expected the name of a device, found {device_name!r}")
    try:
        device = _of_file(device_name, devices) or presets.device(device_name)
    except ClusterError as error:
        raise ClusterError(f"{where}.device: {error}{_own(devices)}") from error
    count = _count(row, "devices", where, None)
    usual = presets.defaults(device.name, device.kind)

    def link(key: str, default: Link) -> Link:
        name = row.get(key)
        if name is None:
            return default
        if not isinstance(name, str):
            raise ClusterError(f"{where}.{key}: expected the name of a link, found {name!r}")
        try:
            return _of_file(name, links) or presets.link(name)
        except ClusterError as error:
            raise ClusterError(f"{where}.{key}: {error}{_own(links)}") from error

    ports = _count(row, "ports", where, max(1, round(usual.ports_per_device * count)))
    return (
        _count(row, "count", where, 1),
        device,
        count,
        link("inside", usual.inside),
        link("port", usual.between),
        ports,
    )


def _of_file(name: str, described: Mapping[str, Described]) -> Described | None:
    """What the file describes under a name, of which case does not matter, as of presets, which it goes before."""
    return described.get(name) or next((item for own, item in described.items() if own.lower() == name.lower()), None)


def _own(described: Mapping[str, Device | Link]) -> str:
    """What the file itself describes, for an error about a name."""
    return f" (this file describes {', '.join(described)})" if described else ""


def _count(row: Mapping[str, Any], key: str, where: str, default: int | None) -> int:
    value = row.get(key, default)
    if value is None:
        raise ClusterError(f"{where}.{key}: missing; expected a whole number of at least 1")
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST:
        raise ClusterError(f"{where}.{key}: expected a whole number from 1 to {_MOST:,}, found {_shown(value)}")
    return value


def _check_numbers(
    table: Mapping[str, Any],
    keys: Iterable[str],
    where: str,
    limits: tuple[float, float] | None = None,
    unit: str | None = None,
) -> None:
    """limits, unit: of all; by key where there are none."""
    for key in keys:
        if key not in table:
            continue
        value, of = table[key], unit or _UNITS.get(key)
        told = f"{_shown(value)}; it is in {of}" if of else _shown(value)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ClusterError(f"{where}.{key}: expected a number, found {told}")
        least, most = limits or _RANGES[key]
        if not least <= value <= most and not (key == "direct" and value == 0):
            raise ClusterError(f"{where}.{key}: expected a number from {least:g} to {most:g}, found {told}")
        if key in _WHOLE and value != round(value):
            raise ClusterError(f"{where}.{key}: expected a whole number, found {told}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _read_device(name: str, table: object, where: str) -> Device:
    assert isinstance(table, dict)
    _check_keys(table, tuple(dict.fromkeys((*_DEVICE, *_DEVICE_OPTIONS, *_BY_DTYPE))), where, ".")
    for key in _DEVICE:
        if key not in table:
            raise ClusterError(f"{where}.{key}: missing; expected {_UNITS[key]}")
    _check_numbers(table, [key for key in (*_DEVICE, *_DEVICE_OPTIONS) if key not in ("kind", "peak_flops")], where)
    for key, (what, example, limits) in _BY_DTYPE.items():
        by_dtype = table.get(key, {})
        if not isinstance(by_dtype, dict):
            raise ClusterError(f"{where}.{key}: expected a table of {what} by dtype, such as {{ float32 = {example} }}")
        _check_keys(by_dtype, presets.DTYPES, f"{where}.{key}", ".")
        _check_numbers(by_dtype, by_dtype, f"{where}.{key}", limits, f"{what}, such as {example}")
    try:
        return presets.device_from_table(name, table)
    except ClusterError as error:
        raise ClusterError(f"{where}: {error}") from error


def _read_link(name: str, table: object, where: str) -> Link:
    assert isinstance(table, dict)
    _check_keys(table, (*_LINK, *LINK_OPTIONS), where, ".")
    for key in _LINK:
        if key not in table:
            raise ClusterError(f"{where}.{key}: missing; expected {_UNITS[key]}")
    _check_numbers(table, (*_LINK, *LINK_OPTIONS), where)
    try:
        return presets.link_from_table(name, table)
    except ClusterError as error:
        raise ClusterError(f"{where}: {error}") from error


def _tables(data: Mapping[str, Any], key: str, file: str) -> list[tuple[str, Any]]:
    found = data.get(key, {})
    if not isinstance(found, dict):
        raise ClusterError(f"{file}: {key}: expected tables [{key}.NAME]")
    for name, table in found.items():
        if not name.strip() or not name.isprintable():
            raise ClusterError(f"{file}: {key}.{name!r}: expected a name of printable characters")
        if not isinstance(table, dict):
            raise ClusterError(f"{file}: {key}.{name}: expected a table, found {table!r}")
    return list(found.items())


def _check_keys(table: Mapping[str, Any], known: Sequence[str], where: str, dot: str) -> None:
    for key in table:
        if key not in known:
            raise ClusterError(f"{where}{dot or ': '}{key}: unknown key; expected {', '.join(known)}")


def write_nodes(rows: Sequence[Row]) -> str:
    """TOML text that :func:`read_nodes` reads back. Raises ClusterError when two devices or links share a name."""
    devices: dict[str, Device] = {}
    links: dict[str, Link] = {}
    lines = ["# A cluster for autopart. Units: GiB, FLOP/s, bytes/s, seconds."]
    for repeat, device, count, inside, port, ports in rows:
        _add(devices, device)
        _add(links, inside)
        _add(links, port)
        lines += ["", "[[nodes]]", f"count = {repeat}", f"device = {_text(device.name)}", f"devices = {count}"]
        lines += [f"inside = {_text(inside.name)}", f"port = {_text(port.name)}", f"ports = {ports}"]
    for device in devices.values():
        lines += ["", f"[devices.{_text(device.name)}]", f"kind = {_text(device.kind)}"]
        lines.append(f"memory_gib = {device.memory_bytes / GIB!r}")
        for key in _BY_DTYPE:
            numbers = ", ".join(f"{_text(name)} = {number!r}" for name, number in getattr(device, key).items())
            lines += [f"{key} = {{ {numbers} }}"] if numbers else []
        lines += [f"memory_bandwidth = {device.memory_bandwidth!r}", f"launch_s = {device.launch_s!r}"]
        lines += [f"{key} = {getattr(device, key)!r}" for key in _DEVICE_OPTIONS]
    for link in links.values():
        lines += [
            "",
            f"[links.{_text(link.name)}]",
            f"bandwidth = {link.bandwidth!r}",
            f"latency_s = {link.latency_s!r}",
            *(f"{key} = {getattr(link, key)!r}" for key in LINK_OPTIONS),
        ]
    return "\n".join(lines) + "\n"


def _add(known: dict[str, Any], item: Device | Link) -> None:
    if known.setdefault(item.name, item) != item:
        raise ClusterError(f"two different devices or links are called {item.name}; give them different names")


def _text(value: str) -> str:
    return json.dumps(value)
