"""docs/coverage.md from the results of ``coverage.py``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PASS = "pass"
STAGES = ("build", "capture", "batch", "plan", "verify")
_COLUMNS, _LAST = ("family", "head", "parameters"), ("sharded", "run", "why not")
_HEAD = """# Coverage of real models

Written by `make coverage` (`benchmarks/coverage.py`, which resumes from `build/coverage.jsonl`, or from this page). One
row per family of transformers, in a tiny configuration with random weights: two layers, 32 channels, 96 tokens, a batch
of 8; a further one each for its heads of speech recognition and of audio classification; and one per model in plain
torch (`benchmarks/coverage_models.py`), of diffusers and of x-transformers (`benchmarks/coverage_libraries.py`).

- **build**: transformers makes the model and its inputs from the configuration.
- **capture**: torch.export gives a graph of its training step, without random numbers (dropout is set to 0).
- **batch**: samples may be split, so that replicas and microbatches are possible. A model that fails here still runs
  under pipeline and tensor parallelism.
- a plan's column: `equal` is two AdamW steps in local processes against the plain model in one, float64: losses,
  gradients, parameters within 1e-9, and collectives as planned. `planned` is a plan found, and not run.

A row is the newest result of its model; the column *run* has its date and the commit of the code (with
a ``+``: and changes to it), and it may be older than the newest fix.
`--families NAME` runs it again. A failure is named by its stage. Tensor-parallel plans are for devices on which
splitting pays, so that ops are sharded: the column *sharded* counts the names of ops that tp2 shards.
"""


def write(path: Path, rows: Sequence[dict[str, Any]], plans: Sequence[str]) -> None:
    """Writes the page. rows: the newest result of every model."""
    rows = sorted(rows, key=lambda row: (row["family"], row["task"]))
    lines = [_HEAD, "## Summary", "", *_summary(rows, plans), "", "## Reproduce", "", *_commands(), ""]
    lines += ["## What was run", "", *_runs(rows, plans), ""]
    lines += ["## Models", "", _line([*_COLUMNS, *plans, *_LAST])]
    lines += [_line(["---"] * (len(_COLUMNS) + len(plans) + len(_LAST)))]
    lines += [_row(row, plans) for row in rows]
    path.write_text("\n".join(lines) + "\n")


def read(path: Path, plans: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of a page, as far as it tells: reasons are shortened, and given to the first stage that failed."""
    rows = []
    for line in path.read_text().partition("## Models")[2].splitlines()[4:]:
        cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        family, task, size = cells[:3]
        sharded, *dates, why = cells[3 + len(plans) :]
        row: dict[str, Any] = {
            "family": family,
            "task": task,
            "stages": {},
            "plans": {},
            "date": "".join(dates).strip("–").partition(" ")[0],
            "state": "".join(dates).partition(" ")[2],
        }
        if size != "–":
            row["parameters"] = int(size.replace(",", ""))
        broken = next((cell for cell in cells[3:] if cell in STAGES[:2]), "")
        for stage in STAGES[: STAGES.index(broken) if broken else 2]:
            row["stages"][stage] = PASS
        if broken:
            row["stages"][broken] = why
        found = re.finditer(rf"({'|'.join(plans)}): (.*?)(?=; \w+: |$)", why)
        reasons = {match[1]: match[2] for match in found}
        if not broken:
            split = why.partition("; ")[0] if why and not re.match(rf"({'|'.join(plans)}): ", why) else PASS
            row["stages"]["batch"] = split
        for plan, cell in zip(plans, cells[3:], strict=False):
            if cell in ("equal", "planned"):
                row["plans"][plan] = {"stage": "verify" if cell == "equal" else "plan", "plan": plan, "result": PASS}
            elif cell in STAGES[2:]:
                row["plans"][plan] = {"stage": cell, "plan": plan, "result": reasons.get(plan, why)}
        if "tp2" in row["plans"] and sharded != "–":
            row["plans"]["tp2"]["sharded"] = int(sharded)
        rows.append(row)
    return rows


def failed_stage(row: dict[str, Any]) -> str:
    """The first stage that failed, "" for none. What stops only a plan that splits the batch is "batch"."""
    for stage, result in row["stages"].items():
        if result != PASS and stage != "batch":
            return str(stage)
    found = [item["stage"] for item in row["plans"].values() if item["result"] != PASS]
    if row["stages"].get("batch", PASS) != PASS:
        found.append("batch")
    return min(found, key=STAGES.index) if found else ""


def run_of(row: dict[str, Any]) -> str:
    """When a row was run, and of which state of the code."""
    return f"{row['date']} {row.get('state', '')}".strip()


def _summary(rows: Sequence[dict[str, Any]], plans: Sequence[str]) -> list[str]:
    captured = [row for row in rows if row["stages"].get("capture") == PASS]
    built = [row for row in rows if row["stages"].get("build") == PASS]
    split = sum(row["stages"].get("batch") == PASS for row in rows)
    lines = [
        f"{len(rows)} models: {len(built)} built, {len(captured)} captured, {split} with a batch that may be split.",
        "",
        _line(["plan", "run", "equal", "of the captured", "not equal or failed", "planned, not run", "no plan"]),
        _line(["---"] * 7),
    ]
    for plan in plans:
        results = [row["plans"][plan] for row in rows if plan in row["plans"]]
        run = [item for item in results if item["stage"] == "verify"]
        equal = sum(item["result"] == PASS for item in run)
        planned = sum(item["stage"] == "plan" and item["result"] == PASS for item in results)
        refused = len(results) - len(run) - planned
        share = f"{100 * equal / max(1, len(captured)):.1f} %"
        counts = [len(run) - equal, planned, refused]
        lines.append(_line([plan, str(len(run)), str(equal), share, *map(str, counts)]))
    stages = Counter(failed_stage(row) or "none" for row in rows)
    lines += ["", _line(["first stage that failed", "models"]), _line(["---", "---"])]
    return [*lines, *(_line([stage, str(stages[stage])]) for stage in (*STAGES, "none") if stages[stage])]


def _runs(rows: Sequence[dict[str, Any]], plans: Sequence[str]) -> list[str]:
    """How many models were run when, how long they took, and which were not run under all plans."""
    lines = []
    dates = Counter(run_of(row) for row in rows)
    for date in sorted(dates, reverse=True):
        seconds = sorted(row["seconds"] for row in rows if run_of(row) == date and "seconds" in row)
        took = (
            f"; half of them in at most {seconds[len(seconds) // 2]:.0f} s each" if len(seconds) == dates[date] else ""
        )
        names = [row["family"] for row in rows if run_of(row) == date]
        which = "" if dates[date] == max(dates.values()) else f": {', '.join(names)}"
        lines.append(f"- {date or 'Before dates were kept'}: {len(names)} models{took}{which}.")
    for plan in plans:
        names = [row["family"] for row in rows if row["plans"].get(plan, {}).get("stage") == "plan"]
        if names:
            lines.append(f"- Not trained under {plan} ({len(names)}): {', '.join(names)}.")
    return lines


def _commands() -> list[str]:
    return [
        "    make coverage                                                   what is missing, all four plans",
        "    python benchmarks/coverage.py --jobs 2                          every model anew: an hour on two cores",
        "    python benchmarks/coverage.py --failed                          what is missing, and what failed",
        "    python benchmarks/coverage.py --families llama 'bert*'          some families, all four plans",
    ]


def _row(row: dict[str, Any], plans: Sequence[str]) -> str:
    cells = []
    reasons = dict.fromkeys(_reason(result) for result in row["stages"].values() if result != PASS)
    broken = next((stage for stage, result in row["stages"].items() if result != PASS and stage != "batch"), "")
    for plan in plans:
        item = row["plans"].get(plan)
        if item is None:
            cells.append(broken or "–")
        elif item["result"] != PASS:
            cells.append(item["stage"])
            if item["stage"] != "batch":
                reasons[f"{plan}: {_reason(item['result'])}"] = None
        else:
            cells.append("equal" if item["stage"] == "verify" else "planned")
    tp2 = row["plans"].get("tp2", {})
    count = row.get("parameters")
    size = "–" if count is None else f"{count:,}"
    sharded = "–" if "sharded" not in tp2 else str(tp2["sharded"])
    return _line([row["family"], row["task"], size, *cells, sharded, run_of(row) or "–", "; ".join(reasons)])


def _reason(text: str) -> str:
    """Without the machine's paths and the model's whole name, short."""
    text = re.sub(r"\S*site-packages/", "", text)
    text = re.sub(r"hf:\S+\?.*?(&seq=\d+|&image=\d+|&batch=\d+)+:? ?", "", text)
    text = " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())
    return text if len(text) <= 260 else text[:257] + "…"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
