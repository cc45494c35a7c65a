"""One process of ``coverage.py``: takes models one after another, and says after each stage how it went.

Requests and answers are lines of JSON. Ranks are kept from plan to plan and from model to model.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from coverage_sizes import spec

import autopart.verify
from autopart.analysis import Analysis, analyze
from autopart.models import load_model
from autopart.planner import make_plan
from autopart.realize import realize
from autopart.runtime.manifest import Manifest
from autopart.verify import LEARNING_RATE, Subject, compare_emitted, prepare
from autopart.verify.reference import divide, train_reference
from clusters import ideal
from launch import ChildFailure, run_kept_job

# The number of microbatches is given everywhere: each other one would be a search of its own.
PLANS: dict[str, dict[str, int]] = {
    "pp2": {"pp": 2, "dp": 1, "tp": 1, "microbatches": 2},
    "tp2": {"pp": 1, "dp": 1, "tp": 2, "microbatches": 1},
    "dp2": {"pp": 1, "dp": 2, "tp": 1, "microbatches": 2},
    "pp2xtp2": {"pp": 2, "dp": 1, "tp": 2, "microbatches": 2},
}
BATCH, SEQ, STEPS = 8, 16, 2
SOLVER_S = 10.0  # for one solver call: any plan serves here, the best or not
PASS = "pass"
_SPLITS = ("dp", "microbatches")


def stages(request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What happened, stage by stage: ``{"stage": …, "result": "pass" or why not, "plan": its name or ""}``."""
    name, task = request["family"], request["task"]
    try:
        text = request["spec"] or spec(name, task, batch=BATCH, seq=SEQ)
        yield {"stage": "spec", "result": text}
        loaded = load_model(text)
    except Exception as error:
        yield _said("build", error)
        return
    count = sum(parameter.numel() for parameter in loaded.model.parameters())
    yield {"stage": "build", "result": PASS, "parameters": count}
    if count > 20_000_000:
        yield {"stage": "build", "result": f"its {count / 1e6:.0f} M parameters are not small; no rule for its fields"}
        return
    try:
        subject = prepare(loaded)
    except Exception as error:
        yield _said("capture", error)
        return
    yield {"stage": "capture", "result": PASS}
    try:
        analysis = analyze(subject.program)
    except Exception as error:
        yield _said("batch", error)
        return
    yield {"stage": "batch", "result": analysis.split.flaw or PASS}
    for plan in request["plans"]:
        yield _under(plan, subject, analysis, request["verify"], request["limit_s"])


def _under(name: str, subject: Subject, analysis: Analysis, verified: bool, limit_s: float) -> dict[str, Any]:
    limits = dict(PLANS[name])
    if analysis.split.flaw:
        if limits["dp"] > 1:
            return {"stage": "batch", "plan": name, "result": "the batch may not be split"}
        limits["microbatches"] = 1
    stage = "plan"
    try:
        cluster = ideal(limits["pp"] * limits["dp"] * limits["tp"])
        plan = make_plan(
            subject.program,
            cluster,
            batch=subject.program.batch,
            analysis=analysis,
            recompute="none",
            meshes="equal",
            time_limit_s=SOLVER_S,
            **limits,  # type: ignore[arg-type]
        )
        sharded = len(plan.strategies)
        if not verified:
            return {"stage": "plan", "plan": name, "result": PASS, "sharded": sharded}
        stage = "verify"
        with tempfile.TemporaryDirectory(prefix="autopart-coverage-") as folder:
            program = Path(folder) / "program"
            realize(subject.program, plan, analysis).save(program)
            found = compare_emitted(program, subject, plan=plan, steps=STEPS, timeout_s=limit_s)
            moved = 0.0 if found.equal else _own_spread(program, subject)
    except Exception as error:
        return {**_said(stage, error), "plan": name}
    result = PASS
    if not found.equal:
        worst = max(found.groups, key=lambda group: max(group.gradient or 0.0, group.parameter))
        result = (
            f"differs: loss {found.loss_difference:.0e}, gradients {found.gradient_difference:.0e}, "
            f"parameters {found.parameter_difference:.0e} (most in {worst.group}); the plain model's own parameters by "
            f"{moved:.0e} where its weights change in the last digit"
        )
    elif not all(stage.as_planned for stage in found.traffic):
        result = "equal, but the collectives are not those of the plan"
    return {"stage": "verify", "plan": name, "result": result, "sharded": sharded}


def _own_spread(program: Path, subject: Subject) -> float:
    """How far the plain model's parameters end from themselves, as ``verify`` measures, if their last digit changes."""
    manifest = Manifest.load(program)
    division = divide(manifest, subject)
    before = copy.deepcopy(subject.model.state_dict())
    expected = train_reference(subject, manifest, division, STEPS, LEARNING_RATE).state
    try:
        with torch.no_grad():
            for parameter in subject.model.parameters():
                parameter.mul_(1 + torch.finfo(parameter.dtype).eps * torch.randint_like(parameter, -1, 2))
        found = train_reference(subject, manifest, division, STEPS, LEARNING_RATE).state
    finally:  # the plans that follow start from it
        subject.model.load_state_dict(before)
    floating = {name: tensor for name, tensor in expected.items() if tensor.is_floating_point() and tensor.numel()}
    largest = max(float(tensor.abs().max()) for tensor in floating.values())
    return max(
        float((found[name] - tensor).abs().max()) / max(float(tensor.abs().max()), 1e-3 * largest)
        for name, tensor in floating.items()
    )


def _said(stage: str, error: Exception) -> dict[str, Any]:
    text = " ".join(str(error).split())
    if isinstance(error, ChildFailure):
        text = next(iter(error.failures.values())).strip().splitlines()[-1]
    return {"stage": stage, "result": f"{type(error).__name__}: {text}"[:900]}


def main() -> None:
    # What libraries print must not reach the one who reads the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    replace: Callable[[object, str, object], None] = setattr
    replace(autopart.verify, "run_local_job", run_kept_job)
    for line in sys.stdin:
        last = time.monotonic()
        for answer in stages(json.loads(line)):
            now = time.monotonic()
            answers.write(json.dumps({**answer, "seconds": round(now - last, 1)}) + "\n")
            last = now
        answers.write(json.dumps({"stage": "end"}) + "\n")
        torch._dynamo.reset()
        gc.collect()


if __name__ == "__main__":
    main()
