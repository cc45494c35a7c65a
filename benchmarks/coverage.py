"""Which real models autopart handles: every family of transformers, tiny, from configuration to equal parameters.

    python benchmarks/coverage.py [--families GLOB …] [--plans pp2 …] [--jobs 2] [--limit-s 240] [--stop-at plan]
    python benchmarks/coverage.py --missing | --failed | --report

Each model is built, captured, proved to have a batch that may be split, planned, and trained in local processes under
every plan in float64 against the plain model. A model runs in a process of its own kind that is ended after
``--limit-s`` seconds. Beside transformers' families stand modules in plain torch (``coverage_models.py``) and, where
they are installed, models of diffusers and x-transformers (``coverage_libraries.py``).

Results are kept in ``build/coverage.jsonl`` and added to; docs/coverage.md is written from them, also when the run is
interrupted. Without that file the run goes on from the page. Models come in the order of need: never trained, failed,
longest ago.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import importlib.util
import inspect
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from datetime import date
from pathlib import Path
from typing import Any

import coverage_libraries
import coverage_models
from coverage_report import failed_stage, read, write
from coverage_sizes import SOUND, TASKS

ROOT = Path(__file__).resolve().parent.parent
# Models that are made by a function: the row's head, where they are, how their names begin, which library they need.
MADE = (
    ("plain torch", coverage_models, "", "torch"),
    ("diffusers", coverage_libraries, "diffusers_", "diffusers"),
    ("x-transformers", coverage_libraries, "x_transformers_", "x_transformers"),
)
PLANS = ("pp2", "tp2", "dp2", "pp2xtp2")


class Worker:
    """A process that takes models; ended with its ranks when one takes too long."""

    def __init__(self) -> None:
        paths = [str(ROOT / "tests"), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
        environment.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "benchmarks" / "coverage_worker.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
            start_new_session=True,
        )
        self.lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def run(self, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """The row of one model; ``ended`` says that this worker is of no more use."""
        row: dict[str, Any] = {"family": request["family"], "task": request["task"], "stages": {}, "plans": {}}
        row |= {"date": date.today().isoformat(), "state": state(), "times": {}}
        start = time.monotonic()
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        while True:
            try:
                line = self.lines.get(timeout=max(0.0, start + limit_s - time.monotonic()))
                reason = "the process died (out of memory?)"
            except queue.Empty:
                line, reason = None, f"took more than {limit_s:g} s"
            if line is None:
                _stopped(row, request, reason)
                self.stop()
                row["ended"] = True
                break
            answer = json.loads(line)
            if answer["stage"] == "end":
                break
            row["times"][answer.get("plan") or answer["stage"]] = answer.pop("seconds")
            if answer["stage"] == "spec":
                row["spec"] = answer["result"]
            elif answer.get("plan"):
                row["plans"][answer["plan"]] = answer
            else:
                row["stages"][answer["stage"]] = answer["result"]
                row.update({key: answer[key] for key in ("parameters",) if key in answer})
        row["seconds"] = round(time.monotonic() - start, 1)
        return row

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@functools.cache
def state() -> str:
    """The commit of the code that is run, with a ``+`` where files but the page differ from it; '' outside git."""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    changed = subprocess.run([*git, "diff", "--name-only", "HEAD"], capture_output=True, text=True).stdout.split()
    return head.stdout.strip() + "+" * any(file != "docs/coverage.md" for file in changed)


def _stopped(row: dict[str, Any], request: dict[str, Any], reason: str) -> None:
    """Notes the stage in which the time was over."""
    missing = next((stage for stage in ("build", "capture", "batch") if stage not in row["stages"]), None)
    if missing is not None:
        row["stages"][missing] = reason
        return
    plan = next((plan for plan in request["plans"] if plan not in row["plans"]), None)
    if plan is not None:
        row["plans"][plan] = {"stage": "verify" if request["verify"] else "plan", "plan": plan, "result": reason}


def models(patterns: list[str], every_task: bool) -> list[tuple[str, str]]:
    """(family, task): of each family the first head of each group (texts or images, speech, sound) that it has, or all.

    Models of other libraries are left out where these are not installed.
    """
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    tables = {task: getattr(modeling_auto, table) for task, table in TASKS.items()}
    found: list[tuple[str, str]] = []
    for family in sorted(CONFIG_MAPPING_NAMES):
        heads = {task: table[family] for task, table in tables.items() if family in table}
        groups: set[str] = set()
        for task, head in heads.items():
            group = SOUND.get(task, "")
            # voxtral's model of sound and text is its model of text
            again = [other for other in found if other[0] == family and heads[other[1]] == head]
            if every_task or (group not in groups and not again):
                found.append((family, task))
            groups.add(group)
    found += [(name, head) for head, names in made().items() for name in names]
    return [(name, head) for name, head in found if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]


def made() -> dict[str, dict[str, str]]:
    """Head -> name of a model -> ``file.py:function``; of libraries that are installed."""
    found: dict[str, dict[str, str]] = {}
    for head, module, start, library in MADE:
        if importlib.util.find_spec(library) is None:
            continue
        functions = inspect.getmembers(module, inspect.isfunction)
        names = [name for name, function in functions if function.__annotations__.get("return") == "Call"]
        found[head] = {
            name: f"{module.__file__}:{name}" for name in names if name.startswith(start) and not name.startswith("_")
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=["*"], metavar="GLOB", help="families by model_type")
    parser.add_argument("--every-task", action="store_true", help="all heads of a family, not its first only")
    parser.add_argument("--plans", nargs="+", default=list(PLANS), choices=PLANS, metavar="PLAN", help=", ".join(PLANS))
    parser.add_argument("--stop-at", choices=("batch", "plan", "verify"), default="verify", help="the last stage")
    parser.add_argument("--jobs", type=int, default=1, help="models at a time (default: %(default)s)")
    parser.add_argument("--limit-s", type=float, default=240.0, help="seconds for one model (default: %(default)s)")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "coverage.jsonl", help="kept from run to run")
    parser.add_argument("--missing", action="store_true", help="only models that did not come that far yet")
    parser.add_argument("--failed", action="store_true", help="only models that did not come that far, or failed")
    parser.add_argument("--report", action="store_true", help="write the page from what is there; run nothing")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "coverage.md")
    options = parser.parse_args()
    plans = [] if options.stop_at == "batch" else options.plans
    verified = options.stop_at == "verify"
    options.results.parent.mkdir(parents=True, exist_ok=True)
    if not options.results.exists() and options.output.exists():
        options.results.write_text("".join(json.dumps(row) + "\n" for row in read(options.output, PLANS)))
    rows = _rows(options.results)
    needs = {key: _need(rows.get(key), plans, verified) for key in models(options.families, options.every_task)}
    most = "0" if options.missing else "1" if options.failed else "3"
    waiting: queue.Queue[tuple[str, str]] = queue.Queue()
    for key in sorted(needs, key=lambda key: needs[key]):
        if needs[key][0] <= most and not options.report:
            waiting.put(key)
    lock = threading.Lock()

    def work() -> None:
        worker: Worker | None = None
        while True:
            try:
                family, task = waiting.get_nowait()
            except queue.Empty:
                break
            worker = worker or Worker()
            request = {"family": family, "task": task, "plans": plans, "verify": verified, "limit_s": options.limit_s}
            request["spec"] = made().get(task, {}).get(family, "")
            row = worker.run(request, options.limit_s)
            if row.pop("ended", False):
                worker = None
            with lock, options.results.open("a") as file:
                file.write(json.dumps(row) + "\n")
                bad = [text for text in row["stages"].values() if text != "pass"]
                bad += [f"{name}: {item['result']}" for name, item in row["plans"].items() if item["result"] != "pass"]
                print(f"{family} ({task}) {row['seconds']:.1f} s: {'; '.join(bad)[:300] or 'pass'}", flush=True)
        if worker is not None:
            worker.stop()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(options.jobs)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        write(options.output, list(_rows(options.results).values()), PLANS)


def _need(row: dict[str, Any] | None, plans: list[str], verified: bool) -> tuple[str, bool, str]:
    """How a model is sorted: "0" did not come to the last stage under all plans, "1" failed, "2" did; then those of
    another state of the code, and by date.
    """
    if row is None:
        return "0", False, ""
    age = row.get("state", "") == state(), row["date"]
    if failed_stage(row) not in ("", "batch"):
        return "1", *age
    found = [row["plans"].get(plan) for plan in plans]
    settled = all(item and (item["result"] != "pass" or not verified or item["stage"] == "verify") for item in found)
    return "2" if settled else "0", *age


def _rows(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """The newest result of every model."""
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {(row["family"], row["task"]): row for row in sorted(rows, key=lambda row: row["family"])}


if __name__ == "__main__":
    main()
