"""Explanations and comparisons of plans as text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

from autopart.breakdown import TRANSFERS, Breakdown, SlowestTransfer, StageBreakdown, columns, rest_of
from autopart.plan import Plan
from autopart.report.decisions import decision_rows
from autopart.report.units import format_bytes, format_count, format_seconds, format_share

if TYPE_CHECKING:
    from autopart.explain import Comparison
    from autopart.rank_peaks import RankPeak
    from autopart.reshardings import Resharding

_REASON_WIDTH = 90
_FORMATS: Mapping[str, Callable[[float], str]] = {
    "step time": format_seconds,
    "lower bound": format_seconds,
    "tokens per second": format_count,
    "TFLOP/s per device": lambda number: f"{number:.3g}",
    "memory of the fullest device": format_bytes,
}


def binding_text(plan: Plan, found: Breakdown, unfit: int) -> str:
    """What sets the pace, and whether memory has a say. unfit: candidates that did not fit."""
    slowest, fullest = found.stages[found.slowest], found.stages[found.fullest]
    total = plan.step_time_s or sum(slowest.seconds.values()) or 1.0
    which = "the only stage is" if len(plan.stages) == 1 else _subject(plan, slowest)
    shares = ", ".join(
        f"{name.replace('_', '-')} {format_share(seconds / total)}"
        for name, seconds in sorted(slowest.seconds.items(), key=lambda item: -item[1])
        if seconds / total >= 0.0005
    )
    binds = "transfers between stages" if found.binds == TRANSFERS else found.binds.replace("_", "-")
    lines = [f"pace: {which} bound by {binds} ({shares})"]
    if found.transfer is not None and slowest.transfers_s:
        lines.append(f"transfers: {_transfer(found.transfer)}")
    if slowest.collectives_s is None:
        lines.append("note: links are not known, or the plan does not tell axes apart: compute includes collectives")
    if slowest.hidden_s:
        lines.append(f"hidden: {format_seconds(slowest.hidden_s)} of collectives pass beside other work")
    if fullest.capacity_bytes:
        lines.append(
            f"memory: {_subject(plan, fullest)} fullest, {format_share(fullest.memory_share)} of "
            f"{'its' if len(fullest.stages) == 1 else 'their'} devices"
            + (f"; {unfit} of {len(plan.considered)} candidates did not fit" if unfit else "")
        )
    return "\n".join(lines)


def _transfer(item: SlowestTransfer) -> str:
    over = f", over {item.link}" if item.link else ""
    back = "nothing" if item.back_s is None else format_seconds(item.back_s)
    return (
        f"the slowest are those of stages {item.source} -> {item.target}, {format_seconds(item.there_s)} a microbatch "
        f"there and {back} back{over}"
    )


def _subject(plan: Plan, stage: StageBreakdown) -> str:
    """``stage 1 is``, ``stages 0 and 2 on A100-80GB are``."""
    one = len(stage.stages) == 1
    return f"{'stage' if one else 'stages'} {_numbers(stage)}{_where(plan, stage)} {'is' if one else 'are'}"


def _where(plan: Plan, stage: StageBreakdown) -> str:
    """The devices of a stage, where stages have unlike ones."""
    if len({other.device for other in plan.stages}) == 1:
        return ""
    return f" on {plan.stages[stage.stages[0]].device}"


def _numbers(stage: StageBreakdown) -> str:
    return " and ".join(map(str, stage.stages))


def breakdown_table(found: Breakdown) -> str:
    """A line per stage: parts of the step, then memory."""
    names = columns(found.stages)
    rows = [
        (
            _numbers(stage),
            *(format_seconds(stage.seconds.get(name, 0.0)) for name in names),
            format_bytes(stage.state_bytes),
            format_bytes(stage.working_bytes),
            format_share(stage.memory_share) if stage.capacity_bytes else "-",
        )
        for stage in found.stages
    ]
    titles = [name.replace("_", "-") for name in names]
    headers = ("stage", *titles, "parameters and optimizer", "activations and rest", "memory used")
    return tabulate(rows, headers=headers, disable_numparse=True)


def peaks_table(peaks: Sequence[RankPeak]) -> str:
    """What each rank of the pipeline holds at most, in the code that is emitted for it."""
    rows = [
        (
            " and ".join(map(str, peak.stages)),
            *map(format_bytes, (peak.parameters, peak.optimizer, peak.step, peak.update, peak.total, peak.planned)),
        )
        for peak in peaks
    ]
    titles = (
        "stage",
        "parameters",
        "optimizer",
        "most in a step",
        "or in its update",
        "in all",
        "planned with libraries",
    )
    return tabulate(rows, headers=titles, disable_numparse=True)


def resharding_table(rows: Sequence[Resharding], step_time_s: float, most: int) -> str:
    """The most expensive ones, per step."""
    cells = [
        (
            item.stage,
            item.op,
            item.value or "(its own exchange)",
            f"{item.source} to {item.target}" if item.source else "-",
            f"{item.kind.replace('_', '-')} {item.direction}" + (f" on {item.axis}" if item.axis != "tp" else ""),
            item.calls,
            format_bytes(item.bytes),
            format_seconds(item.seconds),
            format_share(item.seconds / step_time_s) if step_time_s else "-",
        )
        for item in rows[:most]
    ]
    headers = ("stage", "op", "value", "placement", "collective", "calls", "bytes", "seconds", "share of step")
    table = tabulate(cells, headers=headers, disable_numparse=True)
    left = len(rows) - most
    return table if left <= 0 else f"{table}\n… and {left} more, {format_seconds(sum(r.seconds for r in rows[most:]))}"


def runners_table(rows: Sequence[Mapping[str, Any]], step_time_s: float) -> str:
    cells = []
    for row in rows:
        seconds = row.get("seconds")
        cells.append(
            (
                row.get("config", "-"),
                ("at least " if row.get("status") in ("pruned", "untried") else "") + format_seconds(seconds)
                if isinstance(seconds, int | float)
                else "-",
                f"{seconds / step_time_s - 1:+z.1%}" if isinstance(seconds, int | float) and step_time_s else "-",
                _short(str(row.get("reason", ""))),
            )
        )
    return tabulate(cells, headers=("candidate", "step time", "against chosen", "why not"), disable_numparse=True)


def _short(text: str) -> str:
    return text if len(text) <= _REASON_WIDTH else text[: _REASON_WIDTH - 1] + "…"


def comparison_text(names: Sequence[str], found: Comparison, most: int = 12) -> str:
    """Decisions that differ, predicted figures, and where the time of the slowest stage goes.

    most: lines on strategies and storage by op.
    """
    lines = []
    if found.decisions:
        rows, left = decision_rows(found.decisions, most)
        lines.append(tabulate(rows, headers=("decision", *names), disable_numparse=True))
        if left:
            lines.append(f"… and {left} more strategies and storages (all of them with --json)")
        lines.append("")
    else:
        lines += ["the same decisions", ""]
    rows = [_figure_row(name, values, found.units) for name, values in found.figures.items() if any(values)]
    changes = [f"{name} / {names[0]}" for name in names[1:]]
    lines += [tabulate(rows, headers=("predicted", *names, *changes), disable_numparse=True), ""]
    rows = [
        (name.replace("_", "-"), *map(format_seconds, values), *(_added(value, values[0]) for value in values[1:]))
        for name, values in found.parts.items()
    ]
    added = [f"{name} - {names[0]}" for name in names[1:]]
    lines.append(tabulate(rows, headers=("time of the slowest stage", *names, *added), disable_numparse=True))
    return "\n".join(lines)


def _figure_row(name: str, values: Sequence[float], units: Sequence[str]) -> tuple[str, ...]:
    """units: of "tokens per second", each plan's own; what is not the same is not compared."""
    texts = [_FORMATS[name](value) for value in values]
    if name != "tokens per second":
        return (name, *texts, *_changes(values))
    if len(set(units)) == 1:
        return (f"{units[0]} per second", *texts, *_changes(values))
    texts = [f"{text} {unit}" for text, unit in zip(texts, units, strict=True)]
    return ("throughput per second", *texts, *("-" for _ in units[1:]))


def _changes(values: Sequence[float]) -> list[str]:
    return [_ratio(value / values[0]) if values[0] else "-" for value in values[1:]]


def _ratio(number: float) -> str:
    return f"{number:.3f}" if number >= 0.01 else f"{number:.3g}"


def _added(seconds: float, first: float) -> str:
    more, less = rest_of(seconds, first), rest_of(first, seconds)
    return f"+{format_seconds(more)}" if more else f"-{format_seconds(less)}" if less else "0"
