"""Numbers and plans as text."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_plan import example

from autopart.report.table import (
    considered_table,
    format_collectives,
    format_devices,
    format_memory,
    plan_header,
    plan_text,
    stage_table,
)
from autopart.report.units import (
    counted,
    format_apart,
    format_bytes,
    format_count,
    format_enough,
    format_flops,
    format_seconds,
    format_share,
)


def test_enough_bytes_are_not_fewer() -> None:
    assert [format_enough(number) for number in (0, 1023, 2**10, 2**31, 2**31 + 1, 100.2 * 2**30)] == [
        *("0 B", "1023 B", "1 KiB", "2 GiB", "2.01 GiB", "101 GiB"),
    ]
    for number in (1025, 10 * 2**20 - 1, 10 * 2**20 + 1, 2**40 - 1, 123456789):
        size, unit = format_enough(number).split()
        assert number <= float(size) * 1024 ** ["B", "KiB", "MiB", "GiB"].index(unit) < 1.01 * number + 2


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (80 * 2**30, "80 GiB"),
        (2**50, "1 PiB"),
        (1000 * 2**20, "1000 MiB"),
    ],
)
def test_bytes(number: int, text: str) -> None:
    assert format_bytes(number) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1500, "1.5K"),
        (124_439_808, "124M"),
        (175e9, "175B"),
        (1.5e13, "15T"),
        (999_960, "1M"),
        (246.948, "247"),
        (5.25, "5.25"),
    ],
)
def test_counts(number: float, text: str) -> None:
    assert format_count(number) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(55.2e9, "55.2 GFLOP/s"), (312e12, "312 TFLOP/s"), (999e6, "999 MFLOP/s"), (1e5, "0.1 MFLOP/s")],
)
def test_flops(number: float, text: str) -> None:
    assert format_flops(number) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 s"),
        (0.0123, "12.3 ms"),
        (2.5e-6, "2.5 us"),
        (3e-9, "3 ns"),
        (1.5, "1.5 s"),
        (125, "2 min 05 s"),
        (7265, "2 h 01 min"),
        (0.999_96, "1 s"),
        (99.96, "1 min 40 s"),
    ],
)
def test_seconds(number: float, text: str) -> None:
    assert format_seconds(number) == text


@pytest.mark.parametrize(
    ("numbers", "texts"),
    [
        ((0.0123, 0.0124), ("12.3 ms", "12.4 ms")),
        ((5.5514e-3, 5.5470e-3), ("5.551 ms", "5.547 ms")),
        ((0.999_999, 1.000_001), ("0.999999 s", "1.00000 s")),
        ((255.169, 255.2), ("255.17 s", "255.20 s")),
        ((0.5, 0.5), ("500 ms", "500 ms")),
    ],
)
def test_seconds_that_are_nearly_alike(numbers: tuple[float, float], texts: tuple[str, str]) -> None:
    assert format_apart(*numbers) == texts


def test_small_formats() -> None:
    assert [counted(number, "microbatch") for number in (0, 1, 2)] == [
        "0 microbatches",
        "1 microbatch",
        "2 microbatches",
    ]
    assert counted(1, "device") == "1 device" and counted(3, "device") == "3 devices"
    assert "schedule 1f1b, 1 microbatch, " in "\n".join(plan_header(replace(example(), microbatches=1)))
    assert format_share(0.0417) == "4.2%"
    assert format_devices([0, 1, 2, 3]) == "0-3"
    assert format_devices([0, 2, 3, 9]) == "0, 2-3, 9"
    assert format_memory(2**30, 4 * 2**30) == "1 GiB / 4 GiB (25.0%)"
    assert format_memory(5 * 2**30, 4 * 2**30).endswith("OVER")
    assert format_memory(2**30, 0) == "1 GiB"
    assert format_collectives({}) == "-"
    assert format_collectives({"all_reduce": {"calls": 4, "bytes": 2**23}}) == "4 all_reduce 8 MiB"


def test_header_answers_how_good() -> None:
    text = "\n".join(plan_header(example()))
    for words in (
        *("hf:gpt2 on 8xH100", "batch 32", "pp 2 x dp 2 x tp 2", "schedule 1f1b, 4 microbatches", "step time 250 ms"),
        *("lower bound 240 ms", "gap 4.2%", "solved in 2 s", "131K tokens/s", "note: batch norm"),
    ):
        assert words in text
    plan = example()
    assert "128 samples/s" in "\n".join(plan_header(replace(plan, tokens=plan.batch)))
    other = replace(plan.stages[1], mesh=(("dp", 4), ("tp", 1)))
    unlike = replace(plan, stages=(plan.stages[0], other))
    assert "pp 2, dp x tp by stage 2x2, 4x1" in "\n".join(plan_header(unlike))


def test_header_tells_what_replicas_divide() -> None:
    """Also where nobody asked for it: some optimizers need whole parameters."""
    plan = replace(example(), zero={"a.weight": 3, "b.weight": 1, "c.weight": 1})
    assert plan_header(plan)[1].endswith(", zero 1 and 3") and plan.to_json_object()["zero"] == dict(plan.zero)
    assert "zero" not in plan_header(replace(plan, zero={"a.weight": 0}))[1]


def test_stage_table() -> None:
    lines = stage_table(example().stages).splitlines()
    assert len(lines) == 4
    for words in ("stage", "devices", "blocks", "mesh", "parameters", "forward", "backward", "memory / capacity"):
        assert words in lines[0]
    for words in ("0-3", "0-5", "dp 2 x tp 2", "62M", "12 ms", "24 ms", "3 GiB / 80 GiB", "24 all_reduce 8 MiB"):
        assert words in lines[2]
    assert plan_text(example()).endswith("\n".join(lines))


def test_considered_table() -> None:
    lines = considered_table(
        [{"dp": 8, "step_time_s": 0.3, "memory_bytes": 2**30}, {"dp": 4, "why": "memory"}]
    ).splitlines()
    assert lines[0].split() == ["dp", "step", "time", "memory", "why"]
    assert "300 ms" in lines[2] and "1 GiB" in lines[2]
    assert "memory" in lines[3] and "-" in lines[3]
    assert "5.92 ms" in considered_table([{"config": "pp=1", "seconds": 0.00591727}]), "as a plan has its candidates"
