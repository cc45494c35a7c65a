"""docs/coverage.md from the results of ``coverage.py``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PASS = "pass"
STAGES = ("build", "capture", "batch", "plan", "verify")
_HEAD = """# Coverage of real models

Written by `make coverage` (`benchmarks/coverage.py`, which resumes from `build/coverage.jsonl`). One row per family of
transformers, in a tiny configuration with random weights: two layers, 32 channels, 96 tokens, a batch of 8.

- **build**: transformers makes the model and its inputs from the configuration.
- **capture**: torch.export gives a graph of its training step, without random numbers (dropout is set to 0).
- **batch**: samples may be split, so that replicas and microbatches are possible. A model that fails here still runs
  under pipeline and tensor parallelism.
- a plan's column: `equal` is three AdamW steps in local processes against the plain model in one, float64: losses,
  gradients, parameters within 1e-9, and collectives as planned. `planned` is a plan found, and not run.

A row is the newest result of its model, which may be older than the newest fix; `--families NAME` runs it again. A
failure is named by its stage. Tensor-parallel plans are for devices on which splitting pays, so that ops are sharded:
the column *sharded* counts the names of ops that tp2 shards.
"""


def write(path: Path, rows: Sequence[dict[str, Any]], plans: Sequence[str]) -> None:
    """Writes the page. rows: the newest result of every model."""
    rows = sorted(rows, key=lambda row: (row["family"], row["task"]))
    lines = [_HEAD, "## Summary", "", *_summary(rows, plans), "", "## Reproduce", "", *_commands(), ""]
    lines += ["## What was run", "", *_runs(rows, plans), ""]
    lines += ["## Models", "", _line(["family", "head", "parameters", *plans, "sharded", "why not"])]
    lines += [_line(["---"] * (5 + len(plans)))]
    lines += [_row(row, plans) for row in rows]
    path.write_text("\n".join(lines) + "\n")


def failed_stage(row: dict[str, Any]) -> str:
    """The first stage that failed, "" for none. What stops only a plan that splits the batch is "batch"."""
    for stage, result in row["stages"].items():
        if result != PASS and stage != "batch":
            return str(stage)
    found = [item["stage"] for item in row["plans"].values() if item["result"] != PASS]
    if row["stages"].get("batch", PASS) != PASS:
        found.append("batch")
    return min(found, key=STAGES.index) if found else ""


def _summary(rows: Sequence[dict[str, Any]], plans: Sequence[str]) -> list[str]:
    captured = [row for row in rows if row["stages"].get("capture") == PASS]
    built = [row for row in rows if row["stages"].get("build") == PASS]
    split = sum(row["stages"].get("batch") == PASS for row in rows)
    lines = [
        f"{len(rows)} models: {len(built)} built, {len(captured)} captured, {split} with a batch that may be split.",
        "",
        _line(["plan", "run", "equal", "not equal or failed", "planned, not run", "no plan"]),
        _line(["---"] * 6),
    ]
    for plan in plans:
        results = [row["plans"][plan] for row in rows if plan in row["plans"]]
        run = [item for item in results if item["stage"] == "verify"]
        equal = sum(item["result"] == PASS for item in run)
        planned = sum(item["stage"] == "plan" and item["result"] == PASS for item in results)
        refused = len(results) - len(run) - planned
        lines.append(_line([plan, str(len(run)), str(equal), str(len(run) - equal), str(planned), str(refused)]))
    stages = Counter(failed_stage(row) or "none" for row in rows)
    lines += ["", _line(["first stage that failed", "models"]), _line(["---", "---"])]
    return [*lines, *(_line([stage, str(stages[stage])]) for stage in (*STAGES, "none") if stages[stage])]


def _runs(rows: Sequence[dict[str, Any]], plans: Sequence[str]) -> list[str]:
    """Which models went how far; the others stopped earlier, or their time was limited."""
    lines = []
    for stage, said in (("verify", "Trained and compared"), ("plan", "Planned, not run")):
        for plan in plans:
            names = [row["family"] for row in rows if row["plans"].get(plan, {}).get("stage") == stage]
            if names:
                lines.append(f"- {said} under {plan} ({len(names)}): {', '.join(names)}.")
    return [*lines, "- Not planned under a plan: a dash, or the stage that stopped it, in its column."]


def _commands() -> list[str]:
    return [
        "    make coverage                                                   every family, all four plans: hours",
        "    python benchmarks/coverage.py --stop-at plan --jobs 2           as far as planning: minutes",
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
    return _line([row["family"], row["task"], size, *cells, sharded, "; ".join(reasons)])


def _reason(text: str) -> str:
    """Without the machine's paths and the model's whole name, short."""
    text = re.sub(r"\S*site-packages/", "", text)
    text = re.sub(r"hf:\S+\?.*?(&seq=\d+|&image=\d+|&batch=\d+)+:? ?", "", text)
    text = " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())
    return text if len(text) <= 260 else text[:257] + "…"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
