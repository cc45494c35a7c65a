"""``autopart frontier``: what time costs, in memory or in devices."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from autopart.cli.arguments import (
    add_json,
    add_limits,
    add_model,
    check_output,
    file_path,
    limits,
    positive,
    read_cluster,
    read_program,
)
from autopart.cli.progress import working

if TYPE_CHECKING:
    from autopart.frontier import PlanPoint
    from autopart.report.drawing import Drawing
    from autopart.runtime.errors import PlanError

NAME = "frontier"
HELP = "all undominated plans: time against memory or devices"
DESCRIPTION = """Prints the plans that no other beats both in step time and in memory per device, or with --devices the
fastest plan for each number of devices with what a step costs. -o draws them (.svg or .png).

Each plan states how far from the best it can be at most; --step says how much less memory the next plan has to hold
(0 for every plan there is)."""
_OF_MEMORY = ("step", "most")
"""What time against memory takes by these options, and time against devices does not."""
_NUMBER = re.compile(r"\d[\dx.]*(?: (?:h|min|s|ms|us|ns|B|[KMGTP]iB))?(?:, \d[\dx.]*)*")
"""Or a list of such; with its unit, which differs as the number does."""
EXAMPLE = "autopart frontier hf:gpt2 --cluster 8xRTX-3090 --batch 64 -o frontier.svg"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_limits(parser, cluster_required=True)
    parser.add_argument(
        "--devices", type=_counts, metavar="N,N,…", help="time and cost over these numbers of the cluster's devices"
    )
    parser.add_argument(
        "--price", type=_price, metavar="P", help="with --devices: of a device per hour, to state costs in"
    )
    parser.add_argument(
        "--step", type=_share, metavar="PART", help="without --devices: memory saved from plan to plan (default: 0.1)"
    )
    parser.add_argument("--most", type=positive, metavar="N", help="the same: plans made at most (default: 50)")
    parser.add_argument(
        "-o", "--output", type=file_path, metavar="FILE", help="draw the plans, as SVG or PNG by the name's end"
    )
    add_json(parser)


def _counts(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers of devices such as 1,2,4,8")
    return sorted({int(part) for part in parts})


def _price(text: str) -> float:
    return _number(text, float("inf"), "a price above 0")


def _share(text: str) -> float:
    return 0.0 if text in ("0", "0.0") else _number(text, 1.0, "a share below 1 such as 0.1")


def _number(text: str, below: float, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < below:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return value


def run(arguments: argparse.Namespace) -> int:
    from autopart.analysis import analyze
    from autopart.frontier import ended_early, first_devices
    from autopart.planned import planned_frontier
    from autopart.report.units import counted, format_bytes, format_seconds
    from autopart.runtime.files import write_whole

    _check_use(arguments)
    cluster = read_cluster(arguments.cluster)
    check_output(arguments.output, ".svg", ".png")
    for count in arguments.devices or ():
        first_devices(cluster, count)  # more than there are is said before the capture
    program = read_program(arguments)

    def report(point: PlanPoint) -> None:
        text = f"{format_seconds(point.seconds)}, {format_bytes(point.memory_bytes)}"
        print(f"{_layout(point)}: {text}", file=sys.stderr)

    without: list[tuple[int, PlanError]] = []
    given = limits(arguments)
    given |= {name: value for name in _OF_MEMORY if (value := getattr(arguments, name)) is not None}
    with working(f"planning for {cluster}"):
        points = planned_frontier(
            *(program, cluster),
            analysis=analyze(program),
            counts=arguments.devices,
            report=report,
            left_out=lambda count, error: without.append((count, error)),
            **given,
        )

    for count, error in without:
        print(f"no plan for {counted(count, 'device')}: {error}", file=sys.stderr)
    if arguments.output is not None:
        drawn = drawing(points, program.name, bool(arguments.devices), arguments.price)
        is_png = arguments.output.suffix.lower() == ".png"
        write_whole(arguments.output, drawn.png() if is_png else drawn.svg())
        print(f"picture written to {arguments.output}", file=sys.stderr)
    if arguments.json:
        rows = [point.to_json_object() for point in points]
        if arguments.devices:
            rows = [{**row, "dominated": _dominated(point, points)} for row, point in zip(rows, points, strict=True)]
        if arguments.price is not None:
            rows = [{**row, "cost": _cost(point, arguments.price)} for row, point in zip(rows, points, strict=True)]
        print(json.dumps({"points": rows}))
    else:
        print(table(points, bool(arguments.devices), arguments.price))
        for note in notes(points, bool(arguments.devices)):
            print(f"note: {note}")
        if (reason := ended_early(points)) is not None:
            print(f"note: {reason}; --most makes more")
    return 0


def _check_use(arguments: argparse.Namespace) -> None:
    """Raises PlanError for what says nothing of the frontier that is asked for."""
    from autopart.runtime.errors import PlanError

    if arguments.devices is None and arguments.price is not None:
        raise PlanError("--price is for costs over numbers of devices; give these by --devices, or leave --price out")
    unused = [f"--{name}" for name in _OF_MEMORY if getattr(arguments, name) is not None]
    if arguments.devices is not None and unused:
        raise PlanError(
            f"--devices makes one plan for each number, so {' and '.join(unused)} cannot apply; leave one of them out"
        )


def _layout(point: PlanPoint) -> str:
    from autopart.report.table import levels
    from autopart.report.units import counted

    plan = point.plan
    again = [] if plan.recompute == "none" else [f"recompute {plan.recompute}"]
    return ", ".join([plan.layout, counted(plan.microbatches, "microbatch"), plan.schedule, *again, *levels(plan)])


def _cost(point: PlanPoint, price: float | None) -> float:
    """Device-seconds of a step, or what they cost."""
    return point.device_seconds if price is None else point.device_seconds * price / 3600


def table(points: Sequence[PlanPoint], by_count: bool, price: float | None) -> str:
    from tabulate import tabulate

    from autopart.report.units import format_bytes, format_count, format_seconds, format_share

    rows = []
    for mark, point in zip(_marks(points, by_count), points, strict=True):
        row = [
            mark,
            format_seconds(point.seconds),
            format_share(point.gap),
            format_bytes(point.memory_bytes),
            format_count(point.plan.tokens_per_s),
            *([f"{_cost(point, price):.4g}", _dominated(point, points)] if by_count else []),
            _layout(point),
        ]
        rows.append(row)
    cost = "device-seconds" if price is None else "cost of a step"
    headers = [
        "devices" if by_count else "no.",
        *("step time", "gap at most", "memory", f"{points[0].plan.throughput_unit}/s"),
        *([cost, "dominated"] if by_count else []),
        "plan",
    ]
    return tabulate(rows, headers=headers, disable_numparse=True)


def _dominated(point: PlanPoint, points: Sequence[PlanPoint]) -> str:
    """In what another number of devices is better, where one is in time or cost and worse in neither."""
    from autopart.frontier import undominated
    from autopart.report.units import counted

    kept = undominated(points, lambda item: item.device_seconds)
    if point in kept:
        return ""
    other = max((item for item in kept if item.seconds <= point.seconds), key=lambda item: item.seconds)
    worse = ["slower"] if other.seconds < point.seconds else []
    worse += ["dearer"] if other.device_seconds < point.device_seconds else []
    return f"{' and '.join(worse)} than {counted(other.devices, 'device')}"


def _marks(points: Sequence[PlanPoint], by_count: bool) -> list[str]:
    """What names each point in the table, in notes and in the picture."""
    return [str(point.devices if by_count else number) for number, point in enumerate(points, 1)]


def notes(points: Sequence[PlanPoint], by_count: bool) -> list[str]:
    """What plans tell their readers, with which of them it is; what differs but in numbers is told once, of the first.

    Without why the frontier ended, which is nothing of a plan.
    """
    from autopart.frontier import ended_early

    found: dict[str, dict[str, str]] = {}  # by the text without numbers: by mark
    for mark, point in zip(_marks(points, by_count), points, strict=True):
        for note in point.plan.notes:
            if note != ended_early([point]):
                found.setdefault(_NUMBER.sub("#", note), {}).setdefault(mark, note)
    return [
        f"{_of_which(list(told), len(set(told.values())), by_count)}: {next(iter(told.values()))}"
        for told in found.values()
    ]


def _of_which(marks: Sequence[str], texts: int, by_count: bool) -> str:
    """Whose a note is; texts: how many there are that differ in numbers."""
    from autopart.report.units import counted

    def named(some: Sequence[str]) -> str:
        listed = ", ".join(some[:-1]) + " and " + some[-1] if len(some) > 1 else some[0]
        if by_count:
            return f"on {counted(int(some[0]), 'device') if len(some) == 1 else f'{listed} devices'}"
        return f"plan{'s' if len(some) > 1 else ''} {listed}"

    if texts == 1:
        return named(marks)
    return f"{named(marks[:1])} (with other numbers also {named(marks[1:])})"


def drawing(points: Sequence[PlanPoint], name: str, by_count: bool, price: float | None) -> Drawing:
    """Step time over memory, or over cost."""
    from autopart.report.picture import Curve, picture
    from autopart.report.units import counted, format_bytes, format_seconds

    labels = tuple(
        f"{_layout(point)}: {format_seconds(point.seconds)}, {format_bytes(point.memory_bytes)}" for point in points
    )
    marks = tuple(_marks(points, by_count))
    if by_count:
        placed = tuple((_cost(point, price), point.seconds) for point in points)
        cost = "device-seconds of a step" if price is None else "cost of a step"
        curve = Curve("plans", placed, labels, tuple(counted(int(mark), "device") for mark in marks))
        return picture(f"{name}: time and cost", [curve], cost, "step time", lambda x: f"{x:g}", format_seconds)
    placed = tuple((point.memory_bytes / 2**30, point.seconds) for point in points)
    curve = Curve("plans", placed, labels, marks, stairs=True)
    title, across = f"{name}: time and memory", "GiB of the fullest device"
    return picture(title, [curve], across, "step time", lambda x: f"{x:g}", format_seconds)
