"""``autopart verify``: the parallel program against the model in one process."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

from autopart.cli.arguments import (
    add_json,
    add_limits,
    add_model,
    limits,
    positive,
    read_cluster,
    read_model,
    refuse_limits,
)
from autopart.cli.progress import Progress, hushed

if TYPE_CHECKING:
    from autopart.verify import Verification

NAME = "verify"
HELP = "train in local processes and compare with one process"
DESCRIPTION = """Emits the program, runs it in local processes, and compares it with the plain model in one process.

Compared in float64: the loss of every step, every gradient of the first step, and all parameters after the last step
of AdamW. Exit status 0 when equal, 1 when not, 2 when it could not run. Choose a small model: it is trained here."""
EXAMPLE = (
    "autopart verify 'hf:llama?num_hidden_layers=4&hidden_size=64&num_attention_heads=4&seq=16' "
    "--cluster cpu:4 --pp 2 --tp 2"
)
DIFFERENT = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, dtype=None)
    add_limits(parser, cluster_required=False)
    parser.add_argument("--plan", type=Path, metavar="FILE", help="a plan made for this model, in place of a cluster")
    parser.add_argument("--steps", type=positive, default=3, metavar="N", help="optimizer steps (default: %(default)s)")
    parser.add_argument(
        "--tolerance", type=_error, default=1e-9, metavar="X", help="largest relative error (default: %(default)s)"
    )
    parser.add_argument("--timeout", type=_seconds, default=600.0, metavar="S", help="seconds (default: %(default)s)")
    add_json(parser)


def _error(text: str) -> float:
    value = _number(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no relative error: a number from 0 on, such as 1e-9")
    return value


def _seconds(text: str) -> float:
    value = _number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0, such as 600")
    return value


def _number(text: str) -> float:
    """Less than nothing for what is no number, or none that ends."""
    try:
        value = float(text)
    except ValueError:
        return -1.0
    return value if math.isfinite(value) else -1.0


def run(arguments: argparse.Namespace) -> int:
    from autopart.plan import Plan
    from autopart.runtime.errors import PlanError

    if (arguments.plan is None) == (arguments.cluster is None):
        raise PlanError("give either --cluster with limits or --plan")

    if arguments.plan is not None:
        refuse_limits(arguments, but=("batch",))
    plan = Plan.load(arguments.plan) if arguments.plan is not None else None
    cluster = read_cluster(arguments.cluster) if plan is None else None
    loaded = read_model(arguments, meta=False, batch=arguments.batch or (plan.batch if plan is not None else None))
    with Progress() as progress, hushed():
        progress("importing")
        from autopart.verify import verify

        found = verify(
            loaded,
            plan=plan,
            cluster=cluster,
            limits=limits(arguments),
            steps=arguments.steps,
            tolerance=arguments.tolerance,
            timeout_s=arguments.timeout,
            progress=progress,
        )
    print(json.dumps(found.to_json_object()) if arguments.json else describe(found))
    return 0 if found.equal else DIFFERENT


def describe(found: Verification) -> str:
    """The verdict, the losses, the largest errors of every parameter group, and the traffic."""
    from tabulate import tabulate

    from autopart.report.units import counted, format_bytes

    verdict = "equal" if found.equal else "NOT EQUAL"
    steps = [
        (index + 1, f"{parallel:.15g}", f"{plain:.15g}", f"{abs(parallel - plain):.1e}")
        for index, (parallel, plain) in enumerate(zip(found.losses, found.reference_losses, strict=True))
    ]
    groups = [
        (item.group, item.tensors, "-" if item.gradient is None else f"{item.gradient:.1e}", f"{item.parameter:.1e}")
        for item in found.groups
    ]
    lines = [
        f"{verdict}: {counted(found.ranks, 'rank')} against one process, tolerance {found.tolerance:g}",
        f"largest relative errors: loss {found.loss_difference:.1e}, gradients {found.gradient_difference:.1e}, "
        f"parameters after {len(found.losses)} steps {found.parameter_difference:.1e}",
        *(f"note: {note}" for note in found.notes),
        "",
        tabulate(steps, headers=("step", "loss, parallel", "loss, one process", "difference"), disable_numparse=True),
        "",
        tabulate(groups, headers=("parameters", "tensors", "gradient", "after the steps"), disable_numparse=True),
    ]
    if any(stage.counted or stage.planned for stage in found.traffic):
        lines.append("")
    for stage in found.traffic:
        if stage.counted or stage.planned:
            sent = ", ".join(f"{calls} {kind} {format_bytes(size)}" for kind, (calls, size) in stage.counted.items())
            verdict = {None: "", True: ", as planned", False: f", planned were {stage.planned}"}[stage.as_planned]
            names = f"stage{'s' if len(stage.stages) > 1 else ''} {', '.join(map(str, stage.stages))}"
            lines.append(f"{names}: collectives of a step: {sent or 'none'}{verdict}")
    return "\n".join(lines)
